# Rows about what becomes of jobs: claimed and completed by clients, or handled
# in the server.  Read by run.sh.

prepare_jobs() {
	sql <<'SQL'
SET client_min_messages = warning;

-- claim and complete until nothing is left, in batches of 100, a commit each
CREATE OR REPLACE PROCEDURE bench.consume(subscription text, INOUT n bigint) LANGUAGE plpgsql AS $$
DECLARE
	c bigint; k int;
BEGIN
	n := 0;
	LOOP
		SELECT max(claim), count(*) INTO c, k FROM outbox.claim(subscription, 100);
		COMMIT;
		EXIT WHEN k = 0;
		PERFORM outbox.complete_many(c);
		COMMIT;
		n := n + k;
	END LOOP;
END $$;

-- the floor: an UPDATE for the lease and one for the end, of the same rows
CREATE OR REPLACE PROCEDURE bench.consume_bare(INOUT n bigint) LANGUAGE plpgsql AS $$
DECLARE
	c bigint := 1000000000; k int; ids bigint[];
	sub int := (SELECT id FROM outbox.subscriptions WHERE name = 's1');
BEGIN
	SET enable_seqscan = off;
	SET plan_cache_mode = force_generic_plan;
	n := 0;
	LOOP
		WITH p AS (SELECT id FROM outbox.jobs
				WHERE subscription_id = sub AND done_at IS NULL AND dead_at IS NULL AND due_at <= now()
				ORDER BY due_at, id LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED),
			u AS (UPDATE outbox.jobs j SET due_at = now() + '5 min', attempts = attempts + 1, claim = c, holder = 'psql'
				FROM p WHERE j.id = p.id RETURNING j.id)
			SELECT array_agg(id), count(*) INTO ids, k FROM u;
		COMMIT;
		EXIT WHEN k = 0;
		UPDATE outbox.jobs SET done_at = now() WHERE id = ANY (ids);
		COMMIT;
		c := c + 1;
		n := n + k;
	END LOOP;
END $$;

CREATE TABLE IF NOT EXISTS bench.handled (seq bigint, at timestamptz DEFAULT clock_timestamp());
CREATE OR REPLACE FUNCTION bench.noop(e outbox.event) RETURNS void LANGUAGE sql AS 'SELECT';
CREATE OR REPLACE FUNCTION bench.note(e outbox.event) RETURNS void LANGUAGE sql
	AS 'INSERT INTO bench.handled (seq) VALUES ($1.seq)';
SQL
}

# make jobs: N events for the subscriptions that there are
make_jobs() { load "$1"; ours >/dev/null; sql -c "VACUUM (ANALYZE) outbox.events, outbox.jobs" -c CHECKPOINT; }

# jobs a second that CLIENTS take together, each by a statement
consume() {
	local clients=$1 statement=$2 n=$3 i t0 t1 pids=()
	t0=$(date +%s.%N)
	for ((i = 0; i < clients; i++)); do
		sql -c "$statement" >/dev/null &
		pids+=($!)
	done
	wait "${pids[@]}"
	t1=$(date +%s.%N)
	awk -v a="$t0" -v b="$t1" -v n="$n" 'BEGIN { printf "%.0f\n", n / (b - a) }'
}

row_claim() {
	local n clients i a b
	n=$(scaled 100000)
	prepare_jobs
	subscribe 1
	for clients in 1 4; do
		a=() b=()
		for ((i = 0; i < RUNS; i++)); do
			empty; make_jobs "$n"; a+=("$(consume $clients "CALL bench.consume('s1', NULL)" "$n")")
			empty; make_jobs "$n"; b+=("$(consume $clients "CALL bench.consume_bare(NULL)" "$n")")
		done
		report "claim_$clients" "$(printf '%s\n' "${a[@]}" | median)" "$(printf '%s\n' "${b[@]}" | median)" " jobs/s" \
			"claim(100) and complete_many, clients: $clients, against a bare UPDATE and UPDATE; reach 0.85"
	done
}

# hold an old snapshot, or end it
hold_snapshot() {
	coproc holder { as_tester "$bin/psql" -X -q -A -t -h "$scratch" -U postgres -d bench; }
	echo "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 FROM outbox.events LIMIT 1; SELECT 'held';" >&"${holder[1]}"
	read -r _ <&"${holder[0]}"
}
end_snapshot() {
	echo "\\q" >&"${holder[1]}"
	wait "$holder_PID" || :
}

row_claim_snapshot() {
	local n chunk mode i
	n=$(scaled 500000) chunk=$(scaled 50000)
	prepare_jobs
	subscribe 1
	for mode in free held; do
		empty
		[ $mode = free ] || hold_snapshot
		for ((i = 0; i < n; i += chunk)); do
			sql -c "CALL bench.load($chunk)"; ours >/dev/null
			sql -c "CALL bench.consume('s1', NULL)" >/dev/null
		done
		for ((i = 0; i < 5; i++)); do
			sql -c "CALL bench.load($chunk)"; ours >/dev/null
			consume 1 "CALL bench.consume('s1', NULL)" "$chunk"
		done | median >"$scratch/$mode"
		[ $mode = free ] || end_snapshot
	done
	report claim_snapshot "$(cat "$scratch/held")" "$(cat "$scratch/free")" " jobs/s" \
		"claims with an old snapshot held over 500,000 jobs done against none; reach 0.9"
}

