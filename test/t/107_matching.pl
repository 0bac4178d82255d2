# Promise P6: every subscription gets every event that it matches, counted from
# the moment at which the subscription is committed.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IPC::Run;
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('matching', 'outbox.relays' => 2);

sub sql
{
	return $node->safe_psql('postgres', @_);
}

sub pgbench
{
	my ($name, $script, @options) = @_;
	my $file = "$PostgreSQL::Test::Utils::tmp_check/107_$name.sql";

	append_to_file($file, $script);
	return [ 'pgbench', '-n', @options, '-h', $node->host, '-p', $node->port, '-f', $file, 'postgres' ];
}

# Three sessions subscribe and record: in one transaction, and just after its
# commit; state the subscription anew, and record just after that; and end it,
# and record just after that.  Other sessions keep the relays busy meanwhile,
# so that they know the subscriptions as they were a moment ago.
my $rounds = slow() ? 10000 : 700;
my ($out, $err) = ('', '');

sql(q{
	SELECT outbox.subscribe('steady', '{busy}');
	CREATE TABLE rounds (client int, a1 bigint, a2 bigint, b bigint, after bigint)});
my $load = IPC::Run::start(pgbench('load', q{SELECT outbox.record('busy');}, '-c', 2, '-T', 3600), '>', \$out, '2>', \$err);
my $ok = IPC::Run::run(
	pgbench(
		'rounds', q{
BEGIN;
SELECT outbox.subscribe('s-' || :client_id, ARRAY['t.' || :client_id || '.a']);
SELECT outbox.record('t.' || :client_id || '.a') AS a1 \gset
COMMIT;
SELECT outbox.record('t.' || :client_id || '.a') AS a2 \gset
CALL outbox.await_fanout(:a1, '60s');
CALL outbox.await_fanout(:a2, '60s');
SELECT outbox.subscribe('s-' || :client_id, ARRAY['t.' || :client_id || '.b']);
SELECT outbox.record('t.' || :client_id || '.b') AS b \gset
CALL outbox.await_fanout(:b, '60s');
SELECT outbox.unsubscribe('s-' || :client_id);
SELECT outbox.record('t.' || :client_id || '.b') AS after \gset
INSERT INTO rounds VALUES (:client_id, :a1, :a2, :b, :after);
}, '-c', 3, '-t', $rounds), '>', \$out, '2>', \$err);
$load->signal('TERM');
$load->finish;
ok($ok, "3 sessions, $rounds rounds each") or diag($err);
wait_drained($node, 'their events');

sub missed
{
	my ($column) = @_;

	return sql(qq{SELECT count(*) FROM rounds r LEFT JOIN outbox.events e ON e.seq = r.$column
		WHERE e.fanout IS NULL OR NOT e.fanout ? ('s-' || client)});
}
is(sql('SELECT count(*) FROM rounds'), 3 * $rounds, 'all rounds were made');
is(missed('a1'), 0, 'an event recorded in the transaction that subscribes reaches the subscription');
is(missed('a2'), 0, 'so does one recorded just after its commit');
is(missed('b'), 0, 'and one recorded just after it was stated anew');
is(sql(q{SELECT count(*) FROM rounds r JOIN outbox.events e ON e.seq = r.after WHERE e.fanout <> '{}'}),
	0, 'none recorded after its end does');
is_conserved($node, 'subscriptions that come and go', changing => 1);

# 60 rounds more, each of which gives the relay a restart between subscribing
# and recording, or a sweep, which forgets the cache.
foreach my $n (1 .. 5)
{
	my $pid = relay_pid($node);

	sql("SELECT outbox.subscribe('late', ARRAY['late.$n'])");
	sql($n % 2 ? "SELECT pg_terminate_backend($pid)" : 'SELECT outbox.wake()');
	my $seq = sql("SELECT outbox.record('late.$n')");
	is(sql("CALL outbox.await_fanout($seq, '60s')"), 'fanned', "a restart or a sweep ($n)");
	is(sql("SELECT fanout ? 'late' FROM outbox.events WHERE seq = $seq"), 't', 'knows the new definition');
}

# Events that nobody matched are marked, and not looked at again.
$node->safe_psql('postgres', 'CREATE DATABASE nobody');
$node->safe_psql('nobody', 'CREATE EXTENSION outbox');
$node->safe_psql('nobody', q{SELECT outbox.arm(); SELECT count(outbox.record('x')) FROM generate_series(1, 450)});
wait_drained($node, 'events without a subscription', 'nobody');
is($node->safe_psql('nobody', q{SELECT count(*), min(fanout::text), max(fanout::text) FROM outbox.events}), '450|{}|{}', 'have an empty fanout');
$node->safe_psql('nobody', q{SELECT outbox.subscribe('later')});
my $seq = $node->safe_psql('nobody', q{SELECT outbox.record('x')});
$node->safe_psql('nobody', "CALL outbox.await_fanout($seq, '60s')");
is($node->safe_psql('nobody', 'SELECT count(*), min(event_seq) FROM outbox.jobs'), "1|$seq", 'a later subscription gets none of them');
is($node->safe_psql('nobody', q{
	SET enable_seqscan = off; SET enable_bitmapscan = off;
	SELECT count(*) FROM outbox.events WHERE fanned_out_at IS NULL AND poisoned_at IS NULL}), 0, 'nor are they in the index of unmarked ones');

$node->stop;
done_testing();
