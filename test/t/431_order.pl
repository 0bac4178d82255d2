# An ordered subscription under many clients: of each subject one job at a time,
# strictly in order, whatever fails or is rolled back; and a claim does not walk
# over what is held back.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IPC::Run;
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $node = new_server('order');

sub sql
{
	return $node->safe_psql('postgres', @_);
}

sub start_clients
{
	my ($name, $clients, $times, $script) = @_;
	my $file = "$PostgreSQL::Test::Utils::tmp_check/431_$name.sql";
	my %run = (name => $name, clients => $clients, out => '', err => '');

	append_to_file($file, $script);
	$run{run} = IPC::Run::start([ 'pgbench', '-n', '-c', $clients, '-t', $times, '-h', $node->host, '-p', $node->port, '-f', $file, 'postgres' ],
		'>', \$run{out}, '2>', \$run{err});
	return \%run;
}

sub end_clients
{
	my ($run) = @_;
	my $ok = $run->{run}->finish;

	$ok &&= $run->{err} !~ /ERROR|abort/;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok($ok, "$run->{name}: $run->{clients} clients") or diag($run->{err});
	return;
}

# 100 subjects with 20 events each, recorded by two clients while four others
# handle them.  A run of a job is a row, made when it is claimed and finished by
# who completes it, in transactions of their own; runs may be rolled back.
seeded();
sql(q{
	SELECT outbox.subscribe('ordered', '{o}', ordered => true, max_attempts => 1000, retry_min => '0', retry_max => '0');
	CREATE TABLE runs (run bigint GENERATED ALWAYS AS IDENTITY, job bigint, seq bigint, subject text, claim bigint, began timestamptz DEFAULT clock_timestamp(), ended timestamptz, outcome text);
	CREATE INDEX ON runs (claim)});
my $recorders = start_clients('recorders', 2, 200, q{
	\set s random(0, 99)
	INSERT INTO outbox.events (type, subject) SELECT 'o', ((:s + i) % 100)::text FROM generate_series(1, 5) i;
});
my $worker = q{
	\set r random(1, 10)
	CALL outbox.await_jobs('ordered', '50ms');
	BEGIN;
	WITH c AS (INSERT INTO runs (job, seq, subject, claim) SELECT job, seq, subject, claim FROM outbox.claim('ordered', 5) RETURNING claim) SELECT coalesce(max(claim), 0) AS claim FROM c \gset
	\if :r = 1
	ROLLBACK;
	\else
	COMMIT;
	\if :r = 2
	WITH r AS (UPDATE runs SET ended = clock_timestamp(), outcome = 'failed' WHERE claim = :claim RETURNING job) SELECT count(outbox.fail(job, :claim, 'e')) FROM r;
	\elif :r = 3
	WITH r AS (UPDATE runs SET ended = clock_timestamp(), outcome = 'released' WHERE claim = :claim RETURNING job) SELECT count(outbox.release(job, :claim)) FROM r;
	\elif :r = 4
	BEGIN;
	SELECT outbox.complete_many(:claim);
	ROLLBACK;
	WITH r AS (UPDATE runs SET ended = clock_timestamp(), outcome = 'done' WHERE claim = :claim RETURNING job) SELECT count(outbox.complete(job, :claim)) FROM r;
	\else
	UPDATE runs SET ended = clock_timestamp(), outcome = 'done' WHERE claim = :claim;
	SELECT outbox.complete_many(:claim);
	\endif
	\endif
};
my $workers = start_clients('workers', 4, 400, $worker);
end_clients($recorders);
end_clients($workers);
foreach (1 .. 100)
{
	last if sql(q{SELECT count(*) = 2000 FROM outbox.job_status WHERE state = 'done'}) eq 't';
	end_clients(start_clients("more_$_", 4, 50, $worker));
}
is(sql(q{SELECT string_agg(state || ':' || n, ' ') FROM (SELECT state, count(*) AS n FROM outbox.job_status GROUP BY 1) s}), 'done:2000', 'all are done');
# the relay adds them in the order of their seqs, as far as these are committed:
# what counts is the order of the jobs
is(sql(q{SELECT count(*) FROM (SELECT job, lag(job) OVER (PARTITION BY subject ORDER BY run) AS before FROM runs) r WHERE job < before}), 0, 'of each subject, strictly in order');
is(sql(q{SELECT count(*) FROM (SELECT began, lag(ended) OVER (PARTITION BY subject ORDER BY run) AS before, lag(run) OVER (PARTITION BY subject ORDER BY run) AS other FROM runs) r WHERE other IS NOT NULL AND (before IS NULL OR began < before)}), 0, 'and never two at once');
is(sql(q{SELECT count(*) FROM runs WHERE outcome = 'done'}), 2000, 'each was completed once');
is(sql(q{SELECT count(*) > 20 FROM runs WHERE outcome <> 'done'}), 't', 'though many failed');
is(sql(q{SELECT count(*) FROM outbox.blocked}), 0, 'nothing is held back any more');
is_conserved($node, 'ordered');

