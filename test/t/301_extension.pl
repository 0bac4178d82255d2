# The relay comes and goes with the extension, however that is created and
# dropped, and leaves nothing in the log.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('extension', extension => 0);

# Workers of ours, as "type|name|database|role"
sub workers
{
	return $node->safe_psql('postgres', q{
		SELECT concat_ws('|', backend_type, application_name, datname, usename)
		FROM pg_stat_activity WHERE backend_type LIKE 'outbox %' ORDER BY 1});
}

# Databases that have a relay
sub wait_databases
{
	my ($databases, $what) = @_;

	wait_for($node, $what, qq{
		SELECT COALESCE(string_agg(datname, ' ' ORDER BY datname), '') = '$databases'
			AND NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'outbox probe')
		FROM pg_stat_activity WHERE backend_type = 'outbox relay'});
	pass($what);
	return;
}

# An event recorded now gets a job.
sub works
{
	my ($db, $what) = @_;

	$node->safe_psql($db, q{SELECT outbox.subscribe('all')});
	my $seq = $node->safe_psql($db, q{SELECT outbox.record('x.works')});
	is($node->safe_psql($db, "CALL outbox.await_fanout($seq, '60s')"), 'fanned', $what);
	return;
}

wait_databases('', 'no relay where there is no extension');
like(workers(), qr/^outbox launcher\|outbox launcher\b/, 'but a launcher');

my $log = -s $node->logfile;
$node->safe_psql('postgres', 'CREATE DATABASE a');
$node->safe_psql('postgres', 'CREATE DATABASE b');
$node->safe_psql('postgres', 'CREATE EXTENSION outbox');
wait_databases('postgres', 'a relay where the extension was created');
like(workers(), qr/^outbox relay\|outbox relay for postgres\|postgres\|\w+$/m, 'it has a name');
works('postgres', 'it works');

# Creations and drops that are rolled back.  Whatever comes of them has come
# when the launcher has seen to something later.
my $pid = relay_pid($node);
$node->safe_psql('a', 'BEGIN; CREATE EXTENSION outbox; ROLLBACK');
$node->safe_psql('postgres', 'BEGIN; DROP EXTENSION outbox CASCADE; ROLLBACK');
$node->safe_psql('postgres', 'BEGIN; SAVEPOINT s; DROP EXTENSION outbox CASCADE; ROLLBACK TO s; COMMIT');
$node->safe_psql('b', 'CREATE EXTENSION outbox');
wait_databases('b postgres', 'no relay where the creation was rolled back');
is(relay_pid($node), $pid, 'the same relay where the drop was rolled back');
works('postgres', 'which works');

# Dropped
$node->safe_psql('b', 'DROP EXTENSION outbox');
wait_databases('postgres', 'no relay where the extension was dropped');
$node->safe_psql('b', 'CREATE EXTENSION outbox');
wait_databases('b postgres', 'one where it was created again');
works('b', 'which works');

# It works as whoever owns the extension, also when that role cannot log in.
# The roles that make jobs are noted by a trigger.
sub made_by
{
	my ($role, $what) = @_;

	wait_for($node, "a relay of $role", q{
		SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = 'b'});
	works('b', $what);
	is($node->safe_psql('b', 'SELECT DISTINCT who FROM made_by'), "$role|$role", "$what: as $role");
	$node->safe_psql('b', 'TRUNCATE made_by');
	return;
}

$node->safe_psql('b', 'DROP EXTENSION outbox CASCADE');
wait_databases('postgres', 'no relay again');
$node->safe_psql('b', q{
	CREATE ROLE boss SUPERUSER;
	CREATE ROLE heir SUPERUSER LOGIN;
	CREATE TABLE made_by (who text);
	ALTER TABLE made_by OWNER TO boss;
	CREATE FUNCTION made_by() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO made_by VALUES (session_user || '|' || current_user);
		RETURN NULL;
	END $$;
	ALTER FUNCTION made_by() OWNER TO boss;
	SET ROLE boss;
	CREATE EXTENSION outbox;
	CREATE TRIGGER made_by AFTER INSERT ON outbox.jobs FOR EACH STATEMENT EXECUTE FUNCTION public.made_by()});
