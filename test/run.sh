#!/bin/bash
#
# Run every test.
#
#	test/run.sh [SUITE ...]		default: regress isolation tap werror scripts examples
#
# Works on a bare Debian 12 as root or with sudo: what is missing is installed
# with apt.  The tree is copied to a scratch directory, built there, and
# installed into a private copy of PostgreSQL, so neither the tree nor the
# system's server is touched.  As root, everything runs as user postgres.
#
# From the environment:
#	PG_CONFIG	the PostgreSQL to test with (default: Debian's 15)
#	REGRESS, ISOLATION, PROVE_TESTS		names, to run only some tests
#	JOBS		TAP tests at a time (default: the number of processors)
#	OUTBOX_KEEP	set: keep the scratch directory

set -u
set -o pipefail
. "$(dirname "$0")/common.sh"

[ $# -gt 0 ] || set -- regress isolation tap werror scripts examples
jobs=${JOBS:-$(nproc)}
passed=0
failed=0
failures=()

finish() {
	if [ -n "${OUTBOX_KEEP:-}" ]; then
		say "Kept $scratch"
	else
		remove_scratch
	fi
}
trap finish EXIT
trap 'exit 130' INT TERM
find_server perl libipc-run-perl
make_scratch outbox-run

# result NAME STATUS: count one check, whose output is in $log.
result() {
	if [ "$2" -eq 0 ]; then
		say "ok: $1"
		passed=$((passed + 1))
	else
		say "FAILED: $1"
		failed=$((failed + 1))
		failures+=("$1")
	fi
}

# count PASSED FAILED NAME
count() {
	passed=$((passed + $1))
	failed=$((failed + $2))
	[ "$2" -eq 0 ] || failures+=("$3")
}

show() {
	say "--- $1"
	tail -n "${2:-60}" "$1"
}

build() {
	log=$scratch/build.log
	as_tester make -s -C "$scratch/outbox" -j "$jobs" PG_CONFIG="$PG_CONFIG" all install >"$log" 2>&1
	result "build for $("$PG_CONFIG" --version)" $?
	cat "$log"
	[ $failed -eq 0 ]
}

# installcheck KIND [VARIABLE=VALUE ...]: one of the three kinds of tests that
# "make installcheck" runs, by making the other two empty.
installcheck() {
	local kind=$1 variables=()

	shift
	[ "$kind" = regress ] || variables+=(REGRESS=)
	[ "$kind" = isolation ] || variables+=(ISOLATION=)
	[ "$kind" = tap ] || variables+=(TAP_TESTS=)
	log=$scratch/$kind.log
	as_tester timeout --kill-after=30 1800 make -s -C "$scratch/outbox" \
		PG_CONFIG="$PG_CONFIG" "${variables[@]}" "$@" installcheck 2>&1 | tee "$log"
}

# regress and isolation: both are run by pg_regress, which closes with "All N
# tests passed." or "N of M tests failed."
pg_regress_suite() {
	local kind=$1 output=$2 total bad
	shift 2

	say "=== $kind"
	installcheck "$kind" "$@"
	total=$(sed -nE 's/.*All ([0-9]+) tests passed.*/\1/p' "$log")
	if [ -n "$total" ]; then
		count "$total" 0 "$kind"
	elif read -r bad total < <(sed -nE 's/.*[^0-9]([0-9]+) of ([0-9]+) tests failed.*/\1 \2/p' "$log"); then
		count $((total - bad)) "$bad" "$kind"
	else
		count 0 1 "$kind (did not finish)"
	fi
	[ -n "$total" ] && [ -z "${bad:-}" ] && return
	for file in "$scratch/outbox/$output/regression.diffs" \
		"$scratch/outbox/$output/log/postmaster.log"; do
		[ ! -e "$file" ] || show "$file" 200
	done
}

suite_regress() {
	pg_regress_suite regress . ${REGRESS:+REGRESS="$REGRESS"}
	keep_logs regress
}

suite_isolation() {
	pg_regress_suite isolation output_iso ${ISOLATION:+ISOLATION="$ISOLATION"}
	keep_logs isolation
}

# The next suite's "make" wipes tmp_check, and crashes are looked for at the end.
keep_logs() {
	mkdir -p "$scratch/logs/$1"
	find "$scratch/outbox" -path '*log/*' -type f \( -name '*.log' -o -name 'regress_log_*' \) \
		-exec cp -t "$scratch/logs/$1" {} +
}

suite_tap() {
	local tests bad failing name

	say '=== tap'
	installcheck tap PROVE_FLAGS="-j $jobs --timer" ${PROVE_TESTS:+PROVE_TESTS="$PROVE_TESTS"}
	keep_logs tap
	tests=$(sed -nE 's/^Files=[0-9]+, Tests=([0-9]+),.*/\1/p' "$log")
	if grep -q '^Result: PASS' "$log"; then
		count "$tests" 0 tap
		return
	fi
	# A program that died has failed too, though none of its tests may have.
	read -r bad failing < <(sed -nE 's/^test.* \(Wstat: .* Failed: ([0-9]+)\)$/\1/p' "$log" |
		awk '{ bad += $1; failing += $1 ? $1 : 1 } END { print bad + 0, failing + 0 }')
	if [ -n "$tests" ] && [ "$failing" -gt 0 ]; then
		count $((tests - bad)) "$failing" tap
	else
		count "${tests:-0}" 1 'tap (did not finish)'
	fi
	for name in $(sed -nE 's,^(test/t/[^ ]+)\.pl +\(Wstat.*,\1,p' "$log"); do
		name=${name##*/}
		for file in "$scratch/logs/tap/regress_log_$name" "$scratch/logs/tap/${name}_"*.log; do
			[ ! -e "$file" ] || show "$file" 60
		done
	done
}

# The code must compile without a warning, with gcc and with the clang that the
# server was built for.
suite_werror() {
	local compiler clang

	say '=== werror'
	clang=$(sed -nE 's/^CLANG *= *//p' "$(dirname "$("$PG_CONFIG" --pgxs)")/../Makefile.global")
	for compiler in gcc ${clang:-$(command -v clang)}; do
		log=$scratch/werror.log
		as_tester make -s -C "$scratch/outbox" PG_CONFIG="$PG_CONFIG" with_llvm=no clean >/dev/null &&
			as_tester make -s -k -C "$scratch/outbox" -j "$jobs" PG_CONFIG="$PG_CONFIG" \
				with_llvm=no WERROR=1 CC="$compiler" all >"$log" 2>&1
		result "$compiler -Wall -Wextra -Werror" $?
		cat "$log"
	done
}

# The other suites: scripts that test with the installation that PG_CONFIG
# names, as whoever runs them, and tell by their exit code.
suite_scripts() {
	local script status good bad

	for script in "$top"/test/*.sh; do
		script=${script##*/}
		case $script in
			common.sh | run.sh | matrix.sh | demo.sh | indent.sh) continue ;;
		esac
		say "=== $script"
		log=$scratch/script.log
		as_tester timeout --kill-after=30 900 env PG_CONFIG="$PG_CONFIG" \
			bash "$scratch/outbox/test/$script" 2>&1 | tee "$log"
		status=$?
		# its own count, if it closes with one
		if read -r good bad < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed$/\1 \2/p' "$log" | tail -n 1) &&
			[ $((bad > 0)) -eq $((status > 0)) ]; then
			count "$good" "$bad" "$script"
		else
			result "$script" $status
		fi
	done

	# The demonstration is what a newcomer runs first: it must work too.
	if [ -e "$top/test/demo.sh" ]; then
		say '=== demo.sh'
		as_tester timeout --kill-after=30 300 env PG_CONFIG="$PG_CONFIG" \
			bash "$scratch/outbox/test/demo.sh" >"$scratch/demo.log" 2>&1
		status=$?
		[ $status -eq 0 ] || cat "$scratch/demo.log"
		result demo.sh $status
	fi
}