# Recorded by one client, so in the order of their seqs; each is claimed, handled
# and completed in one transaction.
sql(q{TRUNCATE runs; SELECT outbox.unsubscribe('ordered'); TRUNCATE outbox.events, outbox.jobs; SELECT outbox.subscribe('ordered', '{o}', ordered => true)});
$recorders = start_clients('recorder', 1, 200, q{INSERT INTO outbox.events (type, subject) SELECT 'o', (i % 20)::text FROM generate_series(1, 5) i});
$worker = q{
	\set r random(1, 5)
	CALL outbox.await_jobs('ordered', '50ms');
	BEGIN;
	INSERT INTO runs (job, seq, subject, claim) SELECT job, seq, subject, claim FROM outbox.claim('ordered', 3) WHERE outbox.complete(job, claim);
	\if :r = 1
	ROLLBACK;
	\else
	COMMIT;
	\endif
};
$workers = start_clients('in_one_transaction', 4, 200, $worker);
end_clients($recorders);
end_clients($workers);
foreach (1 .. 100)
{
	last if sql(q{SELECT count(*) = 1000 FROM outbox.job_status WHERE state = 'done'}) eq 't';
	end_clients(start_clients("in_one_more_$_", 4, 50, $worker));
}
is(sql('SELECT count(*), count(DISTINCT job) FROM runs'), '1000|1000', 'in one transaction: each is done once');
is(sql(q{SELECT count(*) FROM (SELECT seq, lag(seq) OVER (PARTITION BY subject ORDER BY run) AS before FROM runs) r WHERE seq < before}), 0, 'in the order of their seqs');

# One subject, 20,000 deep behind a job that waits for its retry: claims of others
# do not walk over it.  Whatever the planner knows of the table: nothing, what it
# was when it was empty, what it is; and with plans that were made when it was
# empty.
sql(q{TRUNCATE runs; SELECT outbox.unsubscribe('ordered'); TRUNCATE outbox.events, outbox.jobs; SELECT outbox.subscribe('ordered', '{o}', ordered => true)});
my $early = $node->background_psql('postgres');
my @all = (
	q{SELECT count(outbox.complete(job, claim)) FROM outbox.claim('ordered')},
	q{SELECT outbox.complete_many(coalesce(max(claim), 0)) FROM outbox.claim('ordered', 10)},
	q{SELECT outbox.is_current('ordered', 'deep')});
$early->query_safe($_) foreach @all;
sql(q{INSERT INTO outbox.events (type, subject) VALUES ('o', 'deep')});
wait_drained($node, 'the first');
sql(q{SELECT outbox.fail(job, claim, 'e', '1 hour') FROM outbox.claim('ordered')});
sql(q{INSERT INTO outbox.events (type, subject) SELECT 'o', 'deep' FROM generate_series(1, 20000)});
wait_drained($node, 'the deep subject');
sql(q{INSERT INTO outbox.events (type, subject) SELECT 'o', 'other' || i FROM generate_series(1, 1000) i});
wait_drained($node, 'the others');
is(sql(q{SELECT waiting, state FROM outbox.blocked}), '20000|retrying', 'one subject is held back');

# Blocks of the table and its indexes that were touched
sub blocks
{
	my ($session) = @_;

	$session->query_safe('SELECT pg_stat_force_next_flush()');
	return $session->query_safe(q{
		SELECT pg_stat_clear_snapshot(), heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit
		FROM pg_statio_user_tables WHERE relname = 'jobs'}) =~ /(\d+)$/ ? $1 : die;
}

sub costs
{
	my ($session, $what, $limit, $statement) = @_;

	# catalogs are read, and plans are made, at the first
	$session->query_safe($statement);
	settled($node);
	my $before = blocks($session);

	$session->query_safe($statement) foreach 1 .. 10;
	my $after = blocks($session);

	note("$what: " . ($after - $before) / 10 . ' blocks');
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	cmp_ok(($after - $before) / 10, '<', $limit, "$what touches few blocks");
	return;
}

