# Captures across dumps, replicas and a server that has lost the library.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('capture', init => { allows_streaming => 'logical' });
my $dir = PostgreSQL::Test::Utils::tempdir;

sub sql
{
	my ($db, $query) = @_;

	return $node->safe_psql($db, $query);
}

my $captures = 'SELECT * FROM outbox.captures ORDER BY relation::text, type';
my $recorded = 'SELECT type, subject, payload FROM outbox.events ORDER BY seq';

# The definition of a capture is part of the table, and so part of a dump.
sql('postgres', <<'SQL');
	CREATE SCHEMA "App";
	CREATE TABLE "App".notes (id int PRIMARY KEY, "Ti'tle" text);
	CREATE TABLE "App".parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
	CREATE TABLE "App".part_1 PARTITION OF "App".parts FOR VALUES FROM (0) TO (100);
	CREATE TABLE "App".off (id int PRIMARY KEY);
	SELECT outbox.capture('"App".notes', 'note.{op}', subject => 'it''s \ {id}', watch => ARRAY['Ti''tle'], scope => 'Ti''tle');
	SELECT outbox.capture('"App".notes', 'seen', operations => '{insert}');
	SELECT outbox.capture('"App".parts', 'part.{op}', columns => '{v}');
	SELECT outbox.capture('"App".off', 'off.{op}');
	ALTER TABLE "App".off DISABLE TRIGGER ALL;
	INSERT INTO "App".notes VALUES (1, 'a');
	INSERT INTO "App".parts VALUES (1, 'b');
	INSERT INTO "App".off VALUES (1);
