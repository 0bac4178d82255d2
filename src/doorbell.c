/*-------------------------------------------------------------------------
 *
 * doorbell.c
 *		How a commit wakes the relay.
 *
 * A backend that records an event notes its seq.  When the transaction has
 * committed, and so is visible, a callback posts the range of these seqs in
 * the slot of the database and sets the latches of its relays; a transaction
 * or savepoint that is rolled back posts nothing.  A relay takes a range,
 * then takes the snapshot of its claim: an event posted before is visible to
 * it, and one posted later wakes it again.  What it took and did not finish it
 * posts again.
 *
 * The range is a hint: it spares the claim the walk over index entries that
 * an old snapshot keeps from being removed.  Several ranges are kept apart,
 * so that a transaction that commits a minute late does not send the relay
 * back over a minute of such entries.  Relays sweep without a hint at start
 * and at intervals, so a lost post delays an event and never loses it.
 *
 * The callbacks run when the transaction can no longer fail: they must not
 * raise or allocate.  They take spinlocks and, for PREPARE TRANSACTION, one
 * LWLock.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include "miscadmin.h"
#include "storage/proc.h"
#include "utils/memutils.h"

/* Ranges nearer than this are one: walking so many dead entries is cheap */
#define RANGE_GAP 1024

/* What one level of the transaction has to post; in TopTransactionContext */
typedef struct Note
{
	int			level;			/* nesting level of the (sub)transaction */
	bool		has_range;
	bool		sweep;			/* ring without a hint */
	OutboxRange range;
	struct Note *below;			/* of the levels outside */
} Note;

static Note *notes = NULL;
static bool warned = false;		/* told that the library is not preloaded */

/* gid of the PREPARE TRANSACTION under way; "": none */
static char preparing_gid[OUTBOX_GIDSIZE];

/* Are two ranges near enough to be one?  The second does not begin before. */
static inline bool
ranges_touch(int64 high, int64 low)
{
	return low <= high || (uint64) low - (uint64) high <= RANGE_GAP;
}

/* Take range i out of the list. */
static void
remove_range(OutboxDatabase *db, int i)
{
	db->nranges--;
	memmove(&db->ranges[i], &db->ranges[i + 1],
			(db->nranges - i) * sizeof(OutboxRange));
}

/*
 * Add a range to the list, which stays sorted and apart.  When it is full,
 * the new range is merged with its nearest neighbour: a wide hint costs time,
 * a lost one would cost a sweep interval.  The caller holds the mutex.
 */
static void
add_range(OutboxDatabase *db, int64 low, int64 high)
{
	int			i = 0;

	while (i < db->nranges && !ranges_touch(db->ranges[i].high, low))
		i++;
	if (i == db->nranges || !ranges_touch(high, db->ranges[i].low))
	{
		if (db->nranges < OUTBOX_MAX_RANGES)
		{
			memmove(&db->ranges[i + 1], &db->ranges[i],
					(db->nranges - i) * sizeof(OutboxRange));
			db->ranges[i].low = low;
			db->ranges[i].high = high;
			db->nranges++;
			return;
		}
		if (i == db->nranges ||
			(i > 0 && (uint64) low - (uint64) db->ranges[i - 1].high <
			 (uint64) db->ranges[i].low - (uint64) high))
			i--;
	}
	db->ranges[i].low = Min(db->ranges[i].low, low);
	db->ranges[i].high = Max(db->ranges[i].high, high);
	while (i + 1 < db->nranges &&
		   ranges_touch(db->ranges[i].high, db->ranges[i + 1].low))
	{
		db->ranges[i].high = Max(db->ranges[i].high, db->ranges[i + 1].high);
		remove_range(db, i + 1);
	}
}

/*
 * Set the latches of the relays of a database.  A number that is stale by now
 * sets the latch of somebody who will look and find nothing to do.
 */
void
outbox_doorbell_wake(OutboxDatabase *db)
{
	int			i;

	for (i = 0; i < OUTBOX_MAX_RELAYS; i++)
	{
		if (db->relays[i].pid != 0)
			ProcSendSignal(db->relays[i].procno);
	}
}

