#!/bin/bash
#
# Load with faults, then a check that nothing was lost and nothing made twice.
#
#	test/torture.sh [SECONDS [SEED]]		default 30, a random seed
#
# Eight writers record, roll back and use savepoints; two relays or so fan out.
# Meanwhile workers are killed (kill -9 takes the server through recovery),
# the server is restarted, settings are reloaded, subscriptions and databases
# come and go, tables are locked and altered.  Ends with "N passed, N failed".

set -eu
. "$(dirname "$0")/common.sh"

seconds=${1:-30}
seed=${2:-$RANDOM}
RANDOM=$seed
find_server libipc-run-perl
make_scratch outbox-torture
bin=$("$PG_CONFIG" --bindir)
data=$scratch/data
writers=
stop() {
	touch "$scratch/over"
	[ -z "$writers" ] || wait $writers 2>/dev/null || :
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
max_worker_processes = 20
max_prepared_transactions = 20
outbox.relays = 2
outbox.relay_retry_min = 100ms
outbox.relay_retry_max = 1s
outbox.sweep_interval = 5s
restart_after_crash = on
CONF
as_tester "$bin/pg_ctl" -w -D "$data" -l "$scratch/log" start >/dev/null
sql() { as_tester "$bin/psql" -X -q -A -t -v ON_ERROR_STOP=1 -h "$scratch" -U postgres -d torture "$@"; }
await_server() {
	local i
	for ((i = 0; i < 600; i++)); do
		sql -c 'SELECT 1' >/dev/null 2>&1 && return
		read -r -t 0.1 <> <(:) || :
	done
	die "the server does not come back"
}
as_tester "$bin/createdb" -h "$scratch" -U postgres torture
sql <<'SQL' >/dev/null
CREATE EXTENSION outbox;
CREATE TABLE notes (id int PRIMARY KEY, body text, extra int);
INSERT INTO notes SELECT i, 'x' FROM generate_series(1, 50) i;
SELECT outbox.capture('notes', 'note.{op}');
SELECT outbox.subscribe('everything', '{*}');
SELECT outbox.subscribe('latest', '{order.*}', coalescing => true);
SELECT outbox.subscribe('tenant', '{order.*,!order.odd}', scope => 't1');
SELECT outbox.subscribe('big', '{order.*}', filter => '$.n > 500');
SQL
cat >"$scratch/write.sql" <<'SQL'
\set n random(1, 1000)
\set s random(1, 20)
\set t random(1, 3)
\set k random(1, 10)
BEGIN;
SELECT outbox.record('order.created', 'order/' || :s, jsonb_build_object('n', :n), 't' || :t);
\if :k = 1
ROLLBACK;
\elif :k = 2
SAVEPOINT a;
SELECT outbox.record('order.lost');
ROLLBACK TO a;
SELECT outbox.record('order.odd', NULL, '{}', 't1');
COMMIT;
\elif :k = 3
UPDATE notes SET body = body || :n WHERE id = :s;
COMMIT;
\elif :k = 4
INSERT INTO outbox.events (type, subject) SELECT 'order.many', 'order/' || i FROM generate_series(1, 300) i;
COMMIT;
\else
COMMIT;
\endif
SQL
chmod 644 "$scratch/write.sql"

# Writers go on until the end, whatever becomes of their connections.
(
	while [ ! -e "$scratch/over" ]; do
		as_tester "$bin/pgbench" -n -h "$scratch" -U postgres -c 8 -j 2 -T 3 -f "$scratch/write.sql" torture >/dev/null 2>&1 || :
	done
) &
writers=$!

relay_pids() { sql -c "SELECT pid FROM outbox.stat_relay WHERE pid IS NOT NULL AND database = 'torture'" 2>/dev/null || :; }
memory() { local p; for p in $(relay_pids); do awk '/^VmRSS/ { rss = $2 } /^RssShmem/ { shm = $2 } END { print rss - shm }' "/proc/$p/status" 2>/dev/null; done | sort -n | tail -1; }
faults=0
fault() {
	local p
	faults=$((faults + 1))
	case $((RANDOM % 12)) in
		0) for p in $(relay_pids | head -1); do kill -9 "$p" 2>/dev/null || :; done ;;
		1) sql -c "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'outbox relay'" >/dev/null ;;
		2) sql -c "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'outbox launcher'" >/dev/null ;;
		3) sql -c "ALTER SYSTEM SET outbox.batch_size = $((RANDOM % 400 + 1))" -c "SELECT pg_reload_conf()" >/dev/null ;;
		4) sql -c "ALTER SYSTEM SET outbox.relays = $((RANDOM % 4))" -c "SELECT pg_reload_conf()" >/dev/null ;;
		5) sql -c "SELECT outbox.subscribe('passing', '{note.*}')" -c "SELECT outbox.unsubscribe('passing')" >/dev/null ;;
		6) sql -c "CREATE DATABASE other TEMPLATE torture" -c "DROP DATABASE other" >/dev/null 2>&1 || sql -c "DROP DATABASE IF EXISTS other" >/dev/null ;;
		7) sql -c "BEGIN; LOCK outbox.jobs; SELECT pg_sleep(0.5); COMMIT" >/dev/null ;;
		8) sql -c "SELECT outbox.stop()" -c "SELECT outbox.start()" >/dev/null ;;
		9) sql -c "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE backend_type = 'outbox relay'" >/dev/null ;;
		10) sql -c "ALTER TABLE notes ADD COLUMN c$faults int" -c "ALTER TABLE notes DROP COLUMN c$faults" -c "VACUUM outbox.events, outbox.jobs" >/dev/null ;;
		11)
			if [ $((RANDOM % 3)) -eq 0 ]; then
				as_tester "$bin/pg_ctl" -w -D "$data" -l "$scratch/log" -m immediate restart >/dev/null
			else
				sql -c "BEGIN" -c "SELECT outbox.record('order.prepared', NULL, '{}', 't1')" -c "PREPARE TRANSACTION 'p$faults'" -c "COMMIT PREPARED 'p$faults'" >/dev/null
			fi
			;;
	esac
}

