--
-- Values of every kind in an event
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
\pset format unaligned

-- one row gives one payload, whatever the session's settings
CREATE TYPE mood AS ENUM ('happy', 'sad');
CREATE TYPE pair AS (a int, at timestamptz, b bytea, c regclass);
CREATE DOMAIN positive AS numeric CHECK (VALUE > 0);
CREATE DOMAIN stamps AS timestamptz[];
CREATE TYPE floatrange AS RANGE (subtype = float8);
CREATE TABLE things (id int, v text, "case" text);
CREATE TABLE kinds (
	a_bool bool, a_int2 int2, a_int4 int4, a_int8 int8, a_numeric numeric, a_nan numeric, a_inf numeric, a_huge numeric,
	a_float4 float4, a_float8 float8, a_finf float8, a_fnan float4, a_money money, a_char "char", a_bpchar char(5),
	a_varchar varchar(10), a_name name, a_text text, a_bytea bytea, a_date date, a_bc date, a_dinf date, a_time time,
	a_timetz timetz, a_timestamp timestamp, a_timestamptz timestamptz, a_tinf timestamptz, a_interval interval,
	a_bit bit(3), a_varbit varbit, a_inet inet, a_cidr cidr, a_macaddr macaddr, a_uuid uuid, a_lsn pg_lsn,
	a_point point, a_circle circle, a_json json, a_jsonb jsonb, a_scalar jsonb, a_jnull jsonb, a_jsonpath jsonpath,
	a_tsvector tsvector, a_tsquery tsquery, a_mood mood, a_pair pair, a_positive positive, a_stamps stamps,
	a_ints int[], a_nulls text[], a_matrix float8[], a_dates date[], a_byteas bytea[], a_intervals interval[],
	a_range int4range, a_tsrange tstzrange, a_frange floatrange, a_multi int4multirange, a_tsmulti tstzmultirange,
	a_regclass regclass, a_regcolumn regclass, a_regtype regtype, a_oid oid, a_oidvector oidvector, a_null text, a_empty text);
SELECT outbox.capture('kinds', 'kind.{op}', subject => '{a_float8} {a_money} {a_timestamptz} {a_interval} {a_bytea} {a_pair} {a_tsrange} {a_regclass} {a_matrix} {a_date}');
CREATE PROCEDURE fill() LANGUAGE sql AS $$
INSERT INTO capture_test.kinds VALUES (
	true, -1, 2147483647, -9223372036854775808, 1234567890.12345678901234567890, 'NaN', '-Infinity', 1e400,
	1e10, 0.1::float8 + 0.2, 'Infinity', 'NaN', 1234.5, 'c', 'abc',
	'varchar', 'name', E'text "\\ \n', '\x00ff5c', '2024-02-29', '0044-03-15 BC', 'infinity', '12:34:56.7',
	'12:34:56+05:30', '2024-02-29 12:34:56.789', '2024-02-29 12:34:56.789+00', '-infinity', '1 year 2 mons -3 days 04:05:06.7',
	B'101', B'1', '10.0.0.1', '10.0.0.0/8', '08:00:2b:01:02:03', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '16/B374D848',
	'(0.1,0.2)', '<(1,2),3.3>', '{"b": 1, "a": [1.50, {"x": null}], "b": 2, "c": {}, "d": []}', '{"b": 1, "a": [1.50, {"x": null}], "c": {}, "d": []}',
	'"scalar"', 'null', '$.a[*] ? (@ > 1)', 'a fat cat', 'fat & cat', 'sad', ROW(1, '2024-01-01 00:00+00', '\xff', 'capture_test.things'),
	1.50, ARRAY['2024-01-01 00:00+00', NULL]::timestamptz[],
	'{3,1,2}', ARRAY['a', NULL, '', 'NULL'], ARRAY[[0.1::float8 + 0.2, 1], [1e300, 'NaN']], '{2024-02-29,infinity}', ARRAY['\xff'::bytea], '{1 day,-1 mon}',
	'[1,5)', '[2024-01-01 00:00+00,)', capture_test.floatrange(0.1::float8 + 0.2, NULL), '{[1,2),[5,9)}', '{[2024-01-01 00:00+00,2025-01-01 00:00+00)}',
	'capture_test.things', 'pg_class', 'timestamptz', 4000000000, '1 2', NULL, '');
