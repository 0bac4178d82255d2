-- Recording an event: outbox.record(), INSERT and COPY.
SET client_min_messages = warning;
SELECT outbox.subscribe('record', '{rec.*}') > 0 AS subscribed;

-- Every argument, and what is there when it is left out
BEGIN;
SELECT outbox.record('rec.all', 'note/1', '{"a": 1}', 'acme', '{"trace": "t1"}', '2100-01-01 00:00:00+00') AS seq \gset
SELECT type, subject, scope, payload, headers, not_before AT TIME ZONE 'UTC' AS not_before, recorded_at <= clock_timestamp() AS recorded, fanned_out_at, fanout, tries, failures, retry_at, last_error, poisoned_at
	FROM outbox.events WHERE seq = :seq;
COMMIT;
SELECT outbox.record('rec.least') AS seq \gset
SELECT type, subject, scope, payload, headers, not_before FROM outbox.events WHERE seq = :seq;
SELECT outbox.record(payload => '[1, null]', type => 'rec.named', headers => NULL, scope => '', subject => '') AS seq \gset
SELECT type, subject, scope, payload, headers FROM outbox.events WHERE seq = :seq;
SELECT count(outbox.record('rec.json', payload => p::jsonb)) FROM unnest(ARRAY['null', 'true', '0', '"text"', '[]', '{}', '{"a": {"a": [{}]}}']) p;
-- untyped parameters, as drivers send them
PREPARE r AS SELECT outbox.record($1, $2, $3, $4, $5, $6) > 0 AS recorded;
EXECUTE r('rec.prepared', 's', '{}', NULL, '{}', NULL);
DEALLOCATE r;

-- The time is that of the call.
BEGIN;
SELECT outbox.record('rec.time') AS seq \gset
SELECT recorded_at > now() AS after_begin FROM outbox.events WHERE seq = :seq;
COMMIT;

