--
-- What a change of a captured table records
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
SET search_path = capture_test;

-- a created, a changed and a deleted row
CREATE TABLE notes (id int PRIMARY KEY, title text, body text, kind text);
SELECT outbox.capture('notes', 'note.{op}');
INSERT INTO notes VALUES (1, 'a', NULL, 'k');
UPDATE notes SET body = 'b', title = title;
UPDATE notes SET body = 'b', title = 'a', kind = 'k', id = 1;
UPDATE notes SET body = NULL, kind = 'l';
UPDATE notes SET body = NULL;
UPDATE notes SET id = 2;
DELETE FROM notes;
SELECT * FROM recorded();
SELECT headers IS NULL AS no_headers, not_before IS NULL AS now,
	recorded_at BETWEEN now() - interval '1 hour' AND clock_timestamp() AS recently
FROM outbox.events WHERE seq = (SELECT seq FROM mark);
-- the payload names the table
INSERT INTO notes VALUES (1, 'a', NULL, 'k');
SELECT payload FROM outbox.events WHERE seq > (SELECT seq FROM mark);
SELECT count(*) FROM recorded();

-- watched columns decide whether an update counts, columns what is copied
SELECT outbox.capture('notes', 'note.{op}', watch => '{title,kind}', columns => '{id,title,body}');
UPDATE notes SET body = 'not watched';
SELECT * FROM recorded();
UPDATE notes SET kind = 'watched';
UPDATE notes SET title = 'both', body = 'both';
DELETE FROM notes;
SELECT * FROM recorded();

-- operations
SELECT outbox.capture('notes', 'note.{op}', operations => '{update,delete}');
INSERT INTO notes VALUES (1, 'a', 'b', 'k');
UPDATE notes SET title = 'x';
DELETE FROM notes;
SELECT type FROM recorded();
SELECT outbox.capture('notes', 'note', operations => '{insert}');
SELECT outbox.uncapture('notes', 'note.{op}');
INSERT INTO notes VALUES (1, 'a', 'b', 'k');
UPDATE notes SET title = 'x';
DELETE FROM notes;
SELECT type FROM recorded();
SELECT outbox.uncapture('notes');

-- placeholders: the new row's value, or the old row's when it was deleted
SELECT outbox.capture('notes', '{kind}.{op}.{kind}-{id}', subject => 'note/{id}/{title}', scope => 'body', columns => '{id}');
INSERT INTO notes VALUES (1, 'a', 'b', 'memo');
UPDATE notes SET kind = 'letter', title = 'A', body = 'B';
DELETE FROM notes;
SELECT * FROM recorded();
-- null in a subject or scope makes it null; in a type it fails the statement
INSERT INTO notes VALUES (1, NULL, NULL, 'memo');
SELECT * FROM recorded();
INSERT INTO notes VALUES (2, NULL, NULL, NULL);
UPDATE notes SET kind = NULL;
DO $$ BEGIN UPDATE notes SET kind = NULL; END $$;
SELECT * FROM recorded();
-- so does what cannot be a type
INSERT INTO notes VALUES (2, 'a', 'b', 'two words');
INSERT INTO notes VALUES (2, 'a', 'b', '*');
INSERT INTO notes VALUES (2, 'a', 'b', '!');
INSERT INTO notes VALUES (2, 'a', 'b', 'outbox');
INSERT INTO notes VALUES (2, 'a', 'b', repeat('k', 256));
SELECT outbox.capture('notes', '{kind}');
SELECT outbox.uncapture('notes', '{kind}.{op}.{kind}-{id}');
INSERT INTO notes VALUES (2, 'a', 'b', '');
INSERT INTO notes VALUES (2, 'a', 'b', 'outbox.event.poisoned');
INSERT INTO notes VALUES (2, 'a', 'b', E'tab\there');
-- and a subject that is too long
SELECT outbox.capture('notes', '{kind}', subject => 'title');
INSERT INTO notes VALUES (2, repeat('t', 16385), 'b', 'k');
SELECT id FROM notes;
SELECT * FROM recorded();
INSERT INTO notes VALUES (2, repeat('t', 16384), 'b', 'k');
SELECT type, length(subject) FROM recorded();
SELECT outbox.uncapture('notes');
TRUNCATE notes;

