# Leases in shared memory and leases in rows side by side, under many clients and
# under faults.  Every job is completed once, or cancelled; nobody ends a job that
# another holds; as long as no lease ends and nothing crashes, each is handled
# once; and at the end the table of leases is as empty as it was.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IPC::Run;
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

seeded();
my $node = new_server('lease_memory');
my $in_memory = 1_000_000_000_000_000;

sub sql
{
	return $node->safe_psql('postgres', $_[0]);
}

sub record
{
	my ($type, $n) = @_;

	sql("INSERT INTO outbox.events (type, subject) SELECT '$type', i::text FROM generate_series(1, $n) i");
	wait_for($node, "$type is fanned out", 'SELECT NOT EXISTS (SELECT FROM outbox.events WHERE fanned_out_at IS NULL)');
	return;
}

# What clients do.  Whatever they do to a job they write down in the same
# transaction: who holds it, who had it, who gave it back and who completed it.
sql(q{
	CREATE TABLE holds (job bigint PRIMARY KEY, claim bigint NOT NULL);
	CREATE TABLE taken (job bigint, claim bigint, PRIMARY KEY (job, claim));
	CREATE TABLE given_back (job bigint, claim bigint, PRIMARY KEY (job, claim));
	CREATE TABLE completed (job bigint PRIMARY KEY, claim bigint NOT NULL);
	CREATE TABLE settings (strict boolean);
	INSERT INTO settings VALUES (true);

	-- Claim; null when there is nothing.
	CREATE FUNCTION take(n int, lease interval, OUT c bigint, OUT mine bigint[]) LANGUAGE plpgsql AS $$
	BEGIN
		SELECT max(claim), array_agg(job ORDER BY job) INTO c, mine FROM outbox.claim('work', n, lease);
		IF cardinality(mine) > n THEN
			RAISE 'broken: claim % got more than %', c, n;
		END IF;
		INSERT INTO taken SELECT u, c FROM unnest(mine) u;
		IF (SELECT strict FROM settings) THEN
			INSERT INTO holds SELECT u, c FROM unnest(mine) u;
		ELSE
			INSERT INTO holds AS h SELECT u, c FROM unnest(mine) u ON CONFLICT (job) DO UPDATE SET claim = excluded.claim;
		END IF;
	END $$;

	-- Jobs have come to an end for a claim: nobody else may hold them.
	CREATE FUNCTION let_go(ended bigint[], c bigint) RETURNS boolean LANGUAGE plpgsql AS $$
	DECLARE
		n int;
	BEGIN
		DELETE FROM holds WHERE job = ANY (ended) AND claim = c;
		GET DIAGNOSTICS n = ROW_COUNT;
		IF n <> cardinality(ended) THEN
			RAISE 'broken: claim % has ended jobs % that another holds', c, ended;
		END IF;
		RETURN true;
	END $$;

	-- Complete what the claim still holds of some jobs.
	CREATE FUNCTION finish(c bigint, mine bigint[], many boolean) RETURNS int LANGUAGE plpgsql AS $$
	DECLARE
		refused bigint[] := outbox.complete_many(c, CASE WHEN many THEN mine END);
		ended bigint[];
	BEGIN
		IF many THEN
			ended := ARRAY(SELECT u FROM unnest(mine) u WHERE u <> ALL (refused));
		ELSE
			ended := ARRAY(SELECT id FROM outbox.jobs WHERE id = ANY (mine) AND claim = c AND done_at IS NOT NULL AND cancelled IS NULL);
		END IF;
		ended := ARRAY(SELECT u FROM unnest(ended) u WHERE NOT EXISTS (SELECT FROM completed d WHERE d.job = u AND d.claim = c));
		INSERT INTO completed SELECT u, c FROM unnest(ended) u;
		PERFORM let_go(ended, c);
		RETURN cardinality(ended);
	END $$;

	CREATE PROCEDURE work(n int, lease interval, p_forget float) LANGUAGE plpgsql AS $$
	DECLARE
		c bigint;
		j bigint;
		mine bigint[];
		r float;
	BEGIN
		SELECT * INTO c, mine FROM take(n, lease);
		IF c IS NULL THEN
			RETURN;
		END IF;
		IF random() < 0.1 THEN
			IF random() < 0.5 THEN
				PERFORM finish(c, mine, true);
			END IF;
			ROLLBACK;
			RETURN;
		ELSIF random() < 0.9 THEN
			COMMIT;
		END IF;
		FOREACH j IN ARRAY mine LOOP
			CONTINUE WHEN random() < 0.6;
			r := random();
			BEGIN
				IF r < 0.15 THEN
					PERFORM outbox.fail(j, c, 'e', '0');
				ELSIF r < 0.3 THEN
					PERFORM outbox.release(j, c);
				ELSIF r < 0.4 THEN
					PERFORM outbox.extend(j, c, lease);
				ELSIF r < 0.42 THEN
					PERFORM outbox.cancel(j);
				ELSIF r < 0.95 THEN
					IF outbox.complete(j, c) THEN
						PERFORM let_go(ARRAY[j], c);
						INSERT INTO completed VALUES (j, c);
					END IF;
				ELSE
					PERFORM outbox.complete(j, c);
				END IF;
				IF r < 0.3 THEN
					PERFORM let_go(ARRAY[j], c);
					INSERT INTO given_back VALUES (j, c);
				ELSIF r >= 0.95 OR random() < 0.1 THEN
					RAISE SQLSTATE 'U0001';
				END IF;
			EXCEPTION WHEN SQLSTATE 'OB001' OR SQLSTATE 'U0001' OR deadlock_detected THEN
				NULL;
			END;
			IF random() < 0.3 THEN
				COMMIT;
			END IF;
		END LOOP;
		COMMIT;
		IF random() < 0.2 THEN
			PERFORM outbox.extend_many(c, lease);
			COMMIT;
		END IF;
		IF random() >= p_forget THEN
			PERFORM finish(c, mine, random() < 0.5);
			COMMIT;
		END IF;
	END $$;

	CREATE VIEW wrong AS
		SELECT 'job ' || d.job || ' was completed by ' || d.claim || ', and is ' || COALESCE(s.state, 'gone') || ' by ' || COALESCE(j.claim, 0) AS what
			FROM completed d LEFT JOIN outbox.jobs j ON j.id = d.job LEFT JOIN outbox.job_status s USING (job)
			WHERE s.state IS DISTINCT FROM 'done' OR j.claim IS DISTINCT FROM d.claim
		UNION ALL
		SELECT 'job ' || job || ' is ' || state || ', and nobody has completed it' FROM outbox.job_status s
			WHERE subscription = 'work' AND state <> 'cancelled' AND NOT EXISTS (SELECT FROM completed d WHERE d.job = s.job)
		UNION ALL
		SELECT 'job ' || job || ' was completed without having been claimed' FROM completed d
			WHERE NOT EXISTS (SELECT FROM taken t WHERE t.job = d.job AND t.claim = d.claim)});