-- What cannot be an event is refused by all three ways in, with the same error.
CREATE TABLE record_cases (id int GENERATED ALWAYS AS IDENTITY, what text, type text, subject text, scope text, payload jsonb DEFAULT '{}', headers jsonb);
INSERT INTO record_cases (what, type) VALUES
	('no type', NULL), ('empty', ''), ('space', ' '), ('inner space', 'a b'), ('tab', E'a\tb'), ('newline', E'a\nb'), ('control', E'a\x01'), ('delete', E'a\x7f'),
	('star', 'a.*'), ('question mark', 'a?'), ('brackets', 'a[b]'), ('backslash', E'a\\b'), ('exclamation mark', '!a'), ('of the extension', 'outbox.event.poisoned'),
	('of the extension', 'outbox.'), ('256 bytes', repeat('x', 256)), ('10 kB', repeat('x', 10240)),
	('255 bytes', repeat('x', 255)), ('one character', 'x'), ('percent', '%s%n'), ('inner !', 'a!'), ('dots', '..a..'), ('quotes', '''"$$;--'), ('outbox', 'outbox'), ('case', 'Outbox.x'), ('braces', '{op}');
INSERT INTO record_cases (what, type, subject, scope, payload, headers) VALUES
	('no payload', 'rec.x', NULL, NULL, NULL, NULL),
	('headers: array', 'rec.x', NULL, NULL, '{}', '[]'), ('headers: text', 'rec.x', NULL, NULL, '{}', '"x"'), ('headers: null', 'rec.x', NULL, NULL, '{}', 'null'),
	('headers: empty', 'rec.x', NULL, NULL, '{}', '{}'),
	('subject of 16 kB', 'rec.x', repeat('s', 16384), NULL, '{}', NULL), ('subject too long', 'rec.x', repeat('s', 16385), NULL, '{}', NULL),
	('scope of 16 kB', 'rec.x', NULL, repeat('s', 16384), '{}', NULL), ('scope too long', 'rec.x', NULL, repeat('s', 16385), '{}', NULL),
	('subject: odd', 'rec.x', E' \t\n%s''"', E'\x01', '{}', NULL);
CREATE FUNCTION record_try(way text, c record_cases) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	IF way = 'record' THEN
		PERFORM outbox.record(c.type, c.subject, c.payload, c.scope, c.headers);
	ELSE
		INSERT INTO outbox.events (type, subject, payload, scope, headers) VALUES (c.type, c.subject, c.payload, c.scope, c.headers);
	END IF;
	RETURN 'ok';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ' ' || left(SQLERRM, 60);
END $$;
SELECT what, record_try('record', c) AS record, CASE WHEN record_try('record', c) <> record_try('insert', c) THEN record_try('insert', c) END AS insert_differs
	FROM record_cases c ORDER BY id;
DROP FUNCTION record_try;
DROP TABLE record_cases;
COPY outbox.events (type) FROM stdin;
rec.copy
not a type
\.
COPY outbox.events (type) FROM stdin;
outbox.forged
\.
COPY outbox.events (type, subject, payload) FROM stdin;
rec.copy	1	{"n": 1}
rec.copy	2	{"n": 2}
\.
SELECT type, subject, payload FROM outbox.events WHERE type = 'rec.copy' ORDER BY seq;

-- Ways of INSERT
INSERT INTO outbox.events (type) VALUES ('rec.returning') RETURNING seq IS NOT NULL AS seq, payload, tries;
INSERT INTO outbox.events (type) SELECT 'rec.select' FROM generate_series(1, 3);
WITH w AS (INSERT INTO outbox.events (type) VALUES ('rec.cte') RETURNING seq) SELECT count(*) FROM w;
INSERT INTO outbox.events (type) VALUES ('rec.conflict') ON CONFLICT DO NOTHING;
INSERT INTO outbox.events (seq, type) VALUES (1, 'rec.own.number');
SELECT outbox.record('rec.update') AS seq \gset
UPDATE outbox.events SET type = 'rec.updated' WHERE seq = :seq;
SELECT type, count(*) FROM outbox.events WHERE type IN ('rec.select', 'rec.cte', 'rec.conflict', 'rec.own.number') GROUP BY 1 ORDER BY 1;

-- A statement that fails leaves nothing, and neither do savepoints.
INSERT INTO outbox.events (type, payload) SELECT 'rec.atomic', to_jsonb(1 / (i - 5000)) FROM generate_series(1, 10000) i;
SELECT outbox.record('rec.atomic') FROM generate_series(1, 100) i WHERE 1 / (i - 50) <> 7;
BEGIN;
SELECT outbox.record('rec.savepoint', 'a') > 0 AS recorded;
SAVEPOINT s;
SELECT outbox.record('rec.savepoint', 'b') > 0 AS recorded;
ROLLBACK TO s;
SELECT outbox.record('rec.savepoint', 'c') > 0 AS recorded;
DO $$ BEGIN PERFORM outbox.record('rec.savepoint', 'd'); RAISE division_by_zero; EXCEPTION WHEN division_by_zero THEN PERFORM outbox.record('rec.savepoint', 'e'); END $$;
COMMIT;
BEGIN;
SELECT outbox.record('rec.savepoint', 'f') > 0 AS recorded;
SELECT outbox.record('not a type');
SELECT outbox.record('rec.savepoint', 'g');
COMMIT;
SELECT type, string_agg(subject, ',' ORDER BY seq) FROM outbox.events WHERE type IN ('rec.atomic', 'rec.savepoint') GROUP BY 1;

-- Where it is called
BEGIN READ ONLY;
SELECT outbox.record('rec.read.only');
ROLLBACK;
SELECT provolatile, proparallel, proisstrict FROM pg_proc WHERE oid = 'outbox.record'::regproc;
CREATE FUNCTION record_within(i int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN PERFORM outbox.record('rec.immutable'); RETURN 1; END $$;
SELECT record_within(1);
CREATE FUNCTION record_trigger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM outbox.record('rec.trigger', TG_OP); RETURN NULL; END $$;
CREATE TABLE record_table (i int);
CREATE TRIGGER t AFTER INSERT OR UPDATE OR DELETE ON record_table FOR EACH ROW EXECUTE FUNCTION record_trigger();
CREATE CONSTRAINT TRIGGER d AFTER INSERT ON record_table DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION record_trigger();
INSERT INTO record_table VALUES (1);
UPDATE record_table SET i = 2;
DELETE FROM record_table;
CREATE FUNCTION record_event_trigger() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM outbox.record('rec.ddl', TG_TAG); END $$;
CREATE EVENT TRIGGER record_ddl ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION record_event_trigger();
CREATE TABLE record_other (i int);
DROP EVENT TRIGGER record_ddl;
PREPARE p AS SELECT outbox.record('rec.plan', $1) > 0 AS recorded;
EXECUTE p('1');
EXECUTE p('2');
DEALLOCATE p;
SELECT type, string_agg(subject, ',' ORDER BY seq) FROM outbox.events WHERE type IN ('rec.trigger', 'rec.ddl', 'rec.plan', 'rec.immutable') GROUP BY 1 ORDER BY 1;
DROP TABLE record_table, record_other;
DROP FUNCTION record_trigger, record_event_trigger, record_within;

-- Whatever the settings of the session
BEGIN;
SET LOCAL search_path = pg_temp;
CREATE TEMP TABLE events (type text);
SELECT outbox.record('rec.search.path') > 0 AS recorded;
ROLLBACK;
SET session_replication_role = replica;
SELECT outbox.record('rec.replica') AS seq \gset
RESET session_replication_role;
CALL outbox.await_fanout(:seq, '60s');
SET default_transaction_isolation = 'serializable';
SELECT outbox.record('rec.serializable') AS seq \gset
RESET default_transaction_isolation;
CALL outbox.await_fanout(:seq, '60s');

-- Whoever suppresses the row is told that there is no event.
CREATE FUNCTION record_none() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER none BEFORE INSERT ON outbox.events FOR EACH ROW EXECUTE FUNCTION record_none();
SELECT outbox.record('rec.suppressed');
DROP TRIGGER none ON outbox.events;
DROP FUNCTION record_none;

-- The trigger's function is for that trigger.
SELECT outbox.events_insert();
CREATE TABLE record_misuse (seq bigint, type text);
CREATE TRIGGER misuse BEFORE INSERT ON record_misuse FOR EACH ROW EXECUTE FUNCTION outbox.events_insert();
INSERT INTO record_misuse VALUES (1, 'x');
DROP TABLE record_misuse;

SELECT outbox.unsubscribe('record');