foreach my $known ('no statistics', 'plans made for an empty table', 'statistics')
{
	sql('ANALYZE outbox.jobs') if $known eq 'statistics';
	my $session = $known =~ /plans/ ? $early : $node->background_psql('postgres');

	costs($session, "$known: a claim and its completion", 80, $all[0]);
	costs($session, "$known: a claim of ten and their completion", 1500, $all[1]);
	costs($session, "$known: outbox.is_current()", 20, $all[2]);
	$session->quit if $known !~ /plans/;
}
my $session = $node->background_psql('postgres');
costs($session, 'an extension', 80, q{SELECT outbox.extend(job, claim) IS NULL FROM (SELECT * FROM outbox.claim('ordered') OFFSET 0) c});
$session->query_safe(q{SELECT count(outbox.complete(job, claim)) FROM outbox.claim('ordered', 1000)});
costs($session, 'a claim in vain', 40, q{SELECT count(*) FROM outbox.claim('ordered', 10)});
# the end of the one that holds it back: the next, and the next
sql(q{UPDATE outbox.jobs SET due_at = clock_timestamp() WHERE subject_key IS NOT NULL AND attempts > 0 AND claim IS NULL AND done_at IS NULL});
foreach my $s ($session, $early)
{
	costs($s, 'one after the other', 100, $all[0]);
}
is(sql(q{SELECT count(*) FROM outbox.job_status s JOIN outbox.events e USING (seq) WHERE s.state = 'done' AND e.subject = 'deep'}), 22, 'which go on');
is(sql(q{SELECT max(n) FROM (SELECT s.state, row_number() OVER (ORDER BY seq) AS n FROM outbox.job_status s JOIN outbox.events e USING (seq) WHERE e.subject = 'deep') x WHERE state = 'done'}), 22, 'in order');
$early->quit;

# 20,000 subjects: a claim does not depend on how many there are.
sql(q{SELECT outbox.unsubscribe('ordered'); TRUNCATE outbox.events, outbox.jobs; SELECT outbox.subscribe('ordered', '{o}', ordered => true)});
sql(q{INSERT INTO outbox.events (type, subject) SELECT 'o', (i % 20000)::text FROM generate_series(1, 40000) i});
wait_drained($node, 'many subjects');
costs($session, 'a claim of ten of many subjects', 1500, $all[1]);
is(sql(q{SELECT count(*), count(DISTINCT subject) FROM outbox.job_status JOIN outbox.events USING (seq) WHERE state = 'done'}), '110|110', 'the oldest of each');

# While the relay adds a job behind another, a claim passes that over.  Who waits
# for it hears of it when the relay has committed, and when its pass failed.  A
# look below the mark is dear here, and so cannot help: an old snapshot keeps
# many jobs that are done.
sql(q{SELECT outbox.unsubscribe('ordered'); TRUNCATE outbox.events, outbox.jobs; SELECT outbox.subscribe('ordered', '{o}', ordered => true)});
my $old = $node->background_psql('postgres');
$old->query_safe('BEGIN ISOLATION LEVEL REPEATABLE READ');
$old->query_safe('SELECT 1');
sql(q{INSERT INTO outbox.events (type) SELECT 'o' FROM generate_series(1, 50000)});
wait_drained($node, 'many that are done');
$session->query_safe(q{
	DO $$
	DECLARE
		c bigint;
	BEGIN
		LOOP
			SELECT max(claim) INTO c FROM outbox.claim('ordered', 1000);
			EXIT WHEN c IS NULL;
			COMMIT;
			PERFORM outbox.complete_many(c);
			COMMIT;
		END LOOP;
	END $$});
install_gate($node);
install_faults($node);
foreach my $fails (0, 1)
{
	my $what = $fails ? 'a pass that fails' : 'a pass';
	my ($out, $err) = ('', '');

	sql(q{INSERT INTO outbox.events (type, subject) VALUES ('o', 'a')});
	wait_drained($node, 'the first of a subject');
	sql(q{INSERT INTO public.gates VALUES ('jobs')});
	sql(q{INSERT INTO public.faults VALUES (NULL, 'P0001')}) if $fails;
	# a look below the mark, so that none is allowed for some time
	sql(q{INSERT INTO outbox.events (type, subject) VALUES ('o', 'a')});
	wait_at_gate($node);
	is($session->query_safe(q{SELECT count(*) FROM outbox.claim('ordered', 10)}), 0, "$what: passed over");
	open_gate($node);
	if ($fails)
	{
		wait_for($node, 'its failure', q{SELECT count(*) > 0 FROM outbox.events WHERE tries > 0});
	}
	else
	{
		wait_drained($node, $what);
	}
	is($session->query_safe(q{SELECT count(*) FROM outbox.claim('ordered', 10)}), 1, "$what: found");
	sql('TRUNCATE public.faults');
	wait_drained($node, 'the pass');
	$session->query_safe(q{
		DO $$
		BEGIN
			PERFORM outbox.complete(id, claim) FROM outbox.jobs WHERE claim IS NOT NULL AND done_at IS NULL;
			PERFORM outbox.complete(job, claim) FROM outbox.claim('ordered', 10);
		END $$});
}
$old->query_safe('COMMIT');
$_->quit foreach $old, $session;
is_conserved($node, 'added behind another');

$node->stop;
done_testing();
