/*-------------------------------------------------------------------------
 *
 * runner.c
 *		The runner: a worker that runs the handlers of one role.
 *
 * It is connected as that role and nobody else, so code of a user's can become
 * no more than it could in a session of its own.  For our own statements, and
 * only for them, it is the owner of the extension (spi.c).
 *
 * A job is claimed in one transaction, which commits its attempt and its lease
 * (runner_claim.c), and run in the next (runner_job.c).  That one calls the
 * handler, completes the job and claims the next one, so that a busy runner
 * commits once for each job, and what a handler writes is there exactly when
 * its job is done.  When it fails, nothing of it is left but the attempt, which
 * is recorded as failed in a transaction of its own.
 *
 * When the runner is woken and the hints say of no subscription that something
 * is due, it is something that they know nothing of: then all are tried.
 *
 *-------------------------------------------------------------------------
 */
#include "runner.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/memutils.h"

#define IDLE_EXIT_US (30 * USECS_PER_SEC)	/* idle for so long, it ends */
#define LOOK_PAUSE_US USECS_PER_SEC /* between two looks without hints */

OutboxRun	outbox_run;

static OutboxWorkerArgs args;
static TimestampTz looked_at = 0;	/* when all were tried */

/* Is there a runner of this database with that holder's name? */
static bool
holder_lives(const char *name)
{
	OutboxDatabase *db = &outbox_shared->databases[args.slot];
	bool		result = false;
	int			i;

	/* one that had this process's number before is none */
	if (strcmp(name, outbox_run.holder) == 0)
		return false;
	for (i = 0; i < OUTBOX_MAX_RUNNERS && !result; i++)
	{
		int			pid;

		SpinLockAcquire(&db->mutex);
		pid = db->runners[i].pid;
		SpinLockRelease(&db->mutex);
		result = pid != 0 &&
			strcmp(name, psprintf("outbox runner " INT64_FORMAT "/%d", outbox_shared->epoch, pid)) == 0;
	}
	return result;
}

/*
 * Fail the jobs that runners held which are no more: in a crash, say, or
 * because the handler ended its own process.  They need not wait for the end of
 * the lease.
 *
 * Whether a holder lives is looked up after the jobs were: a runner takes its
 * place before it claims.
 */
static void
fail_orphans(void)
{
	static OutboxPlan find = {
		"SELECT j.id, j.claim, j.attempts, j.holder FROM outbox.jobs j"
		" WHERE j.claim IS NOT NULL AND j.done_at IS NULL AND j.dead_at IS NULL"
		" AND j.due_at OPERATOR(pg_catalog.>) $1 AND j.due_at OPERATOR(pg_catalog.<) 'infinity'"
		" AND j.subscription_id OPERATOR(pg_catalog.=) ANY ($2)"
		" AND pg_catalog.starts_with(j.holder, 'outbox runner ')"
		" ORDER BY j.claim FOR NO KEY UPDATE OF j SKIP LOCKED",
		2, {TIMESTAMPTZOID, INT4ARRAYOID}, NULL
	};
	OutboxOwnerContext context;
	Datum		values[2];
	SPITupleTable *rows;
	int			n;
	int			i;

	if (outbox_run_begin("failing jobs that did not return", &context))
	{
		outbox_run_load(outbox_run_version());
		values[0] = TimestampTzGetDatum(GetCurrentTimestamp());
		values[1] = outbox_run_ids();
		n = (int) outbox_execute(&find, values, NULL, SPI_OK_SELECT);
		rows = SPI_tuptable;
		for (i = 0; i < n; i++)
		{
			bool		isnull;
			int64		id = DatumGetInt64(SPI_getbinval(rows->vals[i], rows->tupdesc, 1, &isnull));
			int64		claim = DatumGetInt64(SPI_getbinval(rows->vals[i], rows->tupdesc, 2, &isnull));
			int			attempt = DatumGetInt32(SPI_getbinval(rows->vals[i], rows->tupdesc, 3, &isnull));
			char	   *name = SPI_getvalue(rows->vals[i], rows->tupdesc, 4);

			if (!holder_lives(name))
				(void) outbox_fail_job(id, claim, GetUserId(),
									   psprintf("attempt %d did not return", attempt),
									   OUTBOX_RETRY_SCHEDULE, false);
		}
		SPI_freetuptable(rows);
		outbox_become_caller(&context);
	}
	outbox_worker_commit();
}

