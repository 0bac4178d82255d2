-- Replay: jobs for events that were fanned out before.  In a database of its
-- own, so that the numbers of jobs are known.
\set dbname :DBNAME
\set user :USER
CREATE DATABASE outbox_replay TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C';
\c outbox_replay
CREATE EXTENSION outbox;
CREATE PROCEDURE make(type text, n int DEFAULT 1, subject text DEFAULT NULL, scope text DEFAULT NULL) LANGUAGE plpgsql AS $$
DECLARE
	s bigint;
	outcome text;
BEGIN
	SELECT max(outbox.record(type, COALESCE(subject, i::text), jsonb_build_object('n', i), scope)) INTO s FROM generate_series(1, n) i;
	COMMIT;
	CALL outbox.await_fanout(s, '60s', outcome);
END $$;
CREATE VIEW what_is AS
	SELECT e.seq, e.type, e.subject, e.subscription, e.job, e.state, e.attempts, e.last_error, e.due_at <= clock_timestamp() AS due FROM outbox.event_status e;
CREATE FUNCTION handle(subscription text, n int DEFAULT 100) RETURNS TABLE (job bigint, subject text, seq bigint) LANGUAGE sql AS $$
	SELECT c.job, c.subject, c.seq FROM outbox.claim(subscription, n) c, outbox.complete(c.job, c.claim) done
$$;

-- What is wrong with an argument
SELECT outbox.replay(NULL, '-infinity');
SELECT outbox.replay('nobody', NULL);
SELECT outbox.replay('nobody', '-infinity');
SELECT outbox.subscribe('first', '{x.*}') AS first;
SELECT outbox.replay('first', NULL);
SELECT outbox.replay('first', '-infinity');
SELECT outbox.replay('first', 'infinity');

-- A consumer that comes late
CALL make('x.a', 3);
CALL make('y.a', 3);
SELECT * FROM handle('first', 2);
SELECT outbox.subscribe('late', '{*.a}') AS late;
SELECT outbox.replay('late', '-infinity');
SELECT seq, type, subject, subscription, job, state, due FROM what_is ORDER BY seq, subscription;
-- what waits gets nothing more
SELECT outbox.replay('late', '-infinity');
SELECT * FROM handle('late', 3);
SELECT seq, type, subject, job, state FROM what_is WHERE subscription = 'late' ORDER BY seq;
-- what has come to an end is put back in line, and is as good as new
SELECT outbox.fail(job, claim, 'not now', retry_in => '0') IS NOT NULL AS later FROM outbox.claim('late');
SET client_min_messages = error;
SELECT outbox.fail(job, claim, 'no', final => true) FROM outbox.claim('late');
RESET client_min_messages;
SELECT outbox.cancel(max(job)) FROM what_is WHERE subscription = 'late';
SELECT subject, job, state, attempts, last_error FROM what_is WHERE subscription = 'late' AND type <> 'outbox.job.dead' ORDER BY seq;
SELECT outbox.replay('late', '-infinity');
SELECT subject, job, state, attempts, last_error, due FROM what_is WHERE subscription = 'late' ORDER BY seq;
SELECT count(*), count(claim), count(holder), count(cancelled), count(done_at), count(dead_at) FROM outbox.jobs WHERE subscription_id = 2;
-- who had claimed it before has lost it
BEGIN;
SELECT job, claim FROM outbox.claim('late') \gset
SELECT outbox.complete(:job, :claim);
SELECT outbox.replay('late', '-infinity');
SELECT outbox.complete(:job, :claim);
ROLLBACK;
-- and the other subscription has noticed nothing
SELECT subject, job, state FROM what_is WHERE subscription = 'first' ORDER BY seq;
SELECT count(*) FROM handle('late');
SELECT count(*) FROM handle('late');

-- Time: from, and before; when it was fanned out, not when it was recorded
UPDATE outbox.events SET recorded_at = '2020-01-01', fanned_out_at = '2021-01-01'::timestamptz + seq * interval '1 day' WHERE type <> 'outbox.job.dead';
SELECT outbox.replay('late', '2020-01-01', '2021-01-01');
SELECT outbox.replay('late', '2021-01-05', '2021-01-05');
SELECT outbox.replay('late', '2021-01-05', '2021-01-04');
SELECT outbox.replay('late', '2021-01-03', '2021-01-05');
SELECT seq, state FROM what_is WHERE subscription = 'late' ORDER BY 1;
SELECT outbox.replay('late', '2021-01-05', '2021-01-07');
SELECT outbox.replay('late', '2020-01-01');
SELECT seq FROM handle('late') ORDER BY 1;

