#!/bin/bash
#
# Build and test against several major versions of PostgreSQL.
#
#	test/matrix.sh [VERSION ...]		default: 15 17 18 19
#	test/matrix.sh --make [VERSION ...]	only make what these need
#
# Needs Debian 12, root or sudo.  15 is the system's.  The others come from
# later releases of Debian, each in a chroot that is made once (about a minute)
# and kept in OUTBOX_MATRIX_DIR (/var/cache/outbox-matrix; about 1 GB each).
# The mirror is the one that apt uses here, or OUTBOX_MATRIX_MIRROR.
# RUN_ARGS are handed to test/run.sh.
#
# VERSION may also be "assert": 15 built from Debian's source with assertions
# (some minutes, once), which are off in the packages.

set -u
set -o pipefail
. "$(dirname "$0")/common.sh"

matrix_dir=${OUTBOX_MATRIX_DIR:-/var/cache/outbox-matrix}

# The Debian suite that carries a version, and whether it must be taken from
# experimental beside that suite.
suite_of() {
	case $1 in
		17) echo trixie ;;
		18) echo forky ;;
		19) echo sid ;;
		*) die "no Debian release is known here that carries PostgreSQL $1" ;;
	esac
}

# What test/run.sh would install, so that it need not (a chroot has no network
# set up).
packages='gcc libc6-dev make perl libipc-run-perl'

mirror() {
	local found codename

	codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
	found=$(apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(REPO_URI)' 2>/dev/null |
		awk -v release="$codename" '$1 == release && $2 == "main" { print $3; exit }')
	echo "${OUTBOX_MATRIX_MIRROR:-${found:-http://deb.debian.org/debian}}"
}

# make_chroot VERSION: make it unless it is there, made to the present recipe.
make_chroot() {
	local version=$1 root=$matrix_dir/$1 suite mirror recipe start=$SECONDS
	local options=() sources=() server=postgresql-$1,postgresql-server-dev-$1

	suite=$(suite_of "$version") || exit 1
	recipe="$suite $packages"
	if [ "$(cat "$root/etc/outbox-matrix" 2>/dev/null)" = "$recipe" ]; then
		return
	fi

	say "Making a chroot of Debian $suite for PostgreSQL $version in $root ..."
	install_packages mmdebstrap debian-archive-keyring
	mirror=$(mirror)
	sources+=("deb $mirror $suite main")
	if [ "$suite" = sid ]; then
		sources+=("deb $mirror experimental main")
		options+=(--customize-hook="chroot \"\$1\" apt-get install -y --no-install-recommends -t experimental ${server//,/ }")
		server=
	fi

	# The proxies and certificates of this machine's apt, for the fetching.
	while read -r line; do
		options+=(--aptopt="$line")
	done < <(apt-config dump | grep -E '^Acquire::https?::.*"..*";$')

	rm -rf "$root" "$root.new"
	if ! mmdebstrap --mode=root --variant=apt \
		--include="${server:+$server,}${packages// /,}" \
		--aptopt='Acquire::Check-Valid-Until "false"' \
		--aptopt='APT::Install-Recommends "false"' \
		--dpkgopt='path-exclude=/usr/share/doc/*' \
		--dpkgopt='path-exclude=/usr/share/man/*' \
		--essential-hook='mkdir -p "$1/etc/postgresql-common/createcluster.d"' \
		--essential-hook='echo "create_main_cluster = false" >"$1/etc/postgresql-common/createcluster.d/outbox.conf"' \
		"${options[@]}" "$suite" "$root.new" "${sources[@]}" \
		</dev/null >"$matrix_dir/$version.log" 2>&1; then
		tail -n 20 "$matrix_dir/$version.log"
		rm -rf "$root.new"
		return 1
	fi
	echo "$recipe" >"$root.new/etc/outbox-matrix"
	mv "$root.new" "$root"
	say "... made in $((SECONDS - start)) s"
}

