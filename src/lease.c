/*-------------------------------------------------------------------------
 *
 * lease.c
 *		outbox.claim(): leases of jobs.
 *
 * A claim locks jobs that are due, oldest first, passing over those that others
 * have locked, moves their due time to the end of the lease and gives them the
 * number of the claim.  A job whose lease has run out is due like any other;
 * its attempt did not return, and when that was the last one it is dead.
 * Before that, a claim of many jobs takes what it can lease in memory
 * (lease_many.c).
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/tuplestore.h"

#define MAX_CLAIM 10000			/* jobs of one call */
#define FILTER_LIMIT_MS 5000	/* for a filter that the relay left */
#define CLAIM_COLUMNS 12

/*
 * Read the number of the row of the last result into a job; the columns are
 * those of JOB_COLUMNS.
 */
#define JOB_COLUMNS \
	" j.ctid, j.id, j.event_seq, j.attempts, j.claim, j.filter_pending, j.subject_key, j.due_at "

static void
read_job(int row, OutboxJob *job)
{
	bool		isnull;
	Datum		value;

	job->tid = *(ItemPointer) DatumGetPointer(outbox_spi_value(row, 1, &isnull));
	job->id = DatumGetInt64(outbox_spi_value(row, 2, &isnull));
	job->seq = DatumGetInt64(outbox_spi_value(row, 3, &isnull));
	job->attempt = DatumGetInt32(outbox_spi_value(row, 4, &isnull));
	value = outbox_spi_value(row, 5, &isnull);
	job->old_claim = isnull ? 0 : DatumGetInt64(value);
	value = outbox_spi_value(row, 6, &isnull);
	job->filter_pending = !isnull && DatumGetBool(value);
	value = outbox_spi_value(row, 7, &isnull);
	job->keyed = !isnull;
	job->subject_key = isnull ? 0 : DatumGetInt64(value);
	job->due_at = DatumGetTimestampTz(outbox_spi_value(row, 8, &isnull));
}

/*
 * A job of an ordered subscription can be claimed only when it is the oldest
 * of its subject that has not come to an end.
 */
#define DUE_JOBS \
	" FROM outbox.jobs j WHERE j.subscription_id OPERATOR(pg_catalog.=) $1" \
	" AND j.done_at IS NULL AND j.dead_at IS NULL" \
	" AND j.due_at OPERATOR(pg_catalog.>=) $2 AND j.due_at OPERATOR(pg_catalog.<=) $3" \
	" AND NOT outbox.leased(j.id)"
#define OLDEST_OF_SUBJECT \
	" AND (j.subject_key IS NULL OR j.id OPERATOR(pg_catalog.=) (SELECT b.id FROM outbox.jobs b" \
	" WHERE b.subscription_id OPERATOR(pg_catalog.=) j.subscription_id" \
	" AND b.subject_key OPERATOR(pg_catalog.=) j.subject_key AND b.dead_at IS NULL" \
	" AND b.done_at IS NULL" OUTBOX_OLDEST_FIRST " LIMIT 1))"
#define NOT_AT_REST \
	" AND (NOT $5 OR (SELECT true FROM outbox.armed a" \
	" WHERE a.database OPERATOR(pg_catalog.=) $6 AND a.stopped_at IS NULL))"

/* Lock jobs that are due in a time; returns how many. */
static int
lock_due(OutboxClaim *claim, TimestampTz from, TimestampTz to, int limit, OutboxJob *jobs)
{
#define LOCK_TAIL " ORDER BY j.due_at, j.id LIMIT $4 FOR NO KEY UPDATE OF j SKIP LOCKED"
#define LOCK_ARGS 6, {INT4OID, TIMESTAMPTZOID, TIMESTAMPTZOID, INT8OID, BOOLOID, OIDOID}, NULL
	static OutboxPlan plain = {
		"SELECT" JOB_COLUMNS DUE_JOBS NOT_AT_REST LOCK_TAIL, LOCK_ARGS
	};
	static OutboxPlan ordered = {
		"SELECT" JOB_COLUMNS DUE_JOBS OLDEST_OF_SUBJECT NOT_AT_REST LOCK_TAIL, LOCK_ARGS
	};
	Datum		values[6];
	int			n;
	int			i;

	values[0] = Int32GetDatum(claim->consumer->id);
	values[1] = TimestampTzGetDatum(from);
	values[2] = TimestampTzGetDatum(to);
	values[3] = Int64GetDatum(limit);
	values[4] = BoolGetDatum(claim->only_armed);
	values[5] = ObjectIdGetDatum(MyDatabaseId);
	n = (int) outbox_execute(claim->consumer->ordered ? &ordered : &plain, values, NULL,
							 SPI_OK_SELECT);
	for (i = 0; i < n; i++)
		read_job(i, &jobs[i]);
	SPI_freetuptable(SPI_tuptable);
	return n;
}

