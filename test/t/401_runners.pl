# Runners come when handlers have something to do and go when they have not;
# roles share the places; and DDL, reloads and roles that cannot have a runner
# hold nobody up.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $node = new_server('runners');
my $version = $node->safe_psql('postgres', q{SELECT current_setting('server_version_num')::int / 10000});

# A database in which roles may have handlers.  A handler waits while its gate
# is closed, and tells who ran it, when, and where.
sub prepare
{
	my ($db, @roles) = @_;

	$node->safe_psql(
		$db, q{
	CREATE TABLE gates (name text PRIMARY KEY);
	CREATE TABLE ran (who text, seq bigint, pid int, attempt int, began timestamptz, ended timestamptz DEFAULT clock_timestamp());
	CREATE FUNCTION handle(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		began timestamptz := clock_timestamp();
	BEGIN
		WHILE EXISTS (SELECT FROM public.gates WHERE name = e.subject) LOOP
			PERFORM pg_catalog.pg_sleep(0.005);
		END LOOP;
		INSERT INTO public.ran VALUES (session_user || '/' || current_user, e.seq, pg_backend_pid(), outbox.current_attempt(), began);
	END $$;
	GRANT ALL ON gates, ran TO PUBLIC});
	foreach my $role (@roles)
	{
		$node->safe_psql($db, "SELECT outbox.grant('$role', 'consume')");
		handle_as($db, $role);
	}
	return;
}

# Subscriptions whose handlers run as a role.  There are several, since one that
# is not known to be fast has all runners but one at most.
sub handle_as
{
	my ($db, $role) = @_;

	$node->safe_psql($db, qq{
		SET SESSION AUTHORIZATION $role;
		SELECT outbox.subscribe('$role' || n, ARRAY['$role.' || n], handler => 'public.handle',
			retry_min => '0.01s', retry_max => '0.01s') FROM generate_series(1, 3) n});
	return;
}

# Record an event for a handler of a role.
sub record
{
	my ($role, $gate, $db, $n) = @_;

	$n //= 1;
	return $node->safe_psql($db // 'postgres', "SELECT outbox.record('$role.$n', '" . ($gate // '') . "')");
}

sub close_gate
{
	my ($gate, $db) = @_;

	$node->safe_psql($db // 'postgres', "INSERT INTO gates VALUES ('$gate')");
	return;
}

sub handled
{
	my ($seq, $what, $db) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok($node->poll_query_until($db // 'postgres', "SELECT count(*) > 0 FROM ran WHERE seq = $seq"), $what);
	return;
}

# Wait until a handler waits at its gate, and return the pid of its runner.
sub at_work
{
	my ($seq, $db) = @_;
	my $find = "FROM outbox.stat_runner r JOIN outbox.jobs j ON j.id = r.job WHERE j.event_seq = $seq AND r.state = 'running'";

	wait_for($node, "the handler of event $seq", "SELECT count(*) = 1 $find", $db);
	return $node->safe_psql($db // 'postgres', "SELECT r.pid $find");
}

sub runners
{
	my ($db) = @_;

	return $node->safe_psql('postgres', sprintf(q{
		SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox runner' AND datname = '%s'}, $db // 'postgres'));
}

sub wait_runners
{
	my ($n, $what, $db) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok( $node->poll_query_until('postgres', sprintf(q{
			SELECT count(*) = %d FROM pg_stat_activity WHERE backend_type = 'outbox runner' AND datname = '%s'}, $n, $db // 'postgres')),
		$what);
	return;
}

# Have all runners go that have nothing to do.
sub no_runners
{
	my $n = $node->safe_psql('postgres', 'SHOW outbox.runners');

	set_conf($node, 'outbox.runners' => 0);
	wait_runners(0, 'no runner');
	set_conf($node, 'outbox.runners' => $n);
	return;
}

# Run a statement that must not wait for a handler.
sub quick
{
	my ($sql, $what, $db) = @_;
	my $start = time();
	my ($rc, $stdout, $stderr) = $node->psql($db // 'postgres', "SET client_min_messages = warning; $sql");

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is("$rc$stderr", '0', $what);
	cmp_ok(time() - $start, '<', 4.5, "$what: at once");
	return;
}

$node->safe_psql('postgres', 'CREATE ROLE anna LOGIN; CREATE ROLE bert LOGIN; CREATE ROLE carl LOGIN');
prepare('postgres', 'anna', 'bert', 'carl');

# By need
is(runners(), 0, 'no runner when there is nothing to do');
my $seq = record('anna');
handled($seq, 'the first job brings a runner');
is($node->safe_psql('postgres', "SELECT who FROM ran WHERE seq = $seq"), 'anna/anna', 'which is the role of the subscription');
my $first = $node->safe_psql('postgres', "SELECT pid FROM ran WHERE seq = $seq");
is( $node->safe_psql('postgres', "SELECT usename, backend_type, application_name FROM pg_stat_activity WHERE pid = $first"),
	'anna|outbox runner|outbox runner for postgres',
	'and says so');
$seq = record('anna');
handled($seq, 'another job');
is($node->safe_psql('postgres', "SELECT pid FROM ran WHERE seq = $seq"), $first, 'is handled by the same runner');
wait_for($node, 'counters', "SELECT count(*) = 1 FROM outbox.stat_runner WHERE pid = $first AND role = 'anna' AND state = 'idle' AND jobs = 2 AND failures = 0");
wait_runners(0, 'a runner without work ends');
$seq = record('anna');
handled($seq, 'the next job brings another');
isnt($node->safe_psql('postgres', "SELECT pid FROM ran WHERE seq = $seq"), $first, '... runner');

# In time
$seq = $node->safe_psql('postgres', q{SELECT outbox.record('bert.1', not_before => clock_timestamp() + interval '2s')});
handled($seq, 'a job that is due later');
is($node->safe_psql('postgres', "SELECT ran.began >= e.not_before AND ran.began < e.not_before + interval '1s' FROM ran JOIN outbox.events e USING (seq) WHERE seq = $seq"),
	't', 'is handled when it is due, though nothing happens then');

# A runner that is busy does not hold up the jobs of its own role
close_gate('one');
my $blocked = record('anna', 'one');
my $pid = at_work($blocked);
$seq = record('anna', '', 'postgres', 2);
handled($seq, 'another job of a role whose runner is busy');
isnt($node->safe_psql('postgres', "SELECT pid FROM ran WHERE seq = $seq"), $pid, 'is handled by another runner');

# nor, when all are busy, for ever those of another
my $second = record('anna', 'one', 'postgres', 2);
at_work($second);
is(runners(), 2, 'no more than outbox.runners');
my $other = record('bert');
open_gate($node);
handled($_, 'and all is handled in the end') foreach $blocked, $second, $other;

# Places are shared: one place, three roles with more work than it can do
no_runners();
set_conf($node, 'outbox.runners' => 1);
$node->safe_psql('postgres', q{TRUNCATE ran; INSERT INTO gates VALUES ('pace')});
$node->safe_psql('postgres', q{
	CREATE OR REPLACE FUNCTION handle(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		began timestamptz := clock_timestamp();
	BEGIN
		WHILE EXISTS (SELECT FROM public.gates WHERE name = e.subject) LOOP
			PERFORM pg_catalog.pg_sleep(0.005);
			EXIT WHEN e.subject = 'pace' AND clock_timestamp() > began + interval '100ms';
		END LOOP;
		INSERT INTO public.ran VALUES (session_user || '/' || current_user, e.seq, pg_backend_pid(), outbox.current_attempt(), began);
	END $$});
$node->safe_psql('postgres', q{
	SELECT count(outbox.record(r || '.1', 'pace')) FROM generate_series(1, 30), unnest('{anna,bert,carl}'::text[]) r});
wait_for($node, 'all to be handled', 'SELECT count(*) = 90 FROM ran');
is($node->safe_psql('postgres', q{
	SELECT count(*) FROM ran a JOIN ran b ON a.pid < b.pid AND a.began < b.ended AND b.began < a.ended}), 0, 'one place: no two runners at once');
is($node->safe_psql('postgres', q{
	SELECT count(DISTINCT who) FROM (SELECT who FROM ran ORDER BY ended LIMIT 50) r}), 3, 'nobody waits until the others have nothing to do');
cmp_ok($node->safe_psql('postgres', q{SELECT count(DISTINCT pid) FROM ran}), '<=', 20, 'and a runner has some time before it goes');

# A runner that waits for work makes room at once
$seq = record('anna');
handled($seq, 'a job');
is(runners(), 1, 'its runner waits for more');
my $start = time();
$seq = record('bert');
handled($seq, 'a job of another role');
cmp_ok(time() - $start, '<', 4, 'does not wait for it to end');

# An owner whose jobs are long waits for nobody to whom it has nothing to give
set_conf($node, 'outbox.runners' => 3);
$node->safe_psql('postgres', q{DELETE FROM gates; INSERT INTO gates VALUES ('long')});
my @long = map { record('anna', 'long', 'postgres', $_) } 1 .. 3;
at_work($_) foreach @long;
$seq = record('bert');
wait_for($node, 'bert to have a job', "SELECT count(*) = 1 FROM outbox.jobs WHERE event_seq = $seq");
is(runners(), 3, 'three places');
$node->safe_psql('postgres', 'DELETE FROM gates');
handled($seq, 'a role comes to its turn');
handled($_, 'as those before it have') foreach @long;

# Reload
close_gate('one');
$blocked = record('anna', 'one');
$pid = at_work($blocked);
set_conf($node, 'outbox.runners' => 0);
$seq = record('bert');
wait_for($node, 'bert to have a job', "SELECT count(*) = 1 FROM outbox.jobs WHERE event_seq = $seq");
wait_runners(1, 'outbox.runners = 0: only who is at work stays');
is(at_work($blocked), $pid, '... undisturbed');
open_gate($node);
handled($blocked, '... to the end');
wait_runners(0, '... and goes');
is($node->safe_psql('postgres', "SELECT count(*) FROM ran WHERE seq = $seq"), 0, 'nobody else does anything');
set_conf($node, 'outbox.runners' => 2);
handled($seq, 'until there are places again');

# Ended by hand, and by the end of the launcher
$pid = $node->safe_psql('postgres', "SELECT pid FROM ran WHERE seq = $seq");
$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
$seq = record('bert');
handled($seq, 'a runner comes after one that was ended');
close_gate('one');
$blocked = record('anna', 'one');
$pid = at_work($blocked);
my $launcher = q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'outbox launcher'};
my $old = $node->safe_psql('postgres', $launcher);
$node->safe_psql('postgres', "SELECT pg_terminate_backend($old)");
wait_for($node, 'another launcher', "SELECT count(*) = 1 FROM ($launcher) l WHERE pid <> $old");
$seq = record('bert');
handled($seq, 'another launcher starts runners');
is(at_work($blocked), $pid, 'and leaves alone those that it finds');
open_gate($node);
handled($blocked, '... which do their work');
no_runners();

# A role that may not log in
my $offset = -s $node->logfile;
$node->safe_psql('postgres', 'ALTER ROLE bert NOLOGIN');
$seq = record('bert');
if ($version >= 17)
{
	handled($seq, 'a role that may not log in has runners');
}
else
{
	wait_for($node, 'bert to have a job', "SELECT count(*) = 1 FROM outbox.jobs WHERE event_seq = $seq");
	$node->safe_psql('postgres', 'SELECT outbox.wake()');
	wait_for($node, 'the job to fail', "SELECT count(*) = 1 FROM outbox.job_status WHERE seq = $seq AND attempts = 1");
	like($node->safe_psql('postgres', "SELECT last_error FROM outbox.job_status WHERE seq = $seq"),
		qr/^28000: role "bert" is not permitted to log in.*HINT: .*outbox\.set_owner/s,
		'jobs of a role that may not log in fail');
}
handled(record('anna'), 'others go on');
$node->safe_psql('postgres', 'ALTER ROLE bert LOGIN; SELECT outbox.wake()');
handled($seq, 'a role that may log in again');
unlike(slurp_file($node->logfile, $offset), qr/FATAL: +role|ERROR/, 'and the log is not filled with it');

# One that may not connect to the database
no_runners();
$node->safe_psql('postgres', 'REVOKE CONNECT ON DATABASE postgres FROM PUBLIC; GRANT CONNECT ON DATABASE postgres TO anna, carl');
$offset = -s $node->logfile;
$seq = record('bert');
$node->wait_for_log(qr/FATAL: +permission denied for database "postgres"/, $offset);
handled(record('anna'), 'others do not wait for a role that cannot connect');
$node->safe_psql('postgres', 'SELECT outbox.wake()');
wait_for($node, 'the job to fail', "SELECT count(*) = 1 FROM outbox.job_status WHERE seq = $seq AND attempts >= 1");
like($node->safe_psql('postgres', "SELECT last_error FROM outbox.job_status WHERE seq = $seq"),
	qr/^42501: role "bert" may not connect to database "postgres"\nHINT: /, 'jobs of a role that may not connect fail');
$node->safe_psql('postgres', 'GRANT CONNECT ON DATABASE postgres TO PUBLIC; SELECT outbox.wake()');
handled($seq, 'a role that may connect again');

# One that is gone
$node->safe_psql('postgres', q{
	CREATE ROLE ghost LOGIN;
	SELECT outbox.subscribe('ghost', '{ghost.*}', handler => 'public.handle', retry_min => '0.01s', retry_max => '0.01s', max_attempts => 2);
	SELECT outbox.grant('ghost', 'consume');
	SELECT outbox.set_owner('ghost', 'ghost')});
handled(record('ghost'), 'a role');
no_runners();
$node->safe_psql('postgres', 'DROP OWNED BY ghost; DROP ROLE ghost');
$offset = -s $node->logfile;
$seq = record('ghost');
my $more = record('ghost');
wait_for($node, 'a job of a role that is gone', "SELECT count(*) = 2 FROM outbox.jobs WHERE event_seq IN ($seq, $more)");
$node->safe_psql('postgres', 'SELECT outbox.wake()');
wait_for($node, 'it to fail', "SELECT count(*) = 2 FROM outbox.jobs WHERE event_seq IN ($seq, $more) AND attempts = 1");
like($node->safe_psql('postgres', "SELECT last_error FROM outbox.jobs WHERE event_seq = $seq"),
	qr/^42704: role "ghost" does not exist\nHINT: .*outbox\.set_owner/, 'jobs of a role that is gone fail');
handled(record('anna'), 'others go on');
$node->safe_psql('postgres', 'CREATE ROLE ghost LOGIN; SELECT outbox.wake()');
wait_for($node, 'them to be dead', "SELECT count(*) = 2 FROM outbox.jobs WHERE event_seq IN ($seq, $more) AND dead_at IS NOT NULL");
like($node->safe_psql('postgres', "SELECT last_error FROM outbox.jobs WHERE event_seq = $seq"),
	qr/^42704: role "ghost" does not exist/, 'a role of the same name is another, and they die on their schedule');
unlike(slurp_file($node->logfile, $offset), qr/FATAL|ERROR/, 'and the log is not filled with it');
$node->safe_psql('postgres', q{SELECT outbox.set_owner('ghost', 'anna'); SELECT outbox.retry_dead('ghost')});
handled($_, 'given to another role, they are handled') foreach $seq, $more;

# Superusers
$node->safe_psql('postgres', q{SELECT outbox.subscribe('super', '{super.*}', handler => 'public.handle')});
handled(record('super'), 'a handler of a superuser');
set_conf($node, 'outbox.superuser_handlers' => 'off');
$seq = record('super');
handled(record('anna'), 'handlers of others run');
wait_for($node, 'a job of a superuser', "SELECT count(*) = 1 FROM outbox.jobs WHERE event_seq = $seq");
$node->safe_psql('postgres', 'SELECT outbox.wake()');
handled(record('anna'), 'handlers of others run after a sweep');
is($node->safe_psql('postgres', "SELECT attempts FROM outbox.jobs WHERE event_seq = $seq AND done_at IS NULL"), 0,
	'outbox.superuser_handlers = off: those of superusers rest');
is($node->safe_psql('postgres', q{
	SELECT count(*) FROM pg_stat_activity JOIN pg_roles ON oid = usesysid WHERE backend_type = 'outbox runner' AND rolsuper AND state = 'active'}),
	0, 'and have no runner');
set_conf($node, 'outbox.superuser_handlers' => 'on');
handled($seq, 'and run when it is on');

# DDL on a database in which a handler is at work
$node->safe_psql('postgres', 'CREATE DATABASE app');
$node->safe_psql('app', 'CREATE EXTENSION outbox');
prepare('app', 'anna');
close_gate('one', 'app');
$blocked = record('anna', 'one', 'app');
at_work($blocked, 'app');
quick('CREATE DATABASE tell', 'creation of another database');
quick('DROP DATABASE tell', 'drop of another database');
quick('ALTER DATABASE app RENAME TO shop', 'ALTER DATABASE RENAME');
open_gate($node, 'shop');
handled($blocked, 'what it interrupted is handled again', 'shop');
close_gate('one', 'shop');
$blocked = record('anna', 'one', 'shop');
at_work($blocked, 'shop');
is($node->safe_psql('postgres', q{SELECT application_name FROM pg_stat_activity WHERE backend_type = 'outbox runner' AND datname = 'shop'}),
	'outbox runner for shop', 'a runner of the renamed database');

# No more of ours, and again
set_conf($node, 'outbox.databases' => "'postgres'");
wait_runners(0, 'no runner in a database that is left out', 'shop');
open_gate($node, 'shop');
set_conf($node, 'outbox.databases' => "'*'");
handled($blocked, 'what it interrupted is handled when it is not left out', 'shop');

# DROP EXTENSION while a handler is at work: rolled back, then for good
close_gate('one', 'shop');
$blocked = record('anna', 'one', 'shop');
at_work($blocked, 'shop');
quick('BEGIN; DROP EXTENSION outbox CASCADE; ROLLBACK', 'DROP EXTENSION, rolled back', 'shop');
$pid = at_work($blocked, 'shop');
my ($rc, $stdout, $stderr) = $node->psql('shop', 'DROP EXTENSION outbox CASCADE', extra_params => [ '-U', 'anna' ], timeout => 60);
like($stderr, qr/must be owner of extension outbox/, 'who may not drop it is told so without waiting for the handler');
is(at_work($blocked, 'shop'), $pid, '... cannot end a runner either');
$offset = -s $node->logfile;
quick('DROP EXTENSION outbox CASCADE', 'DROP EXTENSION', 'shop');
wait_runners(0, 'no runner without the extension', 'shop');
is($node->safe_psql('shop', "SELECT count(*) FROM ran WHERE seq = $blocked"), 0, 'nothing of the handler remains');
$node->safe_psql('shop', 'DROP TABLE ran, gates; CREATE EXTENSION outbox');
prepare('shop', 'anna');
handled(record('anna', '', 'shop'), 'made again, it works', 'shop');
unlike(slurp_file($node->logfile, $offset), qr/ERROR:  (?!canceling)|terminated by signal/, 'and there is no trouble in the log');

# DROP DATABASE
close_gate('one', 'shop');
$blocked = record('anna', 'one', 'shop');
at_work($blocked, 'shop');
quick('DROP DATABASE shop', 'DROP DATABASE');
wait_runners(0, 'no runner for a database that is gone', 'shop');
handled(record('anna'), 'others go on');

# One runner is all that max_worker_processes has room for
$node->append_conf('postgresql.conf', "max_worker_processes = 3\nmax_logical_replication_workers = 0");
$offset = -s $node->logfile;
$node->restart;
$node->safe_psql('postgres', q{TRUNCATE ran; INSERT INTO gates VALUES ('pace')});
$node->safe_psql('postgres', q{
	SELECT count(outbox.record(r || '.1', 'pace')) FROM generate_series(1, 25), unnest('{anna,bert}'::text[]) r});
$start = time();
wait_for($node, 'all to be handled', 'SELECT count(*) = 50 FROM ran');
cmp_ok(time() - $start, '<', 11, 'roles share the only worker that there is room for, and nobody waits for nothing');
is($node->safe_psql('postgres', q{
	SELECT count(DISTINCT who) FROM (SELECT who FROM ran ORDER BY ended LIMIT 35) r}), 2, '... in turns');
my $said = () = slurp_file($node->logfile, $offset) =~ /no background worker slot is free/g;
is($said, 1, 'that there is no room is said once');

$node->stop;
done_testing();
