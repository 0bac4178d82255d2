/* outbox--1.0.sql: the objects of the extension, in the order in which an event meets them */

-- complain if the script is sourced in psql rather than by CREATE EXTENSION
\echo Use "CREATE EXTENSION outbox" to load this file. \quit

CREATE SCHEMA outbox;
COMMENT ON SCHEMA outbox IS 'transactional outbox: events, subscriptions and their jobs';

-- The server must have the library preloaded: without it nothing would ever be fanned out.
CREATE FUNCTION outbox.require_preload() RETURNS boolean
	LANGUAGE c STRICT VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_require_preload';
SELECT outbox.require_preload();
DROP FUNCTION outbox.require_preload();

/*
 * Tables
 */

CREATE TABLE outbox.events (
	seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	type text NOT NULL,
	subject text,
	scope text,
	payload jsonb NOT NULL DEFAULT '{}',
	headers jsonb,
	recorded_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
	fanned_out_at timestamptz,
	fanout jsonb,
	not_before timestamptz,
	tries smallint NOT NULL DEFAULT 0,
	failures smallint NOT NULL DEFAULT 0,
	retry_at timestamptz,
	last_error text,
	poisoned_at timestamptz
);
CREATE INDEX events_unmarked ON outbox.events (seq)
	WHERE fanned_out_at IS NULL AND poisoned_at IS NULL;
CREATE INDEX events_retry ON outbox.events (retry_at)
	WHERE retry_at IS NOT NULL AND fanned_out_at IS NULL AND poisoned_at IS NULL;

-- Every event leaves two dead rows, its mark and its end, and every job three.  With the default of a fifth of
-- the table, which holds what is kept for days, vacuum comes late: at 1,500 events a second for two
-- subscriptions and a million events kept, index jobs_due grew to twice the size and five times as many dead jobs
-- waited as with a twentieth.  A smaller share vacuums more often and gains little; room left in pages (fillfactor)
-- gains nothing, since what is updated is in an index.
ALTER TABLE outbox.events SET (autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_scale_factor = 0.05);

COMMENT ON TABLE outbox.events IS 'events recorded by transactions, marked when they have been fanned out';
COMMENT ON COLUMN outbox.events.seq IS 'number of the event; not the order in which transactions committed';
COMMENT ON COLUMN outbox.events.type IS 'dotted name of what happened, 1 to 255 bytes';
COMMENT ON COLUMN outbox.events.subject IS 'what the event is about';
COMMENT ON COLUMN outbox.events.scope IS 'tenant or workspace of the event';
COMMENT ON COLUMN outbox.events.payload IS 'what there is to say about it';
COMMENT ON COLUMN outbox.events.headers IS 'JSON object that travels beside the payload';
COMMENT ON COLUMN outbox.events.recorded_at IS 'time at which it was recorded, not at which its transaction began';
COMMENT ON COLUMN outbox.events.fanned_out_at IS 'when its jobs were made; null: not yet';
COMMENT ON COLUMN outbox.events.fanout IS 'subscription name to job id; {} when no subscription matched';
COMMENT ON COLUMN outbox.events.not_before IS 'its jobs are due then, not at once';
COMMENT ON COLUMN outbox.events.tries IS 'failed attempts to fan it out';
COMMENT ON COLUMN outbox.events.failures IS 'failed attempts that were its own fault; counts towards poisoning';
COMMENT ON COLUMN outbox.events.retry_at IS 'when it is tried again after a failure';
COMMENT ON COLUMN outbox.events.last_error IS 'why it failed last';
COMMENT ON COLUMN outbox.events.poisoned_at IS 'when it was set aside; outbox.requeue puts it back in line';
COMMENT ON INDEX outbox.events_unmarked IS 'events that wait for the relay';
COMMENT ON INDEX outbox.events_retry IS 'events that failed and wait for their next try';

