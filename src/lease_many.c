/*-------------------------------------------------------------------------
 *
 * lease_many.c
 *		Claims of many jobs, whose leases are kept in memory (lease_table.c).
 *
 * Such a claim walks index jobs_due itself and takes the jobs that nobody has.
 * What it walked over was a snapshot: a job may have come to an end, and its
 * lease with it, before it was taken.  So it looks again, at each row that it
 * has taken, with a snapshot that is taken afterwards: whoever ends a job or
 * writes a lease to its row holds it in the table of leases until that can be
 * seen.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "catalog/pg_type.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

/* Columns of outbox.jobs */
enum JobColumn
{
	COLUMN_ID = 1,
	COLUMN_SUBSCRIPTION,
	COLUMN_EVENT,
	COLUMN_KEY,
	COLUMN_DUE,
	COLUMN_ATTEMPTS,
	COLUMN_PENDING = 12,
	COLUMN_CLAIM
};

/* Oid of outbox.jobs */
Oid
outbox_jobs_relid(void)
{
	return outbox_our_relation("jobs");
}

/*
 * Give a claim its number and its end, counted from now and not from the start
 * of the transaction, which may have waited.
 */
void
outbox_begin_lease(OutboxClaim *claim)
{
	claim->claim = outbox_next_claim(claim->nmemory > 0);
	claim->leased_until = GetCurrentTimestamp() + claim->lease;
	outbox_hint_note(claim->consumer->id, claim->leased_until,
					 outbox_handler_owner(claim->consumer));
}

/*
 * Read a row of jobs_due's walk.  False when its lease has to be written to the
 * row: it has been claimed before and not come to an end, or has a filter that
 * is still to be evaluated.
 */
static bool
read_row(HeapTuple tuple, TupleDesc desc, OutboxJob *job)
{
	bool		isnull;
	Datum		value;

	job->tid = tuple->t_self;
	job->id = DatumGetInt64(heap_getattr(tuple, COLUMN_ID, desc, &isnull));
	job->seq = DatumGetInt64(heap_getattr(tuple, COLUMN_EVENT, desc, &isnull));
	job->due_at = DatumGetTimestampTz(heap_getattr(tuple, COLUMN_DUE, desc, &isnull));
	job->attempt = DatumGetInt32(heap_getattr(tuple, COLUMN_ATTEMPTS, desc, &isnull));
	value = heap_getattr(tuple, COLUMN_KEY, desc, &isnull);
	job->keyed = !isnull;
	job->subject_key = isnull ? 0 : DatumGetInt64(value);
	job->old_claim = 0;
	job->filter_pending = false;
	(void) heap_getattr(tuple, COLUMN_CLAIM, desc, &isnull);
	if (!isnull)
		return false;
	value = heap_getattr(tuple, COLUMN_PENDING, desc, &isnull);
	return isnull || !DatumGetBool(value);
}

/* Take what has been found, and keep what was taken; returns how many. */
static int
take(int lease, OutboxJob *jobs, int n, bool *enough)
{
	bool	   *taken = palloc(Max(n, 1) * sizeof(bool));
	int			kept = 0;
	int			i;

	*enough = n == 0 || outbox_lease_take(lease, jobs, n, taken);
	for (i = 0; i < n; i++)
	{
		if (taken[i])
			jobs[kept++] = jobs[i];
	}
	pfree(taken);
	return kept;
}

/*
 * Walk over jobs that are due from a time on and take up to limit of them.  *end
 * is how far it came, *drained whether there are no more of the kind.
 */
