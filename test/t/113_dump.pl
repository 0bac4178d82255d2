# pg_dump and restore, and copies of a database: every row and every sequence
# comes along, and nothing is done in the copy until it is armed.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('dump', 'outbox.poison_after' => 2, 'max_connections' => 60);
my $dir = $PostgreSQL::Test::Utils::tmp_check;

sub sql
{
	my ($db, $sql) = @_;

	return $node->safe_psql($db, $sql);
}

# Everything that must come along, and the numbers that come next
my $contents = q{
	SELECT 'event', md5(string_agg(e::text, '|' ORDER BY seq)), count(*) FROM outbox.events e
	UNION ALL SELECT 'job', md5(string_agg(j::text, '|' ORDER BY id)), count(*) FROM outbox.jobs j
	UNION ALL SELECT 'subscription', md5(string_agg(s::text, '|' ORDER BY id)), count(*) FROM outbox.subscriptions s
	UNION ALL SELECT 'next event', last_value::text, is_called::int FROM outbox.events_seq_seq
	UNION ALL SELECT 'next job', last_value::text, is_called::int FROM outbox.jobs_id_seq
	UNION ALL SELECT 'next subscription', last_value::text, is_called::int FROM outbox.subscriptions_id_seq
	UNION ALL SELECT 'captured', string_agg(relation::text || type, '|' ORDER BY relation::text), count(*) FROM outbox.captures};

# Events in every state
sql('postgres', q{
	CREATE ROLE keeper LOGIN;
	CREATE ROLE goner LOGIN;
	CREATE TABLE watched (id int PRIMARY KEY, note text);
	SELECT outbox.capture('watched', 'watched.{op}', subject => 'w/{id}');
	SELECT outbox.subscribe('plain');
	SELECT outbox.subscribe('coalescing', '{x.*,watched.*}', coalescing => true);
	SELECT outbox.subscribe('filtered', '{*,!x.2*}', scope => 'acme', filter => '$.n > 3', options => '{"a": [1]}');
	SELECT outbox.subscribe('paused', '{x.*}', ordered => true);
	SELECT outbox.pause('paused');
	SELECT outbox.subscribe('alerts', '{outbox.*}');
	SELECT outbox.subscribe('kept', '{x.*}');
	SELECT outbox.set_owner('kept', 'keeper');
	SELECT outbox.subscribe('lost', '{x.*}');
	SELECT outbox.set_owner('lost', 'goner');
	SELECT outbox.subscribe('gone', '{x.*}')});
install_faults($node);
sql('postgres', q{
	SELECT count(outbox.record('x.' || i % 5, 's/' || i % 40, jsonb_build_object('n', i % 7), CASE WHEN i % 3 = 0 THEN 'acme' END, '{"h": "ä"}')) FROM generate_series(1, 800) i;
	INSERT INTO watched SELECT i, repeat('long ', 1000) FROM generate_series(1, 20) i;
	SELECT outbox.record('x.later', not_before => now() + interval '1 year');
	BEGIN;
	INSERT INTO public.faults SELECT outbox.record('x.bad', 'b/' || i, '{}', 'acme'), '23514' FROM generate_series(1, 3) i;
	SELECT count(outbox.record('x.beside')) FROM generate_series(1, 10);
	COMMIT});
wait_drained($node, 'the original');
sql('postgres', q{
	SELECT outbox.unsubscribe('gone');
	UPDATE outbox.jobs SET attempts = 3, last_error = 'three times' WHERE id % 10 = 1;
	UPDATE outbox.jobs SET done_at = now() WHERE id % 10 = 2;
	UPDATE outbox.jobs SET dead_at = now(), attempts = 10 WHERE id % 10 = 3;
	UPDATE outbox.jobs SET engine_id = 'e' || id WHERE id % 10 = 4;
	DROP TRIGGER fault ON outbox.jobs});
# unmarked ones, some of which wait for a retry, and one of ours
sql('postgres', q{SELECT outbox.stop()});
sql('postgres', q{
	SELECT count(outbox.record('x.unmarked', 's/' || i % 10, '{"n": 5}', 'acme')) FROM generate_series(1, 150) i;
	INSERT INTO watched VALUES (100, 'unmarked');
	UPDATE outbox.events SET tries = 3, failures = 1, last_error = '22000: once', retry_at = now() + interval '1 year' WHERE seq % 50 = 0 AND fanned_out_at IS NULL;
	UPDATE outbox.events SET fanned_out_at = NULL, fanout = NULL WHERE seq = (SELECT min(seq) FROM outbox.events WHERE type LIKE 'outbox.%');
	DELETE FROM outbox.jobs WHERE event_seq = (SELECT min(seq) FROM outbox.events WHERE type LIKE 'outbox.%');
	SELECT setval('outbox.events_seq_seq', 500000), setval('outbox.jobs_id_seq', 600000), setval('outbox.subscriptions_id_seq', 700)});
