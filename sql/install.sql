-- What CREATE EXTENSION makes.
CREATE EXTENSION outbox;

-- Everything has a comment.
SELECT pg_describe_object(d.classid, d.objid, 0) AS without_comment
	FROM pg_depend d
	WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
		AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'outbox')
		AND d.classid IN ('pg_class'::regclass, 'pg_proc'::regclass, 'pg_namespace'::regclass)
		AND (d.classid <> 'pg_class'::regclass OR (SELECT relkind FROM pg_class WHERE oid = d.objid) <> 'S')
		AND obj_description(d.objid, d.classid::regclass::name) IS NULL;
SELECT a.attrelid::regclass AS relation, a.attname AS column_without_comment
	FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
	WHERE c.relnamespace = 'outbox'::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
		AND col_description(a.attrelid, a.attnum) IS NULL;

-- Drivers send untyped parameters, and some cannot read void.
SELECT proname AS overloaded FROM pg_proc WHERE pronamespace = 'outbox'::regnamespace GROUP BY 1 HAVING count(*) > 1;
SELECT proname AS returns_void FROM pg_proc WHERE pronamespace = 'outbox'::regnamespace AND prorettype = 'void'::regtype;

-- pg_upgrade refuses columns of these types; oids of these do not survive a dump.
SELECT a.attrelid::regclass AS relation, a.attname
	FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
	WHERE c.relnamespace = 'outbox'::regnamespace AND c.relkind = 'r'
		AND a.atttypid::regtype::text LIKE 'reg%';

-- Every table has a key, so that it can be published.
SELECT c.oid::regclass AS without_key FROM pg_class c
	WHERE c.relnamespace = 'outbox'::regnamespace AND c.relkind = 'r'
		AND NOT EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND indisprimary);

-- A dump keeps events, subscriptions and jobs with their sequences, and not which database is armed.
SELECT c.oid::regclass AS dumped FROM pg_extension e, unnest(e.extconfig) o JOIN pg_class c ON c.oid = o
	WHERE e.extname = 'outbox' ORDER BY c.oid::regclass::text;

-- It has one home.
ALTER EXTENSION outbox SET SCHEMA public;
SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE extname = 'outbox';

-- Settings: none that is unknown, none that a session may set
SET outbox.unknown = 1;
SET outbox.batch_size = 1;
SELECT name, setting, unit, context FROM pg_settings WHERE name LIKE 'outbox.%' ORDER BY name COLLATE "C";
