# Replay while events flow: a consumer that comes late gets each event that it
# matches once, whatever the relay, other clients and retention do meanwhile.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IPC::Run;
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('replay');

sub sql
{
	my ($query) = @_;

	return $node->safe_psql('postgres', $query);
}

# A client that runs a script and ends.  It reads and writes files: nobody need
# feed it.
my $dir = PostgreSQL::Test::Utils::tempdir;
my $nclients = 0;

sub client
{
	my ($script) = @_;
	my $file = "$dir/client" . $nclients++;

	append_to_file($file, $script);
	my $handle = IPC::Run::start(
		[ 'psql', '-X', '-A', '-t', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('postgres'), '-f', $file ],
		'<', '/dev/null', '>', "$file.out", '2>', "$file.err");

	return { handle => $handle, file => $file };
}

sub finish
{
	my ($client) = @_;

	$client->{handle}->finish;
	return slurp_file("$client->{file}.out") . slurp_file("$client->{file}.err");
}

sql(q{SELECT outbox.subscribe('first', '{x.*}')});

# A pass that claimed before the subscription was there is waited for: it marks
# events that the subscription does not get from it.
install_gate($node);
# only the relay may leave something for its commit
sql(q{DROP TRIGGER gate_commit ON outbox.jobs});
sql(q{INSERT INTO public.gates VALUES ('marks')});
sql(q{SELECT outbox.record('x.1', 'early')});
wait_at_gate($node);
sql(q{SELECT outbox.subscribe('rebuilt', '{x.*}')});
my $waits = q{SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'virtualxid' AND NOT granted};
my $replay = client(q{SELECT outbox.replay('rebuilt', '-infinity')});
wait_for($node, 'the replay to wait for the pass', $waits);
open_gate($node);
is(finish($replay), "1\n", 'an event of a pass that was under way is replayed');
is_conserved($node, 'a pass under way');

# So is a pass that knows the subscription, whose event is not replayed.
sql(q{INSERT INTO public.gates VALUES ('marks')});
sql(q{SELECT outbox.record('x.1', 'during')});
wait_at_gate($node);
$replay = client(q{SELECT outbox.replay('rebuilt', '-infinity')});
wait_for($node, 'the replay to wait for the pass', $waits);
open_gate($node);
is(finish($replay), "0\n", 'an event that the subscription has got is not replayed');
is_conserved($node, 'a pass that knows');
sql(q{DROP FUNCTION public.gate() CASCADE});

# Many events, and more of them while they are replayed to several at a time
my $n = slow() ? 100_000 : 10_000;

sub record
{
	my ($events) = @_;

	return "SELECT count(outbox.record('x.' || i % 5, (i % 100)::text)) FROM generate_series(1, $events) i";
}
sql(record($n));
wait_drained($node, 'before');
my @writers = map { client((record(20) . ";\n") x ($n / 50)) } 1, 2;
sql(q{SELECT outbox.subscribe('late', '{x.1,x.2}'), outbox.subscribe('coalescing', '{x.*}', coalescing => true),
	outbox.subscribe('ordered', '{x.*,!x.4}', ordered => true)});
my @replays = map { client("SELECT outbox.replay('$_', '-infinity');\n" x 3) } qw(late coalescing ordered late);
unlike(finish($_), qr/ERROR/, 'a replay') foreach @replays;
finish($_) foreach @writers;
wait_drained($node, 'after');
is_conserved($node, 'replays beside writers');
is( sql(
		q{SELECT string_agg(outbox.replay(name, '-infinity')::text, ',') FROM unnest('{late,coalescing,ordered,rebuilt,first}'::text[]) name}
	),
	'0,0,0,0,0', 'nothing is left to replay');

# What is cancelled, or ends with its connection, leaves nothing.
sql(q{SELECT outbox.subscribe('cut', '{x.*}')});
foreach my $how ('pg_cancel_backend', 'pg_terminate_backend')
{
	my $gone = client(q{BEGIN; SELECT outbox.replay('cut', '-infinity'); SELECT pg_advisory_lock(1); SELECT pg_sleep(600)});
	my $held = q{FROM pg_locks WHERE locktype = 'advisory'};

	wait_for($node, 'a replay that is over and not committed', "SELECT count(*) = 1 $held");
	sql("SELECT $how(pid) $held");
	finish($gone);
	wait_for($node, 'its end', "SELECT count(*) = 0 $held");
	is(sql(q{SELECT waiting FROM outbox.stat_subscription WHERE name = 'cut'}), 0, "$how: no job is left");
}
my ($status, $stdout, $stderr) =
  $node->psql('postgres', q{SET statement_timeout = '30ms'; SELECT outbox.replay('cut', '-infinity')});
