-- Jobs and roles: who may work with the jobs of a subscription, and who sees
-- them.  In a database of its own.
\set dbname :DBNAME
\set user :USER
CREATE ROLE outbox_job_super LOGIN SUPERUSER;
CREATE ROLE outbox_job_owner;
CREATE ROLE outbox_job_member IN ROLE outbox_job_owner;
CREATE ROLE outbox_job_noinherit NOINHERIT IN ROLE outbox_job_owner;
CREATE ROLE outbox_job_other;
CREATE ROLE outbox_job_admin;
CREATE ROLE outbox_job_nobody;
CREATE DATABASE outbox_job_rights TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C';
\c outbox_job_rights outbox_job_super
CREATE EXTENSION outbox;
SET client_min_messages = error;
SELECT outbox.grant('outbox_job_owner', 'consume'), outbox.grant('outbox_job_noinherit', 'consume'), outbox.grant('outbox_job_other', 'consume'), outbox.grant('outbox_job_admin', 'admin');
SET ROLE outbox_job_owner;
SELECT outbox.subscribe('owned', '{a}', ordered => true, max_attempts => 3, lease => '1 hour') AS owned;
RESET ROLE;
SET ROLE outbox_job_other;
SELECT outbox.subscribe('others', '{a}', max_attempts => 3, lease => '1 hour') AS others;
RESET ROLE;

-- Jobs of both: 1 dead, 2 done, 3 and 4 running, 5 waiting behind 4
CREATE PROCEDURE make(subjects text) LANGUAGE plpgsql AS $$
DECLARE
	seq bigint;
	outcome text;
BEGIN
	SELECT max(outbox.record('a', s)) INTO seq FROM unnest(string_to_array(subjects, ' ')) s;
	COMMIT;
	CALL outbox.await_fanout(seq, '60s', outcome);
END $$;
CALL make('1 2 3 4 4');
SET ROLE outbox_job_owner;
SELECT subject, attempt FROM outbox.claim('owned', 10) ORDER BY seq;
RESET ROLE;
SET ROLE outbox_job_other;
SELECT subject, attempt FROM outbox.claim('others', 4) ORDER BY seq;
RESET ROLE;
CREATE FUNCTION job(subscription text, subject text) RETURNS bigint LANGUAGE sql SECURITY DEFINER AS $$
	SELECT min(j.id) FROM outbox.jobs j JOIN outbox.events e ON e.seq = j.event_seq JOIN outbox.subscriptions s ON s.id = j.subscription_id
	WHERE s.name = job.subscription AND e.subject = job.subject
$$;
CREATE FUNCTION claim(subscription text) RETURNS bigint LANGUAGE sql SECURITY DEFINER AS $$
	SELECT claim FROM outbox.jobs WHERE id = public.job(claim.subscription, '3')
$$;
GRANT ALL ON FUNCTION job, claim TO PUBLIC;
SELECT s, outbox.complete(job(s, '2'), claim(s)), outbox.fail(job(s, '1'), claim(s), 'e', final => true) FROM unnest('{owned,others}'::text[]) s;
SELECT subscription, state, count(*) FROM outbox.job_status GROUP BY 1, 2 ORDER BY 1, 2;

