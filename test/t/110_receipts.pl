# Receipts: what a client hears that listens.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my %conf;
# the smallest queue there may be; before 17 it has gigabytes
$conf{max_notify_queue_pages} = 64 if `pg_config --version` =~ / (\d+)/ && $1 >= 17;
my $node = new_server('receipts', %conf);
my $log = $node->logfile;

sub sql
{
	return $node->safe_psql('postgres', @_);
}

sql(q{SELECT outbox.subscribe('all')});
install_faults($node);

# One message a pass, with the seqs of its events, and nothing else.
my $client = listener($node, 'standmeet_events_fanned', 'standmeet_events_poisoned');
sql(q{SELECT count(outbox.record('secret.type', 'secret subject', '{"secret": "payload"}', 'secret scope')) FROM generate_series(1, 500)});
my @heard;
ok($client->wait_heard(sub { @heard = @_; @heard >= 3 }), 'a client hears of an import of 500 events');
is_deeply([ map { $_->[0] } @heard ], [ ('standmeet_events_fanned') x 3 ], 'three times');
is_deeply([ map { scalar split /,/, $_->[1] } @heard ], [ 200, 200, 100 ], 'once a pass');
is(join(';', map { $_->[1] } @heard), join(';', map { '[' . join(',', @$_) . ']' } [ 1 .. 200 ], [ 201 .. 400 ], [ 401 .. 500 ]),
	'JSON arrays of seqs, and nothing else');

# What it has heard of is there: in the very session that heard it.
foreach my $n (1 .. 20)
{
	my $seq = $node->safe_psql('postgres', q{SELECT outbox.record('x')});

	$client->wait_heard(sub { grep { $_->[1] eq "[$seq]" } @_ }) or die "event $seq is not announced";
	$client->{psql}->query_safe("SELECT fanned_out_at IS NOT NULL AND EXISTS (SELECT FROM outbox.jobs WHERE event_seq = seq) FROM outbox.events WHERE seq = $seq") eq 't'
	  or die "event $seq is announced too early";
}
pass('an announcement comes after the commit of the pass');

