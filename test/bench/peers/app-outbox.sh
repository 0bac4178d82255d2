# The outbox table of an application that has no outbox extension: what a relay
# of its own, or one that fills the tables of a job engine, fans out from.  Read
# by peers.sh, for the peers' use.

# The usual table: what is not sent yet has a small index of its own.
app_outbox_create() {
	sql <<'SQL'
CREATE SCHEMA app;
CREATE TABLE app.outbox (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	type text NOT NULL,
	subject text,
	payload jsonb NOT NULL,
	created_at timestamptz NOT NULL DEFAULT now(),
	sent_at timestamptz
);
CREATE INDEX outbox_unsent ON app.outbox (id) WHERE sent_at IS NULL;
SQL
}

# N events that wait
app_outbox_load() {
	sql -c "INSERT INTO app.outbox (type, subject, payload)
		SELECT '$event_type', 'order/' || i, '$event_payload' FROM generate_series(1, $1) i"
}

# N events that are sent; their subject tells them apart
app_outbox_history() {
	sql -c "INSERT INTO app.outbox (type, subject, payload, sent_at)
		SELECT '$event_type', 'history/' || i, '$event_payload', now() FROM generate_series(1, $1) i"
}

# exactly N events have been sent, and none waits
app_outbox_check() {
	must_be "events sent and waiting" "$1|0" "SELECT count(*) FILTER (WHERE sent_at IS NOT NULL),
		count(*) FILTER (WHERE sent_at IS NULL) FROM app.outbox WHERE subject LIKE 'order/%'"
}

app_outbox_claim="SELECT id, type, payload FROM app.outbox WHERE sent_at IS NULL
	ORDER BY id LIMIT 200 FOR UPDATE SKIP LOCKED"
app_outbox_mark="UPDATE app.outbox SET sent_at = now() WHERE id = ANY (\$1::bigint[])"
