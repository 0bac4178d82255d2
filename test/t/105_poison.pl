# Promise P4: an event that fails fails alone, waits alone, is poisoned at its
# fifth failure, raises an alert, and goes back in line.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

# Commit times tell which rows were written by one transaction.
my $node = new_server('poison', 'track_commit_timestamp' => 'on');
my $listener = listener($node, 'standmeet_events_poisoned', 'standmeet_events_fanned');
my $log = $node->logfile;

$node->safe_psql('postgres', q{SELECT outbox.subscribe('plain'); SELECT outbox.subscribe('alerts', '{outbox.*}')});
install_faults($node);

sub sql
{
	return $node->safe_psql('postgres', @_);
}

# What was heard of a channel
sub heard
{
	my ($channel) = @_;

	return map { $_->[1] } grep { $_->[0] eq $channel } $listener->heard;
}

sub poisoned_seqs
{
	return map { /"seq": (\d+)/ } heard('standmeet_events_poisoned');
}

#
# The timeline of one event
#

my $offset = -s $log;
my $bad = sql(q{INSERT INTO public.faults SELECT outbox.record('x.bad', 'it''s', '{"secret": 1}', 'acme'), '23514', 'one bad row' RETURNING seq});

is(sql("CALL outbox.await_fanout($bad, '60s')"), 'poisoned', 'those who wait are told');
is(sql("SELECT tries, failures, fanned_out_at IS NULL, fanout IS NULL, retry_at IS NULL, poisoned_at IS NOT NULL, last_error FROM outbox.events WHERE seq = $bad"),
	'5|5|t|t|t|t|23514: one bad row', 'poisoned at its fifth failure');
is(sql("SELECT seq, failures, last_error FROM outbox.poisoned"), "$bad|5|23514: one bad row", 'outbox.poisoned shows it');
is(sql("SELECT event_state, event_error FROM outbox.event_status WHERE seq = $bad"), 'poisoned|23514: one bad row', 'so does outbox.event_status');
$node->wait_for_log(qr/WARNING:  outbox event $bad is poisoned after 5 failures/, $offset);
like(substr(slurp_file($log), $offset), qr/HINT: .*outbox\.requeue\($bad\)/, 'a WARNING says how to mend it');
unlike(slurp_file($log), qr/secret/, 'the payload is not in the log');
ok($listener->wait_heard(sub { grep { $_->[0] eq 'standmeet_events_poisoned' } @_ }), 'a notification comes');
is_deeply([ heard('standmeet_events_poisoned') ], ["{\"seq\": $bad, \"failures\": 5, \"sqlstate\": \"23514\"}"],
	'once, with the seq, the failures and the SQLSTATE, and nothing else');
