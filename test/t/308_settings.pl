# A database or a role may have any settings: the relay is who it is and works
# as ever, since it pins its own.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('settings');
my $version = int($node->safe_psql('postgres', 'SHOW server_version_num') / 10000);
my $user = $node->safe_psql('postgres', 'SELECT current_user');

# What a hostile, or only odd, database has
my %hostile = (
	search_path => 'evil, pg_catalog',
	row_security => 'off',
	backslash_quote => 'on',
	client_encoding => 'LATIN1',
	DateStyle => 'German, DMY',
	IntervalStyle => 'iso_8601',
	TimeZone => 'Pacific/Apia',
	extra_float_digits => '-15',
	bytea_output => 'escape',
	array_nulls => 'off',
	transform_null_equals => 'on',
	quote_all_identifiers => 'on',
	xmloption => 'document',
	temp_file_limit => '0',
	work_mem => '64kB',
	session_replication_role => 'replica',
	default_tablespace => 'missing',
	temp_tablespaces => 'missing',
	default_table_access_method => 'missing',
	default_transaction_isolation => 'serializable',
	default_transaction_read_only => 'on',
	default_transaction_deferrable => 'on',
	statement_timeout => '1ms',
	lock_timeout => '1ms',
	idle_in_transaction_session_timeout => '1ms',
	idle_session_timeout => '1ms',
	plan_cache_mode => 'force_custom_plan',
	jit => 'on',
	jit_above_cost => '0',
	enable_indexscan => 'off',
	enable_indexonlyscan => 'off',
	enable_tidscan => 'off',
	enable_nestloop => 'off',
	enable_sort => 'off',
	max_parallel_workers_per_gather => '4',
	parallel_setup_cost => '0',
	parallel_tuple_cost => '0',
	log_statement => 'all',
	exit_on_error => 'on',
	check_function_bodies => 'off');
$hostile{standard_conforming_strings} = 'off' if $version < 19;
$hostile{force_parallel_mode} = 'on' if $version < 16;
$hostile{debug_parallel_query} = 'on' if $version >= 16;
$hostile{transaction_timeout} = '1ms' if $version >= 17;
$hostile{restrict_nonsystem_relation_kind} = "view, foreign-table" if $version >= 17;

# Those that are not for the relay to pin
my %free = map { $_ => 1 } qw(work_mem jit_above_cost parallel_setup_cost parallel_tuple_cost
  log_statement check_function_bodies force_parallel_mode debug_parallel_query xmloption);

# Our own sessions are not to suffer from it.
$ENV{PGOPTIONS} = join ' ', map { "-c $_" } (
	'statement_timeout=0', 'lock_timeout=0', 'idle_in_transaction_session_timeout=0', 'idle_session_timeout=0',
	'default_transaction_isolation=read\\ committed', 'default_transaction_read_only=off', 'default_transaction_deferrable=off',
	'search_path=public', 'session_replication_role=origin', 'exit_on_error=off', 'row_security=on', 'client_encoding=UTF8',
	'default_tablespace=', 'default_table_access_method=heap', 'temp_tablespaces=', 'temp_file_limit=-1', 'IntervalStyle=postgres',
	($version >= 16 ? 'debug_parallel_query=off' : 'force_parallel_mode=off'),
	($version >= 17 ? ('transaction_timeout=0', 'restrict_nonsystem_relation_kind=') : ()));

$node->safe_psql('postgres', 'CREATE ROLE plain LOGIN');
$node->safe_psql('postgres', 'CREATE DATABASE app OWNER plain');
$node->safe_psql('app', qq{
	CREATE EXTENSION outbox;
	CREATE SCHEMA evil;
	CREATE TABLE evil.events (LIKE outbox.events);
	CREATE FUNCTION evil.equal(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS \$\$BEGIN RAISE 'evil'; END\$\$;
	CREATE OPERATOR evil.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = evil.equal);
	CREATE FUNCTION evil.unnest(anyarray) RETURNS SETOF anyelement LANGUAGE plpgsql AS \$\$BEGIN RAISE 'evil'; END\$\$;
	CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS \$\$BEGIN RAISE 'evil'; END\$\$;
	CREATE TABLE public.seen (name text, value text);
	CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS \$\$
	BEGIN
		DELETE FROM public.seen;
		INSERT INTO public.seen VALUES ('who', session_user || ' ' || current_user),
			('isolation', pg_catalog.current_setting('transaction_isolation')),
			('read only', pg_catalog.current_setting('transaction_read_only'));
		INSERT INTO public.seen SELECT s.name, s.setting FROM pg_catalog.pg_settings s
			WHERE lower(s.name) OPERATOR(pg_catalog.=) ANY ('{@{[ join ',', map { lc } grep { !$free{$_} } sort keys %hostile ]}}');
		RETURN NULL;
	END \$\$;
	CREATE TRIGGER note AFTER INSERT ON outbox.jobs FOR EACH STATEMENT EXECUTE FUNCTION public.note();
	ALTER TABLE outbox.jobs ENABLE ALWAYS TRIGGER note;
	SELECT outbox.subscribe('all', scope => NULL);
	SELECT outbox.subscribe('filtered', filter => '\$.n ? (@ > 5)');
	SELECT outbox.subscribe('merged', coalescing => true)});

