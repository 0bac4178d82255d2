-- What the relay makes of events: who gets them, what is coalesced, when a job
-- is due.
SET client_min_messages = warning;
TRUNCATE outbox.events, outbox.jobs, outbox.subscriptions;
CREATE VIEW relay_jobs AS
	SELECT e.seq, e.type, COALESCE(e.subject, '-') AS subject, COALESCE(e.scope, '-') AS scope, f.key AS subscription,
		CASE WHEN j.event_seq = e.seq THEN 'own job' ELSE 'covered by ' || (o.payload ->> 'n') END AS job, e.payload ->> 'n' AS n
	FROM outbox.events e CROSS JOIN jsonb_each_text(e.fanout) f
		LEFT JOIN outbox.jobs j ON j.id = f.value::bigint
		LEFT JOIN outbox.events o ON o.seq = j.event_seq;

-- One transaction is one pass here.  A subscription that coalesces beside one
-- that does not
SELECT count(outbox.subscribe(name, types, coalescing => coalescing)) FROM (VALUES
	('every', '{c.*}'::text[], false), ('latest', '{c.*}', true), ('latest of y', '{c.y}', true)) s (name, types, coalescing);
BEGIN;
SELECT count(outbox.record(type, subject, jsonb_build_object('n', n), scope)) FROM (VALUES
	(1, 'c.x', 'a', NULL), (2, 'c.y', 'a', NULL), (3, 'c.x', 'b', NULL), (4, 'c.x', 'a', NULL),
	(5, 'c.x', NULL, NULL), (6, 'c.x', NULL, NULL),						-- no subject: never
	(7, 'c.x', '', NULL), (8, 'c.x', '', NULL),							-- an empty one is one
	(9, 'c.x', 'a', 'acme'), (10, 'c.x', 'a', 'acme'), (11, 'c.x', 'a', 'Acme'), (12, 'c.x', 'a', ''),	-- scopes apart
	(13, 'c.x', 'A', NULL), (14, 'c.x', 'a ', NULL),					-- byte for byte
	(15, 'c.y', 'a', NULL), (16, 'c.z', 'b', NULL)) e (n, type, subject, scope);
SELECT max(seq) AS seq FROM outbox.events \gset
COMMIT;
CALL outbox.await_fanout(:seq, '60s');
SELECT n, type, subject, scope, subscription, job FROM relay_jobs ORDER BY seq, subscription COLLATE "C";
SELECT subscription, count(*) FROM outbox.job_status GROUP BY 1 ORDER BY subscription COLLATE "C";
-- keys: of coalescing and ordered subscriptions alone, one for each scope and subject
SELECT s.name, count(*), count(subject_key) AS keys, count(DISTINCT subject_key) FROM outbox.jobs j JOIN outbox.subscriptions s ON s.id = j.subscription_id GROUP BY 1 ORDER BY s.name COLLATE "C";
-- a job that exists is never touched: what comes later has its own
SELECT id AS job, event_seq AS of FROM outbox.jobs ORDER BY id DESC LIMIT 1 \gset
SELECT outbox.record('c.z', 'b', '{"n": 17}') AS seq \gset
CALL outbox.await_fanout(:seq, '60s');
SELECT n, subscription, job FROM relay_jobs WHERE seq = :seq ORDER BY subscription COLLATE "C";
SELECT event_seq = :of AS as_it_was FROM outbox.jobs WHERE id = :job;
SELECT count(outbox.unsubscribe(name)) FROM outbox.subscriptions;

-- A long subject, beyond what an index could hold
SELECT count(outbox.subscribe(name, '{long}', coalescing => name = 'l1', ordered => name = 'l2')) FROM unnest('{l1,l2}'::text[]) name;
BEGIN;
SELECT count(outbox.record('long', repeat('x', 16000) || i / 2, jsonb_build_object('n', i))) FROM generate_series(0, 3) i;
SELECT max(seq) AS seq FROM outbox.events \gset
COMMIT;
CALL outbox.await_fanout(:seq, '60s');
SELECT n, subscription, job FROM relay_jobs WHERE type = 'long' ORDER BY seq, subscription COLLATE "C";
SELECT count(*), count(DISTINCT subject_key) FROM outbox.jobs j JOIN outbox.subscriptions s ON s.id = j.subscription_id WHERE s.name = 'l2';
SELECT count(outbox.unsubscribe(name)) FROM outbox.subscriptions;

-- Coalescing looks at what matched: an event that the filter or the scope keeps
-- out covers nobody.
SELECT count(outbox.subscribe(name, '{f}', scope => scope, filter => filter::jsonpath, coalescing => true)) FROM (VALUES
	('even', NULL, '$.n % 2 == 0'), ('acme', 'acme', NULL), ('small', NULL, '$.n < 3')) s (name, scope, filter);
BEGIN;
SELECT count(outbox.record('f', 's', jsonb_build_object('n', i), CASE WHEN i < 4 THEN 'acme' END)) FROM generate_series(1, 5) i;
SELECT max(seq) AS seq FROM outbox.events \gset
COMMIT;
CALL outbox.await_fanout(:seq, '60s');
SELECT n, scope, subscription, job FROM relay_jobs WHERE type = 'f' ORDER BY seq, subscription COLLATE "C";
SELECT count(*) AS for_nobody FROM outbox.events WHERE type = 'f' AND fanout = '{}';
SELECT count(outbox.unsubscribe(name)) FROM outbox.subscriptions;