-- a column called op
CREATE TABLE ops (op text);
SELECT outbox.capture('ops', 'ops.{op}', subject => 'op', scope => '{op}!');
INSERT INTO ops VALUES ('mine');
SELECT * FROM recorded();
DROP TABLE ops;

-- keys: none, one, several, of odd types, changed, dropped, made later
CREATE TABLE keys (a text, b text, c int);
SELECT outbox.capture('keys', 'key.{op}', columns => '{c}');
INSERT INTO keys VALUES ('a,b', 'c', 1);
ALTER TABLE keys ADD PRIMARY KEY (b, a);
INSERT INTO keys VALUES ('a', 'b,c', 2), ('["x"]', '"', 3), ('', ' ', 4);
UPDATE keys SET a = 'new' WHERE c = 2;
SELECT subject, payload FROM recorded();
SELECT DISTINCT jsonb_build_array(b, a)::text FROM keys WHERE c = 3;
ALTER TABLE keys DROP CONSTRAINT keys_pkey;
ALTER TABLE keys ADD PRIMARY KEY (c) DEFERRABLE;
DELETE FROM keys WHERE c = 4;
ALTER TABLE keys DROP CONSTRAINT keys_pkey;
DELETE FROM keys WHERE c = 3;
SELECT type, subject, payload FROM recorded();
DROP TABLE keys;
CREATE TABLE keys (id uuid PRIMARY KEY);
SELECT outbox.capture('keys', 'key.{op}');
INSERT INTO keys VALUES ('A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11');
DROP TABLE keys;
CREATE TABLE keys (at timestamptz, flag boolean, code char(5), f float8, PRIMARY KEY (at, flag, code, f));
SELECT outbox.capture('keys', 'key.{op}', columns => '{flag}');
SET timezone = 'Asia/Kolkata';
SET datestyle = 'German';
SET extra_float_digits = -10;
INSERT INTO keys VALUES ('2024-02-29 12:00:00.5+00', true, 'abc', 0.1 + 0.2::float8);
RESET timezone;
RESET datestyle;
RESET extra_float_digits;
SELECT subject FROM recorded();
DROP TABLE keys;
-- as text a value is what a cast makes of it
CREATE TABLE texts (code char(5), flag boolean, addr inet, b "char", at timestamptz, n numeric(6,2));
SELECT outbox.capture('texts', '{code}.{flag}', subject => '{addr}|{b}|{at}|{n}', scope => 'code', columns => '{flag}');
INSERT INTO texts VALUES ('abc', true, '10.0.0.1', 'x', '2024-01-01 00:00+00', 1.5);
SELECT type, subject, '[' || scope || ']' AS scope FROM recorded();
DROP TABLE texts;

-- values are compared, not the statement's list of columns
CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	NEW.kind := upper(NEW.title);
	RETURN NEW;
END $$;
CREATE TRIGGER stamp BEFORE INSERT OR UPDATE ON notes FOR EACH ROW EXECUTE FUNCTION stamp();
SELECT outbox.capture('notes', 'note.{op}', watch => '{kind}', columns => '{kind}');
INSERT INTO notes VALUES (1, 'a', 'b', NULL);
UPDATE notes SET title = 'x';
UPDATE notes SET title = 'X';
UPDATE notes SET kind = 'ignored';
UPDATE notes SET kind = kind;
SELECT type, payload FROM recorded();
DROP TRIGGER stamp ON notes;
-- a statement that BEFORE triggers suppress records nothing
CREATE FUNCTION suppress() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER suppress BEFORE INSERT OR UPDATE OR DELETE ON notes FOR EACH ROW EXECUTE FUNCTION suppress();
INSERT INTO notes VALUES (2, 'a', 'b', 'k');
UPDATE notes SET kind = 'z';
DELETE FROM notes;
SELECT * FROM recorded();
DROP TRIGGER suppress ON notes;
-- bytes are compared: a value that is equal but printed differently counts
CREATE TABLE numbers (id int, n numeric, f float8, j jsonb, t text COLLATE "C");
INSERT INTO numbers VALUES (1, 1.0, 0, '{"a": 1}', 'x');
SELECT outbox.capture('numbers', 'number.{op}');
UPDATE numbers SET n = 1.00;
UPDATE numbers SET f = '-0';
UPDATE numbers SET j = '{"a":1}';
UPDATE numbers SET n = 1.00, f = '-0', t = 'x';
SELECT payload->'old' AS old, payload->'new' AS new FROM recorded();
DROP TABLE numbers;

