# pgmq: message queues in SQL.  Its Python client carries the SQL of the
# extension and installs it without one.  Read by peers.sh.

pgmq_python=1.1.4

pgmq_packages() { command -v pip3 >/dev/null || echo python3-pip; }
pgmq_install() {
	local wheel=$cache/pgmq/pgmq-$pgmq_python.whl
	if [ ! -e "$cache/pgmq/pgmq-$pgmq_python.sql" ]; then
		pip3 download -q --disable-pip-version-check --no-deps --only-binary :all: -d "$scratch/pip" "pgmq==$pgmq_python" >&2 &&
			python3 -m zipfile -e "$scratch/pip"/pgmq-$pgmq_python-*.whl "$scratch/pgmq" &&
			cp "$scratch/pgmq/pgmq/sql/VERSION" "$cache/pgmq/VERSION" &&
			cp "$scratch/pgmq/pgmq/sql/pgmq.sql" "$cache/pgmq/pgmq-$pgmq_python.sql" ||
			unavailable "its package cannot be had"
	fi
}
pgmq_version() { say "pgmq $(cat "$cache/pgmq/VERSION") (its SQL, from pgmq-py $pgmq_python)"; }
pgmq_config() {
	cat <<'MD'
The SQL of the extension as pgmq-py carries it, installed as its `install_pgmq_from_sql` does (README of pgmq-py, "SQL
Only"); logged, unpartitioned queues (`pgmq.create`, docs/api/sql/functions.md), since unlogged ones are lost in a crash.
Client: `client.c`, which calls the documented SQL functions.

| setting | reason | where |
|---|---|---|
| a: `pgmq.send_topic` bound to three queues (`topic`), three `pgmq.send` (`sends`), one (`one`) | three consumers need three queues; the topic is the documented fan-out | docs/topics.md; functions.md, send |
| b: a relay that claims 200 of `app.outbox` and calls `pgmq.send_batch` for each queue (`batch`), or `pgmq.send_batch_topic` (`topic`), and marks, in one transaction | the bulk calls | functions.md, send_batch; topics.md |
| c: `pgmq.read(queue, 300, 1000)`, then `pgmq.delete` (`deleted`) or `pgmq.archive` (`kept`) of the array of ids | batches and the array forms are the fast ones | functions.md, read, delete, archive |
| c: 2 connections | two cores | |
| d: `poll`: `pgmq.read_with_poll(..., poll_interval_ms => 10)`, where the default of 100 would be slower; `notify`: `pgmq.enable_notify_insert(queue, 0)` and LISTEN, without the throttle of 250 ms | the quickest that the documentation offers | functions.md, read_with_poll, enable_notify_insert |
MD
}
pgmq_setup() {
	sql -c "SET client_min_messages = warning" -c "CREATE SCHEMA IF NOT EXISTS pgmq" -f "$cache/pgmq/pgmq-$pgmq_python.sql" >/dev/null
	sql -c "SELECT pgmq.create('s' || i), pgmq.bind_topic('order.*', 's' || i) FROM generate_series(1, $1) i" >/dev/null
	app_outbox_create
}

# a
pgmq_record_variants() { echo topic sends one; }
pgmq_record_sql() {
	say "BEGIN;"
	say "INSERT INTO orders (note) VALUES ('x');"
	case $variant in
		topic) say "SELECT pgmq.send_topic('$event_type', '$event_payload');" ;;
		sends) say "SELECT pgmq.send('s1', '$event_payload'), pgmq.send('s2', '$event_payload'), pgmq.send('s3', '$event_payload');" ;;
		one) say "SELECT pgmq.send('s1', '$event_payload');" ;;
	esac
	say "COMMIT;"
}
pgmq_record_check() {
	local i
	for i in 1 2 3; do
		[ "$variant" != one ] || [ $i = 1 ] || continue
		must_be "messages of s$i" "$1" "SELECT count(*) FROM pgmq.q_s$i"
	done
}

