-- CALL outbox.await_jobs() and CALL outbox.await_idle()
SET client_min_messages = error;
SELECT outbox.subscribe('await_jobs', '{await_jobs}', lease => '1 hour') > 0 AS subscribed;
CALL outbox.await_jobs('await_jobs', '0');
CALL outbox.await_jobs('await_jobs', '10ms');
SELECT outbox.record('await_jobs') AS seq \gset
CALL outbox.await_jobs('await_jobs', '60s');
CALL outbox.await_jobs('await_jobs');
CALL outbox.await_jobs(timeout => '0', subscription => 'await_jobs');
CALL outbox.await_jobs('await_jobs', interval '1 minute', NULL);
-- not while it is leased, or waits for a retry that is far off
SELECT job, claim FROM outbox.claim('await_jobs') \gset
CALL outbox.await_jobs('await_jobs', '10ms');
SELECT outbox.fail(:job, :claim, 'e', '1 hour') > now() AS waits;
CALL outbox.await_jobs('await_jobs', '10ms');
SELECT outbox.cancel(:job);
-- nor while it is paused
SELECT outbox.record('await_jobs') AS seq \gset
CALL outbox.await_jobs('await_jobs', '60s');
SELECT outbox.pause('await_jobs');
CALL outbox.await_jobs('await_jobs', '10ms');
SELECT outbox.resume('await_jobs');
CALL outbox.await_jobs('await_jobs', '60s');
SELECT job, claim FROM outbox.claim('await_jobs') \gset
-- until it is released, its lease ends, or a retry is due
SELECT outbox.release(:job, :claim);
CALL outbox.await_jobs('await_jobs', '60s');
SELECT job, claim FROM outbox.claim('await_jobs', lease => '200ms') \gset
CALL outbox.await_jobs('await_jobs', '60s');
SELECT claim FROM outbox.claim('await_jobs') \gset
SELECT outbox.fail(:job, :claim, 'e', '200ms') > now() AS waits;
CALL outbox.await_jobs('await_jobs', '60s');
SELECT claim FROM outbox.claim('await_jobs') \gset
SELECT outbox.fail(:job, :claim, 'e', final => true);
CALL outbox.await_jobs('await_jobs', '10ms');
SELECT outbox.retry(:job);
CALL outbox.await_jobs('await_jobs', '60s');

-- Idle: every event is fanned out, and every job has come to an end.
CALL outbox.await_idle('await_jobs', '10ms');
SELECT job, claim FROM outbox.claim('await_jobs') \gset
CALL outbox.await_idle('await_jobs', '0');
SELECT outbox.complete(:job, :claim);
CALL outbox.await_idle('await_jobs', '60s');
CALL outbox.await_idle('await_jobs');
CALL outbox.await_idle(timeout => '60s', subscription => 'await_jobs');
CALL outbox.await_idle('await_jobs', interval '1 minute', NULL);
SELECT outbox.record('await_jobs') AS seq \gset
CALL outbox.await_jobs('await_jobs', '60s');
SELECT outbox.fail(job, claim, 'e', '1 hour') > now() AS waits FROM outbox.claim('await_jobs');
CALL outbox.await_idle('await_jobs', '10ms');
SELECT count(outbox.cancel(job)) FROM outbox.job_status WHERE subscription = 'await_jobs' AND state = 'retrying';
CALL outbox.await_idle('await_jobs', '60s');
-- of all subscriptions, but those that are paused; dead jobs are at an end
SELECT count(outbox.unsubscribe(name)) > 0 AS unsubscribed FROM outbox.stat_subscription;
SELECT outbox.subscribe('await_jobs', '{await_jobs}') > 0 AS subscribed, outbox.subscribe('await_jobs2', '{await_jobs}') > 0 AS subscribed;
CALL outbox.await_idle(NULL, '60s');
SELECT outbox.record('await_jobs') AS seq \gset
CALL outbox.await_jobs('await_jobs', '60s');
SELECT outbox.complete(job, claim) FROM outbox.claim('await_jobs');
CALL outbox.await_idle(timeout => '10ms');
CALL outbox.await_idle('await_jobs', '60s');
CALL outbox.await_idle('await_jobs2', '10ms');
SELECT outbox.pause('await_jobs2');
CALL outbox.await_idle(timeout => '60s');
CALL outbox.await_idle('await_jobs2', '10ms');
SELECT outbox.resume('await_jobs2');
CALL outbox.await_idle(timeout => '10ms');
SELECT outbox.fail(job, claim, 'e', final => true) FROM outbox.claim('await_jobs2');
CALL outbox.await_idle();
-- not while an event waits
SELECT outbox.stop();
SELECT outbox.record('nobody') AS seq \gset
CALL outbox.await_idle(timeout => '10ms');
CALL outbox.await_idle('await_jobs', '10ms');
SELECT outbox.start();
CALL outbox.await_idle();

-- Bad arguments
CALL outbox.await_jobs(NULL);
CALL outbox.await_jobs('await_jobs', NULL);
CALL outbox.await_jobs('await_jobs', '-1 hour');
CALL outbox.await_jobs('none');
CALL outbox.await_idle('none');
CALL outbox.await_idle('await_jobs', NULL);
CALL outbox.await_idle('await_jobs', '-1 hour');

-- Where nothing can wait
\set VERBOSITY sqlstate
BEGIN;
CALL outbox.await_jobs('await_jobs');
ROLLBACK;
BEGIN;
CALL outbox.await_idle();
ROLLBACK;
\set VERBOSITY default
BEGIN;
SAVEPOINT s;
CALL outbox.await_jobs('await_jobs');
ROLLBACK;
CREATE FUNCTION await_in() RETURNS text LANGUAGE plpgsql AS $$ DECLARE o boolean; BEGIN CALL outbox.await_idle('await_jobs', '1s', o); RETURN o; END $$;
SELECT await_in();
DROP FUNCTION await_in;

-- A procedure that is called by itself does a whole life of a job.
CREATE PROCEDURE await_this(INOUT outcome text DEFAULT NULL) LANGUAGE plpgsql AS $$
DECLARE
	c record;
	o boolean;
BEGIN
	FOR i IN 1 .. 20 LOOP
		PERFORM outbox.record('await_jobs');
		COMMIT;
		CALL outbox.await_jobs('await_jobs', '60s', o);
		SELECT * INTO STRICT c FROM outbox.claim('await_jobs');
		COMMIT;
		PERFORM outbox.complete(c.job, c.claim);
		COMMIT;
	END LOOP;
	CALL outbox.await_idle('await_jobs', '60s', o);
	outcome := 'idle: ' || o;
END $$;
CALL await_this();
DROP PROCEDURE await_this;

-- statement_timeout counts
SELECT outbox.pause('await_jobs');
SELECT outbox.record('await_jobs') AS seq \gset
CALL outbox.await_fanout(:seq, '60s');
SET statement_timeout = '50ms';
CALL outbox.await_jobs('await_jobs', '1min');
CALL outbox.await_idle('await_jobs', '1min');
RESET statement_timeout;
SELECT outbox.unsubscribe('await_jobs'), outbox.unsubscribe('await_jobs2');
