-- Subscriptions: made, restated, changed and ended.  In a database of its own,
-- because a new one has to be armed by the first subscription.
\set dbname :DBNAME
\set user :USER
CREATE ROLE outbox_subscribe_super LOGIN SUPERUSER;
CREATE ROLE outbox_subscribe_alice;
CREATE ROLE outbox_subscribe_bob;
CREATE ROLE outbox_subscribe_team;
CREATE ROLE outbox_subscribe_admin;
CREATE ROLE outbox_subscribe_old;
GRANT outbox_subscribe_team TO outbox_subscribe_alice, outbox_subscribe_bob;
CREATE DATABASE outbox_subscribe TEMPLATE template0;
\c outbox_subscribe outbox_subscribe_super
SET IntervalStyle = 'postgres';
CREATE EXTENSION outbox;
SELECT outbox.grant(r, 'consume')
FROM unnest('{outbox_subscribe_alice,outbox_subscribe_bob,outbox_subscribe_team,outbox_subscribe_old}'::name[]) r;
SELECT outbox.grant('outbox_subscribe_admin', 'admin');

-- The first subscription arms the database, so that events recorded before are
-- fanned out; not one that is rolled back.
SELECT outbox.record('early.bird') AS early \gset
BEGIN;
SELECT outbox.subscribe('gone') IS NOT NULL AS subscribed;
SELECT count(*) AS armed FROM outbox.armed;
ROLLBACK;
SELECT count(*) AS armed FROM outbox.armed;
SELECT outbox.subscribe('first', '{early.*}') AS first \gset
CALL outbox.await_fanout(:early, '30s');
SELECT database = (SELECT oid FROM pg_database WHERE datname = current_database()) AS ours, stopped_at
FROM outbox.armed;
SELECT ARRAY(SELECT jsonb_object_keys(fanout)) AS fanout FROM outbox.events WHERE seq = :early;

-- When there are subscriptions already, as after a restore, it does not.
BEGIN;
DELETE FROM outbox.armed;
SELECT outbox.subscribe('second') IS NOT NULL AS subscribed;
SELECT count(*) AS armed FROM outbox.armed;
ROLLBACK;
-- Nor when another database's row is there, as in a copy.
BEGIN;
DELETE FROM outbox.subscriptions;
UPDATE outbox.armed SET database = 1;
SELECT outbox.subscribe('second') IS NOT NULL AS subscribed;
SELECT database FROM outbox.armed;
ROLLBACK;

-- Defaults
SELECT outbox.subscribe('plain') AS plain \gset
SELECT name, types, scope, filter, coalescing, ordered, sink, handler, options, max_attempts, retry_min, retry_max,
	lease, owner = current_user AS ours, owner_oid = 'outbox_subscribe_super'::regrole AS our_oid, paused_at
FROM outbox.subscriptions WHERE name = 'plain' \gx

-- The whole definition is restated: arguments left out go back to their
-- defaults; id, owner, pause and time of making stay.
SELECT outbox.subscribe('plain', '{order.*,!order.deleted}', 't1', '$.total > 100', true, true,
	options => '{"a":1}', max_attempts => 3, retry_min => '1s', retry_max => '2min', lease => '1h') = :plain AS same;
SELECT outbox.pause('plain');
SELECT name, types, scope, filter, coalescing, ordered, options, max_attempts, retry_min, retry_max, lease,
	paused_at IS NOT NULL AS paused
FROM outbox.subscriptions WHERE name = 'plain' \gx
SELECT created_at FROM outbox.subscriptions WHERE name = 'plain' \gset
SELECT outbox.subscribe('plain', coalescing => true) = :plain AS same;
SELECT name, types, scope, filter, coalescing, ordered, options, max_attempts, retry_min, retry_max, lease,
	paused_at IS NOT NULL AS paused, created_at = :'created_at' AS same_time
FROM outbox.subscriptions WHERE name = 'plain' \gx

-- Repeating a definition writes and locks nothing.
BEGIN;
SELECT outbox.subscribe('plain', coalescing => true) = :plain AS same;
SELECT pg_current_xact_id_if_assigned() IS NULL AS nothing_written;
ROLLBACK;

