-- Leases of jobs: claim, complete, fail, extend, release.  In a database of its
-- own, so that the numbers of jobs and claims are known.
\set dbname :DBNAME
\set user :USER
CREATE DATABASE outbox_jobs TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C';
\c outbox_jobs
CREATE EXTENSION outbox;
SET application_name = 'psql';

-- Record events in one transaction, subjects 1 to n, and wait for their jobs.
CREATE PROCEDURE make(type text, n int DEFAULT 1) LANGUAGE plpgsql AS $$
DECLARE
	s bigint;
	outcome text;
BEGIN
	SELECT max(outbox.record(type, i::text, jsonb_build_object('n', i), 'acme', '{"trace": "t"}')) INTO s
	FROM generate_series(1, n) i;
	COMMIT;
	CALL outbox.await_fanout(s, '60s', outcome);
END $$;
CREATE VIEW now_is AS
	SELECT job, subscription, state, attempts, due_at <= clock_timestamp() AS due,
		leased_until > clock_timestamp() AS leased, holder, last_error, done_at IS NOT NULL AS done, dead_at IS NOT NULL AS dead
	FROM outbox.job_status;

-- Claim: the columns, and the order
SELECT outbox.subscribe('jobs', '{job.*}', max_attempts => 3, retry_min => '1min', lease => '1 hour') AS jobs;
SELECT * FROM outbox.claim('jobs');
CALL make('job.a', 5);
SELECT * FROM outbox.claim('jobs') \gdesc
SELECT ordinality, job, claim, attempt, max_attempts, seq, type, subject, scope, payload, headers,
	leased_until > clock_timestamp() + interval '59 min' AND leased_until < clock_timestamp() + interval '61 min' AS leased_until,
	recorded_at <= now() AS recorded_at
FROM outbox.claim('jobs', 2, worker => 'w') WITH ORDINALITY;
SELECT * FROM now_is ORDER BY job;
-- what was put back comes after those that have been due for longer
SELECT outbox.release(1, 1);
SELECT ordinality, job, claim, attempt FROM outbox.claim('jobs', 10) WITH ORDINALITY;
SELECT * FROM outbox.claim('jobs', 10);
-- the name of the holder: given, of the application, clipped
SELECT job, holder FROM now_is ORDER BY job;
SELECT count(outbox.release(job, 2)) FROM unnest('{3,4,5,1}'::bigint[]) job;
SET application_name = 'the application';
SELECT job FROM outbox.claim('jobs');
SELECT job FROM outbox.claim('jobs', worker => '');
SELECT job FROM outbox.claim('jobs', worker => repeat(U&'\20AC', 100));
SELECT job, CASE WHEN length(holder) < 50 THEN holder ELSE length(holder)::text END AS holder FROM now_is ORDER BY job;
SET application_name = 'psql';
-- never more than were asked for, and each once
SELECT outbox.purge('jobs', 'done') AS nothing_to_purge, count(outbox.cancel(job)) FROM generate_series(1, 5) job;
CALL make('job.b', 250);
CREATE TEMP TABLE claims (claim bigint);
DO $$
DECLARE
	seen bigint[] := '{}';
	got bigint[];
	n int;
BEGIN
	FOREACH n IN ARRAY '{1,7,100,99,50,50}'::int[] LOOP
		WITH c AS (SELECT * FROM outbox.claim('jobs', n)), i AS (INSERT INTO claims SELECT DISTINCT claim FROM c)
			SELECT array_agg(c.job) INTO got FROM c;
		RAISE NOTICE 'asked for %, got %, of them new %', n, coalesce(cardinality(got), 0),
			(SELECT count(*) FROM unnest(got) g WHERE g <> ALL (seen));
		seen := seen || got;
	END LOOP;
END $$;
-- all of a claim at once
SELECT outbox.complete_many(claim), count(*) FROM claims GROUP BY 1;
SELECT state, count(*) FROM now_is GROUP BY 1 ORDER BY 1;
SELECT outbox.purge('jobs', 'done'), outbox.purge('jobs', 'cancelled');

-- Several claims in one statement, and as part of others
SELECT outbox.subscribe('second', '{job.*}') > 0 AS subscribed;
CALL make('job.c', 3);
SELECT a.subject AS a, b.subject AS b FROM outbox.claim('jobs', 2) a FULL JOIN outbox.claim('second', 3) b USING (seq) ORDER BY seq;
WITH c AS (SELECT * FROM outbox.claim('jobs')) SELECT subject, outbox.complete(job, claim) FROM c;
SELECT outbox.unsubscribe('second');
SELECT outbox.complete_many(max(claim)) FROM outbox.jobs WHERE done_at IS NULL AND subscription_id = 1;
SELECT state, count(*) FROM now_is GROUP BY 1 ORDER BY 1;
SELECT outbox.purge('jobs', 'done');

