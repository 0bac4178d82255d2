-- Claims of many jobs, whose leases are kept in shared memory.  In a database of
-- its own, so that the numbers of jobs and claims are known.
\set dbname :DBNAME
CREATE DATABASE outbox_leases TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C';
\c outbox_leases
CREATE EXTENSION outbox;
SET application_name = 'psql';

-- Record events in one transaction, subjects 1 to n, and wait for their jobs.
CREATE PROCEDURE make(type text, n int DEFAULT 10) LANGUAGE plpgsql AS $$
DECLARE
	s bigint;
	outcome text;
BEGIN
	SELECT max(outbox.record(type, i::text)) INTO s FROM generate_series(1, n) i;
	COMMIT;
	CALL outbox.await_fanout(s, '60s', outcome);
END $$;
-- Complete all that is due.
CREATE PROCEDURE finish(subscription text) LANGUAGE plpgsql AS $$
DECLARE
	c bigint;
BEGIN
	LOOP
		SELECT max(claim) INTO c FROM outbox.claim(subscription, 100);
		EXIT WHEN c IS NULL;
		PERFORM outbox.complete_many(c);
		COMMIT;
	END LOOP;
END $$;
CREATE VIEW now_is AS
	SELECT state, attempts, holder, last_error, leased_until > clock_timestamp() AS leased, due_at > clock_timestamp() AS later, count(*),
		min(job) AS first, max(job) AS last
	FROM outbox.job_status GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY min(job);
CREATE VIEW counts AS SELECT name, waiting, running, retrying, dead, done_total FROM outbox.stat_subscription;

-- A claim of many jobs writes nothing; one of few does.  No two have the same
-- number.
SELECT outbox.subscribe('many', '{many}', max_attempts => 3, retry_min => '1min', lease => '1 hour') AS many;
CALL make('many', 40);
SELECT count(*), min(job) AS first, max(job) AS last, min(claim) AS claim, count(DISTINCT claim) AS claims, min(attempt) AS attempt, min(max_attempts) AS max_attempts,
	bool_and(leased_until BETWEEN clock_timestamp() + interval '59 min' AND clock_timestamp() + interval '61 min') AS an_hour,
	min(type) AS type, count(DISTINCT subject) AS subjects
FROM outbox.claim('many', 10, worker => 'w');
SELECT count(*), min(job) AS first, min(claim) AS claim FROM outbox.claim('many', 7);
SELECT count(*), min(job) AS first, min(claim) AS claim FROM outbox.claim('many', 8);
SELECT claim, count(*) FROM outbox.jobs GROUP BY 1 ORDER BY 1;
-- which nobody can see by what there is to see
SELECT * FROM now_is;
SELECT * FROM counts;
SELECT state, attempts, due_at > clock_timestamp() AS later, count(*) FROM outbox.event_status GROUP BY 1, 2, 3 ORDER BY 1, 2, 3;
-- nobody else gets them
SELECT count(*), min(job) AS first, min(claim) AS claim FROM outbox.claim('many', 100);
SELECT count(*) FROM outbox.claim('many', 100);
SELECT count(*) FROM outbox.claim('many');
SELECT * FROM counts;