-- What counts is what matches now: types, scope and filter.
CALL make('x.scope', 2, scope => 'acme');
CALL make('x.scope', 2, scope => 'other');
SELECT outbox.subscribe('late', '{x.*, !x.a}', scope => 'acme', filter => '$.n > 1 && $type == "x.scope" && $subject == "2" && $scope == "acme"') AS late;
SELECT outbox.replay('late', '2021-01-01');
SELECT type, subject, seq FROM handle('late') JOIN outbox.events USING (seq, subject);
SELECT outbox.subscribe('late', '{x.scope}', filter => '$.nothing.double() > 1');
SELECT outbox.replay('late', '2021-01-01');
-- the caller waits for a filter that takes its time, and for a large payload
SELECT outbox.record('x.large', payload => jsonb_build_object('text', repeat('x', 2000000), 'n', 1)) AS seq \gset
CALL outbox.await_fanout(:seq, '60s');
SELECT outbox.subscribe('slow', '{x.large}', filter => '$.n == 1 && $.text starts with "xx"') AS slow;
SELECT outbox.replay('slow', '2021-01-01');
SELECT filter_pending FROM outbox.jobs WHERE subscription_id = 3;
SELECT seq = :seq AS large FROM handle('slow');
UPDATE outbox.jobs SET filter_pending = true WHERE subscription_id = 3;
SELECT outbox.replay('slow', '2021-01-01');
SELECT filter_pending FROM outbox.jobs WHERE subscription_id = 3;
SELECT outbox.unsubscribe('slow');

-- Jobs that are gone are made anew, and events that are gone are not missed.
SELECT outbox.subscribe('late', '{x.scope}') AS late;
SELECT outbox.replay('late', '2021-01-01');
SELECT count(*) FROM handle('late');
SELECT outbox.purge('late', 'done');
SELECT subject, state FROM what_is WHERE subscription = 'late' AND type = 'x.scope' ORDER BY seq;
DELETE FROM outbox.events WHERE type = 'x.scope' AND subject = '1';
SELECT outbox.replay('late', '2021-01-01');
SELECT subject, state FROM what_is WHERE subscription = 'late' AND type = 'x.scope' ORDER BY seq;
SELECT outbox.replay('late', '2021-01-01');
SELECT count(*) FROM handle('late');

-- Another name: the jobs are known by their subscription.
SELECT outbox.rename('late', 'renamed');
SELECT outbox.replay('renamed', '2021-01-01');
SELECT subscription, state, count(*) FROM what_is WHERE type = 'x.scope' GROUP BY 1, 2 ORDER BY 1;
SELECT count(*) FROM handle('renamed');
-- and the old name may be that of another: each keeps its own
SELECT outbox.subscribe('late', '{x.scope}') AS second;
SELECT outbox.replay('late', '2021-01-01');
SELECT e.seq, e.fanout, array_agg(j.subscription_id ORDER BY j.id) AS of FROM outbox.events e, jsonb_each_text(e.fanout) f JOIN outbox.jobs j ON j.id = f.value::bigint
	WHERE type = 'x.scope' GROUP BY 1, 2 ORDER BY 1;
SELECT outbox.replay('late', '2021-01-01'), outbox.replay('renamed', '2021-01-01');
SELECT count(*) FROM handle('renamed');
SELECT outbox.unsubscribe('late');
SELECT outbox.subscribe('late', '{x.scope}') AS third;
SELECT outbox.replay('late', '2021-01-01');
SELECT fanout FROM outbox.events WHERE type = 'x.scope' ORDER BY seq;
SELECT count(*) FROM handle('late');
SELECT outbox.unsubscribe('late'), outbox.unsubscribe('renamed'), outbox.unsubscribe('first');
DELETE FROM outbox.events;
DELETE FROM outbox.jobs;

-- A coalescing subscription gets one job for each subject of a step, for the
-- latest event, which the others name.
CALL make('c.a', 1, 'one');
CALL make('c.a', 1, 'two');
CALL make('c.a', 1, 'one');
CALL make('c.a', 1, 'one', 'acme');
SELECT outbox.subscribe('c', '{c.*}', coalescing => true) > 0 AS c;
SELECT outbox.replay('c', '-infinity');
SELECT e.subject, e.scope, e.fanout = f.fanout AS same, (SELECT event_seq = e.seq FROM outbox.jobs WHERE id = (e.fanout->>'c')::bigint) AS own
	FROM outbox.events e, (SELECT fanout FROM outbox.events ORDER BY seq LIMIT 1) f ORDER BY e.seq;
SELECT subject, count(*) FROM handle('c') GROUP BY 1 ORDER BY 1;
-- put back in line once for all that it covers
SELECT outbox.replay('c', '-infinity');
SELECT outbox.replay('c', '-infinity');
SELECT subject, count(*) FROM handle('c') GROUP BY 1 ORDER BY 1;
SELECT outbox.unsubscribe('c');
DELETE FROM outbox.events;
DELETE FROM outbox.jobs;