CREATE TABLE outbox.subscriptions (
	id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	name text NOT NULL UNIQUE,
	types text[] NOT NULL,
	scope text,
	filter jsonpath,
	coalescing boolean NOT NULL DEFAULT false,
	ordered boolean NOT NULL DEFAULT false,
	sink text,
	sink_oid oid,
	handler text,
	handler_oid oid,
	options jsonb NOT NULL DEFAULT '{}',
	max_attempts int NOT NULL DEFAULT 10,
	retry_min interval NOT NULL DEFAULT '30 seconds',
	retry_max interval NOT NULL DEFAULT '1 hour',
	lease interval NOT NULL DEFAULT '5 minutes',
	owner name NOT NULL,
	owner_oid oid NOT NULL,
	paused_at timestamptz,
	created_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
COMMENT ON TABLE outbox.subscriptions IS 'who gets which events';
COMMENT ON COLUMN outbox.subscriptions.id IS 'number that jobs refer to';
COMMENT ON COLUMN outbox.subscriptions.name IS 'name by which it is known';
COMMENT ON COLUMN outbox.subscriptions.types IS 'patterns of event types; a leading ! excludes';
COMMENT ON COLUMN outbox.subscriptions.scope IS 'only events of this scope; null: of every scope';
COMMENT ON COLUMN outbox.subscriptions.filter IS 'only events whose payload this path accepts';
COMMENT ON COLUMN outbox.subscriptions.coalescing IS 'one job for the latest event of each scope and subject in a pass';
COMMENT ON COLUMN outbox.subscriptions.ordered IS 'jobs of one scope and subject are handled one after another';
COMMENT ON COLUMN outbox.subscriptions.sink IS 'function that takes its jobs elsewhere; null: they wait in outbox.jobs';
COMMENT ON COLUMN outbox.subscriptions.sink_oid IS 'the sink when it was named';
COMMENT ON COLUMN outbox.subscriptions.handler IS 'function that handles its jobs in the server';
COMMENT ON COLUMN outbox.subscriptions.handler_oid IS 'the handler when it was named';
COMMENT ON COLUMN outbox.subscriptions.options IS 'options of the sink';
COMMENT ON COLUMN outbox.subscriptions.max_attempts IS 'a job is dead after so many failed attempts';
COMMENT ON COLUMN outbox.subscriptions.retry_min IS 'wait after the first failed attempt; doubles from then on';
COMMENT ON COLUMN outbox.subscriptions.retry_max IS 'longest wait between attempts';
COMMENT ON COLUMN outbox.subscriptions.lease IS 'how long a claimed job is held for its claimer';
COMMENT ON COLUMN outbox.subscriptions.owner IS 'role it belongs to, by name';
COMMENT ON COLUMN outbox.subscriptions.owner_oid IS 'role it belongs to, by oid: a role of the same name made later is another';
COMMENT ON COLUMN outbox.subscriptions.paused_at IS 'since when its jobs rest';
COMMENT ON COLUMN outbox.subscriptions.created_at IS 'when it was made';

CREATE TABLE outbox.jobs (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	subscription_id int NOT NULL,
	event_seq bigint NOT NULL,
	subject_key bigint,
	due_at timestamptz NOT NULL,
	attempts int NOT NULL DEFAULT 0,
	last_error text,
	engine_id text,
	done_at timestamptz,
	dead_at timestamptz,
	created_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
	filter_pending boolean,
	claim bigint,
	holder text,
	cancelled boolean
) USING heap;
CREATE INDEX jobs_due ON outbox.jobs (subscription_id, due_at, id)
	WHERE done_at IS NULL AND dead_at IS NULL;
CREATE INDEX jobs_subject ON outbox.jobs (subscription_id, subject_key, (dead_at IS NULL), id)
	WHERE done_at IS NULL AND subject_key IS NOT NULL;
CREATE INDEX jobs_claim ON outbox.jobs (claim)
	WHERE claim IS NOT NULL AND done_at IS NULL AND dead_at IS NULL;
CREATE INDEX jobs_dead ON outbox.jobs (subscription_id, dead_at, id)
	WHERE done_at IS NULL AND dead_at IS NOT NULL;
ALTER TABLE outbox.jobs SET (autovacuum_vacuum_scale_factor = 0.05);

COMMENT ON TABLE outbox.jobs IS 'one job for each event and subscription';
COMMENT ON COLUMN outbox.jobs.id IS 'number of the job';
COMMENT ON COLUMN outbox.jobs.subscription_id IS 'subscription it was made for';
COMMENT ON COLUMN outbox.jobs.event_seq IS 'event it is about';
COMMENT ON COLUMN outbox.jobs.subject_key IS 'hash of scope and subject, for ordered and coalescing subscriptions';
COMMENT ON COLUMN outbox.jobs.due_at IS
	'it can be claimed from then on: while it is leased, the end of the lease; infinity while an older job of its subject holds it back';
COMMENT ON COLUMN outbox.jobs.attempts IS 'attempts begun';
COMMENT ON COLUMN outbox.jobs.last_error IS 'why the last attempt failed';
COMMENT ON COLUMN outbox.jobs.engine_id IS 'what the engine of a sink called it';
COMMENT ON COLUMN outbox.jobs.done_at IS 'when it was completed or cancelled';
COMMENT ON COLUMN outbox.jobs.dead_at IS 'when it was set aside';
COMMENT ON COLUMN outbox.jobs.created_at IS 'when the relay made it';
COMMENT ON COLUMN outbox.jobs.filter_pending IS 'the filter was too slow, or the payload too large, to be evaluated by the relay';
COMMENT ON COLUMN outbox.jobs.claim IS 'fencing token: number of the claim that holds it, or that finished it';
COMMENT ON COLUMN outbox.jobs.holder IS 'who claimed it last';
COMMENT ON COLUMN outbox.jobs.cancelled IS 'it was given up, and not completed';
COMMENT ON INDEX outbox.jobs_due IS 'unfinished jobs in the order in which they are claimed';
COMMENT ON INDEX outbox.jobs_subject IS 'jobs of one subject that are not done, the dead ones apart';
COMMENT ON INDEX outbox.jobs_claim IS 'jobs of one claim';
COMMENT ON INDEX outbox.jobs_dead IS 'dead jobs by the time at which they died';

CREATE SEQUENCE outbox.claims AS bigint;
COMMENT ON SEQUENCE outbox.claims IS 'numbers of claims, which fence';

-- One draw is good for a thousand claims.  No number of outbox.claims comes as far, and none of these is too large for
-- a double.
CREATE SEQUENCE outbox.claims_in_memory AS bigint INCREMENT BY 1000 MINVALUE 1000000000000001;
COMMENT ON SEQUENCE outbox.claims_in_memory IS 'numbers of claims whose leases are kept in shared memory, a thousand at a time';

CREATE TABLE outbox.routing (
	version bigint NOT NULL,
	single boolean PRIMARY KEY DEFAULT true CHECK (single)
);
INSERT INTO outbox.routing (version) VALUES (1);
COMMENT ON TABLE outbox.routing IS 'one row: the version of the set of subscriptions, which every claim reads';
COMMENT ON COLUMN outbox.routing.version IS 'raised by every change of outbox.subscriptions';
COMMENT ON COLUMN outbox.routing.single IS 'a key, so that there is one row and the table can be published';

CREATE TABLE outbox.armed (
	database oid PRIMARY KEY,
	armed_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
	stopped_at timestamptz
);
COMMENT ON TABLE outbox.armed IS 'the database in which outbox may work; not part of a dump, so that a copy rests';
COMMENT ON COLUMN outbox.armed.database IS 'oid of that database';
COMMENT ON COLUMN outbox.armed.armed_at IS 'since when';
COMMENT ON COLUMN outbox.armed.stopped_at IS 'stopped by outbox.stop() since then';

SELECT pg_catalog.pg_extension_config_dump('outbox.events', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.events_seq_seq', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.subscriptions', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.subscriptions_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.jobs', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.jobs_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.claims', '');
SELECT pg_catalog.pg_extension_config_dump('outbox.claims_in_memory', '');

/*
 * Public types: what handlers, sinks and replays are given.  Attributes are
 * only ever added at the end.
 */

CREATE TYPE outbox.event AS (
	seq bigint,
	type text,
	subject text,
	scope text,
	payload jsonb,
	headers jsonb,
	recorded_at timestamptz
);
COMMENT ON TYPE outbox.event IS 'an event as a handler gets it';
CREATE TYPE outbox.subscription AS (
	id int,
	name text,
	scope text,
	options jsonb
);
COMMENT ON TYPE outbox.subscription IS 'a subscription as a sink gets it';

/*
 * Record
 */

CREATE FUNCTION outbox.events_insert() RETURNS trigger
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_events_insert';
COMMENT ON FUNCTION outbox.events_insert() IS 'checks an event and rings the relay when its transaction commits';
CREATE TRIGGER events_insert BEFORE INSERT ON outbox.events
	FOR EACH ROW EXECUTE FUNCTION outbox.events_insert();
ALTER TABLE outbox.events ENABLE ALWAYS TRIGGER events_insert;
COMMENT ON TRIGGER events_insert ON outbox.events IS 'checks an event and rings the relay when its transaction commits';

CREATE FUNCTION outbox.record(type text, subject text DEFAULT NULL, payload jsonb DEFAULT '{}',
	scope text DEFAULT NULL, headers jsonb DEFAULT NULL, not_before timestamptz DEFAULT NULL)
	RETURNS bigint
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_record';
COMMENT ON FUNCTION outbox.record(text, text, jsonb, text, jsonb, timestamptz) IS
	'records an event in the current transaction and returns its seq';

CREATE FUNCTION outbox.capture_row() RETURNS trigger
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_capture_row';
COMMENT ON FUNCTION outbox.capture_row() IS 'records a change of a captured table; attached by outbox.capture';

CREATE FUNCTION outbox.capture(relation regclass, type text, subject text DEFAULT NULL,
	watch name[] DEFAULT NULL, operations text[] DEFAULT '{insert,update,delete}',
	columns name[] DEFAULT NULL, scope text DEFAULT NULL)
	RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_capture';
COMMENT ON FUNCTION outbox.capture(regclass, text, text, name[], text[], name[], text) IS
	'records an event for every change of a table; repeating it restates the definition';

CREATE FUNCTION outbox.uncapture(relation regclass, type text DEFAULT NULL) RETURNS int
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_uncapture';
COMMENT ON FUNCTION outbox.uncapture(regclass, text) IS
	'ends the capture of a table, of one type or of all, and returns how many were ended';

CREATE FUNCTION outbox.capture_definition(trigger oid) RETURNS jsonb
	LANGUAGE c STRICT STABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'outbox_capture_definition';
COMMENT ON FUNCTION outbox.capture_definition(oid) IS 'definition of a capture, read from its trigger; for outbox.captures';

/*
 * Subscribe
 */

CREATE FUNCTION outbox.routing_changed() RETURNS trigger
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_routing_changed';
COMMENT ON FUNCTION outbox.routing_changed() IS 'raises the version of the set of subscriptions';
CREATE TRIGGER routing_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON outbox.subscriptions
	FOR EACH STATEMENT EXECUTE FUNCTION outbox.routing_changed();
ALTER TABLE outbox.subscriptions ENABLE ALWAYS TRIGGER routing_changed;
COMMENT ON TRIGGER routing_changed ON outbox.subscriptions IS 'raises the version of the set of subscriptions';

CREATE FUNCTION outbox.subscribe(name text, types text[] DEFAULT '{*}', scope text DEFAULT NULL,
	filter jsonpath DEFAULT NULL, coalescing boolean DEFAULT false, ordered boolean DEFAULT false,
	handler text DEFAULT NULL, sink text DEFAULT NULL, options jsonb DEFAULT '{}',
	max_attempts int DEFAULT 10, retry_min interval DEFAULT '30s', retry_max interval DEFAULT '1h',
	lease interval DEFAULT '5min')
	RETURNS int
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_subscribe';
COMMENT ON FUNCTION outbox.subscribe(text, text[], text, jsonpath, boolean, boolean, text, text, jsonb, int, interval, interval, interval) IS
	'makes a subscription, or restates the whole definition of one';

CREATE FUNCTION outbox.unsubscribe(name text) RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_unsubscribe';
COMMENT ON FUNCTION outbox.unsubscribe(text) IS 'ends a subscription and all its jobs';

CREATE FUNCTION outbox.pause(name text) RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_pause';
COMMENT ON FUNCTION outbox.pause(text) IS 'lets the jobs of a subscription rest; it still gets new ones';

CREATE FUNCTION outbox.resume(name text) RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_resume';
COMMENT ON FUNCTION outbox.resume(text) IS 'ends the rest of a paused subscription';

CREATE FUNCTION outbox.rename(name text, new_name text) RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_rename';
COMMENT ON FUNCTION outbox.rename(text, text) IS 'gives a subscription another name; its jobs stay';

CREATE FUNCTION outbox.set_owner(name text, owner name) RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_set_owner';
COMMENT ON FUNCTION outbox.set_owner(text, name) IS 'gives a subscription to another role';

CREATE FUNCTION outbox.adopt(name text) RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_adopt';
COMMENT ON FUNCTION outbox.adopt(text) IS
	'binds a subscription to the role that has its owner''s name now, after a restore or when that role was made anew';

CREATE FUNCTION outbox.matching(type text, scope text DEFAULT NULL, payload jsonb DEFAULT '{}',
	subject text DEFAULT NULL, headers jsonb DEFAULT NULL)
	RETURNS SETOF text
	LANGUAGE c STABLE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_matching';
COMMENT ON FUNCTION outbox.matching(text, text, jsonb, text, jsonb) IS
	'names of the subscriptions that would get such an event';

CREATE FUNCTION outbox.visible(owner name, owner_oid oid) RETURNS boolean
	LANGUAGE c STABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'outbox_visible';
COMMENT ON FUNCTION outbox.visible(name, oid) IS
	'whether the current role may see a subscription of that owner; for the views';

/*
 * Relay
 */

CREATE FUNCTION outbox.requeue(seq bigint) RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_requeue';
COMMENT ON FUNCTION outbox.requeue(bigint) IS 'puts a poisoned event back in line; false when it is not poisoned';

CREATE FUNCTION outbox.requeue_many(seqs bigint[]) RETURNS bigint
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_requeue_many';
COMMENT ON FUNCTION outbox.requeue_many(bigint[]) IS 'puts poisoned events back in line and returns how many';

CREATE FUNCTION outbox.discard(seq bigint) RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_discard';
COMMENT ON FUNCTION outbox.discard(bigint) IS 'gives up a poisoned event: it is marked and gets no jobs';

CREATE PROCEDURE outbox.await_fanout(seq bigint, timeout interval DEFAULT '5s', INOUT outcome text DEFAULT NULL)
	LANGUAGE c AS 'MODULE_PATHNAME', 'outbox_await_fanout';
COMMENT ON PROCEDURE outbox.await_fanout(bigint, interval, text) IS
	'waits until an event is fanned or poisoned; holds no snapshot meanwhile';

CREATE FUNCTION outbox.wake() RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_wake';
COMMENT ON FUNCTION outbox.wake() IS 'makes the relay look for events now';

CREATE FUNCTION outbox.stop() RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_stop';
COMMENT ON FUNCTION outbox.stop() IS 'lets the relay of this database rest; recording goes on';

CREATE FUNCTION outbox.start() RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_start';
COMMENT ON FUNCTION outbox.start() IS 'ends the rest begun by outbox.stop()';

CREATE FUNCTION outbox.arm() RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_arm';
COMMENT ON FUNCTION outbox.arm() IS 'lets outbox work in this database, which was restored or copied';

/*
 * Consume
 */

CREATE FUNCTION outbox.claim(subscription text, max_jobs int DEFAULT 1, lease interval DEFAULT NULL,
	worker text DEFAULT NULL)
	RETURNS TABLE (job bigint, claim bigint, attempt int, max_attempts int, leased_until timestamptz,
		seq bigint, type text, subject text, scope text, payload jsonb, headers jsonb, recorded_at timestamptz)
	LANGUAGE c VOLATILE PARALLEL UNSAFE ROWS 10 AS 'MODULE_PATHNAME', 'outbox_claim';
COMMENT ON FUNCTION outbox.claim(text, int, interval, text) IS
	'claims jobs that are due, oldest first, and returns them with their events; nobody else gets them until the lease ends';

CREATE FUNCTION outbox.complete(job bigint, claim bigint) RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_complete';
COMMENT ON FUNCTION outbox.complete(bigint, bigint) IS
	'completes a claimed job; false when this claim has completed it already';

CREATE FUNCTION outbox.complete_many(claim bigint, jobs bigint[] DEFAULT NULL) RETURNS bigint[]
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_complete_many';
COMMENT ON FUNCTION outbox.complete_many(bigint, bigint[]) IS
	'completes jobs of a claim, all of them or some, and returns those whose lease is lost';

CREATE FUNCTION outbox.fail(job bigint, claim bigint, error text, retry_in interval DEFAULT NULL,
	final boolean DEFAULT false) RETURNS timestamptz
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_fail';
COMMENT ON FUNCTION outbox.fail(bigint, bigint, text, interval, boolean) IS
	'ends an attempt that failed, and returns when the job is due again; null: it is dead';

CREATE FUNCTION outbox.extend(job bigint, claim bigint, lease interval DEFAULT NULL) RETURNS timestamptz
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_extend';
COMMENT ON FUNCTION outbox.extend(bigint, bigint, interval) IS
	'lets the lease of a job end so long from now, and returns when';

CREATE FUNCTION outbox.extend_many(claim bigint, lease interval DEFAULT NULL) RETURNS int
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_extend_many';
COMMENT ON FUNCTION outbox.extend_many(bigint, interval) IS
	'lets the leases of all jobs of a claim end so long from now, and returns how many those are';

CREATE FUNCTION outbox.release(job bigint, claim bigint, retry_in interval DEFAULT '0') RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_release';
COMMENT ON FUNCTION outbox.release(bigint, bigint, interval) IS
	'puts a claimed job back in line; the attempt does not count';

CREATE FUNCTION outbox.retry(job bigint) RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_retry';
COMMENT ON FUNCTION outbox.retry(bigint) IS 'puts a dead job back in line, with no attempts made; false when it is not dead';

CREATE FUNCTION outbox.retry_dead(subscription text, since timestamptz DEFAULT NULL,
	until timestamptz DEFAULT NULL, spread interval DEFAULT '0') RETURNS bigint
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_retry_dead';
COMMENT ON FUNCTION outbox.retry_dead(text, timestamptz, timestamptz, interval) IS
	'puts the dead jobs of a subscription back in line, those that died in a time, spread over an interval; returns how many';

CREATE FUNCTION outbox.cancel(job bigint) RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_cancel';
COMMENT ON FUNCTION outbox.cancel(bigint) IS 'gives up a job that is not done; who holds it loses the lease';

CREATE FUNCTION outbox.purge(subscription text, state text DEFAULT 'dead', before timestamptz DEFAULT NULL)
	RETURNS bigint
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_purge';
COMMENT ON FUNCTION outbox.purge(text, text, timestamptz) IS
	'deletes the dead, done or cancelled jobs of a subscription, and returns how many';

CREATE FUNCTION outbox.replay(subscription text, since timestamptz, until timestamptz DEFAULT NULL)
	RETURNS bigint
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_replay';
COMMENT ON FUNCTION outbox.replay(text, timestamptz, timestamptz) IS
	'makes jobs of a subscription for events that were fanned out in a time, are kept and match now; returns how many; an ordered subscription should be paused meanwhile';

CREATE FUNCTION outbox.is_current(subscription text, subject text, scope text DEFAULT NULL) RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_is_current';
COMMENT ON FUNCTION outbox.is_current(text, text, text) IS
	'false while a subscription may lag behind the events of a subject';

CREATE FUNCTION outbox.current_attempt() RETURNS int
	LANGUAGE c VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME', 'outbox_current_attempt';
COMMENT ON FUNCTION outbox.current_attempt() IS 'number of the attempt that runs the handler; null outside of one';

CREATE PROCEDURE outbox.await_jobs(subscription text, timeout interval DEFAULT '30s', INOUT ready boolean DEFAULT NULL)
	LANGUAGE c AS 'MODULE_PATHNAME', 'outbox_await_jobs';
COMMENT ON PROCEDURE outbox.await_jobs(text, interval, boolean) IS
	'waits until a job of a subscription can be claimed; holds no snapshot meanwhile';

CREATE PROCEDURE outbox.await_idle(subscription text DEFAULT NULL, timeout interval DEFAULT '30s',
	INOUT idle boolean DEFAULT NULL)
	LANGUAGE c AS 'MODULE_PATHNAME', 'outbox_await_idle';
COMMENT ON PROCEDURE outbox.await_idle(text, interval, boolean) IS
	'waits until every event is fanned out and every job has come to an end; holds no snapshot meanwhile';

CREATE FUNCTION outbox.done_total(subscription_id int) RETURNS bigint
	LANGUAGE c STRICT VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME', 'outbox_done_total';
COMMENT ON FUNCTION outbox.done_total(int) IS
	'jobs of a subscription that were completed since the server started, from shared memory; for outbox.stat_subscription';

CREATE FUNCTION outbox.leased(job bigint) RETURNS boolean
	LANGUAGE c STRICT VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME', 'outbox_leased';
COMMENT ON FUNCTION outbox.leased(bigint) IS
	'whether the lease of a job is kept in shared memory; for claims';

CREATE FUNCTION outbox.leased_until(job bigint) RETURNS timestamptz
	LANGUAGE c STRICT VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME', 'outbox_leased_until';
COMMENT ON FUNCTION outbox.leased_until(bigint) IS 'when such a lease ends; null: there is none; for the views';

CREATE FUNCTION outbox.lease_holder(job bigint) RETURNS text
	LANGUAGE c STRICT VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME', 'outbox_lease_holder';
COMMENT ON FUNCTION outbox.lease_holder(bigint) IS 'who has such a lease; null: there is none; for the views';

/*
 * Keep house
 */

CREATE PROCEDURE outbox.prune(INOUT events bigint DEFAULT NULL, INOUT jobs bigint DEFAULT NULL)
	LANGUAGE c AS 'MODULE_PATHNAME', 'outbox_prune';
COMMENT ON PROCEDURE outbox.prune(bigint, bigint) IS
	'deletes what retention lets go, with a commit each step, and says how many events and jobs that were';

CREATE FUNCTION outbox.grant(role name, privilege text) RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_grant';
COMMENT ON FUNCTION outbox.grant(name, text) IS 'gives a role the privilege record, consume or admin';

CREATE FUNCTION outbox.revoke(role name, privilege text) RETURNS boolean
	LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_revoke';
COMMENT ON FUNCTION outbox.revoke(name, text) IS 'takes the privilege record, consume or admin from a role';

CREATE FUNCTION outbox.relays(OUT database name, OUT database_oid oid, OUT relay int, OUT pid int, OUT state text,
	OUT passes bigint, OUT events bigint, OUT jobs bigint, OUT failures bigint, OUT notify_failures bigint,
	OUT last_pass_at timestamptz, OUT last_error text, OUT last_error_at timestamptz, OUT backoff_until timestamptz)
	RETURNS SETOF record
	LANGUAGE c STRICT VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME', 'outbox_relays';
COMMENT ON FUNCTION outbox.relays() IS 'relays of the server and their counters, from shared memory; for outbox.stat_relay';

CREATE FUNCTION outbox.runners(OUT pid int, OUT role_oid oid, OUT state text, OUT subscription_id int,
	OUT job bigint, OUT began_at timestamptz, OUT jobs bigint, OUT failures bigint)
	RETURNS SETOF record
	LANGUAGE c STRICT VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME', 'outbox_runners';
COMMENT ON FUNCTION outbox.runners() IS 'runners of this database, from shared memory; for outbox.stat_runner';

CREATE FUNCTION outbox.check(OUT level text, OUT finding text, OUT hint text) RETURNS SETOF record
	LANGUAGE c STRICT VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_check';
COMMENT ON FUNCTION outbox.check() IS 'says in words what keeps events from being fanned out';

CREATE VIEW outbox.captures WITH (security_barrier) AS
	SELECT t.tgrelid::pg_catalog.regclass AS relation,
		d.def OPERATOR(pg_catalog.->>) 'type' AS type,
		d.def OPERATOR(pg_catalog.->>) 'subject' AS subject,
		CASE WHEN d.def OPERATOR(pg_catalog.->) 'watch' IS NOT NULL THEN ARRAY(
			SELECT c::pg_catalog.name FROM pg_catalog.jsonb_array_elements_text(d.def OPERATOR(pg_catalog.->) 'watch') c) END AS watch,
		ARRAY(SELECT o FROM pg_catalog.jsonb_array_elements_text(d.def OPERATOR(pg_catalog.->) 'operations') o) AS operations,
		CASE WHEN d.def OPERATOR(pg_catalog.->) 'columns' IS NOT NULL THEN ARRAY(
			SELECT c::pg_catalog.name FROM pg_catalog.jsonb_array_elements_text(d.def OPERATOR(pg_catalog.->) 'columns') c) END AS columns,
		d.def OPERATOR(pg_catalog.->>) 'scope' AS scope,
		t.tgenabled OPERATOR(pg_catalog.<>) 'D' AS enabled,
		t.tgname AS trigger
	FROM pg_catalog.pg_trigger t
		CROSS JOIN LATERAL (SELECT outbox.capture_definition(t.oid) AS def OFFSET 0) d
	WHERE t.tgfoid OPERATOR(pg_catalog.=) (
			SELECT p.oid FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace
			WHERE p.proname OPERATOR(pg_catalog.=) 'capture_row' AND n.nspname OPERATOR(pg_catalog.=) 'outbox')
		AND t.tgparentid OPERATOR(pg_catalog.=) 0 AND d.def IS NOT NULL;
COMMENT ON VIEW outbox.captures IS 'captured tables, with the definition of each capture as outbox.capture takes it';

CREATE VIEW outbox.poisoned WITH (security_barrier) AS
	SELECT seq, type, subject, scope, payload, headers, recorded_at, tries, failures, last_error, poisoned_at
	FROM outbox.events
	WHERE poisoned_at IS NOT NULL AND fanned_out_at IS NULL;
COMMENT ON VIEW outbox.poisoned IS 'events set aside; outbox.requeue puts one back in line, outbox.discard gives it up';

CREATE INDEX events_poisoned ON outbox.events (seq)
	WHERE poisoned_at IS NOT NULL AND fanned_out_at IS NULL;
COMMENT ON INDEX outbox.events_poisoned IS 'events set aside';

CREATE VIEW outbox.job_status WITH (security_barrier) AS
	SELECT j.id AS job, s.name AS subscription, j.event_seq AS seq, x.state,
		CASE WHEN l.until IS NULL THEN j.attempts ELSE LEAST(j.attempts, 2147483646) OPERATOR(pg_catalog.+) 1 END AS attempts,
		s.max_attempts,
		CASE WHEN j.done_at IS NULL AND j.dead_at IS NULL THEN COALESCE(l.until, NULLIF(j.due_at, 'infinity')) END AS due_at,
		CASE WHEN x.state OPERATOR(pg_catalog.=) 'running' THEN COALESCE(l.until, j.due_at) END AS leased_until,
		COALESCE(l.holder, j.holder) AS holder, j.last_error, j.engine_id,
		CASE WHEN j.cancelled IS NULL THEN j.done_at END AS done_at, j.dead_at, j.created_at
	FROM outbox.jobs j JOIN outbox.subscriptions s ON s.id OPERATOR(pg_catalog.=) j.subscription_id
		CROSS JOIN LATERAL (SELECT CASE WHEN j.done_at IS NULL AND j.dead_at IS NULL THEN outbox.leased_until(j.id) END AS until,
			CASE WHEN j.done_at IS NULL AND j.dead_at IS NULL THEN outbox.lease_holder(j.id) END AS holder OFFSET 0) l
		CROSS JOIN LATERAL (SELECT CASE
			WHEN j.cancelled THEN 'cancelled'
			WHEN j.done_at IS NOT NULL THEN 'done'
			WHEN j.dead_at IS NOT NULL THEN 'dead'
			WHEN j.claim IS NOT NULL AND j.due_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 'running'
			WHEN l.until OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 'running'
			WHEN j.attempts OPERATOR(pg_catalog.>) 0 OR l.until IS NOT NULL THEN 'retrying'
			ELSE 'waiting' END AS state OFFSET 0) x
	WHERE outbox.visible(s.owner, s.owner_oid);
COMMENT ON VIEW outbox.job_status IS
	'jobs of the subscriptions that the current role may see, with their state in words; due_at is null while an older job of its subject holds one back';

CREATE VIEW outbox.dead_jobs WITH (security_barrier) AS
	SELECT j.id AS job, s.name AS subscription, j.event_seq AS seq, e.type, e.subject, e.scope,
		j.attempts, j.last_error, j.dead_at, j.created_at
	FROM outbox.subscriptions s
		JOIN outbox.jobs j ON j.subscription_id OPERATOR(pg_catalog.=) s.id
			AND j.done_at IS NULL AND j.dead_at IS NOT NULL
		LEFT JOIN outbox.events e ON e.seq OPERATOR(pg_catalog.=) j.event_seq
	WHERE outbox.visible(s.owner, s.owner_oid);
COMMENT ON VIEW outbox.dead_jobs IS
	'jobs set aside; outbox.retry and outbox.retry_dead put them back in line, outbox.cancel and outbox.purge give them up';

CREATE VIEW outbox.blocked WITH (security_barrier) AS
	SELECT s.name AS subscription, e.scope, e.subject, b.waiting, h.id AS job, h.event_seq AS seq,
		CASE WHEN h.claim IS NOT NULL AND h.due_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 'running'
			WHEN h.attempts OPERATOR(pg_catalog.>) 0 THEN 'retrying'
			ELSE 'waiting' END AS state,
		h.attempts, h.due_at, h.last_error
	FROM outbox.subscriptions s
		CROSS JOIN LATERAL (
			SELECT j.subject_key, pg_catalog.count(*) AS waiting FROM outbox.jobs j
			WHERE j.subscription_id OPERATOR(pg_catalog.=) s.id AND j.done_at IS NULL AND j.dead_at IS NULL
				AND j.due_at OPERATOR(pg_catalog.=) 'infinity' AND j.subject_key IS NOT NULL
			GROUP BY j.subject_key) b
		CROSS JOIN LATERAL (
			SELECT h.* FROM outbox.jobs h
			WHERE h.subscription_id OPERATOR(pg_catalog.=) s.id AND h.subject_key OPERATOR(pg_catalog.=) b.subject_key
				AND h.done_at IS NULL AND h.dead_at IS NULL
			ORDER BY (h.dead_at IS NULL), h.id LIMIT 1) h
		LEFT JOIN outbox.events e ON e.seq OPERATOR(pg_catalog.=) h.event_seq
	WHERE s.ordered AND outbox.visible(s.owner, s.owner_oid);
COMMENT ON VIEW outbox.blocked IS
	'subjects of ordered subscriptions of which jobs wait behind an older one, how many, and that job';

CREATE VIEW outbox.event_status WITH (security_barrier) AS
	SELECT e.seq, e.type, e.subject, e.scope, e.recorded_at, e.fanned_out_at,
		CASE WHEN e.fanned_out_at IS NOT NULL THEN 'fanned'
			WHEN e.poisoned_at IS NOT NULL THEN 'poisoned'
			WHEN e.retry_at IS NOT NULL THEN 'retrying'
			ELSE 'unmarked' END AS event_state,
		e.tries, e.failures, e.last_error AS event_error,
		d.subscription, d.job, d.state, d.attempts, d.last_error, d.handled_at, d.due_at
	FROM outbox.events e
		LEFT JOIN LATERAL (
			SELECT f.key AS subscription, f.value::bigint AS job,
				CASE WHEN j.id IS NULL THEN 'pruned'
					WHEN j.done_at IS NOT NULL AND j.cancelled IS NULL THEN 'done'
					WHEN s.id IS NULL OR j.cancelled THEN 'cancelled'
					WHEN j.dead_at IS NOT NULL THEN 'dead'
					WHEN j.claim IS NOT NULL AND j.due_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 'running'
					WHEN l.until OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 'running'
					WHEN j.attempts OPERATOR(pg_catalog.>) 0 OR l.until IS NOT NULL THEN 'retrying'
					ELSE 'waiting' END AS state,
				CASE WHEN l.until IS NULL THEN j.attempts ELSE LEAST(j.attempts, 2147483646) OPERATOR(pg_catalog.+) 1 END AS attempts,
				j.last_error, COALESCE(j.done_at, j.dead_at) AS handled_at,
				CASE WHEN j.done_at IS NULL AND j.dead_at IS NULL THEN COALESCE(l.until, NULLIF(j.due_at, 'infinity')) END AS due_at
			FROM pg_catalog.jsonb_each_text(e.fanout) f
				LEFT JOIN outbox.jobs j ON j.id OPERATOR(pg_catalog.=) f.value::bigint
				LEFT JOIN outbox.subscriptions s ON s.id OPERATOR(pg_catalog.=) j.subscription_id
				CROSS JOIN LATERAL (SELECT CASE WHEN j.done_at IS NULL AND j.dead_at IS NULL THEN outbox.leased_until(j.id) END AS until
					OFFSET 0) l
			WHERE outbox.visible(s.owner, s.owner_oid)
		) d ON true
	WHERE d.job IS NOT NULL OR outbox.visible(NULL, NULL);
COMMENT ON VIEW outbox.event_status IS
	'each event with its jobs, so far as the current role may see them: who has handled it, when, and why not yet';

CREATE VIEW outbox.stat_relay WITH (security_barrier) AS
	SELECT r.database, r.pid, r.state, r.passes, r.events, r.jobs, r.failures, r.last_pass_at, r.last_error,
		CASE WHEN d.here THEN (SELECT pg_catalog.count(*) FROM (SELECT FROM outbox.events
			WHERE fanned_out_at IS NULL AND poisoned_at IS NULL LIMIT 100000) e) END AS unmarked,
		CASE WHEN d.here THEN (SELECT recorded_at FROM outbox.events
			WHERE fanned_out_at IS NULL AND poisoned_at IS NULL ORDER BY seq LIMIT 1) END AS oldest_unmarked,
		r.relay, r.notify_failures, r.last_error_at, r.backoff_until
	FROM outbox.relays() r
		CROSS JOIN LATERAL (SELECT r.database_oid OPERATOR(pg_catalog.=)
			(SELECT oid FROM pg_catalog.pg_database WHERE datname OPERATOR(pg_catalog.=) pg_catalog.current_database()) AS here) d;
COMMENT ON VIEW outbox.stat_relay IS
	'relays of the server and what they have done since they started; unmarked counts to 100,000 at most, and is null for other databases';

CREATE VIEW outbox.stat_runner WITH (security_barrier) AS
	SELECT r.pid, o.rolname AS role, r.state, s.name AS subscription, r.job, r.began_at, r.jobs, r.failures
	FROM outbox.runners() r
		LEFT JOIN pg_catalog.pg_roles o ON o.oid OPERATOR(pg_catalog.=) r.role_oid
		LEFT JOIN outbox.subscriptions s ON s.id OPERATOR(pg_catalog.=) r.subscription_id;
COMMENT ON VIEW outbox.stat_runner IS
	'runners of this database: whose handlers each runs, which job it has, and what it has done since it started';

CREATE VIEW outbox.stat_subscription WITH (security_barrier) AS
	SELECT s.name,
		CASE WHEN o.oid IS NULL THEN 'owner missing'
			WHEN s.paused_at IS NOT NULL THEN 'paused'
			ELSE 'active' END AS state,
		w.waiting, w.running, w.retrying, d.dead, w.oldest_waiting, outbox.done_total(s.id) AS done_total,
		s.paused_at
	FROM outbox.subscriptions s
		LEFT JOIN pg_catalog.pg_roles o ON o.oid OPERATOR(pg_catalog.=) s.owner_oid AND o.rolname OPERATOR(pg_catalog.=) s.owner
		CROSS JOIN LATERAL (
			SELECT pg_catalog.count(*) FILTER (WHERE NOT j.tried AND NOT j.running) AS waiting,
				pg_catalog.count(*) FILTER (WHERE j.running) AS running,
				pg_catalog.count(*) FILTER (WHERE j.tried AND NOT j.running) AS retrying,
				pg_catalog.min(j.created_at) AS oldest_waiting
			FROM (SELECT l.created_at, l.attempts OPERATOR(pg_catalog.>) 0 OR l.until IS NOT NULL AS tried,
					COALESCE(l.until, CASE WHEN l.claim IS NOT NULL THEN l.due_at END, '-infinity')
						OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() AS running
				FROM (SELECT created_at, attempts, claim, due_at, outbox.leased_until(id) AS until FROM outbox.jobs
					WHERE subscription_id OPERATOR(pg_catalog.=) s.id AND done_at IS NULL AND dead_at IS NULL
					ORDER BY due_at, id LIMIT 100000) l) j
		) w
		CROSS JOIN LATERAL (
			SELECT pg_catalog.count(*) AS dead FROM (SELECT FROM outbox.jobs
				WHERE subscription_id OPERATOR(pg_catalog.=) s.id AND done_at IS NULL AND dead_at IS NOT NULL
				LIMIT 100000) j
		) d
	WHERE outbox.visible(s.owner, s.owner_oid);
COMMENT ON VIEW outbox.stat_subscription IS
	'subscriptions that the current role may see, and how their jobs stand; at most 100,000 unfinished and as many dead ones are counted';

/*
 * Rights: nothing to anybody but the owner, whatever default privileges say;
 * outbox.grant gives what a role needs.
 */

REVOKE ALL ON SCHEMA outbox FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA outbox FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA outbox FROM PUBLIC;
REVOKE ALL ON ALL ROUTINES IN SCHEMA outbox FROM PUBLIC;
REVOKE ALL ON TYPE outbox.event, outbox.subscription FROM PUBLIC;

CREATE FUNCTION outbox.revoke_defaults() RETURNS boolean
	LANGUAGE c STRICT VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'outbox_revoke_defaults';
SELECT outbox.revoke_defaults();
DROP FUNCTION outbox.revoke_defaults();
