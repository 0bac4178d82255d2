-- CALL outbox.await_fanout()
SET client_min_messages = warning;
SELECT outbox.subscribe('await', '{await.*}') > 0 AS subscribed;

SELECT outbox.record('await.one') AS seq \gset
CALL outbox.await_fanout(:seq);
CALL outbox.await_fanout(:seq, '60s');
CALL outbox.await_fanout(:seq, interval '1 minute', NULL);
CALL outbox.await_fanout(timeout => '0', seq => :seq);
SELECT fanned_out_at IS NOT NULL AS fanned FROM outbox.events WHERE seq = :seq;
CALL outbox.await_fanout(-1, '10ms');
CALL outbox.await_fanout(0, '0');
CALL outbox.await_fanout(9223372036854775807, '10ms');
BEGIN;
SELECT outbox.record('await.rolled.back') AS gone \gset
ROLLBACK;
CALL outbox.await_fanout(:gone, '10ms');

-- Bad arguments
CALL outbox.await_fanout(NULL);
CALL outbox.await_fanout(:seq, NULL);
CALL outbox.await_fanout(:seq, '-1 hour');

-- Where nothing can wait
\set VERBOSITY sqlstate
BEGIN;
CALL outbox.await_fanout(1);
ROLLBACK;
\set VERBOSITY default
BEGIN;
SAVEPOINT s;
CALL outbox.await_fanout(1);
ROLLBACK;
CREATE FUNCTION await_in() RETURNS text LANGUAGE plpgsql AS $$ DECLARE o text; BEGIN CALL outbox.await_fanout(1, '1s', o); RETURN o; END $$;
SELECT await_in();
DO $$ DECLARE o text; BEGIN CALL outbox.await_fanout(1, '1s', o); EXCEPTION WHEN OTHERS THEN RAISE WARNING '% %', SQLSTATE, SQLERRM; END $$;
BEGIN;
DO $$ DECLARE o text; BEGIN CALL outbox.await_fanout(1, '1s', o); END $$;
ROLLBACK;
DROP FUNCTION await_in;

-- A procedure that is called by itself records, commits and waits.
CREATE PROCEDURE await_this(INOUT outcome text DEFAULT NULL) LANGUAGE plpgsql AS $$
DECLARE
	s bigint := outbox.record('await.procedure');
BEGIN
	COMMIT;
	CALL outbox.await_fanout(s, '60s', outcome);
	outcome := outcome || ' ' || (SELECT fanned_out_at IS NOT NULL FROM outbox.events WHERE seq = s);
END $$;
CALL await_this();
DROP PROCEDURE await_this;

-- A loop, and plans that are kept
DO $$
DECLARE
	s bigint;
	o text;
	n int := 0;
BEGIN
	FOR i IN 1 .. 20 LOOP
		s := outbox.record('await.loop');
		COMMIT;
		CALL outbox.await_fanout(s, '60s', o);
		n := n + (o = 'fanned')::int;
	END LOOP;
	RAISE WARNING '% of 20', n;
END $$;

-- statement_timeout counts
SET statement_timeout = '50ms';
CALL outbox.await_fanout(0, '1min');
RESET statement_timeout;
SELECT outbox.unsubscribe('await');
