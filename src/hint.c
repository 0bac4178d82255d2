/*-------------------------------------------------------------------------
 *
 * hint.c
 *		What shared memory knows of the jobs of each subscription, so that a
 *		claim need not walk over those that are done, and nobody need look for
 *		jobs that are not there.
 *
 * For each subscription there is a low mark: nothing that can be claimed is
 * due earlier.  Whoever makes a job claimable posts its due time when that has
 * committed, which lowers the mark; a claim reads the mark, then takes its
 * snapshot, and raises the mark to where it came, but not above what was
 * posted since it read.  A claim that is rolled back posts what it had taken.
 * Beside the low mark a few times are kept at which something may fall due,
 * for those who wait.
 *
 * All of it only saves work.  A claim that gets less than it asked for looks
 * once more without the mark.  When that last took long, because an old snapshot
 * keeps what is done from being removed, it does so seldom: such looks take a
 * fiftieth of the time at most.
 *
 * What is posted at the end of a transaction must not raise or allocate.
 * Prepared transactions post nothing: what they did is found without the mark.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "common/hashfn.h"
#include "miscadmin.h"
#include "storage/proc.h"
#include "utils/memutils.h"

#define MAX_HINTS 1024			/* subscriptions of the server */
#define WINDOW 16				/* places where one may be */
#define MAX_POSTS 32			/* remembered, for looks that are under way */
#define MAX_MARKS 16			/* times at which something falls due */
#define SWEEP_CHEAP_US 2000		/* a look without the mark that took less */
#define SWEEP_SHARE 50			/* of the time that dearer ones may take */
#define SOON_US USECS_PER_SEC	/* who waits looks again by itself after that */
#define FAST_US USECS_PER_SEC	/* a handler that takes less is fast */

typedef struct OutboxHint
{
	slock_t		mutex;
	Oid			dboid;			/* InvalidOid: free */
	int32		subscription;
	TimestampTz used_at;
	TimestampTz low;
	uint32		nposts;
	TimestampTz posts[MAX_POSTS];	/* number i at i % MAX_POSTS */
	int			nmarks;
	TimestampTz marks[MAX_MARKS];	/* sorted */
	bool		forgot;			/* there may be more times than these */
	TimestampTz swept_at;
	int64		sweep_us;		/* what the last sweep took */
	bool		watched;		/* perhaps somebody waits */
	int64		done;			/* jobs completed since the start */
	int64		run_us;			/* what its handler takes, on average */
} OutboxHint;

typedef struct HintShared
{
	LWLock	   *lock;			/* keys of the hints */
	OutboxHint	hints[MAX_HINTS];
} HintShared;

/* What one level of the transaction has to post; in TopTransactionContext */
typedef struct JobNote
{
	int32		subscription;
	bool		on_abort;
	Oid			handler_owner;
	TimestampTz due;			/* DT_NOEND: none */
	int64		done;			/* jobs completed */
} JobNote;

typedef struct JobNotes
{
	int			level;
	int			n;
	int			max;
	JobNote    *notes;
	struct JobNotes *below;		/* of the levels outside */
} JobNotes;

static HintShared *shared = NULL;
static JobNotes *notes = NULL;

/* Shared memory that is needed */
Size
outbox_hint_size(void)
{
	return MAXALIGN(sizeof(HintShared));
}

/* Set the memory up, or attach to it. */
void
outbox_hint_shmem(void *memory, bool found)
{
	int			i;

	shared = memory;
	if (found)
		return;
	memset(shared, 0, sizeof(HintShared));
	shared->lock = &(GetNamedLWLockTranche("outbox"))[1].lock;
	for (i = 0; i < MAX_HINTS; i++)
		SpinLockInit(&shared->hints[i].mutex);
}

/* Where to look for a subscription first */
static uint32
hint_start(Oid dboid, int32 subscription)
{
	return hash_combine(murmurhash32(dboid), murmurhash32((uint32) subscription)) % MAX_HINTS;
}

/*
 * Find the hint of a subscription of this database; NULL when there is none.
 * The caller holds the lock.
 */
static OutboxHint *
find_hint(int32 subscription)
{
	uint32		start = hint_start(MyDatabaseId, subscription);
	int			i;

	for (i = 0; i < WINDOW; i++)
	{
		OutboxHint *hint = &shared->hints[(start + i) % MAX_HINTS];

		if (hint->dboid == MyDatabaseId && hint->subscription == subscription)
			return hint;
	}
	return NULL;
}

