#!/bin/bash
#
# Execute the SQL of README.md, and compare what it shows with what happens.
#
#	test/readme.sh [README.md]
#
# Every ```sql block is run, in order, in one psql session on a throw-away
# server with the library preloaded; those marked ```sql not-preloaded run
# before, on a server without it.  A block must work, unless comments in it
# announce what the server says:
#
#	-- ERROR:  text		also WARNING, NOTICE, DETAIL and HINT
#
# A block without a language that directly follows one in sql is its output.
# White space and the number of rows do not count; "..." stands for anything,
# and on a line of its own for any lines.
#
# Beside this, every function, view and setting must be described, with the
# arguments, columns and default that it really has, every link within the page
# must lead somewhere, and a block marked with the name of a file, as in
# ```python test/examples/worker.py, must be that file.
#
# Closes with "N passed, N failed".  PG_CONFIG in the environment names the
# PostgreSQL to use; when outbox is not installed there, it is built and
# installed into a private copy.

set -u
set -o pipefail
. "$(dirname "$0")/common.sh"

readme=$(realpath "${1:-$top/README.md}") || exit 1

finish() {
	status=$?
	trap - EXIT
	[ ! -e "${scratch:-}/data/postmaster.pid" ] ||
		as_tester "$bin/pg_ctl" -D "$scratch/data" -m fast -w stop >/dev/null
	if [ $status -ne 0 ] && [ -e "${scratch:-}/log" ]; then
		say '--- the server'"'"'s log'
		tail -n 60 "$scratch/log"
	fi
	rm -rf "${scratch:-}"
	exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM

find_server perl
if [ -e "$("$PG_CONFIG" --sharedir)/extension/outbox.control" ]; then
	scratch=$(mktemp -d /tmp/outbox-readme.XXXXXX) || exit 1
	[ "$(id -u)" -ne 0 ] || chown "$(tester)" "$scratch"
else
	make_scratch outbox-readme
	as_tester make -s -C "$scratch/outbox" -j "$(nproc)" PG_CONFIG="$PG_CONFIG" with_llvm=no \
		all install >"$scratch/build.log" 2>&1 || {
		cat "$scratch/build.log"
		die 'the build failed'
	}
fi
bin=$("$PG_CONFIG" --bindir)
chmod 755 "$scratch"
cp "$readme" "$scratch/README.md"
mkdir -p "$scratch/examples"
cp "$top"/test/examples/worker.* "$scratch/examples"
chmod -R a+rX "$scratch/README.md" "$scratch/examples"

# start [PRELOAD]: (re)start the server, with these libraries preloaded
start() {
	[ ! -e "$scratch/data/postmaster.pid" ] ||
		as_tester "$bin/pg_ctl" -D "$scratch/data" -m fast -w stop >/dev/null
	as_tester tee "$scratch/data/outbox.conf" >/dev/null <<CONF
shared_preload_libraries = '${1:-}'
listen_addresses = ''
unix_socket_directories = '$scratch'
max_prepared_transactions = 10
max_worker_processes = 32
outbox.relay_retry_min = '50ms'
outbox.relay_retry_max = '50ms'
CONF
	as_tester "$bin/pg_ctl" -D "$scratch/data" -l "$scratch/log" -w start >/dev/null ||
		die 'the server did not start'
}

as_tester "$bin/initdb" -N -A trust -U postgres -D "$scratch/data" >/dev/null ||
	die 'initdb failed'
echo "include 'outbox.conf'" | as_tester tee -a "$scratch/data/postgresql.conf" >/dev/null

cat >"$scratch/readme.pl" <<'PERL'
use strict;
use warnings;

my ($mode, $readme, $bin, $host) = @ARGV;
my ($passed, $failed) = (0, 0);

# Count a check.  Write scalar(...) around a match that is passed for $ok.
sub result
{
	my ($ok, $what, @detail) = @_;

	if ($ok) { $passed++; return }
	$failed++;
	print "FAILED: $what\n", map { "    $_\n" } @detail;
}

open my $fh, '<', $readme or die "$readme: $!";
my @lines = <$fh>;
close $fh;
chomp @lines;

# Blocks: where they begin, their language and marks, their lines.  A block is
# the output of the one before when only empty lines are between them.
my (@blocks, %section, $heading, @anchors, @links);
for (my $i = 0; $i < @lines; $i++)
{
	if ($lines[$i] =~ /^\s*```(\w*) *(.*)$/)
	{
		my %block = (line => $i + 1, lang => $1, mark => $2, text => []);
		my $j = $i - 1;

		$j-- while $j >= 0 && $lines[$j] =~ /^\s*$/;
		$block{after} = $blocks[-1]
			if @blocks && $blocks[-1]{end} == $j && $block{lang} =~ /^(text)?$/;
		for ($i++; $i < @lines && $lines[$i] !~ /^\s*```\s*$/; $i++)
		{
			push @{ $block{text} }, $lines[$i];
			$section{$heading} .= "$lines[$i]\n" if defined $heading;
		}
		$block{end} = $i;
		$block{after}{output} = \%block
			if $block{after} && $block{after}{lang} eq 'sql';
		push @blocks, \%block;
		next;
	}
	if ($lines[$i] =~ /^#+ +(.*?)\s*$/)
	{
		my $anchor = lc $1;

		($heading = $1) =~ s/`//g;
		$section{$heading} = '';
		$anchor =~ s/[^\w\- ]//g;
		$anchor =~ tr/ /-/;
		push @anchors, $anchor;
	}
	elsif (defined $heading)
	{
		$section{$heading} .= "$lines[$i]\n";
	}
	push @links, [ $i + 1, $1 ] while $lines[$i] =~ /\]\(#([^)]*)\)/g;
}

sub psql
{
	my ($script, @options) = @_;
	my $base = "$host/psql";

	open my $in, '>', "$base.in" or die "$base.in: $!";
	print $in $script;
	close $in;
	my $status = system("timeout 300 '$bin/psql' -X -q @options -P pager=off -h '$host' "
			. "-U postgres -d postgres <'$base.in' >'$base.out' 2>'$base.err'");
	my @both;
	for my $suffix ('out', 'err')
	{
		open my $result, '<', "$base.$suffix" or die "$base.$suffix: $!";
		push @both, do { local $/; <$result> // '' };
		close $result;
	}
	return ($status, @both);
}

# White space and lengths of rules do not count, nor do numbers of rows.
sub normal
{
	my ($line) = @_;

	$line =~ s/\s+/ /g;
	$line =~ s/^ | $//g;
	$line =~ s/-{2,}/--/g;
	return $line;
}

sub normal_lines
{
	return grep { $_ ne '' && !/^\(\d+ rows?\)$/ } map { normal($_) } @_;
}

# Does a line or text match what is expected, where "..." stands for anything?
sub matches
{
	my ($expected, $real) = @_;
	my $pattern = join '.*?', map { quotemeta } split /\.\.\./, $expected, -1;

	return $real =~ /^$pattern$/s;
}

sub check_output
{
	my ($block, $out) = @_;
	my @real = normal_lines(split /\n/, $out);
	my @expected = normal_lines(@{ $block->{output}{text} });
	my $pattern = '';

	for my $line (@expected)
	{
		$pattern .= $line eq '...' ? '(?:.*\n)*?'
			: join('.*?', map { quotemeta } split /\.\.\./, $line, -1) . '\n';
	}
	my $ok = join('', map { "$_\n" } @real) =~ /^$pattern$/;
	result($ok, "README.md:$block->{output}{line}: the output is not as shown", 'it is:', @real);
}

# What the server said on the side must be what comments announce: every error
# and warning, and of the rest what is announced.
sub check_messages
{
	my ($block, $err) = @_;
	my $kinds = 'ERROR|FATAL|WARNING|NOTICE|DETAIL|HINT';
	my @expected = map { /^\s*-- +((?:$kinds):.*)/ ? normal($1) : () } @{ $block->{text} };
	my @real = map { normal($_) } split /\n/, $err;
	my @left = @real;
	my @missing;

	for my $line (@expected)
	{
		my ($at) = grep { matches($line, $left[$_]) } 0 .. $#left;

		if (defined $at) { splice @left, 0, $at + 1, grep { /^(ERROR|FATAL|WARNING)/ } @left[ 0 .. $at - 1 ]; }
		else { push @missing, $line; }
	}
	my @surplus = grep { /^(ERROR|FATAL|WARNING)|^invalid command|^psql:/ } @left;
	result(!@missing && !@surplus, "README.md:$block->{line}: the block does not do what it says",
		(map { "not said: $_" } @missing),
		(map { "said: $_" } @surplus ? @surplus : @missing ? @real : ()));
	return @expected > 0;
}

# Run the sql blocks with a mark, one after another, in one session.
sub run_blocks
{
	my ($mark) = @_;
	my @run = grep { $_->{lang} eq 'sql' && $_->{mark} eq $mark } @blocks;
	my $script = '';

	for my $block (@run)
	{
		$script .= "\\echo <<<$block->{line}>>>\n\\warn <<<$block->{line}>>>\n"
			. join("\n", @{ $block->{text} }) . "\n";
	}
	return if $script eq '';
	my ($status, $out, $err) = psql($script);
	my (undef, %out) = split /^<<<(\d+)>>>\n/m, $out, -1;
	my (undef, %err) = split /^<<<(\d+)>>>\n/m, $err, -1;

	for my $block (@run)
	{
		my $line = $block->{line};

		if (!exists $out{$line})
		{
			result(0, "README.md:$line: not run, because of what was before");
			next;
		}
		check_messages($block, $err{$line} // '');
		check_output($block, $out{$line}) if $block->{output};
	}
}

# What a query yields, as rows of fields
sub query
{
	my ($status, $out, $err) = psql($_[0], '-v ON_ERROR_STOP=1', '-At', "-F '\t'");

	die "query failed: $err" if $status != 0;
	return map { [ split /\t/, $_, -1 ] } split /\n/, $out;
}

# A description of a routine, view or setting has to be there and to be true.
sub check_reference
{
	my $all = join "\n", @lines;

	for my $row (query(q{
		SELECT p.proname, p.prokind,
			(SELECT string_agg(n || ' ' || format_type(t, NULL), ', ' ORDER BY o)
			 FROM unnest(p.proargnames, COALESCE(p.proallargtypes, p.proargtypes::oid[]), p.proargmodes)
				WITH ORDINALITY AS a(n, t, m, o) WHERE m IS NULL OR m IN ('i', 'b')),
			CASE WHEN p.prokind = 'f' THEN pg_get_function_result(p.oid) END
		FROM pg_proc p WHERE p.pronamespace = 'outbox'::regnamespace ORDER BY 1}))
	{
		my ($name, $kind, $arguments, $returns) = @$row;

		if (!exists $section{"outbox.$name"})
		{
			result(scalar($all =~ /`outbox\.$name\(/), "outbox.$name() is not described");
			next;
		}
		my ($signature) = $section{"outbox.$name"} =~ /outbox\.$name\((.*?)\)(?= →|\s*$)/ms;
		$signature //= '(none)';
		$signature =~ s/\s+/ /g;
		$signature =~ s/ DEFAULT ('[^']*'|\w+)//g;
		$signature =~ s/\bINOUT //g;
		$signature =~ s/\bint\b/integer/g;
		$signature =~ s/\btimestamptz\b/timestamp with time zone/g;
		result($signature eq $arguments, "the arguments of outbox.$name are not as described",
			"described: $signature", "are: $arguments");
	}

	for my $row (query(q{
		SELECT c.relname, string_agg(a.attname, ',' ORDER BY a.attnum)
		FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
		WHERE c.relnamespace = 'outbox'::regnamespace AND c.relkind IN ('r', 'v') GROUP BY 1 ORDER BY 1}))
	{
		my ($name, $columns) = @$row;
		my $text = $section{"outbox.$name"};

		if (!defined $text)
		{
			result(scalar($all =~ /`outbox\.$name`/), "outbox.$name is not described");
			next;
		}
		my @missing = grep { $text !~ /`$_`/ } split /,/, $columns;
		result(!@missing, "columns of outbox.$name are not described: @missing");
	}

	for my $row (query(q{
		SELECT name, boot_val, COALESCE(unit, ''), context FROM pg_settings
		WHERE name LIKE 'outbox.%' ORDER BY 1}))
	{
		my ($name, $value, $unit, $context) = @$row;

		if ($unit eq 'ms')
		{
			$value = $value % 60000 == 0 ? $value / 60000 . 'min'
				: $value % 1000 == 0 ? $value / 1000 . 's' : "${value}ms";
		}
		$value = $value / 86400 . 'd' if $unit eq 's' && $value > 0 && $value % 86400 == 0;
		$value = "''" if $value eq '';
		my ($shown) = $all =~ /^\| *`\Q$name\E` *\| *`?([^`|]*?)`? *\|/m;
		result(defined $shown && $shown eq $value, "setting $name is not described as it is",
			"default: $value, described: " . ($shown // '(not)'));
	}
	for my $name ($all =~ /`(outbox\.\w+)` *\| *`[^|]*` *\|/g)
	{
		my ($there) = query("SELECT count(*) FROM pg_settings WHERE name = '$name'");
		result($there->[0] == 1, "there is no setting $name");
	}
}

# Workers are shown as they are.
sub check_examples
{
	my %shown = map { $_->{mark} => $_ } grep { $_->{mark} =~ m{/} } @blocks;

	for my $file (glob("$host/examples/*"))
	{
		my ($name) = $file =~ m{([^/]+)$};
		my $block = delete $shown{"test/examples/$name"};

		open my $in, '<', $file or die "$file: $!";
		my $text = do { local $/; <$in> };
		close $in;
		result($block && join('', map { "$_\n" } @{ $block->{text} }) eq $text,
			"README.md does not show test/examples/$name as it is");
	}
	result(!%shown, "README.md shows files that are not there: " . join(' ', keys %shown));
}

run_blocks($mode eq 'not-preloaded' ? 'not-preloaded' : '');
if ($mode ne 'not-preloaded')
{
	my %anchor = map { $_ => 1 } @anchors;

	check_reference();
	check_examples();
	result($anchor{ $_->[1] }, "README.md:$_->[0]: nothing to link to: #$_->[1]") for @links;
}
print "$passed passed, $failed failed\n";
exit($failed > 0);
PERL

status=0
start
as_tester perl "$scratch/readme.pl" not-preloaded "$scratch/README.md" "$bin" "$scratch" >"$scratch/first" || status=1
start outbox
as_tester perl "$scratch/readme.pl" preloaded "$scratch/README.md" "$bin" "$scratch" >"$scratch/second" || status=1

# The two runs count as one.
cat "$scratch/first" "$scratch/second" | grep -v ' passed, [0-9]* failed$'
cat "$scratch/first" "$scratch/second" |
	awk '/ passed, [0-9]+ failed$/ { p += $1; f += $3; n++ }
		END { print p " passed, " (n == 2 ? f : f + 1) " failed"; exit n < 2 || f > 0 }' || status=1
exit $status
