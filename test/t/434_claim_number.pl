# No number of a claim is ever given twice, also when the claim has not been
# flushed and the server crashes at once.

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