/*
 * Find the hint of a subscription, or make one: then nothing is known of it.
 * Where there is no place, that which was used least recently goes.
 *
 * It may be given to another subscription at any moment, so whoever writes to
 * it looks at the key again under its mutex.
 */
static OutboxHint *
get_hint(int32 subscription)
{
	OutboxHint *hint;
	uint32		start;
	int			i;

	if (shared == NULL)
		return NULL;
	LWLockAcquire(shared->lock, LW_SHARED);
	hint = find_hint(subscription);
	LWLockRelease(shared->lock);
	if (hint != NULL)
		return hint;

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	hint = find_hint(subscription);
	if (hint == NULL)
	{
		start = hint_start(MyDatabaseId, subscription);
		hint = &shared->hints[start];
		for (i = 0; i < WINDOW && OidIsValid(hint->dboid); i++)
		{
			OutboxHint *other = &shared->hints[(start + i) % MAX_HINTS];

			if (!OidIsValid(other->dboid) || other->used_at < hint->used_at)
				hint = other;
		}
		SpinLockAcquire(&hint->mutex);
		hint->dboid = MyDatabaseId;
		hint->subscription = subscription;
		hint->used_at = 0;
		hint->low = DT_NOBEGIN;
		hint->nposts = 0;
		hint->nmarks = 1;
		hint->marks[0] = DT_NOBEGIN;
		hint->forgot = true;
		hint->swept_at = 0;
		hint->sweep_us = 0;
		hint->watched = false;
		hint->done = 0;
		hint->run_us = 0;
		SpinLockRelease(&hint->mutex);
	}
	LWLockRelease(shared->lock);
	return hint;
}

/* Lock a hint, if it is still that of the subscription. */
static bool
lock_hint(OutboxHint *hint, int32 subscription)
{
	SpinLockAcquire(&hint->mutex);
	if (hint->dboid == MyDatabaseId && hint->subscription == subscription)
		return true;
	SpinLockRelease(&hint->mutex);
	return false;
}

/*
 * Add a time at which something may fall due.  When there are too many, of the
 * two that are nearest to each other the later one is forgotten.  The caller
 * holds the mutex.
 */
static void
add_mark(OutboxHint *hint, TimestampTz due)
{
	TimestampTz marks[MAX_MARKS + 1];
	int			nearest = 0;
	int			n;
	int			i;

	for (i = 0; i < hint->nmarks && hint->marks[i] < due; i++)
		;
	if (i < hint->nmarks && hint->marks[i] == due)
		return;
	n = hint->nmarks;
	memcpy(marks, hint->marks, i * sizeof(TimestampTz));
	marks[i] = due;
	memcpy(marks + i + 1, hint->marks + i, (n - i) * sizeof(TimestampTz));
	if (++n > MAX_MARKS)
	{
		for (i = 1; i + 1 < n; i++)
		{
			if ((uint64) marks[i + 1] - (uint64) marks[i] <
				(uint64) marks[nearest + 1] - (uint64) marks[nearest])
				nearest = i;
		}
		memmove(marks + nearest + 1, marks + nearest + 2,
				(n - nearest - 2) * sizeof(TimestampTz));
		n--;
		hint->forgot = true;
	}
	memcpy(hint->marks, marks, n * sizeof(TimestampTz));
	hint->nmarks = n;
}

/*
 * Wake those who wait for jobs of a subscription.
 *
 * The flag was cleared before, and is set again when somebody is found: who
 * begins to wait takes a place first and sets the flag afterwards, so either we
 * find the place or the flag is set when we are done.
 */
static void
wake_waiters(OutboxHint *hint, int32 subscription)
{
	bool		any = false;
	int			i;

	pg_memory_barrier();
	for (i = 0; i < outbox_shared->nwaiters; i++)
	{
		OutboxWaiter *waiter = &outbox_shared->waiters[i];

		if (pg_atomic_read_u32(&waiter->dboid) != MyDatabaseId ||
			pg_atomic_read_u32(&waiter->subscription) != (uint32) subscription)
			continue;
		any = true;
		ProcSendSignal(i);
	}
	if (any && lock_hint(hint, subscription))
	{
		hint->watched = true;
		SpinLockRelease(&hint->mutex);
	}
}

/*
 * A job of a subscription can be claimed from a time on, as far as its
 * transaction is concerned: post that, and wake those who wait and those who
 * run its handler.  Must not raise or allocate.
 */