-- Every function that a holder calls
\set c 1000000000000001
SELECT outbox.complete(1, :c), outbox.complete(1, :c);
SELECT outbox.complete(2, :c + 1);
SELECT outbox.complete(11, :c);
SELECT outbox.fail(2, :c, 'e') > clock_timestamp() + interval '59 s' AS waits;
SELECT outbox.complete(2, :c);
SELECT outbox.fail(2, :c, 'again');
SELECT outbox.fail(3, :c, 'no use', final => true);
SELECT outbox.release(4, :c, '1 day');
SELECT outbox.release(4, :c);
SELECT outbox.extend(5, :c, '1 day') > clock_timestamp() + interval '23 hours' AS longer;
SELECT outbox.extend(2, :c);
SELECT outbox.cancel(6), outbox.cancel(6);
SELECT outbox.complete(6, :c);
SELECT outbox.retry(7), outbox.retry(8);
SELECT outbox.extend_many(:c, '2 days'), outbox.extend_many(:c + 100), outbox.extend_many(-1);
SELECT job, state, attempts, holder, last_error, leased_until > clock_timestamp() + interval '47 hours' AS longer, due_at > clock_timestamp() AS later
FROM outbox.job_status WHERE job <= 10 ORDER BY job;
SELECT * FROM counts;
-- in a list: what it holds, what it does not, one of another claim, none at all
SELECT outbox.complete_many(:c, ARRAY[9, 9, 1, 2, 3, 4, 6, 11, -1, NULL]);
SELECT outbox.complete_many(:c, '{}'), outbox.complete_many(:c, '{{9}}');
SELECT outbox.complete_many(:c), outbox.complete_many(:c);
SELECT outbox.complete_many(:c, '{5,7,8,9,10}'), outbox.extend_many(:c);
SELECT job, state, attempts, holder, done_at IS NOT NULL AS done FROM outbox.job_status WHERE job <= 10 ORDER BY job;
SELECT claim, count(*) FROM outbox.jobs WHERE done_at IS NOT NULL GROUP BY 1 ORDER BY 1;
SELECT outbox.purge('many', 'done'), outbox.purge('many', 'dead'), outbox.purge('many', 'cancelled');
-- what was put back can be claimed again, and be completed by who has it only
UPDATE outbox.jobs SET due_at = clock_timestamp() WHERE id IN (2, 4);
SELECT job, claim, attempt FROM outbox.claim('many', 10) ORDER BY job;
SELECT outbox.complete_many(:c, '{2,4}'), outbox.complete_many(1, '{2,4}'), outbox.complete_many(2, '{2,4}');
SELECT outbox.complete_many(c) FROM unnest(ARRAY[1, :c + 1, :c + 2]) c;
SELECT * FROM now_is;
SELECT outbox.purge('many', 'done');

-- Several in one transaction
CALL make('many', 12);
SELECT min(job) AS first, min(claim) AS c FROM outbox.claim('many', 12) \gset
BEGIN;
SELECT outbox.fail(:first, :c, 'e') > clock_timestamp() AS waits, outbox.release(:first + 1, :c, '1h'), outbox.extend(:first + 2, :c) > clock_timestamp() AS extended,
	outbox.cancel(:first + 3), outbox.complete(:first + 4, :c);
-- what it has ended it does not hold any more
SELECT outbox.complete_many(:c, ARRAY[:first, :first + 1, :first + 3]) = ARRAY[:first, :first + 1, :first + 3]::bigint[] AS refused;
SAVEPOINT s;
SELECT outbox.complete(:first, :c);
ROLLBACK TO s;
SELECT outbox.fail(:first + 1, :c, 'e');
ROLLBACK TO s;
SELECT outbox.extend(:first + 3, :c);
ROLLBACK TO s;
-- and what it has prolonged it does
SELECT outbox.complete(:first + 2, :c), outbox.complete(:first + 4, :c), outbox.extend_many(:c);
SELECT state, attempts, last_error, leased, count FROM now_is;
SELECT outbox.complete_many(:c);
SELECT state, attempts, last_error, leased, count FROM now_is;
COMMIT;
SELECT state, attempts, last_error, leased, count FROM now_is;
SELECT count(outbox.cancel(job)) FROM outbox.job_status WHERE state IN ('retrying', 'waiting');
SELECT outbox.purge('many', 'done'), outbox.purge('many', 'cancelled');
-- what it has put back it can claim again
CALL make('many', 12);
SELECT min(job) AS first, min(claim) AS c FROM outbox.claim('many', 12) \gset
BEGIN;
SELECT outbox.release(:first, :c), outbox.fail(:first + 1, :c, 'e', '0') <= clock_timestamp() AS due;
SELECT job - :first AS job, claim < :c AS of_few, attempt FROM outbox.claim('many', 100) ORDER BY job;
SELECT outbox.complete_many(max(claim)) FROM outbox.jobs WHERE done_at IS NULL AND claim < :c;
SELECT outbox.complete_many(:c);
COMMIT;
SELECT state, attempts, count FROM now_is;
SELECT outbox.purge('many', 'done');