-- An ordered subscription: jobs wait behind each other as ever.
CREATE VIEW line AS SELECT e.subject, j.id - (SELECT min(id) FROM outbox.jobs) + 1 AS n, j.done_at IS NOT NULL AS done, j.claim IS NOT NULL AS claimed, isfinite(j.due_at) AS free, j.due_at > now() + interval '1 min' AS later
	FROM outbox.jobs j JOIN outbox.events e ON e.seq = j.event_seq ORDER BY j.id;
CALL make('o.a', 1, 'one');
CALL make('o.a', 1, 'two');
CALL make('o.a', 1, 'one');
CALL make('o.a', 1, 'one');
SELECT outbox.subscribe('o', '{o.*}', ordered => true) > 0 AS o;
SELECT outbox.replay('o', '-infinity');
SELECT * FROM line;
CALL make('o.a', 1, 'one');
SELECT subject, count(*) OVER () FROM handle('o') ORDER BY 1;
SELECT subject, count(*) OVER () FROM handle('o') ORDER BY 1;
SELECT subject, count(*) OVER () FROM handle('o') ORDER BY 1;
SELECT outbox.replay('o', '-infinity');
SELECT * FROM line;
SELECT subject, seq - min(seq) OVER () AS n FROM handle('o') ORDER BY 1;
-- while one runs, what is put back waits for the end of its lease, or for it
SELECT job, claim, subject FROM outbox.claim('o', lease => '1 hour') \gset
SELECT :'subject';
SELECT outbox.replay('o', '-infinity');
SELECT * FROM line;
SELECT * FROM handle('o');
SELECT outbox.complete(:job, :claim);
SELECT * FROM line;
SELECT count(*), min(subject) FROM handle('o');
SELECT count(*), min(subject) FROM handle('o');
SELECT count(*), min(subject) FROM handle('o');
SELECT count(*), min(subject) FROM handle('o');
SELECT count(*), min(subject) FROM handle('o');
SELECT * FROM line;
SELECT outbox.unsubscribe('o');
DELETE FROM outbox.events;
DELETE FROM outbox.jobs;

-- More than one step
CALL make('m.a', 2500);
SELECT outbox.subscribe('m', '{m.*}') > 0 AS m;
SELECT outbox.replay('m', '-infinity');
SELECT count(*), count(DISTINCT event_seq) FROM outbox.jobs;
SELECT count(*) FROM handle('m', 1500);
SELECT outbox.replay('m', '-infinity');
SELECT outbox.subscribe('m', '{m.*}', ordered => true) > 0 AS m;
SELECT count(*) FROM handle('m', 2500);
SELECT outbox.replay('m', '-infinity');
SELECT isfinite(due_at) AS free, count(*) FROM outbox.jobs GROUP BY 1;
-- it is part of the transaction
SELECT count(*) FROM handle('m', 2500);
BEGIN;
SELECT outbox.replay('m', '-infinity');
SAVEPOINT s;
DELETE FROM outbox.jobs;
SELECT outbox.replay('m', '-infinity');
ROLLBACK TO s;
SELECT outbox.replay('m', '-infinity');
ROLLBACK;
SELECT state, count(*) FROM what_is GROUP BY 1;
-- and says so when it cannot be sure of every event
BEGIN;
SELECT outbox.subscribe('new', '{m.*}') > 0 AS new;
SELECT outbox.replay('new', '-infinity');
ROLLBACK;

-- Whoever may work with the jobs of a subscription may replay to it.
CREATE ROLE regress_outbox_owner;
CREATE ROLE regress_outbox_other;
SELECT outbox.grant('regress_outbox_owner', 'consume'), outbox.grant('regress_outbox_other', 'consume');
SELECT outbox.set_owner('m', 'regress_outbox_owner');
SET ROLE regress_outbox_other;
SELECT outbox.replay('m', '-infinity');
RESET ROLE;
SELECT outbox.grant('regress_outbox_other', 'admin');
SET ROLE regress_outbox_other;
SELECT outbox.replay('m', '-infinity', '2000-01-01');
SET ROLE regress_outbox_owner;
SELECT outbox.replay('m', '-infinity');
SELECT current_user;
RESET ROLE;
-- whatever the session has set
SELECT count(*) FROM handle('m', 2500);
BEGIN ISOLATION LEVEL SERIALIZABLE;
SET LOCAL search_path = '';
SET LOCAL enable_indexscan = off;
SELECT outbox.replay('m', '-infinity');
SHOW search_path;
COMMIT;

\c :dbname :user
DROP DATABASE outbox_replay;
DROP ROLE regress_outbox_owner;
DROP ROLE regress_outbox_other;
