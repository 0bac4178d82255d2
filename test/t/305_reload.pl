# Every setting takes effect at a reload, or says that it does not.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('reload');

sub wait_databases
{
	my ($databases, $what) = @_;

	wait_for($node, $what, qq{
		SELECT COALESCE(string_agg(datname, ' ' ORDER BY datname COLLATE "C"), '') = '$databases'
		FROM pg_stat_activity WHERE backend_type = 'outbox relay'});
	pass($what);
	return;
}

sub works
{
	my ($db, $what) = @_;
	my $seq = $node->safe_psql($db, q{SELECT outbox.record('x.works')});

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is($node->safe_psql($db, "CALL outbox.await_fanout($seq, '60s')"), 'fanned', $what);
	return;
}

my @databases = ('plain', 'Mixed', 'with space', 'with,comma', 'with"quote');
foreach my $name (@databases)
{
	(my $quoted = $name) =~ s/"/""/g;
	$node->safe_psql('postgres', qq{CREATE DATABASE "$quoted"});
	$node->safe_psql($name, q{CREATE EXTENSION outbox; SELECT outbox.subscribe('all')});
}
$node->safe_psql('postgres', q{SELECT outbox.subscribe('all')});
wait_databases('Mixed plain postgres with space with"quote with,comma', 'every database by default');

# Lists
foreach my $case (
	[ q{''}, '', 'none' ],
	[ q{'plain'}, 'plain', 'one' ],
	[ q{'PLAIN'}, 'plain', 'a name folded as SQL does' ],
	[ q{' plain ,plain,  plain'}, 'plain', 'duplicates and spaces' ],
	[ q{'Mixed'}, '', 'a name that is folded and then unknown' ],
	[ q{'"Mixed",nowhere'}, 'Mixed', 'a quoted name beside an unknown one' ],
	[ q{'"with space", "with,comma"'}, 'with space with,comma', 'names of odd characters' ],
	[ q{'"with""quote",postgres'}, 'postgres with"quote', 'a name with a quote' ],
	[ q{'*'}, 'Mixed plain postgres with space with"quote with,comma', 'every one again' ])
{
	my ($list, $there, $what) = @$case;

	set_conf($node, 'outbox.databases' => $list);
	wait_databases($there, "outbox.databases: $what");
}
works($_, "a relay in $_") foreach @databases, 'postgres';

# What is left out waits, and is fanned out when it is let in again
set_conf($node, 'outbox.databases' => q{'postgres'});
wait_databases('postgres', 'one database');
$node->safe_psql('plain', q{SELECT outbox.record('x.left.out') FROM generate_series(1, 5)});
works('postgres', 'the one that is listed works');
is($node->safe_psql('plain', 'SELECT count(*) FROM outbox.events WHERE fanned_out_at IS NULL'), 5, 'the one that is left out records');
set_conf($node, 'outbox.databases' => q{'*'});
wait_drained($node, 'let in again', 'plain');
is_conserved($node, 'let in again', db => 'plain');

# A list that is none
my $offset = -s $node->logfile;
$node->append_conf('postgresql.conf', q{outbox.databases = 'plain,,"'});
$node->reload;
$node->wait_for_log(qr/invalid value for parameter "outbox.databases"/, $offset);
works('postgres', 'a list that is none changes nothing');
$node->append_conf('postgresql.conf', q{outbox.databases = '*'});
$node->reload;

# Number of relays
foreach my $n (3, 1, 0, 2, 1)
{
	set_conf($node, 'outbox.relays' => $n);
	wait_for($node, "$n relays", qq{SELECT count(*) = $n FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = 'plain'});
	wait_for($node, "$n relays", qq{SELECT count(*) = $n FROM pg_stat_activity WHERE backend_type = 'outbox relay' AND datname = 'postgres'});
	pass("outbox.relays = $n");
	works('plain', "$n relays work") if $n > 0;
}
$node->safe_psql('postgres', q{SELECT outbox.record('x.many') FROM generate_series(1, 2000)});
foreach my $n (4, 2, 5, 1)
{
	$node->safe_psql('postgres', q{SELECT outbox.record('x.many') FROM generate_series(1, 500)});
	set_conf($node, 'outbox.relays' => $n);
}
wait_drained($node, 'relays that come and go');
is_conserved($node, 'relays that come and go');
unlike(slurp_file($node->logfile, $offset), qr/ERROR|FATAL:  (?!terminating background worker "outbox)/, 'no trouble in the log');

# Every setting by itself
my $settings = $node->safe_psql('postgres', q{
	SELECT name, context, vartype, COALESCE(min_val, ''), COALESCE(max_val, '') FROM pg_settings WHERE name LIKE 'outbox.%' ORDER BY name});
foreach my $line (split /\n/, $settings)
{
	my ($name, $context, $type, $min, $max) = split /\|/, $line, -1;
	my $value = $type eq 'integer' ? $min + 1 : $type eq 'bool' ? 'on' : "'name'";

	$offset = -s $node->logfile;
	$value = 3 if $name eq 'outbox.relays';
	$value = '101ms' if $name eq 'outbox.sweep_interval';
	$value = "'*'" if $name eq 'outbox.databases';
	$node->safe_psql('postgres', "ALTER SYSTEM SET $name = " . ($value =~ /^'/ ? $value : "'$value'"));
	$node->reload;
	if ($context eq 'postmaster')
	{
		$node->wait_for_log(qr/parameter "\Q$name\E" cannot be changed without restarting the server/, $offset);
		pass("$name says that it needs a restart");
	}
	else
	{
		is($context, 'sighup', "$name is read at a reload");
		works('postgres', "$name changed");
	}
	if ($type eq 'integer')
	{
		foreach my $bad ($min - 1, $max + 1, "'many'")
		{
			isnt($node->psql('postgres', "ALTER SYSTEM SET $name = $bad", stderr => \my $stderr), 0, "$name = $bad is refused");
		}
	}
	$node->safe_psql('postgres', "ALTER SYSTEM RESET $name");
	$node->reload;
}
works('postgres', 'a relay after all this');
isnt($node->psql('postgres', 'SET outbox.relays = 2', stderr => \my $stderr), 0, 'no session sets what the workers do');
isnt($node->psql('postgres', q{ALTER SYSTEM SET outbox.no_such_setting = 'x'}, stderr => \$stderr), 0, 'an unknown setting is refused');
isnt($node->psql('postgres', q{SET outbox.no_such_setting = 'x'}, stderr => \$stderr), 0, 'in a session too');

# A reload at every moment of a relay's life
foreach my $i (1 .. 20)
{
	my $pid = relay_pid($node) // 0;

	$node->safe_psql('postgres', "SELECT outbox.record('x.storm'), pg_terminate_backend($pid), pg_reload_conf()");
	$node->reload;
}
wait_drained($node, 'reloads');
is_conserved($node, 'reloads');

$node->stop;
done_testing();
