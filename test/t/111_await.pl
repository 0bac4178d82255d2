# CALL outbox.await_fanout(): waits without holding anything.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IPC::Run;
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $node = new_server('await');

sub sql
{
	return $node->safe_psql('postgres', @_);
}

sub next_seq
{
	return sql('SELECT last_value + 1 FROM outbox.events_seq_seq');
}

# A session that waits for something; returns when it does.
sub start_waiting
{
	my ($session, $call) = @_;
	my $pid = $session->query_safe('SELECT pg_backend_pid()');

	$session->query_until(qr/started/, "\\echo started\n$call;\n\\echo ended\n");
	wait_for($node, 'the session to wait',
		"SELECT wait_event_type = 'Extension' AND query LIKE '%await_fanout%' FROM pg_stat_activity WHERE pid = $pid");
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

sql(q{SELECT outbox.subscribe('all'); CREATE TABLE done (client int); SELECT outbox.record('x')});
install_faults($node);
wait_relay($node);
my $session = $node->background_psql('postgres', on_error_stop => 0);

# An event that does not exist yet.  While it waits, the session pins nothing.
my $seq = next_seq();
my $pid = start_waiting($session, "CALL outbox.await_fanout($seq, '60s')");
is(sql("SELECT backend_xmin IS NULL, backend_xid IS NULL, state FROM pg_stat_activity WHERE pid = $pid"), 't|t|active', 'no snapshot and no transaction id while it waits');
is(sql("SELECT count(*) FROM pg_locks WHERE pid = $pid AND locktype <> 'virtualxid'"), 0, 'nor any lock');
# so what VACUUM may remove does not wait for it
sql('CREATE TABLE dead AS SELECT 1 AS i; DELETE FROM dead');
like(($node->psql('postgres', 'VACUUM (VERBOSE) dead'))[2], qr/1 (?:dead row versions|removed|removable)|tuples: 1 removed/, 'VACUUM removes what it would have held');
is(sql(q{SELECT outbox.record('x')}), $seq, 'the event comes');
is(end_waiting($session), 'fanned', 'and ends the wait');

# Only those whose event was fanned out are woken.
SKIP:
{
	skip 'needs /proc', 1 unless -r "/proc/$pid/status";
	my $switches = sub { slurp_file("/proc/$pid/status") =~ /^voluntary_ctxt_switches:\s+(\d+)/m; return $1 };

	start_waiting($session, "CALL outbox.await_fanout(999999, '60s')");
	my $before = $switches->();
	my $start = time;
	my $other = $node->background_psql('postgres');

	foreach (1 .. 200)
	{
		my $n = $other->query_safe(q{SELECT outbox.record('x')});

		$other->query_safe("CALL outbox.await_fanout($n, '60s')");
	}
	$other->quit;
	# it looks by itself once a second
	cmp_ok($switches->() - $before, '<', 60 + 10 * (time - $start), '200 other events do not wake it');
	sql(q{INSERT INTO outbox.events (seq, type) OVERRIDING SYSTEM VALUE VALUES (999999, 'x')});
	is(end_waiting($session), 'fanned', 'its own does');
}

# Whoever waits is woken: by itself it would look again only after a second.
my $soon = 0;
foreach (1 .. 20)
{
	my $n = next_seq();

	start_waiting($session, "CALL outbox.await_fanout($n, '60s')");
	my $start = time;
	sql(q{SELECT outbox.record('x')});
	end_waiting($session) eq 'fanned' or die "event $n is not fanned out";
	$soon++ if time - $start < 0.5;
}
cmp_ok($soon, '>=', 10, 'those whose event was fanned out are woken');

# Outcomes
$seq = sql(q{SELECT outbox.record('x')});
is(sql("CALL outbox.await_fanout($seq)"), 'fanned', 'the default of the timeout will do');
is(sql("CALL outbox.await_fanout($seq, '0')"), 'fanned', 'what is fanned out already is seen without waiting');
is(sql("CALL outbox.await_fanout(seq => $seq, timeout => '1s', outcome => 'anything')"), 'fanned', 'arguments by name');
my $start = time;
is(sql("CALL outbox.await_fanout(777777, '300ms')"), 'timeout', 'an event that never comes');
cmp_ok(time - $start, '>=', 0.3, 'is waited for');
is(sql("CALL outbox.await_fanout(0, '0')"), 'timeout', 'without waiting');
is(sql("CALL outbox.await_fanout(-9223372036854775808, '1ms')"), 'timeout', 'any number');
sql(q{SELECT outbox.stop()});
$seq = sql(q{SELECT outbox.record('x')});
is(sql("CALL outbox.await_fanout($seq, '200ms')"), 'timeout', 'an event that is not fanned out');
sql(q{SELECT outbox.start()});
is(sql("CALL outbox.await_fanout($seq, '60s')"), 'fanned', 'until it is');
my $bad = sql(q{INSERT INTO public.faults SELECT outbox.record('x'), '23514' RETURNING seq});
start_waiting($session, "CALL outbox.await_fanout($bad, '60s')");
is(end_waiting($session), 'poisoned', 'poison');
is(sql("CALL outbox.await_fanout($bad, '0')"), 'poisoned', 'and still poison');
sql("DELETE FROM public.faults; SELECT outbox.requeue($bad)");
is(sql("CALL outbox.await_fanout($bad, '60s')"), 'fanned', 'after requeue');

# What cannot wait says so.
sub refused
{
	my ($statement, $code, $what) = @_;
	my ($ret, $out, $err) = $node->psql('postgres', "\\set VERBOSITY verbose\n$statement");

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return like($err, qr/ERROR:  \Q$code\E: /, $what);
}
refused("BEGIN; CALL outbox.await_fanout($seq)", '25001', 'in a transaction block');
refused("BEGIN; SAVEPOINT s; CALL outbox.await_fanout($seq)", '25001', 'in a savepoint');
sql("CREATE FUNCTION public.waits() RETURNS int LANGUAGE plpgsql AS 'DECLARE o text; BEGIN CALL outbox.await_fanout($seq, ''1s'', o); RETURN 1; END'");
refused('SELECT public.waits()', '25001', 'in a function');
refused("DO \$\$ DECLARE o text; BEGIN BEGIN CALL outbox.await_fanout($seq, '1s', o); EXCEPTION WHEN division_by_zero THEN NULL; END; END \$\$", '25001', 'in an EXCEPTION block');
refused("CREATE PROCEDURE public.definer() SECURITY DEFINER LANGUAGE plpgsql AS 'DECLARE o text; BEGIN CALL outbox.await_fanout($seq, ''1s'', o); END'; CALL public.definer()", '25001', 'in a SECURITY DEFINER procedure');
refused('CALL outbox.await_fanout(NULL)', '22023', 'no seq');
refused('CALL outbox.await_fanout(1, NULL)', '22023', 'no timeout');
refused("CALL outbox.await_fanout(1, '-1 minute')", '22023', 'a timeout in the past');
my ($ret, $out, $err) = $node->psql('postgres', "BEGIN; CALL outbox.await_fanout($seq)");
like($err, qr/HINT: .*autocommit/, 'with a hint');
# a procedure, or DO, that is called by itself can wait, and goes on afterwards
sql("CREATE PROCEDURE public.calls() LANGUAGE plpgsql AS 'DECLARE o text; BEGIN CALL outbox.await_fanout($seq, ''60s'', o); INSERT INTO done VALUES (1); END'");
sql('CALL public.calls()');
sql("DO \$\$ DECLARE o text; BEGIN INSERT INTO done VALUES (2); CALL outbox.await_fanout($seq, '60s', o); IF o = 'fanned' THEN INSERT INTO done VALUES (3); END IF; END \$\$");
is(sql('SELECT string_agg(client::text, \',\' ORDER BY client) FROM done'), '1,2,3', 'in a procedure or DO that is called by itself');
sql('TRUNCATE done');

# Ways to end a wait early
$session->query_safe(q{SET statement_timeout = '300ms'});
my ($output, $failed) = $session->query(q{CALL outbox.await_fanout(888888, '60s')});
like($session->{stderr}, qr/statement timeout/, 'statement_timeout');
$session->{stderr} = '';
$session->query_safe(q{RESET statement_timeout});
$pid = start_waiting($session, q{CALL outbox.await_fanout(888888, '60s')});
sql("SELECT pg_cancel_backend($pid)");
end_waiting($session);
like($session->{stderr}, qr/canceling statement due to user request/, 'pg_cancel_backend');
$session->{stderr} = '';
is($session->query_safe('SELECT 1'), 1, 'the session goes on');
$seq = next_seq();
start_waiting($session, "CALL outbox.await_fanout($seq, '60s')");
sql(q{SELECT outbox.record('x')});
is(end_waiting($session), 'fanned', 'and can wait again');
$pid = start_waiting($session, q{CALL outbox.await_fanout(888888, '60s')});
sql("SELECT pg_terminate_backend($pid)");
wait_for($node, 'its end', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)");
eval { $session->quit };
$session = $node->background_psql('postgres');
# whoever has its place now waits for an event of its own
$seq = next_seq();
start_waiting($session, "CALL outbox.await_fanout($seq, '60s')");
sql(q{SELECT outbox.record('x')});
is(end_waiting($session), 'fanned', 'after pg_terminate_backend the place is free');

# A fast shutdown does not wait for those who wait.
start_waiting($session, q{CALL outbox.await_fanout(888888, '1h')});
$start = time;
$node->stop('fast');
cmp_ok(time - $start, '<', 30, 'a fast shutdown');
eval { $session->quit };
$node->start;
wait_relay($node);

# EXECUTE is all that it takes.
sql(q{CREATE ROLE waiter LOGIN; GRANT USAGE ON SCHEMA outbox TO waiter; CREATE ROLE nobody LOGIN; GRANT USAGE ON SCHEMA outbox TO nobody;
	GRANT EXECUTE ON PROCEDURE outbox.await_fanout TO waiter; ALTER DATABASE postgres OWNER TO waiter});
$seq = sql(q{SELECT outbox.record('x')});
is($node->safe_psql('postgres', "CALL outbox.await_fanout($seq, '60s')", extra_params => [ '-U', 'waiter' ]), 'fanned', 'a role with EXECUTE and nothing else');
like(($node->psql('postgres', "SELECT * FROM outbox.events", extra_params => [ '-U', 'waiter' ]))[2], qr/permission denied for table events/, 'which cannot read events');
like(($node->psql('postgres', "CALL outbox.await_fanout($seq)", extra_params => [ '-U', 'nobody' ]))[2], qr/permission denied for procedure await_fanout/, 'a role without');
is($node->safe_psql('postgres', "CREATE SCHEMA evil; CREATE VIEW evil.events AS SELECT 1 / 0 AS seq; SET search_path = evil; CALL outbox.await_fanout($seq, '60s'); SHOW search_path", extra_params => [ '-U', 'waiter' ]), "fanned\nevil",
	'whatever its search_path is');

# Many who wait for events of their own, by every protocol.  A wake-up that is
# lost costs a second; all of them would cost minutes.
foreach my $protocol (qw(simple extended prepared))
{
	my $file = "$PostgreSQL::Test::Utils::tmp_check/111_$protocol.sql";

	append_to_file($file, q{SELECT outbox.record('x') AS seq \gset
CALL outbox.await_fanout(:seq, '60s');
INSERT INTO done SELECT :client_id FROM outbox.events WHERE seq = :seq AND fanned_out_at IS NOT NULL;
});
	$start = time;
	my $ok = IPC::Run::run([ 'pgbench', '-n', '-M', $protocol, '-c', 20, '-t', 25, '-h', $node->host, '-p', $node->port, '-f', $file, 'postgres' ],
		'>', \$out, '2>', \$err);
	ok($ok, "20 clients, $protocol protocol") or diag($err);
	cmp_ok(time - $start, '<', 20, 'are woken');
	is(sql('SELECT count(*) FROM done'), 500, 'each when its own event was fanned out');
	sql('TRUNCATE done');
}

# Many who wait for one event
my $file = "$PostgreSQL::Test::Utils::tmp_check/111_one.sql";
$seq = next_seq();
append_to_file($file, "CALL outbox.await_fanout($seq, '120s');\nINSERT INTO done SELECT :client_id FROM outbox.events WHERE seq = $seq AND fanned_out_at IS NOT NULL;\n");
my $waiters = IPC::Run::start([ 'pgbench', '-n', '-c', 20, '-t', 1, '-h', $node->host, '-p', $node->port, '-f', $file, 'postgres' ], '>', \$out, '2>', \$err);
wait_for($node, '20 who wait', q{SELECT count(*) = 20 FROM pg_stat_activity WHERE wait_event_type = 'Extension' AND query LIKE 'CALL outbox.await_fanout%'});
sql(q{SELECT outbox.record('x')});
$waiters->finish;
is(sql('SELECT count(*) FROM done'), 20, 'all who wait for one event are woken');
is_conserved($node, 'awaited events');

$node->stop;
done_testing();