my $original = sql('postgres', $contents);
my $poisoned = sql('postgres', 'SELECT count(*) FROM outbox.poisoned');
my $unmarked = sql('postgres', 'SELECT count(*) FROM outbox.events WHERE fanned_out_at IS NULL AND poisoned_at IS NULL');
is($poisoned, 3, 'some are poisoned');
is($unmarked, 152, 'some are unmarked');
is(violations($node, changing => 1, pending => 1), '', 'the original is as it should be');

# The original goes on working while its copies are looked at: the launcher is
# there, and so is its relay.
my %how = (
	'plain' => sub {
		my ($db) = @_;

		command_ok([ 'pg_dump', '-d', $node->connstr('postgres'), '-f', "$dir/plain.sql" ], 'pg_dump -Fp');
		$node->command_ok([ 'psql', '-XAtq', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr($db), '-f', "$dir/plain.sql" ], 'restored by psql');
	},
	'inserts' => sub {
		my ($db) = @_;

		command_ok([ 'pg_dump', '--column-inserts', '-d', $node->connstr('postgres'), '-f', "$dir/inserts.sql" ], 'pg_dump --column-inserts');
		$node->command_ok([ 'psql', '-XAtq', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr($db), '-f', "$dir/inserts.sql" ], 'restored by psql');
	},
	'custom' => sub {
		my ($db) = @_;

		command_ok([ 'pg_dump', '-Fc', '-d', $node->connstr('postgres'), '-f', "$dir/custom.dump" ], 'pg_dump -Fc');
		command_ok([ 'pg_restore', '--exit-on-error', '-d', $node->connstr($db), "$dir/custom.dump" ], 'pg_restore');
	},
	'parallel' => sub {
		my ($db) = @_;

		command_ok([ 'pg_dump', '-Fd', '-j4', '-d', $node->connstr('postgres'), '-f', "$dir/parallel" ], 'pg_dump -Fd -j4');
		command_ok([ 'pg_restore', '--exit-on-error', '-j4', '-d', $node->connstr($db), "$dir/parallel" ], 'pg_restore -j4');
	},
	'in two' => sub {
		my ($db) = @_;

		command_ok([ 'pg_dump', '--schema-only', '-Fc', '-d', $node->connstr('postgres'), '-f', "$dir/schema.dump" ], 'pg_dump --schema-only');
		command_ok([ 'pg_dump', '--data-only', '-Fc', '-d', $node->connstr('postgres'), '-f', "$dir/data.dump" ], 'pg_dump --data-only');
		command_ok([ 'pg_restore', '--exit-on-error', '-d', $node->connstr($db), "$dir/schema.dump" ], 'the schema');
		# long enough for a relay to come
		wait_for($node, 'a relay there', qq{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = '$db'});
		# a captured table records what is loaded into it, unless triggers are
		# off, as they should be when data alone is restored
		command_ok([ 'pg_restore', '--exit-on-error', '--disable-triggers', '-d', $node->connstr($db), "$dir/data.dump" ], 'and its data');
	},
	'template' => sub {
		my ($db) = @_;

		sql('template1', qq{DROP DATABASE "$db"; CREATE DATABASE "$db" TEMPLATE postgres});
	});

