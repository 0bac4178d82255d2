# At the limits: numbers that run out, memory, settings of a database that
# would change what the relay does, publications, synchronous replication.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IPC::Run;
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $node = new_server('limits', init => { allows_streaming => 'logical' }, 'shared_buffers' => "'32MB'", 'max_connections' => 50);

sub sql
{
	return $node->safe_psql('postgres', @_);
}

sub fanned
{
	my ($seq, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return is(sql("CALL outbox.await_fanout($seq, '60s')"), 'fanned', $what);
}

# Memory of its own that the relay has, in kB
sub relay_memory
{
	my ($memory) = slurp_file('/proc/' . relay_pid($node) . '/status') =~ /^RssAnon:\s+(\d+)/m;

	return $memory;
}

sub pgbench
{
	my ($name, $script, @options) = @_;
	my $file = "$PostgreSQL::Test::Utils::tmp_check/114_$name.sql";
	my ($out, $err);

	unlink $file;
	append_to_file($file, $script);
	IPC::Run::run([ 'pgbench', '-n', @options, '-h', $node->host, '-p', $node->port, '-f', $file, 'postgres' ], '>', \$out, '2>', \$err)
	  or die "pgbench failed: $err";
	return;
}

sql(q{
	SELECT outbox.subscribe('all');
	SELECT outbox.subscribe('coalescing', coalescing => true);
	SELECT outbox.subscribe('filtered', filter => '$.n > 1')});
install_faults($node);

# Memory does not grow with the number of passes, of failures, of types, or of
# changes of the subscriptions.
SKIP:
{
	skip 'needs /proc', 6 unless -r '/proc/self/status';
	my $n = slow() ? 20 : 1;

	set_conf($node, 'outbox.batch_size' => 1, 'outbox.relay_retry_min' => "'1ms'", 'outbox.relay_retry_max' => "'1ms'");
	my %work = (
		'passes' => sub { sql("SELECT count(outbox.record('x', 's', '{\"n\": 2}')) FROM generate_series(1, 1500 * $n)") },
		'types' => sub { sql("SELECT count(outbox.record('x.' || gen_random_uuid(), 's')) FROM generate_series(1, 12000 * $n)") },
		'subscriptions' => sub { pgbench('subscriptions', q{
SELECT outbox.subscribe('changing', ARRAY['x.' || i]) FROM generate_series(1, 20) i;
SELECT outbox.record('x.1');
SELECT outbox.unsubscribe('changing');
}, '-t', 250 * $n) },
		'failures' => sub {
			sql(q{INSERT INTO public.faults VALUES (NULL, '40001', repeat('long ', 100000))});
			my $before = sql('SELECT failures FROM outbox.stat_relay');
			sql(q{SELECT count(outbox.record('x')) FROM generate_series(1, 4)});
			wait_for($node, 'failures', "SELECT failures > $before + 300 * $n FROM outbox.stat_relay");
			sql('DELETE FROM public.faults');
		});
	foreach my $what (sort keys %work)
	{
		set_conf($node, 'outbox.batch_size' => $what eq 'types' ? 200 : 1);
		$work{$what}->();
		wait_drained($node, "$what, to begin with");
		my $before = relay_memory();

		$work{$what}->();
		wait_drained($node, "$what, again");
		my $after = relay_memory();
		cmp_ok($after - $before, '<', 2048, "memory after twice as many $what: $before kB, $after kB");
	}
	set_conf($node, 'outbox.batch_size' => 200, 'outbox.relay_retry_min' => "'20ms'", 'outbox.relay_retry_max' => "'100ms'");

	# nor with the size of what is recorded: 400 MB in one pass
	my $before = relay_memory();
	sql(q{SELECT count(outbox.record('x.large', i::text, jsonb_build_object('n', i, 'text', repeat(md5(i::text), 131072)))) FROM generate_series(1, 100) i});
	wait_drained($node, '100 payloads of 4 MB');
	my ($peak) = slurp_file('/proc/' . relay_pid($node) . '/status') =~ /^VmHWM:\s+(\d+)/m;
	cmp_ok($peak, '<', 160 * 1024, "peak of the relay: $peak kB");
	cmp_ok(relay_memory() - $before, '<', 16384, 'which it has given back');
}
is_conserved($node, 'memory', changing => 1);
sql('DELETE FROM outbox.jobs; DELETE FROM outbox.events; VACUUM outbox.events, outbox.jobs');

# Numbers run out: the one who records is told, nobody else is hurt.
foreach my $last (2147483646, 4294967295, 9007199254740991, 9223372036854775800)
{
	sql("SELECT setval('outbox.events_seq_seq', $last), setval('outbox.jobs_id_seq', $last)");
	my $seq = sql(q{SELECT max(outbox.record('x', 's')) FROM generate_series(1, 3)});

	fanned($seq, "numbers after $last");
}
sql(q{SELECT setval('outbox.events_seq_seq', 9223372036854775805)});
my $seq = sql(q{SELECT max(outbox.record('x', 's')) FROM generate_series(1, 2)});
is($seq, '9223372036854775807', 'the last number');
fanned($seq, 'the last event');
my ($ret, $out, $err) = $node->psql('postgres', "\\set VERBOSITY verbose\nSELECT outbox.record('x')");
like($err, qr/ERROR:  2200H: /, 'no more events');
sql(q{SELECT setval('outbox.events_seq_seq', 1000), setval('outbox.jobs_id_seq', 1000)});
fanned(sql(q{SELECT outbox.record('x')}), 'the relay has not minded');
sql(q{SELECT setval('outbox.jobs_id_seq', 9223372036854775800)});
my $offset = -s $node->logfile;
sql(q{SELECT count(outbox.record('x')) FROM generate_series(1, 20)});
$node->wait_for_log(qr/nextval: reached maximum value of sequence/, $offset);
wait_for($node, 'some tries', 'SELECT max(tries) > 6 FROM outbox.events');
is(sql('SELECT max(failures), count(poisoned_at) FROM outbox.events'), '0|0', 'no more numbers for jobs: charged to nobody');
sql(q{SELECT setval('outbox.jobs_id_seq', 1000000)});
wait_drained($node, 'with numbers again');
is_conserved($node, 'numbers');

# Counters at their limit
sql(q{SELECT outbox.stop()});
sql(q{SELECT count(outbox.record('x.counters')) FROM generate_series(1, 50)});
sql(q{UPDATE outbox.events SET tries = 32767, failures = 32767 WHERE seq = (SELECT min(seq) FROM outbox.events WHERE fanned_out_at IS NULL)});
sql(q{SELECT outbox.start()});
wait_drained($node, 'a row with the highest counters');
is(sql(q{SELECT count(DISTINCT fanned_out_at) FROM outbox.events WHERE type = 'x.counters'}), 1, 'in one pass with the others');

# Settings of the database, or of the role, do not reach the relay.
my @settings = (
	"default_transaction_isolation = 'serializable'", "default_transaction_isolation = 'repeatable read'", 'default_transaction_read_only = on',
	'default_transaction_deferrable = on', 'statement_timeout = 1', 'lock_timeout = 1', 'idle_in_transaction_session_timeout = 1',
	"search_path = evil", 'row_security = off', 'session_replication_role = replica', 'enable_indexscan = off', 'enable_tidscan = off', 'enable_nestloop = off',
	'plan_cache_mode = force_custom_plan', 'standard_conforming_strings = off', "backslash_quote = on", "DateStyle = 'SQL, DMY'", "IntervalStyle = 'iso_8601'",
	"TimeZone = 'Pacific/Apia'", "bytea_output = 'escape'", 'extra_float_digits = -15', "default_tablespace = 'missing'", 'temp_file_limit = 0', 'work_mem = 64',
	"default_table_access_method = 'missing'", 'transform_null_equals = on', 'array_nulls = off', 'quote_all_identifiers = on', 'jit = on', "log_statement = 'all'",
	"client_encoding = 'LATIN1'", "synchronous_commit = 'off'", 'track_activities = off', 'exit_on_error = on', 'check_function_bodies = off', "xmlbinary = 'hex'",
	'client_min_messages = debug5', 'constraint_exclusion = on', 'from_collapse_limit = 1', 'cursor_tuple_fraction = 0', "bytea_output = 'hex'",
	"lc_messages = 'C'", "application_name = 'evil'", "role = 'low'", 'max_parallel_workers_per_gather = 8');
push @settings, 'transaction_timeout = 1', 'restrict_nonsystem_relation_kind = \'view\'' if $node->pg_version->major >= 17;
sql('CREATE ROLE low; CREATE SCHEMA evil; CREATE TABLE evil.events (seq bigint)');
my $events = 0;
foreach my $setting (@settings)
{
	# 19 has no other setting of it
	next if $setting =~ /^standard_conforming_strings/ && $node->pg_version->major >= 19;
	$node->safe_psql('template1', "ALTER DATABASE postgres SET $setting");
	$node->safe_psql('template1', q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'outbox relay'});
	# the writer's own sessions are to work all the same
	local $ENV{PGOPTIONS} = '-c statement_timeout=0 -c lock_timeout=0 -c idle_in_transaction_session_timeout=0'
	  . ' -c default_transaction_read_only=off -c role=none' . ($node->pg_version->major >= 17 ? ' -c transaction_timeout=0' : '');
	my $seq = sql(q{SELECT outbox.record('x.setting', 's', '{"n": 2}')});
	fanned($seq, $setting);
	$events++;
	$node->safe_psql('template1', 'ALTER DATABASE postgres RESET ALL');
}
is(sql(q{SELECT count(*) FROM outbox.events WHERE type = 'x.setting' AND fanout ?& '{all,coalescing,filtered}'}), $events, 'each has all its jobs');
is_conserved($node, 'settings of the database');