SQL
my $before = sql('postgres', $captures);
my $events = sql('postgres', $recorded);
is($events =~ tr/\n//, 2, 'three events');

$node->command_ok([ 'pg_dump', '-Fp', '-f', "$dir/plain", '-d', $node->connstr('postgres') ], 'plain dump');
$node->command_ok([ 'pg_dump', '-Fc', '-f', "$dir/custom", '-d', $node->connstr('postgres') ], 'custom dump');
sql('postgres', "CREATE DATABASE $_") foreach qw(plain custom tables);
$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f', "$dir/plain", $node->connstr('plain') ], 'plain restore');
$node->command_ok([ 'pg_restore', '-j', '2', '-d', $node->connstr('custom'), "$dir/custom" ], 'parallel restore');
foreach my $db (qw(plain custom))
{
	is(sql($db, $captures), $before, "$db: the captures are there");
	is(sql($db, $recorded), $events, "$db: loading the tables recorded nothing");
	sql($db, q{UPDATE "App".notes SET "Ti'tle" = 'z'; UPDATE "App".parts SET v = 'z'});
	is(sql($db, 'SELECT type, subject, scope FROM outbox.events ORDER BY seq DESC LIMIT 2'),
		"part.updated|1|\nnote.updated|it's \\ 1|z", "$db: they work");
	is(sql($db, q{SELECT outbox.capture('"App".parts', 'part.{op}', columns => '{v}')}), 'f', "$db: they are the same");
}

# Data alone, into tables that are captured: rows like any others, unless
# triggers are disabled.
sql('tables', 'CREATE EXTENSION outbox; CREATE SCHEMA "App"');
$node->command_ok([ 'pg_restore', '-s', '-n', 'App', '-d', $node->connstr('tables'), "$dir/custom" ], 'definitions alone');
is(sql('tables', $captures), $before, 'captures come with the definitions');
$node->command_ok(
	[ 'pg_restore', '-a', '--disable-triggers', '-n', 'App', '-d', $node->connstr('tables'), "$dir/custom" ],
	'data without triggers');
is(sql('tables', $recorded), '', 'recorded nothing');
sql('tables', 'TRUNCATE "App".notes, "App".parts, "App".off');
$node->command_ok([ 'pg_restore', '-a', '-n', 'App', '-d', $node->connstr('tables'), "$dir/custom" ], 'data with triggers');
# pg_restore has enabled every trigger, also the one that was disabled
is(sql('tables', 'SELECT type FROM outbox.events ORDER BY type'), "note.created\noff.created\npart.created\nseen", 'was recorded');

# A subscriber of logical replication records when its trigger says so.
sql('postgres', 'CREATE PUBLICATION app FOR TABLE "App".notes');
sql('postgres', q{SELECT pg_create_logical_replication_slot('app', 'pgoutput')});
(my $publisher = $node->connstr('postgres')) =~ s/'/''/g;
sql('tables', "TRUNCATE \"App\".notes; DELETE FROM outbox.events");
sql('tables',
	"CREATE SUBSCRIPTION app CONNECTION '$publisher' PUBLICATION app WITH (create_slot = false, slot_name = 'app', copy_data = false)");

sub caught_up
{
	my $lsn = sql('postgres', 'SELECT pg_current_wal_lsn()');

	wait_for($node, 'the subscriber',
		"SELECT confirmed_flush_lsn >= '$lsn' FROM pg_replication_slots WHERE slot_name = 'app'");
	return;
}
sql('postgres', q{INSERT INTO "App".notes VALUES (10, 'applied')});
caught_up();
is(sql('tables', 'SELECT count(*) FROM "App".notes'), 1, 'a change is applied');
is(sql('tables', $recorded), '', 'and not recorded again');
sql('tables',
	sprintf 'ALTER TABLE "App".notes ENABLE ALWAYS TRIGGER %s',
	sql('tables', q{SELECT trigger FROM outbox.captures WHERE type = 'note.{op}'}));
sql('postgres', <<'SQL');
	INSERT INTO "App".notes VALUES (11, 'x');
	UPDATE "App".notes SET "Ti'tle" = 'y' WHERE id = 11;
	UPDATE "App".notes SET "Ti'tle" = 'y' WHERE id = 11;
	DELETE FROM "App".notes WHERE id = 11;
SQL
caught_up();
is(sql('tables', q{SELECT type, subject, payload->'old' FROM outbox.events ORDER BY seq}),
	join("\n",
		q{note.created|it's \ 11|},
		q{note.updated|it's \ 11|{"Ti'tle": "x"}},
		q{note.deleted|it's \ 11|{"id": 11, "Ti'tle": "y"}}),
	'changes that are applied are recorded by an ENABLE ALWAYS trigger');
sql('tables', q{ALTER SUBSCRIPTION app DISABLE});
sql('tables', q{ALTER SUBSCRIPTION app SET (slot_name = NONE)});
sql('tables', q{DROP SUBSCRIPTION app});
sql('postgres', q{SELECT pg_drop_replication_slot('app')});

# A server that has lost the library cannot refuse the ALTER; a write goes on.
sql('postgres', q{CREATE TABLE lost (id int PRIMARY KEY, a text, b text);
	SELECT outbox.capture('lost', 'lost.{a}', subject => 'b', watch => '{a,b}', columns => '{id,b}')});
isnt($node->psql('postgres', 'ALTER TABLE lost RENAME b TO c'), 0, 'the ALTER is refused');
$node->append_conf('postgresql.conf', "shared_preload_libraries = ''");
$node->restart;
my ($stderr);
sql('postgres', 'ALTER TABLE lost RENAME b TO c');
is( $node->psql(
		'postgres', q{INSERT INTO lost VALUES (1, 'x', 'y'); INSERT INTO lost VALUES (2, 'x', 'y'); UPDATE lost SET c = 'z'; UPDATE lost SET a = 'z'},
		stderr => \$stderr),
	0, 'writes go on');
my @lost = $stderr =~ /goes on without column "b"/g;
is(scalar(@lost), 1, 'one warning names the column');
is(sql('postgres', q{SELECT type, subject, payload->'new' FROM outbox.events WHERE type LIKE 'lost.%' ORDER BY seq}),
	join("\n", 'lost.x||{"id": 1}', 'lost.x||{"id": 2}', 'lost.z||{"id": 1}', 'lost.z||{"id": 2}'),
	'they are recorded without it');
$node->append_conf('postgresql.conf', "shared_preload_libraries = 'outbox'");
$node->restart;
isnt($node->psql('postgres', 'ALTER TABLE lost RENAME a TO b'), 0, 'the ALTER is refused again');

$node->stop;
done_testing();
