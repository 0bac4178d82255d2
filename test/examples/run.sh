#!/bin/bash
#
# Let the workers of this directory work: each must handle every event, though
# handlers fail and a worker is killed, and stop when it is told to.
#
#	test/examples/run.sh [WORKER ...]		default: worker.sh worker.py worker.js
#
# On a throw-away server.  What a worker needs is taken as it is found, else from
# the registry of its language into a directory that is removed at the end, else
# from Debian.  When none of that can be had, the worker is skipped, which is
# said.
#
# Closes with "N passed, N failed".  PG_CONFIG in the environment names the
# PostgreSQL to use; when outbox is not installed there, it is built and
# installed into a private copy.

set -u
set -o pipefail
. "$(dirname "$0")/../common.sh"

[ $# -gt 0 ] || set -- worker.sh worker.py worker.js
passed=0
failed=0

finish() {
	status=$?
	trap - EXIT
	[ -z "$(jobs -p)" ] || kill -KILL $(jobs -p) 2>/dev/null
	[ ! -e "${scratch:-}/data/postmaster.pid" ] ||
		as_tester "$bin/pg_ctl" -D "$scratch/data" -m fast -w stop >/dev/null
	if [ $status -ne 0 ] && [ -e "${scratch:-}/log" ]; then
		say '--- the server'"'"'s log'
		tail -n 60 "$scratch/log"
	fi
	cd / && rm -rf "${scratch:-}"
	exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM

find_server
if [ -e "$("$PG_CONFIG" --sharedir)/extension/outbox.control" ]; then
	scratch=$(mktemp -d /tmp/outbox-examples.XXXXXX) || exit 1
	export HOME=$scratch
	cd "$scratch" || exit 1
	[ "$(id -u)" -ne 0 ] || chown "$(tester)" "$scratch"
else
	make_scratch outbox-examples
	as_tester make -s -C "$scratch/outbox" -j "$(nproc)" PG_CONFIG="$PG_CONFIG" with_llvm=no \
		all install >"$scratch/build.log" 2>&1 || {
		cat "$scratch/build.log"
		die 'the build failed'
	}
fi
bin=$("$PG_CONFIG" --bindir)
chmod 755 "$scratch"
mkdir -p "$scratch/examples"
cp "$top"/test/examples/worker.* "$scratch/examples"

as_tester "$bin/initdb" -N -A trust -U postgres -D "$scratch/data" >/dev/null ||
	die 'initdb failed'
as_tester tee -a "$scratch/data/postgresql.conf" >/dev/null <<CONF
shared_preload_libraries = 'outbox'
listen_addresses = ''
unix_socket_directories = '$scratch'
max_worker_processes = 32
CONF
as_tester "$bin/pg_ctl" -D "$scratch/data" -l "$scratch/log" -w start >/dev/null ||
	die 'the server did not start'

export PGHOST=$scratch PATH=$bin:$PATH
# unlike runuser, this does not stay between us and the worker
as=()
[ "$(id -u)" -ne 0 ] || as=(setpriv --reuid="$(tester)" --regid="$(id -gn "$(tester)")" --init-groups)

# sql QUERY: as superuser, in the database of the worker under test
sql() {
	timeout 120 "${as[@]}" "$bin/psql" -XAtq -v ON_ERROR_STOP=1 -U postgres -d "$database" <<<"$1"
}

# result NAME STATUS: count one check
result() {
	if [ "$2" -eq 0 ]; then
		say "ok: $1"
		passed=$((passed + 1))
	else
		say "FAILED: $1"
		failed=$((failed + 1))
	fi
}

# until_true QUERY: poll until it is true, for a minute at most
until_true() {
	local i

	for ((i = 0; i < 600; i++)); do
		[ "$(sql "$1")" != t ] || return 0
		sleep 0.1
	done
	say "not true within a minute: $1"
	return 1
}

# try_packages PACKAGE ...: install them from Debian; if that cannot be, say why
# in why
try_packages() {
	why=$( (install_packages "$@") 2>&1) || {
		why=$(grep -m 1 '^E: ' <<<"$why" || tail -n 1 <<<"$why")
		return 1
	}
}

# What the worker in Python runs with
find_python() {
	python=$(as_tester bash -c 'command -v python3')
	if [ -n "$python" ]; then
		! as_tester "$python" -c 'import psycopg' 2>/dev/null || return 0
		if as_tester "$python" -m venv "$scratch/venv" &&
			as_tester timeout 120 "$scratch/venv/bin/pip" install --quiet 'psycopg[binary]'; then
			python=$scratch/venv/bin/python
			return 0
		fi >"$scratch/pip.log" 2>&1
	fi
	try_packages python3-psycopg && python=$(as_tester bash -c 'command -v python3') &&
		as_tester "$python" -c 'import psycopg'
}

# What the worker in Node runs with
find_node() {
	node=$(as_tester bash -c 'command -v node')
	if [ -n "$node" ]; then
		! as_tester "$node" -e 'require("pg")' 2>/dev/null || return 0
		as_tester mkdir -p "$scratch/npm"
		if as_tester timeout 120 npm install --silent --no-fund --no-audit --prefix "$scratch/npm" pg; then
			export NODE_PATH=$scratch/npm/node_modules
			return 0
		fi >"$scratch/npm.log" 2>&1
	fi
	try_packages nodejs node-pg && node=$(as_tester bash -c 'command -v node') &&
		as_tester "$node" -e 'require("pg")'
}

# The handler of the worker in bash
tee "$scratch/examples/index-note" >/dev/null <<'HANDLER'
#!/bin/bash
psql -Xq -v ON_ERROR_STOP=1 -v seq="$OUTBOX_SEQ" -v payload="$(cat)" <<<"
	INSERT INTO note_index (seq, title) VALUES (:'seq', :'payload'::jsonb ->> 'title')
	ON CONFLICT (seq) DO NOTHING"
HANDLER
chmod -R a+rX "$scratch/examples"
chmod a+x "$scratch/examples/index-note"

# start: start one more of the workers under test, and set worker to its pid
start() {
	PGUSER=worker PGDATABASE=$database "${as[@]}" "${command[@]}" >>"$scratch/$database.log" 2>&1 &
	worker=$!
}

# stop PID: tell a worker to stop; it must do so within 10 s, and say that all
# is well.
stop() {
	local i

	kill -TERM "$1"
	for ((i = 0; i < 100; i++)); do
		if ! kill -0 "$1" 2>/dev/null; then
			wait "$1"
			return
		fi
		sleep 0.1
	done
	say 'it did not stop within 10 s'
	return 1
}

# kill_at_work PID: end a worker by force while it holds jobs
kill_at_work() {
	local i

	for ((i = 0; i < 300; i++)); do
		kill -STOP "$1"
		if [ "$(sql "SELECT (SELECT count(*) > 1 FROM outbox.job_status WHERE state = 'running')
				AND (SELECT count(*) > 15 FROM note_index)")" = t ]; then
			kill -KILL "$1"
			wait "$1" 2>/dev/null
			return 0
		fi
		kill -CONT "$1"
		sleep 0.05
	done
	say 'it was never seen at work'
	kill -KILL "$1"
	return 1
}

# try NAME COMMAND ...: the worker NAME, started by COMMAND
try() {
	local name=$1 first second

	shift
	command=("$@")
	database=postgres
	sql "CREATE DATABASE ${name#*.}" || die 'cannot make a database'
	database=${name#*.}
	sql "SET client_min_messages = warning;
		CREATE EXTENSION outbox;
		CREATE TABLE note_index (seq bigint PRIMARY KEY, title text NOT NULL);
		CREATE FUNCTION take_time() RETURNS trigger LANGUAGE plpgsql AS
			'BEGIN PERFORM pg_sleep(0.02); RETURN NEW; END';
		CREATE TRIGGER take_time BEFORE INSERT ON note_index FOR EACH ROW EXECUTE FUNCTION take_time();
		GRANT INSERT, SELECT ON note_index TO worker;
		SELECT outbox.grant('worker', 'consume');
		SET ROLE worker;
		SELECT outbox.subscribe('search-index', '{note.*}', max_attempts => 3, lease => '2s',
			retry_min => '100ms', retry_max => '200ms');
		RESET ROLE;
		SELECT count(outbox.record('note.created', 'note/' || i,
			CASE WHEN i % 20 = 0 THEN '{}' ELSE jsonb_build_object('title', 'It''s a \"note\" ' || i) END))
		FROM generate_series(1, 200) i" >/dev/null || die 'cannot prepare the database'

	start
	kill_at_work "$worker"
	result "$name is killed while it works" $?
	start
	first=$worker
	start
	second=$worker
	until_true "SELECT count(*) = 200 FROM outbox.job_status WHERE state IN ('done', 'dead')"
	result "$name: others handle all that can be handled" $?
	[ "$(sql "SELECT count(*) > 0 FROM outbox.job_status WHERE state = 'done' AND attempts > 1")" = t ]
	result "$name: what the killed one held was claimed again" $?
	[ "$(sql "SELECT count(*) = 10 AND bool_and(attempts = 3 AND last_error <> '') FROM outbox.dead_jobs")" = t ]
	result "$name: jobs that always fail are dead after their last attempt" $?

	sql "ALTER TABLE note_index ALTER title DROP NOT NULL; SELECT outbox.retry_dead('search-index')" >/dev/null
	until_true "SELECT count(*) = 200 FROM outbox.job_status WHERE state = 'done'"
	result "$name: retried when the cause is mended, they are done" $?
	[ "$(sql "SELECT count(*) = 200 FROM outbox.events e JOIN note_index n ON n.seq = e.seq
			AND n.title IS NOT DISTINCT FROM e.payload ->> 'title' WHERE e.type = 'note.created'")" = t ]
	result "$name: each event was handled" $?

	stop "$first"
	result "$name stops while it waits" $?
	sql "CREATE OR REPLACE FUNCTION take_time() RETURNS trigger LANGUAGE plpgsql AS
			'BEGIN PERFORM pg_sleep(0.5); RETURN NEW; END';
		SELECT count(outbox.record('note.updated', 'note/' || i, '{\"title\": \"new\"}'))
		FROM generate_series(1, 10) i" >/dev/null
	until_true "SELECT count(*) FILTER (WHERE state = 'done') > 200 AND count(*) FILTER (WHERE state = 'running') > 1
		FROM outbox.job_status"
	result "$name works on a batch" $?
	stop "$second"
	result "$name stops while it works" $?
	[ "$(sql "SELECT count(*) FILTER (WHERE state = 'done') = (SELECT count(*) FROM note_index)
				AND count(*) FILTER (WHERE state = 'waiting' AND attempts = 0) > 0
				AND count(*) FILTER (WHERE state NOT IN ('done', 'waiting')) = 0
			FROM outbox.job_status")" = t ]
	result "$name: the job in hand was finished, the others were released" $?

	start
	until_true "SELECT count(*) = 210 FROM outbox.job_status WHERE state = 'done'"
	result "$name: another handles these" $?
	kill -KILL "$worker"
	wait "$worker" 2>/dev/null
	[ $failed -eq 0 ] || tail -n 20 "$scratch/$database.log"
}

database=postgres
sql 'CREATE ROLE worker LOGIN' || die 'cannot make a role'
for name; do
	case $name in
		worker.sh)
			try "$name" bash "$scratch/examples/$name" search-index "$scratch/examples/index-note"
			;;
		worker.py)
			if find_python; then
				say "$("$python" --version), psycopg $("$python" -c 'import psycopg; print(psycopg.__version__)')"
				try "$name" "$python" "$scratch/examples/$name" dbname=py search-index
			else
				say "skipped: $name: psycopg is not there, and cannot be had: $why"
			fi
			;;
		worker.js)
			if find_node; then
				say "Node $("$node" --version), pg $("$node" -p 'require("pg/package.json").version')"
				try "$name" "$node" "$scratch/examples/$name" postgresql:///js search-index
			else
				say "skipped: $name: pg is not there, and cannot be had: $why"
			fi
			;;
		*) die "no such worker: $name" ;;
	esac
done
say "$passed passed, $failed failed"
[ $failed -eq 0 ]