-- Claimed and completed in one transaction, which commits or does not
CALL make('many', 20);
BEGIN;
SELECT max(claim) AS c FROM outbox.claim('many', 10) \gset
SELECT state, attempts, leased, count FROM now_is;
SELECT outbox.complete_many(:c);
SELECT state, attempts, leased, count FROM now_is;
ROLLBACK;
SELECT outbox.complete_many(:c), outbox.extend_many(:c);
SELECT state, attempts, leased, count FROM now_is;
BEGIN;
SELECT max(claim) AS c FROM outbox.claim('many', 10) \gset
SELECT outbox.complete_many(:c);
COMMIT;
SELECT state, attempts, leased, count FROM now_is;
-- savepoints: what is rolled back can be claimed at once, by the same too
BEGIN;
SAVEPOINT s;
SELECT count(*), max(claim) AS c FROM outbox.claim('many', 100) \gset
ROLLBACK TO s;
SELECT outbox.complete_many(:c, ARRAY[:first]) = ARRAY[:first]::bigint[] AS refused;
SELECT count(*), max(claim) AS c FROM outbox.claim('many', 100) \gset
SAVEPOINT s;
SELECT outbox.complete_many(:c);
ROLLBACK TO s;
SELECT state, attempts, leased, count FROM now_is;
SELECT min(job) AS first FROM outbox.job_status WHERE state = 'running' \gset
SELECT outbox.fail(:first, :c, 'e') > clock_timestamp() AS waits;
ROLLBACK TO s;
SELECT outbox.fail(:first + 1, :c, 'e') > clock_timestamp() AS waits;
RELEASE s;
COMMIT;
SELECT outbox.complete_many(:c, ARRAY[:first, :first + 1]) = ARRAY[:first + 1]::bigint[] AS refused;
SELECT outbox.complete_many(:c);
SELECT state, attempts, last_error, leased, count FROM now_is;
-- more subtransactions than there are leases
CALL make('many', 10);
DO $$
DECLARE
	n int;
	got int;
BEGIN
	FOR i IN 1 .. 5000 LOOP
		n := 5 + i % 2 * 5;
		BEGIN
			SELECT count(*) INTO got FROM outbox.claim('many', n);
			RAISE SQLSTATE 'U0001';
		EXCEPTION WHEN SQLSTATE 'U0001' THEN
			IF got <> n THEN
				RAISE 'claim % got %', i, got;
			END IF;
		END;
	END LOOP;
END $$;
-- or claims in one transaction, or subtransactions that claim
CALL make('many', 4500);
DO $$
BEGIN
	FOR i IN 1 .. 4500 LOOP
		IF NOT EXISTS (SELECT FROM outbox.claim('many')) THEN
			RAISE 'claim % got nothing', i;
		END IF;
	END LOOP;
	ROLLBACK;
	FOR i IN 1 .. 4500 LOOP
		BEGIN
			IF NOT EXISTS (SELECT FROM outbox.claim('many')) THEN
				RAISE 'claim % got nothing', i;
			END IF;
		EXCEPTION WHEN SQLSTATE 'U0001' THEN
		END;
	END LOOP;
	ROLLBACK;
END $$;
-- nor do claims in vain take the places of leases
SELECT outbox.subscribe('nothing', '{nothing}') > 0 AS subscribed;
DO $$
BEGIN
	FOR i IN 1 .. 4500 LOOP
		PERFORM FROM outbox.claim('nothing', 100);
	END LOOP;
	IF (SELECT max(claim) FROM outbox.claim('many', 100)) < 1000000000000000 THEN
		RAISE 'there is no place in memory';
	END IF;
	ROLLBACK;
