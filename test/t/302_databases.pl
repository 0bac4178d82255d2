# Databases come, go, are renamed, moved and copied while a relay is connected,
# as if it were not; and nobody can end a relay who may not do such things.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $node = new_server('databases');

$node->safe_psql(
	'postgres', q{
	CREATE ROLE owner LOGIN CREATEDB;
	CREATE ROLE creator LOGIN CREATEDB;
	CREATE ROLE nobody LOGIN;
	SET allow_in_place_tablespaces = on;
	CREATE TABLESPACE elsewhere LOCATION ''});
$node->safe_psql('postgres', 'GRANT CREATE ON TABLESPACE elsewhere, pg_default TO owner, creator, nobody');
$node->safe_psql('postgres', 'CREATE DATABASE app OWNER owner');
$node->safe_psql('app', q{CREATE EXTENSION outbox; SELECT outbox.subscribe('all')});

# The relay of a database is there, and works.
sub works
{
	my ($db, $what) = @_;
	my $seq = $node->safe_psql($db, q{SELECT outbox.record('x.works')});

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is($node->safe_psql($db, "CALL outbox.await_fanout($seq, '60s')"), 'fanned', $what);
	return;
}

# Run a statement that needs a database for itself.
sub quick
{
	my ($sql, $what, %params) = @_;
	my $start = time();
	my ($rc, $stdout, $stderr) = $node->psql($params{db} // 'postgres', $sql, extra_params => [ '-U', $params{user} // 'owner' ]);

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is("$rc$stderr", '0', $what);
	cmp_ok(time() - $start, '<', 4.5, "$what: at once");
	return;
}

sub relays
{
	my ($db) = @_;

	return $node->safe_psql('postgres', qq{
		SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'outbox %' AND datname = '$db'});
}

# Connect as superusers do
$ENV{PGUSER} = $node->safe_psql('postgres', 'SELECT current_user');

works('app', 'a relay');

# By the owner, who is no superuser
quick('ALTER DATABASE app RENAME TO shop', 'ALTER DATABASE RENAME');
works('shop', 'a relay in the renamed database');
is($node->safe_psql('postgres', q{SELECT DISTINCT application_name FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = 'shop'}),
	'outbox relay for shop', 'its name is the new one');
quick('ALTER DATABASE shop SET TABLESPACE elsewhere', 'ALTER DATABASE SET TABLESPACE');
works('shop', 'a relay in the moved database');
quick('ALTER DATABASE shop SET TABLESPACE pg_default', 'and back');
quick('CREATE DATABASE copy TEMPLATE shop', 'CREATE DATABASE ... TEMPLATE');
works('shop', 'a relay in the copied database');

# A copy rests until it is told that it may work
wait_for($node, 'a relay in the copy that rests', q{
	SELECT count(*) = 1 FROM outbox.stat_relay WHERE database = 'copy' AND state = 'resting'});
my $seq = $node->safe_psql('copy', q{SELECT outbox.record('x.copy')});
$node->safe_psql('copy', q{SELECT outbox.wake()});
is($node->safe_psql('copy', "CALL outbox.await_fanout($seq, '1s')"), 'timeout', 'a copy rests');
$node->safe_psql('copy', 'SELECT outbox.arm()');
is($node->safe_psql('copy', "CALL outbox.await_fanout($seq, '60s')"), 'fanned', 'until it is armed');
quick('DROP DATABASE copy', 'DROP DATABASE');

quick('CREATE DATABASE copy TEMPLATE shop', 'from within the database that is copied', db => 'shop');
wait_for($node, 'a relay in the copy', q{SELECT count(*) = 1 FROM outbox.stat_relay WHERE database = 'copy' AND pid IS NOT NULL});
quick('DROP DATABASE copy WITH (FORCE)', 'DROP DATABASE ... FORCE');
wait_for($node, 'no relay for a database that is gone', q{SELECT count(*) = 0 FROM outbox.stat_relay WHERE database IS DISTINCT FROM 'shop' AND database IS DISTINCT FROM 'postgres'});

# Back and forth without a pause
my $offset = -s $node->logfile;
foreach my $i (1 .. 5)
{
	quick('ALTER DATABASE shop RENAME TO app', "rename $i");
	quick("CREATE DATABASE copy$i TEMPLATE app", "copy $i");
	quick('ALTER DATABASE app RENAME TO shop', "rename $i back");
	quick("DROP DATABASE copy$i", "drop of copy $i");
}
works('shop', 'a relay after all this');
unlike(slurp_file($node->logfile, $offset), qr/FATAL:  (?!terminating background worker "outbox)|ERROR:|terminated by signal/,
	'no trouble in the log');

# Statements that fail, or are rolled back: the relay comes back
foreach my $sql (
	'ALTER DATABASE shop RENAME TO postgres',
	'CREATE DATABASE postgres TEMPLATE shop',
	'BEGIN; ALTER DATABASE shop RENAME TO app; ROLLBACK',
	'BEGIN; DROP DATABASE shop; COMMIT',
	'ALTER DATABASE shop SET TABLESPACE missing')
{
	$node->psql('postgres', $sql);
	works('shop', "a relay after: $sql");
}
my $session = $node->background_psql('postgres', on_error_stop => 0);
$session->query_safe('BEGIN; SAVEPOINT s');
$session->query('ALTER DATABASE shop RENAME TO postgres');
like($session->{stderr}, qr/already exists/, 'a rename fails');
$session->{stderr} = '';
$session->query_safe('ROLLBACK TO s');
works('shop', 'a relay after a failure in a savepoint, though the transaction goes on');
$session->query_safe('ALTER DATABASE shop RENAME TO app');
is(relays('shop'), 0, 'no relay while a transaction has renamed its database');
$session->query_safe('ROLLBACK');
works('shop', 'one when that is rolled back');
$session->quit;

# No more of ours
quick('ALTER DATABASE shop IS_TEMPLATE true', 'ALTER DATABASE IS_TEMPLATE');
is(relays('shop'), 0, 'no relay in a template');
quick('CREATE DATABASE copy TEMPLATE shop', 'which can be copied', user => 'creator');
is(relays('shop'), 0, 'and still none');
quick('ALTER DATABASE shop IS_TEMPLATE false', 'no template any more');
works('shop', 'a relay again');
quick('ALTER DATABASE shop ALLOW_CONNECTIONS false', 'ALTER DATABASE ALLOW_CONNECTIONS');
is(relays('shop'), 0, 'no relay where nobody may connect');
quick('ALTER DATABASE shop ALLOW_CONNECTIONS true', 'connections allowed again');
works('shop', 'a relay again');
$node->safe_psql('postgres', q{UPDATE pg_database SET datistemplate = true WHERE datname = 'shop'});
$node->safe_psql('postgres', q{CREATE DATABASE tell});    # the launcher looks at the list
wait_for($node, 'no relay in a database that became a template unseen', q{
	SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = 'shop'});
$node->safe_psql('postgres', 'ALTER DATABASE shop IS_TEMPLATE false');
$node->safe_psql('postgres', 'DROP DATABASE copy');

# Who may not do it cannot end the relay either
works('shop', 'a relay');
my $pid = relay_pid($node, 'shop');
foreach my $user ('nobody', 'creator')
{
	foreach my $sql (
		'DROP DATABASE shop',
		'DROP DATABASE shop WITH (FORCE)',
		'ALTER DATABASE shop RENAME TO mine',
		'ALTER DATABASE shop SET TABLESPACE elsewhere',
		'ALTER DATABASE shop IS_TEMPLATE true',
		'ALTER DATABASE shop ALLOW_CONNECTIONS false',
		'CREATE DATABASE mine TEMPLATE shop')
	{
		my ($rc, $stdout, $stderr) = $node->psql('postgres', $sql, extra_params => [ '-U', $user ]);

		like($stderr, qr/must be owner|permission denied/, "$user: $sql");
		is(relay_pid($node, 'shop'), $pid, '... and the relay stays');
	}
}
$node->safe_psql('postgres', 'ALTER ROLE owner NOCREATEDB');
foreach my $sql ('ALTER DATABASE shop RENAME TO mine', 'CREATE DATABASE mine TEMPLATE shop')
{
	my ($rc, $stdout, $stderr) = $node->psql('postgres', $sql, extra_params => [ '-U', 'owner' ]);

	like($stderr, qr/permission denied/, "an owner without CREATEDB: $sql");
	is(relay_pid($node, 'shop'), $pid, '... and the relay stays');
}
$node->safe_psql('postgres', 'ALTER ROLE owner CREATEDB');

# A pass is under way here: databases elsewhere and here can be dropped
install_gate($node, 'shop');
$node->safe_psql('shop', q{INSERT INTO gates VALUES ('jobs'); SELECT outbox.record('x.gate')});
wait_at_gate($node, 'shop');
quick('DROP DATABASE tell', 'drop of another database in the middle of a pass', user => $ENV{PGUSER});
quick('ALTER DATABASE shop RENAME TO app', 'rename in the middle of a pass');
open_gate($node, 'app');
wait_drained($node, 'what a rename interrupted', 'app');
is_conserved($node, 'what a rename interrupted', db => 'app');
$node->safe_psql('app', q{INSERT INTO gates VALUES ('marked'); SELECT outbox.record('x.gate')});
wait_at_gate($node, 'app');
quick('DROP DATABASE app', 'drop in the middle of a pass');
wait_for($node, 'only one relay', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type LIKE 'outbox %' AND datname IS NOT NULL AND backend_type <> 'outbox launcher'});

# In the middle of a back off
$node->safe_psql('postgres', 'CREATE DATABASE app');
$node->safe_psql('postgres', 'CREATE DATABASE other');
$node->safe_psql('app', q{CREATE EXTENSION outbox; SELECT outbox.subscribe('all')});
works('app', 'a relay');
set_conf($node, 'outbox.relay_retry_min' => "'10min'", 'outbox.relay_retry_max' => "'10min'");
$node->safe_psql('app', q{ALTER TABLE outbox.routing RENAME TO hidden; SELECT outbox.record('x.trouble')});
wait_for($node, 'a relay that backs off', q{SELECT count(*) = 1 FROM outbox.stat_relay WHERE database = 'app' AND state = 'backoff'});
quick('DROP DATABASE other', 'drop of another database while a relay backs off', user => $ENV{PGUSER});
quick('DROP DATABASE app', 'drop while a relay backs off', user => $ENV{PGUSER});

# A database that nobody can connect to holds nobody up and fills no log
$node->safe_psql('postgres', 'CREATE DATABASE broken');
$node->safe_psql('postgres', 'CREATE DATABASE half_dropped');
wait_for($node, 'probes', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'outbox probe'});
my $path = $node->data_dir . '/base/' . $node->safe_psql('postgres', q{SELECT oid FROM pg_database WHERE datname = 'broken'});
rename("$path/PG_VERSION", "$path/PG_VERSION.away") or die "rename: $!";
$node->safe_psql('postgres', q{UPDATE pg_database SET datconnlimit = -2 WHERE datname = 'half_dropped'});
$node->stop;
$offset = -s $node->logfile;
$node->start;
$node->wait_for_log(qr/FATAL: .*\bbase\b/, $offset);
$node->safe_psql('postgres', 'CREATE DATABASE app');
$node->safe_psql('app', q{CREATE EXTENSION outbox; SELECT outbox.subscribe('all')});
works('app', 'a relay beside a broken database');
my $trouble = () = slurp_file($node->logfile, $offset) =~ /FATAL/g;
cmp_ok($trouble, '<=', 8, 'a broken database does not fill the log');
unlike(slurp_file($node->logfile, $offset), qr/half_dropped/, 'a half dropped one is left alone');
rename("$path/PG_VERSION.away", "$path/PG_VERSION") or die "rename: $!";

$node->stop;
done_testing();
