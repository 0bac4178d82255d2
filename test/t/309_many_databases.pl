# More databases than there is room for in shared memory: the rest is swept.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('many', 'outbox.max_databases' => 2, 'outbox.sweep_interval' => "'200ms'");
my @databases = map { "db$_" } 1 .. 4;

foreach my $db (@databases)
{
	$node->safe_psql('postgres', "CREATE DATABASE $db");
	$node->safe_psql($db, q{CREATE EXTENSION outbox; SELECT outbox.subscribe('all')});
	$node->safe_psql($db, q{SELECT outbox.record('x.early') FROM generate_series(1, 250)});
}
foreach my $db (@databases)
{
	wait_drained($node, $db, $db);
	$node->safe_psql($db, q{SELECT outbox.record('x.later') FROM generate_series(1, 250)});
	wait_drained($node, "$db again", $db);
	is_conserved($node, $db, db => $db);
}
is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox relay'}), 2, 'two relays');
my $said = () = slurp_file($node->logfile) =~ /no room to keep a relay in database/g;
is($said, 3, 'each of the others was told once');

# One goes, another takes its place
my $gone = $node->safe_psql('postgres', q{SELECT datname FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname <> 'postgres'});
$node->safe_psql('postgres', "DROP DATABASE $gone");
wait_for($node, 'another relay', qq{
	SELECT count(*) = 2 FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname <> '$gone'});
pass('a free place is taken');
foreach my $db (grep { $_ ne $gone } @databases)
{
	my $seq = $node->safe_psql($db, q{SELECT outbox.record('x.last')});
	wait_drained($node, "$db at last", $db);
	is_conserved($node, "$db at last", db => $db);
}

# Databases that are swept are no less free to be dropped, renamed and copied
foreach my $db (grep { $_ ne $gone } @databases)
{
	is($node->psql('postgres', "ALTER DATABASE $db RENAME TO other", stderr => \my $stderr), 0, "rename of $db");
	is($node->psql('postgres', "CREATE DATABASE copy TEMPLATE other", stderr => \$stderr), 0, "copy of $db");
	is($node->psql('postgres', 'DROP DATABASE copy', stderr => \$stderr), 0, 'drop of the copy');
	is($node->psql('postgres', 'DROP DATABASE other', stderr => \$stderr), 0, "drop of $db");
}
$node->stop;

# One for each of many
SKIP:
{
	skip 'only in the slow suite', 1 unless slow();

	my $crowd = new_server('crowd', 'outbox.max_databases' => 40, 'max_worker_processes' => 60, 'outbox.sweep_interval' => "'1h'");
	my @crowd = map { "db$_" } 1 .. 32;

	foreach my $db (@crowd)
	{
		$crowd->safe_psql('postgres', "CREATE DATABASE $db");
		$crowd->safe_psql($db, q{CREATE EXTENSION outbox; SELECT outbox.subscribe('all')});
	}
	$crowd->safe_psql('db1', q{ALTER TABLE outbox.routing RENAME TO hidden; SELECT outbox.record('x.sick')});
	foreach my $round (1, 2)
	{
		$crowd->safe_psql($_, q{SELECT outbox.record('x.crowd') FROM generate_series(1, 50)}) foreach @crowd;
		wait_drained($crowd, "$_, round $round", $_) foreach grep { $_ ne 'db1' } @crowd;
		$crowd->restart if $round == 1;
	}
	is_conserved($crowd, $_, db => $_) foreach grep { $_ ne 'db1' } @crowd;
	$crowd->stop;
}

done_testing();
