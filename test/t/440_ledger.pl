# Promise P3 under faults: accounts that only handlers move.  Each transfer is
# an event; whatever dies meanwhile, at the end every one has been made once, and
# the books balance to the cent.

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
my $node = new_server('ledger', 'outbox.runners' => 3, 'outbox.sweep_interval' => "'1s'");

sub sql
{
	return $node->safe_psql('postgres', $_[0]);
}

sql(q{
	CREATE ROLE teller LOGIN;
	SELECT outbox.grant('teller', 'consume'), outbox.grant('teller', 'record');
	CREATE SCHEMA bank AUTHORIZATION teller;
	SET ROLE teller;
	CREATE TABLE bank.accounts (id int PRIMARY KEY, cents bigint NOT NULL DEFAULT 100000);
	INSERT INTO bank.accounts SELECT generate_series(1, 20);
	CREATE TABLE bank.made (seq bigint, amount bigint);
	CREATE TABLE bank.mood (good boolean);
	INSERT INTO bank.mood VALUES (false);

	-- a constraint that is looked at when the transaction ends, and sometimes fails then
	CREATE FUNCTION bank.audit() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		IF random() < 0.05 AND NOT (SELECT good FROM bank.mood) THEN
			RAISE check_violation USING MESSAGE = 'the auditor does not like it';
		END IF;
		RETURN NULL;
	END $$;
	CREATE CONSTRAINT TRIGGER audit AFTER INSERT ON bank.made DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION bank.audit();

	CREATE FUNCTION bank.transfer(e outbox.event) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		amount bigint := (e.payload->>'amount')::bigint;
		bad boolean := NOT (SELECT good FROM bank.mood);
	BEGIN
		UPDATE bank.accounts SET cents = cents - amount WHERE id = (e.payload->>'from')::int;
		IF bad AND random() < 0.1 THEN
			RAISE EXCEPTION 'the pen broke';
		END IF;
		UPDATE bank.accounts SET cents = cents + amount WHERE id = (e.payload->>'to')::int;
		INSERT INTO bank.made VALUES (e.seq, amount);
		-- a fee is an event of its own, made or not made with the transfer
		IF e.type = 'transfer.large' THEN
			PERFORM outbox.record('transfer.fee', 'fee/' || e.seq,
				jsonb_build_object('from', e.payload->'from', 'to', 1, 'amount', 3));
		END IF;
		IF bad AND random() < 0.005 THEN
			PERFORM pg_terminate_backend(pg_backend_pid());
		END IF;
	END $$;
	SELECT outbox.subscribe('bank', '{transfer.*}', handler => 'bank.transfer',
		max_attempts => 1000000, retry_min => '10ms', retry_max => '100ms', lease => '5s')});

my $script = "$PostgreSQL::Test::Utils::tmp_check/ledger.sql";
append_to_file($script, <<'SQL');
\set from random(1, 20)
\set to random(1, 20)
\set amount random(1, 1000)
\set fate random(1, 10)
BEGIN;
SELECT outbox.record(CASE WHEN :amount > 900 THEN 'transfer.large' ELSE 'transfer.small' END, 'account/' || :from,
	jsonb_build_object('from', :from, 'to', :to, 'amount', :amount));
\if :fate = 1
ROLLBACK;
\else
COMMIT;
\endif
SQL

# Start the server again.  A process that was forked in the moment of a kill may
# take a little longer to notice.
sub start_again
{
	foreach (1 .. $PostgreSQL::Test::Utils::timeout_default)
	{
		return if $node->start(fail_ok => 1);
		usleep(1_000_000);
	}
	die 'the server does not start again';
}

# Processes of one kind
sub pids
{
	return split /\n/, sql("SELECT pid FROM pg_stat_activity WHERE backend_type = '$_[0]'");
}

sub up
{
	wait_for($node, 'a restart', 'SELECT NOT pg_is_in_recovery()');
	return;
}

my @faults = (
	[ 'kill -9 of a runner' => sub { my @p = pids('outbox runner'); kill 'KILL', $p[ rand @p ] if @p; } ],
	[ 'end of every runner' => sub { sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'outbox runner'"); } ],
	[ 'cancel of every runner' => sub { sql("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE backend_type = 'outbox runner'"); } ],
	[ 'kill -9 of the relay' => sub { my @p = pids('outbox relay'); kill 'KILL', $p[0] if @p; } ],
	[ 'an immediate restart' => sub { $node->stop('immediate'); start_again(); } ],
	[ 'a fast restart' => sub { $node->stop('fast'); start_again(); } ],
	[ 'a pause' => sub { sql(q{SELECT outbox.pause('bank')}); usleep(100_000); sql(q{SELECT outbox.resume('bank')}); } ],
	[ 'one runner, then three' => sub { set_conf($node, 'outbox.runners' => 1); set_conf($node, 'outbox.runners' => 3); } ],
	[ 'stop and start' => sub { sql('SELECT outbox.stop()'); usleep(100_000); sql('SELECT outbox.start()'); } ],
	[ 'kill -9 of the postmaster' => sub { kill_postmaster($node); start_again(); } ]);
my $rounds = slow() ? 200 : 12;

foreach my $round (1 .. $rounds)
{
	my ($out, $err) = ('', '');
	my $writers = IPC::Run::start([ 'pgbench', '-n', '-c', 2, '-t', 150, '-h', $node->host, '-p', $node->port,
			'-f', $script, 'postgres' ], '>', \$out, '2>', \$err);
	my ($what, $fault) = @{ $faults[ $round <= @faults ? $round - 1 : rand @faults ] };
	my $made = sql('SELECT count(*) FROM bank.made');

	wait_for($node, 'transfers', "SELECT count(*) > $made + 10 FROM bank.made");
	usleep(int(rand(50_000)));
	note("round $round: $what");
	$fault->();
	$writers->finish;
	up();
}
sql('UPDATE bank.mood SET good = true');
is($node->safe_psql('postgres', q{CALL outbox.await_idle('bank', '170s')}), 't', 'every job comes to an end');
is(sql(q{
	SELECT (SELECT count(*) FROM bank.made m WHERE NOT EXISTS (SELECT FROM outbox.events e WHERE e.seq = m.seq)),
		(SELECT count(*) FROM outbox.events e WHERE type LIKE 'transfer.%' AND NOT EXISTS (SELECT FROM bank.made m WHERE m.seq = e.seq)),
		(SELECT count(*) - count(DISTINCT seq) FROM bank.made)}),
	'0|0|0', 'each transfer was made, and once');
is(sql(q{
	SELECT count(*) FROM bank.accounts a
	WHERE cents <> 100000 + (SELECT COALESCE(sum((payload->>'amount')::bigint * (((payload->>'to')::int = a.id)::int - ((payload->>'from')::int = a.id)::int)), 0)
		FROM outbox.events WHERE type LIKE 'transfer.%')}),
	'0', 'each account has what the transfers say');
is(sql('SELECT sum(cents) FROM bank.accounts'), 20 * 100_000, 'and nothing was made or lost');
is(sql(q{SELECT count(*) FROM outbox.job_status WHERE state <> 'done'}), '0', 'no job is left over');
cmp_ok(sql(q{SELECT max(attempts) FROM outbox.job_status}), '>', 1, 'some were tried more than once');
is_conserved($node, 'after it all');

$node->stop;
done_testing();
