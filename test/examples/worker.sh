#!/bin/bash
#
# Handle the jobs of a subscription until SIGTERM.
#
#	worker.sh SUBSCRIPTION COMMAND [ARGUMENT ...]
#
# COMMAND is run for each job, with the payload of its event on standard input,
# and seq and type in OUTBOX_SEQ and OUTBOX_TYPE.  When it exits with 0 the job
# is complete, else it has failed, and what COMMAND said is kept with it.
# libpq's environment (PGHOST, PGDATABASE, ...) says where the server is.

set -u
subscription=$1
shift
stopping=
trap 'stopping=1' TERM		# bash runs this between two commands

# sql QUERY [NAME=VALUE ...]: run a query, in which :'NAME' is a value
sql() {
	local query=$1 value variables=()

	shift
	for value; do
		variables+=(-v "$value")
	done
	psql -XAtq -v ON_ERROR_STOP=1 -v VERBOSITY=sqlstate "${variables[@]}" <<<"$query"
}

work() {	# JOB CLAIM SEQ TYPE PAYLOAD
	local said

	if said=$(OUTBOX_SEQ=$3 OUTBOX_TYPE=$4 "${command[@]}" <<<"$5" 2>&1); then
		sql "SELECT outbox.complete(:'job', :'claim')" job="$1" claim="$2"
	else
		sql "SELECT outbox.fail(:'job', :'claim', :'error')" \
			job="$1" claim="$2" error="${said:0:1000}"
	fi >/dev/null	# an error here is OB001: another has claimed the job
}

command=("$@")
while [ -z "$stopping" ]; do
	# wait for up to 5 s, which is also how long SIGTERM may have to wait
	sql "CALL outbox.await_jobs(:'name', '5s')" name="$subscription" >/dev/null || sleep 1
	jobs=$(sql "SELECT concat_ws(E'\t', job, claim, seq, type, payload)
		FROM outbox.claim(:'name', 10, worker => 'worker.sh')" name="$subscription")
	while IFS=$'\t' read -r -u 3 job claim seq type payload; do
		if [ -z "$job" ]; then
			continue	# another was faster, or there was nothing to do
		elif [ -z "$stopping" ]; then
			work "$job" "$claim" "$seq" "$type" "$payload"
		else
			sql "SELECT outbox.release(:'job', :'claim')" job="$job" claim="$claim" >/dev/null
		fi
	done 3<<<"$jobs"
done
