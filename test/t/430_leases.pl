# Leases under many clients and under faults: no job is held twice, none is
# lost, and what died with its holder is handled again.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IPC::Run;
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $node = new_server('leases');

sub sql
{
	return $node->safe_psql('postgres', @_);
}

sub record
{
	my ($type, $n) = @_;

	sql("INSERT INTO outbox.events (type, subject) SELECT '$type', i::text FROM generate_series(1, $n) i");
	wait_for($node, "$type is fanned out", 'SELECT NOT EXISTS (SELECT FROM outbox.events WHERE fanned_out_at IS NULL)');
	return;
}

# Several clients at once, each of them running a script a number of times
sub clients
{
	my ($name, $clients, $times, $script) = @_;
	my $file = "$PostgreSQL::Test::Utils::tmp_check/430_$name.sql";
	my ($out, $err);

	append_to_file($file, $script);
	my $ok = IPC::Run::run([ 'pgbench', '-n', '-c', $clients, '-j', 2, '-t', $times, '-h', $node->host, '-p', $node->port, '-f', $file, 'postgres' ],
		'>', \$out, '2>', \$err);
	$ok &&= $err !~ /ERROR|abort/;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok($ok, "$name: $clients clients") or diag($err);
	return;
}

sub states
{
	my ($subscription) = @_;

	return sql("SELECT string_agg(state || ':' || n, ' ' ORDER BY state) FROM (SELECT state, count(*) AS n FROM outbox.job_status WHERE subscription = '$subscription' GROUP BY 1) s");
}

sql(q{CREATE TABLE taken (job bigint, claim bigint, client int); CREATE TABLE refused (jobs bigint[])});

# Six clients, each claiming a hundred and completing them
sql(q{SELECT outbox.subscribe('many', '{many}')});
record('many', 20_000);
clients('many', 6, 60, q{
	WITH c AS (INSERT INTO taken SELECT job, claim, :client_id FROM outbox.claim('many', 100) RETURNING claim) SELECT coalesce(max(claim), 0) AS claim FROM c \gset
	INSERT INTO refused SELECT r FROM outbox.complete_many(:claim, ARRAY(SELECT job FROM taken WHERE claim = :claim)) r WHERE r <> '{}';
});
is(states('many'), 'done:20000', 'all are done');
is(sql('SELECT count(*), count(DISTINCT job), count(DISTINCT client) FROM taken'), '20000|20000|6', 'each was held by one client, once');
is(sql('SELECT max(n) <= 100 FROM (SELECT count(*) AS n FROM taken GROUP BY claim) c'), 't', 'no claim got more than it asked for');
is(sql('SELECT count(*) FROM refused'), 0, 'none was refused to who held it');
is(sql(q{SELECT done_total FROM outbox.stat_subscription WHERE name = 'many'}), 20000, 'and all were counted');
sql('TRUNCATE taken');

# With rollbacks of everything and of parts: what was given back is taken again.
record('many', 5_000);
clients('rollbacks', 6, 150, q{
	\set r random(1, 5)
	BEGIN;
	INSERT INTO taken SELECT job, claim, :client_id FROM outbox.claim('many', 20);
	SAVEPOINT s;
	INSERT INTO taken SELECT job, claim, :client_id FROM outbox.claim('many', 20);
	\if :r = 1
	ROLLBACK TO s;
	\endif
	SELECT count(outbox.complete(t.job, t.claim)) FROM taken t WHERE client = :client_id AND claim IN (SELECT claim FROM taken WHERE client = :client_id EXCEPT SELECT claim FROM outbox.jobs WHERE done_at IS NOT NULL);
	\if :r = 2
	ROLLBACK;
	\else
	COMMIT;
	\endif
});
# the last ones may have been in the hands of one that rolled back
clients('rest', 1, 300, q{
	WITH c AS (INSERT INTO taken SELECT job, claim, -1 FROM outbox.claim('many', 20) RETURNING job, claim) SELECT count(outbox.complete(job, claim)) FROM c;
});
is(states('many'), 'done:25000', 'with rollbacks: all are done');
is(sql('SELECT count(*), count(DISTINCT job) FROM taken'), '5000|5000', 'each was taken once');
is(sql(q{SELECT max(attempts) FROM outbox.job_status}), 1, 'attempts that were rolled back do not count');
is(sql(q{SELECT done_total FROM outbox.stat_subscription WHERE name = 'many'}), 25000, 'nor are completions counted that were');
is_conserved($node, 'many clients');