# jobs a second of a handler: the relay fans out first, while the subscription is paused
handle() {
	local n=$1 t0 t1
	sql -c "SELECT outbox.pause('s1')" -c "CALL bench.load($n)" >/dev/null
	ours >/dev/null
	sql -c "SELECT outbox.start()" >/dev/null
	t0=$(date +%s.%N)
	sql -c "SELECT outbox.resume('s1')" -c "CALL outbox.await_idle('s1', '10min')" >/dev/null
	t1=$(date +%s.%N)
	sql -c "SELECT outbox.stop()" >/dev/null
	awk -v a="$t0" -v b="$t1" -v n="$n" 'BEGIN { printf "%.0f\n", n / (b - a) }'
}

# the floor of a handler: one transaction of the same two writes a job
handle_bare() {
	as_tester "$bin/pgbench" -n -h "$scratch" -U postgres -M prepared -c 2 -j 2 -t "$(($1 / 2))" -f "$scratch/bare_job.sql" bench 2>/dev/null |
		awk '/^tps/ { printf "%.0f\n", $3 }'
}

row_handler() {
	local n i mode a=() b=()
	n=$(scaled 20000)
	prepare_jobs
	sql -c "SELECT count(outbox.unsubscribe(name)) FROM outbox.subscriptions" \
		-c "SELECT outbox.subscribe('s1', '{order.*}', handler => 'bench.noop')" >/dev/null
	cat >"$scratch/bare_job.sql" <<'SQL'
\set i random(1, 20000)
BEGIN;
UPDATE bench.bare_jobs SET done_at = now() WHERE id = :i;
UPDATE bench.bare_jobs SET due_at = now() + '5 min', attempts = attempts + 1, claim = :i, holder = 'x' WHERE id = :i % 20000 + 1;
COMMIT;
SQL
	chmod 644 "$scratch"/*.sql
	for ((i = 0; i < RUNS; i++)); do
		empty; a+=("$(handle "$n")")
		sql -c "DROP TABLE IF EXISTS bench.bare_jobs" -c "CREATE TABLE bench.bare_jobs (LIKE outbox.jobs INCLUDING ALL)" \
			-c "INSERT INTO bench.bare_jobs (subscription_id, event_seq, due_at) SELECT 1, i, now() FROM generate_series(1, 20000) i" -c CHECKPOINT
		b+=("$(handle_bare "$n")")
	done
	report handler "$(printf '%s\n' "${a[@]}" | median)" "$(printf '%s\n' "${b[@]}" | median)" " jobs/s" \
		"a no-op SQL handler, 2 runners, against 2 clients that commit the same two UPDATEs a job"
	for mode in free held; do
		empty
		[ $mode = free ] || hold_snapshot
		sql -c "SELECT outbox.pause('s1')" -c "CALL bench.load($(scaled 500000))" >/dev/null
		ours >/dev/null
		# done by a client, which is quicker
		sql -c "SELECT outbox.resume('s1')" -c "CALL bench.consume('s1', NULL)" >/dev/null
		for ((i = 0; i < 3; i++)); do handle "$n"; done | median >"$scratch/$mode"
		[ $mode = free ] || end_snapshot
	done
	report handler_snapshot "$(cat "$scratch/held")" "$(cat "$scratch/free")" " jobs/s" \
		"the same with an old snapshot held over 500,000 jobs done against none; reach 0.9"
}

row_handler_latency() {
	prepare_jobs
	sql -c "SELECT count(outbox.unsubscribe(name)) FROM outbox.subscriptions" \
		-c "SELECT outbox.subscribe('s1', '{order.*}', handler => 'bench.note')" >/dev/null
	empty
	sql -c "TRUNCATE bench.handled" -c "SELECT outbox.start()" >/dev/null
	sql <<'SQL' >"$scratch/latency"
CREATE OR REPLACE PROCEDURE bench.handler_latency(n int) LANGUAGE plpgsql AS $$
DECLARE
	t0 timestamptz; s bigint; idle boolean;
BEGIN
	CREATE TEMP TABLE commits (seq bigint, at timestamptz);
	COMMIT;
	FOR i IN 1..n LOOP
		s := outbox.record('order.created', 'order/1', '{"total": 100}');
		COMMIT;
		t0 := clock_timestamp();
		INSERT INTO commits VALUES (s, t0);
		COMMIT;
		CALL outbox.await_idle('s1', '5s', idle);
	END LOOP;
END $$;
CALL bench.handler_latency(1000);
SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY l), percentile_cont(0.99) WITHIN GROUP (ORDER BY l)
FROM (SELECT 1000 * extract(epoch FROM h.at - c.at) AS l FROM commits c JOIN bench.handled h USING (seq) ORDER BY seq OFFSET 10) x;
SQL
	sql -c "SELECT outbox.stop()" >/dev/null
	IFS='|' read -r p50 p99 <"$scratch/latency"
	report handler_latency "$(printf %.3f "$p50")" 2 " ms" "commit to handler started, idle, p50 against 2 ms (p99 $(printf %.3f "$p99") ms); reach 1 or less"
}

row_handled() {
	local n t0 t1
	n=$(scaled 100000)
	prepare_jobs
	sql -c "SELECT count(outbox.unsubscribe(name)) FROM outbox.subscriptions" \
		-c "SELECT count(outbox.subscribe('s' || i, '{order.*}', handler => 'bench.noop')) FROM generate_series(1, 3) i" >/dev/null
	empty
	sql -c "SELECT outbox.start()" >/dev/null
	t0=$(date +%s.%N)
	sql -c "CALL bench.load($n)" -c "CALL outbox.await_idle(NULL, '20min')" >/dev/null
	t1=$(date +%s.%N)
	sql -c "SELECT outbox.stop()" >/dev/null
	say "handled $(awk -v a="$t0" -v b="$t1" -v n="$n" 'BEGIN { printf "%.0f jobs/s, %.1f s", 3 * n / (b - a), b - a }') for $n events x 3 handlers from record to done; for information"
}