my %script = (
	work => q{
		\set n random(1, 4)
		\if :n = 1
			CALL work(1, '%lease%', %forget%);
		\elif :n = 2
			CALL work(5, '%lease%', %forget%);
		\elif :n = 3
			CALL work(20, '%lease%', %forget%);
		\else
			CALL work(100, '%lease%', %forget%);
		\endif
	},
	# claimed in a transaction that is prepared
	claims => q{
		\set n random(1, 20)
		\set r random(1, 3)
		BEGIN;
		SELECT COALESCE(c, 0) AS c, COALESCE(mine, '{}') AS jobs FROM take(:n, '%lease%') \gset
		\if :r = 1
			SELECT finish(:c, ':jobs', true);
		\endif
		PREPARE TRANSACTION 'claim:client_id';
		SELECT count(*) FROM outbox.job_status WHERE job = ANY (':jobs');
		\if :r = 2
			ROLLBACK PREPARED 'claim:client_id';
		\else
			COMMIT PREPARED 'claim:client_id';
			SELECT finish(:c, ':jobs', true);
		\endif
	},
	# or completed
	completes => q{
		\set n random(1, 20)
		\set r random(1, 2)
		SELECT COALESCE(c, 0) AS c, COALESCE(mine, '{}') AS jobs FROM take(:n, '%lease%') \gset
		BEGIN;
		SELECT finish(:c, ':jobs', true);
		PREPARE TRANSACTION 'complete:client_id';
		SELECT count(*) FROM outbox.job_status WHERE job = ANY (':jobs');
		\if :r = 1
			ROLLBACK PREPARED 'complete:client_id';
			SELECT finish(:c, ':jobs', true);
		\else
			COMMIT PREPARED 'complete:client_id';
		\endif
	});
