# No queue at all: what the business transaction costs by itself, with the same
# row inserted into a plain table, and with a NOTIFY besides.  Read by peers.sh.

plain_version() { say "no queue"; }
plain_config() {
	cat <<'MD'
Only a. `insert`: the same row into a table with the columns and indexes of `outbox.events`, by a plain INSERT, read by
nobody. `notify`: with `pg_notify` besides. `bare`: the order alone, no event.
MD
}
plain_why_not() { [ "$1" = a ] || say "a table and nothing else"; }
plain_setup() {
	sql <<'SQL'
CREATE SCHEMA plain;
SET client_min_messages = warning;
CREATE EXTENSION outbox;
CREATE TABLE plain.events (LIKE outbox.events INCLUDING ALL);
DROP EXTENSION outbox;
SQL
}
plain_record_variants() { echo insert notify bare; }
plain_record_sql() {
	say "BEGIN;"
	say "INSERT INTO orders (note) VALUES ('x');"
	[ "$variant" = bare ] || say "INSERT INTO plain.events (type, subject, payload) VALUES ('$event_type', 'order/1', '$event_payload') RETURNING seq;"
	[ "$variant" != notify ] || say "SELECT pg_notify('bench', '');"
	say "COMMIT;"
}
plain_record_check() {
	[ "$variant" = bare ] || must_be "events" "$1" "SELECT count(*) FROM plain.events"
}
