# The checker that ends every test of faults must see what it is there to see.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('checker');

$node->safe_psql(
	'postgres', q{
	SELECT outbox.subscribe('plain', '{a.*,!a.b.*}');
	SELECT outbox.subscribe('coalescing', '{a.?}', coalescing => true);
	SELECT outbox.subscribe('scoped', scope => 'acme');
	SELECT outbox.subscribe('filtered', filter => '$.n > 1');
	SELECT outbox.subscribe('poison', '{outbox.*}');
	BEGIN;
	SELECT outbox.record('a.x', 'one', '{"n": 1}');
	SELECT outbox.record('a.x', 'one', '{"n": 2}');
	SELECT outbox.record('a.x', 'two', '{"n": "no number"}', 'acme');
	SELECT outbox.record('a.b.c', 'one');
	SELECT outbox.record('A.x(+)', 'one', '{}', 'Acme');
	COMMIT});
wait_drained($node, 'five events');
is($node->safe_psql('postgres', 'SELECT count(*) FROM outbox.jobs'), 7, 'jobs');
is_conserved($node, 'five events');

# Each of these must be seen.  The events have the numbers 1 to 5.
my @wrongs = (
	[ 'a lost mark', 'UPDATE outbox.events SET fanned_out_at = NULL WHERE seq = 4', qr/event 4 is neither marked nor poisoned/ ],
	[ 'a mark without fanout', 'UPDATE outbox.events SET fanout = NULL WHERE seq = 1', qr/event 1 is marked and has no fanout/ ],
	[ 'a lost job', 'DELETE FROM outbox.jobs WHERE event_seq = 3 AND subscription_id = 1', qr/event 3 names job \d+, which does not exist/ ],
	[ 'a lost delivery', q(DELETE FROM outbox.jobs WHERE event_seq = 3 AND subscription_id = 1; UPDATE outbox.events SET fanout = fanout - 'plain' WHERE seq = 3), qr/event 3 has nothing for subscription plain/ ],
	[ 'a delivery to the wrong one', q(INSERT INTO outbox.jobs (id, subscription_id, event_seq, due_at) OVERRIDING SYSTEM VALUE VALUES (99, 1, 4, now()); UPDATE outbox.events SET fanout = '{"plain": 99}' WHERE seq = 4), qr/event 4 went to subscription plain, which it does not match/ ],
	[ 'a job of the wrong subscription', 'UPDATE outbox.jobs SET subscription_id = 4 WHERE event_seq = 3 AND subscription_id = 1', qr/event 3 names job \d+ for subscription plain, which is not of it/ ],
	[ 'a second job', 'INSERT INTO outbox.jobs (subscription_id, event_seq, due_at) VALUES (1, 3, now())', qr/job \d+ is of event 3, which does not name it/ ],
	[ 'two jobs for one subscription', 'INSERT INTO outbox.jobs (subscription_id, event_seq, due_at) VALUES (1, 3, now())', qr/event 3 has 2 jobs for subscription number 1/ ],
	[ 'a job of no event', 'INSERT INTO outbox.jobs (subscription_id, event_seq, due_at) VALUES (1, 77, now())', qr/job \d+ is of event 77, which does not name it/ ],
	[ 'a cover by an earlier event', 'UPDATE outbox.jobs SET event_seq = 1 WHERE event_seq = 2 AND subscription_id = 2', qr/event 2 is covered by job \d+ of event 1 for coalescing, which does not cover it/ ],
	[ 'a cover by another subject', q(UPDATE outbox.events SET fanout = fanout || jsonb_build_object('coalescing', (SELECT id FROM outbox.jobs WHERE event_seq = 3 AND subscription_id = 2)) WHERE seq = 1), qr/event 1 is covered by job \d+ of event 3 for coalescing, which does not cover it/ ],
	[ 'a cover without coalescing', q(UPDATE outbox.events SET fanout = fanout || jsonb_build_object('plain', (SELECT id FROM outbox.jobs WHERE event_seq = 2 AND subscription_id = 1)) WHERE seq = 1), qr/event 1 is covered by job \d+ of event 2 for plain, which does not cover it/ ],
);

foreach my $wrong (@wrongs)
{
	my ($what, $sql, $seen) = @$wrong;

	# on a copy, which nobody works in
	$node->safe_psql('template1', 'DROP DATABASE IF EXISTS wrong');
	$node->safe_psql('template1', 'CREATE DATABASE wrong TEMPLATE postgres');
	$node->safe_psql('wrong', $sql);
	like(violations($node, db => 'wrong'), $seen, "$what is seen");
}

$node->stop;
done_testing();
