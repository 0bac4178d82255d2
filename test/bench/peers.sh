#!/bin/bash
#
# Measure the extension beside other queues, all on one server that is started
# for it, in alternating runs.
#
#	test/bench/peers.sh [WORK ...]	default: all of them
#		a	rate of the business transaction with one event recorded
#		b	a backlog of 100,000 events fanned out to 3 subscribers
#		c	300,000 jobs consumed that do nothing
#		d	from commit to consumer: idle, and at 1,000 events a second
#		e	b and c with an old snapshot held, 500,000 events deep
#		f	b with 5,000,000 handled events in the tables
#		g	b with 1,000 subscriptions
#		h	2,000 events a second for 3 subscribers, 10 minutes or HOUR=1
#
#	PEERS="pgq pgmq"	only these (default: every directory of peers/)
#	RUNS=5			alternating runs, of which the median counts
#	SCALE=1			shrinks tables and times for a quick look
#	CLIENTS="1 4 16 64"	for a
#	PEERS_CACHE=DIR		where packages of npm, Go and Python stay
#
# All of it takes most of a day; each work can be run by itself.  After each
# measurement the jobs are counted, and a wrong count ends the script.  The
# results are written to test/bench/results/peers/, a quick look (another SCALE,
# fewer RUNS, only some PEERS) to test/bench/results/quick/.

set -euE
trap 'printf "%s: line %s failed: %s\n" "${0##*/}" "$LINENO" "$BASH_COMMAND" >&2' ERR
. "$(dirname "$0")/../common.sh"
here=$top/test/bench/peers
. "$here/app-outbox.sh"

SCALE=${SCALE:-1}
RUNS=${RUNS:-5}
read -ra CLIENTS <<<"${CLIENTS:-1 4 16 64}"
works=("$@")
[ $# -gt 0 ] || works=(a b c d e f g h)
for work in "${works[@]}"; do
	case $work in [a-h]) ;; *) die "no such work: $work" ;; esac
done
results=$top/test/bench/results/peers
if [ "$SCALE" != 1 ] || [ "$RUNS" -lt 5 ] || [ -n "${PEERS:-}" ]; then
	results=$top/test/bench/results/quick
fi
if [ -n "${PEERS:-}" ]; then
	read -ra peers <<<"$PEERS"
