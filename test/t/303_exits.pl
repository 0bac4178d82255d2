# Whatever ends a worker, another comes: one, not two, and not in a hurry when
# it cannot work.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

# Every start of a worker is logged at this level.
my $node = new_server('exits', 'log_min_messages' => 'debug1');

$node->safe_psql('postgres', q{SELECT outbox.subscribe('all')});

sub works
{
	my ($what, $db) = @_;
	my $seq = $node->safe_psql($db // 'postgres', q{SELECT outbox.record('x.works')});

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is($node->safe_psql($db // 'postgres', "CALL outbox.await_fanout($seq, '60s')"), 'fanned', $what);
	return;
}

sub pid_of
{
	my ($type) = @_;

	return $node->safe_psql('postgres', "SELECT pid FROM pg_stat_activity WHERE backend_type = '$type'");
}

# Wait for one worker of a type that is another than before.
sub wait_another
{
	my ($type, $pid) = @_;

	wait_for($node, "another $type",
		"SELECT count(*) = 1 AND bool_and(pid <> $pid) FROM pg_stat_activity WHERE backend_type = '$type'");
	return pid_of($type);
}

# How often a worker was started since an offset of the log
sub starts
{
	my ($name, $offset) = @_;
	my $n = () = slurp_file($node->logfile, $offset) =~ /starting background worker process "$name/g;

	return $n;
}

works('a relay');
my $launcher = pid_of('outbox launcher');
my $relay = pid_of('outbox relay');

# The relay is told to end
$node->safe_psql('postgres', "SELECT pg_terminate_backend($relay)");
works('an event recorded while there is no relay');
$relay = wait_another('outbox relay', $relay);
is(pid_of('outbox launcher'), $launcher, 'the launcher stays');

# It is told to end in the middle of a pass
install_gate($node);
$node->safe_psql('postgres', q{INSERT INTO gates VALUES ('marked'); SELECT outbox.record('x.gate') FROM generate_series(1, 300)});
is(wait_at_gate($node), $relay, 'a relay in the middle of a pass');
$node->safe_psql('postgres', "SELECT pg_terminate_backend($relay)");
$relay = wait_another('outbox relay', $relay);
open_gate($node);
wait_drained($node, 'ended in the middle of a pass');
is_conserved($node, 'ended in the middle of a pass');

# A query cancel ends nothing
$node->safe_psql('postgres', "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE backend_type LIKE 'outbox %'");
works('a relay that was told to cancel while it was idle');
$node->safe_psql('postgres', q{INSERT INTO gates VALUES ('marked'); SELECT outbox.record('x.gate')});
is(wait_at_gate($node), $relay, 'a relay in the middle of a pass');
$node->safe_psql('postgres', q{DELETE FROM gates; SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE backend_type LIKE 'outbox %'});
wait_drained($node, 'cancelled in the middle of a pass');
is_conserved($node, 'cancelled in the middle of a pass');
is(pid_of('outbox relay'), $relay, 'the relay is the same');
is(pid_of('outbox launcher'), $launcher, 'so is the launcher');

# A storm of signals in the middle of its work does no harm
foreach my $i (1 .. 100)
{
	$node->safe_psql('postgres', q{SELECT outbox.record('x.storm') FROM generate_series(1, 50)}) if $i % 10 == 1;
	foreach my $signal ('HUP', 'USR1', 'INT', 'USR2', 'ALRM', 'HUP')
	{
		kill $signal, $relay, $launcher;
	}
}
wait_drained($node, 'a storm of signals');
is_conserved($node, 'a storm of signals');
is(pid_of('outbox relay'), $relay, 'the relay is the same');
is(pid_of('outbox launcher'), $launcher, 'so is the launcher');

# Again and again
my $offset = -s $node->logfile;
foreach my $i (1 .. 10)
{
	$node->safe_psql('postgres', "SELECT outbox.record('x.again'), pg_terminate_backend($relay)");
	$relay = wait_another('outbox relay', $relay);
}
wait_drained($node, 'ended ten times');
is(starts('outbox relay', $offset), 10, 'ten ends, ten starts');

# The launcher is told to end: the relay does not notice, and the next launcher
# takes it over
$node->safe_psql('postgres', "SELECT pg_terminate_backend($launcher)");
works('a relay without a launcher');
$launcher = wait_another('outbox launcher', $launcher);
wait_for($node, 'probes', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'outbox probe'});
$node->safe_psql('postgres', 'CREATE DATABASE other');
$node->safe_psql('other', 'CREATE EXTENSION outbox');
wait_for($node, 'a relay elsewhere', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = 'other'});
is(relay_pid($node), $relay, 'the new launcher has left the relay alone');
is(scalar(relay_pids($node)), 1, 'and started no second one');
$node->safe_psql('postgres', "SELECT pg_terminate_backend($relay)");
wait_for($node, 'a relay', qq{
	SELECT count(*) = 1 AND bool_and(pid <> $relay) FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = 'postgres'});
pass('an adopted relay is replaced when it ends');
$node->safe_psql('postgres', 'DROP DATABASE other');

# Both at once
$relay = relay_pid($node);
$node->safe_psql('postgres', "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type LIKE 'outbox %'");
$launcher = wait_another('outbox launcher', $launcher);
works('a relay after both were ended');
is(scalar(relay_pids($node)), 1, 'one relay');

# The extension is dropped while there is no launcher
$node->safe_psql('postgres', 'CREATE DATABASE other');
$node->safe_psql('other', 'CREATE EXTENSION outbox');
wait_for($node, 'a relay elsewhere', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = 'other'});
$node->safe_psql('postgres', "SELECT pg_terminate_backend($launcher)");
wait_for($node, 'no launcher', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'outbox launcher'});
$node->safe_psql('other', 'DROP EXTENSION outbox');
$node->safe_psql('postgres', 'DROP DATABASE other');
$launcher = wait_another('outbox launcher', $launcher);
wait_for($node, 'one relay', q{SELECT count(*) = 1 FROM outbox.stat_relay});
pass('the new launcher clears up what happened meanwhile');

