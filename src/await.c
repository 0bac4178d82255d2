/*-------------------------------------------------------------------------
 *
 * await.c
 *		CALL outbox.await_fanout(): wait for an event without holding anything.
 *
 * A procedure called outside a transaction block may commit, so between its
 * looks at the table it holds no snapshot, no lock and no transaction id.  It
 * leaves the seq it waits for in a place of its own in shared memory, and the
 * relay sets the latch of those whose event it has fanned out.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

/*
 * Look at the table again after so long even when not woken: the relay may
 * have died between its commit and the wake-up.
 */
#define LOOK_AGAIN_MS 1000

/* Compare two seqs for qsort and bsearch. */
static int
compare_seqs(const void *a, const void *b)
{
	int64		sa = *(const int64 *) a;
	int64		sb = *(const int64 *) b;

	return sa < sb ? -1 : sa > sb;
}

/* Wake the backends that wait for one of these events of a database. */
void
outbox_await_wake(Oid dboid, const int64 *seqs, int nseqs)
{
	int64	   *sorted = NULL;
	int			i;

	for (i = 0; i < outbox_shared->nwaiters; i++)
	{
		OutboxWaiter *waiter = &outbox_shared->waiters[i];
		int64		seq;

		if (pg_atomic_read_u32(&waiter->dboid) != dboid ||
			pg_atomic_read_u32(&waiter->subscription) != 0)
			continue;
		if (sorted == NULL)
		{
			sorted = palloc(nseqs * sizeof(int64));
			memcpy(sorted, seqs, nseqs * sizeof(int64));
			qsort(sorted, nseqs, sizeof(int64), compare_seqs);
		}
		seq = (int64) pg_atomic_read_u64(&waiter->seq);
		if (bsearch(&seq, sorted, nseqs, sizeof(int64), compare_seqs) != NULL)
			ProcSendSignal(i);
	}
	if (sorted != NULL)
		pfree(sorted);
}

/* What has become of an event?  NULL: nothing yet. */
static const char *
look(int64 seq)
{
	static OutboxPlan state = {
		"SELECT fanned_out_at IS NOT NULL, poisoned_at IS NOT NULL"
		" FROM outbox.events WHERE seq OPERATOR(pg_catalog.=) $1",
		1, {INT8OID}, NULL
	};
	OutboxOwnerContext owner;
	const char *result = NULL;
	Datum		values[1];
	bool		isnull;

	values[0] = Int64GetDatum(seq);
	outbox_become_owner(&owner);
	outbox_spi_connect();		/* so that a long wait gathers no results */
	if (outbox_execute(&state, values, NULL, SPI_OK_SELECT) > 0)
	{
		if (DatumGetBool(outbox_spi_value(0, 1, &isnull)))
			result = "fanned";
		else if (DatumGetBool(outbox_spi_value(0, 2, &isnull)))
			result = "poisoned";
	}
	outbox_end_change(&owner);
	return result;
}

/*
 * Wait until the event is fanned or poisoned, or the time is up.  Connected to
 * SPI, not atomic.
 */
static const char *
await(int64 seq, TimestampTz until)
{
	OutboxWaiter *waiter = &outbox_shared->waiters[MyProcNumber];
	const char *result;

	pg_atomic_write_u64(&waiter->seq, (uint64) seq);
	pg_write_barrier();
	pg_atomic_write_u32(&waiter->dboid, MyDatabaseId);
	PG_TRY();
	{
		for (;;)
		{
			long		remaining;

			/* the place is taken before the look, so no wake-up is missed */
			pg_memory_barrier();
			result = look(seq);
			SPI_commit();
			if (result != NULL)
				break;
			remaining = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), until);
			if (remaining <= 0)
			{
				result = "timeout";
				break;
			}
			InvalidateCatalogSnapshot();
			(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
							 Min(remaining, LOOK_AGAIN_MS),
							 outbox_wait_event("OutboxAwaitFanout"));
			ResetLatch(MyLatch);
			CHECK_FOR_INTERRUPTS();
		}
	}
	PG_FINALLY();
	{
		pg_atomic_write_u32(&waiter->dboid, InvalidOid);
	}
	PG_END_TRY();
	return result;
}

/* A time to wait, in microseconds: a century at most */
int64
outbox_await_us(const Interval *interval)
{
	double		us = ((double) interval->month * DAYS_PER_MONTH + interval->day) * USECS_PER_DAY +
		interval->time;

	if (us < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("timeout must not be negative")));
	return (int64) Min(us, 36525.0 * USECS_PER_DAY);
}

/* Refuse a call of a procedure that waits where it cannot commit. */
void
outbox_await_check(FunctionCallInfo fcinfo, const char *procedure)
{
	bool		nonatomic = fcinfo->context && IsA(fcinfo->context, CallContext) &&
		!castNode(CallContext, fcinfo->context)->atomic;

	if (!nonatomic || GetCurrentTransactionNestLevel() > 1)
		ereport(ERROR,
				(errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				 errmsg("%s cannot wait inside a transaction block, a function or an EXCEPTION block",
						procedure),
				 errhint("CALL it by itself, with autocommit on.")));
	if (outbox_shared == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("outbox is not loaded via \"shared_preload_libraries\"")));
}

/* The result of such a procedure: a row with its one INOUT argument */
Datum
outbox_await_result(FunctionCallInfo fcinfo, Datum value)
{
	TupleDesc	tupdesc;
	bool		isnull = false;

	if (get_call_result_type(fcinfo, NULL, &tupdesc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(tupdesc), &value, &isnull));
}

PG_FUNCTION_INFO_V1(outbox_await_fanout);

/*
 * outbox.await_fanout().  SECURITY DEFINER or SET on the procedure would make
 * CALL atomic, so it looks at the table as the owner by itself, and only
 * EXECUTE on the procedure decides who may call it.
 */
Datum
outbox_await_fanout(PG_FUNCTION_ARGS)
{
	TimestampTz until;
	const char *outcome;
	int64		seq;

	outbox_await_check(fcinfo, "outbox.await_fanout");
	outbox_check_not_null(fcinfo, 0, "seq");
	outbox_check_not_null(fcinfo, 1, "timeout");
	seq = PG_GETARG_INT64(0);
	until = GetCurrentTimestamp() + outbox_await_us(PG_GETARG_INTERVAL_P(1));

	if (SPI_connect_ext(SPI_OPT_NONATOMIC) != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect_ext failed");
	outcome = await(seq, until);
	SPI_finish();
	return outbox_await_result(fcinfo, CStringGetTextDatum(outcome));
}