END $$;
SELECT outbox.unsubscribe('nothing');
SELECT state, attempts, count FROM now_is;
CALL finish('many');
SELECT count(outbox.cancel(job)) FROM outbox.job_status WHERE state = 'retrying';
SELECT outbox.purge('many', 'done') > 0 AS purged, outbox.purge('many', 'cancelled');

-- A lease runs out: the attempt has failed, and when it was the last one the job
-- is dead.
CALL make('many', 10);
SELECT count(*), max(claim) AS c FROM outbox.claim('many', 10, '1us', 'first') \gset
SELECT state, attempts, holder, last_error, leased, later, count FROM now_is;
SELECT name, waiting, running, retrying, dead FROM counts;
-- while nobody has claimed the jobs again, the holder has them
SELECT min(job) AS first FROM outbox.job_status WHERE state = 'retrying' \gset
SELECT outbox.complete(:first, :c), outbox.extend_many(:c, '1us');
-- nobody need look for that: the next claim gets them
SELECT count(*), min(attempt) AS attempt, max(claim) AS d, max(claim) < 1000000000000000 AS of_few FROM outbox.claim('many', 100, '1us', 'second') \gset
SELECT :count AS count, :attempt AS attempt, :'of_few' AS in_rows;
SELECT outbox.complete(:first + 1, :c);
SELECT outbox.complete_many(:c), outbox.extend_many(:c), outbox.complete_many(:c, ARRAY[:first, :first + 1]) = ARRAY[:first + 1]::bigint[] AS refused;
SELECT state, attempts, holder, last_error, leased, later, count FROM now_is;
SELECT count(*), min(attempt) AS attempt FROM outbox.claim('many', 100, '1us', 'third');
SET client_min_messages = error;
SELECT count(*) FROM outbox.claim('many', 100, '1us', 'fourth');
RESET client_min_messages;
SELECT state, attempts, holder, last_error, count FROM now_is;
SELECT name, waiting, running, retrying, dead FROM counts;
SELECT outbox.retry_dead('many');
SELECT count(*), min(attempt) AS attempt, max(claim) >= 1000000000000000 AS in_memory FROM outbox.claim('many', 9, '1us');
-- some of a lease that has run out are done, when it is found
SELECT max(claim) AS c FROM outbox.claim('many', 9, '1us') \gset
SELECT outbox.complete(:first + 1, :c);
CALL finish('many');
SELECT outbox.purge('many', 'done') > 0 AS purged;
-- when the last one ended with the lease, none is there
CALL make('many', 10);
SELECT max(claim) AS c FROM outbox.claim('many', 10, '1us') \gset
SELECT outbox.complete_many(:c);
SELECT count(*) FROM outbox.claim('many', 100);
SELECT outbox.purge('many', 'done');
-- the look of await_jobs finds them as well
CALL make('many', 10);
SELECT count(*) FROM outbox.claim('many', 10, '1us');
CALL outbox.await_jobs('many', '60s');
SELECT count(*), min(attempt) AS attempt FROM outbox.claim('many', 10, '1us');
CALL finish('many');
SELECT outbox.purge('many', 'done');

-- Old and new leases in one claim; filters; events that are gone
CALL make('many', 20);
SELECT count(*) FROM outbox.claim('many', 3, '1us');
SELECT count(*), count(DISTINCT claim) AS claims, max(claim) >= 1000000000000000 AS in_memory, sum(attempt) AS attempts, max(claim) AS c FROM outbox.claim('many', 15) \gset
SELECT :count AS count, :claims AS claims, :attempts AS attempts;
SELECT count(*), sum(attempt) AS attempts FROM outbox.claim('many', 15);
SELECT outbox.extend_many(:c), outbox.complete_many(:c), outbox.extend_many(:c);
SELECT state, attempts, count FROM now_is;
SELECT outbox.complete_many(max(claim)) FROM outbox.jobs WHERE done_at IS NULL;
SELECT outbox.purge('many', 'done');
CALL make('many', 12);
SELECT min(seq) AS seq FROM outbox.job_status WHERE state = 'waiting' \gset
DELETE FROM outbox.events WHERE seq IN (:seq + 1, :seq + 3);
SET client_min_messages = error;
SELECT count(*), max(claim) AS c FROM outbox.claim('many', 12) \gset
RESET client_min_messages;
SELECT :count AS count;
SELECT state, attempts, last_error LIKE 'event % does not exist' AS gone, sum(count) FROM now_is GROUP BY 1, 2, 3 ORDER BY 1;
SELECT outbox.complete_many(:c), outbox.purge('many', 'dead'), outbox.purge('many', 'done');

