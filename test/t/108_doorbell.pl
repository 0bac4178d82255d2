# The doorbell: what rings it, what does not, and that nothing depends on it.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('doorbell', 'track_functions' => 'none');

sub sql
{
	return $node->safe_psql('postgres', @_);
}

# The server as the tests look at it from another database, so that looking
# leaves no trace where the relay works.
$node->safe_psql('postgres', 'CREATE DATABASE elsewhere');

sub elsewhere
{
	return $node->safe_psql('elsewhere', @_);
}

# Transactions of everybody, as far as they are in the statistics
sub transactions
{
	return elsewhere(q{SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = 'postgres'});
}

# Changes with every transaction of the relay
sub relay_activity
{
	return elsewhere(q{SELECT pid, state_change, query_start, state FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = 'postgres'});
}

# Wait until the relay has nothing to do and no sweep is asked for that is yet
# to come: they come a second apart.
sub rested
{
	wait_for($node, 'rest', q{
		SELECT state = 'idle' AND state_change < now() - interval '1.2 seconds' FROM pg_stat_activity
		WHERE backend_type = 'outbox relay' AND datname = 'postgres'}, 'elsewhere');
	return;
}

sub fanned
{
	my ($seq, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return is(sql("CALL outbox.await_fanout($seq, '60s')"), 'fanned', $what);
}

sql(q{SELECT outbox.subscribe('all'); CREATE TABLE t (i int)});
rested();

# What is rolled back rings nothing.  The relay would have woken, and begun a
# transaction to look.
my $before = relay_activity();
my $session = $node->background_psql('postgres', on_error_stop => 0);
foreach my $quiet (
	q{BEGIN; SELECT outbox.record('x'); ROLLBACK},
	q{BEGIN; SELECT outbox.record('x'); SAVEPOINT s; SELECT outbox.record('x'); RELEASE s; ROLLBACK},
	q{BEGIN; SAVEPOINT s; SELECT outbox.record('x'); ROLLBACK TO s; COMMIT},
	q{BEGIN; SAVEPOINT s; SAVEPOINT r; SELECT outbox.record('x'); RELEASE r; ROLLBACK TO s; INSERT INTO t VALUES (1); COMMIT},
	q{BEGIN; INSERT INTO outbox.events (type) VALUES ('x'); SELECT 1 / 0; COMMIT},
	q{DO $$ BEGIN PERFORM outbox.record('x'); RAISE 'no'; END $$},
	q{DO $$ BEGIN BEGIN PERFORM outbox.record('x'); RAISE 'no'; EXCEPTION WHEN OTHERS THEN NULL; END; INSERT INTO t VALUES (1); END $$},
	q{DO $$ BEGIN PERFORM outbox.record('x'); ROLLBACK; INSERT INTO t VALUES (1); COMMIT; END $$},
	q{SELECT outbox.record('not a type')},
	q{BEGIN; SELECT outbox.record('x'); PREPARE TRANSACTION 'quiet'},
	q{ROLLBACK PREPARED 'quiet'},
	q{INSERT INTO t VALUES (1)},
	q{BEGIN; SELECT outbox.requeue(1), outbox.discard(1); COMMIT},
	q{SELECT pg_notify('another', 'channel') WHERE false})
{
	$session->query($quiet);
	is(relay_activity(), $before, "no bell: $quiet");
}
# some of these could still be on their way: what comes after them rings alone
sub rings_once
{
	my ($statement, $n) = @_;
	my $passes = sql(q{SELECT passes FROM outbox.stat_relay WHERE database = 'postgres'});
	my $events = sql('SELECT count(*) FROM outbox.events');

	$statement =~ /^COPY/ ? sql($statement) : $session->query($statement);
	wait_for($node, 'its events', 'SELECT count(fanned_out_at) = ' . ($events + $n) . ' AND count(*) = count(fanned_out_at) FROM outbox.events');
	settled($node);
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return is(sql("SELECT passes - $passes FROM outbox.stat_relay WHERE database = 'postgres'"), 1, "one pass: $statement");
}

# What commits rings, once, with all that is left of it.
rings_once(q{BEGIN; SELECT outbox.record('x'); SAVEPOINT s; SELECT outbox.record('x'); ROLLBACK TO s; SELECT outbox.record('x'); COMMIT}, 2);
rings_once(q{BEGIN; SAVEPOINT s; SAVEPOINT r; SELECT outbox.record('x'); RELEASE r; RELEASE s; COMMIT}, 1);
rings_once(q{BEGIN; SAVEPOINT s; SELECT outbox.record('x'); SAVEPOINT r; SELECT outbox.record('x'); ROLLBACK TO r; RELEASE s; COMMIT}, 1);
rings_once(q{BEGIN; SAVEPOINT a; SELECT outbox.record('x'); RELEASE a; SAVEPOINT b; SELECT outbox.record('x'); ROLLBACK TO b; COMMIT}, 1);
rings_once(q{DO $$ BEGIN PERFORM outbox.record('x'); BEGIN PERFORM outbox.record('x'); RAISE 'no'; EXCEPTION WHEN OTHERS THEN PERFORM outbox.record('x'); END; END $$}, 2);
rings_once(q{INSERT INTO outbox.events (type, payload) SELECT 'x', '{}' FROM generate_series(1, 150)}, 150);
rings_once("COPY outbox.events (type, subject) FROM stdin;\nx\t1\nx\t2\n\\.\n", 2);
rings_once(q{SET session_replication_role = replica; INSERT INTO outbox.events (type) VALUES ('x'); RESET session_replication_role}, 1);
rings_once(q{DO $$ BEGIN PERFORM outbox.record('x'); COMMIT; END $$}, 1);
is(sql(q{SELECT count(*) FROM outbox.events WHERE fanned_out_at IS NULL}), 0, 'nothing is left');

# Another database of the same server hears nothing of it.
$node->safe_psql('elsewhere', 'CREATE EXTENSION outbox');
settled($node, 'elsewhere');
my $there = $node->safe_psql('template1', q{SELECT pid, state_change FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = 'elsewhere'});
rings_once(q{SELECT outbox.record('x')}, 1);
is($node->safe_psql('template1', q{SELECT pid, state_change FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = 'elsewhere'}),
	$there, 'the relay of another database is not woken');
$node->safe_psql('elsewhere', 'DROP EXTENSION outbox');

# An event for which no bell rang: nobody but a sweep can find it.  (Whoever
# turns the trigger off has himself to thank; here it stands for whatever may
# go wrong.)
sub unheard
{
	rested();
	return sql(q{
		BEGIN;
		ALTER TABLE outbox.events DISABLE TRIGGER events_insert;
		INSERT INTO outbox.events (type) VALUES ('x.unheard') RETURNING seq;
		ALTER TABLE outbox.events ENABLE ALWAYS TRIGGER events_insert;
		COMMIT});
}

sub is_unheard
{
	my ($seq) = @_;

	settled($node);
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return is(sql("SELECT fanned_out_at IS NULL FROM outbox.events WHERE seq = $seq"), 't', 'no bell rings for it');
}

my $seq = unheard();
is_unheard($seq);
sql('SELECT outbox.wake()');
fanned($seq, 'outbox.wake() finds it');
$seq = unheard();
is_unheard($seq);
sql('NOTIFY standmeet_events');
fanned($seq, 'a notification from any client does');
$seq = unheard();
is_unheard($seq);
sql(q{NOTIFY another_channel, 'standmeet_events'});
is_unheard($seq);
$node->safe_psql('elsewhere', 'NOTIFY standmeet_events');
is_unheard($seq);
my $pid = relay_pid($node);
sql("SELECT pg_terminate_backend($pid)");
fanned($seq, 'the start of a relay does');
$seq = unheard();
$node->restart;
fanned($seq, 'the start of the server does');
$session = $node->background_psql('postgres');
settled($node);
$seq = unheard();
is_unheard($seq);
set_conf($node, 'outbox.sweep_interval' => "'200ms'");
fanned($seq, 'and so does the sweep after outbox.sweep_interval');
set_conf($node, 'outbox.sweep_interval' => "'1h'");

# Sweeps that are asked for come once a second at most, whoever asks.
settled($node);
my $started = sql('SELECT clock_timestamp()');
my $commits = transactions();
$session->query_safe('SELECT outbox.wake()') foreach 1 .. 300;
$session->query_safe('NOTIFY standmeet_events') foreach 1 .. 300;
$seq = sql(q{SELECT outbox.record('x')});
fanned($seq, 'an event beside a storm of requests');
settled($node);
# the session's own transactions are 600; a sweep takes two or three, and
# every notification one, to read it
my $seconds = sql("SELECT ceil(extract(epoch FROM clock_timestamp() - '$started'))");
wait_for($node, 'statistics', 'SELECT true', 'elsewhere');
cmp_ok(transactions() - $commits, '<=', 600 + 300 + 60 + 30 * $seconds, 'does not make the relay spin');

# The channel takes effect on reload, and may be none.
set_conf($node, 'outbox.record_channel' => "'my channel'");
settled($node);
$seq = unheard();
is_unheard($seq);
sql('NOTIFY standmeet_events');
is_unheard($seq);
sql('NOTIFY "my channel"');
fanned($seq, 'another channel');
set_conf($node, 'outbox.record_channel' => "''");
settled($node);
$seq = unheard();
sql('NOTIFY standmeet_events; NOTIFY "my channel"');
is_unheard($seq);
is(sql(q{SELECT count(*) FROM pg_stat_activity a WHERE backend_type = 'outbox relay'}), 1, 'the relay lives on');
sql('SELECT outbox.wake()');
fanned($seq, 'without a channel');
set_conf($node, 'outbox.record_channel' => "'standmeet_events'");
# told by a notification from every recording, too, when that is asked for
set_conf($node, 'outbox.notify_on_record' => 'on');
my $client = listener($node, 'standmeet_events');
$seq = sql(q{SELECT outbox.record('x')});
ok($client->wait_heard(sub { @_ == 1 }), 'outbox.notify_on_record tells relays outside the server');
fanned($seq, 'and that inside');
is_deeply([ $client->heard ], [ [ 'standmeet_events', '' ] ], 'with nothing but the knock');
set_conf($node, 'outbox.notify_on_record' => 'off');
$client->quit;
$session->quit;

# An idle server runs no transaction and writes nothing between sweeps.
set_conf($node, 'autovacuum' => 'off', 'checkpoint_timeout' => "'1h'");
sql('CHECKPOINT');
rested();
# a session that has its catalogs, so that it writes nothing itself
my $watcher = $node->background_psql('elsewhere');
my $watch = q{
	SELECT pid, state_change, query_start, state FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = 'postgres';
	SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = 'postgres';
	SELECT pg_current_wal_insert_lsn()};
$watcher->query_safe($_) foreach 'SELECT pg_sleep(0)', $watch;
# the server writes a page of its own now and then, so one quiet time is enough
my $after;
foreach (1 .. 5)
{
	$before = $watcher->query_safe($watch);
	$watcher->query_safe('SELECT pg_sleep(2.5)');
	$after = $watcher->query_safe($watch);
	last if $after eq $before;
}
is($after, $before, 'an idle relay runs no transaction and writes nothing');
$watcher->quit;

$node->stop;
done_testing();
