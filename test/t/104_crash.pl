# Promise P2 under faults: a pass that is ended at any point leaves nothing
# behind, and its events are fanned out once, by the next.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IPC::Run;
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

seeded();
my $node = new_server('crash');

$node->safe_psql(
	'postgres', q{
	SELECT outbox.subscribe('plain');
	SELECT outbox.subscribe('coalescing', '{x.*}', coalescing => true);
	CREATE TABLE business (n int, seq bigint)});
install_gate($node);
install_faults($node);

# After a crash the server restarts by itself; wait until it has.
sub wait_restarted
{
	my ($old) = @_;

	wait_for($node, 'a restart', "SELECT pg_postmaster_start_time() IS NOT NULL AND NOT pg_is_in_recovery()");
	wait_for($node, 'another relay', "SELECT count(*) = 1 FROM outbox.stat_relay WHERE database = 'postgres' AND pid <> $old");
	return;
}

my %fault = (
	'kill -9 of the relay' => sub {
		my ($pid) = @_;
		kill 'KILL', $pid;
		wait_restarted($pid);
	},
	'kill -9 of the postmaster' => sub {
		kill_postmaster($node);
		$node->start;
	},
	'an immediate shutdown' => sub {
		$node->stop('immediate');
		$node->start;
	},
	'a fast shutdown' => sub {
		$node->stop('fast');
		$node->start;
	},
	'pg_terminate_backend' => sub {
		my ($pid) = @_;
		$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
		wait_restarted($pid);
	},
	'pg_cancel_backend' => sub {
		my ($pid) = @_;
		$node->safe_psql('postgres', "SELECT pg_cancel_backend($pid)");
	});

my @points = qw(jobs half marks marked commit);
my %some = map { $_ => 1 } ('half/kill -9 of the postmaster', 'commit/kill -9 of the postmaster',
	'marks/an immediate shutdown', 'marked/a fast shutdown', 'commit/a fast shutdown',
	'half/pg_terminate_backend', 'marked/pg_terminate_backend', 'jobs/pg_cancel_backend', 'commit/pg_cancel_backend');
my $round = 0;

foreach my $point (@points)
{
	foreach my $what (sort keys %fault)
	{
		next unless slow() || $what eq 'kill -9 of the relay' || $some{"$point/$what"};
		$round++;
		wait_relay($node);
		$node->safe_psql('postgres', "INSERT INTO public.gates VALUES ('$point')");
		# committed, rolled back, and two of one subject
		$node->safe_psql(
			'postgres', qq{
			BEGIN;
			INSERT INTO business SELECT $round, outbox.record('x.' || i % 3, 's/' || i / 2) FROM generate_series(1, 30) i;
			SAVEPOINT s;
			INSERT INTO business SELECT $round, outbox.record('x.gone', 's/' || i) FROM generate_series(1, 5) i;
			ROLLBACK TO s;
			COMMIT});
		my $pid = wait_at_gate($node);

		is($node->safe_psql('postgres', 'SELECT count(*) FROM outbox.events WHERE fanned_out_at IS NULL'),
			30, "$point: nothing counts before the commit");
		$fault{$what}->($pid);
		open_gate($node);
		wait_drained($node, "$what at $point");
		is_conserved($node, "$what at $point");
	}
}
is($node->safe_psql('postgres', 'SELECT count(*), count(DISTINCT seq), count(*) FILTER (WHERE tries > 0 OR failures > 0) FROM outbox.events'),
	join('|', 30 * $round, 30 * $round, 0), 'no crash was charged to an event');

# A crash while a pass is redone row by row.  The event that fails is charged
# for its own failures, and never for the crashes.
my $bad = $node->safe_psql('postgres', q{
	BEGIN;
	INSERT INTO public.gates VALUES ('failure');
	INSERT INTO business SELECT 1000, outbox.record('x.redo', 's/' || i) FROM generate_series(1, 20) i;
	INSERT INTO public.faults SELECT max(seq), '23514' FROM business;
	SELECT max(seq) FROM business;
	COMMIT});
foreach my $n (1 .. 6)
{
	my $pid = wait_at_gate($node);

	kill 'KILL', $pid;
	wait_restarted($pid);
	is($node->safe_psql('postgres', "SELECT tries, failures, poisoned_at IS NULL FROM outbox.events WHERE seq = $bad"),
		'0|0|t', "crash $n in a redo is not charged");
}
open_gate($node);
wait_drained($node, 'a redo after crashes');
is($node->safe_psql('postgres', "SELECT tries, failures, poisoned_at IS NOT NULL FROM outbox.events WHERE seq = $bad"),
	'5|5|t', 'five failures of its own are');
is($node->safe_psql('postgres', 'SELECT count(*) FROM outbox.poisoned'), 1, 'only one event is poisoned');
$node->safe_psql('postgres', "DELETE FROM public.faults; SELECT outbox.requeue($bad)");
wait_drained($node, 'requeue');
is_conserved($node, 'crashes in a redo');

# Writers, and kills at moments that nobody has chosen.  (A crash of one
# process takes every session along, so the writers are told and come back.)
my $script = "$PostgreSQL::Test::Utils::tmp_check/crash.sql";
append_to_file($script, <<'SQL');
\set subject random(1, 20)
\set fate random(1, 10)
BEGIN;
INSERT INTO business SELECT 2000, outbox.record('x.' || i, 's/' || :subject) FROM generate_series(1, 5) i;
\if :fate = 1
ROLLBACK;
\else
COMMIT;
\endif
SQL
set_conf($node, 'outbox.relays' => 2, 'outbox.batch_size' => 20);
my $kills = slow() ? 100 : 8;

foreach my $n (1 .. $kills)
{
	my ($out, $err) = ('', '');
	my $writers = IPC::Run::start([ 'pgbench', '-n', '-c', 3, '-T', 60, '-h', $node->host, '-p', $node->port,
			'-f', $script, 'postgres' ], '>', \$out, '2>', \$err);

	wait_for($node, 'passes', "SELECT sum(passes) > 3 FROM outbox.stat_relay WHERE database = 'postgres'");
	usleep(int(rand(150_000)));
	if ($n % 4 == 0)
	{
		kill_postmaster($node);
		$node->start;
	}
	else
	{
		my $pid = relay_pid($node);

		kill 'KILL', $pid if $pid;
	}
	$writers->finish;
	wait_for($node, 'a restart', 'SELECT NOT pg_is_in_recovery()');
}
wait_drained($node, "$kills kills under load");
is_conserved($node, "$kills kills under load");
is($node->safe_psql('postgres', q{
	SELECT (SELECT count(*) FROM (SELECT seq FROM business EXCEPT SELECT seq FROM outbox.events) lost),
		(SELECT count(*) FROM (SELECT seq FROM outbox.events WHERE type NOT LIKE 'outbox.%' EXCEPT SELECT seq FROM business) phantom),
		(SELECT count(*) FROM outbox.poisoned)}),
	'0|0|0', 'events are those of the committed transactions, and none is poisoned');

$node->stop;
done_testing();
