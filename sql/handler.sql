-- Handlers: how they are stated, by whom and for whom, and what they do.  In a
-- database of its own.
\set dbname :DBNAME
\set user :USER
CREATE ROLE outbox_handler_super LOGIN SUPERUSER;
CREATE ROLE outbox_handler_alice LOGIN;
CREATE ROLE outbox_handler_bob LOGIN;
CREATE ROLE outbox_handler_team LOGIN;
CREATE ROLE outbox_handler_admin LOGIN;
CREATE ROLE outbox_handler_nologin;
GRANT outbox_handler_team TO outbox_handler_alice;
GRANT outbox_handler_alice, outbox_handler_bob TO outbox_handler_admin;
CREATE DATABASE outbox_handler TEMPLATE template0;
\c outbox_handler outbox_handler_super
CREATE EXTENSION outbox;
SELECT outbox.grant(r, 'consume') AND outbox.grant(r, 'record') AS granted
FROM unnest('{outbox_handler_alice,outbox_handler_bob,outbox_handler_team,outbox_handler_nologin}'::name[]) r;
SELECT outbox.grant('outbox_handler_admin', 'admin');
CREATE SCHEMA app;
GRANT USAGE ON SCHEMA app TO PUBLIC;
GRANT CREATE ON SCHEMA app TO outbox_handler_alice;
CREATE SCHEMA "Mixed Case";
GRANT USAGE ON SCHEMA "Mixed Case" TO PUBLIC;
CREATE SCHEMA hidden;

SET ROLE outbox_handler_alice;
CREATE TABLE app.handled (seq bigint, attempt int, role name, session_role name);
GRANT INSERT ON app.handled TO PUBLIC;
CREATE FUNCTION app.note(e outbox.event) RETURNS void LANGUAGE sql
	AS 'INSERT INTO app.handled VALUES (e.seq, outbox.current_attempt(), current_user, session_user)';
CREATE FUNCTION app.other(e outbox.event) RETURNS int LANGUAGE sql RETURN 1;
CREATE FUNCTION app.wrong(e jsonb) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION app.more(e outbox.event, n int DEFAULT 1) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION app.many(e outbox.event) RETURNS SETOF int LANGUAGE sql RETURN 1;
CREATE PROCEDURE app.proc(e outbox.event) LANGUAGE sql AS '';
CREATE AGGREGATE app.agg(outbox.event) (SFUNC = array_append, STYPE = outbox.event[]);
CREATE FUNCTION app.private(e outbox.event) RETURNS void LANGUAGE sql AS '';
REVOKE EXECUTE ON FUNCTION app.private FROM PUBLIC;
CREATE FUNCTION pg_temp.gone(e outbox.event) RETURNS void LANGUAGE sql AS '';
RESET ROLE;
CREATE FUNCTION "Mixed Case"."Handler ""x"""(e outbox.event) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION hidden.h(e outbox.event) RETURNS void LANGUAGE sql AS '';

CREATE FUNCTION pg_temp.outcome(command text, role name DEFAULT 'outbox_handler_alice') RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text;
	detail text;
	hint text;
BEGIN
	EXECUTE format('SET LOCAL ROLE %I', role);
	EXECUTE 'SELECT outbox.' || command INTO result;
	RESET ROLE;
	RETURN 'returned ' || coalesce(result, 'null');
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	RETURN concat_ws(' / ', SQLSTATE || ': ' || SQLERRM, nullif(detail, ''), nullif(hint, ''));
END $$;

