/*-------------------------------------------------------------------------
 *
 * limit.c
 *		How long code of a user's may run in a runner, and what SIGTERM does
 *		meanwhile.
 *
 * A timer ticks while the runner is busy.  Past the end of the lease the
 * handler is cancelled like a query.  PL/pgSQL can catch that, so one that is
 * still there a second later has the process end, which nothing can catch.
 *
 * SIGTERM cancels a handler in the same way, so that its failure can be
 * recorded before the process ends.  While our own statements are under way it
 * waits until they are done, which may be a moment; after a second it has the
 * process end all the same.  At any other time it does so at once.
 *
 * All times are of a clock that only goes forward.
 *
 *-------------------------------------------------------------------------
 */
#include "runner.h"

#include <time.h>

#include "miscadmin.h"
#include "storage/latch.h"
#include "utils/timeout.h"

#define TICK_MS 100
#define GRACE_US USECS_PER_SEC	/* from the cancel to the end of the process */

/* What the process is at */
typedef enum Phase
{
	PHASE_IDLE = 0,				/* nothing that SIGTERM would disturb */
	PHASE_OURS,					/* our own statements, or a job is held */
	PHASE_USER					/* code of a user's may run */
} Phase;

/* What the handlers of signals look at and set */
static volatile sig_atomic_t phase = PHASE_IDLE;
static volatile int64 deadline = 0; /* of the code of a user's */
static volatile sig_atomic_t cancelled = OUTBOX_CANCEL_NONE;
static volatile int64 cancelled_at = 0;
static volatile sig_atomic_t asked = false; /* SIGTERM has come */
static volatile int64 asked_at = 0;

static TimeoutId timer = MAX_TIMEOUTS;

/* Microseconds by a clock that only goes forward; a signal handler may call it */
static int64
monotonic_us(void)
{
	struct timespec ts;

	if (clock_gettime(CLOCK_MONOTONIC, &ts) != 0)
		return 0;
	return (int64) ts.tv_sec * USECS_PER_SEC + ts.tv_nsec / 1000;
}

/* Cancel what runs; in a signal handler. */
static void
cancel(OutboxCancel why, int64 now)
{
	cancelled = why;
	cancelled_at = now;
	QueryCancelPending = true;
	InterruptPending = true;
	SetLatch(MyLatch);
}

/* End the process; in a signal handler. */
static void
end_process(void)
{
	ProcDiePending = true;
	InterruptPending = true;
	SetLatch(MyLatch);
}

/* The timer ticks. */
static void
tick(void)
{
	int64		now = monotonic_us();
	bool		overdue = asked && now - asked_at >= GRACE_US;

	if (phase == PHASE_USER)
	{
		if (cancelled != OUTBOX_CANCEL_NONE)
		{
			if (now - cancelled_at >= GRACE_US)
				end_process();
		}
		else if (now >= deadline)
			cancel(OUTBOX_CANCEL_LEASE, now);
		else if (overdue)
			cancel(OUTBOX_CANCEL_ASKED, now);
	}
	else if (phase == PHASE_OURS && overdue)
		end_process();
}

/* SIGTERM has come.  True: what it is for waits. */
static bool
hold_sigterm(void)
{
	int64		now = monotonic_us();

	if (phase == PHASE_IDLE)
		return false;
	if (!asked)
	{
		asked_at = now;
		asked = true;
		if (phase == PHASE_USER && cancelled == OUTBOX_CANCEL_NONE)
			cancel(OUTBOX_CANCEL_ASKED, now);
	}
	return true;
}

/*
 * The transaction is about to commit, and no code of a user's runs any more:
 * from here on a cancel would only disturb, say, the wait for a standby.
 */
static void
at_xact_event(XactEvent event, void *arg)
{
	if (event != XACT_EVENT_PRE_COMMIT || phase != PHASE_USER)
		return;
	if (outbox_limit_end() != OUTBOX_CANCEL_NONE)
		ereport(ERROR,
				(errcode(ERRCODE_QUERY_CANCELED),
				 errmsg("handler caught its cancellation")));
}

/* Called once, in a runner. */
void
outbox_limit_init(void)
{
	timer = RegisterTimeout(USER_TIMEOUT, tick);
	RegisterXactCallback(at_xact_event, NULL);
	outbox_worker_hold_sigterm = hold_sigterm;
}

/* The runner begins to work, or has nothing more to do and holds no job. */
void
outbox_limit_busy(bool busy)
{
	if (busy && phase == PHASE_IDLE)
	{
		phase = PHASE_OURS;
		enable_timeout_every(timer, TimestampTzPlusMilliseconds(GetCurrentTimestamp(), TICK_MS),
							 TICK_MS);
	}
	else if (!busy && phase != PHASE_IDLE)
	{
		disable_timeout(timer, false);
		phase = PHASE_IDLE;
	}
}

/* Has SIGTERM come, and waits for us to end? */
bool
outbox_limit_asked(void)
{
	return asked;
}

/* Code of a user's begins to run, which may take so long. */
void
outbox_limit_begin(int64 us)
{
	Assert(phase == PHASE_OURS);
	cancelled = OUTBOX_CANCEL_NONE;
	deadline = monotonic_us() + us;
	phase = PHASE_USER;
}

/*
 * It has ended.  Was it cancelled?  A cancel of ours that came too late, and is
 * pending still, must not hit what comes next, and does not count.
 */
OutboxCancel
outbox_limit_end(void)
{
	OutboxCancel result;

	phase = PHASE_OURS;
	result = cancelled;
	cancelled = OUTBOX_CANCEL_NONE;
	if (result != OUTBOX_CANCEL_NONE && QueryCancelPending)
	{
		QueryCancelPending = false;
		result = OUTBOX_CANCEL_NONE;
	}
	return result;
}
