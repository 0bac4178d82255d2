-- Jobs of ordered subscriptions: one of each scope and subject at a time, in
-- their order.  outbox.blocked and outbox.is_current().
\set dbname :DBNAME
\set user :USER
CREATE DATABASE outbox_job_order TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C';
\c outbox_job_order
CREATE EXTENSION outbox;
SET client_min_messages = error;
-- Record events in one transaction, named a1, a2, b1 ..., of subject a, a, b
-- ..., and wait for their jobs.
CREATE PROCEDURE make(names text, scope text DEFAULT NULL, not_before timestamptz DEFAULT NULL, type text DEFAULT 'o') LANGUAGE plpgsql AS $$
DECLARE
	seq bigint;
	n text;
	outcome text;
BEGIN
	FOREACH n IN ARRAY string_to_array(names, ' ') LOOP
		seq := outbox.record(type, NULLIF(rtrim(n, '0123456789'), ''), jsonb_build_object('name', n), scope, not_before => not_before);
	END LOOP;
	COMMIT;
	CALL outbox.await_fanout(seq, '60s', outcome);
END $$;
-- Claim what can be claimed, and say what that was.
CREATE FUNCTION claimed(subscription text DEFAULT 'ordered', max_jobs int DEFAULT 10, lease interval DEFAULT '1 hour') RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(concat_ws('/', scope, payload ->> 'name'), ' ' ORDER BY payload ->> 'name' COLLATE "C") FROM outbox.claim(subscription, max_jobs, lease)
$$;
-- Jobs by the names of their events, what is done with one by who holds it, and
-- how all of them stand
CREATE FUNCTION job(name text) RETURNS bigint LANGUAGE sql AS $$
	SELECT j.id FROM outbox.jobs j JOIN outbox.events e ON e.seq = j.event_seq
		JOIN outbox.subscriptions s ON s.id = j.subscription_id AND s.name = 'ordered'
	WHERE e.payload ->> 'name' = job.name
$$;
CREATE FUNCTION complete(names text) RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(outbox.complete(j.id, j.claim)::text, ' ') FROM unnest(string_to_array(names, ' ')) n JOIN outbox.jobs j ON j.id = job(n)
$$;
CREATE FUNCTION fail(name text, retry_in interval DEFAULT '1 hour', final boolean DEFAULT false) RETURNS text LANGUAGE sql AS $$
	SELECT CASE WHEN outbox.fail(id, claim, 'e', retry_in, final) > now() THEN 'retrying' ELSE 'dead' END FROM outbox.jobs WHERE id = job(name)
$$;
CREATE VIEW stands AS
	SELECT string_agg(name || ' ' || state || due, ', ' ORDER BY name COLLATE "C") AS stands FROM (
		SELECT s.job, e.subject, e.payload ->> 'name' AS name, s.state,
			CASE WHEN s.state IN ('done', 'cancelled', 'dead', 'running') THEN '' WHEN s.due_at IS NULL THEN ' held back' WHEN s.due_at <= clock_timestamp() THEN ' due' ELSE ' not due' END AS due
		FROM outbox.job_status s JOIN outbox.events e USING (seq) WHERE s.subscription = 'ordered') x;
CREATE VIEW blocked AS
	SELECT b.scope, b.subject, waiting, e.payload ->> 'name' AS behind, state, attempts, due_at <= clock_timestamp() AS due, b.last_error
	FROM outbox.blocked b JOIN outbox.events e USING (seq) WHERE subscription = 'ordered' ORDER BY 1, 2;
CREATE FUNCTION reset() RETURNS bigint LANGUAGE sql AS $$
	SELECT outbox.unsubscribe('ordered');
	DELETE FROM outbox.events;
	SELECT outbox.subscribe('ordered', '{o}', ordered => true, max_attempts => 3) > 0;
	SELECT count(*) FROM outbox.jobs JOIN outbox.job_status ON job = id
$$;

