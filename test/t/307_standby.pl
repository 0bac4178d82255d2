# A standby does nothing; promoted, it goes on where the primary was.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $primary = new_server('primary', init => { allows_streaming => 1 });

$primary->safe_psql('postgres', q{SELECT outbox.subscribe('all'); SELECT outbox.subscribe('some', '{x.odd}')});
$primary->safe_psql('postgres', 'CREATE DATABASE second');
$primary->safe_psql('second', q{CREATE EXTENSION outbox; SELECT outbox.subscribe('all')});
$primary->safe_psql('postgres', q{SELECT outbox.record('x.before') FROM generate_series(1, 300)});
wait_drained($primary, 'the primary');

$primary->backup('base');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'base', has_streaming => 1);
$standby->start;

# A backlog that the primary has not worked off
$primary->safe_psql('postgres', 'SELECT outbox.stop()');
$primary->safe_psql('second', 'SELECT outbox.stop()');
$primary->safe_psql('postgres', q{SELECT outbox.record('x.' || CASE WHEN i % 2 = 1 THEN 'odd' ELSE 'even' END) FROM generate_series(1, 500) i});
$primary->safe_psql('second', q{SELECT outbox.record('x.second') FROM generate_series(1, 50)});
$primary->wait_for_catchup($standby);

is($standby->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'outbox%'}), 0, 'no worker on a standby');
my ($rc, $stdout, $stderr) = $standby->psql('postgres', q{SELECT outbox.record('x.standby')});
like($stderr, qr/ERROR:  cannot execute .* in a read-only transaction|ERROR:  cannot .* during recovery/, 'record says that a standby is read-only');
($rc, $stdout, $stderr) = $standby->psql('postgres', q{SELECT outbox.wake(); SELECT count(*) FROM outbox.poisoned});
is($rc, 0, "looking at a standby works: $stderr");
is($standby->safe_psql('postgres', 'SELECT count(*) FROM outbox.events WHERE fanned_out_at IS NULL'), 500, 'it waits there too');
unlike(slurp_file($standby->logfile), qr/outbox (launcher|relay|probe)/, 'no word of workers in its log');

# It takes over
$primary->stop('immediate');
my $start = time();
$standby->promote;
$standby->poll_query_until('postgres', q{SELECT count(*) = 2 FROM pg_stat_activity WHERE backend_type = 'outbox relay'})
  or die 'no relay after the promotion';
cmp_ok(time() - $start, '<', 30, 'relays soon after the promotion');
$standby->safe_psql('postgres', 'SELECT outbox.start()');
$standby->safe_psql('second', 'SELECT outbox.start()');
wait_drained($standby, 'the backlog');
wait_drained($standby, 'the backlog elsewhere', 'second');
is_conserved($standby, 'after the promotion');
is_conserved($standby, 'after the promotion elsewhere', db => 'second');
my $seq = $standby->safe_psql('postgres', q{SELECT outbox.record('x.after')});
is($standby->safe_psql('postgres', "CALL outbox.await_fanout($seq, '60s')"), 'fanned', 'new events are fanned out');

$standby->stop;
done_testing();