-- ON CONFLICT
SELECT outbox.capture('notes', 'note.{op}', columns => '{id,title}', subject => 'id');
TRUNCATE notes;
INSERT INTO notes VALUES (1, 'a', 'b', 'k');
INSERT INTO notes VALUES (1, 'z') ON CONFLICT DO NOTHING;
INSERT INTO notes VALUES (1, 'z') ON CONFLICT (id) DO UPDATE SET title = 'c';
INSERT INTO notes VALUES (1, 'z') ON CONFLICT (id) DO UPDATE SET title = 'd' WHERE false;
INSERT INTO notes VALUES (1, 'z') ON CONFLICT (id) DO UPDATE SET title = 'c', body = 'b';
INSERT INTO notes VALUES (1, 'z'), (2, 'new') ON CONFLICT (id) DO UPDATE SET title = excluded.title;
SELECT type, subject, payload->'old' AS old, payload->'new' AS new FROM recorded();

-- MERGE
INSERT INTO notes VALUES (3, 'gone', 'b', 'k'), (4, 'same', 'b', 'k');
SELECT count(*) FROM recorded();
MERGE INTO notes n USING (VALUES (1, 'merged'), (3, NULL), (4, 'same'), (5, 'made'), (6, NULL)) v (id, title) ON n.id = v.id
	WHEN MATCHED AND v.title IS NULL THEN DELETE
	WHEN MATCHED THEN UPDATE SET title = v.title
	WHEN NOT MATCHED AND v.title IS NULL THEN DO NOTHING
	WHEN NOT MATCHED THEN INSERT VALUES (v.id, v.title);
SELECT type, subject, payload->'old' AS old, payload->'new' AS new FROM recorded() ORDER BY subject;
-- 17 can do it in one statement
SELECT CASE WHEN current_setting('server_version_num')::int >= 170000
	THEN 'MERGE INTO notes n USING (VALUES (1)) v (id) ON n.id = v.id WHEN NOT MATCHED BY SOURCE AND n.id > 3 THEN DELETE WHEN NOT MATCHED BY SOURCE THEN UPDATE SET title = ''unmatched'''
	ELSE 'DO $$ BEGIN DELETE FROM notes WHERE id > 3; UPDATE notes SET title = ''unmatched'' WHERE id = 2; END $$' END AS merge \gset
:merge;
SELECT type, subject, payload->'old' AS old, payload->'new' AS new FROM recorded() ORDER BY subject;
-- data-modifying CTEs
WITH gone AS (DELETE FROM notes WHERE id = 2 RETURNING *) INSERT INTO notes SELECT 20, title FROM gone;
SELECT type, subject FROM recorded() ORDER BY subject;

-- COPY; TRUNCATE records nothing
TRUNCATE notes;
COPY notes (id) FROM PROGRAM 'seq 1 1000';
\copy notes (id, title) FROM stdin
1001	one
1002	two
\.
\copy notes (id, title) FROM stdin
1003	one
bad	two
\.
SELECT type, count(*), min(subject::int), max(subject::int) FROM recorded() GROUP BY type;
BEGIN;
TRUNCATE notes;
COPY notes (id, title) FROM stdin (FREEZE);
1	frozen
\.
COMMIT;
TRUNCATE notes;
SELECT type, payload FROM recorded();

