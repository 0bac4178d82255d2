# pg-boss: a job queue of Node.js programs.  Read by peers.sh.

. "$here/npm/install.sh"

pg_boss_packages() { npm_packages; }
pg_boss_install() { npm_install; }
pg_boss_version() { say "pg-boss $(npm_version pg-boss) (node $(node_version), pg $(npm_version pg))"; }
pg_boss_config() {
	cat <<'MD'
The library.

| setting | reason | where (pgboss.io/api) |
|---|---|---|
| c: `work(queue, { batchSize: 2000, burstWhenBatchFull: true })` | a statement takes 2000 jobs and one completes them; a full batch is followed by the next at once and not after the polling interval. Half the batch was not faster | workers, "batchSize", "burstWhenBatchFull" |
| c: two processes of one worker each (`PGBOSS_PROCESSES`, `LOCAL_CONCURRENCY`) | two cores; one process with `localConcurrency: 2` was not faster | introduction, "You may use as many Node.js instances as desired"; workers, "localConcurrency" |
| c: `kept` | jobs stay as `completed`, for 7 days by default | queues, "deleteAfterSeconds" |
| c: `deleted`: the handler calls `deleteJob()` for its batch | the documented way to leave nothing | workers, "work() with active job deletion" |
| `priority` and `orderByCreatedOn` left alone | an index has this order since 12.x; both are deprecated | the source of fetchNextJob |
| a: the statement that `send()` executes, for each of three queues, in the transaction (`poll`); the same with `notify: true` for the queues (`notify`) | `send(queue, data, { db })` is the documented way into a transaction, and `publish()` does the same for each subscribed queue. pgbench prepares it, the library does not: to its favour | adapters; pubsub; workers, "Low-latency dispatch with LISTEN/NOTIFY" |
| b: a relay that claims 200 of `app.outbox`, calls `insert(queue, jobs, { db })` for each queue, and marks, in one transaction; two of them (`PGBOSS_RELAYS`) | the bulk call; one relay and the server wait for each other | jobs, "insert(name, Job[], options)" |
| d: `notify`: `useListenNotify: true` and `createQueue(name, { notify: true })` | workers are woken at once | workers, "Low-latency dispatch with LISTEN/NOTIFY" |
| d: `poll`: `pollingIntervalSeconds: 0.5` | the smallest; 2 by default | workers, "pollingIntervalSeconds" |
| d: `batchSize: 100`, `burstWhenBatchFull: true`, one worker a queue | with batches of 1 each job takes two statements of its own | workers |
| h: `deleteAfterSeconds` 300, `maintenanceIntervalSeconds` and `superviseIntervalSeconds` 60 | what the work is about; maintenance is once a day by default | queues, "Retention options"; constructor |
| `schedule: false`; `supervise: false` in the relay | it schedules nothing; upkeep is the workers' | constructor, "Operations options" |
| queues in the common table | `partition: true` is against noisy neighbours; there are none | queues, "partition" |
MD
}
pg_boss_main() { "$node" "$here/pg-boss/main.mjs" "$@"; }
pg_boss_setup() {
	pg_boss_subscribers=$(seq -f 's%.0f' -s ' ' 1 "$1")
	pg_boss_retention=
	[ "$variant" = notify ] && pg_boss_wakeup=notify || pg_boss_wakeup=poll
	pg_boss_main setup "$pg_boss_wakeup" $pg_boss_subscribers
	app_outbox_create
	sql -c "CREATE SEQUENCE bench_keys"
}
pg_boss_why_not() { case $1 in g) say "its routing (subscribe, publish) has no bulk form: publish() looks the queues up and sends to each for every single event";; esac; }
# the jobs of each queue
pg_boss_check() { # N WHAT STATE
	local s
	for s in $pg_boss_subscribers; do
		must_be "jobs of $s $2" "$1" "SELECT count(*) FROM pgboss.job WHERE name = '$s' AND state = '$3'"
	done
}

# a
pg_boss_record_variants() { echo poll notify; }
pg_boss_record_sql() {
	say "BEGIN;"
	say "INSERT INTO orders (note) VALUES ('x');"
	pg_boss_main sql "$event_payload" s1 s2 s3
	say "COMMIT;"
}
pg_boss_record_check() { pg_boss_check "$1" made created; }

# b
pg_boss_fanout_load() { app_outbox_load "$1"; }
pg_boss_fanout() { pg_boss_main relay "${PGBOSS_RELAYS:-2}" "$app_outbox_claim" "$app_outbox_mark" $pg_boss_subscribers; }
pg_boss_fanout_check() {
	local s
	app_outbox_check "$1"
	for s in $pg_boss_subscribers; do
		must_be "jobs of $s, each event once" "$1|$1" "SELECT count(*), count(DISTINCT o.id) FROM pgboss.job j
			LEFT JOIN app.outbox o ON o.id = (j.data->>'event')::bigint WHERE name = '$s' AND state = 'created'"
	done
}
pg_boss_history() {
	app_outbox_history "$1"
	sql -c "INSERT INTO pgboss.job (name, data, state, policy, started_on, completed_on)
		SELECT s, jsonb_build_object('total', 100, 'event', i), 'completed', 'standard', now(), now()
		FROM generate_series(1, $1) i, unnest('{${pg_boss_subscribers// /,}}'::text[]) s"
}

# c
pg_boss_consume_variants() { echo kept deleted; }
pg_boss_consume_load() {
	sql -c "INSERT INTO pgboss.job (name, data, policy) SELECT 's1', jsonb_build_object('total', 100, 'key', nextval('bench_keys')::text), 'standard'
		FROM generate_series(1, $1)"
}
pg_boss_consume() {
	pg_boss_main consume "${PGBOSS_PROCESSES:-2}" "$scratch/handled" "$(sql -c "SELECT count(*) FROM pgboss.job WHERE state = 'created'")" "$variant"
}
pg_boss_consume_check() {
	handled_once "$1"
	if [ "$variant" = deleted ]; then must_be "jobs left" 0 "SELECT count(*) FROM pgboss.job"
	else must_be "jobs, all completed" "$1|$1" "SELECT count(*), count(*) FILTER (WHERE state = 'completed') FROM pgboss.job"; fi
}

# d: what send() executes, in a function that keeps the plans
pg_boss_latency_variants() { echo notify poll; }
pg_boss_latency_sql() { say "SELECT bench_send(\$1::text)"; }
pg_boss_retention() { pg_boss_retention=$1; }
pg_boss_consumer_start() {
	{
		say "CREATE OR REPLACE FUNCTION bench_send(key text) RETURNS void LANGUAGE plpgsql AS \$send\$ DECLARE made uuid; BEGIN"
		pg_boss_main sql '{"total": 100, "key": "@KEY@"}' $pg_boss_subscribers |
			sed "s/'\(\[{.*@KEY@.*}\]\)'::text/replace('\1', '@KEY@', key)/; s/ *;$/ INTO made;/"
		say "END \$send\$;"
	} >"$scratch/send.sql"
	sql -f "$scratch/send.sql"
	start_worker worker env PGBOSS_RETENTION="$pg_boss_retention" "$node" "$here/pg-boss/main.mjs" work "$1" "$pg_boss_wakeup" $pg_boss_subscribers
	await_line worker ready
}
pg_boss_consumer_stop() { stop_workers; }