void
outbox_hint_post(int32 subscription, TimestampTz due, Oid handler_owner)
{
	TimestampTz soon = GetCurrentTimestamp() + SOON_US;
	OutboxHint *hint;
	bool		wake = false;

	if (shared == NULL)
		return;
	LWLockAcquire(shared->lock, LW_SHARED);
	hint = find_hint(subscription);
	LWLockRelease(shared->lock);
	if (hint != NULL && lock_hint(hint, subscription))
	{
		hint->low = Min(hint->low, due);
		hint->posts[hint->nposts++ % MAX_POSTS] = due;
		add_mark(hint, due);
		wake = hint->watched && due <= soon;
		if (wake)
			hint->watched = false;
		SpinLockRelease(&hint->mutex);
	}
	if (wake)
		wake_waiters(hint, subscription);
	if (OidIsValid(handler_owner))
		outbox_want_runner(handler_owner, due);
}

/* Count jobs that were completed.  Must not raise or allocate. */
static void
count_done(int32 subscription, int64 n)
{
	OutboxHint *hint = get_hint(subscription);

	if (hint != NULL && lock_hint(hint, subscription))
	{
		hint->done += n;
		SpinLockRelease(&hint->mutex);
	}
}

/* The notes of the current level, with room for one more */
static JobNotes *
current_notes(void)
{
	int			level = GetCurrentTransactionNestLevel();

	if (notes == NULL || notes->level != level)
	{
		JobNotes   *fresh = MemoryContextAllocZero(TopTransactionContext, sizeof(JobNotes));

		fresh->max = 4;
		fresh->notes = MemoryContextAlloc(TopTransactionContext, fresh->max * sizeof(JobNote));
		fresh->level = level;
		fresh->below = notes;
		notes = fresh;
	}
	else if (notes->n == notes->max)
	{
		notes->max *= 2;
		notes->notes = repalloc_huge(notes->notes, notes->max * sizeof(JobNote));
	}
	return notes;
}

/* Add a note, or add to one of the last when it is of the same kind. */
static void
add_note(int32 subscription, TimestampTz due, Oid handler_owner, bool on_abort, int64 done)
{
	JobNotes   *current;
	int			i;

	if (shared == NULL)
		return;
	current = current_notes();
	for (i = current->n - 1; i >= 0 && i >= current->n - 2; i--)
	{
		JobNote    *note = &current->notes[i];

		if (note->subscription == subscription && note->on_abort == on_abort &&
			note->handler_owner == handler_owner)
		{
			note->due = Min(note->due, due);
			note->done += done;
			return;
		}
	}
	current->notes[current->n].subscription = subscription;
	current->notes[current->n].on_abort = on_abort;
	current->notes[current->n].handler_owner = handler_owner;
	current->notes[current->n].due = due;
	current->notes[current->n].done = done;
	current->n++;
}

/* Have a due time posted when this transaction commits. */
void
outbox_hint_note(int32 subscription, TimestampTz due, Oid handler_owner)
{
	add_note(subscription, due, handler_owner, false, 0);
}

/* Have it posted when this (sub)transaction is rolled back. */
void
outbox_hint_note_abort(int32 subscription, TimestampTz due, Oid handler_owner)
{
	add_note(subscription, due, handler_owner, true, 0);
}

/* Have jobs counted as completed when this transaction commits. */
void
outbox_hint_note_done(int32 subscription, int64 n)
{
	add_note(subscription, DT_NOEND, InvalidOid, false, n);
}

/* Post the notes of one kind. */
static void
post_notes(const JobNotes *list, bool on_abort)
{
	int			i;

	for (i = 0; i < list->n; i++)
	{
		const JobNote *note = &list->notes[i];

		if (note->on_abort != on_abort)
			continue;
		if (note->due != DT_NOEND)
			outbox_hint_post(note->subscription, note->due, note->handler_owner);
		if (note->done > 0)
			count_done(note->subscription, note->done);
	}
}

/* End of a transaction; must not raise or allocate. */
static void
at_xact_end(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_COMMIT:
			for (; notes != NULL; notes = notes->below)
				post_notes(notes, false);
			break;
		case XACT_EVENT_ABORT:
			for (; notes != NULL; notes = notes->below)
				post_notes(notes, true);
			break;
		case XACT_EVENT_PREPARE:
			break;
		default:
			return;				/* nothing has ended yet, or a parallel worker */
	}
	notes = NULL;
}