$$;
CALL fill();
SET timezone = 'America/St_Johns';
SET datestyle = 'SQL, DMY';
SET intervalstyle = 'sql_standard';
SET bytea_output = 'escape';
SET extra_float_digits = -15;
SET quote_all_identifiers = on;
SET xmloption = document;
SET search_path = pg_catalog;
DO $$ BEGIN PERFORM set_config('lc_monetary', 'en_US.UTF-8', false); EXCEPTION WHEN OTHERS THEN NULL; END $$;
BEGIN;
CALL capture_test.fill();
-- it is still the session's settings
SELECT current_setting('timezone') AS timezone, current_setting('datestyle') AS datestyle, current_setting('intervalstyle') AS intervalstyle,
	current_setting('bytea_output') AS bytea_output, current_setting('extra_float_digits') AS extra_float_digits,
	current_setting('search_path') AS search_path, current_setting('quote_all_identifiers') AS quote_all_identifiers;
COMMIT;
RESET timezone;
RESET datestyle;
RESET intervalstyle;
RESET bytea_output;
RESET extra_float_digits;
RESET quote_all_identifiers;
RESET xmloption;
RESET lc_monetary;
SET search_path = capture_test;
SELECT count(*), count(DISTINCT payload), count(DISTINCT subject) FROM outbox.events WHERE seq > (SELECT seq FROM mark);
SELECT DISTINCT subject FROM outbox.events WHERE seq > (SELECT seq FROM mark);
SELECT key, value FROM (SELECT payload FROM recorded() LIMIT 1) e, jsonb_each(payload->'new') ORDER BY key COLLATE "C";
-- and, but for those settings, what to_jsonb makes of the row
SET timezone = 'UTC';
SET datestyle = 'ISO';
SET intervalstyle = 'postgres';
SET lc_monetary = 'C';
SET search_path = pg_catalog;
SELECT k.key, k.value, e.value FROM (SELECT to_jsonb(t) AS row FROM capture_test.kinds t LIMIT 1) t, jsonb_each(t.row) k
	JOIN (SELECT DISTINCT ON (type) payload FROM outbox.events WHERE type = 'kind.created') p ON true
	JOIN jsonb_each(p.payload->'new') e USING (key) WHERE k.value <> e.value;
RESET timezone;
RESET datestyle;
RESET intervalstyle;
RESET lc_monetary;
SET search_path = capture_test;
DELETE FROM kinds WHERE a_bool;
SELECT count(*), count(DISTINCT payload->'old') FROM recorded();
DROP TABLE kinds;

-- casts to json that people made are used, as by to_jsonb, and run as the writer
CREATE ROLE regress_outbox_writer;
CREATE FUNCTION mood_json(mood) RETURNS json LANGUAGE sql AS $$ SELECT json_build_object('mood', $1::text, 'as', current_user) $$;
CREATE CAST (mood AS json) WITH FUNCTION mood_json(mood);
CREATE TABLE moods (m mood, ms mood[]);
SELECT outbox.capture('moods', 'mood.{m}');
GRANT USAGE ON SCHEMA capture_test TO regress_outbox_writer;
GRANT INSERT ON moods TO regress_outbox_writer;
SET ROLE regress_outbox_writer;
INSERT INTO moods VALUES ('happy', '{sad,happy}');
RESET ROLE;
SELECT type, payload->'new' AS new FROM recorded();
DROP TABLE moods;
DROP CAST (mood AS json);

\set VERBOSITY terse
-- json that jsonb cannot hold fails the writer's statement, and says where
CREATE TABLE docs (id int PRIMARY KEY, doc json, docs json[]);
SELECT outbox.capture('docs', 'doc.{op}');
INSERT INTO docs VALUES (1, '{"a": "b\u0000c"}');
DO $$
DECLARE
	sch text; tab text; col text; det text;
BEGIN
	INSERT INTO docs VALUES (1, '{"a": "b\u0000c"}');
EXCEPTION WHEN untranslatable_character THEN
	GET STACKED DIAGNOSTICS sch = SCHEMA_NAME, tab = TABLE_NAME, col = COLUMN_NAME, det = PG_EXCEPTION_DETAIL;
	RAISE NOTICE '%.%.%: %', sch, tab, col, det;
END $$;
INSERT INTO docs VALUES (1, '"ok"');
UPDATE docs SET doc = '"\u0000"';
UPDATE docs SET docs = ARRAY['"\u0000"'::json];
SELECT payload FROM recorded();
-- a column that is not copied does no harm
SELECT outbox.capture('docs', 'doc.{op}', columns => '{id}');
UPDATE docs SET doc = '"\u0000"';
SELECT outbox.capture('docs', 'doc.{op}', watch => '{id}');
UPDATE docs SET doc = '"x\u0000"';
DELETE FROM docs;
SELECT payload FROM recorded();
DROP TABLE docs;