static int
walk(OutboxClaim *claim, Relation rel, TimestampTz from, TimestampTz now, TimestampTz *end,
	 bool *drained)
{
	Relation	index = index_open(outbox_our_relation("jobs_due"), AccessShareLock);
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	ScanKeyData keys[3];
	SysScanDesc scan;
	HeapTuple	tuple;
	int			n = 0;
	int			limit = claim->max_jobs;

	ScanKeyInit(&keys[0], COLUMN_SUBSCRIPTION, BTEqualStrategyNumber, F_INT4EQ,
				Int32GetDatum(claim->consumer->id));
	ScanKeyInit(&keys[1], COLUMN_DUE, BTGreaterEqualStrategyNumber, F_TIMESTAMPTZ_GE,
				TimestampTzGetDatum(from));
	ScanKeyInit(&keys[2], COLUMN_DUE, BTLessEqualStrategyNumber, F_TIMESTAMPTZ_LE,
				TimestampTzGetDatum(now));
	scan = systable_beginscan_ordered(rel, index, snapshot, 3, keys);
	*drained = true;
	*end = now;
	for (;;)
	{
		TimestampTz first;
		bool		enough;
		int			found = n;

		while (found < limit &&
			   (tuple = systable_getnext_ordered(scan, ForwardScanDirection)) != NULL)
		{
			OutboxJob  *job = &claim->jobs[found];

			CHECK_FOR_INTERRUPTS();
			if (!read_row(tuple, RelationGetDescr(rel), job))
			{
				*drained = false;
				*end = job->due_at;
				break;
			}
			if (!outbox_is_leased(RelationGetRelid(rel), job->id))
				found++;
		}
		first = found > n ? claim->jobs[n].due_at : now;
		n += take(claim->memory, claim->jobs + n, found - n, &enough);
		if (!enough)
		{
			*drained = false;
			*end = first;
			break;
		}
		if (n < limit && found == limit)
			continue;			/* others were quicker */
		if (n == limit)
		{
			*drained = false;
			*end = claim->jobs[n - 1].due_at;
		}
		break;
	}
	systable_endscan_ordered(scan);
	UnregisterSnapshot(snapshot);
	index_close(index, AccessShareLock);
	return n;
}

/*
 * Is nobody about to change a row, which can be seen?  Locks on rows are not in
 * the table of leases: that of a claim which writes its leases to the rows, that
 * of a prepared transaction, or of one that cancels a job.
 */
static bool
is_free(TupleTableSlot *slot)
{
	BufferHeapTupleTableSlot *tuple = (BufferHeapTupleTableSlot *) slot;
	TM_Result	result;

	LockBuffer(tuple->buffer, BUFFER_LOCK_SHARE);
	result = HeapTupleSatisfiesUpdate(tuple->base.tuple, GetCurrentCommandId(false), tuple->buffer);
	LockBuffer(tuple->buffer, BUFFER_LOCK_UNLOCK);
	return result == TM_Ok;
}

/*
 * Are the rows of the jobs that were taken still what they were, and does nobody
 * lock them?  Those that are not are left alone.  Returns how many remain.
 */
static int
look_again(OutboxClaim *claim, Relation rel, int n)
{
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	TimestampTz first = DT_NOEND;
	int			kept = 0;
	int			i;

	for (i = 0; i < n; i++)
	{
		OutboxJob  *job = &claim->jobs[i];

		if (table_tuple_fetch_row_version(rel, &job->tid, snapshot, slot) && is_free(slot))
			claim->jobs[kept++] = *job;
		else
		{
			first = Min(first, job->due_at);
			outbox_lease_drop(claim->memory, job, 1);
		}
	}
	ExecDropSingleTupleTableSlot(slot);
	UnregisterSnapshot(snapshot);
	if (kept < n)
	{
		/* it may only have been moved */
		outbox_hint_post(claim->consumer->id, first, outbox_handler_owner(claim->consumer));
	}
	return kept;
}

/*
 * Claim jobs whose leases can be kept in memory, from the mark of the hint on;
 * the first claim->nmemory of the jobs.  None when there are few.
 *
 * Not in a transaction with one snapshot for all of its statements, which would
 * not see what is claimed here, nor in one that is to change nothing, although
 * nothing is written.
 */