/*
 * End of a subtransaction: what it noted goes to the level outside; when it is
 * rolled back, what it had taken can be claimed by others from now on.
 */
static void
at_subxact_end(SubXactEvent event, SubTransactionId mySubid,
			   SubTransactionId parentSubid, void *arg)
{
	int			level = GetCurrentTransactionNestLevel();

	if (event == SUBXACT_EVENT_ABORT_SUB)
	{
		for (; notes != NULL && notes->level >= level; notes = notes->below)
			post_notes(notes, true);
	}
	else if (event == SUBXACT_EVENT_PRE_COMMIT_SUB && notes != NULL && notes->level >= level)
	{
		JobNotes   *inner = notes;
		int			i;

		/* here, not at COMMIT_SUB: it may still allocate, and fail */
		if (inner->below == NULL || inner->below->level < level - 1)
			inner->level = level - 1;
		else
		{
			notes = inner->below;
			for (i = 0; i < inner->n; i++)
			{
				JobNotes   *outer = notes;

				if (outer->n == outer->max)
				{
					outer->max *= 2;
					outer->notes = repalloc_huge(outer->notes, outer->max * sizeof(JobNote));
				}
				outer->notes[outer->n++] = inner->notes[i];
			}
			pfree(inner->notes);
			pfree(inner);
		}
	}
}

/* Register the callbacks; called once, when the library is loaded. */
void
outbox_hint_init(void)
{
	RegisterXactCallback(at_xact_end, NULL);
	RegisterSubXactCallback(at_subxact_end, NULL);
}

/*
 * Begin a look at the jobs of a subscription.  The snapshot of the look must be
 * taken after this, never before; a transaction with one snapshot for all of
 * it takes the mark and never raises it.
 */
void
outbox_hint_begin(int32 subscription, OutboxLook *look)
{
	TimestampTz now = GetCurrentTimestamp();

	look->hint = get_hint(subscription);
	look->subscription = subscription;
	look->low = DT_NOBEGIN;
	look->advance = false;
	look->nposts = 0;
	look->forgot = true;
	if (look->hint != NULL && lock_hint(look->hint, subscription))
	{
		look->hint->used_at = now;
		look->nposts = look->hint->nposts;
		look->forgot = look->hint->forgot;
		look->advance = !IsolationUsesXactSnapshot();
		/* a mark in the future comes from a clock that was set back */
		if (look->hint->low <= now)
			look->low = look->hint->low;
		SpinLockRelease(&look->hint->mutex);
	}
}

/*
 * How long after a dear look without the mark is the next one allowed?  It may
 * have been dear because it waited for a lock, so not too long.
 */
static int64
sweep_pause(const OutboxHint *hint)
{
	return Min(SWEEP_SHARE * hint->sweep_us, (int64) outbox_sweep_interval * 1000);
}

/*
 * The look has found less than it was for: may it look below the mark now?
 */
bool
outbox_hint_may_sweep(OutboxLook *look)
{
	TimestampTz now = GetCurrentTimestamp();
	bool		result = false;

	if (look->low == DT_NOBEGIN)
		return false;			/* it has done so */
	if (look->hint == NULL || !lock_hint(look->hint, look->subscription))
		return true;
	if (look->hint->swept_at > now ||
		look->hint->sweep_us < SWEEP_CHEAP_US ||
		now - look->hint->swept_at >= sweep_pause(look->hint))
	{
		look->hint->swept_at = now;
		result = true;
	}
	SpinLockRelease(&look->hint->mutex);
	return result;
}

/* When may it next look below the mark? */
TimestampTz
outbox_hint_next_sweep(const OutboxLook *look)
{
	TimestampTz result = DT_NOBEGIN;

	if (look->hint != NULL && lock_hint(look->hint, look->subscription))
	{
		result = look->hint->swept_at + sweep_pause(look->hint);
		SpinLockRelease(&look->hint->mutex);
	}
	return result;
}

/* A look without the mark, which began then, is over. */
void
outbox_hint_swept(OutboxLook *look, TimestampTz began)
{
	TimestampTz now = GetCurrentTimestamp();

	if (look->hint == NULL || !lock_hint(look->hint, look->subscription))
		return;
	look->hint->swept_at = now;
	look->hint->sweep_us = Max(now - began, 0);
	SpinLockRelease(&look->hint->mutex);
}

