# Handlers that will not end, end their own process, leave things behind or try to
# be somebody else; runners that are killed, stopped or late; and a server that
# shuts down in the middle of it.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $node = new_server('hostile', 'outbox.runners' => 1, 'outbox.sweep_interval' => "'1s'", 'log_min_messages' => 'log');

sub sql
{
	return $node->safe_psql('postgres', $_[0]);
}

sub record
{
	my ($type, $payload) = @_;

	$payload //= '{}';
	return sql("SELECT outbox.record('$type', payload => \$p\$$payload\$p\$)");
}

sub job
{
	my ($seq) = @_;

	return sql("SELECT state, attempts, COALESCE(last_error, '') FROM outbox.job_status WHERE seq = $seq");
}

sub wait_job
{
	my ($seq, $state) = @_;

	wait_for($node, "an end of event $seq", "SELECT count(*) = 1 FROM outbox.job_status WHERE seq = $seq AND state IN ('$state', 'done', 'dead')");
	die "event $seq is not $state: " . job($seq) unless job($seq) =~ /^$state\b/;
	return;
}

# Wait until handlers stand at the gate, so many of them, and return their pids.
sub at_gate
{
	my ($n) = @_;
	my $waiting = q{FROM pg_stat_activity WHERE backend_type = 'outbox runner' AND state = 'active' AND query = 'handler app.gate'};

	wait_for($node, "$n handlers at the gate", "SELECT count(*) = $n $waiting");
	return split /\n/, sql("SELECT pid $waiting ORDER BY pid");
}

# Handlers stand at the gate while it is shut.
sub shut_gate
{
	sql('INSERT INTO app.shut VALUES (true)');
	return;
}

sub open_gate_wide
{
	sql('DELETE FROM app.shut');
	return;
}

sub up
{
	wait_for($node, 'a restart', 'SELECT NOT pg_is_in_recovery()');
	return;
}

