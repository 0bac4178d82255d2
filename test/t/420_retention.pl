# Retention by the relay: in small steps between its passes, which nothing ends
# half way, which delay nobody, and which never take what is needed.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IPC::Run;
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

# what the database has set must not matter to the relay
$ENV{PGOPTIONS} = '-c statement_timeout=0';

my $node = new_server(
	'retention',
	'outbox.max_databases' => 1,
	'outbox.relay_retry_max' => "'1s'");

sub sql
{
	my ($query, $db) = @_;

	return $node->safe_psql($db // 'postgres', $query);
}

# How many events and jobs there are
sub counts
{
	my ($db) = @_;

	return sql(q{SELECT (SELECT count(*) FROM outbox.events), (SELECT count(*) FROM outbox.jobs)}, $db);
}

# Cycles come one after another, or hardly ever.
sub cycles
{
	my ($on) = @_;

	set_conf($node, 'outbox.sweep_interval' => $on ? "'100ms'" : "'1h'");
	return;
}

# Events that were fanned out eight days ago, to a and b, who have handled them
sub old_events
{
	my ($n, $db) = @_;

	sql(qq{
	SET session_replication_role = replica;
	ALTER TABLE outbox.events DISABLE TRIGGER events_insert;
	WITH e AS (
		INSERT INTO outbox.events (type, subject, recorded_at, fanned_out_at, fanout)
			SELECT 'old', i::text, now() - interval '8 days', now() - interval '8 days',
				jsonb_build_object('a', nextval('outbox.jobs_id_seq'), 'b', nextval('outbox.jobs_id_seq'))
			FROM generate_series(1, $n) i RETURNING seq, fanout)
	INSERT INTO outbox.jobs (id, subscription_id, event_seq, due_at, created_at, attempts, done_at) OVERRIDING SYSTEM VALUE
		SELECT f.value::bigint, s.id, e.seq, now() - interval '8 days', now() - interval '8 days', 1, now() - interval '8 days'
		FROM e, jsonb_each_text(fanout) f JOIN outbox.subscriptions s ON s.name = f.key;
	ALTER TABLE outbox.events ENABLE ALWAYS TRIGGER events_insert}, $db);
	return;
}

sql(q{SELECT outbox.subscribe('a', '{old,new}'), outbox.subscribe('b', '{old,new}')});
sql(q{ALTER DATABASE postgres SET statement_timeout = '1ms'});
sql(q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'outbox relay'});
wait_relay($node);
install_gate($node);
sql(q{
	CREATE TRIGGER gate_prune AFTER DELETE ON outbox.jobs FOR EACH STATEMENT EXECUTE FUNCTION public.gate('prune');
	CREATE TRIGGER gate_pruned AFTER DELETE ON outbox.events FOR EACH STATEMENT EXECUTE FUNCTION public.gate('pruned')});

# What is needed stays, whatever its age: poisoned, or with a job that is not
# finished, or dead, or has ended since.
old_events(6);
sql(q{
	UPDATE outbox.events SET subject = 'kept ' || subject;
	UPDATE outbox.events SET fanned_out_at = NULL, fanout = NULL, poisoned_at = now() - interval '8 days' WHERE subject = 'kept 1';
	DELETE FROM outbox.jobs j USING outbox.events e WHERE e.seq = j.event_seq AND e.fanout IS NULL;
	UPDATE outbox.jobs j SET done_at = NULL FROM outbox.events e WHERE e.seq = j.event_seq AND subject = 'kept 2';
	UPDATE outbox.jobs j SET done_at = NULL, attempts = 3, due_at = now() + interval '1 day' FROM outbox.events e
		WHERE e.seq = j.event_seq AND subject = 'kept 3' AND j.subscription_id = 1;
	UPDATE outbox.jobs j SET done_at = NULL, claim = -1, due_at = now() + interval '1 day' FROM outbox.events e
		WHERE e.seq = j.event_seq AND subject = 'kept 4' AND j.subscription_id = 2;
	UPDATE outbox.jobs j SET done_at = NULL, dead_at = now() - interval '8 days' FROM outbox.events e
		WHERE e.seq = j.event_seq AND subject = 'kept 5' AND j.subscription_id = 1;
	UPDATE outbox.jobs j SET done_at = now() FROM outbox.events e
		WHERE e.seq = j.event_seq AND subject = 'kept 6' AND j.subscription_id = 1});
my $kept = q{SELECT (SELECT json_agg(e ORDER BY seq) FROM outbox.events e WHERE subject LIKE 'kept%'),
	(SELECT json_agg(j ORDER BY j.id) FROM outbox.jobs j JOIN outbox.events e ON e.seq = j.event_seq WHERE e.subject LIKE 'kept%')};
my $before = sql($kept);
is(counts(), '6|10', 'six events that are kept');