-- Only the oldest of each scope and subject
SELECT reset();
CALL make('a1 a2 b1 a3 c1 b2');
SELECT * FROM stands;
SELECT claimed();
SELECT * FROM blocked;
SELECT claimed();
SELECT complete('a1'), claimed(), claimed();
SELECT * FROM stands;
-- one that fails holds back its own subject, and no other
SELECT fail('b1'), claimed();
SELECT * FROM blocked;
SELECT complete('a2'), claimed(), complete('a3 c1'), claimed();
SELECT * FROM stands;
SELECT * FROM blocked;
-- what comes later is held back too, whenever it comes
CALL make('b3 a4 b4 d1');
SELECT claimed(), claimed();
SELECT * FROM stands;
UPDATE outbox.jobs SET due_at = clock_timestamp() WHERE id = job('b1');
SELECT claimed(), complete('b1'), claimed(), complete('b2'), claimed(), complete('b3'), claimed(), complete('b4'), claimed();
SELECT * FROM blocked;
-- by claims of one job at a time
SELECT reset();
CALL make('a1 a2 a3 b1 b2 b3');
SELECT claimed(max_jobs => 1), claimed(max_jobs => 1), claimed(max_jobs => 1);
SELECT complete('b1'), complete('a1'), claimed(max_jobs => 1), claimed(max_jobs => 1), claimed(max_jobs => 1);

-- Without a subject there is no order; a subscription that asks for none has none.
SELECT reset();
SELECT outbox.subscribe('plain', '{o}') > 0 AS subscribed;
CALL make('1 2 a1 3 a2');
SELECT claimed(), claimed('plain');
SELECT outbox.unsubscribe('plain');
-- scopes are apart
SELECT reset();
CALL make('a1 a2');
CALL make('a3 a4', 'acme');
CALL make('a5 a6', '');
SELECT claimed();
SELECT * FROM blocked;
SELECT complete('a3'), claimed();

-- Dead and cancelled ones hold nothing back.
SELECT reset();
CALL make('a1 a2 a3 b1 b2 b3 c1 c2 c3 d1 d2 d3');
SELECT outbox.cancel(job('d1')), claimed();
SELECT fail('a1', final => true), claimed();
SELECT outbox.cancel(job('b1')), claimed();
SELECT outbox.complete(job('b1'), 1);
SELECT outbox.cancel(job('c2')), complete('c1'), claimed();
SELECT fail('d2', '0', true), outbox.cancel(job('d2')), claimed();
SELECT * FROM stands;
-- the last attempt that does not return
SELECT reset();
CALL make('a1 a2 a3');
SELECT claimed(lease => '1us'), claimed(lease => '1us'), claimed(lease => '1us');
SELECT claimed();
SELECT * FROM stands;
-- the event is gone
SELECT reset();
CALL make('a1 a2 a3');
DELETE FROM outbox.events WHERE payload ->> 'name' = 'a1';
SELECT claimed();

-- A lease that has run out still holds back, and is claimed first.
SELECT reset();
CALL make('a1 a2');
SELECT claimed(lease => '1us');
SELECT * FROM blocked;
SELECT claimed(lease => '1us');
SELECT complete('a1'), claimed();

-- All of a claim at once
SELECT reset();
CALL make('a1 a2 b1 b2 c1 c2 1 2');
SELECT claimed(max_jobs => 3);
SELECT outbox.complete_many(claim) FROM outbox.jobs WHERE id = job('a1');
SELECT claimed();
CALL make('a3 b3');
SELECT outbox.complete_many(claim, ARRAY[job('a2'), job('b2'), job('b1')]) = ARRAY[job('b1')] AS refused, claimed() FROM outbox.jobs WHERE id = job('a2');
SELECT * FROM stands;

-- Not before a time: it holds back, or waits for it in its turn.
SELECT reset();
CALL make('a1', not_before => 'tomorrow'::timestamptz + interval '1 day');
CALL make('a2 b1');
CALL make('b2', not_before => 'tomorrow'::timestamptz + interval '1 day');
CALL make('b3');
SELECT claimed();
SELECT * FROM stands;
SELECT complete('b1'), claimed();
SELECT * FROM stands;
SELECT s.due_at = e.not_before AS at_its_time FROM outbox.job_status s JOIN outbox.events e USING (seq) WHERE job = job('b2');
SELECT outbox.cancel(job('a1')), outbox.cancel(job('b2')), claimed();