void
outbox_claim_in_memory(OutboxClaim *claim)
{
	const OutboxConsumer *consumer = claim->consumer;
	Oid			handler_owner = outbox_handler_owner(consumer);
	TimestampTz first = DT_NOEND;
	TimestampTz now;
	TimestampTz end;
	OutboxLook	look;
	Relation	rel;
	int			n;
	int			i;

	claim->nmemory = 0;
	claim->memory = -1;
	if (!claim->in_memory || claim->max_jobs < OUTBOX_MANY_JOBS || consumer->ordered ||
		IsolationUsesXactSnapshot() || XactReadOnly)
		return;
	rel = table_open(outbox_jobs_relid(), AccessShareLock);
	claim->memory = outbox_lease_open(RelationGetRelid(rel), consumer->id, handler_owner);
	if (claim->memory >= 0)
	{
		CommandCounterIncrement();
		outbox_hint_begin(consumer->id, &look);
		now = GetCurrentTimestamp();
		n = walk(claim, rel, look.low, now, &end, &claim->drained);
		outbox_hint_end(&look, end, claim->drained);
		for (i = 0; i < n; i++)
			first = Min(first, claim->jobs[i].due_at);
		n = look_again(claim, rel, n);
		if (n > 0 && n < OUTBOX_MANY_JOBS)
		{
			outbox_lease_drop(claim->memory, claim->jobs, n);
			outbox_hint_post(consumer->id, first, handler_owner);
			n = 0;
		}
		else if (n > 0)
			outbox_hint_note_abort(consumer->id, first, handler_owner);
		for (i = 0; i < n; i++)
		{
			if (claim->jobs[i].attempt < PG_INT32_MAX)
				claim->jobs[i].attempt++;
		}
		claim->nmemory = n;
		if (n == 0)
			outbox_lease_close(claim->memory);
	}
	table_close(rel, NoLock);
}

/*
 * Leave out of the jobs that a claim has locked those that have been taken in
 * memory meanwhile.  Whoever took one may pass over it too, since it is locked, so
 * it is posted when it is not any more.  Returns how many remain.
 */
int
outbox_leave_leased(const OutboxConsumer *consumer, OutboxJob *jobs, int n)
{
	Oid			relid = outbox_jobs_relid();
	int			kept = 0;
	int			i;

	for (i = 0; i < n; i++)
	{
		if (!outbox_is_leased(relid, jobs[i].id))
			jobs[kept++] = jobs[i];
		else
			outbox_hint_note(consumer->id, jobs[i].due_at, outbox_handler_owner(consumer));
	}
	return kept;
}

/*
 * A job that has not come to an end, in words of which the planner does not know
 * that index jobs_due has it: while the table is small it might walk that index
 * instead of fetching the rows at hand, and keep the plan.
 */
#define UNFINISHED " AND COALESCE(j.done_at, j.dead_at) IS NULL"

/* The attempt that a lease in memory stands for is counted when it ends there. */
#define ONE_ATTEMPT_MORE " LEAST(j.attempts, 2147483646) OPERATOR(pg_catalog.+) 1"

/* Write the lease of claim $1, which ends at $2, to the row of a job j. */
#define SETTLE "UPDATE outbox.jobs j SET due_at = $2, claim = $1, holder = $3, attempts =" ONE_ATTEMPT_MORE

/* The tids of the jobs of a lease as a parameter */
static Datum
tid_array(const OutboxLease *lease)
{
	Datum	   *values = palloc(Max(lease->njobs, 1) * sizeof(Datum));
	int			i;

	for (i = 0; i < lease->njobs; i++)
		values[i] = PointerGetDatum(&lease->tids[i]);
	return outbox_make_array(values, NULL, lease->njobs, TIDOID);
}

/*
 * Write what is left of the leases of a subscription that have run out to the
 * rows, where they are found to have run out: the attempt did not return.  Rows
 * that somebody has locked are left: they are about to come to an end, or are
 * due as they are.
 */
void
outbox_settle_expired(const OutboxConsumer *consumer)
{
	static OutboxPlan settle = {
		"WITH l AS (SELECT j.ctid AS tid FROM outbox.jobs j WHERE j.id OPERATOR(pg_catalog.=) ANY ($4)"
		UNFINISHED " AND j.claim IS NULL FOR NO KEY UPDATE SKIP LOCKED)"
		" " SETTLE " FROM l WHERE j.ctid OPERATOR(pg_catalog.=) l.tid",
		4, {INT8OID, TIMESTAMPTZOID, TEXTOID, INT8ARRAYOID}, NULL
	};
	OutboxLease lease;

	while (outbox_lease_expired(outbox_jobs_relid(), consumer->id, &lease))
	{
		Datum		values[4];

		CHECK_FOR_INTERRUPTS();
		values[0] = Int64GetDatum(lease.claim);
		values[1] = TimestampTzGetDatum(lease.until);
		values[2] = CStringGetTextDatum(lease.holder);
		values[3] = outbox_id_array(lease.jobs, lease.njobs);
		outbox_execute(&settle, values, NULL, SPI_OK_UPDATE);
		outbox_hint_post(consumer->id, lease.first_due, outbox_handler_owner(consumer));
		outbox_hint_note(consumer->id, lease.first_due, outbox_handler_owner(consumer));
		outbox_hint_note_abort(consumer->id, lease.first_due, outbox_handler_owner(consumer));
	}
}