-- A lease is counted from the clock, not from the start of the transaction.
CALL make('job.d');
BEGIN;
SELECT leased_until - interval '1 hour' > now() AS from_the_clock FROM outbox.claim('jobs');
SELECT job, claim FROM outbox.jobs JOIN outbox.job_status ON job = id WHERE state = 'running' \gset
SELECT outbox.extend(:job, :claim) - interval '1 hour' > now() AS from_the_clock;
SELECT outbox.extend_many(:claim), (SELECT leased_until - interval '1 hour' > now() AS from_the_clock FROM outbox.job_status WHERE job = :job);
SELECT outbox.fail(:job, :claim, 'e', '1s') - interval '1s' > now() AS from_the_clock;
ROLLBACK;
-- what was rolled back can be claimed at once
SELECT attempt, leased_until < clock_timestamp() + interval '3 seconds' AS short FROM outbox.claim('jobs', 1, '2 seconds');
SELECT job, claim FROM outbox.jobs JOIN outbox.job_status ON job = id WHERE state = 'running' \gset
SELECT outbox.extend(:job, :claim, '1 day') > clock_timestamp() + interval '23 hours' AS longer, outbox.extend(:job, :claim, '1 min') < clock_timestamp() + interval '2 min' AS shorter,
	outbox.extend(:job, :claim) > clock_timestamp() + interval '59 min' AS as_subscribed;
SELECT outbox.extend_many(:claim, '2 days'), outbox.extend_many(:claim + 1), outbox.extend_many(-1);
SELECT leased_until > clock_timestamp() + interval '47 hours' AS longer FROM outbox.job_status WHERE job = :job;

-- Complete: true once, false when the same claim does it again, OB001 for others
SELECT outbox.complete(:job, :claim), outbox.complete(:job, :claim);
SELECT outbox.complete(:job, :claim + 1);
SELECT outbox.fail(:job, :claim, 'late');
SELECT outbox.extend(:job, :claim);
SELECT outbox.release(:job, :claim);
SELECT outbox.extend_many(:claim), outbox.complete_many(:claim), outbox.complete_many(:claim, ARRAY[:job]);
SELECT state, attempts, last_error, done, dead, leased FROM now_is WHERE job = :job;
-- several, of which the claim holds some
CALL make('job.e', 4);
SELECT min(job) AS first, min(claim) AS claim FROM outbox.claim('jobs', 3) \gset
SELECT outbox.complete_many(:claim, ARRAY[:first, :first + 3, :first, -1, NULL, :job]) = ARRAY[-1, :job, :first + 3, NULL]::bigint[] AS refused;
SELECT outbox.complete_many(:claim, ARRAY[[:first], [:first + 1]]), outbox.complete_many(:claim, '{}');
SELECT outbox.complete_many(:claim + 1, ARRAY[:first + 2]) = ARRAY[:first + 2]::bigint[] AS refused;
SELECT outbox.release(:first + 2, :claim);
SELECT outbox.complete_many(:claim, ARRAY[:first, :first + 1, :first + 2]) = ARRAY[:first + 2]::bigint[] AS refused;
SELECT outbox.complete_many(:claim);
SELECT job - :first AS job, state, attempts FROM now_is WHERE job >= :first ORDER BY job;
-- one that was cancelled is refused
SELECT max(claim) AS claim FROM outbox.claim('jobs', 2) \gset
SELECT outbox.cancel(:first + 3);
SELECT outbox.complete_many(:claim, ARRAY[:first + 2, :first + 3]) = ARRAY[:first + 3]::bigint[] AS refused;
SELECT outbox.complete(:first + 3, :claim);