-- Names as they are stated and as they are kept
CREATE TABLE pg_temp.stated AS SELECT * FROM (VALUES
	(1, 'app.note', ''),
	(2, 'APP.Note', ''),
	(3, ' app . note ', ''),
	(4, 'note', ''),
	(5, 'note', 'app'),
	(6, 'outbox_handler.app.note', ''),
	(7, 'other_database.app.note', ''),
	(8, '"Mixed Case"."Handler ""x"""', ''),
	(9, '"Handler ""x"""', '"Mixed Case"'),
	(10, 'Mixed Case.h', ''),
	(11, '', ''),
	(12, '.', ''),
	(13, 'a.b.c.d', ''),
	(14, 'app.nothing', ''),
	(15, 'nothing.note', ''),
	(16, 'hidden.h', ''),
	(20, 'app.wrong', ''),
	(21, 'app.more', ''),
	(22, 'app.many', ''),
	(23, 'app.proc', ''),
	(24, 'app.agg', ''),
	(25, 'app.private', ''),
	(26, 'pg_catalog.now', ''),
	(27, 'app.note''); DROP TABLE outbox.events;--', '')
) t (n, handler, path);
CREATE FUNCTION pg_temp.state(name text, handler text, path text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM set_config('search_path', path, true);
	RETURN pg_temp.outcome(format('subscribe(%L, handler => %L) > 0', name, handler));
END $$;
BEGIN;
SELECT n, handler, path, pg_temp.state('h' || n, handler, path) AS outcome FROM pg_temp.stated ORDER BY n;
SELECT n, s.handler AS kept, s.handler_oid::regprocedure AS bound
FROM pg_temp.stated t JOIN outbox.subscriptions s ON s.name = 'h' || t.n ORDER BY n;
ROLLBACK;
SELECT regexp_replace(pg_temp.outcome($$subscribe('t', handler => 'pg_temp.gone')$$), 'pg_temp_\d+', 'pg_temp_N');

-- An overload beside it does not disturb, whose search_path does not matter later
SELECT outbox.subscribe('first', '{first.*}') AS first \gset
SET ROLE outbox_handler_alice;
SET search_path = app;
SELECT outbox.subscribe('noted', '{noted.*}', handler => 'note') AS noted \gset
CREATE FUNCTION app.note(e jsonb) RETURNS void LANGUAGE sql AS 'SELECT 1 / 0';
CREATE FUNCTION app.note(e anyelement) RETURNS void LANGUAGE sql AS 'SELECT 1 / 0';
RESET search_path;
SELECT outbox.subscribe('noted', '{noted.*}', handler => 'app.note') = :noted AS same;
SELECT outbox.record('noted.a') AS seq \gset
CALL outbox.await_idle('noted', '60s');
SELECT seq = :seq AS this, attempt, role, session_role FROM app.handled;
SELECT subscription, state, attempts, last_error FROM outbox.job_status WHERE seq = :seq;
SELECT outbox.current_attempt();
RESET ROLE;

-- Stated again: the same changes nothing, another one or none does.
BEGIN;
CREATE FUNCTION pg_temp.raised(command text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	before bigint;
BEGIN
	SELECT version INTO before FROM outbox.routing;
	EXECUTE command;
	RETURN (SELECT version - before FROM outbox.routing);
END $$;
SELECT n, command, pg_temp.raised(command) AS raised
FROM (VALUES
	(1, $$SELECT outbox.subscribe('noted', '{noted.*}', handler => 'app.note')$$),
	(2, $$SELECT outbox.subscribe('noted', '{noted.*}', handler => 'app.other')$$),
	(3, $$SELECT outbox.subscribe('noted', '{noted.*}', handler => 'app.other')$$),
	(4, $$SELECT outbox.subscribe('noted', '{noted.*}')$$),
	(5, $$SELECT outbox.subscribe('noted', '{noted.*}')$$),
	(6, $$SELECT outbox.subscribe('noted', '{noted.*}', handler => 'app.note')$$)
) t (n, command)
ORDER BY n;
SELECT handler, handler_oid FROM outbox.subscriptions WHERE name = 'first';
ROLLBACK;

-- Who may give a subscription a handler: who has the rights of its owner.
SET ROLE outbox_handler_team;
SELECT outbox.subscribe('ours', '{ours.*}') > 0 AS subscribed;
SELECT outbox.subscribe('handled', '{handled.*}', handler => 'app.note') > 0 AS subscribed;
RESET ROLE;
BEGIN;
REVOKE outbox_handler_alice FROM outbox_handler_admin;
SELECT n, role, command, pg_temp.outcome(command, 'outbox_handler_' || role) AS outcome
FROM (VALUES
	(1, 'alice', $$subscribe('ours', '{ours.*}', handler => 'app.note') > 0$$),
	(2, 'bob', $$subscribe('ours', '{ours.*}', handler => 'app.note') > 0$$),
	(3, 'admin', $$subscribe('ours', '{ours.*}', handler => 'app.other') > 0$$),
	(4, 'admin', $$subscribe('ours', '{ours.*,more.*}', handler => 'app.note') > 0$$),
	(5, 'admin', $$subscribe('handled', '{more.*}', handler => 'app.note') > 0$$),
	(6, 'admin', $$subscribe('handled', '{more.*}', handler => 'app.other') > 0$$),
	(7, 'admin', $$subscribe('handled', '{more.*}') > 0$$),
	(8, 'admin', $$subscribe('handled', '{more.*}', handler => 'app.note') > 0$$),
	(9, 'super', $$subscribe('handled', '{more.*}', handler => 'app.note') > 0$$),
	(10, 'super', $$subscribe('handled', '{more.*}', handler => 'app.private') > 0$$)
) t (n, role, command)
ORDER BY n;
ROLLBACK;

-- The owner must be able to run it.
REVOKE CONNECT ON DATABASE outbox_handler FROM PUBLIC;
GRANT CONNECT ON DATABASE outbox_handler TO outbox_handler_alice;
SELECT pg_temp.outcome($$subscribe('b', handler => 'app.note') > 0$$, 'outbox_handler_bob');
GRANT CONNECT ON DATABASE outbox_handler TO PUBLIC;
SELECT CASE WHEN current_setting('server_version_num')::int < 170000
	THEN o = '42501: role "outbox_handler_nologin" may not log in, as its handlers have to before PostgreSQL 17 / Give it LOGIN; without a password nobody else can log in as that role.'
	ELSE o = 'returned true' END AS as_expected
FROM pg_temp.outcome($$subscribe('n', '{n.*}', handler => 'app.note') > 0$$, 'outbox_handler_nologin') o;

-- Given to another, who must be able to run it too.
SELECT n, role, command, pg_temp.outcome(command, 'outbox_handler_' || role) AS outcome
FROM (VALUES
	(1, 'alice', $$subscribe('private', '{private.*}', handler => 'app.private') > 0$$),
	(2, 'admin', $$set_owner('private', 'outbox_handler_bob')$$),
	(3, 'alice', $$set_owner('noted', 'outbox_handler_bob')$$),
	(4, 'admin', $$set_owner('noted', 'outbox_handler_bob')$$),
	(5, 'admin', $$set_owner('noted', 'outbox_handler_bob')$$)
) t (n, role, command)
ORDER BY n;
SELECT outbox.record('noted.b') AS seq \gset
CALL outbox.await_idle('noted', '60s');
SELECT seq = :seq AS this, attempt, role, session_role FROM app.handled ORDER BY seq DESC LIMIT 1;

-- A function made anew is another one, until it is adopted or stated again.
SELECT outbox.pause('noted');
SET ROLE outbox_handler_alice;
DROP FUNCTION app.note(outbox.event);
RESET ROLE;
SELECT pg_temp.outcome($$set_owner('noted', 'outbox_handler_alice')$$, 'outbox_handler_super');
SELECT pg_temp.outcome($$adopt('noted')$$, 'outbox_handler_bob');
SET ROLE outbox_handler_alice;
CREATE FUNCTION app.note(e outbox.event) RETURNS void LANGUAGE sql
	AS 'INSERT INTO app.handled VALUES (e.seq, 1000, current_user, session_user)';
RESET ROLE;
SELECT pg_temp.outcome($$set_owner('noted', 'outbox_handler_alice')$$, 'outbox_handler_super');
SELECT pg_temp.outcome($$adopt('noted')$$, 'outbox_handler_alice');
SELECT pg_temp.outcome($$adopt('noted')$$, 'outbox_handler_bob');
SELECT pg_temp.outcome($$adopt('noted')$$, 'outbox_handler_bob');
SELECT outbox.resume('noted');
SELECT outbox.record('noted.c') AS seq \gset
CALL outbox.await_idle('noted', '60s');
SELECT seq = :seq AS this, attempt, role, session_role FROM app.handled ORDER BY seq DESC LIMIT 1;

-- Channels of their own
SELECT options, pg_temp.outcome(format('subscribe(%L, options => %L) > 0', 'channel', options)) AS outcome
FROM (VALUES
	(1, '{"notify": "jobs"}'),
	(2, '{"notify": ""}'),
	(3, '{"notify": 1}'),
	(4, '{"notify": null}'),
	(5, '{"notify": ["jobs"]}'),
	(6, '{"Notify": 1}'),
	(7, jsonb_build_object('notify', repeat('x', 63))::text),
	(8, jsonb_build_object('notify', repeat('x', 64))::text)
) t (n, options)
ORDER BY n;

\c :dbname :user
DROP DATABASE outbox_handler;
DROP ROLE outbox_handler_super, outbox_handler_alice, outbox_handler_bob, outbox_handler_team, outbox_handler_admin, outbox_handler_nologin;
