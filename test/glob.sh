#!/bin/bash
#
# Compare the matcher of src/glob.c with a naive one on random pairs.
#
#	test/glob.sh [SEED [PAIRS]]
#
# The matcher is compiled without a server.  PG_CONFIG names the installation
# whose headers are used.

set -eu
. "$(dirname "$0")/common.sh"

pg_config=${PG_CONFIG:-pg_config}
work=$(mktemp -d "${TMPDIR:-/tmp}/outbox-glob.XXXXXX")
trap 'rm -rf "$work"' EXIT

"${CC:-cc}" -O2 -Wall -Wextra -Werror -Wno-unused-parameter -Wno-sign-compare -o "$work/glob_fuzz" \
	-I"$top/src" -I"$("$pg_config" --includedir-server)" \
	"$top/test/glob_fuzz.c" "$top/src/glob.c"
timeout 120 "$work/glob_fuzz" "$@"