-- Fail: waits as the subscription has it, or as it is told
CALL make('job.f');
SELECT job, claim FROM outbox.claim('jobs') \gset
SELECT wait > '59 s' AND wait <= '66 s' AS waits FROM (SELECT outbox.fail(:job, :claim, 'first') - clock_timestamp() AS wait OFFSET 0) w;
SELECT state, attempts, due, leased, last_error FROM now_is WHERE job = :job;
SELECT * FROM outbox.claim('jobs');
SELECT outbox.fail(:job, :claim, 'again');
SELECT state, attempts, due, leased, last_error FROM now_is WHERE job = :job;
UPDATE outbox.jobs SET due_at = clock_timestamp() WHERE id = :job;
SELECT attempt, claim FROM outbox.claim('jobs') \gset
SELECT :attempt AS attempt, outbox.fail(:job, :claim, 'second', retry_in => '0') <= clock_timestamp() AS due;
-- the third is the last: dead, which a WARNING and an event say
SELECT claim FROM outbox.claim('jobs') \gset
SELECT outbox.fail(:job, :claim, E'third\nwith a second line', retry_in => '1s');
SELECT state, attempts, due, leased, last_error, dead, done FROM now_is WHERE job = :job;
SELECT subscription, type, subject, scope, attempts, last_error, dead_at <= clock_timestamp() AS dead_at FROM outbox.dead_jobs WHERE job = :job;
SELECT type, subject, scope, headers, payload - '{job,seq}'::text[] AS payload, payload -> 'job' = to_jsonb(:job) AS job,
	payload -> 'seq' = (SELECT to_jsonb(seq) FROM outbox.job_status WHERE job = :job) AS seq
FROM outbox.events WHERE type LIKE 'outbox.%';
SELECT outbox.complete(:job, :claim);
-- or the first, when it is final
CALL make('job.g');
SELECT job, claim FROM outbox.claim('jobs') \gset
SELECT outbox.fail(:job, :claim, 'no use', '1 min', true);
SELECT state, attempts, last_error FROM now_is WHERE job = :job;
-- rolled back, nothing has happened
CALL make('job.g');
SELECT job, claim FROM outbox.claim('jobs') \gset
BEGIN;
SELECT outbox.fail(:job, :claim, 'no use', final => true);
ROLLBACK;
SELECT state, attempts, last_error FROM now_is WHERE job = :job;
SELECT count(*) FROM outbox.events WHERE type = 'outbox.job.dead';
-- a dead job of an event of the extension's own raises no further alert
SELECT outbox.subscribe('alerts', '{outbox.job.dead}') > 0 AS subscribed;
SELECT outbox.fail(:job, :claim, 'no', final => true);
SELECT max(seq) AS seq FROM outbox.events WHERE type = 'outbox.job.dead' \gset
CALL outbox.await_fanout(:seq, '60s');
SELECT type, subject, scope, payload ->> 'last_error' AS last_error, outbox.fail(job, claim, 'no mail', final => true) FROM outbox.claim('alerts', 10);
SELECT subscription, last_error FROM now_is WHERE state = 'dead' ORDER BY job;
SELECT count(*) FROM outbox.events WHERE type = 'outbox.job.dead';
SELECT outbox.unsubscribe('alerts');

-- The wait doubles from retry_min to retry_max, and takes up to a tenth more,
-- whatever the number of attempts.
SELECT outbox.subscribe('wait', '{wait}', max_attempts => 2147483647, retry_min => '10s', retry_max => '70s') > 0 AS subscribed;
CALL make('wait');
CREATE FUNCTION fail_after(attempts int, run int, OUT attempt int, OUT wait numeric) LANGUAGE plpgsql AS $$
DECLARE
	c record;
BEGIN
	UPDATE outbox.jobs j SET due_at = clock_timestamp(), attempts = fail_after.attempts
	FROM outbox.subscriptions s WHERE s.id = j.subscription_id AND s.name = 'wait';
	SELECT * INTO STRICT c FROM outbox.claim('wait');
	attempt := c.attempt;
	wait := extract(epoch FROM outbox.fail(c.job, c.claim, 'e') - clock_timestamp());
END $$;
SELECT attempt, bool_and(wait BETWEEN expected - 1 AND expected * 1.1) AS waits, max(wait) - min(wait) > expected * 0.01 AS at_random
FROM (VALUES (0, 10), (1, 20), (2, 40), (3, 70), (4, 70), (30, 70), (31, 70), (62, 70), (63, 70), (1000, 70), (2000000000, 70), (2147483645, 70)) v (attempts, expected),
	generate_series(1, 20) run, fail_after(attempts, run) GROUP BY attempt, expected ORDER BY 1;
