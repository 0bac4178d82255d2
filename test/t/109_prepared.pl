# Two-phase commit: nothing is an event before COMMIT PREPARED, which rings,
# and nothing is lost over restarts and crashes in between.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

# more than the extension keeps hints for
my $node = new_server('prepared', 'max_prepared_transactions' => 120, 'max_connections' => 40);

sub sql
{
	return $node->safe_psql('postgres', @_);
}

sub relay_activity
{
	return $node->safe_psql('template1', q{SELECT pid, state_change FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = 'postgres'});
}

# no sweep is asked for that is yet to come
sub rested
{
	wait_for($node, 'rest', q{
		SELECT state = 'idle' AND state_change < now() - interval '1.2 seconds' FROM pg_stat_activity
		WHERE backend_type = 'outbox relay' AND datname = 'postgres'}, 'template1');
	return;
}

sub fanned
{
	my ($seq, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return is(sql("CALL outbox.await_fanout($seq, '60s')"), 'fanned', $what);
}

# The last line of what was printed
sub last_line
{
	return $_[0] =~ s/.*\n//sr;
}

sub prepare
{
	my ($gid) = @_;

	return last_line(sql(qq{
		BEGIN;
		INSERT INTO watched VALUES ('$gid');
		SELECT outbox.record('x.prepared', '$gid');
		PREPARE TRANSACTION '$gid'}));
}

sql(q{SELECT outbox.subscribe('all'); CREATE TABLE watched (gid text PRIMARY KEY); SELECT outbox.capture('watched', 'watched.{op}')});
rested();

my $before = relay_activity();
my $seq = prepare('one');
is(sql('SELECT count(*) FROM outbox.events'), 0, 'what is prepared is no event');
is(relay_activity(), $before, 'and rings nothing');
# events of others, with higher numbers, go ahead
my $other = sql(q{SELECT outbox.record('x.other')});
fanned($other, 'another event');
sql(q{COMMIT PREPARED 'one'});
fanned($seq, 'COMMIT PREPARED rings');
fanned($seq - 1, 'for the captured event too');

settled($node);
$before = relay_activity();
$seq = prepare('two');
sql(q{ROLLBACK PREPARED 'two'});
is(relay_activity(), $before, 'ROLLBACK PREPARED rings nothing');
is(sql("SELECT count(*) FROM outbox.events WHERE seq >= $seq - 1"), 0, 'and there is nothing');

# Savepoints within
$seq = last_line(sql(q{
	BEGIN;
	SAVEPOINT s;
	SELECT outbox.record('x.rolled.back');
	ROLLBACK TO s;
	SAVEPOINT t;
	SELECT outbox.record('x.kept');
	RELEASE t;
	PREPARE TRANSACTION 'savepoints';
	COMMIT PREPARED 'savepoints';
	SELECT max(seq) FROM outbox.events}));
fanned($seq, 'savepoints in a prepared transaction');
is(sql(q{SELECT count(*) FROM outbox.events WHERE type = 'x.rolled.back'}), 0, 'what was rolled back is not there');

# A PREPARE that fails, and one that is no transaction
my ($ret, $out, $err) = $node->psql('postgres', q{BEGIN; CREATE TEMP TABLE temporary (i int); SELECT outbox.record('x'); PREPARE TRANSACTION 'fails'});
like($err, qr/cannot PREPARE/, 'a PREPARE that fails');
$node->psql('postgres', q{PREPARE TRANSACTION 'none'; SELECT outbox.record('x.after')});
wait_drained($node, 'what comes after it');
is(sql(q{SELECT count(fanned_out_at) FROM outbox.events WHERE type = 'x.after'}), 1, 'a hint left over by it does no harm');

# Names of any kind, and the same name again and in another database
foreach my $gid ("it''s", 'x' x 199, 'ü%s"$$', ' ')
{
	$seq = prepare($gid);
	rested() if $gid eq ' ';
	sql("COMMIT PREPARED '$gid'");
	fanned($seq, "a transaction called $gid");
	sql("DELETE FROM watched");
	$seq = prepare($gid);
	sql("COMMIT PREPARED '$gid'");
	fanned($seq, 'twice');
	sql("DELETE FROM watched");
}

# More of them than hints are kept for, and in another order than prepared
sql(join '', map { qq{
	BEGIN;
	INSERT INTO watched VALUES ('many-$_');
	SELECT outbox.record('x.prepared', 'many-$_');
	PREPARE TRANSACTION 'many-$_';} } 0 .. 99);
sql(join '', map { ($_ % 10 ? 'COMMIT' : 'ROLLBACK') . " PREPARED 'many-$_';" } map { $_ * 37 % 100 } 1 .. 100);
wait_drained($node, '90 of 100 prepared transactions');
is(sql(q{SELECT count(fanned_out_at) FROM outbox.events WHERE subject LIKE 'many-%' AND type = 'x.prepared'}), 90, 'have all their events');
is_conserved($node, 'many prepared transactions');

# Across a restart of the relay, a restart of the server, and a crash.  No
# sweep comes to help: the interval is an hour.
my %between = (
	'a restart of the relay' => sub {
		my $pid = relay_pid($node);

		sql("SELECT pg_terminate_backend($pid)");
		wait_for($node, 'another relay', "SELECT count(*) = 1 FROM outbox.stat_relay WHERE pid <> $pid AND database = 'postgres'");
	},
	'a restart' => sub { $node->restart },
	'a crash' => sub {
		$node->stop('immediate');
		$node->start;
	},
	'another transaction that is prepared after a restart' => sub {
		$node->restart;
		my $seq = prepare('newer');
		rested();
		sql(q{COMMIT PREPARED 'newer'});
		fanned($seq, 'the newer one');
	});
foreach my $what (sort keys %between)
{
	$seq = prepare($what);
	$between{$what}->();
	wait_relay($node);
	rested();
	is(sql("SELECT count(*) FROM outbox.events WHERE seq = $seq"), 0, "$what: still no event");
	sql("COMMIT PREPARED '$what'");
	fanned($seq, "$what: COMMIT PREPARED rings");
	sql('DELETE FROM watched');
}
$seq = prepare('lost');
$node->restart;
sql(q{ROLLBACK PREPARED 'lost'});
is(sql("SELECT count(*) FROM outbox.events WHERE seq >= $seq - 1 AND subject = 'lost'"), 0, 'nothing after ROLLBACK PREPARED');

# 2PC beside plain transactions, and the doorbell of a transaction that changes
# nothing but a flag
sql(q{SELECT outbox.stop()});
$seq = sql(q{SELECT outbox.record('x.stopped')});
sql(q{BEGIN; SELECT outbox.start(); PREPARE TRANSACTION 'start'});
settled($node);
is(sql("SELECT fanned_out_at IS NULL FROM outbox.events WHERE seq = $seq"), 't', 'stopped until the commit');
sql(q{COMMIT PREPARED 'start'});
fanned($seq, 'started by COMMIT PREPARED');
wait_drained($node, 'all');
is_conserved($node, 'prepared transactions');

$node->stop;
done_testing();