\set VERBOSITY default
-- deep and wide documents come through as they are
CREATE TABLE docs (doc jsonb);
SELECT outbox.capture('docs', 'doc.{op}');
INSERT INTO docs SELECT jsonb_object_agg('k' || i, jsonb_build_array(i, jsonb_build_object('x', repeat('y', i)))) FROM generate_series(1, 1000) i;
INSERT INTO docs VALUES ((repeat('[', 500) || repeat(']', 500))::jsonb);
SELECT count(*) FROM recorded() r JOIN docs d ON r.payload->'new'->'doc' = d.doc;
DROP TABLE docs;

-- large values are there, changed or not
CREATE TABLE large (id int PRIMARY KEY, t text, n int);
ALTER TABLE large ALTER t SET STORAGE EXTERNAL;
SELECT outbox.capture('large', 'large.{op}');
INSERT INTO large SELECT 1, string_agg(md5(i::text), ''), 0 FROM generate_series(1, 32768) i;
UPDATE large SET n = 1;
UPDATE large SET t = t || '', n = 1;
UPDATE large SET t = reverse(t);
DELETE FROM large;
SELECT type, length(payload->'new'->>'t') AS new, length(payload->'old'->>'t') AS old, payload->'old'->'n' AS n FROM recorded();
SELECT outbox.capture('large', 'large.{op}', watch => '{t}');
INSERT INTO large VALUES (1, repeat('x', 1024 * 1024), 0);
UPDATE large SET n = 2;
UPDATE large SET t = repeat('x', 1024 * 1024);
UPDATE large SET t = repeat('x', 1024 * 1024 - 1) || 'y', n = 3;
SELECT type, length(payload->'new'->>'t') AS new, length(payload->'old'->>'t') AS old FROM recorded();
-- unless they are too large for an event
ALTER TABLE large ALTER t SET STORAGE EXTENDED;
UPDATE large SET t = repeat('x', 64 * 1024 * 1024 + 1);
SELECT outbox.capture('large', 'large.{op}', columns => '{id}');
UPDATE large SET t = repeat('x', 64 * 1024 * 1024 + 1);
SELECT type, payload->'old' AS old FROM recorded();
DROP TABLE large;

-- generated columns; since 18 they may be virtual
SELECT CASE WHEN current_setting('server_version_num')::int >= 180000 THEN 'VIRTUAL' ELSE 'STORED' END AS kind \gset
CREATE TABLE generated (id int PRIMARY KEY, gone text, a int, b text, double int GENERATED ALWAYS AS (a * 2) STORED,
	label text GENERATED ALWAYS AS (upper(b) || a) :kind, at timestamptz GENERATED ALWAYS AS (to_timestamp(a)) :kind);
ALTER TABLE generated DROP COLUMN gone;
SELECT outbox.capture('generated', 'generated.{label}', scope => '{label}');
INSERT INTO generated (id, a, b) VALUES (1, 1, 'x');
UPDATE generated SET a = 2;
UPDATE generated SET a = 2;
UPDATE generated SET b = 'X';
DELETE FROM generated;
SELECT type, scope, payload FROM recorded();
SELECT outbox.capture('generated', 'generated.{label}', watch => '{label}', columns => '{label,id}');
INSERT INTO generated (id, a, b) VALUES (1, 1, 'x');
UPDATE generated SET b = 'X';
UPDATE generated SET b = 'Y';
SELECT type, payload FROM recorded();
DROP TABLE generated;

-- a table of many columns, some dropped, some with a default that no old row stores
SELECT string_agg('c' || i || ' int', ', ') AS columns FROM generate_series(1, 1500) i \gset
CREATE TABLE wide (:columns);
SELECT outbox.capture('wide', 'wide.{op}');
INSERT INTO wide (c1, c1500) VALUES (1, 2);
ALTER TABLE wide DROP c2, DROP c1499, ADD c1501 text DEFAULT 'missing';
UPDATE wide SET c1500 = 3;
UPDATE wide SET c1501 = 'missing';
SELECT payload->'old' AS old, payload->'new'->'c1500' AS c1500, payload->'new'->'c1501' AS c1501,
	(SELECT count(*) FROM jsonb_object_keys(payload->'new')) AS columns, payload->'new' ? 'c2' AS c2 FROM recorded();
DROP TABLE wide;

SET client_min_messages = warning;
DROP SCHEMA capture_test CASCADE;
RESET client_min_messages;
DROP ROLE regress_outbox_writer;
