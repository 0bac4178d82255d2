#!/bin/bash
#
# Show what outbox does, on a throw-away server.
#
# Works on a bare Debian 12 as root or with sudo: what is missing is installed
# with apt.  Builds in a scratch directory and installs into a private copy of
# PostgreSQL in there, so neither the tree nor any existing server or cluster
# is touched.  The server listens on a private socket only, runs as an
# unprivileged user, and is stopped and removed at the end.
#
# PG_CONFIG in the environment names another PostgreSQL than Debian's 15.

set -u
set -o pipefail
. "$(dirname "$0")/common.sh"

finish() {
	status=$?
	trap - EXIT
	if [ -e "${scratch:-}/data/postmaster.pid" ]; then
		as_tester "$bin/pg_ctl" -D "$scratch/data" -m fast -w stop >/dev/null
	fi
	if [ $status -ne 0 ] && [ -e "${scratch:-}/log" ]; then
		say '--- the server'"'"'s log'
		tail -n 30 "$scratch/log"
	fi
	remove_scratch
	exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM

heading() { printf '\n## %s\n\n' "$*"; }

# psql with its queries shown, read from standard input
psql() {
	timeout 60 "${as[@]}" "$bin/psql" -X -q -v ON_ERROR_STOP=1 -P pager=off \
		-h "$scratch" -U postgres -d postgres "$@" || die 'that should have worked'
}

# must QUERY: the demonstration is only worth something if this is true
must() {
	[ "$(psql -At -c "$1")" = t ] || die "expected to be true: $1"
}

heading 'Building outbox, and starting a server for it'
find_server
make_scratch outbox-demo
bin=$("$PG_CONFIG" --bindir)
as=()
[ "$(id -u)" -ne 0 ] || as=(runuser -u "$(tester)" --)

as_tester make -s -C "$scratch/outbox" -j "$(nproc)" PG_CONFIG="$PG_CONFIG" with_llvm=no \
	all install >"$scratch/build.log" 2>&1 || {
	cat "$scratch/build.log"
	die 'the build failed'
}
as_tester "$bin/initdb" -N -A trust -U postgres -D "$scratch/data" >"$scratch/initdb.log" 2>&1 || {
	cat "$scratch/initdb.log"
	die 'initdb failed'
}
# Events that fail are tried again after milliseconds here, not seconds.
as_tester tee -a "$scratch/data/postgresql.conf" >/dev/null <<CONF
shared_preload_libraries = 'outbox'
outbox.relay_retry_min = '50ms'
outbox.relay_retry_max = '200ms'
listen_addresses = ''
unix_socket_directories = '$scratch'
CONF
as_tester "$bin/pg_ctl" -D "$scratch/data" -l "$scratch/log" -w start >/dev/null ||
	die 'the server did not start'
"$bin/postgres" --version
say "Running on a socket in $scratch, with shared_preload_libraries = 'outbox'."

heading 'A table of notes, captured; two subscriptions'
psql -e <<'SQL'
CREATE EXTENSION outbox;
CREATE TABLE notes (
    id    int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    title text NOT NULL,
    body  text NOT NULL DEFAULT '',
    views int NOT NULL DEFAULT 0
);
SELECT outbox.capture('notes', 'note.{op}', subject => 'note/{id}', watch => '{title,body}');
SELECT outbox.subscribe('search-index', '{note.*}');
SELECT outbox.subscribe('digest', '{note.created,note.updated}', coalescing => true);
SQL

# A client that listens, in the background.  psql prints what it was notified
# of after each query.
exec 8> >(psql >"$scratch/heard" 2>&1)
echo 'LISTEN standmeet_events_fanned; SELECT 1 AS listening;' >&8
listener=$!
for ((i = 0; i < 300; i++)); do
	! grep -q listening "$scratch/heard" || break
	sleep 0.1
done

heading 'Single edits: only what commits, and only a change of a watched column, is an event'
psql -e <<'SQL'
INSERT INTO notes (title) VALUES ('Shopping');
UPDATE notes SET title = 'Shopping list' WHERE id = 1;
UPDATE notes SET views = views + 1 WHERE id = 1;
BEGIN;
DELETE FROM notes WHERE id = 1;
ROLLBACK;
SELECT max(seq) AS last FROM outbox.events \gset
CALL outbox.await_fanout(:last);
SELECT seq, type, subject, payload, fanout FROM outbox.events ORDER BY seq;
SELECT job, subscription, seq, state FROM outbox.job_status ORDER BY job;
SQL
must "SELECT count(*) = 2 AND bool_and(fanned_out_at IS NOT NULL) FROM outbox.events"

heading 'An import: 2,000 notes in one transaction, beside more single edits'
psql -e <<'SQL'
BEGIN;
INSERT INTO notes (title, body) SELECT 'Imported ' || i, repeat('text ', 20) FROM generate_series(1, 2000) i;
COMMIT;
UPDATE notes SET body = 'milk, bread' WHERE id = 1;
UPDATE notes SET body = 'milk, bread, eggs' WHERE id = 1;
SELECT max(seq) AS last FROM outbox.events \gset
CALL outbox.await_fanout(:last);
SELECT count(*) AS events, count(fanned_out_at) AS fanned_out,
       max(fanned_out_at) - max(recorded_at) AS done_after_the_last FROM outbox.events;
SELECT subscription, state, count(*) AS jobs FROM outbox.job_status GROUP BY 1, 2 ORDER BY 1, 2;
SELECT passes, events, jobs, failures, state FROM outbox.stat_relay;
SQL
must "SELECT count(*) = 2004 AND bool_and(fanned_out_at IS NOT NULL) FROM outbox.events"
must "SELECT count(*) = 2004 FROM outbox.job_status WHERE subscription = 'search-index'"

heading 'What a psql that said LISTEN standmeet_events_fanned was told'
heard() { sed -nE 's/^Asynchronous notification "standmeet_events_fanned" with payload "\[(.*)\]" received.*/\1/p' "$scratch/heard"; }
for ((i = 0; i < 100; i++)); do
	echo 'SELECT;' >&8
	seqs=$(heard | tr ',' '\n' | grep -c .)
	[ "$seqs" -lt 2004 ] || break
	sleep 0.1
done
exec 8>&-
wait $listener
heard | awk '{ print length($0) > 60 ? "[" substr($0, 1, 60) "..." : "[" $0 "]" }' | head -n 6
say "$(heard | wc -l) notifications in all, with $seqs seqs"
[ "$seqs" -eq 2004 ] || die 'not all were announced'

heading 'A bad row among 200: a constraint refuses its job'
psql -e <<'SQL'
SELECT last_value + 100 AS bad FROM outbox.events_seq_seq \gset
ALTER TABLE outbox.jobs ADD CONSTRAINT bad_row CHECK (event_seq <> :bad) NOT VALID;
UPDATE notes SET title = title || ' (read)' WHERE id BETWEEN 1001 AND 1200;
CALL outbox.await_fanout(:bad, '20s');
SELECT count(*) AS of_these, count(fanned_out_at) AS fanned_out FROM outbox.events WHERE seq > :bad - 100 AND seq <= :bad + 100;
SELECT seq, type, subject, failures, split_part(last_error, E'\n', 1) AS last_error FROM outbox.poisoned;
SELECT seq, type, payload->'seq' AS about FROM outbox.events WHERE type = 'outbox.event.poisoned';
SQL
must "SELECT count(*) = 1 FROM outbox.poisoned"

heading 'Its cause removed, requeue puts it back in line'
psql -e <<'SQL'
ALTER TABLE outbox.jobs DROP CONSTRAINT bad_row;
SELECT seq AS bad FROM outbox.poisoned \gset
SELECT outbox.requeue(:bad);
CALL outbox.await_fanout(:bad);
SELECT seq, subscription, job, state FROM outbox.event_status WHERE seq = :bad;
SELECT * FROM outbox.check();
SQL
must "SELECT count(*) = 0 FROM outbox.poisoned"
must "SELECT count(*) = 2204 FROM outbox.job_status WHERE subscription = 'search-index'"

heading 'A client claims jobs, a batch at a time, and completes them; one fails for good'
psql -e <<'SQL'
SELECT max(claim) AS claim, count(*) AS jobs, min(job) AS first FROM outbox.claim('search-index', 500) \gset
SELECT outbox.fail(:first, :claim, 'the index refuses it', final => true);
SELECT outbox.complete_many(:claim) AS refused;
SELECT job, subscription, seq, subject, attempts, last_error FROM outbox.dead_jobs;
SELECT name, waiting, running, retrying, dead, done_total FROM outbox.stat_subscription ORDER BY name;
SELECT outbox.retry(:first);
SELECT max(claim) AS claim, count(*) AS jobs FROM outbox.claim('search-index', 5000) \gset
SELECT outbox.complete_many(:claim) AS refused;
SELECT job, state, attempts FROM outbox.job_status WHERE job = :first;
SQL
must "SELECT count(*) = 2204 FROM outbox.job_status WHERE subscription = 'search-index' AND state = 'done'"
must "SELECT count(*) = 0 FROM outbox.dead_jobs"

heading 'A handler keeps a copy, in the server, and catches up with what was before it'
psql -e <<'SQL'
CREATE TABLE note_titles (note text PRIMARY KEY, title text NOT NULL, handled int NOT NULL DEFAULT 1);
CREATE FUNCTION keep_title(event outbox.event) RETURNS void LANGUAGE sql AS $$
    INSERT INTO note_titles VALUES (event.subject, event.payload -> 'new' ->> 'title')
    ON CONFLICT (note) DO UPDATE SET title = excluded.title, handled = note_titles.handled + 1
$$;
SELECT outbox.subscribe('titles', '{note.*}', ordered => true, handler => 'keep_title');
SELECT outbox.replay('titles', '-infinity');
UPDATE notes SET title = 'Groceries' WHERE id = 1;
CALL outbox.await_idle('titles');
SELECT * FROM note_titles WHERE note IN ('note/1', 'note/1001') ORDER BY note;
SELECT name, waiting, retrying, dead, done_total FROM outbox.stat_subscription WHERE name = 'titles';
SQL
must "SELECT count(*) = 2001 AND bool_and(n.title = t.title) FROM notes n LEFT JOIN note_titles t ON t.note = 'note/' || n.id"
must "SELECT outbox.is_current('titles', 'note/1')"

heading 'Stopping the server and removing it'
say "Nothing is left but the packages that were installed.  Next: README.md"