my $nscripts = 0;

# Begin to run clients with a mix of scripts.
sub start_clients
{
	my ($clients, $times, $lease, $forget, @names) = @_;
	my %run = (out => '', err => '');
	my @files;

	foreach my $name (@names)
	{
		my $file = "$PostgreSQL::Test::Utils::tmp_check/433_" . $nscripts++ . "_$name.sql";

		append_to_file($file, $script{$name} =~ s/%lease%/$lease/gr =~ s/%forget%/$forget/gr);
		push @files, '-f', $file;
	}
	$run{run} = IPC::Run::start([ 'pgbench', '-n', '-c', $clients, '-j', 2, '-t', $times, '-h', $node->host, '-p', $node->port, @files, 'postgres' ],
		'>', \$run{out}, '2>', \$run{err});
	return \%run;
}

sub finish_clients
{
	my ($run, $what, $may_fail) = @_;
	my $ok = $run->{run}->finish;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	# what follows would wait for what they hold
	ok(($may_fail || $ok) && $run->{err} !~ /broken|duplicate|ERROR:  (?!deadlock|.*terminating|the database)/, "$what: clients") or die $run->{err};
	return;
}

# Complete what is left, some of which may have to be waited for.
sub finish_work
{
	my ($what) = @_;

	sql(q{UPDATE settings SET strict = false});
	foreach my $round (1 .. 100 * $PostgreSQL::Test::Utils::timeout_default)
	{
		sql(q{
			DO $$
			DECLARE
				c bigint;
				mine bigint[];
			BEGIN
				LOOP
					SELECT * INTO c, mine FROM take(100, '1h');
					EXIT WHEN c IS NULL;
					COMMIT;
					PERFORM finish(c, mine, true);
					COMMIT;
				END LOOP;
			END $$});
		last if sql(q{SELECT NOT EXISTS (SELECT FROM outbox.job_status WHERE subscription = 'work' AND state NOT IN ('done', 'cancelled'))}) eq 't';
		usleep(10_000);
	}
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is(sql('SELECT * FROM wrong ORDER BY 1 LIMIT 10'), '', "$what: every job was completed once, by who held it");
	is_conserved($node, $what);
	return;
}

# How many jobs can be leased in memory by claims of so many?  Takes all that are
# there, and completes them.
sub capacity
{
	my ($subscription, $n, $jobs) = @_;
	my $result;

	record($subscription, $jobs);
	$result = sql(qq{
		CREATE TEMP TABLE claims (claim bigint, n int);
		DO \$\$
		DECLARE
			c bigint;
			got int;
		BEGIN
			FOR i IN 1 .. $jobs / $n LOOP
				SELECT max(claim), count(*) INTO c, got FROM outbox.claim('$subscription', $n, '1h');
				IF got IS DISTINCT FROM $n THEN
					RAISE 'claim % got % of $n jobs', i, got;
				END IF;
				COMMIT;
				INSERT INTO claims VALUES (c, got);
			END LOOP;
		END \$\$;
		SELECT sum(n) || ' ' || sum(n) FILTER (WHERE claim >= $in_memory) || ' ' || (SELECT count(*) FROM claims WHERE outbox.complete_many(claim) = '{}') FROM claims});
	is(sql(qq{SELECT string_agg(DISTINCT state, ' ') FROM outbox.job_status WHERE subscription = '$subscription'}), 'done', "$subscription: all are done");
	sql(qq{SELECT outbox.purge('$subscription', 'done'); DELETE FROM outbox.events WHERE type = '$subscription'});
	return $result;
}

sql(q{SELECT outbox.subscribe('jobs', '{jobs}'), outbox.subscribe('leases', '{leases}'), outbox.subscribe('work', '{work}', max_attempts => 1000000, retry_min => '0', retry_max => '0')});

# Full: claims of more go to the rows, and get as many as they asked for.
my $all_jobs = capacity('jobs', 100, 60_000);
my $all_leases = capacity('leases', 8, 32_000);

like($all_jobs, qr/^60000 \d{5} 600$/, 'a table full of jobs');
like($all_leases, qr/^32000 \d{5} 4000$/, 'a table full of leases');
is(capacity('jobs', 100, 60_000), $all_jobs, 'full once more');
is(capacity('leases', 8, 32_000), $all_leases, 'full once more');