# What dies at each step of a job's life is handled again, and nothing else is.
# What it did is done as often as it was committed.
sql(q{
	SELECT outbox.unsubscribe('many');
	TRUNCATE outbox.events, outbox.jobs;
	SELECT outbox.subscribe('life', '{life}', retry_min => '0', retry_max => '0');
	CREATE TABLE effects (seq bigint)});
my %step = (
	claiming => [ q{BEGIN}, q{SELECT job, claim, seq FROM outbox.claim('life', 1, '500ms') \gset} ],
	claimed => [ q{SELECT job, claim, seq FROM outbox.claim('life', 1, '500ms') \gset} ],
	working => [ q{SELECT job, claim, seq FROM outbox.claim('life', 1, '500ms') \gset}, q{BEGIN}, q{INSERT INTO effects VALUES (:seq)} ],
	completing => [ q{SELECT job, claim, seq FROM outbox.claim('life', 1, '500ms') \gset}, q{BEGIN}, q{INSERT INTO effects VALUES (:seq)}, q{SELECT outbox.complete(:job, :claim)} ],
	completed => [ q{SELECT job, claim, seq FROM outbox.claim('life', 1, '500ms') \gset}, q{INSERT INTO effects VALUES (:seq)}, q{SELECT outbox.complete(:job, :claim)} ],
	failing => [ q{SELECT job, claim, seq FROM outbox.claim('life', 1, '500ms') \gset}, q{BEGIN}, q{SELECT outbox.fail(:job, :claim, 'e')} ],
	failed => [ q{SELECT job, claim, seq FROM outbox.claim('life', 1, '500ms') \gset}, q{SELECT outbox.fail(:job, :claim, 'e')} ],
	at_once => [ q{BEGIN}, q{SELECT job, claim, seq FROM outbox.claim('life', 1, '500ms') \gset}, q{INSERT INTO effects VALUES (:seq)}, q{SELECT outbox.complete(:job, :claim)} ],
	extended => [ q{SELECT job, claim, seq FROM outbox.claim('life', 1, '100ms') \gset}, q{SELECT outbox.extend(:job, :claim, '1s')} ]);
# attempts, and the error of the one before, when the job has been handled
my %then = (
	claiming => '1|', claimed => '2|attempt 1 did not return before its lease ended', working => '2|attempt 1 did not return before its lease ended',
	completing => '2|attempt 1 did not return before its lease ended', completed => '1|', failing => '2|attempt 1 did not return before its lease ended',
	failed => '2|e', at_once => '1|', extended => '2|attempt 1 did not return before its lease ended');
my %kill = (
	client => sub { kill 'KILL', $_[0]->{run}->{KIDS}[0]{PID} },
	backend => sub { kill 'KILL', $_[1]; },
	server => sub { kill_postmaster($node) });

foreach my $victim (qw(client backend server))
{
	foreach my $name (sort keys %step)
	{
		# a backend that is killed takes all others along: some will do
		next if $victim eq 'backend' && $name !~ /claimed|completing/;
		my $session = $node->background_psql('postgres', on_error_stop => 0);
		my $pid = $session->query_safe('SELECT pg_backend_pid()');
		my $seq = sql(q{SELECT outbox.record('life')});

		sql("CALL outbox.await_fanout($seq, '60s')");
		$session->query_safe($_) foreach @{ $step{$name} };
		$kill{$victim}->($session, $pid);
		eval { $session->quit };
		eval { $session->{run}->finish };
		if ($victim eq 'server')
		{
			$node->start;
		}
		elsif ($victim eq 'backend')
		{
			$node->poll_query_until('postgres', 'SELECT true') or die 'the server does not come back';
		}
		wait_for($node, 'the end of the session', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)");
		# another client takes what is there; it may have to wait for the lease
		if ($name ne 'completed')
		{
			my $start = time;

			is(sql(q{CALL outbox.await_jobs('life', '60s')}), 't', "$victim killed, $name: there is a job");
			cmp_ok(time - $start, '<', 20, 'when the lease has ended');
			is(sql(q{WITH c AS (SELECT * FROM outbox.claim('life', 10)), e AS (INSERT INTO effects SELECT seq FROM c) SELECT count(outbox.complete(job, claim)) FROM c}), 1, 'which another client handles');
		}
		is(sql(q{SELECT count(*) FROM outbox.claim('life')}), 0, 'then there is none');
		is(sql("SELECT attempts, last_error FROM outbox.job_status WHERE seq = $seq AND state = 'done'"), $then{$name}, "$victim killed, $name: attempts");
		is(sql("SELECT count(*) FROM effects WHERE seq = $seq"), 1, 'its effect is there once');
	}
}
wait_drained($node, 'killed at each step');
is_conserved($node, 'killed at each step');