UPDATE outbox.jobs j SET due_at = clock_timestamp(), attempts = 2147483647 FROM outbox.job_status s WHERE s.job = j.id AND s.subscription = 'wait';
SELECT attempt, outbox.fail(job, claim, 'the last of all') FROM outbox.claim('wait');
SELECT outbox.subscribe('wait', '{wait}', max_attempts => 5, retry_min => '0', retry_max => '0') > 0 AS subscribed;
CALL make('wait');
SELECT attempt, outbox.fail(job, claim, 'e') <= clock_timestamp() AS no_wait FROM outbox.claim('wait');
SELECT outbox.subscribe('wait', '{wait}', max_attempts => 5, retry_min => '1 year', retry_max => '1 year') > 0 AS subscribed;
SELECT attempt, outbox.fail(job, claim, 'e') > clock_timestamp() + interval '359 days' AS longest FROM outbox.claim('wait');
SELECT outbox.unsubscribe('wait');

-- Texts of errors: null, empty, long, cut between characters, odd
SELECT outbox.subscribe('errors', '{error}', retry_min => '0', retry_max => '0', max_attempts => 100) > 0 AS subscribed;
CALL make('error');
CREATE FUNCTION fail_with(error text, final boolean DEFAULT false) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	c record;
BEGIN
	SELECT * INTO STRICT c FROM outbox.claim('errors');
	PERFORM outbox.fail(c.job, c.claim, error, final => final);
	RETURN (SELECT CASE WHEN length(last_error) > 99 THEN octet_length(last_error) || ' bytes, ' || length(last_error) || ' characters' ELSE last_error END
		FROM outbox.job_status s WHERE s.job = c.job);
END $$;
SELECT n, fail_with(error) FROM (VALUES (1, NULL), (2, ''), (3, 'x'), (4, NULL), (5, repeat('x', 1024 * 1024)), (6, repeat(U&'\20AC', 1000)),
	(7, 'x' || repeat(U&'\+01F600', 1000)), (8, E'tab\tbell\007del\177 100 % "quoted" \\ {"json": 1}'), (9, E'two\r\nlines')) v (n, error) ORDER BY n;
SET client_min_messages = error;
SELECT n, fail_with(error, true), outbox.retry(job) FROM (VALUES (1, NULL), (2, ''), (3, repeat(U&'\20AC\0007', 500000)), (4, E'one % "line"\nand another'), (5, E'\nno first line')) v (n, error),
	outbox.job_status WHERE subscription = 'errors' ORDER BY n;
RESET client_min_messages;
SELECT CASE WHEN length(error) > 99 THEN octet_length(error) || ' bytes' ELSE error END AS last_error
FROM (SELECT seq, payload ->> 'last_error' AS error FROM outbox.events WHERE type = 'outbox.job.dead' AND payload ->> 'subscription' = 'errors') e ORDER BY seq;
SELECT outbox.unsubscribe('errors');

-- Extend and release, by who holds the job and by others.  A release does not
-- count as an attempt.
CALL make('job.h');
SELECT job, claim FROM outbox.claim('jobs') \gset
SELECT outbox.release(:job, :claim + 1);
SELECT outbox.extend(:job, :claim + 1);
SELECT outbox.release(:job, :claim);
SELECT outbox.release(:job, :claim);
SELECT state, attempts, due FROM now_is WHERE job = :job;
SELECT claim, attempt FROM outbox.claim('jobs') \gset
SELECT :attempt AS attempt, outbox.fail(:job, :claim, 'e', '0') IS NOT NULL AS failed;
SELECT claim, attempt FROM outbox.claim('jobs') \gset
SELECT :attempt AS attempt, outbox.release(:job, :claim, '1 hour');
SELECT state, attempts, due_at > clock_timestamp() + interval '59 min' AS in_an_hour, last_error FROM outbox.job_status WHERE job = :job;
SELECT * FROM outbox.claim('jobs');
SELECT outbox.cancel(:job);

-- A lease that has run out: the job is due, but while nobody has claimed it, it
-- is still that of its last holder.
CALL make('job.i', 6);
SELECT min(job) AS job, min(claim) AS claim FROM outbox.claim('jobs', 5, '1us') \gset
SELECT state, count(*), bool_or(leased) AS leased, bool_and(due) AS due FROM now_is WHERE job BETWEEN :job AND :job + 5 GROUP BY 1 ORDER BY 1;
SELECT outbox.complete(:job, :claim), outbox.extend(:job + 1, :claim) > clock_timestamp() AS extended, outbox.fail(:job + 2, :claim, 'e') > clock_timestamp() AS failed,
	outbox.release(:job + 3, :claim, '1 hour');