# A step that is ended at any point leaves everything where it was.
my %fault = (
	'kill -9 of the relay' => sub { kill 'KILL', $_[0] },
	'kill -9 of the postmaster' => sub { kill_postmaster($node); $node->start },
	'a fast shutdown' => sub { $node->stop('fast'); $node->start },
	'pg_terminate_backend' => sub { sql("SELECT pg_terminate_backend($_[0])") },
	'pg_cancel_backend' => sub { sql("SELECT pg_cancel_backend($_[0])") });
foreach my $point (qw(prune pruned))
{
	foreach my $what (sort keys %fault)
	{
		next unless slow() || ($point eq 'prune') == ($what =~ /kill -9|cancel/);
		# what went on when the gate was opened has deleted some
		old_events(506 - (split /\|/, counts())[0]);
		is(counts(), '506|1010', 'five hundred that are not kept');
		sql("INSERT INTO public.gates VALUES ('$point')");
		cycles(1);
		my $pid = wait_at_gate($node);
		cycles(0);
		$fault{$what}->($pid);
		wait_for($node, 'a relay', q{SELECT count(*) = 1 FROM outbox.stat_relay WHERE database = 'postgres'})
		  if $what =~ /relay/;
		is(counts(), '506|1010', "$what at $point: nothing is deleted by half");
		open_gate($node);
		wait_relay($node);
	}
}
old_events(506 - (split /\|/, counts())[0]);

# Another session holds a row; it is passed over, and nobody waits.
my $holder = $node->background_psql('postgres');
$holder->query_safe(q{BEGIN; SELECT 1 FROM outbox.jobs WHERE id = (SELECT max(id) FROM outbox.jobs) FOR KEY SHARE});
cycles(1);
wait_for($node, 'all events that can go', q{SELECT count(*) = 7 FROM outbox.events});
is(sql($kept), $before, 'what is kept is as it was');
is(sql(q{SELECT count(*) FROM outbox.jobs WHERE done_at IS NOT NULL AND event_seq = (SELECT max(seq) FROM outbox.events)}),
	2, 'an event whose job somebody holds is kept with all of its jobs');
$holder->query_safe('COMMIT');
wait_for($node, 'the last one', q{SELECT count(*) = 6 FROM outbox.events});
is(counts(), '6|10', 'nothing else has gone');

# A long purge delays no fan-out, and comes in many small transactions.
cycles(0);
old_events(20000);
my $xid = sql('SELECT pg_current_xact_id()');
my $slowest = 0;
my $during = 0;
my $client = $node->background_psql('postgres');
cycles(1);
while (sql(q{SELECT EXISTS (SELECT FROM outbox.events WHERE type = 'old' AND subject NOT LIKE 'kept%')}) eq 't')
{
	my $seq = $client->query_safe(q{SELECT outbox.record('new')});
	my $began = time;

	like($client->query_safe("CALL outbox.await_fanout($seq, '60s')"), qr/fanned/, 'an event is fanned out')
	  if $during++ == 0;
	$client->query_safe("CALL outbox.await_fanout($seq, '60s')");
	$slowest = time - $began if time - $began > $slowest;
}
ok($during > 1, "events were recorded during the purge ($during)");
cmp_ok($slowest, '<', 2, 'and fanned out at once');
cmp_ok(sql('SELECT pg_current_xact_id()') - $xid - 3 * $during, '>=', 100, 'in many transactions');
is(sql($kept), $before, 'what is kept is as it was');
is(sql(q{SELECT count(*) FROM outbox.jobs WHERE NOT EXISTS (SELECT FROM outbox.events WHERE seq = event_seq)}), 0,
	'no job is left without its event');
is_conserved($node, 'after a purge', changing => 1, given_up => "e.subject LIKE 'kept%'");

# Trouble: an event that cannot be deleted keeps no other, and is reported; any
# other error is waited for.
cycles(0);
sql(q{CREATE TABLE audit (seq bigint REFERENCES outbox.events)});
old_events(300);
sql(q{INSERT INTO audit SELECT seq FROM outbox.events WHERE type = 'old' AND subject = '77'});
my $log = -s $node->logfile;
cycles(1);
wait_for($node, 'all but one', q{SELECT count(*) = 1 FROM outbox.events WHERE type = 'old' AND subject NOT LIKE 'kept%'});
$node->wait_for_log(qr/1 event that is kept no longer could not be deleted/, $log);
like(slurp_file($node->logfile, $log), qr/DETAIL:  event \d+: 23503: /, 'why one cannot be deleted');
my $found = q{SELECT count(*) FROM outbox.check() WHERE level = 'warning' AND finding LIKE '%could not be deleted, last %: event % 23503: %'};
wait_for($node, 'outbox.check() to say so', "SELECT ($found) = 1");
sql('DROP TABLE audit');
wait_for($node, 'that one', q{SELECT count(*) = 0 FROM outbox.events WHERE type = 'old' AND subject NOT LIKE 'kept%'});

