# CALL outbox.await_jobs() and await_idle(): who waits is woken by everything
# that makes a job claimable, holds nothing, and costs nothing.  Notifications
# of jobs, and the counters of subscriptions.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IPC::Run;
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $node = new_server('await_jobs', 'max_connections' => 160);

sub sql
{
	return $node->safe_psql('postgres', @_);
}

# The server as it is looked at from another database
sql('CREATE DATABASE elsewhere');
my $watcher = $node->background_psql('elsewhere');

sub transactions
{
	return $watcher->query_safe(q{SELECT pg_stat_clear_snapshot(), xact_commit + xact_rollback FROM pg_stat_database WHERE datname = 'postgres'}) =~ /(\d+)$/ ? $1 : die;
}

# A session that waits for something; returns when it does.
sub start_waiting
{
	my ($session, $call) = @_;
	my $pid = $session->query_safe('SELECT pg_backend_pid()');

	$session->query_until(qr/started/, "\\echo started\n$call;\n\\echo ended\n");
	wait_for($node, 'the session to wait',
		"SELECT wait_event_type = 'Extension' AND query LIKE 'CALL%' FROM pg_stat_activity WHERE pid = $pid");
	return $pid;
}

sub end_waiting
{
	my ($session) = @_;

	$session->{run}->pump until $session->{stdout} =~ /ended/ || $session->{timeout}->is_expired;
	my $output = $session->{stdout};

	$session->{stdout} = '';
	$output =~ s/\s*ended\s*//;
	$output =~ s/.*started\s*//s;
	return $output;
}

sub record
{
	my ($type, $n) = @_;

	sql("INSERT INTO outbox.events (type, subject) SELECT '$type', i::text FROM generate_series(1, $n) i");
	wait_for($node, "$type is fanned out", 'SELECT NOT EXISTS (SELECT FROM outbox.events WHERE fanned_out_at IS NULL)');
	return;
}

sql(q{
	CREATE TABLE done (client int);
	SELECT outbox.subscribe('jobs', '{jobs}', retry_min => '0', retry_max => '0');
	SELECT outbox.subscribe('idle', '{idle}');
	SELECT outbox.subscribe('ordered', '{ordered}', ordered => true)});
wait_relay($node);
my $session = $node->background_psql('postgres', on_error_stop => 0);

# While it waits, the session pins nothing.
my $pid = start_waiting($session, q{CALL outbox.await_jobs('jobs', '60s')});
is(sql("SELECT backend_xmin IS NULL, backend_xid IS NULL, state FROM pg_stat_activity WHERE pid = $pid"), 't|t|active', 'no snapshot and no transaction id while it waits');
is(sql("SELECT count(*) FROM pg_locks WHERE pid = $pid AND locktype <> 'virtualxid'"), 0, 'nor any lock');
sql('CREATE TABLE dead AS SELECT 1 AS i; DELETE FROM dead');
like(($node->psql('postgres', 'VACUUM (VERBOSE) dead'))[2], qr/1 (?:dead row versions|removed|removable)|tuples: 1 removed/, 'VACUUM removes what it would have held');
is(sql(q{ALTER TABLE outbox.jobs SET (fillfactor = 100)}), '', 'and a table can be altered');
sql(q{SELECT outbox.record('jobs')});
is(end_waiting($session), 't', 'the commit of the relay ends the wait');
$pid = start_waiting($session, q{CALL outbox.await_idle('jobs', '60s')});
is(sql("SELECT backend_xmin IS NULL, backend_xid IS NULL, state FROM pg_stat_activity WHERE pid = $pid"), 't|t|active', 'await_idle: no snapshot and no transaction id');
is(sql("SELECT count(*) FROM pg_locks WHERE pid = $pid AND locktype <> 'virtualxid'"), 0, 'nor any lock');
sql(q{SELECT outbox.complete(job, claim) FROM outbox.claim('jobs')});
is(end_waiting($session), 't', 'the end of the last job ends it');

# What wakes: everything after which there is a job.  One that is not woken sees
# by itself after a second at most, so it is woken again and again: by luck, that
# would take half the time.
my $other = $node->background_psql('postgres', on_error_stop => 0);
$other->query_safe('SET client_min_messages = error');

