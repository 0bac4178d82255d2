# A large import is fanned out in passes of outbox.batch_size events, each of
# which is one transaction.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('passes', 'log_min_messages' => 'info');

# All that a pass marks has one time, and all its rows come from one
# transaction.
my $passes = q{
	SELECT count(*), max(n), min(n), count(*) = count(DISTINCT xid), sum(n)
	FROM (SELECT fanned_out_at, count(*) AS n, min(xmin::text) AS xid, count(DISTINCT xmin::text) AS xids
		FROM outbox.events WHERE type = '%s' GROUP BY fanned_out_at) p WHERE xids = 1};

$node->safe_psql('postgres', q{SELECT outbox.subscribe('a'); SELECT outbox.subscribe('b'); SELECT outbox.subscribe('c', '{x.*,!x.2*}')});
settled($node);
my $before = $node->safe_psql('postgres', 'SELECT passes, events, jobs FROM outbox.stat_relay');
$node->safe_psql('postgres', q{SELECT count(outbox.record('x.import', 's/' || i)) FROM generate_series(1, 2500) i});
wait_drained($node, 'an import of 2,500 events');
is($node->safe_psql('postgres', sprintf($passes, 'x.import')),
	'13|200|100|t|2500', '12 passes of 200 events and one of 100, each a transaction');
settled($node);
my @before = split /\|/, $before;
is($node->safe_psql('postgres', "SELECT passes - $before[0], events - $before[1], jobs - $before[2] FROM outbox.stat_relay"),
	'13|2500|7500', 'so says outbox.stat_relay');
is($node->safe_psql('postgres', q{SELECT count(*) FROM (SELECT fanned_out_at, min(seq) AS low, max(seq) AS high FROM outbox.events GROUP BY 1) a
	JOIN (SELECT fanned_out_at, min(seq) AS low, max(seq) AS high FROM outbox.events GROUP BY 1) b ON a.fanned_out_at < b.fanned_out_at AND a.low > b.low}),
	0, 'in the order of their numbers');
is_conserved($node, 'an import');

# The size takes effect on reload.
foreach my $size (7, 1000)
{
	set_conf($node, 'outbox.batch_size' => $size);
	$node->safe_psql('postgres', "SELECT count(outbox.record('x.size.$size')) FROM generate_series(1, 2100) i");
	wait_drained($node, "batches of $size");
	my $full = int(2100 / $size);
	my $rest = 2100 % $size;

	is($node->safe_psql('postgres', sprintf($passes, "x.size.$size")),
		join('|', $full + ($rest ? 1 : 0), $size, $rest ? $rest : $size, 't', 2100), "passes of $size events");
}
set_conf($node, 'outbox.batch_size' => 200);

# Many subscriptions: no pass makes more than 20,000 jobs; the rest of what it
# claimed is fanned out by the next.
$node->safe_psql('postgres', q{SELECT count(outbox.subscribe('many-' || i, '{y}')) FROM generate_series(1, 300) i});
$node->safe_psql('postgres', q{SELECT count(outbox.record('y')) FROM generate_series(1, 150)});
wait_drained($node, 'events for hundreds of subscriptions');
is($node->safe_psql('postgres', sprintf($passes, 'y')), '3|66|18|t|150', 'two and three subscriptions for all types make 302 jobs an event: 66 events a pass');
is_conserved($node, 'many subscriptions');
$node->safe_psql('postgres', q{SELECT count(outbox.unsubscribe('many-' || i)) FROM generate_series(1, 300) i});

# A pass on a server that works asynchronously
set_conf($node, 'outbox.synchronous_pass' => 'off');
$node->safe_psql('postgres', q{SELECT count(outbox.record('x.asynchronous')) FROM generate_series(1, 250)});
wait_drained($node, 'outbox.synchronous_pass = off');
is($node->safe_psql('postgres', q{SELECT count(*) FROM outbox.jobs j JOIN outbox.events e ON e.seq = j.event_seq WHERE e.type = 'x.asynchronous'}),
	750, 'with all the jobs');
set_conf($node, 'outbox.synchronous_pass' => 'on');

# Statistics are reported: autovacuum could not work otherwise.
settled($node);
wait_for($node, 'statistics', q{SELECT n_tup_ins = (SELECT sum(n) FROM (SELECT last_value AS n FROM outbox.jobs_id_seq) s) FROM pg_stat_user_tables WHERE relid = 'outbox.jobs'::regclass});
wait_for($node, 'statistics', q{SELECT n_tup_upd = (SELECT count(*) FROM outbox.events) FROM pg_stat_user_tables WHERE relid = 'outbox.events'::regclass});
pass('what the relay has inserted and updated is in the statistics');
set_conf($node, 'autovacuum' => 'on', 'autovacuum_naptime' => "'1s'");
wait_for($node, 'autovacuum', q{SELECT last_autovacuum IS NOT NULL AND last_autoanalyze IS NOT NULL FROM pg_stat_user_tables WHERE relid = 'outbox.events'::regclass});
pass('autovacuum has noticed');

# What it shows in pg_stat_activity
is($node->safe_psql('postgres', q{SELECT state, wait_event_type, backend_xmin IS NULL, backend_xid IS NULL FROM pg_stat_activity WHERE backend_type = 'outbox relay'}),
	'idle|Extension|t|t', 'the relay is idle, and holds nothing');

$node->stop;
done_testing();