/* Write the lease of a job, which this transaction ends in memory, to its row. */
static void
settle(const OutboxLease *lease, int64 job)
{
	static OutboxPlan settle = {
		SETTLE " WHERE j.id OPERATOR(pg_catalog.=) $4"
		" AND j.done_at IS NULL AND j.dead_at IS NULL AND j.claim IS NULL",
		4, {INT8OID, TIMESTAMPTZOID, TEXTOID, INT8OID}, NULL
	};
	Datum		values[4];

	values[0] = Int64GetDatum(lease->claim);
	values[1] = TimestampTzGetDatum(lease->until);
	values[2] = CStringGetTextDatum(lease->holder);
	values[3] = Int64GetDatum(job);
	outbox_execute(&settle, values, NULL, SPI_OK_UPDATE);
	outbox_lease_has_rows(outbox_jobs_relid(), lease->claim);
	outbox_hint_note(lease->subscription, lease->until, lease->handler_owner);
	outbox_hint_note_abort(lease->subscription, lease->first_due, lease->handler_owner);
}

/*
 * Write the lease of a job to its row, if it is kept in memory, so that what
 * follows finds it there.  claim: only when that one has it; 0: any.
 */
void
outbox_settle_job(int64 job, int64 claim)
{
	Oid			relid = outbox_jobs_relid();
	OutboxLease lease;

	if (!outbox_lease_of(relid, job, &lease) || (claim != 0 && lease.claim != claim))
		return;
	if (outbox_lease_end(relid, lease.claim, &job, 1, &lease) && lease.njobs > 0)
		settle(&lease, job);
}

/* Run a statement of end_jobs(), and add the ids that it returns to an array. */
static int
end_some(OutboxPlan *plan, Datum *values, const char *nulls, int64 *done)
{
	int			n = (int) outbox_execute(plan, values, nulls, outbox_deletes_done() ?
										 SPI_OK_DELETE_RETURNING : SPI_OK_UPDATE_RETURNING);
	int64	   *ids;

	n = outbox_result_ids(n, &ids);
	memcpy(done, ids, n * sizeof(int64));
	return n;
}

/*
 * Bring jobs of a lease to their end, of which the rows are where they were when
 * they were claimed; and then the others, which somebody has moved meanwhile.
 * Returns how many came to it.
 */
static int
end_jobs(const OutboxLease *lease, int64 *done)
{
#define STILL_LEASED UNFINISHED \
	" AND COALESCE(j.claim OPERATOR(pg_catalog.=) $1, true) RETURNING j.id"
#define END_HERE " ROWS FROM (pg_catalog.unnest($4), pg_catalog.unnest($5)) AS u(tid, id)" \
	" WHERE j.ctid OPERATOR(pg_catalog.=) u.tid AND (j.id OPERATOR(pg_catalog.=) u.id) IS TRUE" STILL_LEASED
#define END_BY_ID " WHERE j.id OPERATOR(pg_catalog.=) ANY ($5) AND $4 IS NULL" STILL_LEASED
#define SET_DONE "UPDATE outbox.jobs j SET done_at = $2, claim = $1, holder = $3, attempts =" \
	" CASE WHEN j.claim IS NULL THEN" ONE_ATTEMPT_MORE " ELSE j.attempts END"
#define END_ARGS 5, {INT8OID, TIMESTAMPTZOID, TEXTOID, TIDARRAYOID, INT8ARRAYOID}, NULL
	static OutboxPlan set_here = {SET_DONE " FROM" END_HERE, END_ARGS};
	static OutboxPlan set_by_id = {SET_DONE END_BY_ID, END_ARGS};
	static OutboxPlan delete_here = {"DELETE FROM outbox.jobs j USING" END_HERE, END_ARGS};
	static OutboxPlan delete_by_id = {"DELETE FROM outbox.jobs j" END_BY_ID, END_ARGS};
	bool		deletes = outbox_deletes_done();
	Datum		values[5];
	char		nulls[5] = {' ', ' ', ' ', ' ', ' '};
	int			n;

	values[0] = Int64GetDatum(lease->claim);
	values[1] = TimestampTzGetDatum(GetCurrentTimestamp());
	values[2] = CStringGetTextDatum(lease->holder);
	values[3] = tid_array(lease);
	values[4] = outbox_id_array(lease->jobs, lease->njobs);
	n = end_some(deletes ? &delete_here : &set_here, values, nulls, done);
	if (n < lease->njobs)
	{
		nulls[3] = 'n';
		n += end_some(deletes ? &delete_by_id : &set_by_id, values, nulls, done + n);
	}
	return n;
}