-- What is done is deleted at once.
ALTER SYSTEM SET outbox.job_retention = 0;
SELECT pg_reload_conf();
\c
SET application_name = 'psql';
CALL make('many', 20);
SELECT max(claim) AS c, min(job) AS first FROM outbox.claim('many', 10) \gset
SELECT outbox.complete(:first, :c);
SELECT outbox.complete(:first, :c);
SELECT outbox.complete_many(:c, ARRAY[:first, :first + 1, :first + 2]) = ARRAY[:first]::bigint[] AS refused;
SELECT outbox.extend(:first + 3, :c) > clock_timestamp() AS extended, outbox.fail(:first + 4, :c, 'e') > clock_timestamp() AS waits;
SELECT outbox.complete_many(:c), outbox.complete_many(:c);
SELECT state, attempts, count FROM now_is;
SELECT state, count(*) FROM outbox.event_status WHERE job >= :first GROUP BY 1 ORDER BY 1;
BEGIN;
SELECT outbox.complete_many(max(claim)) FROM outbox.claim('many', 10);
ROLLBACK;
SELECT state, attempts, count FROM now_is;
CALL finish('many');
SELECT state, attempts, count FROM now_is;
SELECT count(outbox.cancel(job)) FROM outbox.job_status;
ALTER SYSTEM RESET outbox.job_retention;
SELECT pg_reload_conf();
\c
SET application_name = 'psql';

-- Paused, renamed, given away, changed, gone while its jobs are leased
CALL make('many', 30);
SELECT max(claim) AS c, min(job) AS first FROM outbox.claim('many', 10, '1us') \gset
SELECT outbox.pause('many');
SELECT count(*) FROM outbox.claim('many', 100);
SELECT outbox.complete(:first, :c), outbox.fail(:first + 1, :c, 'e', '1h') > clock_timestamp() AS waits, outbox.extend_many(:c);
SELECT outbox.resume('many'), outbox.rename('many', 'renamed');
SELECT state, attempts, leased, count FROM now_is;
SELECT outbox.complete(:first + 2, :c), outbox.complete_many(:c);
SELECT max(claim) AS c, min(job) AS first FROM outbox.claim('renamed', 10) \gset
CREATE ROLE outbox_leases_owner;
CREATE ROLE outbox_leases_other;
SELECT outbox.grant('outbox_leases_owner', 'consume'), outbox.grant('outbox_leases_other', 'consume');
SELECT outbox.set_owner('renamed', 'outbox_leases_owner');
SET ROLE outbox_leases_other;
SELECT outbox.complete_many(:c);
SELECT outbox.complete(:first, :c);
SELECT outbox.fail(:first, :c, 'e');
SELECT outbox.extend_many(:c);
SELECT count(*) FROM outbox.job_status;
SET ROLE outbox_leases_owner;
SELECT count(*) FROM outbox.job_status WHERE state = 'running';
SELECT outbox.complete(:first, :c), outbox.extend_many(:c);
SELECT max(claim) AS d, count(*) FROM outbox.claim('renamed', 10) \gset
SELECT outbox.complete_many(:d);
RESET ROLE;
-- made ordered: what is held goes on, and holds back what comes
SELECT outbox.subscribe('renamed', '{many}', ordered => true) > 0 AS subscribed;
SELECT outbox.complete(:first + 1, :c), outbox.fail(:first + 2, :c, 'e') > clock_timestamp() AS waits;
SELECT outbox.complete_many(:c, ARRAY[:first + 3]), outbox.extend_many(:c);
SELECT outbox.complete_many(:c);
SELECT state, attempts, sum(count) FROM now_is GROUP BY 1, 2 ORDER BY 1;
-- gone
SELECT outbox.subscribe('renamed', '{many}') > 0 AS subscribed;
CALL make('many', 10);
SELECT max(claim) AS c, min(job) AS first FROM outbox.claim('renamed', 10) \gset
SELECT outbox.unsubscribe('renamed');
SELECT outbox.complete(:first, :c);
SELECT outbox.complete_many(:c, ARRAY[:first, :first + 1]) = ARRAY[:first, :first + 1]::bigint[] AS refused;
SELECT outbox.fail(:first, :c, 'e');
SELECT outbox.extend_many(:c), outbox.complete_many(:c);
SELECT count(*) FROM outbox.job_status;

