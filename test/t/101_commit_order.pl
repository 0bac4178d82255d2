# Promise P1: nothing is lost, whatever the order in which transactions commit
# and whatever the numbers of their events.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('order');

$node->safe_psql('postgres', q{SELECT outbox.subscribe('all'); SELECT outbox.subscribe('some', '{x.*}')});

# Two transactions that commit out of order: the event with the lower seq comes
# last, after the relay has gone past it.
my $late = $node->background_psql('postgres');
my $early = $node->background_psql('postgres');

$late->query_safe('BEGIN');
my $late_seq = $late->query_safe(q{SELECT outbox.record('x.late')});
my $early_seq = $early->query_safe(q{SELECT outbox.record('x.early')});
cmp_ok($late_seq, '<', $early_seq, 'the late transaction has the lower seq');
is($early->query_safe("CALL outbox.await_fanout($early_seq, '60s')"), 'fanned', 'the early one is fanned out');
$late->query_safe('COMMIT');
is($early->query_safe("CALL outbox.await_fanout($late_seq, '60s')"), 'fanned', 'so is the late one');

# Again, with thousands of passes and a restart of the relay in between.
$late->query_safe('BEGIN');
$late_seq = $late->query_safe(q{SELECT outbox.record('x.very.late')});
$node->safe_psql('postgres', q{SELECT count(outbox.record('x.between')) FROM generate_series(1, 5000)});
wait_drained($node, 'events that came later');
my $pid = relay_pid($node);
$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
wait_for($node, 'another relay',
	"SELECT count(*) = 1 FROM outbox.stat_relay WHERE database = 'postgres' AND pid <> $pid AND state = 'idle'");
$late->query_safe('COMMIT');
is($early->query_safe("CALL outbox.await_fanout($late_seq, '60s')"),
	'fanned', 'an event that commits after a restart of the relay is fanned out');
is_conserved($node, 'late commits');

# Each session has a stock of 50 numbers, so they come far out of order.
$node->safe_psql('postgres', 'ALTER SEQUENCE outbox.events_seq_seq CACHE 50');
$late->reconnect_and_clear;
$early->reconnect_and_clear;
my (%seqs);
foreach my $i (1 .. 30)
{
	$late->query_safe('BEGIN') if $i % 3 == 1;
	push @{ $seqs{late} }, $late->query_safe(q{SELECT outbox.record('x.cached')});
	push @{ $seqs{early} }, $early->query_safe(q{SELECT outbox.record('x.cached')});
	$late->query_safe('COMMIT') if $i % 3 == 0;
}
cmp_ok(abs($seqs{late}[0] - $seqs{early}[0]), '>=', 50, 'sessions draw from stocks of their own');
wait_drained($node, 'cached numbers');
is($node->safe_psql('postgres', q{SELECT count(*) FROM outbox.events WHERE type = 'x.cached' AND fanout ?& '{all,some}'}),
	60, 'every one has its jobs');
$node->safe_psql('postgres', 'ALTER SEQUENCE outbox.events_seq_seq CACHE 1');
$late->reconnect_and_clear;
$early->reconnect_and_clear;

# Numbers that are burned: rolled back, skipped, and far ahead.
$node->safe_psql(
	'postgres', q{
	DO $$
	BEGIN
		FOR i IN 1 .. 500 LOOP
			PERFORM outbox.record('x.gone') FROM generate_series(1, 20);
			ROLLBACK;
			IF i % 5 = 0 THEN
				PERFORM outbox.record('x.kept');
				COMMIT;
			END IF;
		END LOOP;
	END $$});
wait_drained($node, 'gaps');
is($node->safe_psql('postgres', q{SELECT count(*) FILTER (WHERE type = 'x.kept'), count(*) FILTER (WHERE type = 'x.gone') FROM outbox.events}),
	'100|0', 'what was rolled back is not there');
foreach my $jump (2147483646, 4294967295, 9007199254740992, 9223372036854775000)
{
	$node->safe_psql('postgres', "SELECT setval('outbox.events_seq_seq', $jump)");
	my $before = $late->query_safe(q{SELECT outbox.record('x.jump')});
	is($early->query_safe("CALL outbox.await_fanout($before, '60s')"), 'fanned', "an event numbered after $jump");
}
# and back: what is recorded now has lower numbers than what was fanned out
$node->safe_psql('postgres', "SELECT setval('outbox.events_seq_seq', 1000000)");
my $low = $late->query_safe(q{SELECT outbox.record('x.low')});
is($early->query_safe("CALL outbox.await_fanout($low, '60s')"), 'fanned', 'a number far below the highest is found');
is_conserved($node, 'numbers of every kind');

# A row that another session has locked is passed over and swept up later; the
# rows around it do not wait.  A lock such as a foreign key takes hides nothing.
$node->safe_psql('postgres', 'SELECT outbox.stop()');
my @seqs = split /\n/, $node->safe_psql('postgres', q{SELECT outbox.record('x.locked') FROM generate_series(1, 5)});
$late->query_safe("BEGIN; SELECT FROM outbox.events WHERE seq = $seqs[1] FOR UPDATE");
$early->query_safe("BEGIN; SELECT FROM outbox.events WHERE seq = $seqs[3] FOR KEY SHARE");
$node->safe_psql('postgres', 'SELECT outbox.start()');
foreach my $i (0, 2, 3, 4)
{
	wait_for($node, "event $i", "SELECT fanned_out_at IS NOT NULL FROM outbox.events WHERE seq = $seqs[$i]");
}
pass('rows around a locked row are fanned out, and so is one locked FOR KEY SHARE');
settled($node);
is($node->safe_psql('postgres', 'SELECT seq FROM outbox.events WHERE fanned_out_at IS NULL'),
	$seqs[1], 'the locked row is not');
$early->query_safe('COMMIT');
$late->query_safe('COMMIT');
# no bell rings for the end of a lock: it is the sweep that finds the row
set_conf($node, 'outbox.sweep_interval' => "'100ms'");
wait_drained($node, 'after the lock is gone');
set_conf($node, 'outbox.sweep_interval' => "'1h'");
is_conserved($node, 'locked rows');

$late->quit;
$early->quit;
$node->stop;
done_testing();
