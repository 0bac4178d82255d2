/*-------------------------------------------------------------------------
 *
 * relay.c
 *		The relay: a worker that runs passes.
 *
 * It sleeps until its latch is set, then looks at everything that could have
 * set it: the configuration, the queue of notifications, the ranges posted at
 * the doorbell, the time of the next sweep and of the next retry.  The latch
 * is reset before it looks, never after, so nothing posted meanwhile is
 * missed.
 *
 * A sweep is the widest range.  It is posted like any other, so that several
 * relays share it, and the lowest range is always taken first.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include "miscadmin.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

/* Sweeps that were asked for come no faster than this */
#define SWEEP_PAUSE_MS 1000

/* What a turn of the loop did */
typedef enum Turn
{
	TURN_IDLE,					/* nothing: sleep */
	TURN_DONE,					/* something: look again */
	TURN_TROUBLE				/* nothing goes: back off */
} Turn;

static OutboxDatabase *db;
static OutboxRelay *me;
static OutboxWorkerArgs args;

/* The range that was taken and is not finished yet */
static OutboxRange held;
static bool holding = false;

static bool started = false;	/* has swept once */
static bool resting = false;	/* not armed, or stopped */
static bool heard = false;		/* a notification asks for a sweep */
static bool owners_due = false; /* look for jobs of handlers */
static int	troubles = 0;		/* passes over fresh events in trouble, in a
								 * row */
static int	retry_troubles = 0; /* the same of retries */
static bool retried = false;	/* the last turn was one of retries */
static TimestampTz backoff_until = 0;
static bool passed = false;		/* since retention was asked */

/* Post what was taken and not finished; at exit, or when a pass failed. */
static void
put_back(int code, Datum arg)
{
	if (holding)
		outbox_doorbell_post(db, held.low, held.high);
	holding = false;
}

/* Show what this relay is doing. */
static void
set_state(OutboxRelayState state)
{
	SpinLockAcquire(&db->mutex);
	me->state = state;
	me->backoff_until = backoff_until;
	me->notify_failures = outbox_notify_failures;
	SpinLockRelease(&db->mutex);
}

/* Add what a pass did to the counters. */
static void
count_pass(const OutboxPass *pass)
{
	TimestampTz now = GetCurrentTimestamp();

	SpinLockAcquire(&db->mutex);
	if (pass->fanned > 0)
	{
		me->passes++;
		me->events += pass->fanned;
		me->jobs += pass->jobs;
		me->last_pass_at = now;
	}
	me->failures += pass->failures;
	me->notify_failures = outbox_notify_failures;
	if (pass->error != NULL)
	{
		/* cut by bytes: it is cut between characters when it is read */
		strlcpy(me->last_error, pass->error, sizeof(me->last_error));
		me->last_error_at = now;
	}
	SpinLockRelease(&db->mutex);
}

/*
 * Look up when the next retry is due, and share it with the other relays.  Not
 * before wait_ms from now: somebody holds the row that is due, or nothing went.
 */
static void
read_next_retry(int64 wait_ms)
{
	TimestampTz next = outbox_pass_next_retry(&resting);

	if (next != 0 && wait_ms > 0)
		next = Max(next, TimestampTzPlusMilliseconds(GetCurrentTimestamp(), wait_ms));
	SpinLockAcquire(&db->mutex);
	/* another relay may have set a nearer one since we read */
	if (next != 0 && (db->next_retry == 0 || next < db->next_retry))
		db->next_retry = next;
	SpinLockRelease(&db->mutex);
}

/* Take the next retry when it is due. */
static bool
take_retry(TimestampTz now)
{
	bool		due;

	SpinLockAcquire(&db->mutex);
	due = db->next_retry != 0 && db->next_retry <= now;
	if (due)
		db->next_retry = 0;
	SpinLockRelease(&db->mutex);
	return due;
}

/*
 * When is the next sweep due?  The caller holds the mutex.  A time in the
 * future comes from a clock that was set back.
 */