-- A dead one that is put back comes before those that are younger, but not
-- while one of them runs.
SELECT reset();
CALL make('a1 a2 a3');
SELECT claimed(), fail('a1', final => true), claimed();
SELECT outbox.retry(job('a1')), claimed();
SELECT * FROM stands;
SELECT complete('a2'), claimed();
SELECT * FROM blocked;
SELECT complete('a1'), claimed();
-- not when that lease is prolonged, either
SELECT reset();
CALL make('a1 a2 b1 b2');
SELECT claimed(), fail('a1', final => true), fail('b1', final => true), claimed();
SELECT outbox.retry_dead('ordered');
SELECT outbox.extend(j.id, j.claim, '5 hours') > now() + interval '4 hours' AS extended FROM outbox.jobs j WHERE id = job('a2');
SELECT e.payload ->> 'name' AS name, s.due_at > now() + interval '4 hours' AS later FROM outbox.job_status s JOIN outbox.events e USING (seq) WHERE s.subscription = 'ordered' ORDER BY 1;
SELECT outbox.extend_many(j.claim, '5 hours') FROM outbox.jobs j WHERE id = job('b2');
SELECT e.payload ->> 'name' AS name, s.due_at > now() + interval '4 hours' AS later FROM outbox.job_status s JOIN outbox.events e USING (seq) WHERE s.subscription = 'ordered' ORDER BY 1;
SELECT complete('a2 b2'), claimed();
-- but as soon as it ends, whichever way
SELECT reset();
CALL make('a1 a2 b1 b2 c1 c2 d1 d2 e1 e2');
SELECT claimed(), fail('a1', final => true), fail('b1', final => true), fail('c1', final => true), fail('d1', final => true), fail('e1', final => true), claimed();
SELECT outbox.retry_dead('ordered'), claimed();
SELECT complete('a2'), fail('b2'), fail('c2', final => true), outbox.cancel(job('d2')), outbox.release(j.id, j.claim) FROM outbox.jobs j WHERE id = job('e2');
SELECT claimed();
SELECT * FROM stands;
SELECT complete('b1 e1');
SELECT * FROM stands;
SELECT claimed();
-- a younger one put back waits for its turn
SELECT reset();
CALL make('a1 a2 a3 a4 b1 b2');
SELECT claimed(), fail('a1', final => true), claimed(), fail('a2', final => true), claimed(), fail('a3', '1 hour'), fail('b1', final => true);
SELECT * FROM stands;
SELECT outbox.retry(job('a2')), outbox.retry(job('b1'));
SELECT * FROM stands;
SELECT outbox.retry(job('a1'));
SELECT * FROM stands;
SELECT claimed(), complete('a1'), complete('b1');
SELECT claimed(), complete('a2'), complete('b2');
SELECT claimed();
-- all at once, over several subjects and some without
SELECT reset();
CALL make('a1 b1 1 a2 b2 2 a3 b3 3 c1');
SELECT claimed(), fail('a1', final => true), fail('b1', final => true), fail('1', final => true), fail('2', final => true), fail('3', final => true), fail('c1', final => true);
SELECT claimed(), fail('a2', final => true), claimed();
SELECT outbox.retry_dead('ordered', spread => '0');
SELECT * FROM stands;
SELECT claimed(), complete('a3'), complete('b2'), claimed();

-- Told to be ordered, or not to be any more
SELECT reset();
CALL make('a1 a2 a3 b1 b2');
SELECT claimed();
SELECT outbox.subscribe('ordered', '{o}', ordered => false, max_attempts => 3) > 0 AS subscribed;
CALL make('a4 a5');
SELECT complete('b1');
SELECT claimed(max_jobs => 2);
CALL outbox.await_jobs('ordered', '60s');
BEGIN;
SELECT claimed(max_jobs => 2);
SELECT * FROM stands;
ROLLBACK;
SELECT claimed(max_jobs => 1);
SELECT claimed(max_jobs => 1);
SELECT claimed(max_jobs => 10);
SELECT * FROM stands;
SELECT outbox.subscribe('ordered', '{o}', ordered => true, max_attempts => 3) > 0 AS subscribed;
CALL make('a6 c1');
SELECT claimed();

-- Ordered and coalescing
SELECT reset();
SELECT outbox.subscribe('ordered', '{o}', ordered => true, coalescing => true) > 0 AS subscribed;
CALL make('a1 b1 a2 b2');
CALL make('a3 a4');
SELECT claimed(), claimed();
SELECT complete('a2'), claimed();
SELECT count(*) FROM outbox.jobs JOIN outbox.job_status ON job = id;

