# What the TAP tests share: servers with outbox, waiting for the relay, clients
# that listen, and the checker that ends every test of faults.

package OutboxTest;

use strict;
use warnings FATAL => 'all';

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

use Exporter 'import';
our @EXPORT = qw(
  new_server set_conf drained wait_drained wait_for relay_pid relay_pids
  wait_relay settled is_conserved violations install_gate wait_at_gate
  open_gate install_faults listener kill_postmaster slow seeded
);

# The long versions of some tests are for a night, or a release.
sub slow
{
	return $ENV{OUTBOX_TEST_SLOW} ? 1 : 0;
}

# Seed the random numbers, and say how: OUTBOX_TEST_SEED replays a run.
sub seeded
{
	my $seed = $ENV{OUTBOX_TEST_SEED} // int(rand(2**31));

	srand($seed);
	diag("OUTBOX_TEST_SEED=$seed");
	return $seed;
}

# A running server with the extension in database postgres.  Events that fail
# are tried again after milliseconds, and nothing is swept by itself unless a
# test asks for it: what is fanned out was rung for.
sub new_server
{
	my ($name, %conf) = @_;
	my $extension = delete $conf{extension} // 1;
	my $init = delete $conf{init} // {};
	my $node = PostgreSQL::Test::Cluster->new($name);
	my %all = (
		'shared_preload_libraries' => "'outbox'",
		'max_connections' => 50,
		'max_worker_processes' => 32,
		'max_prepared_transactions' => 20,
		'restart_after_crash' => 'on',
		'log_statement' => 'none',
		'autovacuum' => 'off',
		'shared_buffers' => '32MB',
		'outbox.sweep_interval' => "'1h'",
		'outbox.relay_retry_min' => "'20ms'",
		'outbox.relay_retry_max' => "'100ms'",
		%conf);

	$node->init(%$init);
	$node->append_conf('postgresql.conf', "$_ = $all{$_}") foreach sort keys %all;
	$node->start;
	$node->safe_psql('postgres', 'CREATE EXTENSION outbox') if $extension;
	return $node;
}

# Change settings and reload.  The relay notices before it does anything else.
sub set_conf
{
	my ($node, %conf) = @_;

	$node->append_conf('postgresql.conf', "$_ = $conf{$_}") foreach sort keys %conf;
	$node->reload;
	# every process that matters has read it when a new session has it, and the
	# relay looks at it before it takes anything
	foreach my $name (sort keys %conf)
	{
		(my $value = $conf{$name}) =~ s/^'(.*)'$/$1/;
		$node->poll_query_until('postgres',
			"SELECT setting = '$value' OR pg_catalog.current_setting(name) = '$value'"
			  . " FROM pg_catalog.pg_settings WHERE name = '$name'")
		  or die "setting $name did not take effect";
	}
	return;
}