-- Every change raises the version by which relays know that the set is another.
CREATE FUNCTION pg_temp.raised(command text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	before bigint;
BEGIN
	SELECT version INTO before FROM outbox.routing;
	EXECUTE command;
	RETURN (SELECT version - before FROM outbox.routing);
END $$;
BEGIN;
SELECT n, command, pg_temp.raised(command) AS raised
FROM (VALUES
	(1, $$SELECT outbox.subscribe('plain', coalescing => true)$$),
	(2, $$SELECT outbox.subscribe('plain')$$),
	(3, $$SELECT outbox.subscribe('plain')$$),
	(4, $$SELECT outbox.subscribe('plain', '{*,!a}')$$),
	(5, $$SELECT outbox.subscribe('plain', '{*,!a}', 't1')$$),
	(6, $$SELECT outbox.subscribe('plain', '{*,!a}', 't1')$$),
	(7, $$SELECT outbox.subscribe('plain', '{*,!a}', 't1', '$.a')$$),
	(8, $$SELECT outbox.subscribe('plain', '{*,!a}', 't1', '$.a')$$),
	(9, $$SELECT outbox.subscribe('plain', '{*,!a}', 't1', '$.b')$$),
	(10, $$SELECT outbox.subscribe('plain', '{*,!a}', '', '$.b')$$),
	(11, $$SELECT outbox.subscribe('plain', ordered => true)$$),
	(12, $$SELECT outbox.subscribe('plain', options => '{"a":1}')$$),
	(13, $$SELECT outbox.subscribe('plain', max_attempts => 11)$$),
	(14, $$SELECT outbox.subscribe('plain', retry_min => '0')$$),
	(15, $$SELECT outbox.subscribe('plain', retry_max => '2h')$$),
	(16, $$SELECT outbox.subscribe('plain', lease => '24h')$$),
	(17, $$SELECT outbox.subscribe('plain', lease => '1 day')$$),
	(18, $$SELECT outbox.pause('first')$$),
	(19, $$SELECT outbox.pause('first')$$),
	(20, $$SELECT outbox.resume('first')$$),
	(21, $$SELECT outbox.rename('first', 'f')$$),
	(22, $$SELECT outbox.rename('f', 'f')$$),
	(23, $$SELECT outbox.set_owner('f', 'outbox_subscribe_bob')$$),
	(24, $$SELECT outbox.unsubscribe('f')$$),
	(25, $$SELECT outbox.unsubscribe('f')$$),
	(26, $$SELECT outbox.subscribe('f')$$),
	(27, $$UPDATE outbox.subscriptions SET max_attempts = 1$$),
	(28, $$TRUNCATE outbox.subscriptions$$)
) t (n, command)
ORDER BY n;
ROLLBACK;

-- The version is raised however rows are written, and only by the trigger.
BEGIN;
SET LOCAL session_replication_role = replica;
SELECT pg_temp.raised($$UPDATE outbox.subscriptions SET max_attempts = 1$$) AS raised;
ROLLBACK;
SELECT outbox.routing_changed();

-- Arguments: null, empty, least, most and wrong
CREATE FUNCTION pg_temp.outcome(command text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text;
	detail text;
	hint text;
BEGIN
	EXECUTE command INTO result;
	RETURN 'returned ' || coalesce(result, 'null');
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	RETURN concat_ws(' / ', SQLSTATE || ': ' || SQLERRM, nullif(detail, ''), nullif(hint, ''));
END $$;
BEGIN;
SELECT n, arguments, regexp_replace(pg_temp.outcome('SELECT outbox.subscribe(' || arguments || ') > 0'), 'x{20,}', '...') AS outcome
FROM (VALUES
	(1, $$NULL$$),
	(2, $$''$$),
	(3, $$repeat('x', 255)$$),
	(4, $$repeat('x', 256)$$),
	(5, $$E'a\nb'$$),
	(6, $$' a "b" ''c'' %s%n $x$ '$$),
	(7, $$'x'); DROP TABLE outbox.events;--'$$),
	(10, $$'a', NULL$$),
	(11, $$'a', '{}'$$),
	(20, $$'a', scope => ''$$),
	(21, $$'a', scope => repeat('x', 16384)$$),
	(22, $$'a', scope => repeat('x', 16385)$$),
	(30, $$'a', filter => '$.a['$$),
	(31, $$'a', filter => ('$."' || repeat('x', 70000) || '"')::jsonpath$$),
	(40, $$'a', coalescing => NULL$$),
	(41, $$'a', ordered => NULL$$),
	(50, $$'a', handler => 'f'$$),
	(51, $$'a', sink => 'f'$$),
	(52, $$'a', handler => 'f', sink => 'g'$$),
	(60, $$'a', options => NULL$$),
	(61, $$'a', options => '[]'$$),
	(62, $$'a', options => '"a"'$$),
	(63, $$'a', options => jsonb_build_object('a', repeat('x', 70000))$$),
	(70, $$'a', max_attempts => NULL$$),
	(71, $$'a', max_attempts => 0$$),
	(72, $$'a', max_attempts => -1$$),
	(73, $$'a', max_attempts => 2147483647$$),
	(80, $$'a', retry_min => NULL$$),
	(81, $$'a', retry_min => '-1s'$$),
	(82, $$'a', retry_min => '0'$$),
	(83, $$'a', retry_min => '1 day -1s'$$),
	(84, $$'a', retry_min => '61min'$$),
	(85, $$'a', retry_min => '1 month', retry_max => '1 month'$$),
	(86, $$'a', retry_min => '1 month', retry_max => '29 days'$$),
	(90, $$'a', retry_max => NULL$$),
	(91, $$'a', retry_max => '178000000 years'$$),
	(92, $$'a', retry_max => '366 days'$$),
	(93, $$'a', retry_max => '366 days 1us'$$),
	(100, $$'a', lease => NULL$$),
	(101, $$'a', lease => '0'$$),
	(102, $$'a', lease => '-5min'$$),
	(103, $$'a', lease => '1us'$$),
	(104, $$'a', lease => '2 years'$$)
) t (n, arguments)
ORDER BY n;
SELECT n, command, regexp_replace(pg_temp.outcome('SELECT outbox.' || command), 'x{20,}', '...') AS outcome
FROM (VALUES
	(1, $$unsubscribe(NULL)$$),
	(2, $$unsubscribe('')$$),
	(3, $$unsubscribe('nobody')$$),
	(4, $$pause(NULL)$$),
	(5, $$pause('nobody')$$),
	(6, $$resume(NULL)$$),
	(7, $$resume('nobody')$$),
	(8, $$resume('first')$$),
	(9, $$rename(NULL, 'a')$$),
	(10, $$rename('first', NULL)$$),
	(11, $$rename('first', '')$$),
	(12, $$rename('first', repeat('x', 256))$$),
	(13, $$rename('first', 'plain')$$),
	(14, $$rename('first', 'first')$$),
	(15, $$rename('nobody', 'a')$$),
	(16, $$set_owner(NULL, 'outbox_subscribe_super')$$),
	(17, $$set_owner('first', NULL)$$),
	(18, $$set_owner('first', 'nobody')$$),
	(19, $$set_owner('first', current_user)$$),
	(20, $$set_owner('nobody', current_user)$$),
	(21, $$adopt(NULL)$$),
	(22, $$adopt('nobody')$$),
	(23, $$adopt('first')$$),
	(24, $$visible(NULL, NULL)$$),
	(25, $$visible('nobody', 0)$$)
) t (n, command)
ORDER BY n;
ROLLBACK;

-- Ended and made again it is another one; jobs of the old one are invisible.
SELECT subscription, state FROM outbox.job_status WHERE seq = :early;
SELECT outbox.unsubscribe('first');
SELECT subscription, state FROM outbox.job_status WHERE seq = :early;
SELECT subscription, state FROM outbox.event_status WHERE seq = :early;
SELECT outbox.subscribe('first', '{early.*}') > :first AS another;
SELECT subscription, state FROM outbox.job_status WHERE seq = :early;
SELECT waiting FROM outbox.stat_subscription WHERE name = 'first';

-- A renamed one keeps its jobs, a paused one still gets them.
SELECT outbox.pause('first');
SELECT outbox.record('early.riser') AS seq \gset
CALL outbox.await_fanout(:seq, '30s');
SELECT outbox.rename('first', 'renamed');
SELECT name, state, waiting FROM outbox.stat_subscription ORDER BY name;
SELECT subscription, state FROM outbox.job_status WHERE seq = :seq;
SELECT outbox.resume('renamed');
SELECT name, state, waiting FROM outbox.stat_subscription ORDER BY name;

-- Who may change what: the owner, members of the owner, an administrator, a
-- superuser.
SET ROLE outbox_subscribe_alice;
SELECT outbox.subscribe('mine') > 0 AS subscribed;
SET ROLE outbox_subscribe_team;
SELECT outbox.subscribe('ours') > 0 AS subscribed;
RESET ROLE;
SELECT name, owner FROM outbox.subscriptions ORDER BY name;

CREATE FUNCTION pg_temp.may(role text, command text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text;
BEGIN
	EXECUTE format('SET LOCAL ROLE %I', role);
	BEGIN
		EXECUTE 'SELECT outbox.' || command INTO result;
		RAISE EXCEPTION 'undo' USING ERRCODE = 'XX999';
	EXCEPTION
		WHEN SQLSTATE 'XX999' THEN
			result := 'yes: ' || result;
		WHEN OTHERS THEN
			result := SQLSTATE || ': ' || SQLERRM;
	END;
	RESET ROLE;
	RETURN result;
END $$;
SELECT command, role, pg_temp.may('outbox_subscribe_' || role, command)
FROM (VALUES
	(1, $$subscribe('mine', '{a}') > 0$$),
	(2, $$pause('mine')$$),
	(3, $$resume('mine')$$),
	(4, $$rename('mine', 'm')$$),
	(5, $$unsubscribe('mine')$$),
	(6, $$subscribe('ours', '{a}') > 0$$),
	(7, $$pause('ours')$$),
	(8, $$unsubscribe('ours')$$),
	(9, $$unsubscribe('renamed')$$)
) c (n, command), (VALUES (1, 'alice'), (2, 'bob'), (3, 'admin')) r (m, role)
ORDER BY n, m;
SELECT command, role, pg_temp.may('outbox_subscribe_' || role, command)
FROM (VALUES
	(1, $$set_owner('mine', 'outbox_subscribe_alice')$$),
	(2, $$set_owner('mine', 'outbox_subscribe_bob')$$),
	(3, $$set_owner('mine', 'outbox_subscribe_team')$$),
	(4, $$set_owner('mine', 'outbox_subscribe_super')$$),
	(5, $$set_owner('renamed', 'outbox_subscribe_bob')$$),
	(6, $$adopt('mine')$$),
	(7, $$adopt('renamed')$$)
) c (n, command), (VALUES (1, 'alice'), (2, 'bob'), (3, 'admin')) r (m, role)
ORDER BY n, m;

-- What they see
SELECT role, s.name, pg_temp.may('outbox_subscribe_' || role, format('visible(%L, %s)', s.owner, s.owner_oid)) AS visible
FROM outbox.subscriptions s, (VALUES (1, 'alice'), (2, 'bob'), (3, 'admin')) r (m, role)
ORDER BY m, s.name;
SET ROLE outbox_subscribe_bob;
SELECT name FROM outbox.stat_subscription ORDER BY name;
SELECT outbox.matching('early.bird');
SET ROLE outbox_subscribe_alice;
SELECT name FROM outbox.stat_subscription ORDER BY name;
SELECT outbox.matching('early.bird');
RESET ROLE;

-- A name alone is not the owner: neither a role made anew under that name, nor
-- one that was given another.
SET ROLE outbox_subscribe_old;
SELECT outbox.subscribe('orphan') > 0 AS subscribed;
RESET ROLE;
SELECT outbox.revoke('outbox_subscribe_old', 'consume');
DROP ROLE outbox_subscribe_old;
SELECT name, state FROM outbox.stat_subscription WHERE name = 'orphan';
SELECT pg_temp.outcome($$SELECT outbox.adopt('orphan')$$);
CREATE ROLE outbox_subscribe_old;
SELECT outbox.grant('outbox_subscribe_old', 'consume');
SELECT name, state FROM outbox.stat_subscription WHERE name = 'orphan';
SELECT command, role, pg_temp.may('outbox_subscribe_' || role, command)
FROM (VALUES (1, $$pause('orphan')$$), (2, $$subscribe('orphan', '{a}') > 0$$),
	(3, $$set_owner('orphan', 'outbox_subscribe_old')$$), (4, $$set_owner('orphan', 'outbox_subscribe_admin')$$),
	(5, $$adopt('orphan')$$)) c (n, command),
	(VALUES (1, 'alice'), (2, 'old'), (3, 'admin')) r (m, role)
ORDER BY n, m;
SET ROLE outbox_subscribe_old;
SELECT name FROM outbox.stat_subscription ORDER BY name;
SELECT outbox.matching('early.bird');
SELECT outbox.pause('orphan');
SELECT outbox.adopt('orphan');
SELECT outbox.adopt('orphan');
SELECT name FROM outbox.stat_subscription ORDER BY name;
SELECT outbox.pause('orphan');
RESET ROLE;
ALTER ROLE outbox_subscribe_old RENAME TO outbox_subscribe_new;
SELECT name, state FROM outbox.stat_subscription WHERE name = 'orphan';
SELECT pg_temp.may('outbox_subscribe_new', $$pause('orphan')$$);
SELECT outbox.set_owner('orphan', 'outbox_subscribe_new');
SELECT pg_temp.may('outbox_subscribe_new', $$resume('orphan')$$);

-- In a read-only transaction nothing can be changed.
BEGIN READ ONLY;
SELECT outbox.pause('mine');
ROLLBACK;

\c :dbname :user
DROP DATABASE outbox_subscribe;
DROP ROLE outbox_subscribe_super, outbox_subscribe_alice, outbox_subscribe_bob, outbox_subscribe_team, outbox_subscribe_admin, outbox_subscribe_new;