foreach my $how (sort keys %how)
{
	my $db = "copy $how";

	sql('template1', qq{CREATE DATABASE "$db" TEMPLATE template0});
	$how{$how}->($db);
	is(sql($db, $contents), $original, "$how: every row and every sequence");

	# It rests, though a relay is there, is woken, and new events come.
	wait_for($node, 'a relay there', qq{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = '$db'});
	my $seq = sql($db, q{SELECT outbox.record('x.new', 'new', '{"n": 9}', 'acme')});
	cmp_ok($seq, '>', 500000, 'a new event has a new number');
	sql($db, 'SELECT outbox.wake()');
	wait_for($node, 'the relay to rest', qq{SELECT state = 'resting' FROM outbox.stat_relay WHERE database = '$db'}, $db);
	is(sql($db, "CALL outbox.await_fanout($seq, '300ms')"), 'timeout', 'nothing happens in it');
	is(sql($db, 'SELECT count(*) FROM outbox.events WHERE fanned_out_at IS NULL AND poisoned_at IS NULL'), $unmarked + 1, 'nothing has been marked');
	like(sql($db, q{SELECT string_agg(finding || ' ' || COALESCE(hint, ''), ';') FROM outbox.check()}), qr/arm/, 'outbox.check() says why');
	is(sql($db, 'SELECT outbox.start()'), 'f', 'outbox.start() is not enough');
	# stating a subscription again does not arm a database that has some
	sql($db, q{SELECT outbox.subscribe('alerts', '{outbox.*}')});
	is(sql($db, "CALL outbox.await_fanout($seq, '100ms')"), 'timeout', 'nor is outbox.subscribe()');

	# Armed, it works: unmarked events are fanned out, and nothing is twice.
	is(sql($db, 'SELECT outbox.arm()'), 't', 'outbox.arm()');
	is(sql($db, "CALL outbox.await_fanout($seq, '60s')"), 'fanned', 'new events are fanned out');
	wait_drained($node, $how, $db);
	is(sql($db, 'SELECT outbox.arm()'), 'f', 'it is armed');
	is(sql($db, 'SELECT outbox.requeue_many(ARRAY(SELECT seq FROM outbox.poisoned))'), $poisoned, 'poisoned ones can be put back in line');
	wait_drained($node, $how, $db);
	is_conserved($node, $how, db => $db, changing => 1);
	cmp_ok(sql($db, 'SELECT min(id) FROM outbox.jobs WHERE id > 600000'), '>', 600000, 'new jobs have new numbers');
	is(sql($db, q{SELECT outbox.subscribe('one more')}), 701, 'new subscriptions too');
	is(sql('postgres', $contents), $original, 'the original is as it was') if $how eq 'template';
	sql('template1', qq{DROP DATABASE "$db" WITH (FORCE)});
}

# A role that is missing where the dump is restored
command_ok([ 'pg_dump', '-Fc', '-d', $node->connstr('postgres'), '-f', "$dir/owner.dump" ], 'pg_dump');
sql('postgres', q{SELECT outbox.start()});
wait_drained($node, 'the original');
is_conserved($node, 'the original works on', changing => 1);
my $other = new_server('other', extension => 0);
$other->safe_psql('postgres', 'CREATE ROLE keeper LOGIN');
command_ok([ 'pg_restore', '--no-owner', '--exit-on-error', '-d', $other->connstr('postgres'), "$dir/owner.dump" ], 'restored where a role is missing, and another has another oid');
is($other->safe_psql('postgres', 'SELECT count(*) FROM outbox.subscriptions'), 7, 'its subscription is there');
is($other->safe_psql('postgres', q{SELECT state FROM outbox.stat_subscription WHERE name = 'lost'}), 'owner missing', 'and known to be without its owner');
like($other->safe_psql('postgres', q{SELECT string_agg(finding || ' ' || COALESCE(hint, ''), ';') FROM outbox.check()}), qr/goner|lost/, 'outbox.check() names it');
is($other->safe_psql('postgres', q{SELECT outbox.adopt('kept')}), 't', 'outbox.adopt() binds one to the role of that name here');
is($other->safe_psql('postgres', q{SELECT state FROM outbox.stat_subscription WHERE name = 'kept'}), 'active', 'which has it now');
$other->safe_psql('postgres', q{SELECT outbox.arm()});
wait_drained($other, 'another server');
is_conserved($other, 'another server', changing => 1);
is($other->safe_psql('postgres', q{SELECT count(*) FILTER (WHERE fanout ? 'lost') > 0 AND count(*) FILTER (WHERE fanout ? 'kept') > 0 FROM outbox.events WHERE type = 'x.unmarked'}), 't', 'its jobs are kept for it');

# A dump by a role that may read everything, and owns nothing
$node->safe_psql('postgres', 'CREATE ROLE backup LOGIN; GRANT pg_read_all_data TO backup');
command_ok([ 'pg_dump', '-Fc', '-d', $node->connstr('postgres') . ' user=backup', '-f', "$dir/backup.dump" ], 'pg_dump by a backup role');

$other->stop;
$node->stop;
done_testing();
