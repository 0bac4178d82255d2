# graphile-worker: a job queue of Node.js programs.  Read by peers.sh.

. "$here/npm/install.sh"

graphile_worker_packages() { npm_packages; }
graphile_worker_install() { npm_install; }
graphile_worker_version() { say "graphile-worker $(npm_version graphile-worker) (node $(node_version), pg $(npm_version pg))"; }
graphile_worker_config() {
	cat <<'MD'
The library with the preset of its own benchmark, "Performance", where its documentation gives 183,000 jobs a second:

| setting | reason | where (worker.graphile.org/docs) |
|---|---|---|
| `concurrentJobs: 24`, `maxPoolSize: 25` | as its benchmark | performance, "Quick stats" |
| `localQueue: { size: 500 }` | a statement takes 500 jobs; off by default | performance, "localQueue" |
| `completeJobBatchDelay: 0`, `failJobBatchDelay: 0` | jobs are completed together; off by default. 0 as in its benchmark; 100 and 250 ms, its advice for a start, were not faster here | performance, "completeJobBatchDelay / failJobBatchDelay"; config |
| `preparedStatements: true` | the default | config, "worker.preparedStatements" |
| tasks without a queue name | named queues run one job at a time | library/add-job, "queueName" |
| c: two processes (`GRAPHILE_PROCESSES`) | two cores; its benchmark runs four on 24 threads. One was as fast while nothing else ran, and slower otherwise; four were slower | performance, "Running the performance tests" |
| c: `runOnce()` | takes jobs until there are none, and resolves when all completions are committed; its benchmark's `--once` | library/run |
| a: `graphile_worker.add_jobs` of three in one call, ten thousand jobs in the table, analysed | one call in place of three; with the plans of an empty table it reads the whole table | sql-add-job, "add_jobs" |
| b: a relay that claims 200 of `app.outbox`, adds 600 jobs by one `add_jobs`, as `addJobs()` sends it, and marks, in one transaction; two of them (`GRAPHILE_RELAYS`) | the bulk call; one relay and the server wait for each other; `addJobs()` itself takes a connection of its own, so that it would not be in the transaction | library/add-jobs; sql-add-job |
| d: the same preset, one process for all subscribers; it listens | its benchmark of latency has this preset too | performance, "Running the performance tests" |

Jobs are deleted when they are done; it keeps none (scaling, "Keep your jobs table small").
MD
}
graphile_worker_main() { "$node" "$here/graphile-worker/main.mjs" "$@"; }
graphile_worker_setup() {
	graphile_worker_subscribers=$(seq -f 's%.0f' -s ' ' 1 "$1")
	graphile_worker_main migrate
	app_outbox_create
	sql -c "CREATE SEQUENCE bench_keys"
}
graphile_worker_why_not() {
	case $1 in
		f) say "it deletes jobs that are done: there is no history in its tables" ;;
		g) say "it has no routing: who adds the jobs names the tasks" ;;
	esac
}
# N jobs of each of some tasks, in one call as its benchmark adds them
graphile_worker_add() { # N TASKS
	sql -c "SELECT count(*) FROM graphile_worker.add_jobs(ARRAY(
		SELECT json_populate_record(NULL::graphile_worker.job_spec, json_build_object('identifier', task,
			'payload', json_build_object('total', 100, 'key', nextval('bench_keys')::text)))
		FROM generate_series(1, $1), unnest('{$2}'::text[]) task))" >/dev/null
}
graphile_worker_count() { # TASK: as a query
	say "SELECT count(*) FROM graphile_worker._private_jobs j JOIN graphile_worker._private_tasks t ON t.id = j.task_id WHERE identifier = '$1'"
}

# a
graphile_worker_record_start() { graphile_worker_add 10000 before; }
graphile_worker_record_sql() {
	local i specs=
	for i in 1 2 3; do
		specs+="${specs:+, }json_populate_record(NULL::graphile_worker.job_spec, '{\"identifier\": \"s$i\", \"payload\": $event_payload}')"
	done
	say "BEGIN;"
	say "INSERT INTO orders (note) VALUES ('x');"
	say "SELECT count(*) FROM graphile_worker.add_jobs(ARRAY[$specs]);"
	say "COMMIT;"
}
graphile_worker_record_check() {
	local i
	for i in 1 2 3; do must_be "jobs of s$i" "$1" "$(graphile_worker_count "s$i")"; done
}

# b
graphile_worker_fanout_load() { app_outbox_load "$1"; }
graphile_worker_fanout() { graphile_worker_main relay "${GRAPHILE_RELAYS:-2}" "$app_outbox_claim" "$app_outbox_mark" $graphile_worker_subscribers; }
graphile_worker_fanout_check() {
	local s
	app_outbox_check "$1"
	for s in $graphile_worker_subscribers; do
		must_be "jobs of $s, each event once" "$1|$1" "SELECT count(*), count(DISTINCT o.id) FROM graphile_worker._private_jobs j
			JOIN graphile_worker._private_tasks t ON t.id = j.task_id LEFT JOIN app.outbox o ON o.id = (j.payload->>'event')::bigint
			WHERE identifier = '$s'"
	done
}

# c
graphile_worker_consume_variants() { echo deleted; }
graphile_worker_consume_load() { graphile_worker_add "$1" s1; }
graphile_worker_consume() { graphile_worker_main consume "${GRAPHILE_PROCESSES:-2}" "$scratch/handled"; }
graphile_worker_consume_check() {
	handled_once "$1"
	must_be "jobs left" 0 "SELECT count(*) FROM graphile_worker._private_jobs"
}

# d: one call that adds a job for each subscriber
graphile_worker_latency_sql() {
	say "SELECT count(*) FROM graphile_worker.add_jobs(ARRAY(SELECT json_populate_record(NULL::graphile_worker.job_spec,
		json_build_object('identifier', task, 'payload', json_build_object('total', 100, 'key', \$1::text)))
		FROM unnest('{${graphile_worker_subscribers// /,}}'::text[]) task))"
}
graphile_worker_consumer_start() {
	start_worker worker "$node" "$here/graphile-worker/main.mjs" work "$1" $graphile_worker_subscribers
	await_line worker ready
}
graphile_worker_consumer_stop() { stop_workers; }
