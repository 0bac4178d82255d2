# Promise P9: those who write never wait for the relay and never fail because
# of it: no relay, one that hangs, the library not preloaded any more.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('write_path');

sub sql
{
	return $node->safe_psql('postgres', @_);
}

# Every way to write, under a limit that nobody who waits for a relay would
# keep.  Returns what was said on the way.
sub write_all
{
	my ($what) = @_;
	my ($ret, $out, $err) = $node->psql(
		'postgres', qq{
		SET statement_timeout = '20s';
		SET lock_timeout = '10s';
		SELECT outbox.record('x.record', '$what');
		INSERT INTO outbox.events (type, subject) VALUES ('x.insert', '$what');
		INSERT INTO outbox.events (type, subject) SELECT 'x.insert', '$what' FROM generate_series(1, 300);
		INSERT INTO watched (note) VALUES ('$what');
		UPDATE watched SET note = note || '!';
		DELETE FROM watched;
		BEGIN;
		SELECT outbox.record('x.record', '$what');
		SAVEPOINT s;
		SELECT outbox.record('x.gone', '$what');
		ROLLBACK TO s;
		COMMIT;
		BEGIN; SELECT outbox.record('x.gone', '$what'); ROLLBACK;
		BEGIN; SELECT outbox.record('x.prepared', '$what'); PREPARE TRANSACTION 'p'; COMMIT PREPARED 'p';
		SELECT outbox.requeue(1);
		COPY outbox.events (type, subject) FROM stdin;
x.copy	$what
\\.
}, on_error_stop => 1);

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is($ret, 0, "$what: writers go on") or diag($err);
	return $err;
}

sql(q{
	SELECT outbox.subscribe('all');
	CREATE TABLE watched (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text);
	SELECT outbox.capture('watched', 'watched.{op}')});
install_gate($node);
is(write_all('as usual'), '', 'without a word');
wait_drained($node, 'as usual');

# A relay that stands in the middle of a pass, its rows locked
foreach my $point (qw(jobs marked commit))
{
	sql("INSERT INTO public.gates VALUES ('$point')");
	sql(q{SELECT outbox.record('x')});
	wait_at_gate($node);
	is(write_all("a relay that stands at $point"), '', 'without a word');
	open_gate($node);
	wait_drained($node, "it goes on at $point");
}

# A relay that does not react at all
my $pid = relay_pid($node);
kill 'STOP', $pid;
is(write_all('a relay that is stopped'), '', 'without a word');
kill 'CONT', $pid;
wait_drained($node, 'it goes on');

# No relay
foreach my $setting ([ 'outbox.relays', 0, 1 ], [ 'outbox.databases', "''", "'*'" ], [ 'outbox.databases', "'another'", "'*'" ])
{
	my ($name, $off, $on) = @$setting;

	set_conf($node, $name => $off);
	wait_for($node, 'no relay', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'outbox relay'});
	is(write_all("$name = $off" =~ s/'//gr), '', 'without a word');
	is(sql('SELECT count(*) > 300 FROM outbox.events WHERE fanned_out_at IS NULL'), 't', 'events wait');
	set_conf($node, $name => $on);
	wait_drained($node, 'a relay comes back');
}
sql('SELECT outbox.stop()');
is(write_all('stopped'), '', 'without a word');
settled($node);
is(sql('SELECT count(*) > 300 FROM outbox.events WHERE fanned_out_at IS NULL'), 't', 'events wait');
is(sql('SELECT outbox.start()'), 't', 'started');
wait_drained($node, 'and are fanned out');

# The library is not preloaded any more: one warning a session.
my $prepared = sql(q{BEGIN; SELECT outbox.record('x.before'); PREPARE TRANSACTION 'before'});
$node->append_conf('postgresql.conf', "shared_preload_libraries = ''");
$node->restart;
my $said = write_all('not preloaded');
is(scalar(() = $said =~ /WARNING/g), 1, 'one warning a session');
like($said, qr/WARNING:  outbox is not loaded via "shared_preload_libraries"\nDETAIL:  Events are recorded but not fanned out/, 'says what it means');
is(sql(q{INSERT INTO watched (note) VALUES ('not preloaded') RETURNING note}) , 'not preloaded', 'a captured table alone');
like(($node->psql('postgres', q{CALL outbox.await_fanout(1, '1ms')}))[2], qr/not loaded via "shared_preload_libraries"/, 'nobody can wait');
is(sql('SELECT outbox.wake()'), 'f', 'nobody can be woken');
is(sql('SELECT count(*) FROM outbox.stat_relay'), 0, 'there is no relay');
like(sql(q{SELECT string_agg(finding || ' ' || COALESCE(hint, ''), ';') FROM outbox.check()}), qr/shared_preload_libraries/, 'outbox.check() says so');
is(sql(q{SELECT outbox.subscribe('meanwhile', '{meanwhile}') > 0}), 't', 'subscriptions can be made');
is(sql(q{SELECT count(*) FROM outbox.matching('meanwhile')}), 2, 'and matched');
sql(q{SELECT outbox.record('meanwhile')});
sql(q{COMMIT PREPARED 'before'});
sql('CREATE DATABASE fresh');
my $err = ($node->psql('fresh', 'CREATE EXTENSION outbox'))[2];
like($err, qr/ERROR:  outbox must be loaded via "shared_preload_libraries"\nHINT:  Append outbox/, 'CREATE EXTENSION is refused');
is(sql('SELECT count(*) > 300 FROM outbox.events WHERE fanned_out_at IS NULL'), 't', 'events wait');
$node->append_conf('postgresql.conf', "shared_preload_libraries = 'outbox'");
$node->restart;
wait_drained($node, 'preloaded again');
is(sql(q{SELECT count(*) FROM outbox.events WHERE type LIKE '%gone'}), 0, 'what was rolled back is not there');
is(sql(q{SELECT count(*) FROM outbox.events WHERE type = 'x.before'}), 1, 'what was prepared is');
is(sql(q{SELECT string_agg(key, ',') FROM outbox.events, jsonb_object_keys(fanout) key WHERE type = 'meanwhile'}), 'all,meanwhile', 'subscriptions made meanwhile count');
is_conserved($node, 'every way to write', changing => 1);

$node->stop;
done_testing();
