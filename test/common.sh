# Shell helpers shared by the scripts of this directory; to be sourced by bash.

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*"; }

die() {
	printf '%s: %s\n' "$(basename "$0")" "$*" >&2
	exit 1
}

# Run a command as root: directly, or through sudo.
as_root() {
	if [ "$(id -u)" -eq 0 ]; then
		"$@"
	elif command -v sudo >/dev/null; then
		sudo "$@"
	else
		die "needs root or sudo for: $*"
	fi
}

# Run a command as the user that tests run as.  PostgreSQL refuses root, so
# root becomes "postgres" (or "nobody", with a server that Debian's packages did
# not bring); anybody else stays who they are.
as_tester() {
	if [ "$(id -u)" -eq 0 ]; then
		runuser -u "$(tester)" -- "$@"
	else
		"$@"
	fi
}

tester() {
	id -un postgres 2>/dev/null || echo nobody
}

package_installed() {
	[ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# Install those of the given packages that are missing.  No cluster is made or
# started by the way: postgresql-common would make one for a new server
# package, and start it.
install_packages() {
	local missing=() package noclusters=/etc/postgresql-common/createcluster.d/outbox.conf

	for package; do
		package_installed "$package" || missing+=("$package")
	done
	[ ${#missing[@]} -gt 0 ] || return 0
	command -v apt-get >/dev/null ||
		die "please install: ${missing[*]} (only Debian's apt is driven by this script)"

	say "Installing ${missing[*]} ..."
	as_root mkdir -p "${noclusters%/*}"
	echo 'create_main_cluster = false' | as_root tee "$noclusters" >/dev/null
	if ! {
		as_root apt-get -qq update </dev/null &&
			as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install \
				-y --no-install-recommends "${missing[@]}" </dev/null
	} >/tmp/outbox-apt.$$ 2>&1; then
		tail -n 20 /tmp/outbox-apt.$$ >&2
		rm -f /tmp/outbox-apt.$$
		as_root rm -f "$noclusters"
		die "could not install ${missing[*]}"
	fi
	rm -f /tmp/outbox-apt.$$
	as_root rm -f "$noclusters"
}

# copy_tree DIR: copy the source tree, without what was built in it.
copy_tree() {
	mkdir -p "$1"
	tar -C "$top" --exclude=.git --exclude='*.o' --exclude='*.bc' \
		--exclude='*.so' --exclude="tmp_check*" --exclude=results \
		--exclude=output_iso --exclude='regression.*' -cf - . |
		tar -C "$1" -xf -
}

# private_server PG_CONFIG DIR: lay a relocated copy of an installed PostgreSQL
# in DIR, and set PG_CONFIG to its pg_config.
#
# "make install" then goes into the copy: nothing of the system's server is
# touched, and two runs at once do not overwrite each other's library.  The
# server finds its files relative to its own binary (see src/port/path.c), so
# it is enough to copy the binaries and to link the rest.
private_server() {
	local dir source

	mkdir -p "$2$("$1" --bindir)" || die "cannot run $1"
	cp -L "$("$1" --bindir)"/* "$2$("$1" --bindir)"
	for dir in --pkglibdir --sharedir --includedir --libdir --localedir; do
		source=$("$1" $dir)
		[ -d "$source" ] && [ ! -e "$2$source" ] || continue
		mkdir -p "$2${source%/*}"
		case $dir in
			# "make install" writes into these two
			--pkglibdir | --sharedir) cp -rs "$source" "$2$source" ;;
			*) ln -s "$source" "$2$source" ;;
		esac
	done
	rm -rf "$2$("$1" --pkglibdir)"/{outbox.so,bitcode/outbox*} \
		"$2$("$1" --sharedir)"/extension/outbox[.-]*

	PG_CONFIG=$2$("$1" --bindir)/pg_config
	[ "$("$PG_CONFIG" --pkglibdir)" = "$2$("$1" --pkglibdir)" ] ||
		die "the copy of PostgreSQL in $2 does not know its place"
}

# find_server PACKAGE ...: set PG_CONFIG to that of the server to work with, the
# environment's or Debian's, and install what building and the caller need.
find_server() {
	local packages=(gcc libc6-dev make "$@")

	if [ -z "${PG_CONFIG:-}" ]; then
		PG_CONFIG=/usr/lib/postgresql/15/bin/pg_config
		packages+=(postgresql-15 postgresql-server-dev-15)
	fi
	if command -v dpkg-query >/dev/null; then
		install_packages "${packages[@]}"
	fi
	"$PG_CONFIG" --version >/dev/null || die "cannot run $PG_CONFIG"

	# nothing of the caller's environment may lead the tools elsewhere
	unset PGHOST PGPORT PGUSER PGPASSWORD PGDATABASE PGDATA PGSERVICE PGOPTIONS \
		MAKEFLAGS MFLAGS MAKELEVEL
	export LC_ALL=C.UTF-8
}

# make_scratch NAME: make a directory for what is only needed in this run, with
# the source in outbox/ and a PostgreSQL of its own in server/, and set scratch
# and PG_CONFIG.  It becomes the working directory, since the tester may not be
# let into the caller's.
make_scratch() {
	scratch=$(mktemp -d "/tmp/$1.XXXXXX") || exit 1
	chmod 755 "$scratch"
	export HOME=$scratch
	cd "$scratch" || exit 1
	copy_tree "$scratch/outbox"
	private_server "$PG_CONFIG" "$scratch/server"
	[ "$(id -u)" -ne 0 ] || chown -R "$(tester)" "$scratch"
}

# remove_scratch: stop what still runs in there, which a test that was ended may
# have left, and remove it.
remove_scratch() {
	local file pid

	[ -n "${scratch:-}" ] || return 0
	while read -r file; do
		pid=$(head -n 1 "$file")
		case $(readlink "/proc/$pid/cwd") in
			"$scratch"/*)
				kill -QUIT "$pid"
				for ((i = 0; i < 100; i++)); do
					[ -e "/proc/$pid" ] || break
					sleep 0.1
				done
				;;
		esac
	done < <(find "$scratch" -name postmaster.pid -type f 2>/dev/null)
	cd / && rm -rf "$scratch"
}