# Many writers whose transactions are serializable: the relay adds no failure.
$node->safe_psql('template1', q{ALTER DATABASE postgres SET default_transaction_isolation = 'serializable'});
$offset = -s $node->logfile;
pgbench('serializable', q{SELECT outbox.record('x.serializable', 's');}, '-c', 8, '-t', 100);
$node->safe_psql('template1', q{ALTER DATABASE postgres RESET ALL});
wait_drained($node, 'serializable writers');
unlike(substr(slurp_file($node->logfile), $offset), qr/could not serialize/, 'no serialization failure');

# Poisoned events that many put back at once, in opposite orders, beside passes
# that coalesce the same subjects in opposite orders
sql(q{INSERT INTO public.faults VALUES (NULL, '23514')});
set_conf($node, 'outbox.relays' => 3, 'outbox.batch_size' => 20);
sql(q{SELECT outbox.stop()});
sql(q{SELECT count(outbox.record('x.deadlock', 's/' || i % 7)) FROM generate_series(1, 200) i; UPDATE outbox.events SET poisoned_at = now(), failures = 5 WHERE type = 'x.deadlock'; DELETE FROM public.faults; SELECT outbox.start()});
pgbench('deadlock', q{
SELECT outbox.requeue_many(ARRAY(SELECT seq FROM outbox.poisoned ORDER BY seq * CASE WHEN :client_id % 2 = 0 THEN 1 ELSE -1 END LIMIT 10));
SELECT outbox.record('x.beside', 's/' || :client_id);
}, '-c', 8, '-t', 20);
wait_drained($node, 'requeued by many');
is(sql('SELECT count(*) FROM outbox.poisoned'), 0, 'none is left');
unlike(slurp_file($node->logfile), qr/deadlock detected/, 'without a deadlock');
set_conf($node, 'outbox.relays' => 1, 'outbox.batch_size' => 200);
is_conserved($node, 'requeued by many');

