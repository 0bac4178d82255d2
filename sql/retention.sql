-- What retention lets go, and what it must not, by CALL outbox.prune().  In a
-- database of its own; the relay, which does the same, is kept from coming.
\set dbname :DBNAME
\set user :USER
CREATE DATABASE outbox_retention TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C';
\c outbox_retention
ALTER SYSTEM SET outbox.sweep_interval = '1h';
SELECT pg_reload_conf();
CREATE EXTENSION outbox;
SELECT name, setting, unit FROM pg_settings WHERE name LIKE 'outbox.%retention' ORDER BY name COLLATE "C";
SELECT outbox.subscribe('a', '{x.*}', max_attempts => 1) AS a, outbox.subscribe('b', '{x.b}') AS b;

CREATE PROCEDURE make(type text, n int DEFAULT 1) LANGUAGE plpgsql AS $$
DECLARE
	s bigint;
	outcome text;
BEGIN
	SELECT max(outbox.record(type, i::text)) INTO s FROM generate_series(1, n) i;
	COMMIT;
	CALL outbox.await_fanout(s, '60s', outcome);
END $$;
-- Everything that has happened happened so many days earlier.
CREATE PROCEDURE age(days int) LANGUAGE sql AS $$
	UPDATE outbox.events SET recorded_at = recorded_at - make_interval(days => days),
		fanned_out_at = fanned_out_at - make_interval(days => days), poisoned_at = poisoned_at - make_interval(days => days);
	UPDATE outbox.jobs SET created_at = created_at - make_interval(days => days),
		done_at = done_at - make_interval(days => days), dead_at = dead_at - make_interval(days => days);
$$;
CREATE VIEW what_is AS
	SELECT e.type, e.subject, e.event_state AS event, e.subscription, e.job, e.state FROM outbox.event_status e;


-- Nothing is there, and nothing is too old.
CALL outbox.prune();

-- Events and jobs in every state
CALL make('x.done', 2);
CALL make('x.b');
SELECT count(outbox.complete(job, claim)) FROM outbox.claim('a', 3);
CALL make('x.cancelled');
SELECT outbox.cancel(job) FROM what_is WHERE type = 'x.cancelled';
CALL make('nobody');
CALL make('x.dead');
SET client_min_messages = error;
SELECT outbox.fail(job, claim, 'no', final => true) FROM outbox.claim('a');
RESET client_min_messages;
SELECT outbox.subscribe('a', '{x.*}');
CALL make('x.retrying');
SELECT outbox.fail(job, claim, 'not now', retry_in => '1 day') > now() AS later FROM outbox.claim('a');
CALL make('x.running');
SELECT count(*) FROM outbox.claim('a', lease => '300 days');
CALL make('x.waiting');
CALL make('unmarked');
CALL make('poisoned');
UPDATE outbox.events SET fanned_out_at = NULL, fanout = NULL, tries = 1, retry_at = now() + interval '1 day' WHERE type = 'unmarked';
UPDATE outbox.events SET fanned_out_at = NULL, fanout = NULL, poisoned_at = now() WHERE type = 'poisoned';
DELETE FROM outbox.events WHERE type = 'outbox.job.dead';

CALL outbox.prune();
CALL age(6);
CALL outbox.prune();
-- What goes: events whose jobs have all come to an end, with these
SELECT * FROM what_is ORDER BY 1, 2, 4;
CALL age(2);
CALL outbox.prune();
SELECT * FROM what_is ORDER BY 1, 2, 4;
-- dead jobs are kept for longer, and their events with them
CALL age(21);
CALL outbox.prune();
CALL age(2);
CALL outbox.prune();
SELECT * FROM what_is ORDER BY 1, 2, 4;
CALL age(1000);
CALL outbox.prune();

-- Its age is counted from when it was handled, not from when it was recorded.
UPDATE outbox.jobs SET due_at = now() WHERE due_at <> 'infinity';
SELECT count(outbox.complete(job, claim)) FROM outbox.claim('a', 10);
SELECT count(outbox.complete(job, claim)) FROM outbox.claim('b', 10);
CALL outbox.prune();
SELECT * FROM what_is ORDER BY 1, 2, 4;
UPDATE outbox.events SET fanned_out_at = now(), fanout = '{}', retry_at = NULL WHERE type = 'unmarked';
CALL outbox.prune();
CALL age(8);
CALL outbox.prune();
SELECT * FROM what_is ORDER BY 1, 2, 4;
DELETE FROM outbox.events;
SELECT count(*) FROM outbox.jobs;