static TimestampTz
next_sweep(TimestampTz now)
{
	int			interval = outbox_sweep_interval;

	if (!started)
		return now;
	if (db->sweep_wanted || heard)
		interval = Min(interval, SWEEP_PAUSE_MS);
	return TimestampTzPlusMilliseconds(Min(db->swept_at, now), interval);
}

/* Is it time for a sweep?  If so, it is this relay's. */
static bool
take_sweep(TimestampTz now)
{
	bool		due;

	SpinLockAcquire(&db->mutex);
	due = next_sweep(now) <= now;
	if (due)
	{
		db->sweep_wanted = false;
		db->swept_at = now;
	}
	SpinLockRelease(&db->mutex);
	if (due)
	{
		started = true;
		heard = false;
	}
	return due;
}

/* Milliseconds until there is something to do without being woken */
static long
sleep_ms(TimestampTz now)
{
	TimestampTz until;
	bool		wanted;
	long		result;

	SpinLockAcquire(&db->mutex);
	wanted = db->sweep_wanted;
	until = next_sweep(now);
	if (db->next_retry != 0)
		until = Min(until, db->next_retry);
	SpinLockRelease(&db->mutex);
	if (backoff_until > now)
		until = wanted ? Min(until, backoff_until) : backoff_until;

	/* never longer than the interval, even if the clock was set back */
	result = Min(TimestampDifferenceMilliseconds(now, until), (long) outbox_sweep_interval);
	if (args.relay == 0 && backoff_until <= now)
		result = Min(result, outbox_prune_sleep_ms(now));
	return result;
}

/* The extension has gone: nothing is left to do, and that is no failure. */
static void
leave(void)
{
	holding = false;
	proc_exit(0);
}

/* Run one pass and see to what follows from it. */
static Turn
run_pass(bool retry)
{
	OutboxPass	pass = {0};

	pass.retry = retry;
	pass.range = held;
	holding = !retry;
	pass.db = db;
	set_state(OUTBOX_RELAY_PASS);
	outbox_pass(&pass);
	passed = true;
	if (pass.gone)
		leave();
	count_pass(&pass);
	if (pass.claimed > 0)
		resting = false;		/* at rest nothing can be claimed */

	/* what a full claim left has been posted; this is what was ours */
	if (holding)
		held = pass.range;
	if (pass.trouble)
		put_back(0, (Datum) 0);
	holding = false;
	if (!retry)
	{
		if (pass.retry_set)
			read_next_retry(0);
		troubles = pass.trouble ? troubles + 1 : 0;
		return pass.trouble ? TURN_TROUBLE : TURN_DONE;
	}

	/*
	 * That events which have failed before fail again says nothing of fresh
	 * ones: the retries wait, and the relay goes on.
	 */
	retry_troubles = pass.trouble ? retry_troubles + 1 : 0;
	read_next_retry(pass.trouble ? outbox_retry_wait_ms(retry_troubles) :
					pass.claimed == 0 ? SWEEP_PAUSE_MS : 0);
	return TURN_DONE;
}

/*
 * Do one thing that is to be done.  Errors that outbox_pass does not know how
 * to handle end the process; the launcher starts another after a while.
 */
static Turn
take_turn(TimestampTz now)
{
	if (take_sweep(now))
	{
		outbox_route_forget();
		read_next_retry(0);
		outbox_doorbell_post(db, OUTBOX_SEQ_MIN, OUTBOX_SEQ_MAX);
		owners_due = true;
	}
	if (owners_due)
	{
		owners_due = false;
		outbox_want_owners();
	}

	/* so that retention does not starve in a long backlog */
	if (args.relay == 0 && passed)
	{
		passed = false;
		if (outbox_prune_turn(db, true))
			return TURN_DONE;
	}

	/* after a retry others come first: what fails all the time must not */
	if (retried && outbox_doorbell_take(db, &held))
	{
		retried = false;
		return run_pass(false);
	}
	retried = take_retry(now);
	if (retried)
	{
		outbox_unshun(db);
		return run_pass(true);
	}
	if (outbox_doorbell_take(db, &held))
		return run_pass(false);
	if (args.relay == 0 && outbox_prune_turn(db, false))
		return TURN_DONE;
	return TURN_IDLE;
}