/* Post a range in the slot of this backend's database and wake its relays. */
void
outbox_doorbell_post(OutboxDatabase *db, int64 low, int64 high)
{
	bool		ours;

	SpinLockAcquire(&db->mutex);
	ours = (db->dboid == MyDatabaseId);
	if (ours)
		add_range(db, low, high);
	SpinLockRelease(&db->mutex);
	if (ours)
		outbox_doorbell_wake(db);
}

/* Ask for a sweep of this backend's database. */
void
outbox_doorbell_sweep(OutboxDatabase *db)
{
	SpinLockAcquire(&db->mutex);
	if (db->dboid == MyDatabaseId)
		db->sweep_wanted = true;
	SpinLockRelease(&db->mutex);
	outbox_doorbell_wake(db);
}

/*
 * Take the lowest range; false when there is none.  The claim's snapshot must
 * be taken after this, never before.
 */
bool
outbox_doorbell_take(OutboxDatabase *db, OutboxRange *range)
{
	bool		found;

	SpinLockAcquire(&db->mutex);
	found = db->nranges > 0;
	if (found)
	{
		*range = db->ranges[0];
		remove_range(db, 0);
	}
	SpinLockRelease(&db->mutex);
	return found;
}

/* The note of the current level, made when there is none yet */
static Note *
current_note(void)
{
	int			level = GetCurrentTransactionNestLevel();
	Note	   *note;

	if (notes != NULL && notes->level == level)
		return notes;
	note = MemoryContextAllocZero(TopTransactionContext, sizeof(Note));
	note->level = level;
	note->below = notes;
	notes = note;
	return note;
}

/* Take the note of the innermost level off. */
static void
drop_note(void)
{
	Note	   *note = notes;

	notes = note->below;
	pfree(note);
}

/* Merge what a note has into another. */
static void
merge_note(Note *into, const Note *from)
{
	if (from->has_range)
	{
		into->range.low = into->has_range ? Min(into->range.low, from->range.low) : from->range.low;
		into->range.high = into->has_range ? Max(into->range.high, from->range.high) : from->range.high;
		into->has_range = true;
	}
	into->sweep |= from->sweep;
}

/*
 * Note that this transaction records, or frees, an event.  Without shared
 * memory there is nobody to wake, which a session is told once.
 */
void
outbox_doorbell_note(int64 seq)
{
	Note	   *note;

	if (outbox_shared == NULL)
	{
		if (!warned)
			ereport(WARNING,
					(errcode(ERRCODE_WARNING),
					 errmsg("outbox is not loaded via \"shared_preload_libraries\""),
					 errdetail("Events are recorded but not fanned out.")));
		warned = true;
		return;
	}
	note = current_note();
	if (!note->has_range)
	{
		note->range.low = note->range.high = seq;
		note->has_range = true;
	}
	else if (seq < note->range.low)
		note->range.low = seq;
	else if (seq > note->range.high)
		note->range.high = seq;
}

/* Note that the commit of this transaction is to ring for a sweep. */
void
outbox_doorbell_note_sweep(void)
{
	if (outbox_shared != NULL)
		current_note()->sweep = true;
}

/* PREPARE TRANSACTION is about to run: remember its name for the callback. */
void
outbox_doorbell_preparing(const char *gid)
{
	strlcpy(preparing_gid, gid, sizeof(preparing_gid));
}

/*
 * The transaction has been prepared: keep its range until COMMIT PREPARED.
 * When there is no room, or the name is unknown, COMMIT PREPARED of an unknown
 * transaction sweeps from now on.
 */
static void
keep_prepared(const Note *note)
{
	OutboxPrepared *entry = NULL;
	int			i;

	LWLockAcquire(outbox_shared->lock, LW_EXCLUSIVE);
	if (preparing_gid[0] != '\0' && !note->sweep)
	{
		for (i = 0; i < OUTBOX_MAX_PREPARED && entry == NULL; i++)
		{
			if (outbox_shared->prepared[i].gid[0] == '\0')
				entry = &outbox_shared->prepared[i];
		}
	}
	if (entry != NULL)
	{
		strlcpy(entry->gid, preparing_gid, sizeof(entry->gid));
		entry->dboid = MyDatabaseId;
		entry->range = note->range;
	}
	else
	{
		outbox_shared->prepared_unknown = true;
		outbox_shared->prepared_doubts++;
	}
	LWLockRelease(outbox_shared->lock);
}