/*
 * Nothing more is due now, and shared memory does not know all times at which
 * something will be: there were too many, or the server has started since.  Tell
 * it the next one, so that who waits need not wait for a sweep.
 */
static void
look_ahead(const OutboxConsumer *consumer, OutboxLook *look, TimestampTz now)
{
	static OutboxPlan next = {
		"SELECT j.due_at" DUE_JOBS " ORDER BY j.due_at, j.id LIMIT 1",
		3, {INT4OID, TIMESTAMPTZOID, TIMESTAMPTZOID}, NULL
	};
	TimestampTz due = DT_NOEND;
	Datum		values[3];
	bool		isnull;

	if (!look->forgot)
		return;
	values[0] = Int32GetDatum(consumer->id);
	values[1] = TimestampTzGetDatum(now + 1);
	values[2] = TimestampTzGetDatum(DT_NOEND - 1);
	if (outbox_execute(&next, values, NULL, SPI_OK_SELECT) > 0)
		due = DatumGetTimestampTz(outbox_spi_value(0, 1, &isnull));
	SPI_freetuptable(SPI_tuptable);
	outbox_hint_next_due(look, due);
}

/*
 * Lock up to limit jobs that are due now: above the mark of the hint first,
 * below it when that was not enough and it has not just been tried.  Then come
 * those that were held back when the subscription was ordered, if it is not any
 * more: nobody else will make them due.
 */
static int
lock_some(OutboxClaim *claim, int limit, OutboxJob *jobs)
{
	const OutboxConsumer *consumer = claim->consumer;
	Oid			handler_owner = outbox_handler_owner(consumer);
	TimestampTz began;
	TimestampTz now;
	OutboxLook	look;
	bool		swept;
	int			n;

	outbox_hint_begin(consumer->id, &look);
	began = now = GetCurrentTimestamp();
	n = lock_due(claim, look.low, now, limit, jobs);
	claim->drained = n < limit;
	if (look.low == DT_NOBEGIN)
		outbox_hint_swept(&look, began);
	outbox_hint_end(&look, n < limit ? now : jobs[n - 1].due_at, n < limit);

	swept = look.low == DT_NOBEGIN;
	if (n < limit)
		look_ahead(consumer, &look, now);
	if (n < limit && !swept && outbox_hint_may_sweep(&look))
	{
		began = GetCurrentTimestamp();
		n += lock_due(claim, DT_NOBEGIN, look.low - 1, limit - n, jobs + n);
		outbox_hint_swept(&look, began);
		swept = true;
		if (n == limit)
		{
			/* there may be others down there */
			claim->drained = false;
			outbox_hint_post(consumer->id, jobs[n - 1].due_at, handler_owner);
		}
	}
	if (n < limit && swept && !consumer->ordered)
	{
		n += lock_due(claim, DT_NOEND, DT_NOEND, limit - n, jobs + n);
		if (n == limit)
		{
			claim->drained = false;
			outbox_hint_post(consumer->id, DT_NOBEGIN, handler_owner);
		}
	}
	if (n > 0)
	{
		TimestampTz first = DT_NOEND;
		int			i;

		for (i = 0; i < n; i++)
			first = Min(first, jobs[i].due_at == DT_NOEND ? DT_NOBEGIN : jobs[i].due_at);
		outbox_hint_note_abort(consumer->id, first, handler_owner);
	}
	/* without those that a claim in memory has taken just now */
	return outbox_leave_leased(consumer, jobs, n);
}