# Two-phase commit
sql(q{SELECT outbox.unsubscribe('life'); TRUNCATE outbox.events, outbox.jobs; SELECT outbox.subscribe('two', '{two}')});
record('two', 2);
sql(q{BEGIN; SELECT job FROM outbox.claim('two'); PREPARE TRANSACTION 'claim'});
is(sql(q{SELECT subject FROM outbox.claim('two', 10)}), 2, 'what a prepared transaction has claimed is taken');
$node->restart;
is(sql(q{SELECT subject FROM outbox.claim('two', 10)}), '', 'after a restart as well');
sql(q{COMMIT PREPARED 'claim'});
is(states('two'), 'running:2', 'it is held when that commits');
is(sql(q{SELECT count(outbox.complete(id, claim)) FROM outbox.jobs}), 2, 'and can be completed');
record('two', 1);
sql(q{BEGIN; SELECT job FROM outbox.claim('two'); PREPARE TRANSACTION 'claim'});
is(sql(q{SELECT subject FROM outbox.claim('two', 10)}), '', 'claimed by a prepared transaction');
sql(q{ROLLBACK PREPARED 'claim'});
wait_for($node, 'the job', q{SELECT count(*) = 1 FROM outbox.claim('two', 1, '1us')});
is(sql(q{SELECT attempts FROM outbox.job_status WHERE state = 'retrying'}), 1, 'when that is rolled back, others get it');
sql(q{BEGIN; SELECT outbox.complete(id, claim) FROM outbox.jobs WHERE done_at IS NULL; PREPARE TRANSACTION 'complete'});
is(sql(q{SELECT subject FROM outbox.claim('two', 10)}), '', 'a job that is being completed by a prepared transaction is nobody else\'s, though its lease has run out');
$node->restart;
sql(q{ROLLBACK PREPARED 'complete'});
wait_for($node, 'the job', q{SELECT count(*) = 1 FROM outbox.claim('two')});
sql(q{BEGIN; SELECT outbox.complete(id, claim) FROM outbox.jobs WHERE done_at IS NULL; PREPARE TRANSACTION 'complete'});
sql(q{COMMIT PREPARED 'complete'});
is(states('two'), 'done:3', 'completed by a prepared transaction');
sql(q{SELECT outbox.unsubscribe('two'); SELECT outbox.subscribe('ordered', '{two}', ordered => true)});
record('two', 1);
sql(q{BEGIN; SELECT outbox.complete(job, claim) FROM outbox.claim('ordered'); PREPARE TRANSACTION 'complete'});
record('two', 1);
is(sql(q{SELECT count(*) FROM outbox.claim('ordered')}), 0, 'the next of a subject waits for the prepared transaction');
sql(q{COMMIT PREPARED 'complete'});
wait_for($node, 'the next job', q{SELECT count(*) = 1 FROM outbox.claim('ordered')});
is(states('ordered'), 'done:1 running:1', 'and goes on when that commits');
sql(q{SELECT outbox.unsubscribe('ordered'); TRUNCATE outbox.events, outbox.jobs});