# Have a relay start under the present settings, and work; return what it saw.
sub seen
{
	my ($what) = @_;
	my $pid = relay_pid($node, 'app') // 0;
	my $session = $node->background_psql('app', on_error_stop => 0);
	my $offset = -s $node->logfile;

	# settings that name what is missing are warned about at the start
	$session->query('SELECT');
	$session->{stderr} = '';
	$session->query_safe("SET SESSION AUTHORIZATION $user; SET ROLE NONE");
	$session->query_safe("SELECT pg_terminate_backend($pid)") if $pid;
	$session->query_safe(q{SELECT outbox.record('x.settings', 'subject ' || i % 7, jsonb_build_object('n', i))
		FROM generate_series(1, 300) i});
	$session->query_safe('SELECT pg_sleep(0.01)')
	  until $session->query_safe(q{SELECT NOT EXISTS (SELECT FROM outbox.events WHERE fanned_out_at IS NULL)}) eq 't';
	pass("$what: everything is fanned out");
	is($session->query_safe(q{SELECT count(*) FROM outbox.events WHERE tries > 0}), 0, "$what: at the first try");
	is($session->query_safe(q{SELECT count(*), count(*) FILTER (WHERE fanout ? 'all'), count(*) FILTER (WHERE fanout ? 'filtered')
		FROM outbox.events}), '300|300|295', "$what: to whom it should");
	unlike(slurp_file($node->logfile, $offset), qr/outbox relay.*ERROR|failed to fan out/, "$what: no trouble in the log");

	my $seen = $session->query_safe('SELECT name, value FROM public.seen ORDER BY name');
	$session->query_safe('DELETE FROM outbox.jobs; DELETE FROM outbox.events');
	$session->quit;
	return $seen;
}

my $plain = seen('no settings');
like($plain, qr/^who\|\Q$user $user\E$/m, 'the relay is the owner of the extension');
like($plain, qr/^isolation\|read committed$/m, 'its transactions are as it wants them');
like($plain, qr/^search_path\|pg_catalog, pg_temp$/m, 'and its search_path');

# Settings of the database
foreach my $name (sort keys %hostile)
{
	my $value = $name eq 'search_path' ? $hostile{$name} : "'$hostile{$name}'";

	$node->safe_psql('postgres', "ALTER DATABASE app SET $name = $value");
}
is(seen('settings of the database'), $plain, 'settings of the database change nothing');
$node->safe_psql('postgres', 'ALTER DATABASE app RESET ALL');

# Settings of the role, and of the role in the database
foreach my $for ("ROLE $user", "ROLE $user IN DATABASE app")
{
	foreach my $name (sort keys %hostile)
	{
		my $value = $name eq 'search_path' ? $hostile{$name} : "'$hostile{$name}'";

		$node->safe_psql('postgres', "ALTER $for SET $name = $value");
	}
	is(seen("settings of $for"), $plain, "settings of $for change nothing");
	$node->safe_psql('postgres', "ALTER $for RESET ALL");
}

# Whom the owner of the database would like it to be
foreach my $setting ('role', 'session_authorization')
{
	my ($rc, $stdout, $stderr);
	{
		local $ENV{PGOPTIONS} = '';
		($rc, $stdout, $stderr) = $node->psql('postgres', "ALTER DATABASE app SET $setting = 'plain'",
			extra_params => [ '-U', 'plain' ]);
	}
	is("$rc$stderr", '0', "the owner of the database sets $setting");
	is(seen("$setting of the database"), $plain, "$setting of the database changes nothing");
}
$node->safe_psql('postgres', 'ALTER DATABASE app RESET ALL');

# Settings of the server, read again while the relay is there; not those under
# which nobody can connect
$node->append_conf('postgresql.conf', "$_ = '$hostile{$_}'")
  foreach grep { !/^(?:transaction_timeout|default_table|exit_on_error|session_repl|client_enc|temp_file|default_tablesp|temp_tablesp|search_path)/ } sort keys %hostile;
$node->append_conf('postgresql.conf', "search_path = 'evil, pg_catalog'");
$node->reload;
is(seen('settings of the server'), $plain, 'settings of the server change nothing');

$node->stop;
done_testing();
