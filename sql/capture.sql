--
-- Saying what is captured: definitions, their refusal, repetition and end
--
CREATE SCHEMA capture_test;
CREATE TABLE capture_test.mark (seq bigint);
INSERT INTO capture_test.mark SELECT COALESCE(max(seq), 0) FROM outbox.events;
-- events recorded since the last call
CREATE FUNCTION capture_test.recorded() RETURNS TABLE (type text, subject text, scope text, payload jsonb)
LANGUAGE plpgsql AS $$
DECLARE
	last bigint := (SELECT seq FROM capture_test.mark);
BEGIN
	UPDATE capture_test.mark SET seq = (SELECT max(e.seq) FROM outbox.events e) WHERE EXISTS (SELECT FROM outbox.events);
	RETURN QUERY SELECT e.type, e.subject, e.scope, e.payload FROM outbox.events e WHERE e.seq > last ORDER BY e.seq;
END $$;
SET search_path = capture_test;

CREATE TABLE notes (id int PRIMARY KEY, title text, body text, tenant text);

-- what cannot be meant
SELECT outbox.capture(NULL, 'note.{op}');
SELECT outbox.capture(0, 'note.{op}');
SELECT outbox.capture('notes', NULL);
SELECT outbox.capture('notes', '');
SELECT outbox.capture('notes', 'a note');
SELECT outbox.capture('notes', E'note\nx');
SELECT outbox.capture('notes', 'note.*');
SELECT outbox.capture('notes', 'note.?');
SELECT outbox.capture('notes', 'note.[a]');
SELECT outbox.capture('notes', 'note\x');
SELECT outbox.capture('notes', '!note.{op}');
SELECT outbox.capture('notes', 'outbox.{op}');
SELECT outbox.capture('notes', repeat('x', 249) || '{op}');
SELECT outbox.capture('notes', 'note.{op');
SELECT outbox.capture('notes', 'note.op}');
SELECT outbox.capture('notes', 'note.{}');
SELECT outbox.capture('notes', 'note.{{op}}');
SELECT outbox.capture('notes', 'note.{kind}');
SELECT outbox.capture('notes', 'note.{Title}');
SELECT outbox.capture('notes', 'note.{op}', subject => 'note');
SELECT outbox.capture('notes', 'note.{op}', subject => '');
SELECT outbox.capture('notes', 'note.{op}', subject => 'note/{nr}');
SELECT outbox.capture('notes', 'note.{op}', subject => 'note/{op}');
SELECT outbox.capture('notes', 'note.{op}', subject => 'note/{id');
SELECT outbox.capture('notes', 'note.{op}', scope => 'owner');
SELECT outbox.capture('notes', 'note.{op}', scope => 't-{tenant}}');
SELECT outbox.capture('notes', 'note.{op}', watch => '{title,text}');
SELECT outbox.capture('notes', 'note.{op}', watch => '{ctid}');
SELECT outbox.capture('notes', 'note.{op}', watch => '{}');
SELECT outbox.capture('notes', 'note.{op}', watch => '{title,NULL}');
SELECT outbox.capture('notes', 'note.{op}', watch => '{{title},{body}}');
SELECT outbox.capture('notes', 'note.{op}', columns => '{titel}');
SELECT outbox.capture('notes', 'note.{op}', columns => '{}');
SELECT outbox.capture('notes', 'note.{op}', columns => '{NULL}');
SELECT outbox.capture('notes', 'note.{op}', operations => '{}');
SELECT outbox.capture('notes', 'note.{op}', operations => '{insert,truncate}');
SELECT outbox.capture('notes', 'note.{op}', operations => '{insert,NULL}');
SELECT outbox.capture('notes', 'note.{op}', operations => NULL);
SELECT outbox.uncapture(NULL);
SELECT outbox.uncapture(0);
SELECT count(*) FROM pg_trigger WHERE tgrelid = 'notes'::regclass;