# All tables may be published: each row can be identified.
sql(q{CREATE PUBLICATION everything FOR ALL TABLES});
fanned(sql(q{SELECT outbox.record('x.published')}), 'an event whose table is published');
is(sql(q{SELECT outbox.subscribe('published', '{y}') > 0, outbox.pause('published'), outbox.rename('published', 'renamed'), outbox.unsubscribe('renamed')}), 't|t|t|t', 'subscriptions too');
is(sql(q{SELECT outbox.stop()}), 't', 'stop');
is(sql(q{SELECT outbox.start()}), 't', 'start');
my $bad = sql(q{INSERT INTO public.faults SELECT outbox.record('x'), '23514' RETURNING seq});
is(sql("CALL outbox.await_fanout($bad, '60s')"), 'poisoned', 'poison');
is(sql("SELECT outbox.discard($bad)"), 't', 'and discard');
sql('DROP PUBLICATION everything; DELETE FROM public.faults');

# outbox.synchronous_pass: a standby that never answers holds up the commits of
# those who wait for it, and the relay's unless it is told not to wait.
wait_drained($node, 'before');
set_conf($node, 'outbox.synchronous_pass' => 'off');
set_conf($node, 'synchronous_standby_names' => "'nobody'");
my $local = 'SET synchronous_commit = local; ';
$seq = sql($local . q{SELECT outbox.record('x.local')});
is(sql($local . "CALL outbox.await_fanout($seq, '60s')"), 'fanned', 'outbox.synchronous_pass = off does not wait for a standby');
settled($node);
set_conf($node, 'outbox.synchronous_pass' => 'on');
$seq = sql($local . q{SELECT outbox.record('x.local')});
wait_for($node, 'the relay to wait', q{SELECT wait_event = 'SyncRep' FROM pg_stat_activity WHERE backend_type = 'outbox relay'});
is(sql("SELECT fanned_out_at IS NULL FROM outbox.events WHERE seq = $seq"), 't', 'on does');
# a fast shutdown does not wait for it
my $start = time;
$node->stop('fast');
cmp_ok(time - $start, '<', 30, 'a fast shutdown while the relay waits for a standby');
$node->append_conf('postgresql.conf', "synchronous_standby_names = ''");
$node->start;
wait_drained($node, 'after it');
is_conserved($node, 'limits', changing => 1, given_up => q{last_error IS NOT NULL AND fanout = '{}'});

$node->stop;
done_testing();