$node->safe_psql('b', q{ALTER FUNCTION made_by() SET search_path = public});
made_by('boss', 'an owner who cannot log in');
$pid = relay_pid($node, 'b');
$node->safe_psql('b', 'REASSIGN OWNED BY boss TO heir');
wait_for($node, 'another relay', qq{
	SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = 'b' AND pid <> $pid});
made_by('heir', 'another owner');
my $log_reassigned = -s $node->logfile;
$node->safe_psql('b', 'DROP OWNED BY heir');
wait_databases('postgres', 'no relay after DROP OWNED');

# Prepared
$node->safe_psql('a', q{BEGIN; CREATE EXTENSION outbox; PREPARE TRANSACTION 'create'});
$node->safe_psql('b', 'CREATE EXTENSION outbox');
wait_databases('b postgres', 'no relay where the creation is prepared only');
$node->safe_psql('a', q{COMMIT PREPARED 'create'});
wait_databases('a b postgres', 'one when that is committed');
$node->safe_psql('a', q{BEGIN; DROP EXTENSION outbox; PREPARE TRANSACTION 'drop'});
$node->safe_psql('a', q{ROLLBACK PREPARED 'drop'});
works('a', 'a drop that is prepared and rolled back changes nothing');
$node->safe_psql('a', q{BEGIN; DROP EXTENSION outbox CASCADE; PREPARE TRANSACTION 'drop'});
$node->safe_psql('a', q{COMMIT PREPARED 'drop'});
wait_databases('b postgres', 'no relay after a drop that was prepared and committed');

# Again and again, at every moment of a relay's start
foreach my $i (1 .. 20)
{
	$node->safe_psql('b', 'BEGIN; DROP EXTENSION outbox CASCADE; ROLLBACK') if $i % 3 == 0;
	$node->safe_psql('b', 'DROP EXTENSION outbox CASCADE');
	$node->safe_psql('b', 'BEGIN; CREATE EXTENSION outbox; ROLLBACK') if $i % 4 == 0;
	$node->safe_psql('b', 'CREATE EXTENSION outbox');
	works('b', "cycle $i") if $i % 2 == 0;
}
$node->safe_psql('b', 'BEGIN; DROP EXTENSION outbox CASCADE; CREATE EXTENSION outbox; COMMIT');
works('b', 'dropped and created in one transaction');
wait_databases('b postgres', 'one relay after all this');
is_conserved($node, 'a database whose extension stays');
is_conserved($node, 'a database whose extension comes and goes', db => 'b');

# In the middle of a pass
install_gate($node, 'b');
$node->safe_psql('b', q{INSERT INTO gates VALUES ('marked'); SELECT outbox.record('x.gate')});
my $passing = wait_at_gate($node, 'b');
my $dropper = $node->background_psql('b');
$dropper->query_until(qr/begin/, "\\echo begin\nDROP EXTENSION outbox CASCADE;\n");
wait_for($node, 'the drop waits', q{
	SELECT count(*) = 1 FROM pg_stat_activity WHERE query LIKE 'DROP EXTENSION%' AND wait_event_type = 'Lock'});
pass('a drop waits for a pass');
open_gate($node, 'b');
$dropper->quit;
wait_databases('postgres', 'then the relay goes');
$node->safe_psql('postgres', 'DROP EXTENSION outbox CASCADE');
wait_databases('', 'no relay at last');

my $said = slurp_file($node->logfile, $log_reassigned);
unlike($said, qr/\b(FATAL|ERROR|PANIC)\b/, 'relays come and go without a word');
unlike(slurp_file($node->logfile, $log), qr/exited with exit code (?!1\b)|terminated by signal/, 'and none crashed');

$node->stop;
done_testing();
