--
-- Who may capture, and who may write what is captured
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
	RETURN QUERY SELECT e.type, e.subject, e.scope, e.payload - '{schema,table}'::text[] FROM outbox.events e
		WHERE e.seq > last ORDER BY e.seq;
END $$;
CREATE ROLE regress_outbox_owner;
CREATE ROLE regress_outbox_other;
CREATE ROLE regress_outbox_writer;
CREATE ROLE regress_outbox_group;
CREATE ROLE regress_outbox_member NOINHERIT IN ROLE regress_outbox_group;
GRANT ALL ON SCHEMA capture_test TO regress_outbox_owner;
GRANT USAGE ON SCHEMA capture_test TO regress_outbox_other, regress_outbox_writer, regress_outbox_group, regress_outbox_member;
SET search_path = capture_test;

SET ROLE regress_outbox_owner;
CREATE TABLE notes (id int PRIMARY KEY, title text, reader text);
-- the right to capture is given
SELECT outbox.capture('notes', 'note.{op}');
RESET ROLE;
GRANT USAGE ON SCHEMA outbox TO regress_outbox_owner;
SET ROLE regress_outbox_owner;
SELECT outbox.capture('notes', 'note.{op}');
CREATE TRIGGER mine AFTER INSERT ON notes FOR EACH ROW EXECUTE FUNCTION outbox.capture_row('{"type": "mine"}');
RESET ROLE;
SELECT outbox.grant('regress_outbox_owner', 'record'), outbox.grant('regress_outbox_other', 'record');
SET ROLE regress_outbox_owner;
SELECT outbox.capture('notes', 'note.{op}', subject => 'note/{id}');
SELECT current_user;
SELECT relation, type FROM outbox.captures WHERE relation = 'notes'::regclass;
-- a trigger of one's own making records nothing that record() would not
CREATE TRIGGER mine AFTER INSERT ON notes FOR EACH ROW EXECUTE FUNCTION outbox.capture_row('{"type": "outbox.event.poisoned"}');
INSERT INTO notes VALUES (0);
DROP TRIGGER mine ON notes;
-- and is one for tables of one's own
SET ROLE regress_outbox_other;
SELECT outbox.capture('notes', 'note.{op}');
SELECT outbox.capture('notes', 'other');
SELECT outbox.uncapture('notes');
SELECT outbox.capture('outbox.events', 'other');
SELECT outbox.capture('pg_class', 'other');
RESET ROLE;
-- also of every partition
SET ROLE regress_outbox_owner;
CREATE TABLE parts (id int) PARTITION BY RANGE (id);
CREATE TABLE part_1 PARTITION OF parts FOR VALUES FROM (0) TO (10);
RESET ROLE;
ALTER TABLE part_1 OWNER TO regress_outbox_other;
SET ROLE regress_outbox_owner;
SELECT outbox.capture('parts', 'part.{op}');
RESET ROLE;
ALTER TABLE part_1 OWNER TO regress_outbox_owner;
SET ROLE regress_outbox_owner;
SELECT outbox.capture('parts', 'part.{op}');
CREATE TABLE part_2 PARTITION OF parts FOR VALUES FROM (10) TO (20);
INSERT INTO parts VALUES (1), (11);
RESET ROLE;
SELECT type, payload->'new' AS new FROM recorded();
DROP TABLE parts;

-- the writer needs no right on outbox, not even to know of it
GRANT SELECT, INSERT, UPDATE, DELETE ON notes TO regress_outbox_writer, regress_outbox_group;
SET ROLE regress_outbox_writer;
SET search_path = '';
INSERT INTO capture_test.notes VALUES (1, 'a', 'regress_outbox_writer');
UPDATE capture_test.notes SET title = 'b';
SELECT current_user, current_setting('search_path') AS search_path;
DELETE FROM capture_test.notes;
COPY capture_test.notes FROM stdin;
1	copied	x
\.
SELECT count(*) FROM outbox.events;
INSERT INTO outbox.events (type) VALUES ('forged');
SELECT outbox.record('forged');
SET search_path = capture_test;
RESET ROLE;
SELECT type, subject, payload->'old' AS old, payload->'new' AS new FROM recorded();
SET ROLE regress_outbox_member;
INSERT INTO notes VALUES (2, 'a', 'b');
SET ROLE regress_outbox_group;
INSERT INTO notes VALUES (2, 'a', 'b');
RESET ROLE;
CREATE FUNCTION definer() RETURNS name LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog AS
	$$ INSERT INTO capture_test.notes VALUES (3, 'definer', NULL); SELECT current_user $$;
