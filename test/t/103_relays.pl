# Promise P2: any number of relays, and no event is fanned out twice.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IPC::Run;
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('relays', 'outbox.relays' => 4, 'outbox.batch_size' => 50);

$node->safe_psql(
	'postgres', q{
	SELECT outbox.subscribe('plain');
	SELECT outbox.subscribe('coalescing', '{x.*}', coalescing => true);
	SELECT outbox.subscribe('filtered', filter => '$.n % 2 == 0');
	CREATE TABLE business (writer int, n int, seq bigint)});
wait_relay($node, 4);

# Four writers, single events and small imports, some of them rolled back.
my $script = "$PostgreSQL::Test::Utils::tmp_check/writer.sql";
append_to_file($script, <<'SQL');
\set subject random(1, 40)
\set fate random(1, 100)
BEGIN;
INSERT INTO business SELECT :client_id, i, outbox.record('x.' || (i % 3), 's/' || :subject, jsonb_build_object('n', i))
FROM generate_series(1, 5) i;
\if :fate <= 10
ROLLBACK;
\else
COMMIT;
\endif
SQL
my ($out, $err);
IPC::Run::run([ 'pgbench', '-n', '-c', 4, '-j', 2, '-t', 1100, '-h', $node->host, '-p', $node->port,
		'-f', $script, 'postgres' ], '>', \$out, '2>', \$err);
my $n = $node->safe_psql('postgres', 'SELECT count(*) FROM business');
cmp_ok($n, '>', 18000, "writers: $n events") or diag($err);
$node->safe_psql('postgres', "INSERT INTO business SELECT 9, i, outbox.record('x.rest', 's/' || i % 40) FROM generate_series($n + 1, 20000) i");
wait_drained($node, '20,000 events and four relays');
is($node->safe_psql('postgres', 'SELECT count(*) FROM (SELECT seq FROM business EXCEPT SELECT seq FROM outbox.events) lost'), 0, 'every committed event is there');
is($node->safe_psql('postgres', 'SELECT count(*) FROM (SELECT seq FROM outbox.events EXCEPT SELECT seq FROM business) phantom'), 0, 'and no other');
is($node->safe_psql('postgres', 'SELECT count(*) FROM (SELECT FROM outbox.jobs GROUP BY subscription_id, event_seq HAVING count(*) > 1) twice'), 0, 'no event is fanned out twice');
is_conserved($node, 'four relays');
wait_relay($node, 4);
cmp_ok($node->safe_psql('postgres', 'SELECT count(*) FROM outbox.stat_relay WHERE events > 0'), '>=', 2, 'they have shared the work');
is($node->safe_psql('postgres', 'SELECT sum(events), sum(jobs) FROM outbox.stat_relay'),
	$node->safe_psql('postgres', 'SELECT (SELECT count(*) FROM outbox.events), (SELECT count(*) FROM outbox.jobs)'), 'and say so');

# A backlog, found by sweeps of all four at once, while their number changes.
$node->safe_psql('postgres', 'SELECT outbox.stop()');
$node->safe_psql('postgres', q{SELECT count(outbox.record('x.backlog', 's/' || i % 100, jsonb_build_object('n', i))) FROM generate_series(1, 5000) i});
$node->safe_psql('postgres', 'SELECT outbox.start()');
$node->safe_psql('postgres', 'SELECT outbox.wake()') foreach 1 .. 3;
set_conf($node, 'outbox.relays' => 2);
set_conf($node, 'outbox.relays' => 6);
wait_drained($node, 'a backlog');
wait_relay($node, 6);
is_conserved($node, 'a backlog');
unlike(slurp_file($node->logfile), qr/outbox relay failed/, 'relays do not get in each other\'s way');

# Events that fail, with many relays: each failure counts once, and five of
# them are enough, whoever tried.
install_faults($node);
$node->safe_psql('postgres', q{
	BEGIN;
	SELECT count(outbox.record('x.some.fail', 's/' || i, '{"n": 1}')) FROM generate_series(1, 1000) i;
	INSERT INTO public.faults SELECT seq, '23514' FROM outbox.events WHERE type = 'x.some.fail' AND seq % 25 = 0;
	COMMIT});
$node->poll_query_until('postgres', q{SELECT count(*) = 40 FROM outbox.poisoned}) or diag('not all are poisoned');
wait_drained($node, 'events of which some fail');
is($node->safe_psql('postgres', q{SELECT count(*), count(fanned_out_at), min(failures) FILTER (WHERE fanned_out_at IS NULL), max(failures), max(failures) FILTER (WHERE fanned_out_at IS NOT NULL) FROM outbox.events WHERE type = 'x.some.fail'}),
	'1000|960|5|5|0', 'each of the bad ones was charged five times, none of the good ones');
is($node->safe_psql('postgres', q{SELECT count(*), count(DISTINCT payload ->> 'seq') FROM outbox.events WHERE type = 'outbox.event.poisoned'}), '40|40', 'each has one alert');
is_conserved($node, 'events of which some fail');
$node->safe_psql('postgres', 'DELETE FROM public.faults; SELECT outbox.requeue_many(ARRAY(SELECT seq FROM outbox.poisoned))');
wait_drained($node, 'requeued');
is_conserved($node, 'requeued');

set_conf($node, 'outbox.relays' => 1);
wait_relay($node, 1);
is(scalar(relay_pids($node)), 1, 'one relay is left');

unlike(slurp_file($node->logfile), qr/deadlock detected|could not serialize/, 'no deadlock');

$node->stop;
done_testing();