# The workers that the documentation shows; they may need packages, so not as
# the tester.
suite_examples() {
	local status good bad

	say '=== examples'
	log=$scratch/examples.log
	timeout --kill-after=30 900 env PG_CONFIG="$PG_CONFIG" \
		bash "$scratch/outbox/test/examples/run.sh" 2>&1 | tee "$log"
	status=$?
	if read -r good bad < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed$/\1 \2/p' "$log" | tail -n 1) &&
		[ $((bad > 0)) -eq $((status > 0)) ]; then
		count "$good" "$bad" examples
	else
		result examples $status
	fi
}

# No server process may have crashed on the way, even if the test that ran it
# did not notice.  (Signal 9 is what tests send.)
check_crashes() {
	log=$scratch/crashes.log
	grep -rE 'TRAP: |PANIC: |was terminated by signal (4|6|7|8|11)\b' "$scratch/logs" >"$log" 2>/dev/null
	result 'no server process crashed' $((!$?))
	cat "$log"
}

if build; then
	for suite; do
		declare -F "suite_$suite" >/dev/null || die "no such suite: $suite"
		"suite_$suite"
	done
	check_crashes
fi

say '=== All tests'
[ ${#failures[@]} -eq 0 ] || printf 'FAILED: %s\n' "${failures[@]}"
say "$passed passed, $failed failed"
[ $failed -eq 0 ]