-- what cannot carry the trigger
CREATE VIEW a_view AS SELECT * FROM notes;
CREATE MATERIALIZED VIEW a_matview AS SELECT * FROM notes;
CREATE SEQUENCE a_sequence;
CREATE TYPE a_type AS (id int);
CREATE TEMP TABLE a_temp (id int);
CREATE FOREIGN DATA WRAPPER capture_test_fdw;
CREATE SERVER capture_test_server FOREIGN DATA WRAPPER capture_test_fdw;
CREATE FOREIGN TABLE a_foreign (id int) SERVER capture_test_server;
CREATE TABLE leafy (id int) PARTITION BY RANGE (id);
CREATE TABLE leafy_1 PARTITION OF leafy FOR VALUES FROM (0) TO (10) PARTITION BY RANGE (id);
CREATE FOREIGN TABLE leafy_2 PARTITION OF leafy_1 FOR VALUES FROM (0) TO (5) SERVER capture_test_server;
SELECT outbox.capture('a_view', 'x');
SELECT outbox.capture('a_matview', 'x');
SELECT outbox.capture('a_sequence', 'x');
SELECT outbox.capture('a_type', 'x');
SELECT outbox.capture('notes_pkey', 'x');
SELECT outbox.capture('a_temp', 'x');
SELECT outbox.capture('a_foreign', 'x');
SELECT outbox.capture('leafy', 'x');
SELECT outbox.capture('pg_class', 'x');
SELECT outbox.capture('information_schema.sql_features', 'x');
SELECT outbox.capture('outbox.events', 'x');
SELECT outbox.capture('outbox.jobs', 'x');
SELECT outbox.uncapture('a_view');
DROP FOREIGN DATA WRAPPER capture_test_fdw CASCADE;
SELECT outbox.capture('leafy', 'x');
DROP TABLE leafy;

-- a table of which others inherit is captured alone, and so it is said
CREATE TABLE base (id int);
CREATE TABLE derived () INHERITS (base);
SELECT outbox.capture('base', 'base.{op}');
SELECT outbox.capture('derived', 'derived.{op}');
INSERT INTO base VALUES (1);
INSERT INTO derived VALUES (2);
SELECT type, payload->'new' AS new FROM recorded();
DROP TABLE base, derived;

-- unlogged tables, and tables of other extensions, which dumps treat differently
CREATE UNLOGGED TABLE scratch (id int);
SELECT outbox.capture('scratch', 'scratch.{op}');
DROP TABLE scratch;
CREATE TABLE member (id int);
ALTER EXTENSION plpgsql ADD TABLE member;
SELECT outbox.capture('member', 'member.{op}');
ALTER EXTENSION plpgsql DROP TABLE member;
DROP TABLE member;

-- the whole definition is stated, and may be repeated
SELECT outbox.capture('notes', 'note.{op}');
SELECT outbox.capture('notes', 'note.{op}');
SELECT * FROM outbox.captures WHERE relation = 'notes'::regclass;
SELECT oid AS first_oid FROM pg_trigger WHERE tgrelid = 'notes'::regclass \gset
SELECT outbox.capture('notes', 'note.{op}', 'note/{id}', '{title,body,title}', '{delete,insert,delete}', '{id,title}', 'tenant');
SELECT outbox.capture('notes', 'note.{op}', 'note/{id}', '{title,body}', '{insert,delete}', '{id,title}', 'tenant');
SELECT * FROM outbox.captures WHERE relation = 'notes'::regclass;
SELECT outbox.capture_definition(oid) FROM pg_trigger WHERE tgrelid = 'notes'::regclass;
INSERT INTO notes VALUES (1, 'a', 'b', 't');
UPDATE notes SET title = 'c';
DELETE FROM notes;
SELECT type, subject, scope, payload FROM recorded();
-- arguments left out go back to their defaults
SELECT outbox.capture('notes', 'note.{op}');
SELECT * FROM outbox.captures WHERE relation = 'notes'::regclass;
-- it is still the same trigger
SELECT oid = :first_oid AS same FROM pg_trigger WHERE tgrelid = 'notes'::regclass;

-- a definition can be taken from the view
SELECT outbox.capture('notes', 'note.{op}', watch => '{title}', columns => '{id,title}', operations => '{update}');
SELECT outbox.capture(relation, type, subject, watch, operations, columns, scope) FROM outbox.captures WHERE relation = 'notes'::regclass;

-- repetition takes no lock that a writer would meet
BEGIN;
SELECT outbox.capture('notes', 'note.{op}', watch => '{title}', columns => '{id,title}', operations => '{update}');
SELECT DISTINCT mode FROM pg_locks WHERE relation = 'notes'::regclass AND pid = pg_backend_pid();
ROLLBACK;

-- several types on a table
SELECT outbox.capture('notes', 'seen');
SELECT type, enabled FROM outbox.captures WHERE relation = 'notes'::regclass ORDER BY type;
INSERT INTO notes VALUES (1, 'a', 'b', 't');
UPDATE notes SET title = 'c';
SELECT type, subject FROM recorded() ORDER BY type;
SELECT outbox.uncapture('notes', 'unknown');
SELECT outbox.uncapture('notes', 'seen');
SELECT outbox.uncapture('notes', 'seen');
SELECT outbox.capture('notes', 'seen');
SELECT outbox.uncapture('notes');
SELECT outbox.uncapture('notes');
SELECT count(*) FROM pg_trigger WHERE tgrelid = 'notes'::regclass;
DELETE FROM notes;
SELECT * FROM recorded();