like($stderr, qr/canceling statement due to statement timeout/, 'statement_timeout ends a replay');
is(sql(q{SELECT outbox.replay('cut', '-infinity') = count(*) FROM outbox.events}), 't', 'the next one is whole');
sql(q{SELECT outbox.unsubscribe('cut')});

# Consumers, replays and retention together: no job loses its event, and none is
# made twice.  An ordered subscription is paused while it is replayed to; then
# jobs of one subject run one at a time.
sql(q{
	CREATE TABLE busy (subject text PRIMARY KEY);
	CREATE PROCEDURE work(subscription text, rounds int) LANGUAGE plpgsql AS $$
	DECLARE
		c record;
	BEGIN
		FOR i IN 1 .. rounds LOOP
			c := NULL;
			FOR c IN SELECT claim, subject FROM outbox.claim(subscription, 20) LOOP
				IF subscription = 'ordered' THEN
					INSERT INTO busy VALUES (c.subject);
				END IF;
			END LOOP;
			COMMIT;
			IF c.claim IS NOT NULL THEN
				DELETE FROM busy b USING outbox.jobs j JOIN outbox.events e ON e.seq = j.event_seq
				WHERE subscription = 'ordered' AND b.subject = e.subject AND j.claim = c.claim;
				PERFORM outbox.complete_many(c.claim);
			END IF;
			COMMIT;
		END LOOP;
	END $$});
set_conf($node, 'outbox.event_retention' => 0);
my $rounds = slow() ? 2000 : 300;
my $range = q{now() - interval '1 minute'};
my @clients = (
	(map { client("CALL work('$_', $rounds)") } qw(late coalescing ordered ordered rebuilt first)),
	(map { client("SELECT outbox.replay('$_', $range) \\g /dev/null\n" x ($rounds / 30)) } qw(late coalescing)),
	client(qq{SELECT outbox.pause('ordered') \\g /dev/null
		SELECT outbox.replay('ordered', $range) \\g /dev/null
		SELECT outbox.resume('ordered') \\g /dev/null
	} x ($rounds / 30)),
	client("CALL outbox.prune() \\g /dev/null\n" x ($rounds / 30)),
	client((record(10) . " \\g /dev/null\n") x $rounds));
foreach (@clients)
{
	# no deadlock, and no subject that is busy twice
	unlike(finish($_), qr/ERROR/, 'a client of many');
}
wait_drained($node, 'all clients');
is(sql(q{SELECT count(*) FROM outbox.jobs WHERE done_at IS NULL AND NOT EXISTS (SELECT FROM outbox.events WHERE seq = event_seq)}),
	0, 'no job that is not finished has lost its event');
is( sql(
		q{SELECT count(*) FROM (SELECT FROM outbox.jobs WHERE done_at IS NULL AND dead_at IS NULL GROUP BY event_seq, subscription_id HAVING count(*) > 1) d}
	),
	0, 'none is there twice');
is( sql(
		q{SELECT count(*) FROM outbox.jobs j WHERE NOT EXISTS (SELECT FROM outbox.events e, jsonb_each_text(e.fanout) f WHERE e.seq = j.event_seq AND f.value::bigint = j.id)}
	),
	0, 'each is named by its event');

# Nothing is stuck: all that is due, now or after a lease, leads to the rest.
sql(q{UPDATE outbox.jobs SET due_at = now() WHERE isfinite(due_at) AND done_at IS NULL});
foreach my $subscription (qw(late coalescing ordered rebuilt first))
{
	wait_for($node, "$subscription to come to its end", qq{
		SELECT count(outbox.complete(c.job, c.claim)) = 0
			AND NOT EXISTS (SELECT FROM outbox.jobs j JOIN outbox.subscriptions s ON s.id = j.subscription_id
				WHERE s.name = '$subscription' AND done_at IS NULL)
		FROM outbox.claim('$subscription', 10000) c});
}
sql('CALL outbox.prune()');
is(sql('SELECT (SELECT count(*) FROM outbox.events), (SELECT count(*) FROM outbox.jobs)'), '0|0', 'at last everything has gone');

$node->stop;
done_testing();
