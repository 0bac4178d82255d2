#!/bin/bash
#
# Indent the C source as PostgreSQL does, with the pgindent of PostgreSQL 17.
#
#	test/indent.sh [FILE ...]		rewrite (default: all files)
#	test/indent.sh --check [FILE ...]	only show what would change; 1 if anything
#
# Rewriting also brings typedefs.list, the list of our own types, up to date.
# pgindent is taken from PGINDENT (with pg_bsd_indent beside it and the server's
# types in ../../../../share/postgresql/17) or from the chroot of PostgreSQL 17
# that test/matrix.sh makes.

set -eu
. "$(dirname "$0")/common.sh"
cd "$top"

check=
if [ "${1:-}" = --check ]; then
	check=1
	shift
fi
[ $# -gt 0 ] || set -- outbox.c src/*.[ch]

# Without a pgindent of its own, a file travels to the chroot and back.
root=
if [ -z "${PGINDENT:-}" ]; then
	root=${OUTBOX_MATRIX_DIR:-/var/cache/outbox-matrix}/17
	bash test/matrix.sh --make 17
	PGINDENT=/usr/lib/postgresql/17/bin/pgindent
fi

work=$(mktemp -d "$root/tmp/outbox-indent.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work/old" "$work/new"
cp --parents "$@" "$work/old"
cp --parents "$@" "$work/new"

sed -nE -e 's/^\} ([A-Za-z_]\w*);$/\1/p' \
	-e 's/^typedef .*\(\*(\w+)\).*/\1/p' \
	-e 's/^typedef [^()]*[ *](\w+);$/\1/p' outbox.c src/*.[ch] |
	LC_ALL=C sort -u >"$work/typedefs.list"
differs=
if [ -n "$check" ]; then
	diff -u typedefs.list "$work/typedefs.list" || differs=1
elif ! cmp -s typedefs.list "$work/typedefs.list"; then
	cp "$work/typedefs.list" typedefs.list
fi

bin=${PGINDENT%/*}
cat "$root${bin%/lib/*}/share/postgresql/17/typedefs.list" >>"$work/typedefs.list"
${root:+chroot "$root"} env -C "${work#"$root"}/new" "$PGINDENT" \
	--indent="$bin/pg_bsd_indent" --typedefs=../typedefs.list .

for file; do
	if cmp -s "$work/old/$file" "$work/new/$file"; then
		continue
	fi
	differs=1
	if [ -n "$check" ]; then
		diff -u --label "$file" --label "$file (indented)" "$work/old/$file" "$work/new/$file" || :
	elif ! cmp -s "$work/old/$file" "$file"; then
		say "$file was changed meanwhile: left alone"
	else
		cat "$work/new/$file" >"$file"
		say "$file indented"
	fi
done
[ -z "$check" ] || [ -z "$differs" ]