# Wait for a condition, with a bound.  A psql that the server refuses while it
# restarts may be gone before it has been given its query, for which IPC::Run
# dies; then it is asked again.
sub wait_for
{
	my ($node, $what, $query, $db) = @_;

	foreach (1 .. 100)
	{
		my $there = eval { $node->poll_query_until($db // 'postgres', $query) };

		return if $there;
		die $@ || "timed out waiting for: $what" unless $@ =~ /Broken pipe/;
	}
	die "the server did not come back: $what";
}

# Everything that was committed is fanned out or poisoned.
my $drained =
  'SELECT NOT EXISTS (SELECT FROM outbox.events WHERE fanned_out_at IS NULL AND poisoned_at IS NULL)';

sub drained
{
	my ($node, $db) = @_;

	return $node->safe_psql($db // 'postgres', $drained) eq 't';
}

sub wait_drained
{
	my ($node, $what, $db) = @_;
	my $ok = $node->poll_query_until($db // 'postgres', $drained);

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok($ok, "$what: everything is fanned out");
	return $ok;
}

# Processes of the relays of a database
sub relay_pids
{
	my ($node, $db) = @_;

	return split /\n/,
	  $node->safe_psql($db // 'postgres', q{
		SELECT pid FROM pg_catalog.pg_stat_activity
		WHERE backend_type = 'outbox relay' AND datname = pg_catalog.current_database()
		ORDER BY pid});
}

sub relay_pid
{
	my @pids = relay_pids(@_);

	return $pids[0];
}

# Wait until so many relays (1) wait for something to do.
sub wait_relay
{
	my ($node, $n, $db) = @_;

	$n //= 1;
	wait_for(
		$node, "$n relays", qq{
		SELECT pg_catalog.count(*) = $n FROM outbox.stat_relay
		WHERE database = pg_catalog.current_database() AND state IN ('idle', 'resting')}, $db);
	return;
}

# Wait until the relay has nothing to do, so that what is measured next is due
# to what is done next.  Statistics that were held back have been reported.
sub settled
{
	my ($node, $db) = @_;
	my $last = '';

	$db //= 'postgres';
	wait_relay($node, 1, $db);
	foreach (1 .. 100)
	{
		my $now = $node->safe_psql($db,
			"SELECT passes, events, failures, last_pass_at, state FROM outbox.stat_relay WHERE database = '$db'");

		return if $now eq $last;
		$last = $now;
	}
	die 'the relay does not come to rest';
}

# Written without any function of the extension, as an independent judge
my $violations = <<'SQL';
	SET jit = off;
	SET work_mem = '256MB';
	SET enable_nestloop = off;
	WITH pattern AS MATERIALIZED (
		SELECT s.id, left(p, 1) = '!' AS exclude, ltrim(p, '!') LIKE 'outbox.%' AS internal,
			'^(?:' || replace(replace(regexp_replace(ltrim(p, '!'), '([][+^$()|{}\\.])', '\\\1', 'g'),
				'*', '.*'), '?', '.') || ')$' AS re
		FROM outbox.subscriptions s, unnest(s.types) p
	), matches AS MATERIALIZED (
		SELECT t.type, p.id FROM (SELECT DISTINCT type FROM outbox.events) t, pattern p
		WHERE t.type ~ p.re AND (p.internal OR t.type NOT LIKE 'outbox.%')
		GROUP BY t.type, p.id HAVING bool_or(NOT p.exclude) AND NOT bool_or(p.exclude)
	), expected AS MATERIALIZED (
		SELECT e.seq, s.id, s.name
		FROM outbox.events e JOIN matches m ON m.type = e.type JOIN outbox.subscriptions s ON s.id = m.id
		WHERE %known% AND e.fanned_out_at IS NOT NULL AND NOT (%given_up%)
			AND (s.scope IS NULL OR s.scope = e.scope)
			AND (s.filter IS NULL OR EXISTS (SELECT FROM jsonb_path_query(e.payload, s.filter,
				jsonb_build_object('type', e.type, 'subject', e.subject, 'scope', e.scope, 'headers', e.headers), true) q
				WHERE q NOT IN ('false', 'null')))
	), named AS MATERIALIZED (
		SELECT e.seq, e.type, e.scope, e.subject, f.key AS name, f.value::bigint AS job
		FROM outbox.events e, jsonb_each_text(e.fanout) f WHERE e.fanned_out_at IS NOT NULL
	)
	SELECT * FROM (
		SELECT 'event ' || seq || ' is neither marked nor poisoned' AS v FROM outbox.events
		WHERE NOT %pending% AND fanned_out_at IS NULL AND poisoned_at IS NULL
	UNION ALL
		SELECT 'event ' || seq || ' is marked and has no fanout' FROM outbox.events
		WHERE fanned_out_at IS NOT NULL AND fanout IS NULL
	UNION ALL
		SELECT 'event ' || seq || ' is unmarked and has a fanout' FROM outbox.events
		WHERE fanned_out_at IS NULL AND fanout IS NOT NULL
	UNION ALL
		SELECT 'event ' || seq || ' has nothing for subscription ' || name
		FROM (SELECT seq, name FROM expected EXCEPT SELECT seq, name FROM named) missing
	UNION ALL
		SELECT 'event ' || seq || ' went to subscription ' || name || ', which it does not match'
		FROM (SELECT seq, name FROM named WHERE %known% EXCEPT SELECT seq, name FROM expected) excess
	UNION ALL
		SELECT 'event ' || n.seq || ' names job ' || n.job || ', which does not exist' FROM named n
		WHERE NOT EXISTS (SELECT FROM outbox.jobs j WHERE j.id = n.job)
	UNION ALL
		SELECT 'event ' || n.seq || ' names job ' || n.job || ' for subscription ' || n.name || ', which is not of it'
		FROM named n JOIN outbox.jobs j ON j.id = n.job JOIN outbox.subscriptions s ON s.name = n.name
		WHERE %known% AND j.subscription_id <> s.id
	UNION ALL
		SELECT 'event ' || n.seq || ' is covered by job ' || n.job || ' of event ' || j.event_seq || ' for ' || n.name || ', which does not cover it'
		FROM named n JOIN outbox.jobs j ON j.id = n.job
			JOIN outbox.subscriptions s ON s.id = j.subscription_id
			LEFT JOIN outbox.events o ON o.seq = j.event_seq
		WHERE j.event_seq <> n.seq AND NOT COALESCE(s.coalescing AND o.seq > n.seq AND o.subject = n.subject
			AND o.scope IS NOT DISTINCT FROM n.scope, false)
	UNION ALL
		SELECT 'job ' || id || ' is of event ' || event_seq || ', which does not name it'
		FROM (SELECT event_seq, id FROM outbox.jobs EXCEPT SELECT seq, job FROM named) stray
	UNION ALL
		SELECT 'event ' || event_seq || ' has ' || count(*) || ' jobs for subscription number ' || subscription_id
		FROM outbox.jobs GROUP BY event_seq, subscription_id HAVING count(*) > 1
	) violation LIMIT 20
SQL

# What is wrong with the events and jobs of a database, in words; nothing when
# all is well.  Options:
#   pending	events may be unmarked still
#   changing	the set of subscriptions has changed meanwhile: what an event
#		should have matched is not known
#   given_up	condition on events e that were given up by outbox.discard
sub violations
{
	my ($node, %opt) = @_;
	my %value = (
		known => $opt{changing} ? 'false' : 'true',
		pending => $opt{pending} ? 'true' : 'false',
		given_up => $opt{given_up} // 'false');

	return $node->safe_psql($opt{db} // 'postgres', $violations =~ s/%(\w+)%/$value{$1}/gr);
}

# The promise behind every test of faults: each committed event has exactly one
# job for every subscription that it matches, or is covered by the job of a
# later one; nothing else has a job; marks and jobs agree.
sub is_conserved
{
	my ($node, $what, %opt) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return is(violations($node, %opt), '', "$what: conserved");
}

# Let the relay be stopped at points of its pass.  It stops where a row of
# public.gates names the point, says so in pg_stat_activity by what it waits
# for, and goes on when the row is gone.  Points, in the order of a pass:
#   jobs		before the first job is inserted
#   half		before a job in the middle
#   marks		all jobs are inserted, nothing is marked
#   marked	everything is marked
#   commit	in the commit, before it counts
#   failure	before the failures of events are written down
sub install_gate
{
	my ($node, $db) = @_;

	$node->safe_psql(
		$db // 'postgres', q{
	CREATE TABLE public.gates (point text PRIMARY KEY);
	CREATE FUNCTION public.gate() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		IF TG_ARGV[0] = 'half' THEN
			IF NEW.event_seq % 10 <> 5 THEN
				RETURN NEW;
			END IF;
		END IF;
		WHILE EXISTS (SELECT FROM public.gates WHERE point = TG_ARGV[0]) LOOP
			PERFORM pg_catalog.pg_sleep(0.005);
		END LOOP;
		RETURN NEW;
	END $$;
	CREATE TRIGGER gate_jobs BEFORE INSERT ON outbox.jobs FOR EACH STATEMENT EXECUTE FUNCTION public.gate('jobs');
	CREATE TRIGGER gate_half BEFORE INSERT ON outbox.jobs FOR EACH ROW EXECUTE FUNCTION public.gate('half');
	CREATE TRIGGER gate_marks AFTER INSERT ON outbox.jobs FOR EACH STATEMENT EXECUTE FUNCTION public.gate('marks');
	CREATE TRIGGER gate_marked AFTER UPDATE OF fanned_out_at ON outbox.events FOR EACH STATEMENT EXECUTE FUNCTION public.gate('marked');
	CREATE TRIGGER gate_failure BEFORE UPDATE OF tries ON outbox.events FOR EACH STATEMENT EXECUTE FUNCTION public.gate('failure');
	CREATE CONSTRAINT TRIGGER gate_commit AFTER INSERT ON outbox.jobs DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION public.gate('commit')});
	return;
}

# Wait until a relay stands at a gate, and return its pid.
sub wait_at_gate
{
	my ($node, $db) = @_;

	foreach (1 .. 50 * $PostgreSQL::Test::Utils::timeout_default)
	{
		# between two naps it is not seen to sleep
		my $pid = $node->safe_psql($db // 'postgres', q{
			SELECT pid FROM pg_catalog.pg_stat_activity
			WHERE backend_type = 'outbox relay' AND wait_event = 'PgSleep' AND datname = current_database() LIMIT 1});

		return $pid if $pid ne '';
		usleep(20_000);
	}
	die 'no relay comes to the gate';
}

sub open_gate
{
	my ($node, $db) = @_;

	$node->safe_psql($db // 'postgres', 'DELETE FROM public.gates');
	return;
}

# State and parent of a process; nothing when there is none
sub process_status
{
	my ($pid) = @_;
	my $status = '';

	if (open(my $file, '<', "/proc/$pid/status"))
	{
		local $/;
		$status = <$file> // '';
	}
	return unless $status =~ /^State:\s+(\w).*^PPid:\s+(\d+)/ms;
	return ($1, $2);
}

# kill -9 of the postmaster.  Returns when its children have noticed, so that
# the server can be started again.
sub kill_postmaster
{
	my ($node) = @_;
	my ($postmaster) = slurp_file($node->data_dir . '/postmaster.pid') =~ /^(\d+)/;
	my @children = grep { ((process_status($_))[1] // 0) == $postmaster }
	  map { m,/proc/(\d+)$, } glob '/proc/[0-9]*';

	$node->kill9;
	foreach (1 .. 100 * $PostgreSQL::Test::Utils::timeout_default)
	{
		if (!grep { ((process_status($_))[0] // 'Z') ne 'Z' } $postmaster, @children)
		{
			# nobody may be there to bury it, and the next postmaster takes
			# even a zombie for a running one
			unlink $node->data_dir . '/postmaster.pid', $node->host . '/.s.PGSQL.' . $node->port . '.lock';
			return;
		}
		usleep(10_000);
	}
	die 'the postmaster or its children live on';
}

# Let jobs of some events fail.  A row of public.faults names the seq (null:
# every event), the SQLSTATE and, perhaps, the text of the error.
sub install_faults
{
	my ($node, $db) = @_;

	$node->safe_psql(
		$db // 'postgres', q{
	CREATE TABLE public.faults (seq bigint, code text NOT NULL, message text);
	CREATE FUNCTION public.fault() RETURNS trigger LANGUAGE plpgsql AS $$
	DECLARE
		f record;
	BEGIN
		SELECT * INTO f FROM public.faults WHERE seq = NEW.event_seq OR seq IS NULL LIMIT 1;
		IF FOUND THEN
			RAISE EXCEPTION USING ERRCODE = f.code,
				MESSAGE = COALESCE(f.message, 'no job for event ' || NEW.event_seq);
		END IF;
		RETURN NEW;
	END $$;
	CREATE TRIGGER fault BEFORE INSERT ON outbox.jobs FOR EACH ROW EXECUTE FUNCTION public.fault()});
	return;
}

# A client that listens on channels.  heard() gives what has come, as
# [channel, payload] pairs, oldest first.
sub listener
{
	my ($node, @channels) = @_;
	my $psql = $node->background_psql('postgres');

	$psql->query_safe("LISTEN $_") foreach @channels;
	return bless { psql => $psql, heard => [] }, 'OutboxTest::Listener';
}

package OutboxTest::Listener;

use Time::HiRes qw(usleep);

sub heard
{
	my ($self) = @_;
	my $output = $self->{psql}->query_safe('SELECT');

	push @{ $self->{heard} }, [ $1, $2 // '' ]
	  while $output =~ /^Asynchronous notification "(.*?)"(?: with payload "(.*?)")? received from server process/mg;
	return @{ $self->{heard} };
}

# Wait until what was heard satisfies a condition.
sub wait_heard
{
	my ($self, $condition) = @_;

	foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		my @heard = $self->heard;

		return 1 if $condition->(@heard);
		usleep(100_000);
	}
	return 0;
}

sub quit
{
	my ($self) = @_;

	return $self->{psql}->quit;
}

1;
