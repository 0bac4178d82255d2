-- What becomes of jobs: dead ones put back, jobs given up and deleted, pauses,
-- the end of a subscription.  Filters that the relay left.  Arguments, and
-- numbers of every size.
\set dbname :DBNAME
\set user :USER
CREATE DATABASE outbox_job_ends TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C';
\c outbox_job_ends
CREATE EXTENSION outbox;
SET client_min_messages = error;
-- Record events in one transaction, subjects 1 to n, and wait for their jobs.
CREATE PROCEDURE make(type text, n int DEFAULT 1, pad int DEFAULT 0) LANGUAGE plpgsql AS $$
DECLARE
	s bigint;
	outcome text;
BEGIN
	SELECT max(outbox.record(type, i::text, jsonb_build_object('n', i, 'pad', repeat('x', pad)))) INTO s FROM generate_series(1, n) i;
	COMMIT;
	CALL outbox.await_fanout(s, '60s', outcome);
END $$;
CREATE VIEW now_is AS
	SELECT job, subscription, state, attempts, due_at <= clock_timestamp() AS due,
		leased_until > clock_timestamp() AS leased, last_error, done_at IS NOT NULL AS done, dead_at IS NOT NULL AS dead
	FROM outbox.job_status;
-- How a command ends
CREATE FUNCTION said(command text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text;
BEGIN
	EXECUTE command INTO result;
	RETURN coalesce(result, 'null');
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END $$;

-- Dead ones: retry
SELECT outbox.subscribe('jobs', '{job.*}', max_attempts => 3, lease => '1 hour') AS jobs;
CALL make('job.a', 9);
SELECT min(job) AS job, min(claim) AS claim FROM outbox.claim('jobs', 7) \gset
SELECT outbox.fail(:job, :claim, 'e', final => true);
SELECT outbox.fail(:job + 1, :claim, 'e', final => true);
SELECT outbox.fail(:job + 2, :claim, 'e', final => true);
SELECT outbox.fail(:job + 3, :claim, 'e', final => true);
SELECT outbox.retry(:job);
SELECT state, attempts, due, dead, last_error FROM now_is WHERE job = :job;
SELECT outbox.retry(:job) AS waiting, outbox.retry(:job + 4) AS running, outbox.retry(:job + 8) AS waiting, outbox.retry(0), outbox.retry(-1), outbox.retry(9223372036854775807);
SELECT outbox.complete(:job, :claim);
SELECT outbox.complete(:job + 5, :claim), outbox.retry(:job + 5) AS done, outbox.cancel(:job + 6), outbox.retry(:job + 6) AS cancelled;
SELECT ordinality, job - :job AS job, attempt FROM outbox.claim('jobs', 10) WITH ORDINALITY;
SELECT outbox.complete_many(claim) FROM outbox.jobs WHERE id = :job;
SELECT state, count(*) FROM now_is GROUP BY 1 ORDER BY 1;

-- All of a subscription, or those that died from a time on and before another
SELECT dead_at AS t1 FROM outbox.dead_jobs WHERE job = :job + 2 \gset
SELECT dead_at AS t2 FROM outbox.dead_jobs WHERE job = :job + 3 \gset
SELECT outbox.retry_dead('jobs', :'t2'::timestamptz + interval '1 us') AS none, outbox.retry_dead('jobs', :'t2', :'t1') AS none, outbox.retry_dead('jobs', :'t1', :'t1') AS none;
BEGIN;
SELECT outbox.retry_dead('jobs', since => :'t1');
ROLLBACK;
BEGIN;
SELECT outbox.retry_dead('jobs', until => :'t1');
ROLLBACK;
SELECT outbox.retry_dead('jobs', :'t1', :'t2');
SELECT job - :job AS job, state, attempts, due FROM now_is WHERE job BETWEEN :job + 1 AND :job + 3 ORDER BY job;
SELECT outbox.retry_dead('jobs'), outbox.retry_dead('jobs');
SELECT job - :job AS job, attempt, outbox.complete(job, claim) FROM outbox.claim('jobs', 10) ORDER BY job;
-- spread over a time; of no other subscription
SELECT outbox.subscribe('other', '{job.*}') > 0 AS subscribed;
CALL make('job.b', 50);
SELECT count(*) FROM outbox.claim('jobs', 50) WHERE outbox.fail(job, claim, 'e', final => true) IS NULL;
SELECT count(*) FROM outbox.claim('other', 50) WHERE outbox.fail(job, claim, 'e', final => true) IS NULL;
SELECT name, dead FROM outbox.stat_subscription ORDER BY 1;
SELECT outbox.retry_dead('jobs', spread => '1 hour');
SELECT subscription, state, count(*), count(DISTINCT due_at) > 40 AS spread, min(due_at) > clock_timestamp() - interval '1 min' AND max(due_at) < clock_timestamp() + interval '1 hour' AS within,
	max(due_at) - min(due_at) > interval '30 min' AS wide, max(attempts) AS attempts
FROM outbox.job_status WHERE state NOT IN ('done', 'cancelled') GROUP BY 1, 2 ORDER BY 1;
SELECT outbox.unsubscribe('other');

-- Cancel, whatever it is; then purge, state by state
SELECT count(*) FROM outbox.job_status WHERE state = 'waiting' AND outbox.cancel(job);
SELECT outbox.purge('jobs', 'cancelled'), outbox.purge('jobs', 'done'), outbox.purge('jobs', 'dead');
CALL make('job.c', 6);
SELECT min(job) AS job, min(claim) AS claim FROM outbox.claim('jobs', 4) \gset
SELECT outbox.complete(:job, :claim), outbox.fail(:job + 1, :claim, 'e') IS NOT NULL AS failed, outbox.fail(:job + 2, :claim, 'e', final => true), outbox.extend(:job + 3, :claim, '1us') < clock_timestamp() AS run_out;
SELECT job FROM outbox.claim('jobs', 1, '1 hour') \gset running_
CREATE VIEW ends AS
	SELECT state, attempts, last_error, due_at IS NOT NULL AS due_at, leased_until IS NOT NULL AS leased_until, done_at IS NOT NULL AS done_at, dead_at IS NOT NULL AS dead_at
	FROM outbox.job_status ORDER BY job;
SELECT * FROM ends;
SELECT subject, state, attempts, last_error, handled_at IS NOT NULL AS handled_at, due_at IS NOT NULL AS due_at FROM outbox.event_status WHERE type = 'job.c' ORDER BY seq;
SELECT state, waiting, running, retrying, dead, oldest_waiting <= clock_timestamp() AS oldest_waiting, done_total FROM outbox.stat_subscription;
BEGIN;
SELECT job - :job AS job, outbox.cancel(job) AS once, outbox.cancel(job) AS again FROM generate_series(:job, :job + 6) job ORDER BY 1;
SELECT * FROM ends;
SELECT subject, state, attempts, last_error, handled_at IS NOT NULL AS handled_at, due_at IS NOT NULL AS due_at FROM outbox.event_status WHERE type = 'job.c' ORDER BY seq;
SELECT waiting, running, retrying, dead FROM outbox.stat_subscription;
SELECT * FROM outbox.claim('jobs', 10);
SELECT outbox.purge('jobs'), outbox.purge('jobs', 'dead'), outbox.purge('jobs', 'done'), outbox.purge('jobs', 'cancelled');
SELECT subject, state FROM outbox.event_status WHERE type = 'job.c' ORDER BY seq;
ROLLBACK;
SELECT outbox.purge('jobs', before => '-infinity') AS none, outbox.purge('jobs', before => dead_at) AS none, outbox.purge('jobs', before => dead_at + interval '1 us') FROM outbox.dead_jobs;
SELECT outbox.purge('jobs', 'done', done_at) AS none, outbox.purge('jobs', 'done', done_at + interval '1 us') FROM outbox.job_status WHERE state = 'done';
SELECT outbox.cancel(:job + 1), outbox.purge('jobs', 'cancelled', now() - interval '1 hour') AS none, outbox.purge('jobs', 'cancelled', 'infinity');
SELECT state, count(*) FROM now_is GROUP BY 1 ORDER BY 1;

-- A paused subscription: its jobs rest, those that run may finish.
SELECT count(*) FROM outbox.claim('jobs');
SELECT outbox.pause('jobs');
CALL make('job.d');
SELECT * FROM outbox.claim('jobs', 10);
SELECT state, waiting, running, retrying FROM outbox.stat_subscription;
SELECT outbox.extend(s.job, j.claim) > clock_timestamp() AS extended, outbox.complete(s.job, j.claim) FROM outbox.job_status s JOIN outbox.jobs j ON j.id = s.job WHERE s.state = 'running' ORDER BY s.job;
SELECT state, waiting, running, retrying FROM outbox.stat_subscription;
SELECT outbox.resume('jobs');
SELECT type, subject FROM outbox.claim('jobs', 10) ORDER BY seq;

-- The end of a subscription is that of its jobs.
SELECT min(job) AS job, max(job) AS dead, max(claim) AS claim FROM now_is JOIN outbox.jobs ON id = job WHERE state = 'running' \gset
SELECT outbox.fail(:dead, :claim, 'e', final => true);
CALL make('job.e');
SELECT outbox.unsubscribe('jobs');
SELECT outbox.complete(:job, :claim);
SELECT outbox.fail(:job, :claim, 'e');
SELECT outbox.extend(:job, :claim);
SELECT outbox.release(:job, :claim);
SELECT outbox.extend_many(:claim), outbox.complete_many(:claim), outbox.complete_many(:claim, ARRAY[:job]) = ARRAY[:job]::bigint[] AS refused;
SELECT outbox.retry(:dead), outbox.cancel(:job);
SELECT outbox.claim('jobs');
SELECT outbox.retry_dead('jobs');
SELECT outbox.purge('jobs');
SELECT (SELECT count(*) FROM outbox.job_status) AS job_status, (SELECT count(*) FROM outbox.dead_jobs) AS dead_jobs, (SELECT count(*) FROM outbox.stat_subscription) AS stat_subscription;
SELECT type, state, count(*) FROM outbox.event_status WHERE type IN ('job.c', 'job.d', 'job.e') GROUP BY 1, 2 ORDER BY 1, 2;
-- and who takes the name has none of them
SELECT outbox.subscribe('jobs', '{job.*}', filter => '$.n == 1 || $.n == 9', max_attempts => 3) AS another;
SELECT * FROM outbox.claim('jobs');
SELECT outbox.complete(:job, :claim);
SELECT outbox.retry(:dead), outbox.cancel(:job), outbox.retry_dead('jobs'), outbox.purge('jobs'), outbox.purge('jobs', 'done');

-- A filter that the relay left is evaluated when the job is claimed.
CALL make('job.f', 10, 1048576);
SELECT count(*), count(*) FILTER (WHERE filter_pending) AS pending FROM outbox.jobs JOIN outbox.job_status ON job = id;
SELECT subject, length(payload ->> 'pad') FROM outbox.claim('jobs', 5);
SELECT state, count(*), max(last_error) FROM now_is GROUP BY 1 ORDER BY 1;
SELECT subject, length(payload ->> 'pad'), outbox.fail(job, claim, 'e', '0') <= clock_timestamp() AS due FROM outbox.claim('jobs', 5);
SELECT state, count(*), max(last_error) FROM now_is GROUP BY 1 ORDER BY 1;
SELECT subject, state FROM outbox.event_status WHERE type = 'job.f' ORDER BY seq;
SELECT subject, attempt, outbox.complete(job, claim) FROM outbox.claim('jobs', 5);
-- as it is then: another, or none at all
CALL make('job.g', 4, 1048576);
SELECT outbox.subscribe('jobs', '{job.*}', filter => '$.n == 2') > 0 AS subscribed;
SELECT subject FROM outbox.claim('jobs', 2);
SELECT outbox.subscribe('jobs', '{job.*}', filter => 'strict $.missing == 1') > 0 AS subscribed;
SELECT subject FROM outbox.claim('jobs', 1);
CALL make('job.h', 2, 1048576);
SELECT outbox.subscribe('jobs', '{job.*}') > 0 AS subscribed;
SELECT type, subject FROM outbox.claim('jobs', 5) ORDER BY seq;
SELECT count(outbox.cancel(job)) FROM outbox.job_status WHERE state = 'running';

-- Arguments that are none
SELECT n, call, said('SELECT ' || call) FROM unnest(ARRAY[
	$$outbox.claim(NULL)$$, $$outbox.claim('jobs', NULL)$$, $$outbox.claim('jobs', 0)$$, $$outbox.claim('jobs', -1)$$, $$outbox.claim('jobs', 10001)$$,
	$$outbox.claim('jobs', 10000)$$, $$outbox.claim('jobs', 1, '0')$$, $$outbox.claim('jobs', 1, '-1s')$$, $$outbox.claim('jobs', 1, '366 days')$$, $$outbox.claim('jobs', 1, '367 days')$$,
	$$outbox.claim('jobs', 1, '100000000 years')$$, $$outbox.claim('none')$$, $$outbox.claim('')$$, $$outbox.claim('Jobs')$$,
	$$outbox.complete(NULL, 1)$$, $$outbox.complete(1, NULL)$$, $$outbox.complete(0, 0)$$, $$outbox.complete(-1, -1)$$, $$outbox.complete(9223372036854775807, 9223372036854775807)$$,
	$$outbox.complete_many(NULL)$$, $$outbox.complete_many(0)$$, $$outbox.complete_many(-1, '{}')$$, $$outbox.complete_many(-1, '{NULL}')$$, $$outbox.complete_many(-1, '{2,1,2}')$$,
	$$outbox.fail(NULL, 1, 'e')$$, $$outbox.fail(1, NULL, 'e')$$, $$outbox.fail(1, 1, 'e', final => NULL)$$, $$outbox.fail(1, 1, 'e', '-1s')$$, $$outbox.fail(1, 1, 'e', '367 days')$$,
	$$outbox.fail(1, -1, NULL)$$, $$outbox.extend(NULL, 1)$$, $$outbox.extend(1, NULL)$$, $$outbox.extend(1, 1, '0')$$, $$outbox.extend(1, 1, '-1 month')$$, $$outbox.extend(-1, -1)$$,
	$$outbox.extend_many(NULL)$$, $$outbox.extend_many(-1, '-1s')$$, $$outbox.extend_many(-1, '0')$$, $$outbox.extend_many(-1)$$,
	$$outbox.release(NULL, 1)$$, $$outbox.release(1, NULL)$$, $$outbox.release(1, 1, NULL)$$, $$outbox.release(1, 1, '-1s')$$, $$outbox.release(-1, -1)$$,
	$$outbox.retry(NULL)$$, $$outbox.retry_dead(NULL)$$, $$outbox.retry_dead('none')$$, $$outbox.retry_dead('jobs', spread => NULL)$$, $$outbox.retry_dead('jobs', spread => '-1s')$$,
	$$outbox.retry_dead('jobs', 'infinity', '-infinity')$$, $$outbox.cancel(NULL)$$, $$outbox.cancel(-1)$$,
	$$outbox.purge(NULL)$$, $$outbox.purge('jobs', NULL)$$, $$outbox.purge('none')$$, $$outbox.purge('jobs', '')$$, $$outbox.purge('jobs', 'waiting')$$, $$outbox.purge('jobs', 'Dead')$$,
	$$outbox.done_total(-1)$$, $$outbox.done_total(NULL)$$]) WITH ORDINALITY t (call, n) ORDER BY n;

-- Numbers beyond 2^31 and 2^53, up to the last
CREATE PROCEDURE at_number(n numeric, INOUT seq bigint DEFAULT NULL, INOUT job bigint DEFAULT NULL, INOUT claim bigint DEFAULT NULL,
	INOUT fanout text DEFAULT NULL, INOUT state text DEFAULT NULL) LANGUAGE plpgsql AS $$
DECLARE
	completed boolean;
	outcome text;
BEGIN
	PERFORM setval('outbox.events_seq_seq', n::bigint, false), setval('outbox.jobs_id_seq', n::bigint, false), setval('outbox.claims', n::bigint, false);
	seq := outbox.record('job.u');
	COMMIT;
	CALL outbox.await_fanout(seq, '60s', outcome);
	SELECT c.job, c.claim, outbox.complete(c.job, c.claim), e.fanout INTO job, claim, completed, fanout
	FROM outbox.claim('jobs') c JOIN outbox.events e ON e.seq = c.seq;
	SELECT e.state INTO state FROM outbox.event_status e WHERE e.seq = at_number.seq;
	IF NOT completed OR outbox.complete_many(claim, ARRAY[job, job - 1]) <> ARRAY[job - 1] OR outbox.retry(job) OR outbox.cancel(job) OR outbox.complete(job, claim) THEN
		RAISE EXCEPTION 'no';
	END IF;
END $$;
CALL at_number(2147483647);
CALL at_number(2147483648);
CALL at_number(4294967296);
CALL at_number(9007199254740993);
CALL at_number(9223372036854775807);
\set VERBOSITY sqlstate
SELECT outbox.record('job.u');
-- no number is left for a job: its event waits
SELECT setval('outbox.events_seq_seq', 1000000);
SELECT outbox.record('job.v') AS seq \gset
CALL outbox.await_fanout(:seq, '10ms');
SELECT setval('outbox.jobs_id_seq', 1000000);
CALL outbox.await_fanout(:seq, '60s');
-- nor one for a claim
SELECT outbox.claim('jobs');
\set VERBOSITY default
SELECT setval('outbox.claims', 1000000);
SELECT type, attempt FROM outbox.claim('jobs');

\c :dbname :user
DROP DATABASE outbox_job_ends;