# b
pgmq_fanout_variants() { echo batch topic; }
pgmq_fanout_load() { app_outbox_load "$1"; }
pgmq_fanout() {
	local insert
	case $variant in
		batch) insert="SELECT count(*) FROM (SELECT pgmq.send_batch(q, \$1::jsonb[]) FROM unnest('{s1,s2,s3}'::text[]) q) x" ;;
		topic) insert="SELECT count(*) FROM pgmq.send_batch_topic('$event_type', \$1::jsonb[])" ;;
	esac
	"$client" relay --drain "$app_outbox_claim" "$insert" "$app_outbox_mark" | awk '{ print $1 }'
}
pgmq_fanout_check() {
	local i
	app_outbox_check "$1"
	for i in 1 2 3; do must_be "messages of s$i" "$1" "SELECT count(*) FROM pgmq.q_s$i"; done
}
# what is handled is in no queue; the outbox keeps its events
pgmq_history() { app_outbox_history "$1"; }
pgmq_subscribe_others() { [ "$variant" != topic ] || sql -c "SELECT pgmq.create('x' || i), pgmq.bind_topic('other' || i || '.*', 'x' || i) FROM generate_series(1, $1) i" >/dev/null; }

# c
pgmq_consume_variants() { echo deleted kept; }
pgmq_consume_load() {
	sql -c "SELECT count(*) FROM (SELECT pgmq.send_batch('s1', array_agg(jsonb_build_object('total', 100, 'key', (i + k)::text)))
		FROM (SELECT COALESCE(max(msg_id), 0) AS k FROM (SELECT msg_id FROM pgmq.q_s1 UNION ALL SELECT msg_id FROM pgmq.a_s1) q) m, generate_series(1, $1) i) x" >/dev/null
}
pgmq_done() { if [ "$1" = kept ]; then say "SELECT count(*) FROM pgmq.archive('$2', :ids::bigint[])"; else say "SELECT count(*) FROM pgmq.delete('$2', :ids::bigint[])"; fi; }
pgmq_consume() {
	"$client" consume --drain --threads "${PGMQ_CLIENTS:-2}" --file "$scratch/handled" \
		"SELECT msg_id, msg_id, 0, message FROM pgmq.read('s1', 300, ${PGMQ_BATCH:-1000})" "$(pgmq_done "$variant" s1)" | awk '{ print $1 }'
}
pgmq_consume_check() {
	handled_once "$1"
	must_be "messages left and archived" "0|$([ "$variant" = kept ] && echo "$1" || echo 0)" "SELECT (SELECT count(*) FROM pgmq.q_s1), (SELECT count(*) FROM pgmq.a_s1)"
}

# d
pgmq_latency_variants() { echo poll notify; }
pgmq_latency_sql() {
	say "SELECT pgmq.send_topic('$event_type', jsonb_build_object('total', 100, 'key', \$1::text))"
}
pgmq_consumer_start() {
	local q
	for q in $(sql -c "SELECT queue_name FROM pgmq.meta ORDER BY 1"); do
		if [ "$variant" = notify ]; then
			sql -c "SELECT pgmq.enable_notify_insert('$q', 0)" >/dev/null
			start_worker "consumer-$q" "$client" consume --subscriber "$q" --file "$1" --listen "\"pgmq.q_$q.INSERT\"" \
				"SELECT message->>'key', msg_id, 0, message FROM pgmq.read('$q', 300, 100)" "$(pgmq_done deleted "$q")"
		else
			start_worker "consumer-$q" "$client" consume --subscriber "$q" --file "$1" --poll 1 \
				"SELECT message->>'key', msg_id, 0, message FROM pgmq.read_with_poll('$q', 300, 100, 1, 10)" "$(pgmq_done deleted "$q")"
		fi
		await_line "consumer-$q" ready
	done
}
pgmq_consumer_stop() { stop_workers; }