/*
 * The runner is to end: because somebody has sent SIGTERM, because there are to
 * be fewer, or because the role is not to run handlers.
 */
static void
end_if_told(void)
{
	if (outbox_limit_asked())
	{
		outbox_run_release_held();
		outbox_limit_busy(false);
		ProcDiePending = true;
		InterruptPending = true;
		CHECK_FOR_INTERRUPTS();
	}
	if (outbox_runner_should_go(false))
	{
		outbox_run_release_held();
		proc_exit(0);
	}
}

/* Nothing is left to do for this role, or in this database. */
static void
end_if_useless(void)
{
	if (outbox_run.gone)
		proc_exit(0);
	if (outbox_run.held.id == 0 && (outbox_run.refused || outbox_run.nsubs == 0))
	{
		outbox_want_nothing(outbox_run.role);
		proc_exit(0);
	}
}

/*
 * Wait until there may be something to do.  seen is of outbox_want_begin.  True
 * when somebody has woken us.
 */
static bool
wait_for_work(uint32 seen, TimestampTz idle_since)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz until = outbox_want_end(outbox_run.role, seen, outbox_run_next_due());
	int			rc;

	if (until == DT_NOBEGIN)
		return true;
	if (outbox_runner_should_go(true) || now - idle_since >= IDLE_EXIT_US || now < idle_since)
		proc_exit(0);
	outbox_limit_busy(false);
	outbox_worker_idle();
	until = Min(until, idle_since + IDLE_EXIT_US);
	rc = WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
				   TimestampDifferenceMilliseconds(now, until),
				   outbox_wait_event("OutboxRunnerMain"));
	outbox_limit_busy(true);
	outbox_runner_idle(false);
	return (rc & WL_LATCH_SET) != 0;
}

/* Entry point of an outbox runner. */
void
outbox_runner_main(Datum main_arg)
{
	TimestampTz idle_since = 0;
	bool		woken = true;

	if (!outbox_runner_attach(&args))
		proc_exit(0);
	outbox_run.role = args.userid;
	outbox_run.holder = MemoryContextStrdup(TopMemoryContext,
											psprintf("outbox runner " INT64_FORMAT "/%d", outbox_shared->epoch, MyProcPid));
	outbox_run.context = AllocSetContextCreate(TopMemoryContext, "outbox job", ALLOCSET_DEFAULT_SIZES);
	outbox_limit_init();
	outbox_limit_busy(true);
	MemoryContextSwitchTo(outbox_run.context);
	fail_orphans();
	end_if_useless();

	for (;;)
	{
		TimestampTz now;
		uint32		seen;
		bool		all;

		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
		outbox_worker_reload();
		end_if_told();
		MemoryContextSwitchTo(outbox_run.context);
		MemoryContextReset(outbox_run.context);
		if (outbox_run.held.id != 0)
		{
			outbox_run_job();
			end_if_useless();
			idle_since = 0;
			woken = false;
			continue;
		}

		seen = outbox_want_begin(outbox_run.role);
		now = GetCurrentTimestamp();
		all = woken && outbox_run_next_due() > now &&
			(looked_at > now || now - looked_at >= LOOK_PAUSE_US);
		if (all)
			looked_at = now;
		if ((woken || outbox_run_next_due() <= now) && outbox_run_look(all))
			continue;
		end_if_useless();
		if (idle_since == 0)
			idle_since = now;
		woken = wait_for_work(seen, idle_since);
	}
}