-- When a job is due: not before what the event says; of what is coalesced, when
-- the first would have been
SELECT count(outbox.subscribe(name, '{due}', coalescing => name = 'latest')) FROM unnest('{every,latest}'::text[]) name;
BEGIN;
SELECT outbox.record('due', 's', '{"n": 1}', not_before => '2100-01-01 00:00+00') > 0 AS recorded;
SELECT outbox.record('due', 's', '{"n": 2}', not_before => '2200-01-01 00:00+00') > 0 AS recorded;
SELECT outbox.record('due', 't', '{"n": 3}', not_before => '2200-01-01 00:00+00') > 0 AS recorded;
SELECT outbox.record('due', 't', '{"n": 4}') > 0 AS recorded;
SELECT outbox.record('due', 'u', '{"n": 5}', not_before => '2000-01-01 00:00+00') AS seq \gset
COMMIT;
CALL outbox.await_fanout(:seq, '60s');
SELECT e.payload ->> 'n' AS n, j.subscription, CASE WHEN j.due_at > now() THEN date_part('year', j.due_at AT TIME ZONE 'UTC')::text WHEN j.due_at > now() - interval '10 minutes' THEN 'now' END AS due
	FROM outbox.job_status j JOIN outbox.events e USING (seq) WHERE e.type = 'due' ORDER BY e.seq, j.subscription COLLATE "C";
SELECT count(outbox.unsubscribe(name)) FROM outbox.subscriptions;

-- A paused subscription gets its jobs, one that has ended gets none, and what it
-- had is not shown.
SELECT count(outbox.subscribe(name, '{p}')) FROM unnest('{paused,ended}'::text[]) name;
SELECT outbox.pause('paused');
SELECT outbox.record('p', payload => '{"n": 1}') AS seq \gset
CALL outbox.await_fanout(:seq, '60s');
SELECT outbox.unsubscribe('ended');
SELECT outbox.record('p', payload => '{"n": 2}') AS seq \gset
CALL outbox.await_fanout(:seq, '60s');
SELECT n, subscription FROM relay_jobs WHERE type = 'p' ORDER BY seq, subscription COLLATE "C";
SELECT subscription, count(*) FROM outbox.job_status j JOIN outbox.events e USING (seq) WHERE e.type = 'p' GROUP BY 1;
SELECT subscription, state FROM outbox.event_status WHERE type = 'p' ORDER BY seq, subscription COLLATE "C";
SELECT outbox.subscribe('ended', '{p}') > 0 AS made_again;
SELECT count(*) AS gets_the_old_ones FROM outbox.job_status WHERE subscription = 'ended';
SELECT count(outbox.unsubscribe(name)) FROM outbox.subscriptions;

-- The views
SELECT outbox.subscribe('view', '{v}') > 0 AS subscribed;
SELECT outbox.record('v', 'note/1', scope => 'acme') AS seq \gset
CALL outbox.await_fanout(:seq, '60s');
SELECT type, subject, scope, event_state, tries, failures, event_error, subscription, state, attempts, last_error, handled_at FROM outbox.event_status WHERE seq = :seq;
SELECT subscription, state, attempts, max_attempts, last_error, engine_id, done_at, dead_at FROM outbox.job_status WHERE seq = :seq;
SELECT database = current_database() AS database, pid > 0 AS pid, state IN ('idle', 'pass') AS state, passes > 0 AS passes, events > 0 AS events, jobs > 0 AS jobs, last_pass_at <= clock_timestamp() AS last_pass, unmarked, oldest_unmarked
	FROM outbox.stat_relay WHERE database = current_database();
SELECT name, state, waiting, oldest_waiting IS NOT NULL AS oldest FROM outbox.stat_subscription;
-- each state of an event and of a job
SELECT outbox.stop();
SELECT outbox.stop();
UPDATE outbox.jobs SET attempts = 2, last_error = 'twice' WHERE event_seq = :seq;
SELECT state, attempts, last_error, handled_at FROM outbox.event_status WHERE seq = :seq;
UPDATE outbox.jobs SET done_at = '2000-01-01 00:00+00' WHERE event_seq = :seq;
SELECT state, handled_at = '2000-01-01 00:00+00' AS handled FROM outbox.event_status WHERE seq = :seq;
UPDATE outbox.jobs SET done_at = NULL, dead_at = '2000-01-01 00:00+00' WHERE event_seq = :seq;
SELECT state, handled_at = '2000-01-01 00:00+00' AS handled FROM outbox.event_status WHERE seq = :seq;
SELECT state FROM outbox.job_status WHERE seq = :seq;
DELETE FROM outbox.jobs WHERE event_seq = :seq;
SELECT event_state, state FROM outbox.event_status WHERE seq = :seq;
SELECT outbox.record('v') AS seq \gset
SELECT event_state, subscription, job FROM outbox.event_status WHERE seq = :seq;
SELECT unmarked, oldest_unmarked IS NOT NULL AS oldest FROM outbox.stat_relay WHERE database = current_database();
SELECT outbox.start();
SELECT outbox.start();
CALL outbox.await_fanout(:seq, '60s');
SELECT outbox.wake();
SELECT outbox.arm();
SELECT outbox.unsubscribe('view');
DROP VIEW relay_jobs;
