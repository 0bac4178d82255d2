# All of max_worker_processes is in use: business goes on, it is said once,
# and the relay comes when there is room.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

# Two of them are for the launchers, so there are two more.
my $node = new_server('slots', 'max_worker_processes' => 4);

foreach my $db ('postgres', 'a', 'b', 'c')
{
	$node->safe_psql('postgres', "CREATE DATABASE $db") unless $db eq 'postgres';
}
foreach my $db ('postgres', 'a')
{
	$node->safe_psql($db, 'CREATE EXTENSION outbox') unless $db eq 'postgres';
	$node->safe_psql($db, q{SELECT outbox.subscribe('all'); SELECT outbox.record('x.first')});
	wait_drained($node, "database $db", $db);
}

my $offset = -s $node->logfile;
foreach my $db ('b', 'c')
{
	$node->safe_psql($db, q{CREATE EXTENSION outbox; SELECT outbox.subscribe('all')});
	$node->safe_psql($db, q{SELECT outbox.record('x.early') FROM generate_series(1, 10)});
}
$node->wait_for_log(qr/no background worker slot is free .*\n.*HINT: .*max_worker_processes/, $offset);
is($node->safe_psql('b', 'SELECT count(*) FROM outbox.events WHERE fanned_out_at IS NULL'), 10, 'events are recorded all the same');
is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox relay'}), 2, 'two relays');

# They go on working, also when they have to be replaced
my $pid = relay_pid($node, 'a');
$node->safe_psql('a', "SELECT outbox.record('x.again'), pg_terminate_backend($pid)");
wait_drained($node, 'a relay that was replaced', 'a');

# Room is made, and what waits gets it
$node->safe_psql('a', 'DROP EXTENSION outbox CASCADE');
wait_for($node, 'a relay for one who waited', q{
	SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname IN ('b', 'c')});
my $db = $node->safe_psql('postgres', q{SELECT datname FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname <> 'postgres'});
wait_drained($node, 'who waited', $db);
is_conserved($node, 'who waited', db => $db);
$node->safe_psql('postgres', "DROP DATABASE $db");
my $other = $db eq 'b' ? 'c' : 'b';
wait_drained($node, 'the last one', $other);
is_conserved($node, 'the last one', db => $other);

my $said = () = slurp_file($node->logfile, $offset) =~ /no background worker slot is free/g;
is($said, 1, 'it was said once');

$node->stop;
done_testing();