/*
 * The look is over.  bound: what it did not take, and can be claimed, is not
 * due earlier.  drained: nor is any due now.
 */
void
outbox_hint_end(OutboxLook *look, TimestampTz bound, bool drained)
{
	OutboxHint *hint = look->hint;
	TimestampTz low = bound;
	uint32		nnew;
	uint32		i;
	int			n;

	if (!look->advance || !lock_hint(hint, look->subscription))
		return;
	nnew = hint->nposts - look->nposts;
	if (nnew <= MAX_POSTS)
	{
		for (i = 1; i <= nnew; i++)
			low = Min(low, hint->posts[(hint->nposts - i) % MAX_POSTS]);
		hint->low = Max(hint->low, low);
		if (low == bound && drained)
			low = DT_NOEND;
	}
	else
		low = DT_NOBEGIN;

	/* marks up to there are used up, but for what was posted meanwhile */
	for (n = 0; n < hint->nmarks && hint->marks[n] <= bound; n++)
		;
	hint->nmarks -= n;
	memmove(hint->marks, hint->marks + n, hint->nmarks * sizeof(TimestampTz));
	if (low != DT_NOEND)
		add_mark(hint, low);
	SpinLockRelease(&hint->mutex);
}

/*
 * Times had been forgotten when the look began, so it has asked the table what
 * falls due next.  DT_NOEND: nothing.
 */
void
outbox_hint_next_due(OutboxLook *look, TimestampTz due)
{
	if (look->hint == NULL || !lock_hint(look->hint, look->subscription))
		return;
	if (due != DT_NOEND)
		add_mark(look->hint, due);
	else if (look->hint->nposts == look->nposts)
		look->hint->forgot = false;
	SpinLockRelease(&look->hint->mutex);
}

/*
 * When may there be something to claim?  DT_NOEND: not before somebody posts,
 * as far as shared memory knows.
 */
TimestampTz
outbox_hint_next(int32 subscription)
{
	OutboxHint *hint = get_hint(subscription);
	TimestampTz result = DT_NOBEGIN;

	if (hint != NULL && lock_hint(hint, subscription))
	{
		result = hint->nmarks > 0 ? hint->marks[0] : DT_NOEND;
		SpinLockRelease(&hint->mutex);
	}
	return result;
}

/* How many were completed since the server, or its shared memory, started? */
int64
outbox_hint_done(int32 subscription)
{
	OutboxHint *hint = get_hint(subscription);
	int64		result = 0;

	if (hint != NULL && lock_hint(hint, subscription))
	{
		result = hint->done;
		SpinLockRelease(&hint->mutex);
	}
	return result;
}

/* A handler has run for so long: keep the average. */
void
outbox_hint_ran(int32 subscription, int64 us)
{
	OutboxHint *hint = get_hint(subscription);

	if (hint != NULL && lock_hint(hint, subscription))
	{
		hint->run_us = hint->run_us == 0 ? Max(us, 1) : (hint->run_us * 7 + us) / 8;
		SpinLockRelease(&hint->mutex);
	}
}

/* Is the handler of a subscription known to be fast? */
bool
outbox_hint_is_fast(int32 subscription)
{
	OutboxHint *hint = get_hint(subscription);
	bool		result = false;

	if (hint != NULL && lock_hint(hint, subscription))
	{
		result = hint->run_us > 0 && hint->run_us < FAST_US;
		SpinLockRelease(&hint->mutex);
	}
	return result;
}

/* Have this process woken when something is posted for a subscription. */
void
outbox_hint_watch(int32 subscription)
{
	OutboxWaiter *waiter = &outbox_shared->waiters[MyProcNumber];
	OutboxHint *hint = get_hint(subscription);

	pg_atomic_write_u32(&waiter->subscription, (uint32) subscription);
	pg_write_barrier();
	pg_atomic_write_u32(&waiter->dboid, MyDatabaseId);
	pg_memory_barrier();
	if (hint != NULL && lock_hint(hint, subscription))
	{
		hint->watched = true;
		SpinLockRelease(&hint->mutex);
	}
}

/* No longer. */
void
outbox_hint_unwatch(void)
{
	OutboxWaiter *waiter = &outbox_shared->waiters[MyProcNumber];

	pg_atomic_write_u32(&waiter->dboid, InvalidOid);
	pg_atomic_write_u32(&waiter->subscription, 0);
}
