# Types, subjects and payloads in databases of several encodings.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_server('encodings', extension => 0);

# For each encoding: types that are accepted, types that are refused, and a
# pattern with what it matches of the former.  In the encoding's own bytes.
my %encodings = (
	'UTF8' => {
		accepted => [ "\xc3\xa9t\xc3\xa9.\xe2\x82\xac", "x.\xf0\x9f\x98\x80", "\xe6\xbc\xa2\xe5\xad\x97", "e\xcc\x81", "\xc3\xa9", "x" x 253 . "\xc3\xa9" ],
		refused => [
			"a\xc2\x85b", "a\xc2\xa0b", "a\xe2\x80\x8fb", "a\xe2\x80\xaeb", "a\xe2\x80\xa8b", "a\xe3\x80\x80b", "\xef\xbb\xbfa", "a\xe2\x80\x8bb", "x" x 254 . "\xc3\xa9" ],
		pattern => "?",
		matches => 1,    # one character, not one byte
	},
	'LATIN1' => {
		accepted => [ "\xe9t\xe9.x", "\xe9", "\xff" ],
		refused => [ "a b", "a\x01" ],
		pattern => "?",
		matches => 2,
	},
	'EUC_JP' => {
		accepted => [ "\xb4\xc1\xbb\xfa", "\xb4\xc1" ],
		refused => ["\xb4\xc1 \xbb\xfa"],
		pattern => "?",
		matches => 1,
	},
	'WIN1251' => {
		accepted => [ "\xf1\xee\xe1\xfb\xf2\xe8\xe5.1", "\xf1" ],
		refused => ["\xf1*"],
		pattern => "\xf1*",
		matches => 2,
	},
	'SQL_ASCII' => {
		accepted => [ "\xff\xfe.x", "\xe9", "\xc3" ],
		refused => [ "\xff *", "a\x7f" ],
		pattern => "?",
		matches => 2,
	});

foreach my $encoding (sort keys %encodings)
{
	my %case = %{ $encodings{$encoding} };
	my $db = lc $encoding;

	$node->safe_psql('postgres', "CREATE DATABASE $db ENCODING '$encoding' LOCALE 'C' TEMPLATE template0");
	local $ENV{PGCLIENTENCODING} = $encoding;
	$node->safe_psql($db, 'CREATE EXTENSION outbox');
	install_faults($node, $db);
	$node->safe_psql($db, "SELECT outbox.subscribe('all'); SELECT outbox.subscribe('some', ARRAY['$case{pattern}'], coalescing => true); SELECT outbox.subscribe('alerts', '{outbox.*}')");
	foreach my $type (@{ $case{accepted} })
	{
		# the type is a subject and a scope, too
		$node->safe_psql($db, "SELECT outbox.record('$type', '$type' || repeat('$type', 30), jsonb_build_object('text', '$type'), '$type'); INSERT INTO outbox.events (type) VALUES ('$type')");
	}
	foreach my $type (@{ $case{refused} })
	{
		my ($ret, $out, $err) = $node->psql($db, "SELECT outbox.record('$type')");
		isnt($ret, 0, "$encoding: refused");
		($ret, $out, $err) = $node->psql($db, "INSERT INTO outbox.events (type) VALUES ('$type')");
		isnt($ret, 0, "$encoding: refused by INSERT too");
	}
	wait_drained($node, $encoding, $db);
	is($node->safe_psql($db, "SELECT count(*) FROM outbox.events"), 2 * @{ $case{accepted} }, "$encoding: accepted");
	is($node->safe_psql($db, "SELECT count(*) FROM outbox.events WHERE fanout ? 'some'"), 2 * $case{matches}, "$encoding: a pattern means characters");
	is_conserved($node, $encoding, db => $db);

	# errors, and the alerts that carry them
	my $text = join ' ', @{ $case{accepted} };
	my $bad = $node->safe_psql($db, "INSERT INTO public.faults SELECT outbox.record('$case{accepted}[0]', '$text'), '23514', repeat('$text', 500) RETURNING seq");

	is($node->safe_psql($db, "CALL outbox.await_fanout($bad, '60s')"), 'poisoned', "$encoding: poisoned");
	wait_drained($node, "$encoding: the alert", $db);
	is($node->safe_psql($db, "SELECT e.last_error = a.payload ->> 'last_error' AND e.type = a.payload ->> 'type' AND e.subject = a.subject AND octet_length(e.last_error) BETWEEN 1990 AND 2000
		FROM outbox.events e, outbox.events a WHERE e.seq = $bad AND a.type = 'outbox.event.poisoned'"), 't', "$encoding: with its error, whole characters of it");
	# a client of another encoding can read what the relay says of it
	local $ENV{PGCLIENTENCODING} = $encoding eq 'SQL_ASCII' ? 'SQL_ASCII' : 'UTF8';
	is($node->safe_psql($db, q{SELECT count(*) FROM (SELECT last_error, state FROM outbox.stat_relay WHERE database = current_database()) s WHERE last_error LIKE '23514%'}), 1, "$encoding: outbox.stat_relay");
	is(($node->psql('template1', 'CREATE EXTENSION outbox; SELECT last_error FROM outbox.stat_relay; DROP EXTENSION outbox'))[0], 0, "$encoding: from another database too");
}

$node->stop;
done_testing();