say "seed $seed, $seconds seconds, $("$PG_CONFIG" --version)"
rss_first=
end=$((SECONDS + seconds))
while [ $SECONDS -lt $end ]; do
	fault 2>/dev/null || :
	await_server
	[ -n "$rss_first" ] || rss_first=$(memory)
	read -r -t "0.$((RANDOM % 9 + 1))" <> <(:) || :
done
touch "$scratch/over"
wait $writers || :
writers=
await_server
sql -c "ALTER SYSTEM SET outbox.relays = 2" -c "ALTER SYSTEM RESET outbox.batch_size" -c "SELECT pg_reload_conf()" -c "SELECT outbox.start()" >/dev/null

passed=0 failed=0
check() { # NAME QUERY: the query counts what should not be
	local n
	n=$(sql -c "$2")
	if [ "$n" = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); say "not ok: $1: $n"; fi
}
for ((i = 0; i < 1200; i++)); do
	[ "$(sql -c 'SELECT count(*) FROM outbox.events WHERE fanned_out_at IS NULL')" != 0 ] || break
	read -r -t 0.1 <> <(:) || :
done
check "events left unmarked" "SELECT count(*) FROM outbox.events WHERE fanned_out_at IS NULL"
check "events poisoned" "SELECT count(*) FROM outbox.events WHERE poisoned_at IS NOT NULL OR failures > 0"
check "events of what was rolled back" "SELECT count(*) FROM outbox.events WHERE type = 'order.lost'"
check "jobs without an event" "SELECT count(*) FROM outbox.jobs j WHERE NOT EXISTS (SELECT FROM outbox.events e WHERE e.seq = j.event_seq)"
check "more than one job for an event and a subscription" "SELECT count(*) FROM (SELECT FROM outbox.jobs GROUP BY subscription_id, event_seq HAVING count(*) > 1) d"
check "events of which a job is missing" "
	SELECT count(*) FROM outbox.events e, outbox.subscriptions s
	WHERE s.name IN (SELECT outbox.matching(e.type, e.scope, e.payload, e.subject, e.headers)) AND NOT EXISTS (
		SELECT FROM outbox.jobs j JOIN outbox.events c ON c.seq = j.event_seq
		WHERE j.id = (e.fanout ->> s.name)::bigint AND j.subscription_id = s.id
			AND (c.seq = e.seq OR s.coalescing AND c.seq > e.seq AND c.subject = e.subject
				AND c.scope IS NOT DISTINCT FROM e.scope AND c.fanned_out_at = e.fanned_out_at))
		AND e.seq IN (SELECT seq FROM outbox.events ORDER BY random() LIMIT 20000)"
check "jobs that no fanout names" "
	SELECT count(*) FROM outbox.jobs j JOIN outbox.subscriptions s ON s.id = j.subscription_id
		JOIN outbox.events e ON e.seq = j.event_seq
	WHERE (e.fanout ->> s.name)::bigint IS DISTINCT FROM j.id"
check "events that went to nobody's subscription" "
	SELECT count(*) FROM outbox.events e, jsonb_object_keys(e.fanout) k WHERE k = 'tenant' AND (e.scope IS DISTINCT FROM 't1' OR e.type = 'order.odd')"
crashes=$(grep -c "terminated by signal" "$scratch/log" || :)
unexpected=$(grep -E "PANIC|TRAP|segmentation|signal (6|11)" "$scratch/log" | head -5)
if [ -z "$unexpected" ]; then passed=$((passed + 1)); else failed=$((failed + 1)); say "$unexpected"; fi
say "$(sql -c 'SELECT count(*) FROM outbox.events') events, $(sql -c 'SELECT count(*) FROM outbox.jobs') jobs, $faults faults, $crashes killed, private memory of a relay ${rss_first:-?} kB at the start, $(memory) kB at the end"
[ $failed -eq 0 ] || grep -E "ERROR|FATAL|WARNING" "$scratch/log" | tail -20
say "$passed passed, $failed failed"
[ $failed -eq 0 ]