# make_assert: build the source of Debian's PostgreSQL 15 with assertions,
# unless it is there.
make_assert() {
	local prefix=$matrix_dir/assert/pgsql work start=$SECONDS options

	[ ! -x "$prefix/bin/pg_config" ] || return 0
	say "Building PostgreSQL 15 with assertions in $prefix ..."
	install_packages gcc libc6-dev make perl libipc-run-perl bzip2
	work=$(mktemp -d /tmp/outbox-assert.XXXXXX) || return 1
	chmod 755 "$work"
	mkdir -p "$work/lists/partial"
	echo "deb-src $(mirror) bookworm main" >"$work/sources.list"
	options=(-o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null
		-o Dir::State::Lists="$work/lists")
	if ! (
		set -e
		cd "$work"
		apt-get -qq "${options[@]}" update
		apt-get -qq "${options[@]}" source --download-only postgresql-15
		tar xjf postgresql-15_*.orig.tar.bz2
		cd postgresql-15.*
		./configure --prefix="$prefix" --enable-cassert --enable-debug \
			--enable-tap-tests --without-readline --without-zlib \
			CFLAGS='-O1 -fno-omit-frame-pointer'
		make -s -j "$(nproc)" all
		make -s install
		make -s -C contrib -j "$(nproc)" install
	) </dev/null >"$matrix_dir/assert.log" 2>&1; then
		tail -n 20 "$matrix_dir/assert.log"
		rm -rf "$work" "$matrix_dir/assert"
		return 1
	fi
	rm -rf "$work"
	say "... built in $((SECONDS - start)) s"
}

# make_server VERSION: make what a version needs and lacks.
make_server() {
	mkdir -p "$matrix_dir" && chmod 755 "$matrix_dir" || return 1
	case $1 in
		15) ;;
		assert) make_assert ;;
		*) make_chroot "$1" ;;
	esac
}

# in_chroot ROOT COMMAND ...: with /proc and /dev/shm, in namespaces of its own,
# so that neither a mount nor a server outlives the command.
in_chroot() {
	unshare --mount --pid --fork --kill-child bash -c '
		mount -t proc proc "$0/proc" &&
		mount -t tmpfs -o mode=1777 tmpfs "$0/dev/shm" &&
		exec chroot "$0" "$@"' "$@"
}

# test_version VERSION
test_version() {
	local version=$1 root=$matrix_dir/$1

	case $version in
		15)
			bash "$top/test/run.sh" ${RUN_ARGS:-}
			return
			;;
		assert)
			PG_CONFIG=$matrix_dir/assert/pgsql/bin/pg_config \
				bash "$top/test/run.sh" ${RUN_ARGS:-}
			return
			;;
	esac

	chmod 755 "$copy"
	copy_tree "$copy"
	in_chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
		CI="${CI:-}" OUTBOX_KEEP="${OUTBOX_KEEP:-}" \
		PG_CONFIG="/usr/lib/postgresql/$version/bin/pg_config" \
		bash "${copy#"$root"}/test/run.sh" ${RUN_ARGS:-}
}

# One at a time: two runs must not make the same chroot at once.
locked() {
	mkdir -p "$matrix_dir" &&
		(
			flock 9
			"$@"
		) 9>"$matrix_dir/lock"
}

make_only=
if [ "${1:-}" = --make ]; then
	make_only=1
	shift
fi
[ $# -gt 0 ] || set -- 15 17 18 19
if [ "$(id -u)" -ne 0 ]; then
	as_root env OUTBOX_MATRIX_DIR="$matrix_dir" bash "$0" ${make_only:+--make} "$@"
	exit
fi

output=$(mktemp)
copy=
trap 'rm -rf "$output" ${copy:+"$copy"}' EXIT
trap 'exit 130' INT TERM
failed=0
summary=()
for version; do
	if ! locked make_server "$version"; then
		failed=1
		summary+=("PostgreSQL $version: could not be made")
		continue
	fi
	[ -z "$make_only" ] || continue
	case $version in
		15 | assert) copy= ;;
		*) copy=$(mktemp -d "$matrix_dir/$version/tmp/outbox.XXXXXX") || exit 1 ;;
	esac
	say "=== PostgreSQL $version"
	if test_version "$version" 2>&1 | tee "$output"; then
		result=ok
	else
		result=FAILED
		failed=1
	fi
	closing=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$output" | tail -n 1)
	rm -rf ${copy:+"$copy"}
	summary+=("PostgreSQL $version: $result (${closing:-did not finish})")
done

if [ -z "$make_only" ]; then
	say "=== Matrix"
	printf '%s\n' "${summary[@]}"
fi
exit $failed