# The limit of a payload: 7999 bytes.  The numbers are as long as they get.
set_conf($node, 'outbox.batch_size' => 1000);
sql(q{SELECT setval('outbox.events_seq_seq', 9223372036854770000)});
my $before = $client->heard;
sql(q{SELECT count(outbox.record('x')) FROM generate_series(1, 1000)});
wait_drained($node, 'a thousand events with long numbers');
ok($client->wait_heard(sub { @heard = @_[ $before .. $#_ ]; (map { split /,/, $_->[1] } @heard) == 1000 }), 'all are announced');
is(join(',', sort { $a <=> $b } map { length $_->[1] } @heard) =~ s/,.*//r, 20 * (1000 - 2 * 399) + 1, 'the last message has what is left');
is(scalar(@heard), 3, 'in as few messages as the limit allows');
is(scalar(grep { length $_->[1] > 7999 } @heard), 0, 'each within the limit');
is_deeply([ sort map { /(\d+)/g } map { $_->[1] } @heard ], [ map { '9223372036854' . (770000 + $_) } 1 .. 1000 ], 'none is missing, none is twice');
sql(q{SELECT setval('outbox.events_seq_seq', 100000)});
set_conf($node, 'outbox.batch_size' => 200);

# Channels have other names, or none, after a reload.
settled($node);
$before = $client->heard;
my $other = listener($node, '"my channel"', '"my poison"');
set_conf($node, 'outbox.fanned_channel' => "'my channel'", 'outbox.poisoned_channel' => "'my poison'", 'outbox.poison_after' => 1);
my $seq = sql(q{SELECT outbox.record('x')});
ok($other->wait_heard(sub { @_ == 1 }), 'another channel');
is_deeply([ $other->heard ], [ [ 'my channel', "[$seq]" ] ], 'gets it');
my $bad = sql(q{INSERT INTO public.faults SELECT outbox.record('x'), '23514' RETURNING seq});
ok($other->wait_heard(sub { grep { $_->[0] eq 'my poison' } @_ }), 'another channel for poison');
wait_drained($node, 'the alert');
is_deeply([ grep { $_->[0] eq 'my poison' } $other->heard ], [ [ 'my poison', "{\"seq\": $bad, \"failures\": 1, \"sqlstate\": \"23514\"}" ] ], 'gets it');
is(scalar($client->heard), $before, 'the old ones get nothing');
set_conf($node, 'outbox.fanned_channel' => "''", 'outbox.poisoned_channel' => "''");
$before = $other->heard;
$seq = sql(q{SELECT outbox.record('x')});
$bad = sql(q{INSERT INTO public.faults SELECT outbox.record('x'), '23514' RETURNING seq});
is(sql("CALL outbox.await_fanout($seq, '60s')"), 'fanned', 'without a channel all goes on');
is(sql("CALL outbox.await_fanout($bad, '60s')"), 'poisoned', 'poison too');
wait_drained($node, 'the alert');
settled($node);
is(scalar($other->heard), $before, 'and nothing is heard');
is(scalar($client->heard), scalar(@{ $client->{heard} }), 'by nobody');
sql('DELETE FROM public.faults; SELECT outbox.requeue_many(ARRAY(SELECT seq FROM outbox.poisoned))');
set_conf($node, 'outbox.fanned_channel' => "'standmeet_events_fanned'", 'outbox.poisoned_channel' => "'standmeet_events_poisoned'", 'outbox.poison_after' => 5);
$other->quit;
settled($node);

# A channel's name with everything in it that NOTIFY accepts
{
	my $name = 'x' x 63;

	set_conf($node, 'outbox.fanned_channel' => "'$name'");
	my $long = listener($node, $name);

	$seq = sql(q{SELECT outbox.record('x')});
	ok($long->wait_heard(sub { @_ == 1 }), 'a channel with the longest name');
	$long->quit;
	set_conf($node, 'outbox.fanned_channel' => "'standmeet_events_fanned'");
}

# Forgeries impress nobody: whoever waits is told by the table.
my $next = sql('SELECT last_value + 1 FROM outbox.events_seq_seq');
sql(qq{SELECT pg_notify('standmeet_events_fanned', v), pg_notify('standmeet_events', v), pg_notify('standmeet_events_poisoned', v)
	FROM unnest(ARRAY['', '[$next]', 'DROP', '1,2,99999999999999999999', '[' || repeat('1', 7990), repeat('x', 7999)]) v});
is(sql("CALL outbox.await_fanout($next, '100ms')"), 'timeout', 'a forged announcement wakes nobody');
$seq = sql(q{SELECT outbox.record('x')});
is(sql("CALL outbox.await_fanout($seq, '60s')"), 'fanned', 'and disturbs nothing');

# The queue is full: a client listens and does not read.
SKIP:
{
	skip 'the NOTIFY queue has gigabytes before 17', 14 unless $conf{max_notify_queue_pages};
	my $lazy = $node->background_psql('postgres');

	$lazy->query_safe('LISTEN standmeet_events_fanned');
	$lazy->query_safe('BEGIN; SELECT 1');
	$client->quit;
	# The relay itself listens, but reads.  The channel is the client's: from 19
	# on the server passes a listener over that none of the messages is for.
	my $offset = -s $log;
	my ($ret, $out, $err) = $node->psql('postgres', q{DO $$ BEGIN FOR n IN 1 .. 1000 LOOP PERFORM pg_notify('standmeet_events_fanned', repeat('x', 7900) || i) FROM generate_series(1, 10) i; COMMIT; END LOOP; END $$});
	like($err, qr/too many notifications in the NOTIFY queue/, 'the queue is full');
	foreach my $n (1 .. 3)
	{
		$seq = sql(q{SELECT outbox.record('x')});
		is(sql("CALL outbox.await_fanout($seq, '60s')"), 'fanned', "a full queue stops no event ($n)");
	}
	$bad = sql(q{INSERT INTO public.faults SELECT outbox.record('x'), '23514' RETURNING seq});
	is(sql("CALL outbox.await_fanout($bad, '60s')"), 'poisoned', 'nor poison');
	wait_drained($node, 'the alert');
	settled($node);
	cmp_ok(sql('SELECT notify_failures FROM outbox.stat_relay'), '>=', 4, 'outbox.stat_relay counts what was not announced');
	is(sql('SELECT failures FROM outbox.stat_relay') >= 5 ? 1 : 0, 1, 'which is no failure of an event');
	my $text = substr(slurp_file($log), $offset);
	my $warnings = () = $text =~ /WARNING:  outbox relay could not send notifications on channel/g;
	is($warnings, 1, 'one warning a minute');
	like(sql(q{SELECT string_agg(finding, '; ') FROM outbox.check()}), qr/NOTIFY|notif/i, 'outbox.check() knows');
	$lazy->query_safe('COMMIT');
	$lazy->quit;
	$client = listener($node, 'standmeet_events_fanned');
	sql('DELETE FROM public.faults; SELECT outbox.requeue_many(ARRAY(SELECT seq FROM outbox.poisoned))');
	# the server itself empties a full queue when somebody asks how full it is
	sql('SELECT pg_notification_queue_usage()');
	ok($client->wait_heard(sub { sql(q{SELECT outbox.record('x')}); @_ > 0 }), 'when the client has read, announcements come again');
	wait_drained($node, 'all');
	is_conserved($node, 'a full queue');
}

$client->quit;
$node->stop;
done_testing();