# A lease is counted from when the claim got it, whatever it waited for.
sql(q{SELECT outbox.subscribe('clock', '{clock}', retry_min => '1h')});
record('clock', 1);
my $holder = $node->background_psql('postgres');
$holder->query_safe('BEGIN');
$holder->query_safe('LOCK outbox.jobs IN ACCESS EXCLUSIVE MODE');
my ($claimed, $stderr) = ('', '');
my $claim = IPC::Run::start([ 'psql', '-XAtq', '-h', $node->host, '-p', $node->port, '-d', 'postgres', '-c', q{SELECT leased_until > clock_timestamp() FROM outbox.claim('clock', 1, '1s')} ], '>', \$claimed, '2>', \$stderr);
$holder->query_until(qr/waits/, q{
	DO $$
	BEGIN
		FOR i IN 1 .. 6000 LOOP
			EXIT WHEN EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%clock%' AND query_start < clock_timestamp() - interval '1.5 s');
			PERFORM pg_sleep(0.01), pg_stat_clear_snapshot();
		END LOOP;
	END $$;
	COMMIT;
	\echo waits
});
$claim->finish;
is($claimed, "t\n", 'a claim that waited longer than its lease has it whole');
$holder->quit;
# and that it waited counts for nothing afterwards: what nobody posts is found by
# a sweep in good time
set_conf($node, 'outbox.sweep_interval' => "'1s'");
wait_for($node, 'the end of the lease', q{SELECT state = 'retrying' FROM outbox.job_status});
sql(q{SELECT count(*) FROM outbox.claim('clock', 10)});
sql(q{UPDATE outbox.jobs SET due_at = now() - interval '1 hour'});
my $start = time;
wait_for($node, 'a job that nobody posted', q{SELECT count(*) = 1 FROM outbox.claim('clock', 10, '1us')});
cmp_ok(time - $start, '<', 30, 'a job that nobody posted is found');
set_conf($node, 'outbox.sweep_interval' => "'1h'");
# a lease does not depend on where one is, nor on summer time
foreach my $zone ('UTC', 'Pacific/Apia', 'America/St_Johns', 'Europe/Berlin', '<-12:34>+12:34')
{
	sql("ALTER DATABASE postgres SET TimeZone = '$zone'");
	is(sql(q{
		SELECT round(extract(epoch FROM leased_until - clock_timestamp()) / 86400), round(extract(epoch FROM outbox.extend(job, claim, '180 days') - clock_timestamp()) / 86400),
			round(extract(epoch FROM outbox.fail(job, claim, 'e', '90 days') - clock_timestamp()) / 86400)
		FROM outbox.claim('clock', 1, '30 days')}), '30|180|90', "days in $zone");
	sql(q{UPDATE outbox.jobs SET due_at = clock_timestamp()});
}
sql('ALTER DATABASE postgres RESET TimeZone');
# A clock that was ahead, and was set back: nothing that is stored or remembered
# fails, and what has come since is claimed at once.
sql(q{UPDATE outbox.jobs SET due_at = now() + interval '1 year', created_at = now() + interval '1 year'});
record('clock', 1);
is(sql(q{SELECT count(*) FROM outbox.claim('clock', 10, '1us')}), 1, 'a job behind one from the future');
sql(q{UPDATE outbox.jobs SET due_at = now() - interval '1 year', created_at = now() + interval '1 year', attempts = 1});
wait_for($node, 'jobs from long ago', q{SELECT count(*) = 2 FROM outbox.claim('clock', 10)});
is(sql(q{SELECT outbox.complete_many(max(claim)) FROM outbox.jobs}), '{}', 'a job that is done before it was made');
is(sql(q{SELECT waiting, running, retrying FROM outbox.stat_subscription}), '0|0|0', 'counters are as they should be');
sql(q{SELECT outbox.unsubscribe('clock'); TRUNCATE outbox.events, outbox.jobs});

# An old snapshot keeps what is done from being removed.  The claims do not walk
# over it: counted by the entries of the index that are read.
sql(q{SELECT outbox.subscribe('old', '{old}')});
record('old', 50_000);
my $old = $node->background_psql('postgres');
$old->query_safe('BEGIN ISOLATION LEVEL REPEATABLE READ');
$old->query_safe('SELECT 1');

sub entries_read
{
	my ($session) = @_;

	$session->query_safe('SELECT pg_stat_force_next_flush()');
	return $session->query_safe(q{SELECT pg_stat_clear_snapshot(), idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'jobs_due'}) =~ /(\d+)$/ ? $1 : die;
}

my $session = $node->background_psql('postgres', on_error_stop => 0);
$session->query_safe('SET client_min_messages = error');
my $before = entries_read($session);
$session->query_safe(q{
	DO $$
	DECLARE
		c bigint;
	BEGIN
		FOR i IN 1 .. 500 LOOP
			SELECT max(claim) INTO c FROM outbox.claim('old', 100);
			COMMIT;
			PERFORM outbox.complete_many(c);
			COMMIT;
		END LOOP;
	END $$});
