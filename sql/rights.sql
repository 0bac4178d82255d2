-- Rights: nothing to PUBLIC, what outbox.grant() gives and outbox.revoke()
-- takes, and what none of those who have them can do.
\set dbname :DBNAME
\set user :USER
CREATE ROLE outbox_rights_super LOGIN SUPERUSER;
CREATE ROLE outbox_rights_nobody;
CREATE ROLE outbox_rights_recorder;
CREATE ROLE outbox_rights_consumer;
CREATE ROLE outbox_rights_other;
CREATE ROLE outbox_rights_admin;
CREATE ROLE "outbox rights ""x"";--";
CREATE DATABASE outbox_rights TEMPLATE template0;
GRANT CREATE, TEMPORARY ON DATABASE outbox_rights TO outbox_rights_recorder, outbox_rights_consumer, outbox_rights_admin;
\c outbox_rights outbox_rights_super
CREATE EXTENSION outbox;
GRANT CREATE ON SCHEMA public TO PUBLIC;

-- Every privilege on an object of the schema that its owner has not
CREATE VIEW given AS
SELECT a.grantee, o.kind, o.name, o.sub, a.privilege_type, a.is_grantable
FROM (
	SELECT 'schema' AS kind, nspname AS name, NULL AS sub, coalesce(nspacl, acldefault('n', nspowner)) AS acl, nspowner AS owner
	FROM pg_namespace WHERE nspname = 'outbox'
	UNION ALL
	SELECT 'routine', proname, NULL, coalesce(proacl, acldefault('f', proowner)), proowner
	FROM pg_proc WHERE pronamespace = 'outbox'::regnamespace
	UNION ALL
	SELECT CASE relkind WHEN 'v' THEN 'view' WHEN 'S' THEN 'sequence' ELSE 'table' END, relname, NULL,
		coalesce(relacl, acldefault(CASE relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", relowner)), relowner
	FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND relkind IN ('r', 'v', 'm', 'S', 'f', 'p')
	UNION ALL
	SELECT 'column', c.relname, a.attname, a.attacl, c.relowner
	FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid WHERE c.relnamespace = 'outbox'::regnamespace
	UNION ALL
	SELECT 'type', typname, NULL, coalesce(typacl, acldefault('T', typowner)), typowner
	FROM pg_type t WHERE typnamespace = 'outbox'::regnamespace AND typelem = 0
		AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = t.typrelid AND c.relkind <> 'c')
) o, aclexplode(o.acl) a
WHERE a.grantee <> o.owner;
GRANT SELECT ON given TO PUBLIC;

-- As installed: nothing to anybody.
SELECT * FROM given;
-- No function runs as its owner by SECURITY DEFINER; views guard their rows,
-- and there is no row security that would stop pg_dump.
SELECT count(*) FILTER (WHERE prosecdef) AS definer, count(*) FILTER (WHERE proconfig IS NOT NULL) AS settings,
	count(*) - count(DISTINCT proname) AS overloaded, count(*) FILTER (WHERE prorettype = 'void'::regtype) AS void
FROM pg_proc WHERE pronamespace = 'outbox'::regnamespace;
SELECT relname FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND
	((relkind = 'v' AND NOT coalesce('security_barrier=true' = ANY(reloptions) OR 'security_barrier' = ANY(reloptions), false)) OR relrowsecurity);
-- Every object has a comment.
SELECT 'function' AS kind, proname AS name FROM pg_proc p
WHERE pronamespace = 'outbox'::regnamespace AND obj_description(oid, 'pg_proc') IS NULL
UNION ALL
SELECT 'relation', relname FROM pg_class
WHERE relnamespace = 'outbox'::regnamespace AND relkind IN ('r', 'v') AND obj_description(oid, 'pg_class') IS NULL
UNION ALL
SELECT 'column', relname || '.' || attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r' AND attnum > 0 AND NOT attisdropped
	AND col_description(c.oid, attnum) IS NULL;

-- Run a command as a role, undo it, and say how it ended.
CREATE FUNCTION try(role name, command text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text := 'ok';
BEGIN
	EXECUTE format('SET LOCAL ROLE %I', role);
	BEGIN
		EXECUTE command;
		RAISE EXCEPTION 'undo' USING ERRCODE = 'XX999';
	EXCEPTION
		WHEN SQLSTATE 'XX999' THEN NULL;
		WHEN OTHERS THEN result := SQLSTATE || ': ' || SQLERRM;
	END;
	RESET ROLE;
	RETURN result;
END $$;

-- A role with no rights, and one that may only name things in the schema: no
-- function, no table and no view is open to them.
CREATE VIEW calls AS
SELECT p.proname, format('%s outbox.%I(%s)', CASE p.prokind WHEN 'p' THEN 'CALL' ELSE 'SELECT' END, p.proname,
	(SELECT string_agg(CASE WHEN p.proisstrict THEN '''0''::' ELSE 'NULL::' END || format_type(t, NULL), ', ' ORDER BY n)
		FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY u (t, n))) AS call
FROM pg_proc p WHERE p.pronamespace = 'outbox'::regnamespace;
CREATE VIEW reads AS
SELECT relname, format(command, relname) AS command
FROM pg_class, (VALUES ('r', 'INSERT INTO outbox.%I DEFAULT VALUES'), ('r', 'DELETE FROM outbox.%I'), ('r', 'TRUNCATE outbox.%I'),
	('r', 'COMMENT ON TABLE outbox.%I IS NULL'), ('r', 'SELECT FROM outbox.%I'), ('r', 'LOCK outbox.%I'),
	('v', 'SELECT FROM outbox.%I'), ('v', 'LOCK outbox.%I'), ('v', 'COMMENT ON VIEW outbox.%I IS NULL'),
	('S', 'SELECT FROM outbox.%I'), ('S', $q$SELECT nextval('outbox.%I')$q$), ('S', $q$SELECT setval('outbox.%I', 1)$q$)) c (kind, command)
WHERE relnamespace = 'outbox'::regnamespace AND relkind::text = kind;
SELECT count(*) > 20 AS many, count(*) FILTER (WHERE try('outbox_rights_nobody', call) NOT LIKE '42501: permission denied for schema outbox') AS open FROM calls;
SELECT command, try('outbox_rights_nobody', command) FROM reads WHERE try('outbox_rights_nobody', command) <> '42501: permission denied for schema outbox';
GRANT USAGE ON SCHEMA outbox TO outbox_rights_nobody;
SELECT call, try('outbox_rights_nobody', call) FROM calls WHERE try('outbox_rights_nobody', call) NOT LIKE '42501: permission denied for %';
SELECT command, try('outbox_rights_nobody', command) FROM reads
WHERE try('outbox_rights_nobody', command) !~ '^42501: (permission denied for|must be owner of) ';
REVOKE USAGE ON SCHEMA outbox FROM outbox_rights_nobody;

-- What the three words give
SELECT outbox.grant('outbox_rights_recorder', 'record'), outbox.grant('outbox_rights_consumer', 'consume'),
	outbox.grant('outbox_rights_admin', 'admin'), outbox.grant('outbox_rights_other', 'consume');
SELECT substr(grantee::regrole::text, 15) AS role, kind, coalesce(name || '.' || sub, name) AS name, privilege_type, is_grantable
FROM given WHERE grantee <> 'outbox_rights_other'::regrole
ORDER BY grantee::regrole::text COLLATE "C", kind, name || '.' || sub, name;
-- TRIGGER, REFERENCES, TRUNCATE and the like are for nobody.
SELECT * FROM given WHERE privilege_type NOT IN ('USAGE', 'EXECUTE', 'SELECT', 'INSERT');
-- Again there is nothing to do.
SELECT outbox.grant('outbox_rights_recorder', 'record'), outbox.grant('outbox_rights_consumer', 'consume'),
	outbox.grant('outbox_rights_admin', 'admin');

-- A word taken leaves what another word needs, and nothing else.
CREATE FUNCTION state(role regrole) RETURNS text LANGUAGE sql AS $$
	SELECT coalesce(md5(string_agg(concat_ws('/', kind, name, sub, privilege_type), ' '
		ORDER BY concat_ws('/', kind, name, sub, privilege_type) COLLATE "C")), 'nothing')
	FROM given WHERE grantee = role
$$;
CREATE FUNCTION leaves(first text, second text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	who name := 'outbox_rights_nobody';
	alone text;
BEGIN
	PERFORM outbox.grant(who, first);
	alone := state(who::text::regrole);
	PERFORM outbox.grant(who, second);
	IF state(who::text::regrole) = alone THEN
		RETURN 'the second gives nothing';
	ELSIF NOT outbox.revoke(who, second) OR state(who::text::regrole) <> alone THEN
		RETURN 'not what the first gives';
	ELSIF outbox.revoke(who, second) THEN
		RETURN 'something was left of the second';
	ELSIF NOT outbox.revoke(who, first) OR state(who::text::regrole) <> 'nothing' THEN
		RETURN 'not nothing';
	END IF;
	RETURN 'right';
END $$;
SELECT a, b, leaves(a, b) FROM unnest('{record,consume,admin}'::text[]) a, unnest('{record,consume,admin}'::text[]) b
WHERE a <> b ORDER BY a, b;
SELECT outbox.revoke('outbox_rights_nobody', 'record'), state('outbox_rights_nobody');

-- Arguments, and who may call
SELECT n, command, try(role, command)
FROM (VALUES
	(1, 'outbox_rights_super', $$SELECT outbox.grant(NULL, 'record')$$),
	(2, 'outbox_rights_super', $$SELECT outbox.grant('outbox_rights_nobody', NULL)$$),
	(3, 'outbox_rights_super', $$SELECT outbox.grant('outbox_rights_nobody', '')$$),
	(4, 'outbox_rights_super', $$SELECT outbox.grant('outbox_rights_nobody', 'all')$$),
	(5, 'outbox_rights_super', $$SELECT outbox.grant('outbox_rights_nobody', 'webhook')$$),
	(6, 'outbox_rights_super', $$SELECT outbox.grant('public', 'record')$$),
	(7, 'outbox_rights_super', $$SELECT outbox.grant('PUBLIC', 'record')$$),
	(8, 'outbox_rights_super', $$SELECT outbox.grant('', 'record')$$),
	(9, 'outbox_rights_super', $$SELECT outbox.grant('outbox_rights_missing', 'record')$$),
	(10, 'outbox_rights_super', $$SELECT outbox.grant('outbox_rights_nobody, outbox_rights_admin', 'record')$$),
	(11, 'outbox_rights_super', $$SELECT outbox.grant('outbox rights "x";--', 'record')$$),
	(12, 'outbox_rights_super', $$SELECT outbox.grant('outbox_rights_super', 'record')$$),
	(13, 'outbox_rights_super', $$SELECT outbox.revoke('outbox_rights_super', 'record')$$),
	(14, 'outbox_rights_super', $$SELECT outbox.revoke(NULL, 'record')$$),
	(15, 'outbox_rights_super', $$SELECT outbox.revoke('public', 'record')$$),
	(16, 'outbox_rights_nobody', $$SELECT outbox.grant('outbox_rights_nobody', 'record')$$),
	(17, 'outbox_rights_admin', $$SELECT outbox.grant('outbox_rights_admin', 'record')$$),
	(18, 'outbox_rights_admin', $$SELECT outbox.revoke('outbox_rights_recorder', 'record')$$)
) t (n, role, command) ORDER BY n;
SELECT outbox.grant('outbox rights "x";--', 'record'), outbox.revoke('outbox rights "x";--', 'record');
-- EXECUTE on the function is not enough.
GRANT EXECUTE ON FUNCTION outbox.grant, outbox.revoke TO outbox_rights_admin;
SELECT try('outbox_rights_admin', $$SELECT outbox.grant('outbox_rights_admin', 'record')$$);
REVOKE EXECUTE ON FUNCTION outbox.grant, outbox.revoke FROM outbox_rights_admin;

-- Who records can neither forge marks nor the extension's events, nor read.
SELECT n, command, try('outbox_rights_recorder', command)
FROM (VALUES
	(1, $$SELECT outbox.record('a.b', 's', '{}', 't', '{}', now())$$),
	(2, $$INSERT INTO outbox.events (type, subject, payload) VALUES ('a.b', 's', '{}') RETURNING seq$$),
	(3, $$INSERT INTO outbox.events (type, subject, scope, payload, headers, not_before) VALUES ('a.b', 's', 't', '{}', '{}', now())$$),
	(4, $$INSERT INTO outbox.events (type) VALUES ('a.b') RETURNING payload$$),
	(5, $$INSERT INTO outbox.events (type, fanned_out_at) VALUES ('a.b', now())$$),
	(6, $$INSERT INTO outbox.events (type, fanout) VALUES ('a.b', '{}')$$),
	(7, $$INSERT INTO outbox.events (type, poisoned_at) VALUES ('a.b', now())$$),
	(8, $$INSERT INTO outbox.events (type, recorded_at) VALUES ('a.b', now())$$),
	(9, $$INSERT INTO outbox.events (seq, type) OVERRIDING SYSTEM VALUE VALUES (1, 'a.b')$$),
	(10, $$INSERT INTO outbox.events VALUES (DEFAULT, 'a.b')$$),
	(11, $$INSERT INTO outbox.events (type) VALUES ('a.b') ON CONFLICT DO NOTHING$$),
	(12, $$INSERT INTO outbox.events (type) VALUES ('a.b') ON CONFLICT (seq) DO UPDATE SET fanned_out_at = now()$$),
	(13, $$INSERT INTO outbox.events (type) VALUES ('outbox.event.poisoned')$$),
	(14, $$SELECT outbox.record('outbox.event.poisoned')$$),
	(15, $$SELECT payload FROM outbox.events$$),
	(16, $$SELECT seq FROM outbox.events$$),
	(17, $$UPDATE outbox.events SET payload = '{}'$$),
	(18, $$DELETE FROM outbox.events$$),
	(19, $$SELECT seq FROM outbox.events FOR UPDATE$$),
	(20, $$SELECT setval('outbox.events_seq_seq', 1)$$),
	(21, $$SELECT outbox.subscribe('mine')$$),
	(22, $$SELECT outbox.matching('a.b')$$),
	(23, $$SELECT * FROM outbox.poisoned$$),
	(24, $$SELECT * FROM outbox.event_status$$),
	(25, $$SELECT * FROM outbox.captures$$),
	(26, $$SELECT outbox.requeue(1)$$),
	(27, $$SELECT outbox.discard(1)$$),
	(28, $$SELECT outbox.stop()$$),
	(29, $$SELECT outbox.arm()$$),
	(30, $$SELECT outbox.check()$$)
) t (n, command) ORDER BY n;

-- Who consumes writes no table, and sees only what is his.
SET ROLE outbox_rights_other;
SELECT outbox.subscribe('other', '{a.*}') AS other \gset
RESET ROLE;
SET ROLE outbox_rights_consumer;
SELECT outbox.subscribe('mine', '{a.b}') AS mine \gset
RESET ROLE;
SET ROLE outbox_rights_recorder;
SELECT outbox.record('a.b', 'both') AS both \gset
SELECT outbox.record('a.c', 'other''s') AS others \gset
RESET ROLE;
CALL outbox.await_fanout(:both, '30s');
CALL outbox.await_fanout(:others, '30s');
SET ROLE outbox_rights_consumer;
SELECT subject, subscription, state FROM outbox.event_status ORDER BY seq, subscription;
SELECT subscription, state FROM outbox.job_status ORDER BY job;
SELECT name FROM outbox.stat_subscription;
SELECT outbox.matching('a.b');
RESET ROLE;
SET ROLE outbox_rights_admin;
SELECT subject, subscription, state FROM outbox.event_status ORDER BY seq, subscription;
SELECT subscription, state FROM outbox.job_status ORDER BY seq, subscription;
SELECT name FROM outbox.stat_subscription ORDER BY name;
SELECT count(*) FROM outbox.stat_relay WHERE database = current_database();
SELECT count(*) FROM outbox.poisoned;
SELECT outbox.stop(), outbox.start();
RESET ROLE;
SELECT n, command, try('outbox_rights_consumer', command)
FROM (VALUES
	(1, $$SELECT * FROM outbox.subscriptions$$),
	(2, $$UPDATE outbox.subscriptions SET owner = 'outbox_rights_super'$$),
	(3, $$INSERT INTO outbox.subscriptions (name, types, owner, owner_oid) VALUES ('x', '{*}', 'outbox_rights_super', 10)$$),
	(4, $$SELECT * FROM outbox.jobs$$),
	(5, $$UPDATE outbox.jobs SET attempts = 0$$),
	(6, $$SELECT * FROM outbox.events$$),
	(7, $$UPDATE outbox.routing SET version = 0$$),
	(8, $$DELETE FROM outbox.armed$$),
	(9, $$SELECT outbox.pause('other')$$),
	(10, $$SELECT outbox.unsubscribe('other')$$),
	(11, $$SELECT outbox.subscribe('other', '{x}')$$),
	(12, $$SELECT outbox.set_owner('mine', 'outbox_rights_super')$$),
	(13, $$SELECT outbox.adopt('other')$$),
	(14, $$SELECT outbox.record('a.b')$$),
	(15, $$SELECT outbox.relays()$$),
	(16, $$SELECT outbox.check()$$),
	(17, $$SELECT outbox.stop()$$),
	(18, $$SELECT outbox.requeue(1)$$),
	(19, $$SELECT outbox.routing_changed()$$),
	(20, $$CREATE TABLE t (); CREATE TRIGGER t AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION outbox.routing_changed()$$),
	(21, $$CREATE TABLE t (); CREATE TRIGGER t AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION outbox.capture_row()$$)
) t (n, command) ORDER BY n;
-- A function in the condition of a query does not see rows that a view hides.
CREATE FUNCTION leak(text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS $$
BEGIN
	RAISE NOTICE 'saw %', $1;
	RETURN true;
END $$;
SET ROLE outbox_rights_consumer;
SELECT subscription FROM outbox.job_status WHERE leak(subscription);
SELECT name FROM outbox.stat_subscription WHERE leak(name);
RESET ROLE;

-- Nobody but the owner can plant anything on the tables that the relay writes.
SELECT command, count(*) > 6 AS all_tables, count(*) FILTER (WHERE try(role, format(command, c.relname)) NOT LIKE '42501: %') AS possible
FROM pg_class c, unnest('{outbox_rights_recorder,outbox_rights_consumer,outbox_rights_admin}'::name[]) role,
	unnest(ARRAY[
		'CREATE TRIGGER planted BEFORE INSERT ON outbox.%I FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()',
		'CREATE RULE planted AS ON INSERT TO outbox.%I DO ALSO NOTHING',
		'CREATE POLICY planted ON outbox.%I USING (true)',
		'ALTER TABLE outbox.%I ENABLE ROW LEVEL SECURITY',
		'ALTER TABLE outbox.%I ADD CHECK (random() < 2)',
		'ALTER TABLE outbox.%I ADD COLUMN planted int DEFAULT random()',
		'ALTER TABLE outbox.%I DISABLE TRIGGER ALL',
		'ALTER TABLE outbox.%I OWNER TO CURRENT_USER',
		'ALTER TABLE outbox.%I SET SCHEMA public',
		'CREATE INDEX planted ON outbox.%I ((1))',
		'CREATE STATISTICS planted ON (1), (2) FROM outbox.%I',
		'CREATE TABLE planted () INHERITS (outbox.%I)',
		'COMMENT ON TABLE outbox.%I IS NULL',
		'GRANT ALL ON outbox.%I TO CURRENT_USER',
		'DROP TABLE outbox.%I']) WITH ORDINALITY t (command, n)
WHERE c.relnamespace = 'outbox'::regnamespace AND c.relkind = 'r'
GROUP BY n, command ORDER BY n;
SELECT command, try('outbox_rights_admin', command)
FROM unnest(ARRAY['CREATE TABLE outbox.planted ()', 'CREATE FUNCTION outbox.planted() RETURNS int LANGUAGE sql AS $$SELECT 1$$',
	'ALTER EXTENSION outbox DROP TABLE outbox.events', 'DROP EXTENSION outbox CASCADE', 'DROP SCHEMA outbox CASCADE',
	'ALTER FUNCTION outbox.record OWNER TO CURRENT_USER', 'ALTER FUNCTION outbox.record STABLE']) WITH ORDINALITY t (command, n)
ORDER BY n;

-- With the words taken, roles own and have nothing here, and can be dropped.
SELECT outbox.unsubscribe('mine'), outbox.unsubscribe('other');
SELECT outbox.revoke('outbox_rights_recorder', 'record'), outbox.revoke('outbox_rights_consumer', 'consume'),
	outbox.revoke('outbox_rights_admin', 'admin'), outbox.revoke('outbox_rights_other', 'consume');
SELECT * FROM given;
\c :dbname :user
DROP DATABASE outbox_rights;
DROP ROLE outbox_rights_super, outbox_rights_nobody, outbox_rights_recorder, outbox_rights_consumer, outbox_rights_other,
	outbox_rights_admin, "outbox rights ""x"";--";