-- Where a transaction has one snapshot for all of its statements, or changes
-- nothing
SELECT outbox.subscribe('again', '{again}') > 0 AS subscribed;
CALL make('again', 30);
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*), max(claim) < 1000000000000000 AS in_rows FROM outbox.claim('again', 10);
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT count(*), max(claim) < 1000000000000000 AS in_rows FROM outbox.claim('again', 10);
ROLLBACK;
BEGIN READ ONLY;
\set VERBOSITY terse
SELECT count(*) FROM outbox.claim('again', 10);
\set VERBOSITY default
ROLLBACK;
SELECT max(claim) AS c, min(job) AS first FROM outbox.claim('again', 20) \gset
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT outbox.complete(:first, :c), outbox.release(:first + 1, :c);
SELECT outbox.complete_many(:c);
COMMIT;
SELECT state, attempts, count FROM now_is;

-- Rows that are moved while their jobs are leased
SELECT outbox.cancel(:first + 1), outbox.purge('again', 'cancelled');
CALL make('again', 20);
SELECT max(claim) AS c, min(job) AS first FROM outbox.claim('again', 21) \gset
VACUUM FULL outbox.jobs;
SELECT outbox.complete(:first, :c), outbox.fail(:first + 1, :c, 'e') > clock_timestamp() AS waits, outbox.extend(:first + 2, :c) > clock_timestamp() AS extended;
CLUSTER outbox.jobs USING jobs_pkey;
SELECT outbox.complete_many(:c, ARRAY[:first + 3, :first + 4]), outbox.complete_many(:c);
SELECT state, attempts, sum(count) FROM now_is GROUP BY 1, 2 ORDER BY 1, 2;

-- Another extension of the same name has other jobs and other claims.
SELECT outbox.unsubscribe('again');
SELECT outbox.subscribe('many', '{many}') > 0 AS subscribed;
CALL make('many', 10);
SELECT max(claim) AS c, count(*) FROM outbox.claim('many', 10) \gset
BEGIN;
DROP EXTENSION outbox CASCADE;
ROLLBACK;
SELECT outbox.extend_many(:c);
SET client_min_messages = warning;
DROP EXTENSION outbox CASCADE;
CREATE EXTENSION outbox;
RESET client_min_messages;
SELECT outbox.subscribe('many', '{many}') > 0 AS subscribed;
CALL make('many', 10);
SELECT outbox.complete_many(:c, '{1,2}'), outbox.extend_many(:c);
SELECT count(*), min(job) AS first, min(claim) AS claim FROM outbox.claim('many', 10);
SELECT outbox.complete_many(1000000000000001, '{1,11}');

SET client_min_messages = warning;
DROP EXTENSION outbox CASCADE;
CREATE EXTENSION outbox;
RESET client_min_messages;
SELECT outbox.subscribe('many', '{many}') > 0 AS subscribed;
CALL make('many', 10);
SELECT outbox.extend_many(1000000000000001), outbox.complete_many(1000000000000001, '{1,2}');
SELECT count(*), min(job) AS first, min(claim) AS claim FROM outbox.claim('many', 10);

\c :dbname
DROP DATABASE outbox_leases;
DROP ROLE outbox_leases_owner, outbox_leases_other;
