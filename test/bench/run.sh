#!/bin/bash
#
# Measure the extension against the bare work that it does, both sides in one
# run on one server that is started for it.
#
#	test/bench/run.sh [ROW ...]	default: all of them:
#		backlog record latency snapshot history subscriptions (fan-out)
#		claim claim_snapshot handler handler_latency handled (jobs)
#
# Each row prints "NAME ratio=... (ours ..., other ...)".  Only the ratios mean
# anything on another machine.  fsync and synchronous_commit are PostgreSQL's
# defaults.  SCALE=0.1 shrinks the tables for a quick look; RUNS sets the number
# of alternating runs of which the median counts.

set -eu
. "$(dirname "$0")/../common.sh"
. "$(dirname "$0")/jobs.sh"

rows=("$@")
[ $# -gt 0 ] || rows=(backlog record latency snapshot history subscriptions claim claim_snapshot handler handler_latency handled)
SCALE=${SCALE:-1}
RUNS=${RUNS:-5}

scaled() { awk -v n="$1" -v s="$SCALE" 'BEGIN { printf "%d", n * s }'; }
median() { sort -n | awk '{ a[NR] = $1 } END { print (NR % 2) ? a[(NR + 1) / 2] : (a[NR / 2] + a[NR / 2 + 1]) / 2 }'; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.2f", a / b }'; }
report() { say "$1 ratio=$(ratio "$2" "$3") (ours $2$4, other $3$4)${5:+ $5}"; }

find_server libipc-run-perl
make_scratch outbox-bench
bin=$("$PG_CONFIG" --bindir)
data=$scratch/data
stop() {
	[ ! -e "$data/postmaster.pid" ] || as_tester "$bin/pg_ctl" -D "$data" -m immediate -w stop >/dev/null || :
	rm -rf "$scratch"
}
trap stop EXIT

as_tester make -s -C "$scratch/outbox" PG_CONFIG="$PG_CONFIG" with_llvm=no install >/dev/null
as_tester "$bin/initdb" -N -A trust -U postgres -D "$data" >/dev/null
cat >>"$data/postgresql.conf" <<CONF
shared_preload_libraries = 'outbox'
listen_addresses = ''
unix_socket_directories = '$scratch'
shared_buffers = 1GB
max_wal_size = 16GB
checkpoint_timeout = 1h
max_connections = 200
CONF
as_tester "$bin/pg_ctl" -w -D "$data" -l "$scratch/log" start >/dev/null
sql() { as_tester "$bin/psql" -X -q -A -t -v ON_ERROR_STOP=1 -h "$scratch" -U postgres -d bench "$@"; }
as_tester "$bin/createdb" -h "$scratch" -U postgres bench
say "$("$PG_CONFIG" --version), $(nproc) cores, scale $SCALE, median of $RUNS"

sql <<'SQL'
CREATE EXTENSION outbox;
CREATE SCHEMA bench;

-- the floor: jobs and marks of a backlog, in batches of 200, and nothing else
CREATE PROCEDURE bench.bare(subscriptions int) LANGUAGE plpgsql AS $$
DECLARE
	lo bigint := (SELECT min(seq) FROM outbox.events WHERE fanned_out_at IS NULL);
	hi bigint := (SELECT max(seq) FROM outbox.events WHERE fanned_out_at IS NULL);
	mark jsonb := '{"s1": 100001, "s2": 100002, "s3": 100003}';
BEGIN
	SET LOCAL enable_seqscan = off;
	WHILE lo <= hi LOOP
		INSERT INTO outbox.jobs (subscription_id, event_seq, due_at)
			SELECT s, e.seq, now() FROM outbox.events e, generate_series(1, subscriptions) s
			WHERE e.seq >= lo AND e.seq < lo + 200;
		UPDATE outbox.events SET fanned_out_at = now(), fanout = mark WHERE seq >= lo AND seq < lo + 200;
		COMMIT;
		lo := lo + 200;
	END LOOP;
END $$;

CREATE PROCEDURE bench.load(n int) LANGUAGE sql AS $$
	INSERT INTO outbox.events (type, subject, payload)
		SELECT 'order.created', 'order/' || i, '{"total": 100}' FROM generate_series(1, n) i;
$$;

CREATE PROCEDURE bench.await() LANGUAGE plpgsql AS $$
DECLARE
	last bigint := (SELECT max(seq) FROM outbox.events);
	outcome text;
BEGIN
	CALL outbox.await_fanout(last, '10min', outcome);
END $$;

-- seconds that the relay takes for what is unmarked
CREATE PROCEDURE bench.relay(INOUT seconds float8) LANGUAGE plpgsql AS $$
DECLARE
	t0 timestamptz;
	last bigint := (SELECT max(seq) FROM outbox.events);
	outcome text;
BEGIN
	PERFORM outbox.start();
	t0 := clock_timestamp();
	COMMIT;
	CALL outbox.await_fanout(last, '10min', outcome);
	IF outcome <> 'fanned' OR EXISTS (SELECT FROM outbox.events WHERE fanned_out_at IS NULL) THEN
		RAISE EXCEPTION 'not fanned out: %', outcome;
	END IF;
	seconds := extract(epoch FROM clock_timestamp() - t0);
	PERFORM outbox.stop();
	COMMIT;
END $$;

SELECT outbox.arm();
SELECT outbox.stop();
SQL

subscribe() { sql -c "SELECT count(outbox.unsubscribe(name)) FROM outbox.subscriptions" -c "SELECT count(outbox.subscribe('s' || i, '{order.*}')) FROM generate_series(1, $1) i" >/dev/null; }
empty() { sql -c "TRUNCATE outbox.events, outbox.jobs" -c CHECKPOINT; }
load() { sql -c "CALL bench.load($1)" -c "VACUUM (ANALYZE) outbox.events, outbox.jobs" -c CHECKPOINT; }
ours() { sql -c "CALL bench.relay(NULL)"; }
bare() {
	local t0 t1
	t0=$(date +%s.%N)
	sql -c "CALL bench.bare($1)"
	t1=$(date +%s.%N)
	awk -v a="$t0" -v b="$t1" 'BEGIN { print b - a }'
}
# events a second that the relay fans out of a backlog of N
rate() { load "$1"; ours | awk -v n="$1" '{ printf "%.0f", n / $1 }'; }

row_backlog() {
	local n i a=() b=()
	n=$(scaled 100000)
	subscribe 3
	for ((i = 0; i < RUNS; i++)); do
		empty; load "$n"; a+=("$(ours)")
		empty; load "$n"; b+=("$(bare 3)")
	done
	report backlog "$(printf '%s\n' "${a[@]}" | median | awk -v n="$n" '{ printf "%.0f", n / $1 }')" \
		"$(printf '%s\n' "${b[@]}" | median | awk -v n="$n" '{ printf "%.0f", n / $1 }')" " events/s" \
		"100,000 x 3 in batches of 200 against bare INSERT and UPDATE; reach 0.80"
}

pgbench_tps() {
	as_tester "$bin/pgbench" -n -h "$scratch" -U postgres -M prepared -c 16 -j 2 -T "${1}" -f "$scratch/$2.sql" bench 2>/dev/null |
		awk '/^tps/ { printf "%.0f", $3 }'
}

row_record() {
	local i a=() b=() c=() d=() seconds=${BENCH_SECONDS:-8}
	sql <<'SQL'
DROP TABLE IF EXISTS bench.orders, bench.plain;
CREATE TABLE bench.orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text);
CREATE TABLE bench.plain (LIKE outbox.events INCLUDING ALL);
SQL
	cat >"$scratch/record.sql" <<'SQL'
BEGIN;
INSERT INTO bench.orders (note) VALUES ('x');
SELECT outbox.record('order.created', 'order/1', '{"total": 100}');
COMMIT;
SQL
	cat >"$scratch/plain.sql" <<'SQL'
BEGIN;
INSERT INTO bench.orders (note) VALUES ('x');
INSERT INTO bench.plain (type, subject, payload) VALUES ('order.created', 'order/1', '{"total": 100}') RETURNING seq;
COMMIT;
SQL
	cat >"$scratch/notify.sql" <<'SQL'
BEGIN;
INSERT INTO bench.orders (note) VALUES ('x');
INSERT INTO bench.plain (type, subject, payload) VALUES ('order.created', 'order/1', '{"total": 100}') RETURNING seq;
SELECT pg_notify('bench', '');
COMMIT;
SQL
	chmod 644 "$scratch"/*.sql
	for ((i = 0; i < RUNS; i++)); do
		# each right after a checkpoint, so that each writes its pages whole
		empty; sql -c "TRUNCATE bench.orders, bench.plain" -c CHECKPOINT
		a+=("$(pgbench_tps "$seconds" record)")
		sql -c CHECKPOINT
		b+=("$(pgbench_tps "$seconds" plain)")
		sql -c CHECKPOINT
		c+=("$(pgbench_tps "$seconds" notify)")
	done
	local x y z
	x=$(printf '%s\n' "${a[@]}" | median) y=$(printf '%s\n' "${b[@]}" | median) z=$(printf '%s\n' "${c[@]}" | median)
	report record "$x" "$y" " tx/s" "16 clients, outbox.record against a plain INSERT; reach 0.95"
	report record_notify "$x" "$z" " tx/s" "the same against INSERT and pg_notify; reach 2"
	empty; sql -c "SELECT outbox.start()" >/dev/null
	for ((i = 0; i < 3; i++)); do d+=("$(pgbench_tps "$seconds" record)"); done
	sql -c "SELECT outbox.stop()" >/dev/null
	report record_relayed "$(printf '%s\n' "${d[@]}" | median)" "$y" " tx/s" "with the relay fanning out to 3 on the same cores; for information"
}

row_latency() {
	subscribe 3
	empty
	sql -c "SELECT outbox.start()" >/dev/null
	sql <<'SQL' >"$scratch/latency"
CREATE TABLE IF NOT EXISTS bench.flush (x int);
CREATE OR REPLACE PROCEDURE bench.latency(n int) LANGUAGE plpgsql AS $$
DECLARE
	t0 timestamptz; t1 timestamptz; t2 timestamptz; s bigint; outcome text;
BEGIN
	CREATE TEMP TABLE samples (latency float8, flush float8);
	COMMIT;
	FOR i IN 1..n LOOP
		INSERT INTO bench.flush VALUES (1);
		t0 := clock_timestamp();
		COMMIT;
		t1 := clock_timestamp();
		INSERT INTO samples (flush) VALUES (1000 * extract(epoch FROM t1 - t0));
		s := outbox.record('order.created', 'order/1', '{"total": 100}');
		COMMIT;
		t1 := clock_timestamp();
		CALL outbox.await_fanout(s, '5s', outcome);
		t2 := clock_timestamp();
		INSERT INTO samples (latency) VALUES (1000 * extract(epoch FROM t2 - t1));
		COMMIT;
	END LOOP;
END $$;
CALL bench.latency(2000);
SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY latency), percentile_cont(0.99) WITHIN GROUP (ORDER BY latency),
	percentile_cont(0.5) WITHIN GROUP (ORDER BY flush) FROM samples;
SQL
	sql -c "SELECT outbox.stop()" >/dev/null
	IFS='|' read -r p50 p99 flush <"$scratch/latency"
	report latency_p50 "$(printf %.3f "$p50")" "$(awk -v f="$flush" 'BEGIN { printf "%.3f", f + 0.7 }')" " ms" "commit to fanned out, idle, against one flush ($(printf %.3f "$flush") ms) + 0.7 ms; reach 1 or less"
	report latency_p99 "$(printf %.3f "$p99")" 5 " ms" "against 5 ms; reach 1 or less"
}

row_snapshot() {
	local n chunk i free held
	n=$(scaled 500000) chunk=$(scaled 50000)
	subscribe 3
	for mode in free held; do
		empty
		if [ $mode = held ]; then
			coproc holder { as_tester "$bin/psql" -X -q -A -t -h "$scratch" -U postgres -d bench; }
			echo "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 FROM outbox.events LIMIT 1; SELECT 'held';" >&"${holder[1]}"
			read -r _ <&"${holder[0]}"
		fi
		sql -c "SELECT outbox.start()" >/dev/null
		for ((i = 0; i < n; i += chunk)); do
			sql -c "CALL bench.load($chunk)" -c "CALL bench.await()" >/dev/null
		done
		# the measure itself: twenty small backlogs, as a steady stream would make
		for ((i = 0; i < 5; i++)); do
			sql -c "SELECT outbox.stop()" >/dev/null
			sql -c "CALL bench.load($chunk)"
			ours
		done | median | awk -v n="$chunk" '{ printf "%.0f\n", n / $1 }' >"$scratch/$mode"
		if [ $mode = held ]; then
			echo "\\q" >&"${holder[1]}"
			wait "$holder_PID" || :
		fi
	done
	free=$(cat "$scratch/free") held=$(cat "$scratch/held")
	report snapshot "$held" "$free" " events/s" "an old snapshot held over 500,000 events against none; reach 0.9"
}

row_history() {
	local n a=() b=() i
	n=$(scaled 100000)
	subscribe 3
	for ((i = 0; i < 3; i++)); do empty; b+=("$(rate "$n")"); done
	empty
	sql -c "INSERT INTO outbox.events (type, subject, payload, fanned_out_at, fanout)
		SELECT 'order.created', 'order/' || i, '{\"total\": 100}', now(), '{}' FROM generate_series(1, $(scaled 5000000)) i"
	for ((i = 0; i < 3; i++)); do a+=("$(rate "$n")"); done
	report history "$(printf '%s\n' "${a[@]}" | median)" "$(printf '%s\n' "${b[@]}" | median)" " events/s" "5,000,000 fanned events in the table against none; reach 0.9"
}

row_subscriptions() {
	local n a=() b=() i
	n=$(scaled 100000)
	subscribe 3
	for ((i = 0; i < RUNS; i++)); do
		empty; b+=("$(rate "$n")")
		sql -c "SELECT count(outbox.subscribe('other' || i, ARRAY['other' || i || '.*'])) FROM generate_series(1, 997) i" >/dev/null
		empty; a+=("$(rate "$n")")
		sql -c "SELECT count(outbox.unsubscribe('other' || i)) FROM generate_series(1, 997) i" >/dev/null
	done
	report subscriptions "$(printf '%s\n' "${a[@]}" | median)" "$(printf '%s\n' "${b[@]}" | median)" " events/s" "1,000 subscriptions of which 3 match against 3; reach 0.9"
}

for row in "${rows[@]}"; do
	"row_$row"
done