# No lease ends
record('work', 6000);
finish_clients(start_clients(8, 25, '1h', 0, 'work'), 'long leases');
is(sql(q{
	SELECT count(*) FROM (SELECT job, count(*) AS n FROM taken GROUP BY 1) t
	WHERE n <> (SELECT count(*) FROM given_back g WHERE g.job = t.job) + 1
		AND n <> (SELECT count(*) FROM given_back g WHERE g.job = t.job)}), 0, 'nothing was taken more often than it had been given back');
is(sql(q{SELECT count(*) FROM outbox.job_status WHERE state = 'running'}), 0, 'nobody holds anything');
finish_work('long leases');
is(sql(q{SELECT max(attempts - (SELECT count(*) FROM given_back g WHERE g.job = s.job)) FROM outbox.job_status s WHERE state = 'done'}), 1, 'no attempt is counted too many');
sql(q{TRUNCATE holds});

# Leases end all the time, and clients forget what they have
record('work', 4000);
finish_clients(start_clients(8, 25, '20ms', 0.3, 'work'), 'short leases');
finish_work('short leases');

# Two-phase commit, with others
record('work', 4000);
finish_clients(start_clients(8, 60, '50ms', 0.1, 'work', 'claims', 'completes'), 'prepared transactions');
finish_work('prepared transactions');
is(sql('SELECT count(*) FROM pg_prepared_xacts'), 0, 'no prepared transaction is left');

# Backends that are terminated in whatever they do
record('work', 4000);
foreach my $round (1 .. 5)
{
	my $run = start_clients(6, 1_000_000, '50ms', 0.1, 'work');
	my $done = sql('SELECT count(*) FROM completed');

	wait_for($node, 'some work', "SELECT count(*) > $done + 100 OR NOT EXISTS (SELECT FROM outbox.jobs WHERE done_at IS NULL) FROM completed");
	usleep(int(rand(20_000)));
	sql(q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()});
	finish_clients($run, "terminated, round $round", 1);
}
finish_work('terminated');

is(capacity('jobs', 100, 60_000), $all_jobs, 'all of the table is free at the end');
is(capacity('leases', 8, 32_000), $all_leases, 'and so are all leases');

# Crashes: what was leased is due again, who held it is told, and the numbers of
# claims are not given twice.
foreach my $victim (qw(backend server backend server))
{
	my ($run, $done, $pid, $c);

	record('work', 3000);
	$c = sql(q{SELECT max(c) FROM take(50, '1h')});
	cmp_ok($c, '>', $in_memory, "$victim: a claim in memory");
	$run = start_clients(6, 1_000_000, '1h', 0.1, 'work', 'work', 'claims', 'completes');
	$done = sql('SELECT count(*) FROM completed');
	wait_for($node, 'some work', "SELECT count(*) > $done + 300 FROM completed");
	usleep(int(rand(20_000)));
	if ($victim eq 'backend')
	{
		$pid = sql(q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() LIMIT 1});
		kill 'KILL', $pid;
	}
	else
	{
		kill_postmaster($node);
	}
	finish_clients($run, "$victim killed", 1);
	if ($victim eq 'backend')
	{
		wait_for($node, 'a restart', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)");
	}
	else
	{
		$node->start;
	}
	foreach my $prepared (split /\n/, sql(q{SELECT gid FROM pg_prepared_xacts}))
	{
		sql((rand() < 0.5 ? 'COMMIT' : 'ROLLBACK') . " PREPARED '$prepared'");
	}
	is(sql("SELECT outbox.extend_many($c)"), 0, "$victim killed: leases in memory are lost");
	is(sql("SELECT outbox.complete_many($c, ARRAY(SELECT job FROM taken WHERE claim = $c)) = ARRAY(SELECT job FROM taken WHERE claim = $c ORDER BY job)"), 't', 'who held them is told');
	is(sql("SELECT count(*) FROM outbox.claim('work', 10, '1us') WHERE claim <= $c AND claim > $in_memory"), 0, 'no number is given twice');
	# what is leased in rows is so for an hour, of clients that are gone
	sql(q{UPDATE outbox.jobs SET due_at = now() WHERE done_at IS NULL AND dead_at IS NULL});
	finish_work("$victim killed");
}
is(capacity('jobs', 100, 60_000), $all_jobs, 'all of the table is free after crashes');

$node->stop;
done_testing();