/*
 * The subscription of a claim that has leases in memory, for one who may work with
 * it; false when there is none such.
 */
bool
outbox_consumer_of_lease(Oid relid, int64 claim, Oid caller, OutboxConsumer *consumer)
{
	int32		subscription = outbox_lease_subscription(relid, claim);

	if (subscription == 0 || !outbox_find_consumer(NULL, subscription, consumer))
		return false;
	outbox_check_consumer(consumer, caller);
	return true;
}

/*
 * Complete jobs of a claim whose leases are in memory: those that are wanted, or
 * all.  False when it has none there.  *rows: others may be leased in their
 * rows.
 */
bool
outbox_complete_in_memory(int64 claim, const int64 *wanted, int nwanted, Oid caller,
						  int64 **done, int *ndone, bool *rows)
{
	Oid			relid = outbox_jobs_relid();
	OutboxConsumer consumer;
	OutboxLease lease;
	int			i;

	*rows = true;
	*ndone = 0;
	if (!outbox_consumer_of_lease(relid, claim, caller, &consumer) ||
		!outbox_lease_end(relid, claim, wanted, nwanted, &lease))
		return false;
	if (consumer.ordered)
	{
		/* it was not when they were claimed */
		for (i = 0; i < lease.njobs; i++)
			settle(&lease, lease.jobs[i]);
		return false;
	}
	*rows = lease.rows;
	*done = palloc(Max(lease.njobs, 1) * sizeof(int64));
	if (lease.njobs > 0)
		*ndone = end_jobs(&lease, *done);
	outbox_hint_note_done(consumer.id, *ndone);
	outbox_hint_note_abort(consumer.id, lease.until, outbox_handler_owner(&consumer));
	return true;
}

PG_FUNCTION_INFO_V1(outbox_leased);

/* outbox.leased(): is the lease of a job kept in memory? */
Datum
outbox_leased(PG_FUNCTION_ARGS)
{
	/* asked for each row of a walk */
	if (fcinfo->flinfo->fn_extra == NULL)
	{
		Oid		   *relid = MemoryContextAlloc(fcinfo->flinfo->fn_mcxt, sizeof(Oid));

		*relid = outbox_jobs_relid();
		fcinfo->flinfo->fn_extra = relid;
	}
	PG_RETURN_BOOL(outbox_is_leased(*(Oid *) fcinfo->flinfo->fn_extra, PG_GETARG_INT64(0)));
}

PG_FUNCTION_INFO_V1(outbox_leased_until);

/* outbox.leased_until(): when does such a lease end? */
Datum
outbox_leased_until(PG_FUNCTION_ARGS)
{
	OutboxLease lease;

	if (!outbox_lease_of(outbox_jobs_relid(), PG_GETARG_INT64(0), &lease))
		PG_RETURN_NULL();
	PG_RETURN_TIMESTAMPTZ(lease.until);
}

PG_FUNCTION_INFO_V1(outbox_lease_holder);

/* outbox.lease_holder(): who has it? */
Datum
outbox_lease_holder(PG_FUNCTION_ARGS)
{
	OutboxLease lease;

	if (!outbox_lease_of(outbox_jobs_relid(), PG_GETARG_INT64(0), &lease))
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text(lease.holder));
}
