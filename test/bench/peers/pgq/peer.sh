# PgQ, with pgqd for its ticks.  Read by peers.sh.

pgq_packages() { echo postgresql-15-pgq3 pgqd; }
pgq_install() {
	[ -e "$("$PG_CONFIG" --sharedir)/extension/pgq.control" ] || unavailable "only packaged for PostgreSQL 15 of Debian"
}
pgq_version() { say "PgQ $(dpkg-query -W -f '${Version}' postgresql-15-pgq3), pgqd $(dpkg-query -W -f '${Version}' pgqd)"; }
pgq_config() {
	cat <<'MD'
One queue, one registered consumer for each subscriber. Client: `client.c`, which calls the documented functions
(`pgq.next_batch`, `pgq.get_batch_events`, `pgq.finish_batch`). PgQ writes nothing for a subscriber but the end of its
batch: there is no retry of one event without `pgq.event_retry`, and each consumer is one session.

| setting | reason | where |
|---|---|---|
| `pgqd`: `ticker_period = 0.01` instead of 1 | a tick is what ends a batch, so latency is at best a tick; at the default an event waits for half a second | pgqd(1), ticker_period |
| queue: `ticker_max_lag = 0` instead of 3 seconds | a tick whenever there is something | pgq.set_queue_config (Functions.html); pgq.ticker |
| d: `next_batch` every 5 ms when there was none | PgQ wakes nobody: "Consumer should sleep then" | pgq.next_batch_info |
| d, `default`: pgqd and queue as they come, `next_batch` every second | what a user gets who sets nothing | pgqd(1) |
| b, c: a tick for each 10,000 events | batches as pgqd makes them at such a rate and a tick a second | pgq.ticker |
| h: `rotation_period` = the retention | the way in which PgQ forgets | pgq.set_queue_config |

b: three consumers read the backlog at the same time, each all of it: that is PgQ's fan-out.
MD
}
pgq_why_not() { [ "$1" != g ] || say "it has no routing: every consumer of a queue reads all of it"; }
pgq_setup() {
	sql -c "SET client_min_messages = warning" -c "CREATE EXTENSION pgq" -c "SELECT pgq.create_queue('q')" >/dev/null
	sql -c "SELECT pgq.register_consumer('q', 's' || i) FROM generate_series(1, $1) i" >/dev/null
	: >"$scratch/handled.pgq"
}
pgq_daemon() { # SETTING ...
	{
		say "[pgqd]"
		say "base_connstr = host=$scratch port=5432 user=postgres"
		say "database_list = $PGDATABASE"
		say "initial_database = $PGDATABASE"
		say "syslog = 0"
		printf '%s\n' "$@"
	} >"$scratch/pgqd.ini"
	chmod 644 "$scratch/pgqd.ini"
	start_worker pgqd as_tester /usr/bin/pgqd "$scratch/pgqd.ini"
}
# the key of an event is what the payload says, or its number
pgq_consume_run() { # SUBSCRIBER OPTION ...
	local s=$1
	shift
	"$client" consume --subscriber "$s" --begin "SELECT pgq.next_batch('q', '$s')" "$@" \
		"SELECT COALESCE(ev_data::jsonb->>'key', ev_id::text), ev_id, 0, ev_type, ev_extra1, ev_data FROM pgq.get_batch_events(\$1::bigint)" \
		"SELECT pgq.finish_batch(:token::bigint)"
}

# a
pgq_record_sql() {
	cat <<SQL
BEGIN;
INSERT INTO orders (note) VALUES ('x');
SELECT pgq.insert_event('q', '$event_type', '$event_payload', 'order/1', NULL, NULL, NULL);
COMMIT;
SQL
}
pgq_record_start() { pgq_daemon; }
pgq_record_stop() { stop_workers; }
pgq_record_check() { must_be "events" "$1" "SELECT count(*) FROM pgq.event_template"; }

# b
pgq_fanout_load() {
	local i
	for ((i = 0; i < $1; i += 10000)); do
		sql -c "SELECT count(pgq.insert_event('q', '$event_type', '$event_payload', 'order/' || i, NULL, NULL, NULL))
				FROM generate_series($i + 1, least($1, $i + 10000)) i" -c "SELECT pgq.force_tick('q')" -c "SELECT pgq.ticker('q')" >/dev/null
	done
}
pgq_fanout() {
	local i t0 pids=()
	t0=$(now)
	for i in 1 2 3; do
		pgq_consume_run s$i --drain --file "$scratch/handled.pgq" >"$scratch/pgq.s$i" &
		pids+=($!)
	done
	wait "${pids[@]}"
	# the slowest of the three, without the start of the program
	sort -n "$scratch"/pgq.s[123] | awk 'END { print $1 }'
}
pgq_fanout_check() {
	local got
	got=$(awk '{ n[$1 " " $2]++ } END { for (k in n) { if (n[k] > 1) d++; c++ } print c + 0, d + 0 }' "$scratch/handled.pgq")
	[ "$got" = "$((3 * $1)) 0" ] || die "$peer: expected $((3 * $1)) events handled and none twice, found $got"
}
pgq_history() {
	mv "$scratch/handled.pgq" "$scratch/before.pgq"
	pgq_fanout_load "$1"
	pgq_fanout "$1" >/dev/null
	mv "$scratch/before.pgq" "$scratch/handled.pgq"
}

# c
pgq_consume_load() { pgq_fanout_load "$1"; }
pgq_consume() { pgq_consume_run s1 --drain --file "$scratch/handled" | awk '{ print $1 }'; }
pgq_consume_check() { handled_once "$1"; must_be "pending" 0 "SELECT pending_events FROM pgq.get_consumer_info('q', 's1')"; }

# d
pgq_latency_variants() { echo tuned default; }
pgq_latency_sql() { say "SELECT pgq.insert_event('q', '$event_type', jsonb_build_object('total', 100, 'key', \$1::text)::text, 'order/' || \$1::text, NULL, NULL, NULL)"; }
pgq_consumer_start() {
	local i poll=1000
	if [ "$variant" = default ]; then
		pgq_daemon
	else
		poll=5
		sql -c "SELECT pgq.set_queue_config('q', 'ticker_max_lag', '0')" >/dev/null
		pgq_daemon "ticker_period = 0.01"
	fi
	for i in $(sql -c "SELECT consumer_name FROM pgq.get_consumer_info('q') ORDER BY 1"); do
		start_worker "consumer-$i" pgq_consume_run "$i" --file "$1" --poll $poll
		await_line "consumer-$i" ready
	done
	sleep 1
}
pgq_consumer_stop() { stop_workers; }
pgq_retention() { sql -c "SELECT pgq.set_queue_config('q', 'rotation_period', '$1 seconds')" >/dev/null; }