# Killed: the server resets itself, and all is as before
foreach my $type ('outbox relay', 'outbox launcher')
{
	my $pid = pid_of($type);

	$node->safe_psql('postgres', q{INSERT INTO gates VALUES ('marks'); SELECT outbox.record('x.crash') FROM generate_series(1, 300)});
	wait_at_gate($node);
	kill 'KILL', $pid;
	$node->poll_query_until('postgres', "SELECT NOT pg_is_in_recovery() AND NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)")
	  or die 'no recovery';
	open_gate($node);
	wait_drained($node, "$type killed");
	is_conserved($node, "$type killed");
	works("a relay after $type was killed");
	is(scalar(relay_pids($node)), 1, 'one relay');
}
kill_postmaster($node);
$node->start;
works('a relay after the postmaster was killed');

# A relay that cannot connect is started less and less often, and holds up
# nobody; it works again soon after it can.
$node->safe_psql('postgres', 'CREATE ROLE boss SUPERUSER LOGIN');
$node->safe_psql('postgres', 'CREATE DATABASE poor');
$node->safe_psql('poor', q{SET ROLE boss; CREATE EXTENSION outbox; RESET ROLE; SELECT outbox.subscribe('all')});
works('a relay of its owner', 'poor');
$offset = -s $node->logfile;
$node->safe_psql('postgres', q{ALTER ROLE boss NOSUPERUSER; REVOKE CONNECT ON DATABASE poor FROM PUBLIC});
$node->safe_psql('postgres', q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = 'poor'});
$node->wait_for_log(qr/FATAL: .*permission denied for database "poor"(.*\n)+?.*FATAL: .*permission denied for database "poor"/, $offset);
works('a relay elsewhere');
$node->safe_psql('poor', q{SELECT outbox.record('x.poor')});
$node->safe_psql('postgres', q{GRANT CONNECT ON DATABASE poor TO boss});
wait_drained($node, 'when the owner may connect again', 'poor');
cmp_ok(starts('outbox relay for poor', $offset), '<', 10, 'a relay that fails is not started in a hurry');
cmp_ok(starts('outbox probe', $offset), '<', 20, 'nor are probes');

# An owner who may not log in, and is no superuser, is no obstacle.
$node->safe_psql('postgres', 'ALTER ROLE boss NOLOGIN');
$relay = relay_pid($node, 'poor');
$node->safe_psql('poor', "SELECT pg_terminate_backend($relay)");
works('a relay of an owner who may not log in', 'poor');

# Once all is well the launcher has nothing to do
wait_for($node, 'no probe', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'outbox probe'});
$offset = -s $node->logfile;
foreach my $i (1 .. 20)
{
	works("event $i");
}
is(starts('outbox', $offset), 0, 'nothing is started where nothing has happened');

$node->stop;
done_testing();