ALTER FUNCTION definer() OWNER TO regress_outbox_group;
SET ROLE regress_outbox_member;
SELECT definer();
RESET ROLE;
SELECT type, subject FROM recorded();

-- rights of the owner that was are not needed any more
SELECT outbox.revoke('regress_outbox_owner', 'record');
REVOKE USAGE ON SCHEMA outbox FROM regress_outbox_owner;
SET ROLE regress_outbox_owner;
UPDATE notes SET title = 'x' WHERE id = 3;
RESET ROLE;
SELECT type, subject FROM recorded();

-- code that the writer meets runs as the writer, also when the insertion fails
CREATE FUNCTION whoami() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE NOTICE 'as %', current_user; RETURN NULL; END $$;
CREATE TRIGGER z_after AFTER INSERT ON notes FOR EACH ROW EXECUTE FUNCTION whoami();
CREATE CONSTRAINT TRIGGER z_deferred AFTER INSERT ON notes DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION whoami();
SELECT outbox.capture('notes', 'note.{title}');
SET ROLE regress_outbox_writer;
INSERT INTO notes VALUES (4, 'x', NULL);
DO $$
BEGIN
	BEGIN
		INSERT INTO notes VALUES (5, 'not a type', NULL);
	EXCEPTION WHEN invalid_parameter_value THEN
		RAISE NOTICE 'as %, %', current_user, current_setting('search_path');
	END;
	BEGIN
		INSERT INTO notes VALUES (5, 'long', NULL);
		UPDATE notes SET title = NULL WHERE id = 5;
	EXCEPTION WHEN invalid_parameter_value THEN
		RAISE NOTICE 'as %, %', current_user, current_setting('search_path');
	END;
END $$;
RESET ROLE;
DROP TRIGGER z_after ON notes;
DROP TRIGGER z_deferred ON notes;
SELECT outbox.uncapture('notes', 'note.{title}');
SELECT count(*) FROM recorded();

-- row-level security: what is stored is recorded, whoever may see it
ALTER TABLE notes ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CREATE POLICY mine ON notes FOR ALL USING (reader = current_user) WITH CHECK (true);
SET ROLE regress_outbox_writer;
INSERT INTO notes VALUES (10, 'mine', 'regress_outbox_writer'), (11, 'hidden', 'regress_outbox_group');
SELECT id FROM notes;
SET ROLE regress_outbox_group;
UPDATE notes SET title = 'seen';
DELETE FROM notes;
SET ROLE regress_outbox_writer;
UPDATE notes SET title = 'mine again';
SET row_security = off;
INSERT INTO notes VALUES (12, 'off', 'regress_outbox_group');
RESET row_security;
RESET ROLE;
SELECT type, subject, payload->'new'->'title' AS title FROM recorded();

-- views are not for everybody
GRANT USAGE ON SCHEMA outbox TO regress_outbox_writer;
SET ROLE regress_outbox_writer;
SELECT count(*) FROM outbox.captures;
SELECT outbox.capture_definition(0);
RESET ROLE;

-- the extension does not go while it is needed
\set VERBOSITY terse
DROP EXTENSION outbox;
\set VERBOSITY default

SET client_min_messages = warning;
DROP SCHEMA capture_test CASCADE;
RESET client_min_messages;
SELECT outbox.revoke('regress_outbox_other', 'record');
REVOKE USAGE ON SCHEMA outbox FROM regress_outbox_writer;
DROP ROLE regress_outbox_owner, regress_outbox_other, regress_outbox_writer, regress_outbox_member, regress_outbox_group;