-- a capture is part of a transaction
BEGIN;
SELECT outbox.capture('notes', 'note.{op}');
INSERT INTO notes VALUES (1, 'a', 'b', 't');
ROLLBACK;
SELECT * FROM recorded();
INSERT INTO notes VALUES (1, 'a', 'b', 't');
SELECT * FROM recorded();

-- a trigger that was renamed or disabled stays so
SELECT outbox.capture('notes', 'note.{op}');
SELECT tgname AS trigger FROM pg_trigger WHERE tgrelid = 'notes'::regclass \gset
ALTER TRIGGER :trigger ON notes RENAME TO my_capture;
ALTER TABLE notes DISABLE TRIGGER my_capture;
SELECT outbox.capture('notes', 'note.{op}');
SELECT outbox.capture('notes', 'note.{op}', watch => '{title}');
SELECT watch, enabled, trigger FROM outbox.captures WHERE relation = 'notes'::regclass;
ALTER TABLE notes ENABLE ALWAYS TRIGGER my_capture;
SELECT outbox.capture('notes', 'note.{op}', watch => '{body}');
SELECT watch, enabled, trigger FROM outbox.captures WHERE relation = 'notes'::regclass;
SELECT tgenabled FROM pg_trigger WHERE tgrelid = 'notes'::regclass;
SELECT outbox.uncapture('notes', 'note.{op}');

-- somebody else's trigger of that name is not replaced
CREATE FUNCTION other() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER :trigger AFTER INSERT ON notes FOR EACH ROW EXECUTE FUNCTION other();
SELECT outbox.capture('notes', 'note.{op}');
SELECT outbox.uncapture('notes');
DROP TRIGGER :trigger ON notes;

