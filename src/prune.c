/*-------------------------------------------------------------------------
 *
 * prune.c
 *		Who runs retention: the relay between its passes, the sweep of a
 *		database that has no relay, and CALL outbox.prune().
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"
#include "retention.h"

#include "funcapi.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "utils/guc.h"
#include "utils/memutils.h"

/* While there are events to fan out, steps take a tenth of the time */
#define BUSY_SHARE 10

/* What retention may take of a sweep's time */
#define SWEEP_US (5 * USECS_PER_SEC)

/* The relay's cycle */
static OutboxRetention cycle;
static bool under_way = false;
static TimestampTz wait_until = 0;	/* after an error; 0: no need */
static int	troubles = 0;		/* errors in a row */
static TimestampTz stepped_at = 0;	/* when the last step ended ... */
static int64 step_us = 0;		/* ... and how long it took */

/*
 * Nothing is lost when a step is: it is done again after a crash.  So nobody
 * waits for its flush.
 */
static void
commit_without_flush(void)
{
	(void) set_config_option("synchronous_commit", "off", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_LOCAL, true, 0, false);
}

/* Show in shared memory how it goes; error: NULL when it goes well. */
static void
show(OutboxDatabase *db, int64 events, int64 jobs, bool ended, const char *error)
{
	TimestampTz now = GetCurrentTimestamp();

	if (db == NULL)
		return;
	SpinLockAcquire(&db->mutex);
	db->pruned.events += events;
	db->pruned.jobs += jobs;
	if (error != NULL)
	{
		db->pruned.failed_at = now;
		strlcpy(db->pruned.error, error, sizeof(db->pruned.error));
	}
	else if (ended)
		db->pruned.failed_at = 0;
	if (ended)
		db->pruned.ended_at = now;
	SpinLockRelease(&db->mutex);
}

/* One step in a transaction of its own; false when the cycle is over. */
static bool
step_in_transaction(void)
{
	MemoryContext context = CurrentMemoryContext;
	bool		more = false;

	outbox_worker_begin("deleting what is kept no longer");
	MemoryContextSwitchTo(context);
	commit_without_flush();
	if (outbox_lock_extension() && outbox_retention_allowed())
		more = outbox_retention_step(&cycle);
	outbox_worker_commit();
	return more;
}

/*
 * A step has failed in a phase, and the cycle is back where it was before.  An
 * event that cannot be deleted is found by deleting one by one.  False: that is
 * not what has happened.
 */
static bool
be_careful(OutboxRetention *state, ErrorData *edata, OutboxRetentionPhase phase)
{
	if (state->careful || phase != OUTBOX_RETENTION_EVENTS ||
		outbox_retention_trouble(edata->sqlerrcode))
		return false;
	state->careful = true;
	return true;
}

/* A step of the relay has failed: anything else is waited for, longer each time. */
static void
handle_failure(OutboxDatabase *db, ErrorData *edata, OutboxRetentionPhase phase)
{
	if (be_careful(&cycle, edata, phase))
		return;
	troubles++;
	wait_until = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), outbox_retry_wait_ms(troubles));
	show(db, 0, 0, false, outbox_error_text(edata, false));
	ereport(LOG,
			(errcode(edata->sqlerrcode),
			 errmsg("outbox relay failed to delete what is kept no longer: %s",
					edata->message ? edata->message : "")));
}

/* Say what could not be deleted in a cycle. */
static void
report_kept(int elevel, const OutboxRetention *state)
{
	ereport(elevel,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg_plural("%d event that is kept no longer could not be deleted",
						   "%d events that are kept no longer could not be deleted",
						   state->failures, state->failures),
			 errdetail_internal("%s", outbox_clip(state->error, OUTBOX_ERROR_LEN))));
}

/* Do a step of the cycle, and see to what follows from it. */
static void
run_step(OutboxDatabase *db)
{
	static OutboxRetention saved;
	MemoryContext context = CurrentMemoryContext;
	TimestampTz began = GetCurrentTimestamp();
	ErrorData  *edata = NULL;
	OutboxRetentionPhase phase;
	volatile bool more = false;

	if (!under_way)
		outbox_retention_begin(&cycle);
	under_way = true;
	saved = cycle;
	PG_TRY();
	{
		more = step_in_transaction();
	}
	PG_CATCH();
	{
		edata = outbox_catch_error(context);
		outbox_worker_abort();
		MemoryContextSwitchTo(context);
	}
	PG_END_TRY();
	stepped_at = GetCurrentTimestamp();
	step_us = Max(stepped_at - began, 0);
	if (edata != NULL)
	{
		phase = cycle.phase;
		cycle = saved;
		handle_failure(db, edata, phase);
		return;
	}
	troubles = 0;
	under_way = more;
	show(db, cycle.events - saved.events, cycle.jobs - saved.jobs, !more,
		 cycle.failures > 0 ? cycle.error : NULL);
	if (!more && cycle.failures > 0)
		report_kept(LOG, &cycle);
}