cycles(0);
old_events(300);
sql(q{
	CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		RAISE EXCEPTION 'no space' USING ERRCODE = 'disk_full';
	END $$;
	CREATE TRIGGER full_disk BEFORE DELETE ON outbox.events FOR EACH STATEMENT EXECUTE FUNCTION full_disk()});
$log = -s $node->logfile;
cycles(1);
$node->wait_for_log(qr/outbox relay failed to delete what is kept no longer: no space/, $log);
my $seq = sql(q{SELECT outbox.record('new')});
like(sql("CALL outbox.await_fanout($seq, '60s')"), qr/fanned/, 'fan-out goes on');
$node->wait_for_log(qr/(failed to delete.*){4}/s, $log);
my $lines = () = slurp_file($node->logfile, $log) =~ /failed to delete/g;
cmp_ok($lines, '<', 50, 'it is tried again, and not all the time');
is(sql(q{SELECT count(*) FROM outbox.events WHERE type = 'old' AND subject NOT LIKE 'kept%'}), 300, 'nothing is lost');
sql('DROP TRIGGER full_disk ON outbox.events');
wait_for($node, 'recovery', q{SELECT count(*) = 0 FROM outbox.events WHERE type = 'old' AND subject NOT LIKE 'kept%'});
wait_for($node, 'outbox.check() to find no trouble', q{SELECT count(*) = 0 FROM outbox.check() WHERE finding LIKE '%could not be deleted%'});

# At rest nothing is deleted.
sql(q{SELECT outbox.stop()});
old_events(10);
my $commits = q{SELECT xact_commit FROM pg_stat_database WHERE datname = 'postgres'};
my $n = sql($commits);
wait_for($node, 'some sweeps', "SELECT xact_commit > $n + 20 FROM pg_stat_database WHERE datname = 'postgres'");
is(sql(q{SELECT count(*) FROM outbox.events WHERE type = 'old' AND subject NOT LIKE 'kept%'}), 10, 'a stopped database is left alone');
sql(q{SELECT outbox.start()});
wait_for($node, 'the start', q{SELECT count(*) = 0 FROM outbox.events WHERE type = 'old' AND subject NOT LIKE 'kept%'});

# A database without a slot is seen to by its sweeps.
sql('CREATE DATABASE second');
sql(q{CREATE EXTENSION outbox; SELECT outbox.subscribe('a', '{old,new}'), outbox.subscribe('b', '{old,new}')}, 'second');
old_events(1000, 'second');
wait_for($node, 'the sweep of the second database', 'SELECT count(*) = 0 FROM outbox.events', 'second');
is(counts('second'), '0|0', 'its jobs have gone too');
sql('DROP DATABASE second');

# With no retention at all, under load, clients and crashes: what is recorded is
# handled by both, once by each, before it goes.
sql(q{DELETE FROM outbox.jobs; DELETE FROM outbox.events; CREATE TABLE handled (subscription text, seq bigint, PRIMARY KEY (subscription, seq))});
set_conf($node, 'outbox.event_retention' => 0, 'outbox.relays' => 2);
my $total = slow() ? 20000 : 3000;
my $dir = PostgreSQL::Test::Utils::tempdir;
my @clients;
foreach my $subscription ('a', 'b')
{
	append_to_file(
		"$dir/$subscription",
		qq{
		WITH c AS MATERIALIZED (SELECT seq, job, claim FROM outbox.claim('$subscription', 7)),
			h AS (INSERT INTO handled SELECT '$subscription', seq FROM c)
		SELECT count(outbox.complete(job, claim)) FROM c;
	} x ($total / 4));
	push @clients,
	  IPC::Run::start([ 'psql', '-X', '-q', '-d', $node->connstr('postgres'), '-f', "$dir/$subscription" ],
		'<', '/dev/null', '>', '/dev/null', '2>', '/dev/null');
}
my $recorded = 0;
while ($recorded < $total)
{
	sql(q{SELECT count(outbox.record('new')) FROM generate_series(1, 100)});
	$recorded += 100;
	sql(q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'outbox relay'})
	  if $recorded % 700 == 0;
}
$_->finish foreach @clients;
wait_drained($node, 'all are recorded');
foreach my $subscription ('a', 'b')
{
	sql(qq{
		WITH c AS MATERIALIZED (SELECT seq, job, claim FROM outbox.claim('$subscription', 10000)),
			h AS (INSERT INTO handled SELECT '$subscription', seq FROM c)
		SELECT count(outbox.complete(job, claim)) FROM c});
}
is(sql(q{SELECT subscription, count(*) FROM handled GROUP BY 1 ORDER BY 1}), "a|$total\nb|$total", 'each was handled once by each');
wait_for($node, 'an empty table', q{SELECT count(*) = 0 FROM outbox.events});
is(counts(), '0|0', 'and all have gone');

$holder->quit;
$client->quit;
$node->stop;
unlike(slurp_file($node->logfile), qr/PANIC|TRAP|terminated by signal 11/, 'no process crashed');
done_testing();
