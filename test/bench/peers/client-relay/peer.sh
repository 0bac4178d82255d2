# The relay that most teams write: an outbox table, a client that listens, claims
# 200 rows FOR UPDATE SKIP LOCKED, inserts their jobs by one statement and marks
# the rows.  Read by peers.sh.

client_relay_version() { say "client relay (C, libpq)"; }
client_relay_config() {
	cat <<'MD'
`client.c relay`: LISTEN; then in one transaction `SELECT ... WHERE sent_at IS NULL ORDER BY id LIMIT 200 FOR UPDATE SKIP
LOCKED`, the routing in the client from a cache of the subscriptions, one `INSERT INTO app.jobs SELECT FROM unnest(...)`,
one `UPDATE app.outbox SET sent_at`, and a NOTIFY for the consumers. Consumers listen too, claim by `UPDATE ... WHERE id IN
(SELECT ... FOR UPDATE SKIP LOCKED)` and complete by a DELETE (`deleted`) or an UPDATE (`kept`).

| setting | reason |
|---|---|
| prepared statements, arrays, C | no slow language on this side: nothing but the method is compared |
| partial indexes on what waits | the usual advice; without them every claim reads the table |
| `NOTIFY` by the writer (a: `notify`) | a relay that listens needs it; `poll` is the same without NOTIFY, for a relay that polls |
| one relay in b | two of them share no claim, but wait for each other's locks in the index and commit the same flushes; on two cores one was not slower |
| c: 1,000 rows by 2 connections | as for outbox and pgmq |

There is no documentation to follow: it is the textbook's transactional outbox with the manual's SKIP LOCKED (PostgreSQL 15,
SELECT, "The Locking Clause").
MD
}
client_relay_setup() {
	app_outbox_create
	sql <<SQL
CREATE TABLE app.subscriptions (id int PRIMARY KEY, type text NOT NULL);
INSERT INTO app.subscriptions SELECT i, '$event_type' FROM generate_series(1, $1) i;
CREATE TABLE app.jobs (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	subscription_id int NOT NULL,
	event_id bigint NOT NULL,
	due_at timestamptz NOT NULL DEFAULT now(),
	attempts int NOT NULL DEFAULT 0,
	done_at timestamptz
);
CREATE INDEX jobs_due ON app.jobs (subscription_id, due_at, id) WHERE done_at IS NULL;
SQL
}

# a
client_relay_record_variants() { echo notify poll; }
client_relay_record_sql() {
	say "BEGIN;"
	say "INSERT INTO orders (note) VALUES ('x');"
	say "INSERT INTO app.outbox (type, subject, payload) VALUES ('$event_type', 'order/1', '$event_payload');"
	[ "$variant" = poll ] || say "SELECT pg_notify('outbox', '');"
	say "COMMIT;"
}
client_relay_record_check() { must_be "events" "$1" "SELECT count(*) FROM app.outbox"; }

# b
client_relay_run() { # OPTION ...
	"$client" relay --listen outbox --route "SELECT id, type FROM app.subscriptions" "$@" "$app_outbox_claim" \
		"WITH j AS (INSERT INTO app.jobs (subscription_id, event_id) SELECT * FROM unnest(\$1::int[], \$2::bigint[])) SELECT pg_notify('jobs', '')" \
		"$app_outbox_mark"
}
client_relay_fanout_load() { app_outbox_load "$1"; }
client_relay_fanout() { client_relay_run --drain | awk '{ print $1 }'; }
client_relay_fanout_check() {
	app_outbox_check "$1"
	must_be "jobs, each once" "$((3 * $1))|$((3 * $1))" "SELECT count(*), count(DISTINCT (event_id, subscription_id)) FROM app.jobs
		JOIN app.outbox o ON o.id = event_id AND o.subject LIKE 'order/%' WHERE subscription_id <= 3"
}
client_relay_history() {
	sql -c "WITH e AS (INSERT INTO app.outbox (type, subject, payload, sent_at)
			SELECT '$event_type', 'history/' || i, '$event_payload', now() FROM generate_series(1, $1) i RETURNING id)
		INSERT INTO app.jobs (subscription_id, event_id, attempts, done_at) SELECT s.id, e.id, 1, now() FROM e, app.subscriptions s"
}
client_relay_subscribe_others() { sql -c "INSERT INTO app.subscriptions SELECT 100 + i, 'other' || i || '.created' FROM generate_series(1, $1) i"; }

# c
client_relay_consume_variants() { echo kept deleted; }
client_relay_claim() { # SUBSCRIPTION KEY BATCH
	say "WITH c AS (UPDATE app.jobs SET due_at = now() + '5 min', attempts = attempts + 1
			WHERE id IN (SELECT id FROM app.jobs WHERE subscription_id = $1 AND done_at IS NULL AND due_at <= now()
				ORDER BY due_at, id LIMIT $3 FOR UPDATE SKIP LOCKED) RETURNING id, event_id)
		SELECT $2, c.id, 0, o.type, o.subject, o.payload FROM c JOIN app.outbox o ON o.id = c.event_id"
}
client_relay_done() {
	if [ "$1" = deleted ]; then say "DELETE FROM app.jobs WHERE id = ANY (:ids::bigint[])"
	else say "UPDATE app.jobs SET done_at = now() WHERE id = ANY (:ids::bigint[])"; fi
}
client_relay_consume_load() {
	app_outbox_load "$1"
	client_relay_fanout "$1" >/dev/null
}
client_relay_consume() {
	"$client" consume --drain --threads 2 --file "$scratch/handled" "$(client_relay_claim 1 o.id 1000)" "$(client_relay_done "$variant")" | awk '{ print $1 }'
}
client_relay_consume_check() {
	handled_once "$1"
	if [ "$variant" = deleted ]; then must_be "jobs left" 0 "SELECT count(*) FROM app.jobs"
	else must_be "jobs done" "$1|$1" "SELECT count(*), count(done_at) FROM app.jobs"; fi
}

# d
client_relay_latency_sql() {
	say "WITH e AS (INSERT INTO app.outbox (type, subject, payload)
		VALUES ('$event_type', 'order/' || \$1::text, jsonb_build_object('total', 100, 'key', \$1::text))) SELECT pg_notify('outbox', '')"
}
client_relay_consumer_start() {
	local i
	start_worker relay client_relay_run
	await_line relay ready
	for i in $(sql -c "SELECT id FROM app.subscriptions WHERE id <= 3 ORDER BY id"); do
		start_worker "consumer-s$i" "$client" consume --subscriber "s$i" --file "$1" --listen jobs \
			"$(client_relay_claim "$i" "o.payload->>'key'" 100)" "$(client_relay_done kept)"
		await_line "consumer-s$i" ready
	done
}
client_relay_consumer_stop() { stop_workers; }
# what such teams have: a job of cron's
client_relay_retention() {
	start_worker cleaner bash -c "while sleep 10 & wait \$!; do
		'$bin/psql' -X -q -c \"DELETE FROM app.jobs WHERE done_at < now() - interval '$1 s'\" \
			-c \"DELETE FROM app.outbox WHERE sent_at < now() - interval '$1 s'\"; done"
}