/* How often has it become unknown what prepared transactions recorded? */
uint32
outbox_doorbell_doubts(void)
{
	uint32		result;

	LWLockAcquire(outbox_shared->lock, LW_SHARED);
	result = outbox_shared->prepared_doubts;
	LWLockRelease(outbox_shared->lock);
	return result;
}

/*
 * There was no prepared transaction at some moment after doubts was read: then
 * nothing is unknown any more, unless that has changed since.
 */
void
outbox_doorbell_no_doubts(uint32 doubts)
{
	LWLockAcquire(outbox_shared->lock, LW_EXCLUSIVE);
	if (outbox_shared->prepared_doubts == doubts)
		outbox_shared->prepared_unknown = false;
	LWLockRelease(outbox_shared->lock);
}

/*
 * COMMIT PREPARED or ROLLBACK PREPARED has run.  It can only be given in the
 * database of the transaction, so this backend's slot is the right one.
 */
void
outbox_doorbell_finish_prepared(const char *gid, bool commit)
{
	OutboxDatabase *db;
	OutboxRange range = {0, 0};
	bool		found = false;
	bool		unknown;
	int			i;

	if (outbox_shared == NULL)
		return;
	LWLockAcquire(outbox_shared->lock, LW_EXCLUSIVE);
	for (i = 0; i < OUTBOX_MAX_PREPARED; i++)
	{
		OutboxPrepared *entry = &outbox_shared->prepared[i];

		if (entry->dboid == MyDatabaseId && strcmp(entry->gid, gid) == 0)
		{
			range = entry->range;
			entry->gid[0] = '\0';
			entry->dboid = InvalidOid;
			found = true;
		}
	}
	unknown = outbox_shared->prepared_unknown;
	LWLockRelease(outbox_shared->lock);

	db = outbox_find_database(MyDatabaseId);
	if (!commit || db == NULL)
		return;
	if (found)
		outbox_doorbell_post(db, range.low, range.high);
	else if (unknown)
		outbox_doorbell_sweep(db);
}

/* The transaction has committed and is visible: post what it noted. */
static void
ring(const Note *note)
{
	OutboxDatabase *db = outbox_find_database(MyDatabaseId);

	if (db == NULL)
		return;
	if (note->has_range)
		outbox_doorbell_post(db, note->range.low, note->range.high);
	if (note->sweep)
		outbox_doorbell_sweep(db);
}

/* End of a transaction; must not raise or allocate. */
static void
at_xact_end(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_COMMIT:
			if (notes != NULL)
				ring(notes);
			break;
		case XACT_EVENT_PREPARE:
			if (notes != NULL)
				keep_prepared(notes);
			break;
		case XACT_EVENT_ABORT:
			break;
		default:
			return;				/* nothing has ended yet, or a parallel worker */
	}
	notes = NULL;
	preparing_gid[0] = '\0';
	outbox_ddl_at_xact_end(event == XACT_EVENT_COMMIT);
}

/*
 * End of a subtransaction: what it noted goes to the level outside, or is
 * forgotten.
 */
static void
at_subxact_end(SubXactEvent event, SubTransactionId mySubid,
			   SubTransactionId parentSubid, void *arg)
{
	int			level = GetCurrentTransactionNestLevel();

	if (event == SUBXACT_EVENT_ABORT_SUB)
	{
		while (notes != NULL && notes->level >= level)
			drop_note();
	}
	else if (event == SUBXACT_EVENT_COMMIT_SUB && notes != NULL && notes->level >= level)
	{
		notes->level = level - 1;
		if (notes->below != NULL && notes->below->level == level - 1)
		{
			merge_note(notes->below, notes);
			drop_note();
		}
	}
}

/* Register the callbacks; called once, when the library is loaded. */
void
outbox_doorbell_init(void)
{
	RegisterXactCallback(at_xact_end, NULL);
	RegisterSubXactCallback(at_subxact_end, NULL);
}