-- A job that is put back in line is as good as new.
SELECT outbox.subscribe('a', '{x.*}', max_attempts => 1);
CALL make('x.again', 2);
SET client_min_messages = error;
SELECT bool_and(outbox.fail(job, claim, 'no') IS NULL) AS dead FROM outbox.claim('a', 2);
RESET client_min_messages;
DELETE FROM outbox.events WHERE type = 'outbox.job.dead';
CALL age(31);
SELECT outbox.retry(job) FROM what_is WHERE subject = '1';
CALL outbox.prune();
SELECT subject, state FROM what_is ORDER BY 1;
SELECT outbox.cancel(job) FROM what_is;
CALL age(8);
CALL outbox.prune();

-- A job that covers several events stays while one of them needs it.
SELECT outbox.subscribe('c', '{c.*}', coalescing => true) AS c, outbox.subscribe('d', '{c.d}') AS d;
DO $$
BEGIN
	PERFORM outbox.record('c.d', 'same'), outbox.record('c.x', 'same'), outbox.record('c.d', 'same');
END $$;
CALL make('c.x');
SELECT count(*) FROM outbox.jobs;
SELECT count(outbox.complete(job, claim)) FROM outbox.claim('c', 10);
SELECT count(outbox.complete(job, claim)) FROM outbox.claim('d', 1);
CALL age(8);
CALL outbox.prune();
SELECT type, subscription, state FROM what_is ORDER BY 1, 2;
SELECT count(outbox.complete(job, claim)) FROM outbox.claim('d', 10);
CALL age(8);
CALL outbox.prune();
SELECT (SELECT count(*) FROM outbox.events) AS events, (SELECT count(*) FROM outbox.jobs) AS jobs;

-- Subscriptions that are gone: their jobs go at once, whatever their state, but
-- for those that are done, which are kept as long as their events.
SELECT outbox.unsubscribe('b'), outbox.unsubscribe('c'), outbox.unsubscribe('d'), outbox.subscribe('gone', '{x.*}', max_attempts => 1) > 0 AS subscribed;
CALL make('x.gone', 2500);
SET client_min_messages = error;
SELECT bool_and(outbox.fail(job, claim, 'no') IS NULL) AS dead FROM outbox.claim('gone', 1100);
RESET client_min_messages;
DELETE FROM outbox.events WHERE type = 'outbox.job.dead';
SELECT count(*) FROM outbox.claim('gone', 100);
SELECT count(outbox.complete(job, claim)) FROM outbox.claim('gone', 10);
SELECT count(outbox.complete(job, claim)) FROM outbox.claim('a', 500);
SELECT outbox.subscribe('later', '{x.later}') > 0 AS subscribed, outbox.unsubscribe('gone');
SELECT outbox.subscribe('gone', '{x.*}') > 0 AS subscribed;
CALL make('x.later');
CALL outbox.prune();
SELECT subscription_id IN (SELECT id FROM outbox.subscriptions) AS there, done_at IS NULL AS unfinished, count(*) FROM outbox.jobs GROUP BY 1, 2 ORDER BY 1, 2;
CALL age(8);
CALL outbox.prune();
SELECT type, subscription, state, count(*) FROM what_is GROUP BY 1, 2, 3 ORDER BY 1, 2, 3;
SELECT outbox.unsubscribe('gone'), outbox.unsubscribe('later'), outbox.unsubscribe('a');
CALL outbox.prune();
SELECT (SELECT count(*) FROM outbox.events) AS events, (SELECT count(*) FROM outbox.jobs) AS jobs;

-- Jobs may go before their events.
ALTER SYSTEM SET outbox.event_retention = -1;
ALTER SYSTEM SET outbox.job_retention = '1d';
ALTER SYSTEM SET outbox.dead_retention = -1;
SELECT pg_reload_conf();
\c
SELECT outbox.subscribe('a', '{x.*}', max_attempts => 1) > 0 AS subscribed;
CALL make('x.y', 1500);
SELECT count(outbox.complete(job, claim)) FROM outbox.claim('a', 1200);
SET client_min_messages = error;
SELECT outbox.fail(job, claim, 'no') FROM outbox.claim('a');
RESET client_min_messages;
CALL age(1000);
SELECT count(outbox.complete(job, claim)) FROM outbox.claim('a', 1);
CALL outbox.prune();
SELECT type, subscription, state, count(*) FROM what_is WHERE type = 'x.y' GROUP BY 1, 2, 3 ORDER BY 3;
CALL age(2);
CALL outbox.prune();
CALL outbox.prune();

