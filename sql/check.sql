-- outbox.check(): each finding, made and undone.  In a database of its own.
\set dbname :DBNAME
\set user :USER
CREATE ROLE outbox_check_super LOGIN SUPERUSER;
CREATE ROLE outbox_check_alice;
CREATE DATABASE outbox_check TEMPLATE template0;
\c outbox_check outbox_check_super
CREATE EXTENSION outbox;
CREATE VIEW findings AS
SELECT level, regexp_replace(finding, '\m[0-9]+ s ago', 'N s ago') AS finding, hint FROM outbox.check();
GRANT SELECT ON findings TO PUBLIC;

-- All is well once the relay has been seen at work.
SELECT outbox.subscribe('all') > 0 AS subscribed;
SELECT outbox.record('check.first') AS seq \gset
CALL outbox.await_fanout(:seq, '30s');
SELECT * FROM outbox.check();

-- A database without subscriptions
BEGIN;
SELECT outbox.unsubscribe('all');
SELECT * FROM findings;
DELETE FROM outbox.armed;
SELECT * FROM findings;
ROLLBACK;

-- Restored, copied, stopped
BEGIN;
DELETE FROM outbox.armed;
SELECT * FROM findings;
ROLLBACK;
BEGIN;
UPDATE outbox.armed SET database = 1;
SELECT * FROM findings;
ROLLBACK;
BEGIN;
SELECT outbox.stop();
SELECT * FROM findings;
SELECT outbox.start();
SELECT * FROM findings;
ROLLBACK;

-- Subscriptions: paused, not read, without their owner
BEGIN;
SELECT outbox.pause('all');
SELECT * FROM findings;
ROLLBACK;
BEGIN;
UPDATE outbox.jobs SET created_at = now() - interval '3 days', due_at = now() - interval '3 days';
SELECT * FROM findings;
-- nobody is to read a paused one, and a job that is not due yet may wait
SELECT outbox.pause('all');
SELECT level FROM findings;
SELECT outbox.resume('all');
UPDATE outbox.jobs SET due_at = now() + interval '3 days';
SELECT level FROM findings;
ROLLBACK;
BEGIN;
UPDATE outbox.subscriptions SET owner = 'outbox_check_missing';
SELECT * FROM findings;
UPDATE outbox.subscriptions SET owner = 'outbox_check_alice';
SELECT * FROM findings;
SELECT outbox.adopt('all');
SELECT * FROM findings;
ROLLBACK;

-- Events: poisoned, failing, waiting
BEGIN;
UPDATE outbox.events SET fanned_out_at = NULL, fanout = NULL, poisoned_at = clock_timestamp();
SELECT * FROM findings;
SELECT outbox.discard(:seq);
SELECT * FROM findings;
ROLLBACK;
BEGIN;
UPDATE outbox.events SET fanned_out_at = NULL, fanout = NULL, retry_at = '2100-01-01', tries = 1, last_error = 'it is "100 %" broken';
SET LOCAL TimeZone = 'UTC';
SET LOCAL DateStyle = 'ISO';
SELECT * FROM findings;
ROLLBACK;
BEGIN;
UPDATE outbox.events SET fanned_out_at = NULL, fanout = NULL, recorded_at = clock_timestamp() - interval '150 min';
SELECT * FROM findings;
-- young ones are no finding
UPDATE outbox.events SET recorded_at = clock_timestamp();
SELECT * FROM findings;
ROLLBACK;

-- Objects that are not as they were made
BEGIN;
ALTER TABLE outbox.events DISABLE TRIGGER events_insert;
ALTER TABLE outbox.subscriptions ENABLE TRIGGER routing_changed;
SELECT * FROM findings;
ROLLBACK;
BEGIN;
DELETE FROM outbox.routing;
SELECT level, finding FROM findings;
ROLLBACK;
CREATE TABLE captured (id int PRIMARY KEY);
BEGIN;
SELECT outbox.capture('captured', 'captured.{op}');
SELECT * FROM findings;
ALTER TABLE captured DISABLE TRIGGER USER;
SELECT level, regexp_replace(finding, 'trigger [^ ]+ is', 'trigger X is') AS finding, hint FROM findings;
ROLLBACK;

-- Several at once, in one order; and the database is as it was.
BEGIN;
SELECT outbox.stop(), outbox.pause('all');
UPDATE outbox.events SET fanned_out_at = NULL, fanout = NULL, poisoned_at = clock_timestamp();
SELECT * FROM findings;
ROLLBACK;
SELECT * FROM outbox.check();

-- outbox.relays(), from which outbox.stat_relay reads
SELECT database_oid = (SELECT oid FROM pg_database WHERE datname = current_database()) AS ours, relay,
	EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = r.pid AND a.datname = r.database) AS running,
	state IN ('idle', 'pass') AS well, passes > 0 AS passes, events, jobs, failures, notify_failures,
	last_pass_at IS NOT NULL AS last_pass_at, last_error, last_error_at, backoff_until
FROM outbox.relays() r WHERE database = current_database();
SELECT pid IS NOT NULL AS pid, events, unmarked, oldest_unmarked FROM outbox.stat_relay WHERE database = current_database();

-- It is for those who were given admin, and shows them all.
CALL outbox.await_fanout(:seq);
SET ROLE outbox_check_alice;
SELECT * FROM outbox.check();
RESET ROLE;
SELECT outbox.grant('outbox_check_alice', 'admin');
SET ROLE outbox_check_alice;
SELECT * FROM outbox.check();
SELECT outbox.pause('all');
SELECT * FROM findings;
RESET ROLE;

\c :dbname :user
DROP DATABASE outbox_check;
DROP ROLE outbox_check_super, outbox_check_alice;