else
	# ours first, then as the directory has them
	peers=(outbox)
	for peer in "$here"/*/peer.sh; do
		peer=$(basename "$(dirname "$peer")")
		[ "$peer" = outbox ] || peers+=("$peer")
	done
fi
if [ -n "${PEERS_CACHE:-}" ]; then
	cache=$PEERS_CACHE
elif [ "$(id -u)" -eq 0 ]; then
	cache=/var/cache/outbox-peers
else
	cache=${XDG_CACHE_HOME:-$HOME/.cache}/outbox-peers
fi
callers_home=$HOME

event_type=order.created
event_payload='{"total": 100}'

#
# What the functions of a peer find
#

scaled() { awk -v n="$1" -v s="$SCALE" 'BEGIN { n = int(n * s); print (n < 1) ? 1 : n }'; }
median() { sort -n | awk '{ a[NR] = $1 } END { print (NR % 2) ? a[(NR + 1) / 2] : (a[NR / 2] + a[NR / 2 + 1]) / 2 }'; }
now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.6f\n", b - a }'; }
sql() { "$bin/psql" -X -q -A -t -v ON_ERROR_STOP=1 "$@"; }
per_second() { awk -v n="$1" -v s="$2" 'BEGIN { printf "%.0f\n", n / s }'; }

# must_be WHAT EXPECTED QUERY: a count that has to be right
must_be() {
	local got
	got=$(sql -c "$3")
	[ "$got" = "$2" ] || die "$peer${variant:+ ($variant)}: $1: expected $2, found $got"
}

# handled_once N: $scratch/handled, with a line for each call of a handler that
# ends in its key (and a time), has N different keys and none twice
handled_once() {
	local got
	got=$(cut -d ' ' -f 2 "$scratch/handled" | sort | uniq -c | awk '{ n++; if ($1 > 1) d++ } END { print n + 0, d + 0 }')
	[ "$got" = "$1 0" ] || die "$peer${variant:+ ($variant)}: expected $1 jobs handled and none twice, found $got"
}

# unavailable REASON: leave the peer out
unavailable() {
	reasons[$peer]=$1
	say "$peer is left out: $1"
}

# long-running programs, ended by stop_workers in the opposite order
worker_names=()
worker_pids=()
start_worker() {
	local name=$1
	shift
	# a process group of its own: the command may be a function, whose shell
	# would end alone
	set -m
	"$@" >"$scratch/$name.log" 2>&1 </dev/null &
	set +m
	worker_names+=("$name")
	worker_pids+=($!)
}
stop_workers() {
	local i t
	for ((i = ${#worker_pids[@]} - 1; i >= 0; i--)); do
		kill -TERM -- "-${worker_pids[i]}" 2>/dev/null || :
		for ((t = 0; t < 1500; t++)); do
			kill -0 -- "-${worker_pids[i]}" 2>/dev/null || break
			sleep 0.02
		done
		kill -KILL -- "-${worker_pids[i]}" 2>/dev/null || :
		wait "${worker_pids[i]}" || [ $? -eq 143 ] || say "$peer: ${worker_names[i]} ended with an error: $(tail -n 3 "$scratch/${worker_names[i]}.log")" >&2
	done
	worker_names=() worker_pids=()
}
await_line() {
	local i
	for ((i = 0; i < 600; i++)); do
		! grep -q -- "$2" "$scratch/$1.log" || return 0
		sleep 0.05
	done
	tail -n 20 "$scratch/$1.log" >&2
	die "$peer: $1 does not say \"$2\""
}

#
# The server and the peers
#

prefix() { echo "${1//-/_}"; }
has() { declare -F "$(prefix "$peer")_$1" >/dev/null; }
call() { local f; f=$(prefix "$peer")_$1; shift; "$f" "$@"; }
call_if() { ! has "$1" || call "$@"; }

declare -A reasons=()
packages=(libpq-dev)
command -v python3 >/dev/null || packages+=(python3)
for peer in "${peers[@]}"; do
	[ -e "$here/$peer/peer.sh" ] || die "no such peer: $peer"
	. "$here/$peer/peer.sh"
	! has packages || read -ra more <<<"$(call packages | tr '\n' ' ')"
	! has packages || packages+=("${more[@]}")
done

find_server "${packages[@]}"
make_scratch outbox-peers
bin=$("$PG_CONFIG" --bindir)
data=$scratch/data
holder=
finish() {
	local status=$?
	trap - EXIT
	[ -z "$holder" ] || kill "$holder" 2>/dev/null || :
	for pid in "${worker_pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || :; done
	[ ! -e "$data/postmaster.pid" ] || as_tester "$bin/pg_ctl" -D "$data" -m immediate -w stop >/dev/null || :
	if [ $status -ne 0 ] && [ -n "${KEEP:-}" ]; then
		say "kept: $scratch" >&2
	else
		rm -rf "$scratch"
	fi
	exit $status
}
trap finish EXIT
trap 'exit 1' INT TERM
mkdir -p "$cache" "$results"
export HOME=$callers_home

as_tester make -s -C "$scratch/outbox" PG_CONFIG="$PG_CONFIG" with_llvm=no install >/dev/null
gcc -O2 -Wall -I"$("$PG_CONFIG" --includedir)" "$here/client.c" -o "$scratch/client" -lpq -lm -lpthread
client=$scratch/client

usable=()
for peer in "${peers[@]}"; do
	mkdir -p "$cache/$peer"
	call_if install
	[ -n "${reasons[$peer]:-}" ] || usable+=("$peer")
done
peers=("${usable[@]}")

as_tester "$bin/initdb" -N -A trust -U postgres -D "$data" >/dev/null
# Beside fsync, synchronous_commit, wal_level and all else at their defaults:
# room for the tables, and no checkpoint in the middle of one side's measurement
# (there is one right before each).
cat >"$scratch/settings.conf" <<CONF
shared_preload_libraries = 'outbox'
shared_buffers = 1GB
max_wal_size = 16GB
checkpoint_timeout = 1h
max_connections = 200
max_worker_processes = 16
CONF
{
	cat "$scratch/settings.conf"
	echo "listen_addresses = ''"
	echo "unix_socket_directories = '$scratch'"
} >>"$data/postgresql.conf"
as_tester "$bin/pg_ctl" -w -D "$data" -l "$scratch/log" start >/dev/null
export PGOPTIONS="-c client_min_messages=warning"
export PGHOST=$scratch PGUSER=postgres PGPORT=5432 PGDATABASE=postgres

machine() {
	say "$(awk -F': ' '/model name/ { print $2; exit }' /proc/cpuinfo), $(nproc) cores," \
		"$(awk '/MemTotal/ { printf "%.0f GB", $2 / 1048576 }' /proc/meminfo), Linux $(uname -r)," \
		"$("$PG_CONFIG" --version)"
}

# the exact configuration, beside the results
write_configuration() {
	{
		say "# What was measured, and how"
		say
		say "Machine: $(machine)."
		say "outbox of commit $(git -C "$top" rev-parse --short HEAD 2>/dev/null || echo unknown), $(date -u +%F)."
		say "RUNS=$RUNS SCALE=$SCALE."
		say
		say "## The server"
		say
		say "One server for all; each run of each peer in a database of its own, dropped afterwards. These settings,"
		say "and PostgreSQL's defaults for all others:"
		say
		say '```'
		cat "$scratch/settings.conf"
		say '```'
		say
		say "fsync = $(sql -c 'SHOW fsync'), synchronous_commit = $(sql -c 'SHOW synchronous_commit')," \
			"full_page_writes = $(sql -c 'SHOW full_page_writes'), wal_level = $(sql -c 'SHOW wal_level')," \
			"autovacuum = $(sql -c 'SHOW autovacuum'), jit = $(sql -c 'SHOW jit')."
		for peer in "${peers[@]}"; do
			say
			say "## $peer"
			say
			say "Version: $(call_if version)"
			say
			call_if config
		done
		for peer in "${!reasons[@]}"; do
			say
			say "## $peer: left out"
			say
			say "${reasons[$peer]}"
		done
	} >"$results/configuration.md"
}

# a new database for a run of the peer
fresh() {
	local database
	database=bench_$(prefix "$peer")
	PGDATABASE=postgres "$bin/dropdb" --if-exists --force "$database" 2>/dev/null
	PGDATABASE=postgres "$bin/createdb" -T template0 "$database"
	PGDATABASE=$database
	rm -f "$scratch"/handled*
	sql -c "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text)"
	call setup "$1"
}
drop() {
	stop_workers
	PGDATABASE=postgres "$bin/dropdb" --force "$PGDATABASE"
	PGDATABASE=postgres
}
# the same state on every side, right before what is timed
ready() { sql -c "VACUUM (ANALYZE)" -c CHECKPOINT; }

# variants_of WORK: names; one that is empty if there is only one way
variants_of() {
	if has "$1_variants"; then
		call "$1_variants"
	elif [ "$1" = steady ]; then
		# the main one of those for latency
		variants_of latency | awk '{ print $1; exit }'
	else
		echo -
	fi
}
# each FUNCTION WORK NEEDED ...: for each peer and variant that has the functions
each() {
	local function=$1 way=$2 needed
	shift 2
	for peer in "${order[@]}"; do
		for needed; do
			has "$needed" || continue 2
		done
		for variant in $(variants_of "$way"); do
			[ "$variant" != - ] || variant=
			"$function"
		done
	done
}
# alternate FUNCTION WORK NEEDED ...: RUNS times, each time beginning with another peer
alternate() {
	local i
	for ((run = 1; run <= RUNS; run++)); do
		order=()
		for ((i = 0; i < ${#peers[@]}; i++)); do
			order+=("${peers[(i + run - 1) % ${#peers[@]}]}")
		done
		each "$@"
	done
}
# note METRIC VALUE: a measurement, also shown as it comes
note() {
	printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$work" "$peer" "${variant:--}" "$run" "$1" "$2" >>"$results/$work.tsv.new"
	say "$work $peer${variant:+ ($variant)} run $run: $1 $2"
}

#
# The works
#

measure_a() {
	local clients n total=0 tps seconds
	seconds=$(scaled "${BENCH_SECONDS:-8}")
	fresh 3
	call record_sql >"$scratch/record.sql"
	call_if record_start
	for clients in "${CLIENTS[@]}"; do
		ready
		"$bin/pgbench" -n -M prepared -c "$clients" -j 2 -T "$seconds" -f "$scratch/record.sql" >"$scratch/pgbench" 2>"$scratch/pgbench.err" ||
			die "$peer: $(tail -n 3 "$scratch/pgbench.err")"
		! grep -q "failed transactions: [1-9]" "$scratch/pgbench" || die "$peer: failed transactions"
		tps=$(awk '/^tps/ { printf "%.0f", $3 }' "$scratch/pgbench")
		n=$(awk '/transactions actually processed/ { split($NF, p, "/"); print p[1] }' "$scratch/pgbench")
		total=$((total + n))
		note "tx/s, $clients clients" "$tps"
	done
	must_be "orders" "$total" "SELECT count(*) FROM orders"
	call_if record_stop
	call record_check "$total"
	drop
}
work_a() { alternate measure_a record record_sql record_check; }

# events a second of a backlog of N
fan_out() {
	call fanout_load "$1"
	ready
	per_second "$1" "$(call fanout "$1")"
}
measure_b() {
	local n
	n=$(scaled 100000)
	fresh 3
	note "events/s" "$(fan_out "$n")"
	call fanout_check "$n"
	drop
}
work_b() { alternate measure_b fanout fanout_load fanout fanout_check; }

consume() {
	call consume_load "$1"
	ready
	per_second "$1" "$(call consume "$1")"
}
measure_c() {
	local n
	n=$(scaled 300000)
	fresh 1
	note "jobs/s" "$(consume "$n")"
	call consume_check "$n"
	drop
}
work_c() { alternate measure_c consume consume_load consume consume_check; }

# wait until N lines have come in
await_consumed() {
	local n=0 before=-1 still=0
	while [ "$n" -lt "$1" ]; do
		sleep 0.5
		n=$(cat "$scratch"/consumed* 2>/dev/null | wc -l)
		if [ "$n" -eq "$before" ]; then still=$((still + 1)); else still=0; fi
		[ $still -lt 120 ] || die "$peer${variant:+ ($variant)}: only $n of $1 jobs have come"
		before=$n
	done
}
latency() { # MODE RATE SECONDS CONNECTIONS
	local n sent
	fresh 1
	rm -f "$scratch"/consumed*
	call consumer_start "$scratch/consumed"
	sql -c CHECKPOINT
	# the first two seconds are left out: plans and connections
	sent=$("$client" produce "$2" "$(($3 + 2))" "$4" "$scratch/produced" "$(call latency_sql)")
	await_consumed "$sent"
	call consumer_stop
	"$client" latency "$scratch/produced" 1 2 1000000 "$scratch"/consumed* >"$scratch/latency" ||
		die "$peer${variant:+ ($variant)}: events were lost or came twice"
	read -r n p50 p99 p999 s50 s99 s999 _ <"$scratch/latency"
	note "$1, p50 ms" "$p50"
	note "$1, p99 ms" "$p99"
	note "$1, p99.9 ms" "$p999"
	note "$1, events committed a second" "$(per_second "$sent" "$(($3 + 2))")"
	note "$1, p50 ms from sending COMMIT" "$s50"
	note "$1, p99 ms from sending COMMIT" "$s99"
	note "$1, p99.9 ms from sending COMMIT" "$s999"
	drop
}
# at random times, so that what polls is met in every phase of its poll
measure_d() {
	latency "idle" 20 "$(scaled 60)" 2
	latency "1,000/s" 1000 "$(scaled 30)" 16
}
work_d() { alternate measure_d latency latency_sql consumer_start consumer_stop; }

hold_snapshot() {
	mkfifo "$scratch/holder"
	sql >/dev/null <"$scratch/holder" &
	holder=$!
	exec 9>"$scratch/holder"
	echo "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 FROM orders LIMIT 1;" >&9
	until [ "$(sql -c "SELECT count(*) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database() AND backend_xmin IS NOT NULL AND state = 'idle in transaction'")" = 1 ]; do
		sleep 0.1
	done
}
end_snapshot() {
	exec 9>&-
	wait "$holder" || :
	holder=
	rm -f "$scratch/holder"
}
# the first and the last of ten pieces, with a snapshot held that is older than all
deep() { # LABEL LOAD-AND-MEASURE CHECK PIECE
	local i rate rates=()
	hold_snapshot
	for ((i = 0; i < 10; i++)); do
		rate=$("$2" "$4")
		rates+=("$rate")
	done
	sleep 1.5 # statistics of the last transactions come in
	note "$1, start" "${rates[0]}"
	note "$1, end" "${rates[9]}"
	note "$1, dead rows" "$(sql -c "SELECT sum(n_dead_tup) FROM pg_stat_user_tables")"
	end_snapshot
	call "$3" "$((10 * $4))"
}
measure_e_fanout() {
	fresh 3
	deep "fan-out" fan_out fanout_check "$(scaled 50000)"
	drop
}
measure_e_consume() {
	fresh 1
	deep "jobs" consume consume_check "$(scaled 50000)"
	drop
}
work_e() {
	alternate measure_e_fanout fanout fanout_load fanout fanout_check
	alternate measure_e_consume consume consume_load consume consume_check
}

measure_f() {
	local n
	n=$(scaled 100000)
	fresh 3
	note "empty tables" "$(fan_out "$n")"
	call history "$(scaled 5000000)"
	note "5,000,000 handled" "$(fan_out "$n")"
	call fanout_check "$((2 * n))"
	drop
}
work_f() { alternate measure_f fanout fanout_load fanout fanout_check history; }

measure_g() {
	local n
	n=$(scaled 100000)
	fresh 3
	note "3 subscriptions" "$(fan_out "$n")"
	call subscribe_others 997
	note "1,000 subscriptions" "$(fan_out "$n")"
	call fanout_check "$((2 * n))"
	drop
}
work_g() { alternate measure_g fanout fanout_load fanout fanout_check subscribe_others; }

# memory of its own, in kB, of a process and its children
memory() {
	local child
	awk '/^Pss_Anon:/ { print $2 }' "/proc/$1/smaps_rollup" 2>/dev/null || :
	for child in $(cat "/proc/$1/task"/*/children 2>/dev/null); do memory "$child"; done
}
# tables, indexes and memory, as they are now
footprint() { # WHEN
	local i pid name
	note "tables, $1, MB" "$(sql -c "SELECT round(sum(pg_table_size(c.oid)) / 1048576.0) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
		WHERE relkind IN ('r', 'm') AND nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast') AND relname <> 'orders'")"
	note "indexes, $1, MB" "$(sql -c "SELECT round(sum(pg_indexes_size(c.oid)) / 1048576.0) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
		WHERE relkind IN ('r', 'm') AND nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast') AND relname <> 'orders'")"
	for ((i = 0; i < ${#worker_pids[@]}; i++)); do
		note "memory of ${worker_names[i]}, $1, MB" "$(memory "${worker_pids[i]}" | awk '{ s += $1 } END { printf "%.1f", s / 1024 }')"
	done
	sql -F ' ' -c "SELECT pid, replace(CASE backend_type WHEN 'client backend' THEN 'server process of ' || COALESCE(NULLIF(application_name, ''), 'a client') ELSE backend_type END, ' ', '_')
		FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name <> 'producer'
			AND backend_type <> 'autovacuum worker' ORDER BY backend_start" | while read -r pid name; do
		echo "$name $(memory "$pid" | awk '{ s += $1 } END { print s / 1024 }')"
	done | awk '{ n[$1]++; s[$1] += $2 } END { for (k in n) printf "%s%s\t%.1f\n", k, (n[k] > 1) ? " x " n[k] : "", s[k] }' | sort |
		while IFS=$'\t' read -r name pid; do note "memory of ${name//_/ }, $1, MB" "$pid"; done
}
measure_h() {
	local seconds n producer rate window
	seconds=$(scaled "$([ -n "${HOUR:-}" ] && echo 3600 || echo 600)")
	window=$((seconds / 10 < 60 ? seconds / 10 : 60))
	fresh 3
	rm -f "$scratch"/consumed*
	call_if retention "$(scaled 300)"
	call consumer_start "$scratch/consumed"
	sql -c CHECKPOINT
	"$client" produce 2000 "$seconds" 16 "$scratch/produced" "$(call latency_sql)" >"$scratch/sent" &
	producer=$!
	sleep "$window"
	footprint start
	# the end is while events still come, or the last ones would be free of load
	sleep "$((seconds - 2 * window))"
	footprint end
	wait "$producer" || die "$peer${variant:+ ($variant)}: the producer failed"
	n=$(cat "$scratch/sent")
	await_consumed "$((3 * n))"
	call consumer_stop
	for when in start end; do
		[ $when = start ] && from=2 || from=$((seconds - window))
		"$client" latency "$scratch/produced" 3 "$from" "$((from + window))" "$scratch"/consumed* >"$scratch/latency" ||
			die "$peer${variant:+ ($variant)}: events were lost or came twice"
		read -r _ p50 p99 p999 _ _ _ rate <"$scratch/latency"
		note "jobs/s, $when" "$rate"
		note "p50 ms, $when" "$p50"
		note "p99 ms, $when" "$p99"
	done
	drop
}
work_h() {
	# a run takes as long as it says, for each peer: one, unless asked for more
	local RUNS=${HOUR_RUNS:-1}
	alternate measure_h steady latency_sql consumer_start consumer_stop
}

say "$(machine); scale $SCALE, median of $RUNS; $(for peer in "${peers[@]}"; do printf '%s; ' "$(call_if version)"; done)"
write_configuration
for work in "${works[@]}"; do
	{
		say "# machine: $(machine)"
		say "# outbox of commit $(git -C "$top" rev-parse --short HEAD 2>/dev/null || echo unknown), $(date -u +%F); RUNS=$RUNS SCALE=$SCALE"
		for peer in "${peers[@]}"; do
			say "# version $peer: $(call_if version)"
		done
		for peer in "${peers[@]}"; do
			! has why_not || ! reason=$(call why_not "$work") || [ -z "$reason" ] || say "# why not $peer: $reason"
		done
		for peer in "${!reasons[@]}"; do
			say "# why not $peer: ${reasons[$peer]}"
		done
	} >"$results/$work.tsv.new"
	"work_$work"
	mv "$results/$work.tsv.new" "$results/$work.tsv"
	python3 "$here/report.py" "$results"
done
say "written: $results/results.md, results.svg, configuration.md"