-- Filters that the relay left
SELECT reset();
SELECT outbox.subscribe('ordered', '{o}', ordered => true, filter => '$.n != 1') > 0 AS subscribed;
CREATE PROCEDURE large(n int) LANGUAGE plpgsql AS $$
DECLARE
	seq bigint;
	outcome text;
BEGIN
	FOR i IN 1 .. n LOOP
		seq := outbox.record('o', 'a', jsonb_build_object('n', i, 'name', 'a' || i, 'pad', repeat('x', 1048576)));
	END LOOP;
	COMMIT;
	CALL outbox.await_fanout(seq, '60s', outcome);
END $$;
CALL large(3);
SELECT claimed(), claimed();
SELECT * FROM stands;

-- outbox.is_current(): not while there is a job that is not done
SELECT reset();
CREATE FUNCTION current(subject text DEFAULT 'a', scope text DEFAULT NULL) RETURNS boolean LANGUAGE sql AS $$
	SELECT outbox.is_current('ordered', subject, scope)
$$;
SELECT current();
CALL make('a1');
SELECT current() AS waiting, claimed(), current() AS running, fail('a1'), current() AS retrying;
UPDATE outbox.jobs SET due_at = clock_timestamp() WHERE id = job('a1');
SELECT claimed(), fail('a1', final => true);
SELECT max(seq) AS seq FROM outbox.events WHERE type = 'outbox.job.dead' \gset
CALL outbox.await_fanout(:seq, '60s');
SELECT current() AS dead, outbox.retry(job('a1')), current() AS retried, claimed(), complete('a1'), current() AS done;
CALL make('a2 a3');
SELECT outbox.cancel(job('a3')), current() AS another_waits, outbox.cancel(job('a2')), current() AS cancelled;
-- of that scope and subject
CALL make('a4', 'acme');
SELECT current(), current('a', 'acme') AS acme, current('a', 'Acme'), current('a', ''), current('A'), current('b', 'acme'), current('');
SELECT claimed(), complete('a4'), current('a', 'acme');
-- nor while an event is unmarked, of whatever type, or poisoned
SELECT outbox.stop();
SELECT outbox.record('another', 'a') AS seq \gset
SELECT current() AS unmarked, current('b'), current('a', 'acme');
UPDATE outbox.events SET poisoned_at = now() WHERE seq = :seq;
SELECT current() AS poisoned, current('b'), current('a', 'acme');
SELECT outbox.discard(:seq), current() AS discarded;
SELECT outbox.record('another', 'a', scope => 'acme') AS seq \gset
SELECT current(), current('a', 'acme') AS unmarked;
UPDATE outbox.events SET poisoned_at = now() WHERE seq = :seq;
SELECT current(), current('a', 'acme') AS poisoned, outbox.discard(:seq);
-- too many to look at
SELECT count(outbox.record('many', 'many')) FROM generate_series(1, 999);
SELECT current() AS few;
SELECT outbox.record('many') > 0 AS one_more;
SELECT current() AS too_many;
UPDATE outbox.events SET poisoned_at = now() WHERE type = 'many' AND subject = 'many';
SELECT current() AS few;
UPDATE outbox.events SET poisoned_at = now() WHERE type = 'many';
SELECT current() AS too_many;
DELETE FROM outbox.events WHERE type = 'many';
SELECT outbox.start(), current();
-- coalescing ones know it too, others do not
SELECT outbox.subscribe('ordered', '{o}', coalescing => true) > 0 AS subscribed;
CALL make('a5 a6 b1');
SELECT current(), claimed(), complete('a6'), current(), current('b');
SELECT outbox.subscribe('ordered', '{o}') > 0 AS subscribed;
SELECT outbox.is_current('ordered', 'a');
\set VERBOSITY sqlstate
SELECT outbox.is_current('ordered', 'a');
\set VERBOSITY default
SELECT outbox.is_current('none', 'a');
SELECT outbox.is_current(NULL, 'a');
SELECT outbox.is_current('ordered', NULL);

\c :dbname :user
DROP DATABASE outbox_job_order;
