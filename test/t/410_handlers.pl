# Handlers: a job's handler and its completion happen together or not at all, and
# whatever becomes of a handler, its job fails clearly and others run on.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $node = new_server('handlers', 'outbox.runners' => 3, 'log_min_messages' => 'log');

sub sql
{
	return $node->safe_psql('postgres', $_[0]);
}

# The state of the job of an event, its attempts and its last error
sub job
{
	my ($seq) = @_;

	return sql("SELECT state, attempts, COALESCE(last_error, '') FROM outbox.job_status WHERE seq = $seq");
}

sub wait_job
{
	my ($seq, $state, $attempts) = @_;
	my $where = defined $attempts ? "AND attempts = $attempts" : '';

	wait_for($node, "event $seq $state", "SELECT count(*) = 1 FROM outbox.job_status WHERE seq = $seq AND state = '$state' $where");
	return;
}

sub record
{
	my ($type, $payload) = @_;

	$payload //= '{}';
	return sql("SELECT outbox.record('$type', payload => '$payload')");
}

sub runner_of
{
	my ($role) = @_;

	return sql("SELECT pid FROM pg_stat_activity WHERE backend_type = 'outbox runner' AND usename = '$role' LIMIT 1");
}

sql(q{
	CREATE ROLE app LOGIN;
	SELECT outbox.grant('app', 'consume'), outbox.grant('app', 'record');
	CREATE SCHEMA app AUTHORIZATION app;
	SET ROLE app;
	CREATE TABLE app.effects (seq bigint, attempt int, note text, at timestamptz DEFAULT clock_timestamp());
	CREATE FUNCTION app.ok(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO app.effects VALUES (e.seq, outbox.current_attempt(), e.payload->>'note');
	END $$;
	SELECT outbox.subscribe('ok', '{ok.*}', handler => 'app.ok')});

# An event as a handler sees it
sql(q{
	SET ROLE app;
	CREATE TABLE app.seen (e outbox.event, attempt int, search_path text, isolation text, query text, timezone text);
	CREATE FUNCTION app.see(e outbox.event) RETURNS int LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO app.seen VALUES (e, outbox.current_attempt(), current_setting('search_path'), current_setting('transaction_isolation'),
			(SELECT query FROM pg_stat_activity WHERE pid = pg_backend_pid()), current_setting('TimeZone'));
		RETURN 42;
	END $$;
	SELECT outbox.subscribe('see', '{see.*}', handler => 'app.see');
	RESET ROLE;
	ALTER ROLE app SET search_path = app, public;
	ALTER ROLE app IN DATABASE postgres SET "TimeZone" = 'Asia/Tokyo'});
my $seq = sql(q{
	SELECT outbox.record('see.it', 'a subject', '{"secret": [1, 2.50, null]}', 'a scope', '{"h": "v"}')});
wait_job($seq, 'done');
is(sql(qq{SELECT (s.e).seq = e.seq AND (s.e).type = e.type AND (s.e).subject = e.subject AND (s.e).scope = e.scope
	AND (s.e).payload = e.payload AND (s.e).headers = e.headers AND (s.e).recorded_at = e.recorded_at
	FROM app.seen s, outbox.events e WHERE e.seq = $seq}), 't', 'the handler gets the whole event');
is(sql(q{SELECT attempt, search_path, isolation, query, timezone FROM app.seen}),
	'1|app, public|read committed|handler app.see|Asia/Tokyo', 'in the settings of its role, with no data of the event on show');
sql(q{
	SET ROLE app; SELECT outbox.unsubscribe('see'); RESET ROLE;
	ALTER ROLE app RESET ALL; ALTER ROLE app IN DATABASE postgres RESET ALL});

# Together or not at all
sql(q{
	SET ROLE app;
	CREATE TABLE app.fate (seq bigint PRIMARY KEY, outcome text);
	CREATE FUNCTION app.fragile(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM app.ok(e);
		PERFORM outbox.record('ok.child', payload => jsonb_build_object('note', 'child of ' || e.seq));
		IF (e.payload->>'fails')::int >= outbox.current_attempt() THEN
			RAISE EXCEPTION 'it broke at attempt %', outbox.current_attempt()
				USING ERRCODE = '22012', DETAIL = 'what broke', HINT = 'glue it';
		END IF;
	END $$;
	SELECT outbox.subscribe('fragile', '{fragile.*}', handler => 'app.fragile', retry_min => '10ms', retry_max => '10ms', max_attempts => 4)});
$seq = record('fragile.a', '{"fails": 2}');
wait_job($seq, 'done', 3);
is(sql("SELECT attempt FROM app.effects WHERE seq = $seq"), '3', 'what failed attempts wrote is gone, what the last one wrote is there');
is(sql("SELECT count(*) FROM outbox.events WHERE payload->>'note' = 'child of $seq'"), '1', 'so it is with events that it recorded');
like(job($seq), qr/\Adone\|3\|22012: it broke at attempt 2\nDETAIL: what broke\nHINT: glue it\nCONTEXT: PL\/pgSQL function (app\.)?fragile\(outbox\.event\) line \d+ at RAISE\z/,
	'the last failure is kept in full');
$seq = record('fragile.b', '{"fails": 10}');
wait_job($seq, 'dead', 4);
is(sql("SELECT count(*) FROM app.effects WHERE seq = $seq"), '0', 'a dead job has left nothing');
is(sql('SELECT outbox.retry((SELECT job FROM outbox.job_status WHERE state = \'dead\'))'), 't', 'it is retried');
wait_job($seq, 'dead', 4);

# A long and odd error
sql(q{
	SET ROLE app;
	CREATE FUNCTION app.verbose(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		RAISE EXCEPTION '%', repeat('é', 5000) USING DETAIL = repeat('d', 5000);
	END $$;
	SELECT outbox.subscribe('verbose', '{verbose.*}', handler => 'app.verbose', max_attempts => 1)});
$seq = record('verbose.a');
wait_job($seq, 'dead');
is(sql("SELECT octet_length(last_error) <= 2000 AND last_error LIKE 'P0001: ééé%' FROM outbox.job_status WHERE seq = $seq"), 't', 'a long error is cut');

# What fails at the end of the transaction
sql(q{
	SET ROLE app;
	CREATE TABLE app.parents (id int PRIMARY KEY);
	CREATE TABLE app.children (parent int REFERENCES app.parents DEFERRABLE INITIALLY DEFERRED);
	CREATE FUNCTION app.orphan(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO app.children VALUES (7);
	END $$;
	SELECT outbox.subscribe('orphan', '{orphan.*}', handler => 'app.orphan', retry_min => '10ms', retry_max => '10ms', max_attempts => 1000000);
	CREATE FUNCTION app.late() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		RAISE EXCEPTION 'too late';
	END $$;
	CREATE FUNCTION app.early() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		SET CONSTRAINTS ALL DEFERRED;
		INSERT INTO app.second VALUES (1);
		RETURN NULL;
	END $$;
	CREATE TABLE app.first (i int);
	CREATE TABLE app.second (i int);
	CREATE CONSTRAINT TRIGGER early AFTER INSERT ON app.first DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION app.early();
	CREATE CONSTRAINT TRIGGER late AFTER INSERT ON app.second DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION app.late();
	CREATE FUNCTION app.at_commit(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO app.first VALUES (1);
	END $$;
	SELECT outbox.subscribe('at_commit', '{at_commit.*}', handler => 'app.at_commit', max_attempts => 1)});
$seq = record('orphan.a');
wait_for($node, 'two attempts', "SELECT attempts >= 2 FROM outbox.job_status WHERE seq = $seq");
like(job($seq), qr/23503: insert or update on table "children" violates foreign key constraint/, 'a deferred constraint fails the job');
is(sql('SELECT count(*) FROM app.children'), '0', 'and the handler with it');
sql('SET ROLE app; INSERT INTO app.parents VALUES (7)');
wait_job($seq, 'done');
is(sql('SELECT count(*) FROM app.children'), '1', 'once it holds, it is done, and once');
$seq = record('at_commit.a');
wait_job($seq, 'dead');
like(job($seq), qr/P0001: too late/, 'so does what is put off until the commit itself');
is(sql('SELECT count(*) FROM app.first'), '0', 'with nothing left');

# What a handler cannot do
sql(q{
	SET ROLE app;
	CREATE PROCEDURE app.commits() LANGUAGE plpgsql AS $$ BEGIN COMMIT; END $$;
	CREATE FUNCTION app.forbidden(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM app.ok(e);
		EXECUTE e.payload->>'sql';
	END $$;
	SELECT outbox.subscribe('forbidden', '{forbidden.*}', handler => 'app.forbidden', max_attempts => 1)});
my @forbidden = (
	[ 'CALL app.commits()', qr/2D000: invalid transaction termination/ ],
	[ 'DO $x$ BEGIN COMMIT; END $x$', qr/2D000: invalid transaction termination/ ],
	[ 'DO $x$ BEGIN ROLLBACK; END $x$', qr/2D000: invalid transaction termination/ ],
	[ 'COMMIT', qr/0A000: EXECUTE of transaction commands is not implemented/ ],
	[ 'SAVEPOINT s', qr/0A000: EXECUTE of transaction commands is not implemented/ ],
	[ 'PREPARE TRANSACTION $x$p$x$', qr/0A000: EXECUTE of transaction commands is not implemented/ ],
	[ 'VACUUM app.effects', qr/25001: VACUUM cannot be executed from a function/ ],
	[ 'CREATE DATABASE d', qr/42501: permission denied|25001: CREATE DATABASE cannot/ ],
	[ 'LISTEN x', qr/cannot execute LISTEN within a background process/ ],
	[ 'SET TRANSACTION READ ONLY', qr/25006: cannot execute UPDATE in a read-only transaction/ ],
	[ 'DROP EXTENSION outbox', qr/42501: must be owner of extension outbox/ ],
	[ 'CALL outbox.await_idle(NULL)', qr/25001/ ]);
foreach my $case (@forbidden)
{
	my ($command, $error) = @$case;

	$seq = sql("SELECT outbox.record('forbidden.a', payload => jsonb_build_object('sql', \$q\$$command\$q\$))");
	wait_job($seq, 'dead');
	like(job($seq), $error, "$command: refused");
}
is(sql("SELECT count(*) FROM app.effects e JOIN outbox.events o USING (seq) WHERE o.type = 'forbidden.a'"), '0', 'nothing of these is left');

# A handler that is busy with its own job
sql(q{
	SET ROLE app;
	CREATE FUNCTION app.meddles(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM app.ok(e);
		PERFORM outbox.cancel(job) FROM outbox.job_status WHERE seq = e.seq AND subscription = 'meddles';
	END $$;
	SELECT outbox.subscribe('meddles', '{meddles.*}', handler => 'app.meddles', max_attempts => 2, retry_min => '10ms', lease => '1s');
	CREATE FUNCTION app.requeues(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM app.ok(e);
		PERFORM outbox.retry(job) FROM outbox.job_status WHERE seq = e.seq AND subscription = 'requeues';
	END $$;
	SELECT outbox.subscribe('requeues', '{requeues.*}', handler => 'app.requeues');
	CREATE FUNCTION app.nests(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		c record;
	BEGIN
		PERFORM app.ok(e);
		FOR c IN SELECT * FROM outbox.claim('pile', 100) LOOP
			PERFORM outbox.complete(c.job, c.claim);
		END LOOP;
	END $$;
	SELECT outbox.subscribe('pile', '{pile.*}');
	SELECT outbox.subscribe('nests', '{nests.*}', handler => 'app.nests')});
$seq = record('meddles.a');
wait_job($seq, 'dead');
like(job($seq), qr/\Adead\|2\|/, 'a handler cannot give up the job that runs it: what it did is undone');
is(sql("SELECT count(*) FROM app.effects WHERE seq = $seq"), '0', 'all of it');
$seq = record('requeues.a');
wait_job($seq, 'done', 1);
is(sql("SELECT count(*) FROM app.effects WHERE seq = $seq"), '1', 'to retry a running job changes nothing');
sql(q{SELECT outbox.record('pile.a') FROM generate_series(1, 3)});
wait_drained($node, 'jobs of a client');
$seq = record('nests.a');
wait_job($seq, 'done');
is(sql(q{SELECT count(*) FROM outbox.job_status WHERE subscription = 'pile' AND state = 'done'}), '3', 'a handler may work as a client of other jobs');

# An event that is gone
sql(q{SET ROLE app; SELECT outbox.pause('ok')});
$seq = record('ok.gone');
wait_drained($node, 'a paused subscription');
sql("DELETE FROM outbox.events WHERE seq = $seq");
sql(q{SET ROLE app; SELECT outbox.resume('ok')});
wait_job($seq, 'dead');
is(job($seq), "dead|1|event $seq does not exist", 'a job without its event is dead');
sql(qq{DELETE FROM outbox.jobs WHERE event_seq = $seq});

# What becomes of the function
sql(q{
	SET ROLE app;
	CREATE FUNCTION app.changes(e outbox.event) RETURNS void LANGUAGE sql AS $$ INSERT INTO app.effects VALUES (e.seq, 1, 'old') $$;
	SELECT outbox.subscribe('changes', '{changes.*}', handler => 'app.changes', max_attempts => 1)});

sub changed
{
	my ($change, $state, $expected, $what) = @_;

	sql("SET ROLE app; $change") if $change ne '';
	my $changed = record('changes.a');
	wait_job($changed, $state);
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	if ($state eq 'done')
	{
		is(sql("SELECT note FROM app.effects WHERE seq = $changed"), $expected, $what);
	}
	else
	{
		like(job($changed), $expected, $what);
	}
	return;
}

changed('', 'done', 'old', 'a handler');
changed(q{CREATE OR REPLACE FUNCTION app.changes(e outbox.event) RETURNS void LANGUAGE sql AS $$ INSERT INTO app.effects VALUES (e.seq, 1, 'new') $$},
	'done', 'new', 'replaced: the new one runs');
changed(q{CREATE FUNCTION app.changes(e jsonb) RETURNS void LANGUAGE sql AS $$ INSERT INTO app.effects VALUES (0, 1, 'overload') $$;
	CREATE FUNCTION app.changes(e outbox.event, i int DEFAULT 0) RETURNS void LANGUAGE sql AS $$ INSERT INTO app.effects VALUES (e.seq, 1, 'overload') $$},
	'done', 'new', 'overloaded: the same one runs');
changed('DROP FUNCTION app.changes(outbox.event, int); ALTER FUNCTION app.changes(outbox.event) RENAME TO renamed',
	'dead', qr/\Adead\|1\|42883: handler app\.changes has another name now: app\.renamed\nHINT: State the handler of subscription "changes" again with outbox\.subscribe/, 'renamed: it fails clearly');
changed('ALTER FUNCTION app.renamed(outbox.event) RENAME TO changes', 'done', 'new', 'renamed back: it runs again');
changed('ALTER FUNCTION app.changes(outbox.event) SECURITY DEFINER', 'done', 'new', 'SECURITY DEFINER: it runs');
sql('REVOKE EXECUTE ON FUNCTION app.changes(outbox.event) FROM PUBLIC, app');
changed('', 'dead', qr/42501: role "app" may not execute handler app\.changes\nHINT: Grant/, 'EXECUTE revoked: it fails clearly');
sql('GRANT EXECUTE ON FUNCTION app.changes(outbox.event) TO app; ALTER SCHEMA app OWNER TO postgres; REVOKE ALL ON SCHEMA app FROM app')
  if sql('SELECT current_user') eq 'postgres';
SKIP:
{
	skip 'superuser has another name', 1 if sql('SELECT current_user') ne 'postgres';
	changed('', 'dead', qr/42501: role "app" may not execute handler app\.changes/, 'USAGE of the schema revoked: it fails clearly');
	sql('ALTER SCHEMA app OWNER TO app');
}
changed('', 'done', 'new', 'granted again: it runs');
changed('DROP FUNCTION app.changes(outbox.event)', 'dead',
	qr/42883: handler app\.changes does not exist any more\nHINT: State/, 'dropped: it fails clearly');
changed(q{CREATE FUNCTION app.changes(e outbox.event) RETURNS void LANGUAGE sql AS $$ INSERT INTO app.effects VALUES (e.seq, 1, 'anew') $$},
	'dead', qr/does not exist any more/, 'one of the same name is another function');
changed(q{SELECT outbox.adopt('changes')}, 'done', 'anew', 'adopted: it runs');
is(sql('SELECT count(*) FROM app.effects WHERE seq = 0'), '0', 'no overload ever ran');

# After all that
$seq = record('ok.after', '{"note": "after all that"}');
wait_job($seq, 'done');
is(sql("SELECT note FROM app.effects WHERE seq = $seq"), 'after all that', 'others run on');
is(sql('SELECT count(*) FROM (SELECT seq FROM app.effects GROUP BY seq HAVING count(*) > 1) d'), '0', 'nothing was done twice');
like(slurp_file($node->logfile), qr/LOG:  outbox handler app\.\w+ failed: /, 'failures are logged');
unlike(slurp_file($node->logfile), qr/DETAIL:  what broke/, 'without their details');
unlike(slurp_file($node->logfile), qr/PANIC|TRAP|terminated by signal/, 'nothing crashed');

$node->stop;
done_testing();