sql(q{
	CREATE ROLE low LOGIN;
	CREATE ROLE middle;
	GRANT middle TO low;
	CREATE ROLE other LOGIN;
	SELECT outbox.grant('low', 'consume'), outbox.grant('low', 'record'), outbox.grant('other', 'consume');
	CREATE SCHEMA app AUTHORIZATION low;
	GRANT USAGE ON SCHEMA app TO middle, other;
	SET ROLE low;
	CREATE TABLE app.effects (seq bigint, attempt int, pid int DEFAULT pg_backend_pid(), role name DEFAULT current_user,
		session_role name DEFAULT session_user, note text);
	GRANT INSERT ON app.effects TO middle, other;
	CREATE TABLE app.shut (shut boolean);
	GRANT SELECT ON app.shut TO other;
	CREATE FUNCTION app.ok(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO app.effects (seq, attempt) VALUES (e.seq, outbox.current_attempt());
	END $$;
	CREATE FUNCTION app.gate(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO app.effects (seq, attempt) VALUES (e.seq, outbox.current_attempt());
		WHILE EXISTS (SELECT FROM app.shut) LOOP
			PERFORM pg_sleep(0.01);
		END LOOP;
	END $$;
	CREATE FUNCTION app.run(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO app.effects (seq, attempt) VALUES (e.seq, outbox.current_attempt());
		EXECUTE e.payload->>'sql';
	END $$;
	CREATE FUNCTION app.stubborn() RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		LOOP
			BEGIN
				PERFORM pg_sleep(600);
			EXCEPTION WHEN query_canceled THEN
				NULL;
			END;
		END LOOP;
	END $$;
	CREATE FUNCTION app.forgiving() RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_sleep(600);
	EXCEPTION WHEN query_canceled THEN
		NULL;
	END $$;
	SELECT outbox.subscribe('ok', '{ok.*}', handler => 'app.ok');
	SELECT outbox.subscribe('run', '{run.*}', handler => 'app.run', max_attempts => 1);
	SELECT outbox.subscribe('run2', '{run2.*}', handler => 'app.run', max_attempts => 2, retry_min => '10ms', retry_max => '10ms');
	SELECT outbox.subscribe('short', '{short.*}', handler => 'app.run', max_attempts => 1, lease => '1s');
	SELECT outbox.subscribe('gate', '{gate.*}', handler => 'app.gate', max_attempts => 2, retry_min => '10ms', retry_max => '10ms');
	SELECT outbox.subscribe('gate_short', '{gate_short.*}', handler => 'app.gate', retry_min => '10ms', lease => '2s')});

sub run_sql
{
	my ($command, $type) = @_;

	return sql("SELECT outbox.record('" . ($type // 'run.a') . "', payload => jsonb_build_object('sql', \$q\$$command\$q\$))");
}

# Others run on.
sub runs_on
{
	my ($what) = @_;
	my $seq = record('ok.a');

	wait_job($seq, 'done');
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is(sql("SELECT count(*) FROM app.effects WHERE seq = $seq"), '1', "$what: others run on");
	return;
}

sub pid_of
{
	my $seq = record('ok.pid');

	wait_job($seq, 'done');
	return sql("SELECT pid FROM app.effects WHERE seq = $seq");
}

# A handler that ends its own process
my $seq = run_sql('SELECT pg_terminate_backend(pg_backend_pid()), pg_sleep(600)');
wait_job($seq, 'dead');
like(job($seq), qr/\Adead\|1\|57P01: handler was terminated by an administrator command\nCONTEXT: SQL statement/, 'pg_terminate_backend of itself fails the job');
runs_on('pg_terminate_backend');
$seq = run_sql('SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(600)');
wait_job($seq, 'dead');
like(job($seq), qr/\Adead\|1\|57014: canceling statement due to user request/, 'pg_cancel_backend fails the job');
runs_on('pg_cancel_backend');

# A runner that is killed: the attempt counts, and there is an end to them.
shut_gate();
$seq = record('gate.killed');
foreach my $attempt (1, 2)
{
	my ($pid) = at_gate(1);

	is(sql("SELECT attempts FROM outbox.job_status WHERE seq = $seq"), $attempt, "attempt $attempt is committed before the handler runs");
	kill 'KILL', $pid;
	$node->poll_query_until('postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)");
	up();
}
wait_job($seq, 'dead');
is(job($seq), 'dead|2|attempt 2 did not return', 'a job that kills its runner each time is dead in the end');
is(sql("SELECT count(*) FROM app.effects WHERE seq = $seq"), '0', 'and has left nothing');
open_gate_wide();
runs_on('kill -9');

# The lease is the limit
$seq = run_sql('SELECT pg_sleep(600)', 'short.a');
wait_job($seq, 'dead');
like(job($seq), qr/\Adead\|1\|57014: handler did not end within its lease\nCONTEXT: /, 'a handler that sleeps is cancelled');
my $before = pid_of();
$seq = run_sql('DO $x$ BEGIN LOOP END LOOP; END $x$', 'short.b');
wait_job($seq, 'dead');
like(job($seq), qr/\Adead\|1\|57014: handler did not end within its lease/, 'so is one that is in a loop');
$seq = run_sql('SELECT app.forgiving()', 'short.c');
wait_job($seq, 'dead');
like(job($seq), qr/\Adead\|1\|57014: handler did not end within its lease/, 'one that catches the cancel and goes on has failed all the same');
is(pid_of(), $before, 'all in one process');
$seq = run_sql('SELECT app.stubborn()', 'short.d');
wait_job($seq, 'dead');
like(job($seq), qr{\Adead\|1\|attempt 1 did not return}, 'one that does not end at all is ended with its process');
isnt(pid_of(), $before, 'another goes on');
sql(q{SET ROLE low; CREATE FUNCTION app.sleeps() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		IF TG_ARGV[0] = 'again' THEN
			SET CONSTRAINTS ALL DEFERRED;
			INSERT INTO app.sleepy2 VALUES (1);
		ELSE
			PERFORM pg_sleep(600);
		END IF;
		RETURN NULL;
	END $$;
	CREATE TABLE app.sleepy1 (i int);
	CREATE TABLE app.sleepy2 (i int);
	CREATE CONSTRAINT TRIGGER sleeps AFTER INSERT ON app.sleepy1 DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION app.sleeps('again');
	CREATE CONSTRAINT TRIGGER sleeps AFTER INSERT ON app.sleepy2 DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION app.sleeps('now')});
foreach my $i (1, 2)
{
	$seq = run_sql("INSERT INTO app.sleepy$i VALUES (1)", 'short.e');
	wait_job($seq, 'dead');
	like(job($seq), qr/\Adead\|1\|57014: handler did not end within its lease/,
		$i == 2 ? 'deferred triggers count' : 'so does what they put off until the commit');
}

# A runner that is stopped until its lease has passed, and another has done the job
set_conf($node, 'outbox.runners' => 3);
shut_gate();
$seq = record('gate_short.stopped');
my ($stopped) = at_gate(1);
kill 'STOP', $stopped;
open_gate_wide();
wait_for($node, 'the other', "SELECT attempts = 2 AND state = 'done' FROM outbox.job_status WHERE seq = $seq");
my $done = sql("SELECT done_at, holder, attempts FROM outbox.job_status WHERE seq = $seq");
my $log = -s $node->logfile;
kill 'CONT', $stopped;
$node->wait_for_log(qr/LOG:  outbox runner lost the lease of job \d+/, $log);
is(sql("SELECT done_at, holder, attempts FROM outbox.job_status WHERE seq = $seq"), $done, 'the late one changes nothing');
is(sql("SELECT string_agg(attempt::text, ',') FROM app.effects WHERE seq = $seq"), '2', 'and what it did is undone');
set_conf($node, 'outbox.runners' => 1);

# Nothing of one handler reaches the next, in the same process.
sql(q{
	SET ROLE low;
	CREATE TABLE app.state (pid int, what text, value text);
	CREATE SEQUENCE app.numbers;
	CREATE FUNCTION app.look(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		last text;
	BEGIN
		BEGIN
			last := lastval();
		EXCEPTION WHEN object_not_in_prerequisite_state THEN
			NULL;
		END;
		INSERT INTO app.state SELECT pg_backend_pid(), w, v FROM (VALUES
			('search_path', current_setting('search_path')), ('work_mem', current_setting('work_mem')),
			('my.own', current_setting('my.own', true)), ('TimeZone', current_setting('TimeZone')),
			('isolation', current_setting('default_transaction_isolation')), ('read_only', current_setting('default_transaction_read_only')),
			('seqscan', current_setting('enable_seqscan')), ('application_name', current_setting('application_name')),
			('role', current_setting('role')), ('session_authorization', current_setting('session_authorization')),
			('current_user', current_user), ('session_user', session_user),
			('prepared', (SELECT count(*)::text FROM pg_prepared_statements)),
			('cursors', (SELECT count(*)::text FROM pg_cursors WHERE is_holdable)),
			('advisory', (SELECT count(*)::text FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory')),
			('temp', to_regclass('pg_temp.leftover')::text), ('lastval', last),
			('attempt', outbox.current_attempt()::text)) s(w, v);
	END $$;
	SELECT outbox.subscribe('look', '{look.*}', handler => 'app.look')});
$seq = record('look.before');
wait_job($seq, 'done');
$before = sql('SELECT DISTINCT pid FROM app.state');
my $expected = sql('SELECT what, value FROM app.state ORDER BY what');
sql('TRUNCATE app.state');
foreach my $fails (0, 1)
{
	$seq = run_sql(q{
		SET search_path = app; SET work_mem = '64kB'; SET my.own = 'mine'; SET TimeZone = 'Asia/Tokyo';
		SET default_transaction_isolation = 'serializable'; SET default_transaction_read_only = on;
		SET enable_seqscan = off; SET enable_indexscan = off; SET plan_cache_mode = force_custom_plan;
		SET application_name = 'somebody else'; SET ROLE middle;
		PREPARE leftover AS SELECT 1; DECLARE leftover CURSOR WITH HOLD FOR SELECT * FROM pg_class;
		SELECT pg_advisory_lock(4711);
		RESET ROLE; SELECT nextval('app.numbers'); CREATE TEMP TABLE leftover (i int); INSERT INTO leftover VALUES (1); SET ROLE middle; }
		  . ($fails ? 'SELECT 1 / 0' : 'SELECT 1'));
	wait_job($seq, $fails ? 'dead' : 'done');
	$seq = record('look.after');
	wait_job($seq, 'done');
	is(sql('SELECT what, value FROM app.state ORDER BY what'), $expected, 'nothing is left in the session' . ($fails ? ' after a failure' : ''));
	is(sql('SELECT DISTINCT pid FROM app.state'), $before, 'which is the same');
	is(sql(q{SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711}), '0', 'no lock is left');
	is(sql(q{SELECT count(*) FROM pg_class WHERE relname = 'leftover'}), '0', 'no table is left');
	sql('TRUNCATE app.state');
}

# A role with defaults that bend statements
sql(q{
	ALTER ROLE low SET default_transaction_isolation = 'serializable';
	ALTER ROLE low SET enable_indexscan = off; ALTER ROLE low SET enable_nestloop = off;
	ALTER ROLE low SET search_path = app; ALTER ROLE low SET synchronous_commit = off;
	ALTER ROLE low SET statement_timeout = '1ms'; ALTER ROLE low SET lock_timeout = '1ms'; ALTER ROLE low SET idle_in_transaction_session_timeout = '1ms';
	ALTER ROLE low SET default_transaction_read_only = on; ALTER ROLE low SET row_security = off;
	ALTER ROLE low SET role = 'middle';
	SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE backend_type = 'outbox runner'});
my @seqs = split /\n/, sql(q{SELECT outbox.record('ok.defaults') FROM generate_series(1, 20)});
wait_job($_, 'done') foreach @seqs;
is(sql("SELECT count(*), count(DISTINCT seq), min(role), min(session_role) FROM app.effects WHERE seq IN (" . join(',', @seqs) . ')'),
	'20|20|low|low', 'whatever a role has set, its jobs are done, and once, and as that role');
sql(q{ALTER ROLE low RESET ALL; SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE backend_type = 'outbox runner'});

# Who tries to be somebody else
my $super = sql('SELECT current_user');
sql(q{
	SET ROLE low;
	CREATE FUNCTION app.climb() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO app.effects (note) VALUES ('trigger');
		BEGIN
			EXECUTE 'ALTER ROLE low SUPERUSER';
		EXCEPTION WHEN insufficient_privilege THEN
			NULL;
		END;
		RETURN NULL;
	END $$;
	CREATE FUNCTION app.climb_function() RETURNS int LANGUAGE plpgsql AS $$
	BEGIN
		BEGIN
			EXECUTE 'ALTER ROLE low SUPERUSER';
		EXCEPTION WHEN insufficient_privilege THEN
			NULL;
		END;
		INSERT INTO app.effects (note) VALUES ('function');
		RETURN 1;
	END $$;
	CREATE FUNCTION app.climb_definer() RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
	BEGIN
		EXECUTE 'RESET ROLE';
	END $$;
	CREATE TABLE app.trap (i int DEFAULT app.climb_function());
	CREATE CONSTRAINT TRIGGER climb AFTER INSERT ON app.trap DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION app.climb()});
my @attempts = (
	'RESET ROLE', 'RESET SESSION AUTHORIZATION', 'SET SESSION AUTHORIZATION DEFAULT', 'SET ROLE NONE',
	"SET SESSION AUTHORIZATION $super", "SET ROLE $super", 'SET SESSION AUTHORIZATION other', 'SET ROLE other',
	q{SELECT set_config('role', 'none', false)}, qq{SELECT set_config('role', '$super', false)},
	qq{SELECT set_config('session_authorization', '$super', false)}, q{SELECT set_config('session_authorization', 'default', false)},
	'DISCARD ALL', 'RESET ALL', 'SELECT app.climb_definer()',
	'DO $x$ BEGIN SET LOCAL ROLE NONE; COMMIT; SET ROLE NONE; END $x$',
	'INSERT INTO app.trap DEFAULT VALUES', 'INSERT INTO app.trap VALUES (1); SET CONSTRAINTS ALL DEFERRED',
	'SET ROLE middle; INSERT INTO app.effects (note) VALUES (1); RESET ROLE',
	'DECLARE c CURSOR WITH HOLD FOR SELECT app.climb_function()',
	'DECLARE c CURSOR FOR SELECT app.climb_function()',
	'CREATE TEMP TABLE t (i int DEFAULT app.climb_function()) ON COMMIT DELETE ROWS; INSERT INTO t DEFAULT VALUES',
	'CREATE TEMP TABLE pg_class (oid int); CREATE FUNCTION pg_temp.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $f$ SELECT app.climb_function(); SELECT now() $f$; SET search_path = pg_temp, pg_catalog',
	'CREATE OPERATOR app.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = pg_catalog.int8eq); SET search_path = app, pg_catalog',
	'CREATE TRIGGER t BEFORE UPDATE ON outbox.jobs FOR EACH ROW EXECUTE FUNCTION app.climb()',
	'CREATE RULE r AS ON UPDATE TO outbox.jobs DO ALSO SELECT app.climb_function()',
	'CREATE INDEX ON outbox.jobs (app.climb_function())',
	'UPDATE outbox.subscriptions SET owner = ' . "'$super'",
	'UPDATE outbox.jobs SET done_at = now()',
	"SELECT outbox.set_owner('run', '$super')",
	"SELECT pg_read_file('PG_VERSION')", "COPY (SELECT 1) TO PROGRAM 'true'", 'LOAD $x$plpgsql$x$; ALTER SYSTEM SET work_mem = 1');
foreach my $attempt (@attempts)
{
	$seq = sql("SELECT outbox.record('run.attack', payload => jsonb_build_object('sql', \$q\$$attempt\$q\$))");
	wait_for($node, 'the attack', "SELECT state IN ('done', 'dead') FROM outbox.job_status WHERE seq = $seq");
	my $after = record('ok.after');
	wait_job($after, 'done');
	is( sql("SELECT role, session_role FROM app.effects WHERE seq = $after") . ' '
		  . sql(q{SELECT count(*) FROM app.effects WHERE role NOT IN ('low', 'middle') OR session_role <> 'low'}) . ' '
		  . sql(q{SELECT rolsuper FROM pg_roles WHERE rolname = 'low'}),
		'low|low 0 f', "$attempt: low is low");
}
is(sql(q{SELECT DISTINCT usename FROM pg_stat_activity WHERE backend_type = 'outbox runner'}), 'low', 'and its process is of low');
is(sql(q{SELECT count(*) FROM app.effects WHERE note = 'trigger'}) > 0, 1, 'the deferred trigger did fire');

# A slow subscription beside a fast one
set_conf($node, 'outbox.runners' => 2);
shut_gate();
sql(q{SELECT outbox.record('gate.slow') FROM generate_series(1, 5)});
at_gate(1);
@seqs = split /\n/, sql(q{SELECT outbox.record('ok.fast') FROM generate_series(1, 10)});
wait_job($_, 'done') foreach @seqs;
is(scalar(at_gate(1)), 1, 'a slow subscription leaves a runner to the others');
open_gate_wide();
wait_for($node, 'the slow ones', q{SELECT count(*) = 5 FROM outbox.job_status j JOIN outbox.events USING (seq) WHERE type = 'gate.slow' AND j.state = 'done'});
pass('and comes to its end');

# Stop and start, pause and resume, end
set_conf($node, 'outbox.runners' => 1);
shut_gate();
@seqs = split /\n/, sql(q{SELECT outbox.record('gate.stop') FROM generate_series(1, 3)});
at_gate(1);
sql('SELECT outbox.stop()');
open_gate_wide();
wait_for($node, 'the first', q{SELECT count(*) = 1 FROM outbox.job_status j JOIN outbox.events USING (seq) WHERE type = 'gate.stop' AND j.state = 'done'});
wait_for($node, 'rest', q{SELECT count(*) = 0 FROM outbox.job_status WHERE state = 'running'});
is(sql(q{SELECT count(*) FROM outbox.job_status j JOIN outbox.events USING (seq) WHERE type = 'gate.stop' AND j.state = 'waiting'}), '2', 'stopped: what runs ends, nothing else begins');
sql('SELECT outbox.start()');
wait_job($_, 'done') foreach @seqs;
pass('started: it goes on');

shut_gate();
@seqs = split /\n/, sql(q{SELECT outbox.record('gate.pause') FROM generate_series(1, 3)});
at_gate(1);
sql(q{SELECT outbox.pause('gate')});
open_gate_wide();
wait_for($node, 'the first', q{SELECT count(*) = 1 FROM outbox.job_status j JOIN outbox.events USING (seq) WHERE type = 'gate.pause' AND j.state = 'done'});
runs_on('paused');
is(sql(q{SELECT count(*) FROM outbox.job_status j JOIN outbox.events USING (seq) WHERE type = 'gate.pause' AND j.state = 'waiting'}), '2', 'paused: what runs ends, nothing else begins');
sql(q{SELECT outbox.resume('gate')});
wait_job($_, 'done') foreach @seqs;
pass('resumed: it goes on');

shut_gate();
$seq = record('gate.end');
at_gate(1);
sql(q{SELECT outbox.unsubscribe('gate')});
$log = -s $node->logfile;
open_gate_wide();
$node->wait_for_log(qr/LOG:  outbox runner lost the lease of job \d+, and what attempt 1 did is undone/, $log);
is(sql("SELECT count(*) FROM app.effects WHERE seq = $seq"), '0', 'ended while it ran: what it did is undone');
runs_on('ended');

# Given to another role while it runs
sql(q{SET ROLE low; SELECT outbox.subscribe('gate', '{gate.*}', handler => 'app.gate', max_attempts => 2, retry_min => '10ms', retry_max => '10ms')});
sql(q{GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA app TO other});
shut_gate();
@seqs = split /\n/, sql(q{SELECT outbox.record('gate.given') FROM generate_series(1, 2)});
at_gate(1);
sql(q{SELECT outbox.set_owner('gate', 'other')});
open_gate_wide();
wait_job($_, 'done') foreach @seqs;
is(sql('SELECT role, session_role FROM app.effects WHERE seq IN (' . join(',', @seqs) . ') ORDER BY role'), "low|low\nother|other", 'given to another: what runs ends, the next is for that role');

# A role that is dropped
$seq = record('gate.owned');
wait_job($seq, 'done');
sql(q{SELECT outbox.revoke('other', 'consume'); DROP OWNED BY other; DROP ROLE other});
$seq = record('gate.dropped');
wait_for($node, 'a failure', "SELECT state IN ('retrying', 'dead') FROM outbox.job_status WHERE seq = $seq");
like(job($seq), qr/42704: role "other" does not exist( any more)?\nHINT: .*outbox\.set_owner/, 'dropped: its jobs fail clearly');
runs_on('dropped');
sql(q{SELECT outbox.set_owner('gate', 'low'); SELECT outbox.retry_dead('gate')});
wait_job($seq, 'done');
pass('given to another, they are done');

# Handlers of superusers
sql(q{CREATE SCHEMA root; CREATE TABLE root.effects (seq bigint, role name DEFAULT current_user);
	CREATE FUNCTION root.f(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO root.effects (seq, role) VALUES (e.seq, current_user || ' ' || session_user);
		EXECUTE COALESCE(e.payload->>'sql', 'SELECT');
	END $$;
	SELECT outbox.subscribe('root', '{root.*}', handler => 'root.f')});
$seq = record('root.a');
wait_job($seq, 'done');
is(sql('SELECT role FROM root.effects'), "$super $super", 'a superuser may have handlers');
foreach my $become ('SET SESSION AUTHORIZATION low', 'SET ROLE low', 'SET SESSION AUTHORIZATION low; SET ROLE middle', 'SET SESSION AUTHORIZATION low; SELECT 1 / 0')
{
	wait_for($node, 'the one before', q{SELECT count(*) = 0 FROM outbox.job_status WHERE state IN ('waiting', 'running')});
	sql("SELECT outbox.record('root.become', payload => jsonb_build_object('sql', '$become'))");
	$seq = record('root.after');
	wait_job($seq, 'done');
}
is(sql('SELECT DISTINCT role FROM root.effects'), "$super $super", 'and whoever they become, the next one is its own again');
sql('DELETE FROM root.effects');
set_conf($node, 'outbox.superuser_handlers' => 'off');
my ($rc, $out, $err) = $node->psql('postgres', q{SELECT outbox.subscribe('root2', handler => 'root.f')});
like($err, qr/handlers of superusers are not run/, 'unless that is turned off');
$seq = record('root.b');
runs_on('a superuser that may not');
is(sql('SELECT count(*) FROM root.effects'), '0', 'then none runs');
set_conf($node, 'outbox.superuser_handlers' => 'on');
wait_job($seq, 'done');
pass('turned on again, they are done');

# The extension goes while a handler runs
sql(q{CREATE DATABASE other});
$node->safe_psql('other', q{CREATE EXTENSION outbox; SELECT outbox.subscribe('x', '{x.*}', handler => 'public.f')
	FROM (SELECT 1) s WHERE false; CREATE FUNCTION f(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(600); END $$;
	SELECT outbox.subscribe('x', '{x.*}', handler => 'public.f'); SELECT outbox.record('x.a')});
wait_for($node, 'a handler in the other database', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = 'other' AND backend_type = 'outbox runner' AND wait_event = 'PgSleep'});
$node->safe_psql('other', 'DROP EXTENSION outbox CASCADE');
wait_for($node, 'its end', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = 'other' AND backend_type LIKE 'outbox r%'});
pass('DROP EXTENSION ends what runs');
$node->safe_psql('other', q{CREATE EXTENSION outbox; CREATE FUNCTION f(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$ BEGIN DROP EXTENSION outbox CASCADE; END $$;
	SELECT outbox.subscribe('x', '{x.*}', handler => 'public.f', max_attempts => 1); SELECT outbox.record('x.a')});
wait_for($node, 'a failure', q{SELECT count(*) = 1 FROM outbox.dead_jobs}, 'other');
# who looks meanwhile may be in its way
like($node->safe_psql('other', 'SELECT last_error FROM outbox.dead_jobs'), qr/extension "outbox" is not installed|does not exist|deadlock detected/, 'a handler that drops the extension fails');
is($node->safe_psql('other', q{SELECT count(*) FROM pg_extension WHERE extname = 'outbox'}), '1', 'and does not drop it');

# The server shuts down in the middle of a handler.
my %shutdown = (
	sleep => [ 'SELECT pg_sleep(600)', qr/\Aretrying\|1\|57P01: handler was terminated by an administrator command/ ],
	loop => [ 'DO $x$ BEGIN LOOP END LOOP; END $x$', qr/\Aretrying\|1\|57P01: handler was terminated by an administrator command/ ],
	catch => [ 'SELECT app.stubborn()', qr/\Aretrying\|1\|attempt 1 did not return/ ]);
sql(q{SET ROLE low; SELECT outbox.subscribe('run', '{run.*}', handler => 'app.run', max_attempts => 5, retry_min => '10min')});
foreach my $how (sort keys %shutdown)
{
	my ($command, $error) = @{ $shutdown{$how} };

	$seq = run_sql($command, "run.$how");
	wait_job($seq, 'running');
	wait_for($node, 'the handler', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'outbox runner' AND query = 'handler app.run'});
	$node->stop('fast');
	$node->start;
	wait_for($node, 'a failure', "SELECT state <> 'running' FROM outbox.job_status WHERE seq = $seq");
	like(job($seq), $error, "fast shutdown in a handler ($how): it fails, and is tried again later");
	sql("SELECT outbox.cancel(job) FROM outbox.job_status WHERE seq = $seq");
}
runs_on('restarted');
unlike(slurp_file($node->logfile), qr/PANIC|TRAP/, 'nothing crashed that was not killed');

$node->stop;
done_testing();