/* Give up a job of which the filter that the relay left says no. */
static void
drop_job(const OutboxConsumer *consumer, const OutboxJob *job)
{
	static OutboxPlan drop = {
		"UPDATE outbox.jobs SET done_at = $2, cancelled = true, claim = NULL,"
		" last_error = 'the filter does not match'"
		" WHERE ctid OPERATOR(pg_catalog.=) $1",
		2, {TIDOID, TIMESTAMPTZOID}, NULL
	};
	Datum		values[2];

	values[0] = PointerGetDatum(&job->tid);
	values[1] = TimestampTzGetDatum(GetCurrentTimestamp());
	outbox_execute(&drop, values, NULL, SPI_OK_UPDATE);
	if (consumer->ordered && job->keyed)
		outbox_free_subject(consumer, job->subject_key, 0);
}

/*
 * Which of the jobs that were locked are to be worked on?  Those that have had
 * their last attempt, which did not return, are dead.  Filters that the relay
 * left are evaluated.  Returns how many remain, in order.
 */
static int
sort_out(OutboxClaim *claim, OutboxJob *jobs, int n)
{
	const OutboxConsumer *consumer = claim->consumer;
	int			kept = 0;
	int			i;

	for (i = 0; i < n; i++)
	{
		OutboxJob  *job = &jobs[i];

		if (job->old_claim != 0 && job->attempt >= consumer->max_attempts)
			outbox_bury_job(consumer, job,
							psprintf("attempt %d did not return before its lease ended", job->attempt));
		else if (job->filter_pending && consumer->filter != NULL &&
				 !outbox_filter_accepts(consumer->filter, job->seq, FILTER_LIMIT_MS))
			drop_job(consumer, job);
		else
			jobs[kept++] = *job;
	}
	return kept;
}

/* Write the leases of jobs to their rows, which are locked. */
static void
lease_jobs(OutboxClaim *claim, OutboxJob *jobs, int n)
{
	static OutboxPlan lease = {
		"UPDATE outbox.jobs j SET due_at = $2, attempts = u.attempt, claim = $3, holder = $4,"
		" filter_pending = NULL,"
		" last_error = CASE WHEN j.claim IS NULL THEN j.last_error"
		" ELSE pg_catalog.format('attempt %s did not return before its lease ended', j.attempts) END"
		" FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($5)) AS u(tid, attempt)"
		" WHERE j.ctid OPERATOR(pg_catalog.=) u.tid",
		5, {TIDARRAYOID, TIMESTAMPTZOID, INT8OID, TEXTOID, INT4ARRAYOID}, NULL
	};
	Datum	   *tids = palloc(n * sizeof(Datum));
	Datum	   *attempts = palloc(n * sizeof(Datum));
	Datum		values[5];
	uint64		leased;
	int			i;

	for (i = 0; i < n; i++)
	{
		if (jobs[i].attempt < PG_INT32_MAX)
			jobs[i].attempt++;
		tids[i] = PointerGetDatum(&jobs[i].tid);
		attempts[i] = Int32GetDatum(jobs[i].attempt);
	}
	values[0] = outbox_make_array(tids, NULL, n, TIDOID);
	values[1] = TimestampTzGetDatum(claim->leased_until);
	values[2] = Int64GetDatum(claim->claim);
	values[3] = CStringGetTextDatum(claim->holder);
	values[4] = outbox_make_array(attempts, NULL, n, INT4OID);
	leased = outbox_execute(&lease, values, NULL, SPI_OK_UPDATE);
	if (leased != (uint64) n)
		ereport(ERROR,
				(errcode(ERRCODE_TRIGGERED_DATA_CHANGE_VIOLATION),
				 errmsg("only " UINT64_FORMAT " of %d jobs were leased", leased, n)));
}

/*
 * Claim jobs: as the owner of the extension, connected to SPI, in a transaction
 * whose commit makes it so.  What is found is in the current memory context.
 *
 * When all that was locked came to an end here, there may be others.
 */