-- savepoints and statements that fail
BEGIN;
INSERT INTO notes VALUES (1, 'stays');
SAVEPOINT s;
INSERT INTO notes VALUES (2, 'rolled back');
ROLLBACK TO s;
DO $$ BEGIN UPDATE notes SET title = 'swallowed'; RAISE EXCEPTION 'no'; EXCEPTION WHEN OTHERS THEN NULL; END $$;
INSERT INTO notes VALUES (3, 'stays too');
COMMIT;
INSERT INTO notes SELECT i, 'x' FROM generate_series(10, 100) i UNION ALL SELECT 10, 'y';
SELECT type, subject, payload->'new'->>'title' AS title FROM recorded();

-- cascades, and triggers deferred to the commit
CREATE TABLE parts (id int PRIMARY KEY, note int REFERENCES notes ON DELETE CASCADE ON UPDATE CASCADE);
CREATE TABLE tags (id int PRIMARY KEY, note int REFERENCES notes ON DELETE SET NULL);
SELECT outbox.capture('parts', 'part.{op}'), outbox.capture('tags', 'tag.{op}');
INSERT INTO parts VALUES (1, 1), (2, 3);
INSERT INTO tags VALUES (1, 3);
SELECT count(*) FROM recorded();
UPDATE notes SET id = 11 WHERE id = 1;
DELETE FROM notes WHERE id = 3;
SELECT type, subject, payload->'old' AS old, payload->'new' AS new FROM recorded() ORDER BY type, subject;
TRUNCATE notes CASCADE;
SELECT * FROM recorded();
CREATE FUNCTION deferred() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO parts VALUES (NEW.id, NULL); RETURN NULL; END';
CREATE CONSTRAINT TRIGGER deferred AFTER INSERT ON notes DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION deferred();
BEGIN;
INSERT INTO notes VALUES (7, 'x');
SELECT type, subject FROM recorded();
COMMIT;
SELECT type, subject FROM recorded();
DROP TABLE parts, tags;
DROP TRIGGER deferred ON notes;

-- session_replication_role against ALTER TABLE ... ENABLE, as for any trigger
SELECT trigger FROM outbox.captures WHERE relation = 'notes'::regclass \gset
TRUNCATE notes;
INSERT INTO notes VALUES (1, 'origin/origin');
SET session_replication_role = replica;
INSERT INTO notes VALUES (2, 'origin/replica');
SET session_replication_role = local;
INSERT INTO notes VALUES (3, 'origin/local');
ALTER TABLE notes ENABLE REPLICA TRIGGER :trigger;
INSERT INTO notes VALUES (4, 'replica/local');
SET session_replication_role = replica;
INSERT INTO notes VALUES (5, 'replica/replica');
ALTER TABLE notes ENABLE ALWAYS TRIGGER :trigger;
INSERT INTO notes VALUES (6, 'always/replica');
RESET session_replication_role;
INSERT INTO notes VALUES (7, 'always/origin');
ALTER TABLE notes DISABLE TRIGGER :trigger;
INSERT INTO notes VALUES (8, 'disabled/origin');
ALTER TABLE notes ENABLE TRIGGER :trigger;
SELECT payload->'new'->>'title' AS title FROM recorded();

-- a row changed twice by one statement's triggers is recorded as it was each time
CREATE FUNCTION again() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	UPDATE notes SET title = NEW.title || '!' WHERE id = NEW.id AND title NOT LIKE '%!';
	RETURN NULL;
END $$;
CREATE TRIGGER again AFTER INSERT ON notes FOR EACH ROW EXECUTE FUNCTION again();
INSERT INTO notes VALUES (9, 'x');
SELECT type, payload->'old' AS old, payload->'new' AS new FROM recorded() ORDER BY type;
DROP TRIGGER again ON notes;

-- RETURNING, rules and updatable views
CREATE VIEW titles AS SELECT id, title FROM notes WHERE id < 100;
INSERT INTO titles VALUES (10, 'by a view') RETURNING *;
UPDATE titles SET title = 'view' WHERE id = 10;
SELECT type, subject FROM recorded();

SET client_min_messages = warning;
DROP SCHEMA capture_test CASCADE;
RESET client_min_messages;