/*
 * Nothing goes: wait, longer each time.  Neither the doorbell nor a
 * notification shortens it; outbox.wake() does.
 */
static void
back_off(void)
{
	backoff_until = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
												outbox_retry_wait_ms(troubles));
	set_state(OUTBOX_RELAY_BACKOFF);
}

/* Has somebody asked, by outbox.wake() and the like, to try again now? */
static bool
kicked(TimestampTz now)
{
	bool		result;

	SpinLockAcquire(&db->mutex);
	result = db->sweep_wanted && next_sweep(now) <= now;
	SpinLockRelease(&db->mutex);
	return result;
}

/* Entry point of an outbox relay. */
void
outbox_relay_main(Datum main_arg)
{
	MemoryContext turn_context;

	if (!outbox_worker_attach(&args))
		proc_exit(0);
	db = &outbox_shared->databases[args.slot];
	me = &db->relays[args.relay];

	/*
	 * After the callback that rolls the transaction back: another relay would
	 * take the range now and skip the rows that are locked still.
	 */
	on_shmem_exit(put_back, (Datum) 0);
	turn_context = AllocSetContextCreate(TopMemoryContext, "outbox relay turn",
										 ALLOCSET_DEFAULT_SIZES);
	outbox_listen_update();

	for (;;)
	{
		TimestampTz now;
		Turn		turn = TURN_IDLE;

		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			outbox_worker_reload();
			outbox_listen_update();

			/* handlers of superusers may run now, or may not */
			owners_due |= args.relay == 0;
		}
		if (args.relay >= outbox_relays_setting)
			proc_exit(0);

		MemoryContextSwitchTo(turn_context);
		MemoryContextReset(turn_context);
		if (outbox_listen_heard())
			heard = true;
		now = GetCurrentTimestamp();
		if (backoff_until <= now || kicked(now))
		{
			backoff_until = 0;
			turn = take_turn(now);
		}
		if (turn == TURN_TROUBLE)
			back_off();
		else if (turn == TURN_IDLE)
		{
			set_state(backoff_until > now ? OUTBOX_RELAY_BACKOFF :
					  resting ? OUTBOX_RELAY_RESTING : OUTBOX_RELAY_IDLE);
			outbox_worker_idle();
			(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
							 sleep_ms(now), outbox_wait_event("OutboxRelayMain"));
		}
	}
}

/*
 * Fan out everything that is unmarked in this database, for which there is no
 * slot in shared memory, and retry what is due.  Returns false when the
 * extension is not there.
 */
bool
outbox_relay_sweep_once(void)
{
	MemoryContext caller = CurrentMemoryContext;
	MemoryContext context = AllocSetContextCreate(caller, "outbox sweep",
												  ALLOCSET_DEFAULT_SIZES);
	OutboxPass	pass;
	int64		low = OUTBOX_SEQ_MIN;
	bool		retry = false;
	bool		gone = false;

	MemoryContextSwitchTo(context);
	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		outbox_worker_reload();
		MemoryContextReset(context);
		memset(&pass, 0, sizeof(pass));
		pass.retry = retry;
		pass.range.low = low;
		pass.range.high = OUTBOX_SEQ_MAX;
		outbox_pass(&pass);
		gone = pass.gone;
		if (pass.full && !pass.trouble && !gone && (retry || pass.last < OUTBOX_SEQ_MAX))
			low = pass.last + 1;
		else if (!retry && !gone)
			retry = true;
		else
			break;
	}
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(context);
	if (!gone)
		outbox_prune_in_sweep();
	outbox_worker_idle();
	return !gone;
}