void
outbox_claim_jobs(OutboxClaim *claim)
{
	OutboxJob  *rest;
	int			nrest = 0;
	int			n;

	claim->claim = 0;
	claim->njobs = 0;
	claim->drained = true;
	claim->jobs = palloc(claim->max_jobs * sizeof(OutboxJob));
	if (claim->consumer->paused)
		return;
	outbox_settle_expired(claim->consumer);
	outbox_claim_in_memory(claim);
	rest = claim->jobs + claim->nmemory;
	while (claim->nmemory < claim->max_jobs && nrest == 0)
	{
		CHECK_FOR_INTERRUPTS();
		n = lock_some(claim, claim->max_jobs - claim->nmemory, rest);
		nrest = sort_out(claim, rest, n);
		if (n == 0)
			break;
	}
	claim->njobs = claim->nmemory + nrest;
	if (claim->njobs > 0)
		outbox_begin_lease(claim);
	if (nrest > 0)
		lease_jobs(claim, rest, nrest);
	if (claim->nmemory > 0)
		outbox_lease_keep(claim->memory, claim->claim, claim->leased_until, claim->holder, nrest > 0);
}

/*
 * Is there a job that can be claimed now?  It may be locked by somebody who
 * claims it just now.  When there seems to be none, *again is when it is worth
 * looking below the mark: DT_NOEND when that has been done.  As the owner of the
 * extension, connected to SPI.
 */
bool
outbox_look_for_jobs(const OutboxConsumer *consumer, TimestampTz *again)
{
#define LOOK_TAIL " ORDER BY j.due_at, j.id LIMIT 1"
#define LOOK_ARGS 3, {INT4OID, TIMESTAMPTZOID, TIMESTAMPTZOID}, NULL
	static OutboxPlan plain = {"SELECT 1" DUE_JOBS LOOK_TAIL, LOOK_ARGS};
	static OutboxPlan ordered = {"SELECT 1" DUE_JOBS OLDEST_OF_SUBJECT LOOK_TAIL, LOOK_ARGS};
	OutboxPlan *plan = consumer->ordered ? &ordered : &plain;
	TimestampTz began;
	TimestampTz now;
	OutboxLook	look;
	Datum		values[3];
	bool		found;

	*again = DT_NOEND;
	outbox_settle_expired(consumer);
	outbox_hint_begin(consumer->id, &look);
	began = now = GetCurrentTimestamp();
	values[0] = Int32GetDatum(consumer->id);
	values[1] = TimestampTzGetDatum(look.low);
	values[2] = TimestampTzGetDatum(now);
	if (outbox_execute(plan, values, NULL, SPI_OK_SELECT) > 0)
		return true;
	outbox_hint_end(&look, now, true);
	look_ahead(consumer, &look, now);
	if (look.low != DT_NOBEGIN)
	{
		if (!outbox_hint_may_sweep(&look))
		{
			*again = outbox_hint_next_sweep(&look);
			return false;
		}
		began = GetCurrentTimestamp();
		values[1] = TimestampTzGetDatum(DT_NOBEGIN);
		values[2] = TimestampTzGetDatum(look.low - 1);
		found = outbox_execute(plan, values, NULL, SPI_OK_SELECT) > 0;
	}
	else
		found = false;
	if (!found && !consumer->ordered)
	{
		/* as in lock_some */
		values[1] = values[2] = TimestampTzGetDatum(DT_NOEND);
		found = outbox_execute(plan, values, NULL, SPI_OK_SELECT) > 0;
	}
	outbox_hint_swept(&look, began);
	if (found)
		outbox_hint_post(consumer->id, DT_NOBEGIN, outbox_handler_owner(consumer));
	return found;
}

/* Who claims, as it is stored: what was given, or the name of the application */
static char *
holder_name(FunctionCallInfo fcinfo, int n)
{
	const char *name = PG_ARGISNULL(n) ? application_name : text_to_cstring(PG_GETARG_TEXT_PP(n));

	return outbox_clip(name ? name : "", OUTBOX_MAX_HOLDER);
}