wait_drained($node, 'the alert');
is(sql(q{SELECT count(*), min(type), min(subject), min(scope) FROM outbox.events WHERE type LIKE 'outbox.%'}),
	q{1|outbox.event.poisoned|it's|acme}, 'an event of subject and scope of the poisoned one');
is(sql(q{SELECT payload FROM outbox.events WHERE type = 'outbox.event.poisoned'}),
	qq({"seq": $bad, "type": "x.bad", "subject": "it's", "failures": 5, "last_error": "23514: one bad row"}), 'whose payload says what happened');
is(sql(q{SELECT string_agg(key, ',') FROM outbox.events, jsonb_object_keys(fanout) key WHERE type = 'outbox.event.poisoned'}),
	'alerts', 'it goes to those who ask for types of outbox alone');

# Back in line
is(sql("SELECT outbox.requeue(0)"), 'f', 'there is nothing to requeue of what does not exist');
sql("BEGIN; SELECT outbox.requeue($bad); ROLLBACK");
is(sql("SELECT poisoned_at IS NOT NULL FROM outbox.events WHERE seq = $bad"), 't', 'a requeue that is rolled back changes nothing');
is(sql("SELECT outbox.requeue($bad)"), 't', 'requeue');
is(sql("CALL outbox.await_fanout($bad, '60s')"), 'poisoned', 'it is poisoned again while the cause is there');
is(sql("SELECT tries, failures FROM outbox.events WHERE seq = $bad"), '5|5', 'after five failures, which are counted anew');
wait_drained($node, 'the second alert');
is(sql(q{SELECT count(*) FROM outbox.events WHERE type = 'outbox.event.poisoned'}), 2, 'with another alert');
sql("DELETE FROM public.faults; SELECT outbox.subscribe('newcomer')");
is(sql("SELECT outbox.requeue_many(ARRAY[$bad, $bad, 0])"), 1, 'requeue_many');
is(sql("CALL outbox.await_fanout($bad, '60s')"), 'fanned', 'with the cause mended, it is fanned out');
is(sql("SELECT tries, failures, retry_at, poisoned_at FROM outbox.events WHERE seq = $bad"), '0|0||', 'as if nothing had been');
is(sql("SELECT string_agg(key, ',' ORDER BY key) FROM outbox.events, jsonb_object_keys(fanout) key WHERE seq = $bad"),
	'newcomer,plain', 'and is matched anew');
is(sql("SELECT outbox.requeue($bad)"), 'f', 'it is not poisoned any more');
is_conserved($node, 'the timeline', changing => 1);
sql("SELECT outbox.unsubscribe('newcomer')");

# An alert that cannot be delivered raises no further one.
sql(q{
	CREATE FUNCTION public.no_alert() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		IF EXISTS (SELECT FROM outbox.events WHERE seq = NEW.event_seq AND type LIKE 'outbox.%') THEN
			RAISE EXCEPTION 'no alert' USING ERRCODE = 'P0001';
		END IF;
		RETURN NEW;
	END $$;
	CREATE TRIGGER no_alert BEFORE INSERT ON outbox.jobs FOR EACH ROW EXECUTE FUNCTION public.no_alert()});
$bad = sql(q{INSERT INTO public.faults SELECT outbox.record('x.bad'), '22012' RETURNING seq});
wait_drained($node, 'an alert that fails');
is(sql(q{SELECT type, count(*) FROM outbox.poisoned GROUP BY 1 ORDER BY 1}), "outbox.event.poisoned|1\nx.bad|1", 'the alert is poisoned itself');
is(scalar(grep { $_ != $bad } poisoned_seqs()), 2, 'and announced to nobody');
sql('DROP TRIGGER no_alert ON outbox.jobs; DELETE FROM public.faults; SELECT outbox.requeue_many(ARRAY(SELECT seq FROM outbox.poisoned))');
wait_drained($node, 'the alert');

# discard
$bad = sql(q{INSERT INTO public.faults SELECT outbox.record('x.bad'), '38000' RETURNING seq});
is(sql("CALL outbox.await_fanout($bad, '60s')"), 'poisoned', 'an external routine failed');
is(sql("SELECT outbox.discard($bad)"), 't', 'discard');
is(sql("SELECT fanned_out_at IS NOT NULL, fanout, poisoned_at, last_error FROM outbox.events WHERE seq = $bad"),
	"t|{}||38000: no job for event $bad", 'it is marked without jobs, and says why');
is(sql("SELECT outbox.discard($bad), outbox.requeue($bad)"), 'f|f', 'for good');
is(sql("CALL outbox.await_fanout($bad, '60s')"), 'fanned', 'those who wait are told');
sql('DELETE FROM public.faults');

#
# One bad event beside 199 good ones: they are fanned out in that same pass.
#

settled($node);
my ($passes, $xid) = split /\|/, sql('SELECT passes, txid_snapshot_xmax(txid_current_snapshot()) FROM outbox.stat_relay');
sql(q{
	BEGIN;
	SELECT count(outbox.record('x.pass', 'n/' || i)) FROM generate_series(1, 200) i;
	INSERT INTO public.faults SELECT seq, '23514' FROM outbox.events WHERE subject = 'n/77';
	COMMIT});
wait_for($node, 'the first try', q{SELECT tries > 0 FROM outbox.events WHERE subject = 'n/77'});
is(sql(q{SELECT count(*), count(fanned_out_at), max(tries) FILTER (WHERE fanned_out_at IS NOT NULL) FROM outbox.events WHERE type = 'x.pass'}),
	'200|199|0', '199 events are fanned out when one has failed');
is(sql(q{SELECT count(DISTINCT pg_xact_commit_timestamp(xmin)) FROM outbox.events WHERE type = 'x.pass' AND fanned_out_at IS NOT NULL}),
	1, 'by one transaction');
cmp_ok(sql(q{SELECT count(DISTINCT xmin::text) FROM outbox.events WHERE type = 'x.pass' AND fanned_out_at IS NOT NULL}), '<=', 16,
	'of at most 16 subtransactions');
wait_drained($node, 'the bad one');
is(sql(q{SELECT type, subject FROM outbox.poisoned}), 'x.pass|n/77', 'it alone is poisoned');
sql(q{DELETE FROM public.faults; SELECT outbox.requeue_many(ARRAY(SELECT seq FROM outbox.poisoned))});
wait_drained($node, 'mended');

# Two bad ones, neighbours and apart
foreach my $pair ('1,2', '17,130', '199,200')
{
	sql(qq{
		BEGIN;
		SELECT count(outbox.record('x.two', '$pair/' || i)) FROM generate_series(1, 200) i;
		INSERT INTO public.faults SELECT seq, '22003' FROM outbox.events WHERE subject = ANY (SELECT '$pair/' || i FROM unnest('{$pair}'::text[]) i);
		COMMIT});
	wait_drained($node, "two bad events of 200: $pair");
	is(sql(qq{SELECT count(*), count(DISTINCT pg_xact_commit_timestamp(xmin)) FROM outbox.events WHERE type = 'x.two' AND subject LIKE '$pair/%' AND fanned_out_at IS NOT NULL}),
		'198|1', '198 are fanned out in one pass');
	is(sql(q{SELECT count(*), min(failures), max(failures) FROM outbox.poisoned}), '2|5|5', 'two are poisoned');
	sql(q{DELETE FROM public.faults; SELECT outbox.requeue_many(ARRAY(SELECT seq FROM outbox.poisoned))});
	wait_drained($node, 'mended');
}
is_conserved($node, 'bad events among good ones', changing => 1);

# Two bad ones and nothing else: as long as nothing goes, it may be the
# server's fault.  As soon as something goes, it is theirs.
sql(q{BEGIN; INSERT INTO public.faults SELECT outbox.record('x.alone'), '23505' FROM generate_series(1, 2); COMMIT});
wait_for($node, 'some tries', q{SELECT min(tries) >= 3 FROM outbox.events WHERE type = 'x.alone'});
is(sql(q{SELECT max(failures) FROM outbox.events WHERE type = 'x.alone'}), 0, 'when every event of a redo fails, none is charged');
foreach (1 .. 100)
{
	last if sql(q{SELECT count(*) FROM outbox.poisoned}) == 2;
	my $seq = sql(q{SELECT outbox.record('x.proof')});

	sql("CALL outbox.await_fanout($seq, '60s')");
}
is(sql(q{SELECT count(*), min(failures), max(failures) FROM outbox.poisoned}), '2|5|5', 'they are poisoned once others go');
sql(q{DELETE FROM public.faults; SELECT outbox.requeue_many(ARRAY(SELECT seq FROM outbox.poisoned))});
wait_drained($node, 'mended');

# A whole batch of bad ones at the head of the line does not hold up the rest.
$offset = -s $log;
my $heard = poisoned_seqs();
sql(q{
	BEGIN;
	INSERT INTO public.faults SELECT outbox.record('x.head'), '23502' FROM generate_series(1, 200);
	SELECT count(outbox.record('x.behind')) FROM generate_series(1, 300);
	COMMIT});
wait_for($node, 'events behind them', q{SELECT count(fanned_out_at) = 300 FROM outbox.events WHERE type = 'x.behind'});
foreach (1 .. 200)
{
	last if sql(q{SELECT count(*) FROM outbox.poisoned}) == 200;
	my $seq = sql(q{SELECT outbox.record('x.proof')});

	is(sql("CALL outbox.await_fanout($seq, '60s')"), 'fanned', 'an event behind 200 bad ones is fanned out') if $_ == 1;
}
is(sql(q{SELECT count(*), min(failures), max(failures) FROM outbox.poisoned}), '200|5|5', 'the bad ones are poisoned in the end');
wait_drained($node, 'their alerts');
is(sql(q{SELECT count(DISTINCT payload->>'seq') FROM outbox.events WHERE type = 'outbox.event.poisoned' AND payload->>'type' = 'x.head'}), 200, 'each has its alert');
ok($listener->wait_heard(sub { poisoned_seqs() == $heard + 200 }), 'and its notification');
my $text = substr(slurp_file($log), $offset);
my ($warnings, $most) = (0, 0);
foreach my $pass (split /LOG:  outbox relay failed to fan out/, $text)
{
	my $n = () = $pass =~ /WARNING:  outbox event \d+ is poisoned/g;

	$most = $n if $n > $most;
	$warnings += $n;
	$warnings += $_ foreach $pass =~ /WARNING:  (\d+) more outbox events? (?:is|are) poisoned/g;
}
is($warnings, 200, 'each is in the log, by itself or in a sum');
cmp_ok($most, '<=', 10, 'at most ten of a pass by themselves');
sql(q{DELETE FROM public.faults; SELECT outbox.requeue_many(ARRAY(SELECT seq FROM outbox.poisoned))});
wait_drained($node, 'mended');

# Nor do events that are retried again and again, however many they are and
# however short they wait: some charged with nothing, some far from being
# poisoned.
foreach my $case ([ 20, '40001' ], [ 1, '40001' ], [ 1, '23514' ])
{
	my ($wait, $code) = @$case;

	set_conf($node, 'outbox.relay_retry_min' => "'${wait}ms'", 'outbox.relay_retry_max' => "'${wait}ms'", 'outbox.poison_after' => 32767);
	sql(qq{INSERT INTO public.faults SELECT outbox.record('x.again'), '$code' FROM generate_series(1, 100)});
	wait_for($node, 'tries', q{SELECT max(tries) > 3 FROM outbox.events WHERE type = 'x.again' AND fanned_out_at IS NULL});
	foreach (1 .. 3)
	{
		my $seq = sql(q{SELECT outbox.record('x.behind')});

		is(sql("CALL outbox.await_fanout($seq, '20s')"), 'fanned', "an event beside others that are retried again and again after $wait ms for $code");
	}
	is(sql(q{SELECT max(failures), count(poisoned_at) FROM outbox.events WHERE type = 'x.again'}), '0|0', 'which are charged with nothing') if $code eq '40001';
	sql(q{DELETE FROM public.faults});
	wait_drained($node, 'mended');
}
set_conf($node, 'outbox.relay_retry_min' => "'20ms'", 'outbox.relay_retry_max' => "'100ms'", 'outbox.poison_after' => 5);

# The worst case for a redo by halves: every second event is bad.  No
# transaction has more subtransactions than the cache of their ids holds.
install_gate($node);
sql(q{
	BEGIN;
	INSERT INTO public.gates VALUES ('failure');
	SELECT count(outbox.record('x.every.second', i::text)) FROM generate_series(1, 200) i;
	INSERT INTO public.faults SELECT seq, '23514' FROM outbox.events WHERE type = 'x.every.second' AND subject::int % 2 = 0;
	COMMIT});
SKIP:
{
	my $pid = wait_at_gate($node);

	skip 'subtransactions are not shown', 1 if $node->pg_version->major < 16;
	my ($count, $overflowed) = split /\|/, sql(qq{
		SELECT s.subxact_count, s.subxact_overflowed
		FROM pg_stat_get_backend_idset() b, pg_stat_get_backend_subxact(b) s WHERE pg_stat_get_backend_pid(b) = $pid});
	ok($count <= 64 && $overflowed eq 'f', "subtransactions in a redo: $count");
}
open_gate($node);
wait_for($node, 'the good ones', q{SELECT count(fanned_out_at) = 100 FROM outbox.events WHERE type = 'x.every.second'});
cmp_ok(sql(q{SELECT max(n) FROM (SELECT count(DISTINCT xmin::text) AS n FROM outbox.events WHERE type = 'x.every.second' AND fanned_out_at IS NOT NULL
	GROUP BY pg_xact_commit_timestamp(xmin)) t}), '<=', 33, 'of those that wrote, at most 32 are in one transaction');
wait_drained($node, 'every second event');
is(sql(q{SELECT count(*) FROM outbox.poisoned}), 100, 'the bad ones are poisoned');
sql(q{DELETE FROM public.faults; SELECT outbox.requeue_many(ARRAY(SELECT seq FROM outbox.poisoned))});
wait_drained($node, 'mended');
is_conserved($node, 'many bad events', changing => 1);

$listener->quit;

#
# An event of which not even the failure can be written down
#

sql(q{
	CREATE TABLE public.stuck (seq bigint);
	CREATE FUNCTION public.stuck() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		IF NEW.seq IN (SELECT seq FROM public.stuck) THEN
			RAISE EXCEPTION 'row % cannot be updated', NEW.seq;
		END IF;
		RETURN NEW;
	END $$;
	CREATE TRIGGER stuck BEFORE UPDATE ON outbox.events FOR EACH ROW EXECUTE FUNCTION public.stuck();
	BEGIN;
	SELECT count(outbox.record('x.beside')) FROM generate_series(1, 100);
	INSERT INTO public.stuck SELECT outbox.record('x.stuck');
	SELECT count(outbox.record('x.beside')) FROM generate_series(1, 99);
	COMMIT});
wait_for($node, 'the events beside it', q{SELECT count(fanned_out_at) = 199 FROM outbox.events WHERE type = 'x.beside'});
is(sql(q{SELECT count(DISTINCT pg_xact_commit_timestamp(xmin)) FROM outbox.events WHERE type = 'x.beside'}), 1, 'an event that cannot be written blocks nobody');
foreach my $n (1 .. 5)
{
	my $seq = sql(q{SELECT outbox.record('x.after')});

	is(sql("CALL outbox.await_fanout($seq, '60s')"), 'fanned', "nor anything later ($n)");
}
is(sql(q{SELECT tries, failures, poisoned_at FROM outbox.events WHERE type = 'x.stuck'}), '0|0|', 'nothing is written of it');
sql('DELETE FROM public.stuck');
wait_drained($node, 'when it can be written');
is_conserved($node, 'a row that could not be written', changing => 1);
sql('DROP TRIGGER stuck ON outbox.events');

#
# Counters and waits
#

# the wait doubles from relay_retry_min to relay_retry_max, and no counter runs over
set_conf($node, 'outbox.relay_retry_min' => "'2s'", 'outbox.relay_retry_max' => "'1min'", 'outbox.poison_after' => 32767);
sql(q{SELECT outbox.stop()});
sql(q{
	BEGIN;
	INSERT INTO public.faults SELECT outbox.record('x.wait', t::text), '23514' FROM unnest('{0,1,2,3,4,5,6,100,32766,32767}'::int[]) t;
	UPDATE outbox.events SET tries = subject::int, failures = subject::int WHERE type = 'x.wait';
	SELECT count(outbox.record('x.good')) FROM generate_series(1, 10);
	COMMIT});
sql(q{SELECT outbox.start()});
wait_for($node, 'a try of each', q{SELECT count(last_error) = 10 FROM outbox.events WHERE type = 'x.wait'});
my $waits = sql(q{
	SELECT subject, tries, failures, poisoned_at IS NOT NULL, CASE WHEN w IS NULL THEN 0 WHEN n - w BETWEEN 0 AND n * 0.45 THEN n ELSE -w END
	FROM (SELECT *, extract(epoch FROM retry_at - pg_xact_commit_timestamp(xmin)) AS w, least(2 * 2 ^ subject::int, 60) AS n
		FROM outbox.events WHERE type = 'x.wait' AND subject::int <= 6
		UNION ALL SELECT *, extract(epoch FROM retry_at - pg_xact_commit_timestamp(xmin)), 60
		FROM outbox.events WHERE type = 'x.wait' AND subject::int > 6) e ORDER BY subject::int});
is($waits, join("\n", '0|1|1|f|2', '1|2|2|f|4', '2|3|3|f|8', '3|4|4|f|16', '4|5|5|f|32', '5|6|6|f|60', '6|7|7|f|60', '100|101|101|f|60',
		'32766|32767|32767|t|0', '32767|32767|32767|t|0'), 'the wait doubles from 2 s to 1 min, and counters saturate');

# One that waits long without being charged is reported, once.
set_conf($node, 'outbox.poison_after' => 5);
sql('DELETE FROM public.faults; SELECT outbox.requeue_many(ARRAY(SELECT seq FROM outbox.poisoned)); UPDATE outbox.events SET retry_at = now() WHERE fanned_out_at IS NULL; SELECT outbox.wake()');
wait_drained($node, 'mended');
$offset = -s $log;
foreach my $tries (12, 13, 14)
{
	sql(qq{SELECT outbox.stop()});
	sql(qq{INSERT INTO public.faults SELECT outbox.record('x.uncharged', '$tries'), '40001'; UPDATE outbox.events SET tries = $tries WHERE subject = '$tries'});
	sql(qq{SELECT outbox.start()});
	wait_for($node, 'a try', qq{SELECT tries = $tries + 1 FROM outbox.events WHERE subject = '$tries' AND type = 'x.uncharged'});
}
my $reported = sql(q{SELECT seq FROM outbox.events WHERE type = 'x.uncharged' AND subject = '13'});
$node->wait_for_log(qr/WARNING:  outbox event $reported has not been fanned out for a long time/, $offset);
is(scalar(() = substr(slurp_file($log), $offset) =~ /has not been fanned out for a long time/g), 1, 'ten minutes of waiting are reported, once');
is(sql(q{SELECT max(failures), count(poisoned_at) FROM outbox.events WHERE type = 'x.uncharged'}), '0|0', 'and charged to nobody');
sql(q{DELETE FROM public.faults; UPDATE outbox.events SET retry_at = now() WHERE fanned_out_at IS NULL; SELECT outbox.wake()});
wait_drained($node, 'in the end');

# What waits for a retry is known again after a restart: no bell rings for it,
# and the sweep leaves it to its own time.
foreach my $how (qw(relay server))
{
	my $waiting = sql(q{INSERT INTO public.faults SELECT outbox.record('x.waiting'), '40001' RETURNING seq});

	wait_for($node, 'a try', "SELECT tries > 0 FROM outbox.events WHERE seq = $waiting");
	sql('DELETE FROM public.faults');
	if ($how eq 'server')
	{
		$node->restart;
	}
	else
	{
		sql(q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'outbox relay'});
	}
	is(sql("CALL outbox.await_fanout($waiting, '30s')"), 'fanned', "an event that waits for its retry over a restart of the $how");
}

#
# Texts of errors
#

set_conf($node, 'outbox.relay_retry_min' => "'5ms'", 'outbox.relay_retry_max' => "'20ms'", 'outbox.poison_after' => 1);
my @texts = (
	q{'100 %s %n %d %m \ '' " $$ {}'},
	q{repeat('x', 10000)},
	q{repeat('ä', 3000)},
	q{repeat('漢', 3000)},
	q{repeat('x', 1990) || repeat('😀', 20)},
	q{repeat('x', 1991) || repeat('😀', 20)},
	q{repeat('x', 1992) || repeat('😀', 20)},
	q{repeat('x', 1993) || repeat('😀', 20)},
	q{E'lines\nand\ttabs\r\n\x01\x7f'},
	q{''},
	q{'\u0000 {"a": "\ud800"}'},
	q{repeat('%', 5000)});
foreach my $text (@texts)
{
	my $seq = sql("INSERT INTO public.faults SELECT outbox.record('x.%s', 'sub%n'), '22023', $text RETURNING seq");

	is(sql("CALL outbox.await_fanout($seq, '60s')"), 'poisoned', "an error with the text $text");
	is(sql(qq{
		SELECT octet_length(last_error) <= 2000, starts_with('22023: ' || $text, rtrim(last_error, '.…')) OR starts_with('22023: ' || $text, last_error),
			octet_length(last_error) >= least(1990, octet_length('22023: ' || $text)),
			length(convert_from(convert_to(last_error, 'UTF8'), 'UTF8')) = length(last_error)
		FROM outbox.events WHERE seq = $seq}), 't|t|t|t', 'is kept, cut between characters');
	wait_drained($node, 'the alert');
	is(sql(qq{SELECT payload->>'last_error' = (SELECT last_error FROM outbox.events WHERE seq = $seq) FROM outbox.events
		WHERE type = 'outbox.event.poisoned' AND (payload->>'seq')::bigint = $seq}), 't', 'and is in the alert');
	like(sql('SELECT last_error FROM outbox.stat_relay'), qr/^22023: /, 'and in outbox.stat_relay');
}
sql('DELETE FROM public.faults; SELECT outbox.requeue_many(ARRAY(SELECT seq FROM outbox.poisoned))');
wait_drained($node, 'mended');

# In a database without an encoding, texts are bytes.
sql(q{CREATE DATABASE bytes ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0});
$node->safe_psql('bytes', q{CREATE EXTENSION outbox; SELECT outbox.subscribe('plain'); SELECT outbox.subscribe('alerts', '{outbox.*}')});
install_faults($node, 'bytes');
$bad = $node->safe_psql('bytes', q{INSERT INTO public.faults SELECT outbox.record('x.bad', E'\351\377'), '23514', E'bytes \351\377\200' || repeat(E'\351', 3000) RETURNING seq});
is($node->safe_psql('bytes', "CALL outbox.await_fanout($bad, '60s')"), 'poisoned', 'in SQL_ASCII');
wait_drained($node, 'the alert', 'bytes');
is($node->safe_psql('bytes', qq{SELECT octet_length(last_error) > 1000 FROM outbox.events WHERE seq = $bad}), 't', 'bytes are kept');
is_conserved($node, 'SQL_ASCII', db => 'bytes');

$node->stop;
done_testing();