sub wakes
{
	my ($what, $prepare, $wake, $tidy, %opt) = @_;
	my $subscription = $opt{subscription} // 'jobs';
	my $took = 0;
	my $times = 10;

	$tidy //= q{SELECT count(outbox.complete(job, claim)) FROM outbox.claim('jobs', 10)};
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	foreach (1 .. $times)
	{
		$other->query_safe($_) foreach @$prepare;
		start_waiting($session, "CALL outbox.await_jobs('$subscription', '60s')");
		my $start = time;

		$other->query_safe($_) foreach @$wake;
		my $result = end_waiting($session);

		$took += time - $start;
		die "$what: $result" if $result ne 't';
		$other->query_safe($_) foreach ref $tidy ? @$tidy : ($tidy);
	}
	cmp_ok($took / $times, '<', ($opt{later} // 0) + 0.25, "$what wakes");
	return;
}

my @held = (
	q{SELECT outbox.record('jobs') AS seq \gset},
	q{CALL outbox.await_fanout(:seq, '60s')},
	q{SELECT job, claim FROM outbox.claim('jobs') \gset});
wakes('the relay', [], [q{SELECT outbox.record('jobs')}]);
wakes('a release', \@held, [q{SELECT outbox.release(:job, :claim)}]);
wakes('a failure', \@held, [q{SELECT outbox.fail(:job, :claim, 'e')}]);
wakes('a release in a transaction', \@held, [ 'BEGIN', q{SELECT outbox.release(:job, :claim)}, 'COMMIT' ]);
wakes('the end of a wait', \@held, [q{SELECT outbox.fail(:job, :claim, 'e', '300ms')}], undef, later => 0.3);
wakes('the end of a lease', \@held, [q{SELECT outbox.extend(:job, :claim, '300ms')}], undef, later => 0.3);
wakes('a retry', [ @held, q{SELECT outbox.fail(:job, :claim, 'e', final => true)} ], [q{SELECT outbox.retry(:job)}]);
wakes('a retry of all', [ @held, q{SELECT outbox.fail(:job, :claim, 'e', final => true)} ], [q{SELECT outbox.retry_dead('jobs')}]);
my @behind = (
	q{SELECT count(outbox.record('ordered', 'a')) FROM generate_series(1, 2)},
	q{SELECT max(seq) AS seq FROM outbox.events WHERE type = 'ordered' \gset},
	q{CALL outbox.await_fanout(:seq, '60s')},
	q{SELECT job, claim FROM outbox.claim('ordered') \gset});
my $tidy = q{SELECT count(outbox.complete(job, claim)) FROM outbox.claim('ordered', 10)};
foreach my $end (q{SELECT outbox.complete(:job, :claim)}, q{SELECT outbox.complete_many(:claim)}, q{SELECT outbox.cancel(:job)}, q{SELECT outbox.fail(:job, :claim, 'e', final => true)})
{
	wakes("the end of an older job of the subject, $end", \@behind, [$end], $tidy, subscription => 'ordered');
}
# times that are known from before, however many they are
$other->query_safe(q{SELECT outbox.record('jobs') FROM generate_series(1, 40)});
wait_drained($node, 'many');
is($other->query_safe(q{SELECT count(outbox.fail(job, claim, 'e', make_interval(secs => 0.4 + 0.05 * (job % 40)))) FROM outbox.claim('jobs', 40)}), 40, 'forty jobs that fall due one by one');
my $start = time;
my $n = 0;
while ($n < 40)
{
	is(sql(q{CALL outbox.await_jobs('jobs', '60s')}), 't', 'one falls due') if $n == 0;
	sql(q{CALL outbox.await_jobs('jobs', '60s')}) if $n > 0;
	$n += sql(q{SELECT count(outbox.complete(job, claim)) FROM outbox.claim('jobs', 40)});
}
cmp_ok(time - $start, '<', 20, 'all of them are found');
# a clock that is new to all this: after a restart
sql(q{SELECT outbox.record('jobs')});
wait_drained($node, 'before a restart');
sql(q{SELECT outbox.fail(job, claim, 'e', '3s') FROM outbox.claim('jobs')});
$_->quit foreach $session, $other, $watcher;
$node->restart;
wait_relay($node);
$watcher = $node->background_psql('elsewhere');
$session = $node->background_psql('postgres', on_error_stop => 0);
$other = $node->background_psql('postgres', on_error_stop => 0);
$start = time;
is(sql(q{CALL outbox.await_jobs('jobs', '120s')}), 't', 'a wait that began before the restart');
cmp_ok(time - $start, '<', 30, 'is known afterwards');
sql(q{SELECT outbox.complete(job, claim) FROM outbox.claim('jobs')});

# A subscription that ends is seen to have ended by the next sweep.
sql(q{SELECT outbox.subscribe('ended', '{ended}')});
set_conf($node, 'outbox.sweep_interval' => "'200ms'");
start_waiting($session, q{CALL outbox.await_jobs('ended', '60s')});
sql(q{SELECT outbox.unsubscribe('ended')});
is(end_waiting($session), '', 'who waits for one that has ended');
like($session->{stderr}, qr/subscription "ended" does not exist/, 'is told so');
$session->{stderr} = '';
set_conf($node, 'outbox.sweep_interval' => "'1h'");
# cancelled, and again
$pid = start_waiting($session, q{CALL outbox.await_jobs('jobs', '60s')});
sql("SELECT pg_cancel_backend($pid)");
end_waiting($session);
like($session->{stderr}, qr/canceling statement due to user request/, 'a wait can be cancelled');
$session->{stderr} = '';
start_waiting($session, q{CALL outbox.await_jobs('jobs', '60s')});
sql(q{SELECT outbox.record('jobs')});
is(end_waiting($session), 't', 'and begun again');
sql(q{SELECT outbox.complete(job, claim) FROM outbox.claim('jobs')});

# Only those who wait for that subscription are woken.
SKIP:
{
	skip 'needs /proc', 1 unless -r "/proc/$pid/status";
	my $file = "$PostgreSQL::Test::Utils::tmp_check/432_idle.sql";
	my ($out, $err);

	append_to_file($file, "CALL outbox.await_jobs('idle', '300s');\nINSERT INTO done SELECT :client_id;\n");
	my $waiters = IPC::Run::start([ 'pgbench', '-n', '-c', 100, '-t', 1, '-h', $node->host, '-p', $node->port, '-f', $file, 'postgres' ], '>', \$out, '2>', \$err);
	my $all = q{FROM pg_stat_activity WHERE wait_event_type = 'Extension' AND query LIKE 'CALL outbox.await_jobs(''idle''%'};

	wait_for($node, 'a hundred who wait', "SELECT count(*) = 100 $all");
	my @pids = split /\n/, sql("SELECT pid $all");
	my $switches = sub {
		my $sum = 0;

		foreach my $p (@pids)
		{
			slurp_file("/proc/$p/status") =~ /^voluntary_ctxt_switches:\s+(\d+)/m or die;
			$sum += $1;
		}
		return $sum;
	};
	$start = time;
	my $before = $switches->();

	foreach (1 .. 100)
	{
		$other->query_safe($_) foreach @held;
		$other->query_safe(q{SELECT outbox.complete(:job, :claim)});
	}
	my $after = $switches->();

	# each looks at shared memory once a second by itself
	note(($after - $before) . ' in ' . (time - $start) . ' s');
	cmp_ok($after - $before, '<', 100 * (time - $start + 5), 'those who wait for another subscription are not woken');
	sql(q{SELECT outbox.record('idle')});
	$waiters->finish;
	is(sql('SELECT count(*) FROM done'), 100, 'but all of them when there is a job');
	sql('TRUNCATE done');
}

# Waiting is cheap: between looks that somebody asked for there are no
# transactions, whatever keeps a job from being claimed.
sub is_quiet
{
	my ($what, @settings) = @_;
	my $quiet = $node->background_psql('postgres', on_error_stop => 0);

	$quiet->query_safe($_) foreach @settings;
	my $waiter = start_waiting($quiet, q{CALL outbox.await_jobs('jobs', '60s')});
	$watcher->query_safe('SELECT pg_sleep(1.2)');
	my $before = transactions();

	$watcher->query_safe('SELECT pg_sleep(1.5)');
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	# statistics of others come in late; one that spins makes thousands
	cmp_ok(transactions() - $before, '<', 20, "$what: who waits does not spin");
	sql("SELECT pg_cancel_backend($waiter)");
	end_waiting($quiet);
	$quiet->quit;
	return;
}

sql(q{SELECT count(outbox.cancel(job)) FROM outbox.job_status WHERE state <> 'done'});
is_quiet('no job');
is_quiet('no job, REPEATABLE READ', q{SET default_transaction_isolation = 'repeatable read'});
is_quiet('no job, SERIALIZABLE', q{SET default_transaction_isolation = 'serializable'});
record('jobs', 1);
sql(q{SELECT outbox.pause('jobs')});
is_quiet('a pause');
sql(q{SELECT outbox.resume('jobs')});
is(sql(q{SET default_transaction_isolation = 'serializable'; CALL outbox.await_jobs('jobs', '60s')}), 't', 'a job, SERIALIZABLE');
is(sql(q{SELECT count(*) FROM outbox.claim('jobs')}), 1, 'a lease');
is_quiet('a lease');
is_quiet('a lease, REPEATABLE READ', q{SET default_transaction_isolation = 'repeatable read'});
# woken, whatever the isolation
$session->query_safe(q{SET default_transaction_isolation = 'repeatable read'});
wakes('REPEATABLE READ: the relay', [], [q{SELECT outbox.record('jobs')}], q{SELECT count(outbox.complete(job, claim)) FROM outbox.claim('jobs', 10)});
$session->query_safe(q{RESET default_transaction_isolation});
sql(q{SELECT count(outbox.cancel(job)) FROM outbox.job_status WHERE state <> 'done'});

# Nor does it gather memory.
record('jobs', 1);
$pid = start_waiting($session, q{CALL outbox.await_idle('jobs', '6s')});
my $log = -s $node->logfile;
$other->query_safe('SELECT pg_sleep(4)');
sql("SELECT pg_log_backend_memory_contexts($pid)");
is(end_waiting($session), 'f', 'not idle');
my $contexts = () = slurp_file($node->logfile, $log) =~ /SPI TupTable/g;
cmp_ok($contexts, '<', 5, 'results of former looks are gone');
sql(q{SELECT count(outbox.cancel(job)) FROM outbox.job_status WHERE state <> 'done'});

# A server with subscriptions, jobs that wait for their time and clients that
# wait for them runs no transaction and writes nothing.
record('jobs', 3);
sql(q{SELECT outbox.fail(job, claim, 'e', '1 hour') FROM outbox.claim('jobs', 2)});
sql(q{SELECT count(*) FROM outbox.claim('jobs', 1, '1 hour')});
sql('CHECKPOINT');
start_waiting($session, q{CALL outbox.await_jobs('jobs', '60s')});
settled($node);
$watcher->query_safe('SELECT pg_sleep(1.5)');
my $watch = q{
	SELECT pid, state_change, query_start FROM pg_stat_activity WHERE datname = 'postgres' AND backend_type <> 'client backend';
	SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = 'postgres';
	SELECT pg_current_wal_insert_lsn()};
$watcher->query_safe($watch);
my $before = $watcher->query_safe($watch);
$watcher->query_safe('SELECT pg_sleep(2.5)');
is($watcher->query_safe($watch), $before, 'an idle server runs no transaction and writes nothing');
sql(q{SELECT outbox.record('jobs')});
is(end_waiting($session), 't', 'and goes on at once');
sql(q{SELECT count(outbox.cancel(job)) FROM outbox.job_status WHERE state NOT IN ('done', 'cancelled')});

# Notifications: a dead job, on a channel that is a setting
my $client = listener($node, 'standmeet_jobs_dead', 'another', '"My Jobs"', 'standmeet_events_fanned');
$other->query_safe('SET client_min_messages = error');
sub dead_job
{
	$other->query_safe($_) foreach @held;
	$other->query_safe(q{SELECT outbox.fail(:job, :claim, 'secret', final => true)});
	my $dead = $other->query_safe(q{SELECT json_build_object('job', job, 'seq', seq, 'subscription', subscription)::jsonb FROM outbox.dead_jobs WHERE job = :job});

	wait_drained($node, 'the alert');
	return $dead;
}
sub heard_on
{
	my ($channel) = @_;

	return map { $_->[1] } grep { $_->[0] eq $channel } $client->heard;
}
my $dead = dead_job();
ok($client->wait_heard(sub { grep { $_->[0] eq 'standmeet_jobs_dead' } @_ }), 'a dead job is announced');
is_deeply([ heard_on('standmeet_jobs_dead') ], [$dead], 'with its numbers and its subscription, and no text of it');
$other->query_safe('BEGIN');
$other->query_safe(q{SELECT outbox.retry(:job)});
$other->query_safe(q{SELECT outbox.fail(job, claim, 'e', final => true) FROM outbox.claim('jobs', 1)});
$other->query_safe('ROLLBACK');
set_conf($node, 'outbox.dead_channel' => "'another'");
my $second = dead_job();
ok($client->wait_heard(sub { grep { $_->[0] eq 'another' } @_ }), 'on another channel');
is_deeply([ heard_on('another') ], [$second], 'once; what was rolled back is not announced');
set_conf($node, 'outbox.dead_channel' => "''");
dead_job();
set_conf($node, 'outbox.dead_channel' => "'another'");
my $third = dead_job();
ok($client->wait_heard(sub { (grep { $_->[0] eq 'another' } @_) >= 2 }), 'and again');
is_deeply([ heard_on('another') ], [ $second, $third ], 'but not while there was no channel');
is_deeply([ heard_on('standmeet_jobs_dead') ], [$dead], 'nor on the former one');
# the jobs of a subscription, once a pass
sql(q{SELECT outbox.subscribe('told', '{told}', options => '{"notify": "My Jobs"}'), outbox.subscribe('untold', '{told}')});
sql(q{SELECT count(outbox.record('told', i::text)) FROM generate_series(1, 50) i});
ok($client->wait_heard(sub { grep { $_->[0] eq 'My Jobs' } @_ }), 'a subscription that asked for it is told that it has jobs');
record('none', 1);
record('told', 1);
ok($client->wait_heard(sub { (grep { $_->[0] eq 'My Jobs' } @_) >= 2 }), 'and again');
is_deeply([ heard_on('My Jobs') ], [ 'told', 'told' ], 'once a pass');
sql(q{SELECT outbox.subscribe('told', '{told}')});
record('told', 1);
record('jobs', 1);
# by the time that this one is announced, all before are
ok($client->wait_heard(sub { (grep { $_->[0] eq 'standmeet_events_fanned' } @_) > 0 }), 'passes are announced');
is(scalar(heard_on('My Jobs')), 2, 'and no more when it is not asked for any more');
$client->quit;

# Counters
sql(q{SELECT count(outbox.cancel(job)) FROM outbox.job_status WHERE state NOT IN ('done', 'cancelled')});
sql(q{SELECT outbox.subscribe('counted', '{counted}')});
record('counted', 10);
is(sql(q{SELECT waiting, running, retrying, dead, done_total FROM outbox.stat_subscription WHERE name = 'counted'}), '10|0|0|0|0', 'counters: ten wait');
sql(q{SELECT outbox.complete(job, claim) FROM outbox.claim('counted', 2)});
sql(q{SELECT outbox.complete_many(c) FROM (SELECT max(claim) AS c FROM outbox.claim('counted', 2)) x});
sql(q{BEGIN; SELECT outbox.complete(job, claim) FROM outbox.claim('counted', 2); ROLLBACK});
sql(q{BEGIN; SAVEPOINT s; SELECT outbox.complete(job, claim) FROM outbox.claim('counted', 2); ROLLBACK TO s; COMMIT});
sql(q{BEGIN; SAVEPOINT s; SELECT outbox.complete(job, claim) FROM outbox.claim('counted', 1); RELEASE s; COMMIT});
sql(q{SELECT outbox.fail(job, claim, 'e') FROM outbox.claim('counted', 1)});
sql(q{SELECT outbox.fail(job, claim, 'e', final => true) FROM outbox.claim('counted', 1)});
sql(q{SELECT job FROM outbox.claim('counted', 1)});
is(sql(q{SELECT waiting, running, retrying, dead, done_total FROM outbox.stat_subscription WHERE name = 'counted'}), '2|1|1|1|5', 'each in its place, and what was committed is done');
$_->quit foreach $session, $other, $watcher;
$node->restart;
is(sql(q{SELECT waiting, running, retrying, dead, done_total FROM outbox.stat_subscription WHERE name = 'counted'}), '2|1|1|1|0', 'done since the server started');
is_conserved($node, 'waits', changing => 1);

$node->stop;
done_testing();