is(states('old'), 'done:50000', 'an old snapshot: all are done');
my $read = entries_read($session) - $before;
note("$read entries read");
cmp_ok($read, '>=', 50_000, 'the entries that are read are counted');
cmp_ok($read, '<', 250_000, 'each claim reads little more than its own');

# Now a look without the hint is dear, so it is taken seldom: what is given back,
# or was locked for a while, is found by the hint.
sub empty_look
{
	# the next one is allowed after fifty times what this one takes
	sql(q{SELECT count(*) FROM outbox.claim('old', 100)});
	return;
}

sub found
{
	my ($what, $before, $after) = @_;
	my $other = $node->background_psql('postgres', on_error_stop => 0);

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	record('old', 1);
	$session->query_safe($_) foreach @$before;
	# it is locked: passed over, also by a look without the hint
	is($other->query_safe(q{SELECT count(*) FROM outbox.claim('old', 100)}), 0, "$what: passed over");
	$session->query_safe($_) foreach @$after;
	is($other->query_safe(q{SELECT count(outbox.complete(job, claim)) FROM outbox.claim('old', 100)}), 1, "$what: found");
	$other->quit;
	return;
}

empty_look();
cmp_ok(sql(q{SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'jobs_due'}), '>', $before, 'looks without the hint are dear');
found('a claim that is rolled back', [ 'BEGIN', q{SELECT job FROM outbox.claim('old')} ], ['ROLLBACK']);
found('a claim in a savepoint', [ 'BEGIN', 'SAVEPOINT s', q{SELECT job FROM outbox.claim('old')} ], ['ROLLBACK TO s']);
$session->query_safe('COMMIT');
found('a claim in a savepoint that was released', [ 'BEGIN', 'SAVEPOINT s', q{SELECT job FROM outbox.claim('old')}, 'RELEASE s' ], ['ROLLBACK']);
found('a release', [ 'BEGIN', q{SELECT outbox.release(job, claim) FROM outbox.claim('old')} ], ['COMMIT']);
found('a failure', [ 'BEGIN', q{SELECT outbox.fail(job, claim, 'e', '0') IS NULL FROM outbox.claim('old')} ], ['COMMIT']);
found('a completion that is rolled back', [ q{SELECT job, claim FROM outbox.claim('old', 1, '1us') \gset}, 'BEGIN', q{SELECT outbox.complete(:job, :claim)} ], ['ROLLBACK']);
found('completions that are rolled back', [ q{SELECT job, claim FROM outbox.claim('old', 1, '1us') \gset}, 'BEGIN', q{SELECT outbox.complete_many(:claim)} ], ['ROLLBACK']);
found('an extension that is rolled back', [ q{SELECT job, claim FROM outbox.claim('old', 1, '1us') \gset}, 'BEGIN', q{SELECT outbox.extend(:job, :claim)} ], ['ROLLBACK']);
found('extensions that are rolled back', [ q{SELECT job, claim FROM outbox.claim('old', 1, '1us') \gset}, 'BEGIN', q{SELECT outbox.extend_many(:claim)} ], ['ROLLBACK']);
found('a retry of one that is not dead', [ 'BEGIN', q{SELECT outbox.retry(job) FROM outbox.job_status WHERE state = 'waiting'} ], ['COMMIT']);
found('a retry of one that is dead', [ q{SELECT outbox.fail(job, claim, 'e', final => true) IS NULL FROM outbox.claim('old')}, 'BEGIN', q{SELECT outbox.retry_dead('old')} ], ['COMMIT']);
found('a job that is not cancelled after all', [ 'BEGIN', q{SELECT outbox.cancel(job) FROM outbox.job_status WHERE state = 'waiting'} ], ['ROLLBACK']);
# one snapshot for all of a transaction: it cannot see what has come, and keeps
# it from nobody
$session->query_safe('BEGIN ISOLATION LEVEL REPEATABLE READ');
$session->query_safe('SELECT 1');
record('old', 1);
is($session->query_safe(q{SELECT count(*) FROM outbox.claim('old')}), 0, 'not seen by an older snapshot');
$session->query_safe('COMMIT');
is(sql(q{SELECT count(outbox.complete(job, claim)) FROM outbox.claim('old')}), 1, 'and found by another');
$old->query_safe('COMMIT');
$old->quit;
$session->quit;
wait_drained($node, 'an old snapshot');

$node->stop;
done_testing();