-- the trigger is all there is: what a dump says of it makes it again
SELECT outbox.capture('notes', 'it''s "{op}"\{body}');
SELECT outbox.capture('notes', 'it''s-"{op}"', 'it''s "\"/{title}', '{title}', '{insert}', '{id}', '''{tenant}\n');
SELECT pg_get_triggerdef(oid) AS triggerdef FROM pg_trigger WHERE tgrelid = 'notes'::regclass \gset
SELECT to_jsonb(c) AS before FROM outbox.captures c WHERE relation = 'notes'::regclass \gset
SELECT outbox.uncapture('notes');
:triggerdef;
SELECT to_jsonb(c) = :'before' AS same FROM outbox.captures c WHERE relation = 'notes'::regclass;
SELECT outbox.capture('notes', 'it''s-"{op}"', 'it''s "\"/{title}', '{title}', '{insert}', '{id}', '''{tenant}\n');
TRUNCATE notes;
INSERT INTO notes VALUES (1, 'a', 'b', 't');
SELECT type, subject, scope FROM recorded();
SELECT outbox.uncapture('notes');

-- no other trigger has a definition, and none calls the function otherwise
SELECT outbox.capture_definition(0) IS NULL AS none, outbox.capture_definition(NULL) IS NULL AS nothing;
CREATE TRIGGER other AFTER INSERT ON notes FOR EACH ROW EXECUTE FUNCTION other('{"type": "x"}');
SELECT outbox.capture_definition(oid) IS NULL AS none FROM pg_trigger WHERE tgrelid = 'notes'::regclass;
SELECT outbox.uncapture('notes');
DROP TRIGGER other ON notes;
SELECT outbox.capture_row();
CREATE TRIGGER wrong BEFORE INSERT ON notes FOR EACH ROW EXECUTE FUNCTION outbox.capture_row('{"type": "x"}');
INSERT INTO notes VALUES (2);
DROP TRIGGER wrong ON notes;
CREATE TRIGGER wrong AFTER INSERT ON notes EXECUTE FUNCTION outbox.capture_row('{"type": "x"}');
INSERT INTO notes VALUES (2);
DROP TRIGGER wrong ON notes;
CREATE TRIGGER wrong AFTER INSERT ON notes FOR EACH ROW EXECUTE FUNCTION outbox.capture_row();
INSERT INTO notes VALUES (2);
DROP TRIGGER wrong ON notes;
CREATE TRIGGER wrong AFTER INSERT ON notes FOR EACH ROW EXECUTE FUNCTION outbox.capture_row('{"subject": "x"}');
INSERT INTO notes VALUES (2);
DROP TRIGGER wrong ON notes;
-- one of somebody's own making may be wrong, but spoils nothing for others
CREATE TRIGGER wrong AFTER INSERT ON notes FOR EACH ROW EXECUTE FUNCTION outbox.capture_row('not {json');
INSERT INTO notes VALUES (2);
CREATE TRIGGER wrong_2 AFTER INSERT ON notes FOR EACH ROW EXECUTE FUNCTION outbox.capture_row('{"type": "\u0000"}');
SELECT outbox.capture_definition(oid) IS NULL AS none FROM pg_trigger WHERE tgrelid = 'notes'::regclass;
SELECT count(*) FROM outbox.captures WHERE relation = 'notes'::regclass;
ALTER TABLE notes RENAME body TO text;
ALTER TABLE notes RENAME text TO body;
SELECT outbox.capture('notes', 'note.{op}');
SELECT outbox.uncapture('notes');
DROP TRIGGER wrong ON notes;
DROP TRIGGER wrong_2 ON notes;

-- names of every kind; what looks like SQL is a name
\pset format unaligned
CREATE SCHEMA "Sch.ema""; DROP TABLE outbox.events;--";
CREATE TABLE "Sch.ema""; DROP TABLE outbox.events;--"."we""ird Tab.le'%s%n" (
	"select" int PRIMARY KEY, "Col,1" text, "a""b" text, "it's" text, "$$" text, "back\slash" text,
	"7" text, "1st" text, "%s" text, "x'); DROP TABLE outbox.events;--" text);
SELECT outbox.capture('"Sch.ema""; DROP TABLE outbox.events;--"."we""ird Tab.le''%s%n"', 'x''-{op}-{Col,1}-$$',
	'{select}/{a"b}/{it''s}/{$$}/{back\slash}/{7}/{1st}/{%s}/{x''); DROP TABLE outbox.events;--}',
	ARRAY['select', 'Col,1', 'a"b', 'it''s', '$$', 'back\slash', '7', '1st', '%s', 'x''); DROP TABLE outbox.events;--'],
	scope => '1st');
SELECT outbox.capture(relation, type, subject, watch, operations, columns, scope)
	FROM outbox.captures WHERE type LIKE 'x%';
SELECT relation, type, subject, watch, scope FROM outbox.captures WHERE type LIKE 'x%';
INSERT INTO "Sch.ema""; DROP TABLE outbox.events;--"."we""ird Tab.le'%s%n" VALUES (1, 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine');
UPDATE "Sch.ema""; DROP TABLE outbox.events;--"."we""ird Tab.le'%s%n" SET "%s" = '%s%n';
SELECT * FROM recorded();
-- 19 has no such setting any more
DO $$ BEGIN PERFORM set_config('standard_conforming_strings', 'off', false); EXCEPTION WHEN OTHERS THEN NULL; END $$;
SELECT outbox.capture(relation, type, subject, watch, operations, ARRAY['back' || chr(92) || 'slash'], scope)
	FROM outbox.captures WHERE type LIKE 'x%';
SELECT set_config('standard_conforming_strings', 'on', false) AS standard_conforming_strings;
SELECT columns FROM outbox.captures WHERE type LIKE 'x%';
SELECT outbox.uncapture('"Sch.ema""; DROP TABLE outbox.events;--"."we""ird Tab.le''%s%n"');
SET client_min_messages = warning;
DROP SCHEMA "Sch.ema""; DROP TABLE outbox.events;--" CASCADE;
RESET client_min_messages;
\pset format aligned

-- one name in two schemas, no search_path, a name of 63 bytes
CREATE SCHEMA capture_test_2;
CREATE TABLE capture_test_2.notes (id int, a2345678901234567890123456789012345678901234567890123456789xyz text);
SET search_path = '';
SELECT outbox.capture('capture_test_2.notes', 'two.{op}', watch => '{a2345678901234567890123456789012345678901234567890123456789xyz}');
SELECT outbox.capture('capture_test.notes', 'one.{op}');
INSERT INTO capture_test_2.notes VALUES (1, 'x');
INSERT INTO capture_test.notes VALUES (3, 'x');
SELECT * FROM capture_test.recorded();
SELECT outbox.uncapture('capture_test_2.notes');
SELECT relation FROM outbox.captures WHERE relation = 'capture_test.notes'::regclass;
RESET search_path;

SET client_min_messages = warning;
DROP SCHEMA capture_test, capture_test_2 CASCADE;
RESET client_min_messages;