SELECT job - :job AS job, state, attempts, leased, due, last_error FROM now_is WHERE job BETWEEN :job AND :job + 4 ORDER BY job;
SELECT outbox.extend_many(:claim, '1us'), outbox.cancel(:job + 5);
SELECT job - :job AS job, attempt FROM outbox.claim('jobs', 10, worker => 'another') ORDER BY job;
SELECT job - :job AS job, state, attempts, leased, holder, last_error FROM now_is WHERE job BETWEEN :job AND :job + 4 ORDER BY job;
-- once another has claimed it, it is not
SELECT outbox.complete(:job + 1, :claim);
SELECT outbox.fail(:job + 1, :claim, 'late', final => true);
SELECT outbox.extend(:job + 1, :claim);
SELECT outbox.release(:job + 1, :claim);
SELECT outbox.complete_many(:claim, ARRAY[:job + 1, :job + 4]) = ARRAY[:job + 1, :job + 4]::bigint[] AS refused, outbox.complete_many(:claim), outbox.extend_many(:claim);
SELECT job - :job AS job, state, attempts, leased, last_error FROM now_is WHERE job IN (:job + 1, :job + 4) ORDER BY job;
SELECT outbox.extend_many(claim, '1us') FROM outbox.jobs WHERE id = :job + 1;
SELECT job - :job AS job, attempt FROM outbox.claim('jobs', 10, '1us') ORDER BY job;
-- the last attempt that does not return
SELECT outbox.extend(:job + 4, claim) > clock_timestamp() AS extended FROM outbox.jobs WHERE id = :job + 4;
SELECT * FROM outbox.claim('jobs', 10);
SELECT job - :job AS job, state, attempts, last_error FROM now_is WHERE job IN (:job + 1, :job + 4) ORDER BY job;
SELECT outbox.fail(:job + 4, claim, 'returned') FROM outbox.jobs WHERE id = :job + 4;
SELECT payload -> 'attempts' AS attempts, payload -> 'last_error' AS last_error FROM outbox.events WHERE type = 'outbox.job.dead' ORDER BY seq DESC LIMIT 2;
SELECT count(outbox.cancel(job)) FROM generate_series(:job, :job + 5) job;
-- another job is claimed in its place
CALL make('job.j', 3);
SELECT job FROM outbox.claim('jobs', 1, '1us') \gset
UPDATE outbox.jobs SET attempts = 3 WHERE id = :job;
SELECT subject FROM outbox.claim('jobs', 2) ORDER BY 1;
SELECT subject FROM outbox.claim('jobs', 2) ORDER BY 1;
SELECT job - :job AS job, state FROM now_is WHERE job BETWEEN :job AND :job + 2 ORDER BY 1;
SELECT count(outbox.cancel(job)) FROM generate_series(:job, :job + 2) job;

-- Somebody has deleted the event.
CALL make('job.k', 2);
DELETE FROM outbox.events WHERE type = 'job.k' AND subject = '1';
SELECT subject FROM outbox.claim('jobs');
SELECT subject FROM outbox.claim('jobs');
SELECT subscription, type, last_error FROM outbox.dead_jobs WHERE last_error LIKE 'event %';
SELECT payload -> 'type' AS type, payload -> 'subject' AS subject FROM outbox.events WHERE type = 'outbox.job.dead' ORDER BY seq DESC LIMIT 1;

-- What is rolled back has claimed nothing; what does not write cannot claim.
SELECT count(outbox.cancel(job)) FROM outbox.job_status WHERE state IN ('waiting', 'running');
\set VERBOSITY sqlstate
BEGIN READ ONLY;
SELECT outbox.claim('jobs');
ROLLBACK;
\set VERBOSITY default
CALL make('job.l', 2);
BEGIN;
SAVEPOINT a;
SELECT subject FROM outbox.claim('jobs');
ROLLBACK TO a;
SELECT subject FROM outbox.claim('jobs');
SAVEPOINT b;
SELECT subject FROM outbox.claim('jobs');
ROLLBACK TO b;
RELEASE a;
SELECT subject FROM outbox.claim('jobs', 2);
COMMIT;
SELECT subject, state, attempts FROM outbox.event_status WHERE type = 'job.l' ORDER BY seq;
-- claim, work and complete in one transaction
CALL make('job.m');
BEGIN;
SELECT subject, outbox.complete(job, claim) FROM outbox.claim('jobs');
ROLLBACK;
SELECT subject, state, attempts FROM outbox.event_status WHERE type = 'job.m';
DO $$
DECLARE
	c record;
BEGIN
	FOR c IN SELECT * FROM outbox.claim('jobs') LOOP
		PERFORM outbox.complete(c.job, c.claim);
	END LOOP;
END $$;
SELECT subject, state, attempts FROM outbox.event_status WHERE type = 'job.m';

\c :dbname :user
DROP DATABASE outbox_jobs;
