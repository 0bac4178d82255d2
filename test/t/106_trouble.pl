# Promise P5: trouble of the server is no fault of the events.  However long
# it lasts, nothing is poisoned, and everything drains when it is over.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $node = new_server('trouble');

sub sql
{
	return $node->safe_psql('postgres', @_);
}

# Lines that the relay has logged since an offset
sub lines
{
	my ($offset) = @_;

	return scalar(() = substr(slurp_file($node->logfile), $offset) =~ /(?:LOG|WARNING|ERROR):  outbox/g);
}

sub attempts
{
	my ($offset) = @_;

	return scalar(() = substr(slurp_file($node->logfile), $offset) =~ /outbox relay failed to fan out/g);
}

sub wait_attempts
{
	my ($offset, $n) = @_;

	foreach (1 .. 50 * $PostgreSQL::Test::Utils::timeout_default)
	{
		return if attempts($offset) >= $n;
		usleep(20_000);
	}
	die "no $n attempts";
}

sub untouched
{
	my ($what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return is(sql('SELECT count(*) FILTER (WHERE failures > 0), count(poisoned_at) FROM outbox.events'),
		'0|0', "$what: charged to nobody");
}

sql(q{SELECT outbox.subscribe('plain'); SELECT outbox.subscribe('alerts', '{outbox.*}')});
install_faults($node);

# Every event fails, for a reason that none of them can have given.  The last
# ones could be, but not when every event of a redo fails for them.
foreach my $code (qw(40001 40P01 57014 57P01 53100 53200 53300 55P03 55006 58030 58P01 25006 54000 42501 42P01 0A000 XX000 XX002 23514 22003 P0001))
{
	sql("INSERT INTO public.faults VALUES (NULL, '$code')");
	my $offset = -s $node->logfile;

	sql(q{SELECT count(outbox.record('x')) FROM generate_series(1, 30)});
	wait_attempts($offset, 7);
	untouched($code);
	sql('DELETE FROM public.faults');
	wait_drained($node, "after $code");
}
is(sql(q{SELECT count(*) FROM outbox.events WHERE type LIKE 'outbox.%'}), 0, 'no alert was raised');
is_conserved($node, 'trouble of many kinds');

# Nor when they are more than one transaction can redo, and are retried a few
# or one at a time.  The events of a redo that is cut fall due at different
# times; one is left over with those of the others put off.
set_conf($node, 'outbox.relay_retry_max' => "'1h'");
sql(q{INSERT INTO public.faults VALUES (NULL, '23514')});
sql(q{SELECT count(outbox.record('x.many', i::text)) FROM generate_series(1, 40) i});
wait_for($node, 'retries', q{SELECT min(tries) >= 4 FROM outbox.events WHERE type = 'x.many'});
untouched('40 events in several transactions');
sql(q{UPDATE outbox.events SET retry_at = now() + interval '30 min' WHERE type = 'x.many' AND subject <> '1'});
my $tries = sql(q{SELECT tries FROM outbox.events WHERE type = 'x.many' AND subject = '1'});
wait_for($node, 'a retry of one', qq{SELECT tries >= $tries + 2 FROM outbox.events WHERE type = 'x.many' AND subject = '1'});
untouched('one of them, retried by itself');
sql(q{SELECT outbox.record('x.many', 'late')});
wait_for($node, 'a try', q{SELECT tries >= 2 FROM outbox.events WHERE type = 'x.many' AND subject = 'late'});
untouched('one that came later, by itself');

# The trouble ends for all but one of them.  Once something has gone, that is
# this event's fault.
set_conf($node, 'outbox.poison_after' => 1);
my $left = sql(q{
	BEGIN;
	DELETE FROM public.faults;
	INSERT INTO public.faults SELECT seq, '23514' FROM outbox.events WHERE type = 'x.many' AND subject = '1' RETURNING seq;
	COMMIT});
my $next = sql(q{SELECT outbox.record('x')});
is(sql("CALL outbox.await_fanout($next, '60s')"), 'fanned', 'another event goes');
is(sql("CALL outbox.await_fanout($left, '60s')"), 'poisoned', 'what fails still is charged with it');
is(sql('SELECT count(*) FROM outbox.events WHERE failures > 0'), 1, 'and no other');
sql(qq{DELETE FROM public.faults; SELECT outbox.requeue($left); UPDATE outbox.events SET retry_at = now() WHERE retry_at IS NOT NULL; SELECT outbox.wake()});
wait_drained($node, 'all of them');
set_conf($node, 'outbox.relay_retry_max' => "'100ms'", 'outbox.poison_after' => 5);

# A batch that fails one by one leaves a line or two in the log, not one for
# each event.
set_conf($node, 'outbox.relay_retry_min' => "'5min'", 'outbox.relay_retry_max' => "'5min'");
foreach my $code (qw(53100 58030 XX000 42P01))
{
	sql("INSERT INTO public.faults VALUES (NULL, '$code')");
	my $offset = -s $node->logfile;

	sql(q{SELECT count(outbox.record('x')) FROM generate_series(1, 200)});
	wait_for($node, 'back-off', q{SELECT state = 'backoff' FROM outbox.stat_relay});
	cmp_ok(lines($offset), '<=', 2, "$code: lines in the log");
	sql('DELETE FROM public.faults; UPDATE outbox.events SET retry_at = now() WHERE retry_at IS NOT NULL; SELECT outbox.wake()');
	wait_drained($node, "after $code");
}

# The wait between attempts doubles from relay_retry_min to relay_retry_max.
# Meanwhile the relay holds nothing.
set_conf($node, 'outbox.relay_retry_min' => "'2s'", 'outbox.relay_retry_max' => "'1min'");
sql(q{INSERT INTO public.faults VALUES (NULL, '58030', 'no disk')});
my $offset = -s $node->logfile;
my $before = sql('SELECT failures FROM outbox.stat_relay');
my @waits;

sql(q{SELECT outbox.record('x')});
foreach my $n (1 .. 7)
{
	wait_for($node, "attempt $n", qq{SELECT state = 'backoff' FROM outbox.stat_relay}) if $n == 1;
	wait_attempts($offset, $n);
	wait_for($node, 'back-off', q{SELECT state = 'backoff' AND backoff_until > last_error_at FROM outbox.stat_relay});
	push @waits, sql(q{SELECT round(extract(epoch FROM backoff_until - last_error_at)) FROM outbox.stat_relay});
	is(sql(q{SELECT backend_xmin IS NULL AND backend_xid IS NULL AND xact_start IS NULL AND state = 'idle'
		AND NOT EXISTS (SELECT FROM pg_locks l WHERE l.pid = a.pid)
		FROM pg_stat_activity a WHERE backend_type = 'outbox relay'}), 't', "it holds nothing while it waits ($n)");
	is(sql('SELECT last_error FROM outbox.stat_relay'), '58030: no disk', 'it says why') if $n == 1;
	sql('SELECT outbox.wake()');
}
is("@waits", '2 4 8 16 32 60 60', 'the wait doubles from 2 s to 1 min');
cmp_ok(lines($offset), '<=', 9, 'with one line in the log each time');
untouched('trouble');
sql('DELETE FROM public.faults; SELECT outbox.wake()');
wait_drained($node, 'outbox.wake() does not wait for the end of the minute');
set_conf($node, 'outbox.relay_retry_min' => "'20ms'", 'outbox.relay_retry_max' => "'100ms'");

# Tables that are not there, or locked
foreach my $table (qw(jobs events routing subscriptions armed))
{
	my $first = sql(q{SELECT outbox.record('x')});

	sql("CALL outbox.await_fanout($first, '60s')");
	settled($node);
	my $writer = $node->background_psql('postgres');

	$writer->query_safe('BEGIN');
	$writer->query_safe(q{SELECT count(outbox.record('x')) FROM generate_series(1, 10)});
	sql("ALTER TABLE outbox.$table RENAME TO missing") unless $table eq 'events';
	# subscriptions are cached until they change
	sql('UPDATE outbox.routing SET version = version + 1') if $table eq 'subscriptions';
	$offset = -s $node->logfile;
	$writer->query_safe('COMMIT');
	$writer->quit;
	if ($table eq 'events')
	{
		# the bell brings the relay to a table that is gone
		sql("ALTER TABLE outbox.$table RENAME TO missing");
		sql('SELECT outbox.wake()');
	}
	wait_attempts($offset, 3);
	sql("ALTER TABLE outbox.missing RENAME TO $table");
	wait_drained($node, "outbox.$table was not there for a while");
	untouched("outbox.$table");
}
my $locker = $node->background_psql('postgres');
$locker->query_safe('BEGIN; LOCK TABLE outbox.jobs');
$offset = -s $node->logfile;
sql(q{SELECT count(outbox.record('x')) FROM generate_series(1, 10)});
wait_attempts($offset, 1);
is(sql(q{SELECT max(tries) FROM outbox.events WHERE fanned_out_at IS NULL}), 0, 'a lock that lasts is nobody\'s try');
untouched('a lock on outbox.jobs');
like(sql('SELECT last_error FROM outbox.stat_relay'), qr/^55P03: /, 'it is shown');
$locker->query_safe('COMMIT');
$locker->quit;
wait_drained($node, 'after the lock is gone');

# More of one event's kind of error beside trouble: each gets what is its own.
my $bad = sql(q{
	BEGIN;
	SELECT count(outbox.record('x.good')) FROM generate_series(1, 20);
	INSERT INTO public.faults SELECT outbox.record('x.trouble'), '40001' FROM generate_series(1, 3);
	INSERT INTO public.faults SELECT outbox.record('x.bad'), '23514' RETURNING seq;
	COMMIT}) =~ s/.*\n//sr;
is(sql("CALL outbox.await_fanout($bad, '60s')"), 'poisoned', 'a bad event beside trouble');
wait_for($node, 'more tries', q{SELECT min(tries) >= 6 FROM outbox.events WHERE type = 'x.trouble'});
is(sql(q{SELECT max(failures), count(poisoned_at), count(fanned_out_at) FROM outbox.events WHERE type = 'x.trouble'}), '0|0|0', 'what is trouble is tried again and again');
is(sql(q{SELECT count(fanned_out_at) FROM outbox.events WHERE type = 'x.good'}), 20, 'what is good has gone');
sql(qq{DELETE FROM public.faults; SELECT outbox.requeue($bad)});
wait_drained($node, 'all three kinds');
is_conserved($node, 'trouble');

$node->stop;
done_testing();
