# The server stops at once, whatever the relay is doing, and nothing is lost.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $node = new_server('stop', init => { allows_streaming => 1 }, 'outbox.relay_retry_min' => "'10min'", 'outbox.relay_retry_max' => "'10min'");

$node->safe_psql('postgres', q{SELECT outbox.subscribe('all')});
install_gate($node);

# A statement that goes past what the test itself has set up
my $local = 'SET synchronous_commit = local';

my %state = (
	idle => sub { wait_relay($node) },
	pass => sub {
		$node->safe_psql('postgres', q{INSERT INTO gates VALUES ('marked'); SELECT outbox.record('x.pass') FROM generate_series(1, 300)});
		wait_at_gate($node);
	},
	commit => sub {
		$node->safe_psql('postgres', q{INSERT INTO gates VALUES ('commit'); SELECT outbox.record('x.commit') FROM generate_series(1, 300)});
		wait_at_gate($node);
	},
	backoff => sub {
		$node->safe_psql('postgres', q{ALTER TABLE outbox.routing RENAME TO hidden; SELECT outbox.record('x.backoff')});
		wait_for($node, 'a relay that backs off', q{SELECT count(*) = 1 FROM outbox.stat_relay WHERE state = 'backoff'});
	},
	lock => sub {
		my $session = $node->background_psql('postgres');

		$session->query_safe('BEGIN; LOCK TABLE outbox.jobs IN ACCESS EXCLUSIVE MODE');
		$node->safe_psql('postgres', q{SELECT outbox.record('x.lock') FROM generate_series(1, 300)});
		wait_for($node, 'a relay that waits for a lock', q{
			SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND wait_event_type = 'Lock'});
		return $session;
	},
	standby => sub {
		$node->append_conf('postgresql.conf', "synchronous_standby_names = 'nobody'");
		$node->reload;
		wait_for($node, 'a setting', q{SELECT setting = 'nobody' FROM pg_settings WHERE name = 'synchronous_standby_names'});
		$node->safe_psql('postgres', qq{$local; SELECT outbox.record('x.standby') FROM generate_series(1, 300)});
		wait_for($node, 'a relay that waits for a standby', q{
			SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND wait_event = 'SyncRep'});
	});

foreach my $mode ('fast', 'immediate', 'smart')
{
	foreach my $state (sort keys %state)
	{
		# smart waits for clients by its nature
		next if $mode eq 'smart' && $state eq 'lock';

		my $session = $state{$state}->();
		my $start = time();

		$node->stop($mode);
		cmp_ok(time() - $start, '<', 10, "$mode stop, $state: at once");
		# the client is gone, and so is what it would say
		eval { $session->quit } if ref $session;
		$node->append_conf('postgresql.conf', "synchronous_standby_names = ''");
		$node->start;
		open_gate($node);
		$node->safe_psql('postgres', 'ALTER TABLE IF EXISTS outbox.hidden RENAME TO routing');
		$node->safe_psql('postgres', 'SELECT outbox.wake()');
		wait_drained($node, "$mode stop, $state");
		is_conserved($node, "$mode stop, $state");
	}
}

# While workers are being started
foreach my $db (1 .. 8)
{
	$node->safe_psql('postgres', "CREATE DATABASE db$db");
	$node->safe_psql("db$db", 'CREATE EXTENSION outbox');
}
foreach my $i (1 .. 5)
{
	$node->stop;
	$node->start;
	my $start = time();
	$node->stop($i % 2 ? 'fast' : 'immediate');
	cmp_ok(time() - $start, '<', 10, "stop $i right after the start");
	$node->start;
}
wait_for($node, 'nine relays', q{SELECT count(*) = 9 FROM pg_stat_activity WHERE backend_type = 'outbox relay'});
pass('all relays are there at last');

$node->stop;
done_testing();
