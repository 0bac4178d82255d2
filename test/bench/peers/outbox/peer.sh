# This extension.  Read by peers.sh.

outbox_version() { say "outbox $(sed -n "s/^default_version = '\(.*\)'/\1/p" "$top/outbox.control")"; }

outbox_config() {
	cat <<'MD'
Every setting is the default, but for what a work is about. Client: `client.c`, as for the other peers that prescribe
none.

| setting | reason | where |
|---|---|---|
| `outbox.relays` 1, `outbox.batch_size` 200, `outbox.synchronous_pass` on | the defaults: one transaction for each pass of at most 200 events, durable before it is announced | README, Settings |
| c, `deleted`: `outbox.job_retention = 0` | the job is gone once done, as in the peers that delete; `kept` is the default | README, Settings |
| c: claims of 1,000 by 2 connections | two cores; as pgmq and the client relay, which were quickest so too | README, Workers |
| d: `CALL outbox.await_jobs`, then `claim` of up to 100 and `complete_many` | the documented loop of a worker | README, Workers |
| h: `outbox.event_retention` 5 minutes | what the work is about | README, Retention |

a: `stopped` records while the relay rests, as the fan-out of other peers' outboxes would be elsewhere; `relayed` has
the relay fan out to three subscriptions on the same cores meanwhile, which compares with the engines, whose three jobs
are written by the transaction itself.
MD
}

outbox_subscribe() { sql -c "SELECT count(outbox.subscribe('s' || i, '{order.*}')) FROM generate_series(1, $1) i" >/dev/null; }
# settings are the server's; a run may have left some
outbox_set() { sql -c "ALTER SYSTEM RESET ALL" >/dev/null; sql -c "ALTER SYSTEM SET $1" -c "SELECT pg_reload_conf()" >/dev/null; sleep 0.2; }
outbox_reset() { sql -c "ALTER SYSTEM RESET ALL" -c "SELECT pg_reload_conf()" >/dev/null; sleep 0.2; }
outbox_stop() { sql -c "SELECT outbox.stop()" >/dev/null; }
outbox_start() { sql -c "SELECT outbox.start()" >/dev/null; }

outbox_setup() {
	sql -c "SET client_min_messages = warning" -c "CREATE EXTENSION outbox" -c "SELECT outbox.arm()" -c "SELECT outbox.stop()" >/dev/null
	outbox_subscribe "$1"
	sql <<'SQL'
CREATE SCHEMA bench;
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
	CALL outbox.await_fanout(last, '1h', outcome);
	IF outcome <> 'fanned' THEN
		RAISE EXCEPTION 'not fanned out: %', outcome;
	END IF;
	seconds := extract(epoch FROM clock_timestamp() - t0);
	PERFORM outbox.stop();
	COMMIT;
END $$;
SQL
}

# a
outbox_record_variants() { echo stopped relayed; }
outbox_record_sql() {
	cat <<SQL
BEGIN;
INSERT INTO orders (note) VALUES ('x');
SELECT outbox.record('$event_type', 'order/1', '$event_payload');
COMMIT;
SQL
}
outbox_record_start() { [ "$variant" = stopped ] || outbox_start; }
outbox_record_check() {
	must_be "events" "$1" "SELECT count(*) FROM outbox.events"
	outbox_start
	# the last seq may be one that was rolled back: wait for the marks instead
	until [ "$(sql -c "SELECT count(*) FROM outbox.events WHERE fanned_out_at IS NULL")" = 0 ]; do sleep 0.2; done
	outbox_stop
	outbox_conserved "$1" 3
}

# each event has one job for each subscription, and says so
outbox_conserved() {
	must_be "events and jobs, each once" "$1|$(($1 * $2))|$(($1 * $2))" "SELECT (SELECT count(*) FROM outbox.events WHERE fanout <> '{}' AND subject LIKE 'order/%'),
		count(*), count(DISTINCT (event_seq, subscription_id)) FROM outbox.jobs j
		WHERE EXISTS (SELECT FROM outbox.events e WHERE e.seq = j.event_seq AND e.subject LIKE 'order/%'
			AND e.fanout @> jsonb_build_object((SELECT name FROM outbox.subscriptions s WHERE s.id = j.subscription_id), j.id))"
	must_be "events unmarked" 0 "SELECT count(*) FROM outbox.events WHERE fanned_out_at IS NULL"
}

# b
outbox_fanout_load() {
	sql -c "INSERT INTO outbox.events (type, subject, payload)
		SELECT '$event_type', 'order/' || i, '$event_payload' FROM generate_series(1, $1) i"
}
# sweeps are at most one a second, and outbox.stop() asked for one: let it be over,
# since the start of a program does not count for others either
outbox_fanout() { sleep 2.1; sql -c "CALL bench.relay(NULL)"; }
outbox_fanout_check() { outbox_conserved "$1" 3; }
outbox_history() {
	sql -c "WITH e AS (INSERT INTO outbox.events (type, subject, payload, fanned_out_at, fanout)
			SELECT '$event_type', 'history/' || i, '$event_payload', now(), '{\"s1\": 1, \"s2\": 2, \"s3\": 3}'
			FROM generate_series(1, $1) i RETURNING seq)
		INSERT INTO outbox.jobs (subscription_id, event_seq, due_at, attempts, done_at)
			SELECT s.id, e.seq, now(), 1, now() FROM e, outbox.subscriptions s"
}
outbox_subscribe_others() { sql -c "SELECT count(outbox.subscribe('other' || i, ARRAY['other' || i || '.*'])) FROM generate_series(1, $1) i" >/dev/null; }

# c
outbox_consume_variants() { echo kept deleted; }
outbox_consume_load() {
	[ "$variant" != deleted ] || outbox_set "outbox.job_retention = 0"
	outbox_fanout_load "$1"
	outbox_fanout "$1" >/dev/null
}
outbox_consume() {
	"$client" consume --drain --threads "${OUTBOX_CLIENTS:-2}" --file "$scratch/handled" \
		"SELECT seq, job, claim, type, subject, payload FROM outbox.claim('s1', ${OUTBOX_BATCH:-1000})" \
		"SELECT outbox.complete_many(:token)" | awk '{ print $1 }'
}
outbox_consume_check() {
	handled_once "$1"
	if [ "$variant" = deleted ]; then
		outbox_reset
		must_be "jobs left" 0 "SELECT count(*) FROM outbox.jobs"
	else
		must_be "jobs done" "$1|$1" "SELECT count(*), count(done_at) FROM outbox.jobs"
	fi
}

# d
outbox_latency_sql() { echo "SELECT outbox.record('$event_type', 'order/' || \$1::text, jsonb_build_object('total', 100, 'key', \$1::text))"; }
outbox_consumer_start() {
	local i
	outbox_start
	for i in $(sql -c "SELECT name FROM outbox.subscriptions ORDER BY id"); do
		start_worker "consumer-$i" "$client" consume --subscriber "$i" --file "$1" --wait "CALL outbox.await_jobs('$i', '1s')" \
			"SELECT payload->>'key', job, claim, seq, type, subject, payload FROM outbox.claim('$i', 100)" \
			"SELECT outbox.complete_many(:token)"
		await_line "consumer-$i" ready
	done
}
outbox_consumer_stop() {
	stop_workers
	outbox_stop
	outbox_reset
}
outbox_retention() { outbox_set "outbox.event_retention = $1"; }