/* Put a claimed job and its event into the result; false: there is no event. */
static bool
put_job(ReturnSetInfo *rsinfo, const OutboxClaim *claim, const OutboxJob *job, int row)
{
	Datum		values[CLAIM_COLUMNS];
	bool		nulls[CLAIM_COLUMNS] = {false};
	int			i;

	values[0] = Int64GetDatum(job->id);
	values[1] = Int64GetDatum(claim->claim);
	values[2] = Int32GetDatum(job->attempt);
	values[3] = Int32GetDatum(claim->consumer->max_attempts);
	values[4] = TimestampTzGetDatum(claim->leased_until);
	values[5] = Int64GetDatum(job->seq);
	for (i = 6; i < CLAIM_COLUMNS; i++)
		values[i] = outbox_spi_value(row, i - 4, &nulls[i]);
	if (nulls[6])
		return false;
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	return true;
}

/*
 * Put the claimed jobs with their events into the result.  A job whose event
 * somebody has deleted can never be handled: it is dead, and not in the result.
 * Returns how many were put.
 */
static int
put_jobs(ReturnSetInfo *rsinfo, const OutboxClaim *claim)
{
	static OutboxPlan events = {
		"SELECT u.ord, e.type, e.subject, e.scope, e.payload, e.headers, e.recorded_at"
		" FROM pg_catalog.unnest($1) WITH ORDINALITY u(seq, ord)"
		" LEFT JOIN outbox.events e ON e.seq OPERATOR(pg_catalog.=) u.seq"
		" ORDER BY u.ord",
		1, {INT8ARRAYOID}, NULL
	};
	Datum	   *seqs = palloc(claim->njobs * sizeof(Datum));
	List	   *missing = NIL;
	ListCell   *lc;
	Datum		value;
	int			i;

	for (i = 0; i < claim->njobs; i++)
		seqs[i] = Int64GetDatum(claim->jobs[i].seq);
	value = outbox_make_array(seqs, NULL, claim->njobs, INT8OID);
	if (outbox_execute(&events, &value, NULL, SPI_OK_SELECT) != (uint64) claim->njobs)
		elog(ERROR, "events of claimed jobs were not found");
	for (i = 0; i < claim->njobs; i++)
	{
		if (!put_job(rsinfo, claim, &claim->jobs[i], i))
			missing = lappend(missing, &claim->jobs[i]);
	}
	SPI_freetuptable(SPI_tuptable);
	foreach(lc, missing)
	{
		OutboxJob  *job = lfirst(lc);

		/* nobody else may take it before it is seen to be dead */
		outbox_settle_job(job->id, claim->claim);
		outbox_bury_job(claim->consumer, job,
						psprintf("event " INT64_FORMAT " does not exist", job->seq));
	}
	return claim->njobs - list_length(missing);
}

PG_FUNCTION_INFO_V1(outbox_claim);

/*
 * outbox.claim(): claim up to max_jobs jobs of a subscription that are due, in
 * the order of their due times and ids, and return them with their events.
 */
Datum
outbox_claim(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	OutboxOwnerContext context;
	OutboxConsumer consumer;
	OutboxClaim claim = {0};
	char	   *name;

	outbox_check_not_null(fcinfo, 0, "subscription");
	outbox_check_not_null(fcinfo, 1, "max_jobs");
	name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	claim.max_jobs = PG_GETARG_INT32(1);
	if (claim.max_jobs < 1 || claim.max_jobs > MAX_CLAIM)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_jobs must be between 1 and %d", MAX_CLAIM)));
	if (!PG_ARGISNULL(2))
		claim.lease = outbox_interval_us(PG_GETARG_INTERVAL_P(2), "lease", false);
	claim.holder = holder_name(fcinfo, 3);
	claim.in_memory = true;
	claim.consumer = &consumer;
	InitMaterializedSRF(fcinfo, 0);

	outbox_claim_begins(claim.max_jobs >= OUTBOX_MANY_JOBS);
	outbox_begin_call(&context);
	outbox_consumer_by_name(name, context.userid, &consumer);
	if (claim.lease == 0)
		claim.lease = consumer.lease;
	do
	{
		outbox_claim_jobs(&claim);
	} while (claim.njobs > 0 && put_jobs(rsinfo, &claim) == 0);
	outbox_spi_finish();
	outbox_become_caller(&context);
	outbox_claim_ended();
	PG_RETURN_NULL();
}