-- Nothing is kept that has come to an end; anything else is.
ALTER SYSTEM SET outbox.event_retention = 0;
ALTER SYSTEM SET outbox.job_retention = 0;
SELECT pg_reload_conf();
\c
CALL outbox.prune();
SELECT type, subscription, state, count(*) FROM what_is GROUP BY 1, 2, 3 ORDER BY 1, 3;
SELECT outbox.purge('a');
SELECT count(outbox.complete(job, claim)) FROM outbox.claim('a', 1000);
CALL outbox.prune();
CALL outbox.prune();
ALTER SYSTEM SET outbox.dead_retention = 0;
SELECT pg_reload_conf();
\c
CALL make('x.dead');
SET client_min_messages = error;
SELECT outbox.fail(job, claim, 'no') FROM outbox.claim('a');
RESET client_min_messages;
SELECT max(seq) AS seq FROM outbox.events \gset
CALL outbox.await_fanout(:seq, '60s');
CALL outbox.prune();
SELECT (SELECT count(*) FROM outbox.events) AS events, (SELECT count(*) FROM outbox.jobs) AS jobs;

-- An event that cannot be deleted keeps no other, and nobody is told who may
-- not know.
CREATE TABLE audit (seq bigint REFERENCES outbox.events);
CALL make('nobody', 700);
INSERT INTO audit SELECT seq FROM outbox.events WHERE subject IN ('1', '300', '700');
\set VERBOSITY terse
SET client_min_messages = error;
CALL outbox.prune();
RESET client_min_messages;
SELECT subject FROM outbox.events ORDER BY seq;
CALL outbox.prune();
\set VERBOSITY default
DROP TABLE audit;
CALL outbox.prune();

-- At rest
CALL make('nobody');
SELECT outbox.stop();
CALL outbox.prune();
SELECT outbox.start();
CALL outbox.prune();

-- Where it may be called, and by whom
BEGIN;
CALL outbox.prune();
ROLLBACK;
DO $$ DECLARE e bigint; j bigint; BEGIN BEGIN CALL outbox.prune(e, j); EXCEPTION WHEN division_by_zero THEN NULL; END; END $$;
CREATE FUNCTION f() RETURNS int LANGUAGE plpgsql AS $$ DECLARE e bigint; j bigint; BEGIN CALL outbox.prune(e, j); RETURN 1; END $$;
SELECT f();
CREATE ROLE regress_outbox_prune;
SET ROLE regress_outbox_prune;
CALL outbox.prune();
RESET ROLE;
SELECT outbox.grant('regress_outbox_prune', 'consume');
SET ROLE regress_outbox_prune;
CALL outbox.prune();
RESET ROLE;
SELECT outbox.grant('regress_outbox_prune', 'admin');
CALL make('nobody');
SET ROLE regress_outbox_prune;
CALL outbox.prune();
SELECT current_user;
RESET ROLE;
CALL make('nobody');
-- in a block that may commit, and whatever the session has set
DO $$
DECLARE
	events bigint;
	jobs bigint;
BEGIN
	CALL outbox.prune(events, jobs);
	RAISE NOTICE '% and %', events, jobs;
END $$;
CALL make('nobody', 2);
SET default_transaction_isolation = 'serializable';
SET enable_indexscan = off;
SET search_path = '';
SET statement_timeout = '1min';
CALL outbox.prune();
SHOW search_path;
SHOW transaction_isolation;
RESET search_path;
CALL make('nobody');
SET default_transaction_read_only = on;
\set VERBOSITY terse
CALL outbox.prune();
\set VERBOSITY default

\c :dbname :user
ALTER SYSTEM RESET outbox.sweep_interval;
ALTER SYSTEM RESET outbox.event_retention;
ALTER SYSTEM RESET outbox.job_retention;
ALTER SYSTEM RESET outbox.dead_retention;
SELECT pg_reload_conf();
DROP DATABASE outbox_retention;
DROP ROLE regress_outbox_prune;
