# pg_upgrade: nothing runs meanwhile, everything is there afterwards, and what
# was not fanned out is.
#
# From the same version to itself, unless OUTBOX_OLD_BINDIR names the bin
# directory of an older server that has the library installed.

use strict;
use warnings FATAL => 'all';

use Cwd;
use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $bindir = $ENV{OUTBOX_OLD_BINDIR};
my $old = PostgreSQL::Test::Cluster->new('old', $bindir ? (install_path => $bindir =~ s,/bin/?$,,r) : ());
my $new = PostgreSQL::Test::Cluster->new('new');
my $conf = q{
shared_preload_libraries = 'outbox'
max_worker_processes = 20
outbox.sweep_interval = '1h'
outbox.relay_retry_min = '20ms'
outbox.relay_retry_max = '50ms'
};

# pg_upgrade wants the same initdb options on either side
my @initdb = $bindir && $new->pg_version >= 18 ? (extra => ['--no-data-checksums']) : ();
$old->init;
$new->init(@initdb);
foreach my $node ($old, $new)
{
	$node->append_conf('postgresql.conf', $conf);
}
note('from PostgreSQL ' . $old->pg_version . ' to ' . $new->pg_version);
$old->start;

# Events and jobs in every state
$old->safe_psql('postgres', 'CREATE ROLE reader LOGIN');
$old->safe_psql('postgres', 'CREATE DATABASE app');
$old->safe_psql('app', q{
	CREATE EXTENSION outbox;
	SELECT outbox.subscribe('all');
	SELECT outbox.subscribe('filtered', '{x.*,!x.bad}', scope => 's', filter => '$.n ? (@ > 5)', coalescing => true);
	SELECT outbox.subscribe('paused');
	SELECT outbox.pause('paused');
	SELECT outbox.grant('reader', 'record');
	CREATE TABLE notes (id int PRIMARY KEY, body text);
	SELECT outbox.capture('notes', 'note.{op}');
	INSERT INTO notes VALUES (1, 'one');
	SELECT outbox.record('x.fanned', 'subject ' || i % 3, jsonb_build_object('n', i), scope => 's') FROM generate_series(1, 20) i});
wait_drained($old, 'before', 'app');
install_faults($old, 'app');
$old->safe_psql('app', q{
	WITH bad AS (SELECT outbox.record('x.bad') AS seq) INSERT INTO faults SELECT seq, '22023' FROM bad});
wait_for($old, 'a poisoned event', 'SELECT count(*) = 1 FROM outbox.poisoned', 'app');
set_conf($old, 'outbox.databases' => "''");
wait_for($old, 'no relay', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'outbox relay'});
$old->safe_psql('app', q{SELECT outbox.record('x.waiting') FROM generate_series(1, 10)});
$old->safe_psql('app', 'DROP TRIGGER fault ON outbox.jobs');

my $contents = q{
	SELECT 'event', e::text FROM outbox.events e
	UNION ALL SELECT 'job', j::text FROM outbox.jobs j
	UNION ALL SELECT 'subscription', (to_jsonb(s) - 'owner_oid')::text FROM outbox.subscriptions s
	UNION ALL SELECT 'capture', c::text FROM outbox.captures c
	UNION ALL SELECT 'armed', (database = (SELECT oid FROM pg_database WHERE datname = current_database()))::text FROM outbox.armed
	UNION ALL SELECT 'right', has_function_privilege('reader', 'outbox.record(text, text, jsonb, text, jsonb, timestamptz)', 'EXECUTE')::text
	UNION ALL SELECT 'sequence', nextval('outbox.events_seq_seq')::text || ' ' || nextval('outbox.jobs_id_seq')::text
	ORDER BY 1, 2};
my $before = $old->safe_psql('app', $contents);
$old->stop;
# a relay would do its work now, if there were one
$old->append_conf('postgresql.conf', "outbox.databases = '*'");

# pg_upgrade writes into its own directory
my $here = getcwd();
chdir $PostgreSQL::Test::Utils::tmp_check or die "chdir: $!";
command_ok(
	[
		'pg_upgrade', '--no-sync', '--retain',
		'-d', $old->data_dir, '-D', $new->data_dir,
		'-b', $bindir // $new->config_data('--bindir'), '-B', $new->config_data('--bindir'),
		'-s', $new->host, '-p', $old->port, '-P', $new->port
	],
	'pg_upgrade');
chdir $here or die "chdir: $!";

# What ran meanwhile is in the logs, if only because it was told to end
my @logs = grep { -f } glob($new->data_dir . '/pg_upgrade_output.d/*/log/*'), glob($new->data_dir . '/pg_upgrade_output.d/log/*');
unlike(join('', map { slurp_file($_) } @logs), qr/outbox (launcher|relay|probe)/, 'no worker during the upgrade');

cmp_ok(scalar(grep { /pg_upgrade_server\.log$/ } @logs), '>', 0, 'as the logs of its servers say');

$new->append_conf('postgresql.conf', "outbox.databases = ''");
$new->start;
my $after = $new->safe_psql('app', $contents);
my $bump = sub { my ($text) = @_; $text =~ s/^sequence\|.*$//m; return $text };
is($bump->($after), $bump->($before), 'everything is as it was');
my ($seq_before, $job_before) = $before =~ /^sequence\|(\d+) (\d+)$/m;
my ($seq_after, $job_after) = $after =~ /^sequence\|(\d+) (\d+)$/m;
ok($seq_after > $seq_before && $job_after > $job_before, 'sequences go on');
is($new->safe_psql('app', 'SELECT count(*) FROM outbox.events WHERE fanned_out_at IS NULL AND poisoned_at IS NULL'), 10, 'what waited waits');
set_conf($new, 'outbox.databases' => "'*'");
wait_drained($new, 'after the upgrade', 'app');
$new->safe_psql('app', 'SELECT outbox.requeue(seq) FROM outbox.poisoned');
wait_drained($new, 'the poisoned event', 'app');
$new->safe_psql('app', q{INSERT INTO notes VALUES (2, 'two')});
wait_drained($new, 'a captured change', 'app');
is_conserved($new, 'after the upgrade', db => 'app');
is($new->safe_psql('app', q{SELECT count(*) FROM outbox.events WHERE type = 'note.created'}), 2, 'captures go on');

$new->stop;
done_testing();