-- Run a command as a role, undo it, and say how it ended.
CREATE FUNCTION try(role name, command text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text;
BEGIN
	EXECUTE format('SET LOCAL ROLE %I', role);
	BEGIN
		EXECUTE command INTO result;
		RAISE EXCEPTION 'undo' USING ERRCODE = 'XX999';
	EXCEPTION
		WHEN SQLSTATE 'XX999' THEN NULL;
		WHEN OTHERS THEN result := SQLSTATE || ': ' || SQLERRM;
	END;
	RESET ROLE;
	RETURN coalesce(result, '-');
END $$;

-- What the owner may do, its members may, and who administers; others may not
-- touch a job, whatever numbers they guess.
CREATE VIEW calls AS SELECT * FROM (VALUES
	(1, 'SELECT count(*) FROM outbox.claim(''%1$s'')'),
	(2, 'SELECT outbox.complete(job(''%1$s'', ''3''), claim(''%1$s''))'),
	(3, 'SELECT outbox.complete(job(''%1$s'', ''2''), claim(''%1$s''))'),
	(4, 'SELECT outbox.complete_many(claim(''%1$s''))'),
	(5, 'SELECT outbox.complete_many(claim(''%1$s''), ARRAY[job(''%1$s'', ''3'')])'),
	(6, 'SELECT outbox.fail(job(''%1$s'', ''3''), claim(''%1$s''), ''e'') > now()'),
	(7, 'SELECT outbox.fail(job(''%1$s'', ''3''), claim(''%1$s''), ''e'', final => true) IS NULL'),
	(8, 'SELECT outbox.extend(job(''%1$s'', ''3''), claim(''%1$s'')) > now()'),
	(9, 'SELECT outbox.extend_many(claim(''%1$s''))'),
	(10, 'SELECT outbox.release(job(''%1$s'', ''3''), claim(''%1$s''))'),
	(11, 'SELECT outbox.retry(job(''%1$s'', ''1''))'),
	(12, 'SELECT outbox.retry(job(''%1$s'', ''3''))'),
	(13, 'SELECT outbox.retry_dead(''%1$s'')'),
	(14, 'SELECT outbox.cancel(job(''%1$s'', ''4''))'),
	(15, 'SELECT outbox.purge(''%1$s'')'),
	(16, 'SELECT outbox.purge(''%1$s'', ''done'')')) c (n, call);
SELECT n, try('outbox_job_owner', format(call, 'owned')) AS owner, try('outbox_job_member', format(call, 'owned')) AS member,
	try('outbox_job_admin', format(call, 'owned')) AS admin, try('outbox_job_super', format(call, 'owned')) AS superuser
FROM calls ORDER BY n;
SELECT n, try('outbox_job_other', format(call, 'owned')) AS other FROM calls ORDER BY n;
SELECT count(*) FILTER (WHERE try('outbox_job_owner', format(call, 'others')) = '42501: must be owner of subscription "others"') AS owner,
	count(*) FILTER (WHERE try('outbox_job_noinherit', format(call, 'owned')) = '42501: must be owner of subscription "owned"') AS noinherit,
	count(*) FILTER (WHERE try('outbox_job_nobody', format(call, 'owned')) = '42501: permission denied for schema outbox') AS nobody, count(*) AS "of"
FROM calls;
GRANT USAGE ON SCHEMA outbox TO outbox_job_nobody;
SELECT count(*) FILTER (WHERE try('outbox_job_nobody', format(call, 'owned')) LIKE '42501: permission denied for function %') AS nobody, count(*) AS "of" FROM calls;
REVOKE USAGE ON SCHEMA outbox FROM outbox_job_nobody;
-- what nobody has is told to nobody
SELECT try('outbox_job_other', 'SELECT outbox.cancel(-1)') AS cancel, try('outbox_job_other', 'SELECT outbox.complete(-1, -1)') AS complete,
	try('outbox_job_other', format('SELECT outbox.complete(%s, -1)', job('owned', '3'))) AS complete, try('outbox_job_other', 'SELECT outbox.complete_many(-1)') AS complete_many;
-- asking and waiting
SELECT role, try(role, $$SELECT outbox.is_current('owned', '4')$$) FROM unnest('{outbox_job_owner,outbox_job_member,outbox_job_admin,outbox_job_other,outbox_job_nobody}'::name[]) role;
SET ROLE outbox_job_owner;
CALL outbox.await_jobs('others', '0');
CALL outbox.await_idle('others', '0');
CALL outbox.await_idle('owned', '0');
RESET ROLE;
SET ROLE outbox_job_member;
CALL outbox.await_jobs('owned', '0');
RESET ROLE;
SET ROLE outbox_job_admin;
CALL outbox.await_jobs('owned', '0');
CALL outbox.await_jobs('others', '0');
RESET ROLE;
SET ROLE outbox_job_nobody;
CALL outbox.await_jobs('owned', '0');
CALL outbox.await_idle('owned', '0');
RESET ROLE;

-- What each of them sees
CREATE FUNCTION sees(role name) RETURNS TABLE (role_ name, job_status text, dead_jobs text, blocked text, event_status text, stat_subscription text) LANGUAGE plpgsql AS $$
BEGIN
	role_ := role;
	job_status := try(role, 'SELECT string_agg(s, '' '' ORDER BY s) FROM (SELECT subscription || '':'' || count(*) AS s FROM outbox.job_status GROUP BY subscription) x');
	dead_jobs := try(role, 'SELECT string_agg(subscription || '':'' || subject, '' '' ORDER BY subscription) FROM outbox.dead_jobs');
	blocked := try(role, 'SELECT string_agg(subscription || '':'' || subject, '' '' ORDER BY subscription) FROM outbox.blocked');
	event_status := try(role, 'SELECT string_agg(s, '' '' ORDER BY s) FROM (SELECT subscription || '':'' || count(*) AS s FROM outbox.event_status WHERE type = ''a'' GROUP BY subscription) x');
	stat_subscription := try(role, 'SELECT string_agg(concat_ws('':'', name, waiting, running, retrying, dead, done_total), '' '' ORDER BY name) FROM outbox.stat_subscription');
	RETURN NEXT;
END $$;
SELECT s.* FROM unnest('{outbox_job_owner,outbox_job_member,outbox_job_noinherit,outbox_job_other,outbox_job_admin}'::name[]) WITH ORDINALITY r (role, n), sees(r.role) s ORDER BY n;
SELECT s.* FROM sees('outbox_job_nobody') s;
-- A function in the condition of a query does not see rows that a view hides.
CREATE FUNCTION leak(text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS $$
BEGIN
	RAISE WARNING 'saw %', $1;
	RETURN true;
END $$;
SET client_min_messages = warning;
SET ROLE outbox_job_owner;
SELECT count(*) FROM outbox.job_status WHERE leak(subscription);
SELECT count(*) FROM outbox.dead_jobs WHERE leak(subscription);
SELECT count(*) FROM outbox.blocked WHERE leak(subscription);
SELECT count(*) FROM outbox.event_status WHERE leak(subscription);
SELECT count(*) FROM outbox.stat_subscription WHERE leak(name);
RESET ROLE;
SET ROLE outbox_job_other;
SELECT count(*) FROM outbox.blocked WHERE leak(subscription);
RESET ROLE;
SET client_min_messages = error;

-- An owner that is another role now may not, and administrators may.
ALTER ROLE outbox_job_owner RENAME TO outbox_job_former;
SELECT n, try('outbox_job_former', format(call, 'owned')) AS former FROM calls WHERE n IN (1, 2, 4, 11, 13) ORDER BY n;
SELECT n, try('outbox_job_admin', format(call, 'owned')) AS admin FROM calls WHERE n IN (1, 2, 4, 11, 13) ORDER BY n;
SET ROLE outbox_job_former;
SELECT outbox.claim('owned');
RESET ROLE;
SELECT s.* FROM sees('outbox_job_former') s;
SELECT outbox.set_owner('owned', 'outbox_job_other');
SELECT try('outbox_job_other', $$SELECT outbox.complete_many(claim('owned'))$$), try('outbox_job_former', $$SELECT outbox.complete_many(claim('owned'))$$);

-- The caller's settings and names have no effect, and are as they were.
GRANT CREATE ON DATABASE outbox_job_rights TO outbox_job_other;
SET ROLE outbox_job_other;
CREATE SCHEMA evil;
CREATE FUNCTION evil.bad(anyelement, anyelement) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'called as %', current_user; END $$;
CREATE OPERATOR evil.= (LEFTARG = anyelement, RIGHTARG = anyelement, FUNCTION = evil.bad);
CREATE OPERATOR evil.< (LEFTARG = anyelement, RIGHTARG = anyelement, FUNCTION = evil.bad);
CREATE FUNCTION evil.unnest(anyarray) RETURNS SETOF anyelement LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'called as %', current_user; END $$;
CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'called as %', current_user; END $$;
CREATE TABLE evil.jobs (id bigint);
SET search_path = evil, pg_catalog, public;
SET enable_indexscan = off;
SET enable_nestloop = off;
SET enable_tidscan = off;
SET plan_cache_mode = force_custom_plan;
SET default_transaction_isolation = serializable;
SET row_security = off;
SET DateStyle = 'German';
SET IntervalStyle = 'sql_standard';
SET TimeZone = 'Pacific/Apia';
SET extra_float_digits = -15;
SELECT outbox.release(public.job('others', '3'), public.claim('others'));
SELECT subject, attempt, leased_until OPERATOR(pg_catalog.>) pg_catalog.now() AS leased FROM outbox.claim('others', 2, lease => '1 day');
SELECT outbox.complete(public.job('others', '4'), public.claim('others')) AS not_held;
SELECT outbox.complete_many(public.claim('others'));
SELECT outbox.retry_dead('others'), outbox.cancel(public.job('others', '4')), outbox.purge('others', 'done');
SELECT name, setting FROM pg_settings WHERE name OPERATOR(pg_catalog.=) ANY ('{search_path,enable_seqscan,enable_indexscan,enable_nestloop,enable_tidscan,plan_cache_mode,DateStyle,TimeZone}') ORDER BY name COLLATE "C";
SELECT current_user, session_user;

\c :dbname :user
DROP DATABASE outbox_job_rights;
DROP ROLE outbox_job_super, outbox_job_former, outbox_job_member, outbox_job_noinherit, outbox_job_other, outbox_job_admin, outbox_job_nobody;
