# A transaction that does nothing but ask for many jobs commits without waiting
# for its flush; any other waits.  And no number of a claim is ever given twice,
# also when the claim has not been flushed and the server crashes at once.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use OutboxTest;
use Test::More;

my $node = new_server('claims');

sub sql
{
	return $node->safe_psql('postgres', @_);
}

sql(q{SELECT outbox.subscribe('s', '{*}'); CREATE TABLE work (job bigint)});
sql(q{INSERT INTO outbox.events (type) SELECT 'e' FROM generate_series(1, 3000)});
wait_for($node, 'jobs', 'SELECT NOT EXISTS (SELECT FROM outbox.events WHERE fanned_out_at IS NULL)');

# Nothing else flushes meanwhile, or seldom
set_conf($node, 'wal_writer_delay' => "'10s'");
sql('SELECT outbox.stop()');

sql(q{SELECT outbox.subscribe('few', '{few}', max_attempts => 1000000); SELECT outbox.start(); SELECT count(outbox.record('few')) FROM generate_series(1, 7)});
wait_for($node, 'few jobs', 'SELECT NOT EXISTS (SELECT FROM outbox.events WHERE fanned_out_at IS NULL)');
sql('SELECT outbox.stop()');

# How many of some runs of a script, which ends with \gset of the place in the WAL
# that it has written, leave that unflushed?
sub unflushed
{
	my ($n, $script) = @_;
	my $count = 0;

	$count += sql("$script; SELECT (pg_current_wal_flush_lsn() < :'lsn')::int") =~ /(\d)$/ ? $1 : die foreach 1 .. $n;
	return $count;
}
my $lsn = "SELECT pg_current_wal_insert_lsn() AS lsn \\gset\n";
cmp_ok(unflushed(20, "SELECT count(*) FROM outbox.claim('few', 20, '1ms');\n$lsn SELECT 1"), '>', 0, 'a claim does not wait for its flush');
cmp_ok(unflushed(20, "BEGIN;\nSELECT count(*) FROM outbox.claim('few', 20, '1ms');\nSELECT count(*) FROM outbox.claim('few', 8, '1ms');\nCOMMIT;\n$lsn SELECT 1"), '>', 0, 'nor do two');
is(unflushed(20, "BEGIN;\nSELECT count(*) FROM outbox.claim('few', 20, '1ms');\nINSERT INTO work VALUES (1);\n${lsn}COMMIT"), 0, 'a write after it does');
is(unflushed(20, "BEGIN;\nINSERT INTO work VALUES (1);\nSELECT count(*) FROM outbox.claim('few', 20, '1ms');\n${lsn}COMMIT"), 0, 'a write before it does');
is(unflushed(20, "BEGIN;\nSELECT count(*) FROM outbox.claim('few', 20, '1ms');\nINSERT INTO work VALUES (1);\nSELECT count(*) FROM outbox.claim('few', 20, '1ms');\n${lsn}COMMIT"), 0, 'a write between two does');
is(unflushed(20, "BEGIN;\nSAVEPOINT a;\nSELECT count(*) FROM outbox.claim('few', 20, '1ms');\nROLLBACK TO a;\nINSERT INTO work VALUES (1);\n${lsn}COMMIT"), 0, 'a write after one that is rolled back does');
is(unflushed(20, "BEGIN;\nSELECT outbox.complete(job, claim) FROM outbox.claim('few', 20, '1ms');\n${lsn}COMMIT"), 0, 'a completion does');
is(unflushed(20, "BEGIN;\nSELECT count(*) FROM outbox.claim('few', 7, '1ms');\n${lsn}COMMIT"), 0, 'who asks for few does');
like(sql("SELECT count(*) FROM outbox.claim('few', 20, '1ms'); SHOW synchronous_commit"), qr/^\d+\non$/, 'the setting is as it was');

# Numbers: of claims in rows and of claims in memory, before and after a crash
my %given;
foreach my $round (1 .. 8)
{
	# so little that nothing but the claim itself would flush it
	my @jobs = $round % 2 ? (20, 20, 30) : (1, 2, 1);
	my @numbers = split /\n/, sql(join ';', "SET synchronous_commit = off", map { "SELECT min(claim) FROM outbox.claim('s', $_)" } @jobs);

	is(scalar @numbers, 3, "round $round: three claims");
	is(join(' ', grep { $given{$_}++ } @numbers), '', 'none has the number of another');
	$node->stop('immediate');
	$node->start;
}
is(sql('SELECT count(*) > 0 FROM outbox.job_status'), 't', 'the jobs are there');

$node->stop;
done_testing();