/* When is there something to do?  Times that are too far off were set back. */
static TimestampTz
next_step(TimestampTz now)
{
	TimestampTz next = now;

	if (!under_way && cycle.began <= now)
		next = TimestampTzPlusMilliseconds(cycle.began, outbox_sweep_interval);
	if (wait_until - now <= (int64) 1000 * Max(outbox_relay_retry_min, outbox_relay_retry_max))
		next = Max(next, wait_until);
	return next;
}

/*
 * Between two passes of relay 0: a step, if it is time for one; false if not.
 * busy: there may be events to fan out.
 */
bool
outbox_prune_turn(OutboxDatabase *db, bool busy)
{
	TimestampTz now = GetCurrentTimestamp();

	if (next_step(now) > now)
		return false;
	if (busy && stepped_at <= now && now - stepped_at < BUSY_SHARE * step_us)
		return false;
	run_step(db);
	return true;
}

/* Milliseconds until there is something to do */
long
outbox_prune_sleep_ms(TimestampTz now)
{
	return TimestampDifferenceMilliseconds(now, next_step(now));
}

/* In a database without a relay: as many steps as some seconds allow. */
void
outbox_prune_in_sweep(void)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "outbox retention",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(context);
	TimestampTz began = GetCurrentTimestamp();
	TimestampTz now;

	do
	{
		CHECK_FOR_INTERRUPTS();
		MemoryContextReset(context);
		run_step(NULL);
		now = GetCurrentTimestamp();
	} while (under_way && wait_until == 0 && now >= began && now - began < SWEEP_US);
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(context);
}

/* A step of CALL outbox.prune(), in a subtransaction */
typedef struct PruneStep
{
	OutboxRetention *state;
	bool		more;
} PruneStep;

static void
prune_step(void *arg)
{
	PruneStep  *step = arg;

	step->more = outbox_retention_step(step->state);
}

/*
 * Do one step as the owner, and commit.  Connected to SPI anew each time, so
 * that nothing it has allocated stays.  False when the cycle is over.
 */
static bool
prune_and_commit(OutboxRetention *state, bool *allowed)
{
	MemoryContext context = CurrentMemoryContext;
	OutboxOwnerContext owner;
	OutboxRetention saved = *state;
	PruneStep	step = {state, false};
	ErrorData  *edata = NULL;

	if (SPI_connect_ext(SPI_OPT_NONATOMIC) != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect_ext failed");

	/* with one snapshot for all statements, what others change would fail us */
	if (IsolationUsesXactSnapshot())
	{
		SPI_commit();
		(void) set_config_option("transaction_isolation", "read committed", PGC_USERSET,
								 PGC_S_SESSION, GUC_ACTION_LOCAL, true, 0, false);
	}
	commit_without_flush();
	outbox_become_owner(&owner);
	outbox_pin_planner();
	*allowed = outbox_retention_allowed();
	if (*allowed)
		edata = outbox_try(prune_step, &step);
	outbox_become_caller(&owner);
	if (edata != NULL)
	{
		OutboxRetentionPhase phase = state->phase;

		*state = saved;
		if (!be_careful(state, edata, phase))
			ReThrowError(edata);
		step.more = true;
	}
	SPI_commit();
	SPI_finish();
	MemoryContextSwitchTo(context);
	CHECK_FOR_INTERRUPTS();
	return step.more;
}

PG_FUNCTION_INFO_V1(outbox_prune);

/*
 * outbox.prune(): a whole cycle now.  Only EXECUTE on the procedure decides who
 * may call it; like outbox.await_fanout() it must be able to commit.
 */
Datum
outbox_prune(PG_FUNCTION_ARGS)
{
	bool		nonatomic = fcinfo->context && IsA(fcinfo->context, CallContext) &&
		!castNode(CallContext, fcinfo->context)->atomic;
	OutboxRetention state = {0};
	bool		allowed;
	TupleDesc	tupdesc;
	Datum		values[2];
	bool		nulls[2] = {false, false};

	if (!nonatomic || GetCurrentTransactionNestLevel() > 1)
		ereport(ERROR,
				(errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				 errmsg("outbox.prune cannot run inside a transaction block, a function or an EXCEPTION block"),
				 errhint("CALL it by itself, with autocommit on.")));
	outbox_retention_begin(&state);
	while (prune_and_commit(&state, &allowed))
		;
	if (!allowed)
		ereport(NOTICE,
				(errmsg("outbox is at rest in this database, and nothing is deleted"),
				 errhint("See outbox.check().")));
	if (state.failures > 0)
		report_kept(WARNING, &state);

	if (get_call_result_type(fcinfo, NULL, &tupdesc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	values[0] = Int64GetDatum(state.events);
	values[1] = Int64GetDatum(state.jobs);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(tupdesc), values, nulls)));
}
