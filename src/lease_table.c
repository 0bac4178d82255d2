/*-------------------------------------------------------------------------
 *
 * lease_table.c
 *		Leases that are kept in shared memory.
 *
 * A claim of many jobs writes nothing: its jobs are entered here, and are in
 * the table only as what they were, due.  So a job costs one write, when it
 * comes to an end.  Whoever looks for jobs to claim passes over those that are
 * here.  A lease that is to be known for longer, because its holder fails,
 * prolongs or releases a job of it, or because it has run out, is first
 * written to the row of the job ("settled"; see lease_many.c).
 *
 * Leases are lost with shared memory, when the server stops: then the jobs are
 * due again, and their holders are told that they have lost them.
 *
 * A claim that writes its leases to the rows enters the jobs too, until its
 * transaction ends, so that no two claims can take one job: neither sees what
 * the other is about to write.
 *
 * What a transaction does to a lease takes effect when it ends, in a callback
 * that must not raise or allocate: a lease that was taken is kept or dropped,
 * jobs that came to an end are removed or not.  Until then the transaction has
 * a note of it, and the jobs have one of the transaction: nobody else may end
 * them or find their lease to have run out, and who wants to waits.  For what
 * has become of a job can be read off its row only while it is certain that this
 * is the row that was claimed.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "common/hashfn.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "utils/memutils.h"

#define MAX_LEASES 4096			/* claims of the server */
#define MAX_LEASED 65536		/* jobs, a power of two */
#define RESERVED 16384			/* of them, for claims that write to the rows */
#define RESERVED_LEASES 1024
#define MAX_HOLDER 256
#define MAX_NUMBERS 32			/* sequences, two in a database */
#define NOWHERE (-1)

/* One that ran out so long ago, and was not settled, is forgotten */
#define FORGET_US (USECS_PER_HOUR)

/* A job that is leased, or being claimed */
typedef struct LeasedJob
{
	int64		job;
	ItemPointerData tid;
	bool		gone;			/* is about to be removed */
	int32		lease;			/* its number */
	int32		next;			/* in the bucket, or of the free ones */
	int32		next_of_lease;
	VirtualTransactionId ender; /* who is about to end or settle it; or
								 * invalid */
} LeasedJob;

typedef struct Lease
{
	Oid			dboid;			/* InvalidOid: free */
	Oid			relid;			/* of outbox.jobs: another after CREATE
								 * EXTENSION */
	int32		subscription;
	Oid			handler_owner;
	int64		claim;			/* 0: not yet known, or not to be kept */
	TimestampTz until;
	TimestampTz first_due;		/* of its jobs, as the table has them */
	bool		held;			/* its claim has committed */
	bool		rows;			/* jobs of the claim may be leased in their
								 * rows */
	int			taker;			/* process whose transaction enters the jobs */
	int			nending;		/* transactions that end jobs of it */
	int			njobs;
	int32		first;
	int32		next;			/* in the bucket, or of the free ones */
} Lease;

/* Numbers for claims that were drawn from the sequence of a database */
typedef struct Numbers
{
	Oid			dboid;
	Oid			relid;			/* of the sequence */
	int64		next;
	int64		end;
} Numbers;

typedef struct LeaseShared
{
	LWLock	   *lock;
	Numbers		numbers[MAX_NUMBERS];
	int			nleases;		/* places that were ever used */
	int			nused;
	int32		free_lease;
	int32		free_job;
	int			njobs;
	pg_atomic_uint32 any;		/* is a job entered? */
	pg_atomic_uint64 earliest;	/* no lease runs out before that */
	int32		job_buckets[MAX_LEASED];
	LeasedJob	jobs[MAX_LEASED];
	int32		claim_buckets[MAX_LEASES];
	Lease		leases[MAX_LEASES];
	char		holders[MAX_LEASES][MAX_HOLDER];
} LeaseShared;

/* What this transaction does to a lease; in TopTransactionContext */
typedef enum TouchKind
{
	TOUCH_TAKES,
	TOUCH_ENDS					/* or settles, some of its jobs */
} TouchKind;

typedef struct Touch
{
	TouchKind	kind;
	int			level;
	int32		lease;
	int64		claim;
	int64	   *jobs;			/* that end */
	int			njobs;
	struct Touch *below;
} Touch;

static LeaseShared *shared = NULL;
static Touch *touches = NULL;

/* Shared memory that is needed */
Size
outbox_leases_size(void)
{
	return MAXALIGN(sizeof(LeaseShared));
}

/* Set the memory up, or attach to it. */
void
outbox_leases_shmem(void *memory, bool found)
{
	int			i;

	shared = memory;
	if (found)
		return;
	memset(shared, 0, sizeof(LeaseShared));
	shared->lock = &(GetNamedLWLockTranche("outbox"))[2].lock;
	pg_atomic_init_u32(&shared->any, 0);
	pg_atomic_init_u64(&shared->earliest, (uint64) DT_NOEND);
	shared->free_lease = NOWHERE;
	for (i = 0; i < MAX_LEASED; i++)
	{
		shared->job_buckets[i] = NOWHERE;
		shared->jobs[i].next = i + 1 < MAX_LEASED ? i + 1 : NOWHERE;
	}
	for (i = 0; i < MAX_LEASES; i++)
		shared->claim_buckets[i] = NOWHERE;
}

/* Spread numbers of a database over buckets. */
static uint32
spread(Oid dboid, int64 number)
{
	return hash_combine(murmurhash32(dboid),
						murmurhash32((uint32) number ^ (uint32) ((uint64) number >> 32)));
}

/* The bucket of a job */
static int32 *
job_bucket(Oid dboid, int64 job)
{
	return &shared->job_buckets[spread(dboid, job) % MAX_LEASED];
}

/* The bucket of a claim */
static int32 *
claim_bucket(Oid dboid, int64 claim)
{
	return &shared->claim_buckets[spread(dboid, claim) % MAX_LEASES];
}

/* Who holds a lease */
static char *
holder_of(const Lease *lease)
{
	return shared->holders[lease - shared->leases];
}

/*
 * Find the entry of a job of this database; NULL when it is not leased.  The
 * caller holds the lock.
 */
static LeasedJob *
find_job(Oid relid, int64 job)
{
	int32		i;

	for (i = *job_bucket(MyDatabaseId, job); i != NOWHERE; i = shared->jobs[i].next)
	{
		LeasedJob  *entry = &shared->jobs[i];

		if (entry->job == job && shared->leases[entry->lease].dboid == MyDatabaseId &&
			shared->leases[entry->lease].relid == relid)
			return entry;
	}
	return NULL;
}

/* Has the claim of a lease committed, or is it our own? */
static bool
is_known(const Lease *lease)
{
	return lease->claim != 0 && (lease->held || lease->taker == MyProcPid);
}

/*
 * The lease of a claim of this database; NULL when there is none, or when it is
 * that of another transaction that has not committed yet.  As above.
 */
static Lease *
find_lease(Oid relid, int64 claim)
{
	int32		i;

	for (i = *claim_bucket(MyDatabaseId, claim); i != NOWHERE; i = shared->leases[i].next)
	{
		Lease	   *lease = &shared->leases[i];

		if (lease->claim == claim && lease->dboid == MyDatabaseId && lease->relid == relid)
			return is_known(lease) ? lease : NULL;
	}
	return NULL;
}

/* Is this transaction about to end or settle a job? */
static bool
is_ending(const LeasedJob *entry)
{
	VirtualTransactionId me;

	GET_VXID_FROM_PGPROC(me, *MyProc);
	return VirtualTransactionIdEquals(entry->ender, me);
}

/*
 * Was a job entered only because this transaction has claimed it, in its row, or
 * has this transaction written its lease to the row?  Then the row says whether
 * it can be claimed.
 */
static bool
is_own(const LeasedJob *entry)
{
	const Lease *lease = &shared->leases[entry->lease];

	return (lease->claim == 0 && lease->rows && lease->taker == MyProcPid) || is_ending(entry);
}

/* Take the entry of a job out of its bucket, and free it. */
static void
remove_entry(int32 number)
{
	LeasedJob  *entry = &shared->jobs[number];
	int32	   *link;

	for (link = job_bucket(shared->leases[entry->lease].dboid, entry->job); *link != number; link = &shared->jobs[*link].next)
		;
	*link = entry->next;
	entry->next = shared->free_job;
	shared->free_job = number;
	if (--shared->njobs == 0)
		pg_atomic_write_u32(&shared->any, 0);
}

/* Remove those jobs of a lease that are gone, or all of them. */
static void
remove_jobs(Lease *lease, bool all)
{
	int32	   *link = &lease->first;

	while (*link != NOWHERE)
	{
		int32		number = *link;
		LeasedJob  *entry = &shared->jobs[number];

		if (!all && !entry->gone)
		{
			link = &entry->next_of_lease;
			continue;
		}
		*link = entry->next_of_lease;
		remove_entry(number);
		lease->njobs--;
	}
}

/* Free a lease with all its jobs. */
static void
free_lease(Lease *lease)
{
	int32		number = lease - shared->leases;
	int32	   *link;

	remove_jobs(lease, true);
	if (lease->claim != 0)
	{
		for (link = claim_bucket(lease->dboid, lease->claim); *link != number;
			 link = &shared->leases[*link].next)
			;
		*link = lease->next;
	}
	lease->dboid = InvalidOid;
	lease->claim = 0;
	lease->next = shared->free_lease;
	shared->free_lease = number;
	shared->nused--;
}

/* Note what this transaction does to a lease; before it does so. */
static Touch *
touch_lease(TouchKind kind, int njobs)
{
	Touch	   *touch = MemoryContextAllocZero(TopTransactionContext, sizeof(Touch));

	touch->jobs = MemoryContextAllocHuge(TopTransactionContext, Max(njobs, 1) * sizeof(int64));
	touch->kind = kind;
	touch->level = GetCurrentTransactionNestLevel();
	touch->lease = NOWHERE;
	touch->below = touches;
	touches = touch;
	return touch;
}

/* The lease of a note; NULL when it is another's by now */
static Lease *
touched_lease(const Touch *touch)
{
	Lease	   *lease;

	if (touch->lease == NOWHERE)
		return NULL;
	lease = &shared->leases[touch->lease];
	if (lease->dboid != MyDatabaseId || lease->claim != touch->claim)
		return NULL;
	return lease;
}

/* Let what a (sub)transaction did to a lease be so, or not.  The lock is held. */
static void
end_touch(const Touch *touch, bool commit)
{
	Lease	   *lease = touched_lease(touch);
	int			i;

	if (lease == NULL)
		return;
	if (touch->kind == TOUCH_TAKES)
	{
		/* without a number: it was only to last as long as the transaction */
		if (commit && lease->claim != 0 && lease->njobs > 0)
			lease->held = true;
		else
			free_lease(lease);
		return;
	}
	lease->nending--;
	for (i = 0; i < touch->njobs; i++)
	{
		LeasedJob  *entry = find_job(lease->relid, touch->jobs[i]);

		if (entry == NULL || &shared->leases[entry->lease] != lease)
			continue;
		SetInvalidVirtualTransactionId(entry->ender);
		entry->gone = commit;
	}
	if (commit)
		remove_jobs(lease, false);
	if (lease->njobs == 0 && lease->nending == 0 && lease->held)
		free_lease(lease);
}

/*
 * End of a transaction; must not raise or allocate.  What was prepared is done as
 * far as this table is concerned: from then on the locks on the rows keep others
 * away.  If it is rolled back after all, the leases that it took stay until they
 * run out, and those of jobs that it ended are lost.
 */
static void
at_xact_end(XactEvent event, void *arg)
{
	if (event != XACT_EVENT_COMMIT && event != XACT_EVENT_ABORT && event != XACT_EVENT_PREPARE)
		return;
	if (touches == NULL)
		return;
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	for (; touches != NULL; touches = touches->below)
		end_touch(touches, event != XACT_EVENT_ABORT);
	LWLockRelease(shared->lock);
}

/* End of a subtransaction: what it did is the outer one's, or nobody's. */
static void
at_subxact_end(SubXactEvent event, SubTransactionId mySubid,
			   SubTransactionId parentSubid, void *arg)
{
	int			level = GetCurrentTransactionNestLevel();
	Touch	   *touch;

	if (touches == NULL || touches->level < level)
		return;
	if (event == SUBXACT_EVENT_COMMIT_SUB)
	{
		for (touch = touches; touch != NULL && touch->level >= level; touch = touch->below)
			touch->level = level - 1;
	}
	else if (event == SUBXACT_EVENT_ABORT_SUB)
	{
		LWLockAcquire(shared->lock, LW_EXCLUSIVE);
		while (touches != NULL && touches->level >= level)
		{
			touch = touches;
			touches = touch->below;
			end_touch(touch, false);
			pfree(touch->jobs);
			pfree(touch);
		}
		LWLockRelease(shared->lock);
	}
}

/*
 * Register the callbacks; called once, when the library is loaded, and after
 * those of hint.c: the last to be registered is called first, and a job must
 * not be posted while it is still entered here.
 */
void
outbox_leases_init(void)
{
	RegisterXactCallback(at_xact_end, NULL);
	RegisterSubXactCallback(at_subxact_end, NULL);
}

/*
 * Draw a number for a claim from those that are left of what was drawn from a
 * sequence; false: there are none.
 */
bool
outbox_lease_number(Oid sequence, int64 *number)
{
	bool		found = false;
	int			i;

	if (shared == NULL)
		return false;
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	for (i = 0; i < MAX_NUMBERS && !found; i++)
	{
		Numbers    *numbers = &shared->numbers[i];

		if (numbers->dboid == MyDatabaseId && numbers->relid == sequence && numbers->next < numbers->end)
		{
			*number = numbers->next++;
			found = true;
		}
	}
	LWLockRelease(shared->lock);
	return found;
}

/*
 * Is it known that a sequence will not draw a number again after a crash?  For one
 * whose numbers are not left here.
 */
bool
outbox_lease_number_is_durable(Oid sequence, int64 number)
{
	bool		result = false;
	int			i;

	if (shared == NULL)
		return false;
	LWLockAcquire(shared->lock, LW_SHARED);
	for (i = 0; i < MAX_NUMBERS && !result; i++)
	{
		const Numbers *numbers = &shared->numbers[i];

		result = numbers->dboid == MyDatabaseId && numbers->relid == sequence &&
			number >= numbers->next && number < numbers->end;
	}
	LWLockRelease(shared->lock);
	return result;
}

/*
 * The numbers of a sequence from next on, below end, are drawn, and flushed: they
 * are left to whoever comes.
 */
void
outbox_lease_numbers(Oid sequence, int64 next, int64 end)
{
	Numbers    *place;
	int			i;

	if (shared == NULL)
		return;
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	/* its own place, or a free one, or any */
	place = &shared->numbers[(MyDatabaseId + sequence) % MAX_NUMBERS];
	for (i = 0; i < MAX_NUMBERS; i++)
	{
		Numbers    *numbers = &shared->numbers[i];

		if (numbers->dboid == MyDatabaseId && numbers->relid == sequence)
		{
			place = numbers;
			break;
		}
		if (!OidIsValid(numbers->dboid) && OidIsValid(place->dboid))
			place = numbers;
	}
	place->dboid = MyDatabaseId;
	place->relid = sequence;
	place->next = next;
	place->end = end;
	LWLockRelease(shared->lock);
}

/*
 * Begin to take jobs of a subscription; returns the number of the lease, or -1
 * when there is no room.  row: the leases will be written to the rows.
 *
 * When the transaction ends the lease is dropped, unless it was given the
 * number of a claim.
 */
int
outbox_lease_open(Oid relid, int32 subscription, Oid handler_owner, bool row)
{
	Touch	   *touch;
	Lease	   *lease;
	int32		number;

	if (shared == NULL)
		return NOWHERE;
	/* one will do for many claims of few jobs */
	if (row && touches != NULL && touches->kind == TOUCH_TAKES && touches->claim == 0 &&
		touches->lease != NOWHERE && shared->leases[touches->lease].rows &&
		touches->level == GetCurrentTransactionNestLevel())
		return touches->lease;
	touch = touch_lease(TOUCH_TAKES, 0);
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	if (!row && shared->nused >= MAX_LEASES - RESERVED_LEASES)
		number = NOWHERE;
	else if (shared->free_lease != NOWHERE)
	{
		number = shared->free_lease;
		shared->free_lease = shared->leases[number].next;
	}
	else if (shared->nleases < MAX_LEASES)
		number = shared->nleases++;
	else
		number = NOWHERE;
	if (number != NOWHERE)
	{
		lease = &shared->leases[number];
		memset(lease, 0, sizeof(Lease));
		lease->dboid = MyDatabaseId;
		lease->relid = relid;
		lease->subscription = subscription;
		lease->handler_owner = handler_owner;
		lease->first = NOWHERE;
		lease->first_due = DT_NOEND;
		lease->until = DT_NOEND;
		lease->rows = row;
		lease->taker = MyProcPid;
		touch->lease = number;
		shared->nused++;
	}
	LWLockRelease(shared->lock);
	return number;
}

/*
 * Take jobs for a lease: sets taken of each, to whether nobody else has it and
 * there was room.  Leases that will be written to rows, which are locked, need no
 * room: nobody takes those (see lease_many.c).  False when room was lacking.
 */
bool
outbox_lease_take(int number, const OutboxJob *jobs, int n, bool *taken)
{
	Lease	   *lease = &shared->leases[number];
	int			room = lease->rows ? MAX_LEASED : MAX_LEASED - RESERVED;
	bool		enough = true;
	int			i;

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	for (i = 0; i < n; i++)
	{
		LeasedJob  *entry = find_job(lease->relid, jobs[i].id);
		int32	   *bucket;
		int32		place = shared->free_job;

		taken[i] = lease->rows && (entry == NULL || is_own(entry));
		if (entry != NULL)
			continue;
		if (shared->njobs >= room)
		{
			enough = false;
			continue;
		}
		entry = &shared->jobs[place];
		shared->free_job = entry->next;
		bucket = job_bucket(MyDatabaseId, jobs[i].id);
		entry->job = jobs[i].id;
		entry->tid = jobs[i].tid;
		entry->gone = false;
		entry->lease = number;
		SetInvalidVirtualTransactionId(entry->ender);
		entry->next = *bucket;
		*bucket = place;
		entry->next_of_lease = lease->first;
		lease->first = place;
		lease->njobs++;
		lease->first_due = Min(lease->first_due, jobs[i].due_at);
		shared->njobs++;
		taken[i] = true;
	}
	if (shared->njobs > 0)
		pg_atomic_write_u32(&shared->any, 1);
	LWLockRelease(shared->lock);
	return enough;
}

/* Nothing was taken for the lease that was opened last: leave its place. */
void
outbox_lease_close(int number)
{
	Touch	   *touch = touches;

	Assert(touch->kind == TOUCH_TAKES && touch->lease == number);
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	free_lease(&shared->leases[number]);
	LWLockRelease(shared->lock);
	touches = touch->below;
	pfree(touch->jobs);
	pfree(touch);
}

/* Leave jobs that were taken to others again. */
void
outbox_lease_drop(int number, const OutboxJob *jobs, int n)
{
	Lease	   *lease = &shared->leases[number];
	int			i;

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	for (i = 0; i < n; i++)
	{
		LeasedJob  *entry = find_job(lease->relid, jobs[i].id);

		if (entry != NULL && entry->lease == number)
			entry->gone = true;
	}
	remove_jobs(lease, false);
	LWLockRelease(shared->lock);
}

/*
 * The jobs that were taken are leased by a claim, from the end of this
 * transaction on.  rows: others of the claim are leased in their rows.
 */
void
outbox_lease_keep(int number, int64 claim, TimestampTz until, const char *holder, bool rows)
{
	Lease	   *lease = &shared->leases[number];
	int32	   *bucket = claim_bucket(MyDatabaseId, claim);
	Touch	   *touch;

	for (touch = touches; touch->lease != number || touch->kind != TOUCH_TAKES; touch = touch->below)
		;
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	lease->claim = touch->claim = claim;
	lease->until = until;
	lease->rows = rows;
	lease->next = *bucket;
	*bucket = number;
	strlcpy(holder_of(lease), holder, MAX_HOLDER);
	if ((TimestampTz) pg_atomic_read_u64(&shared->earliest) > until)
		pg_atomic_write_u64(&shared->earliest, (uint64) until);
	LWLockRelease(shared->lock);
}

/* Is a job leased, or being claimed? */
bool
outbox_is_leased(Oid relid, int64 job)
{
	const LeasedJob *entry;
	bool		result;

	if (shared == NULL || pg_atomic_read_u32(&shared->any) == 0)
		return false;
	LWLockAcquire(shared->lock, LW_SHARED);
	entry = find_job(relid, job);
	result = entry != NULL && !is_own(entry);
	LWLockRelease(shared->lock);
	return result;
}

/* Which claim holds a job here?  False: none does, or the row of the job says it. */
bool
outbox_lease_of(Oid relid, int64 job, OutboxLease *result)
{
	LeasedJob  *entry;
	bool		found = false;

	if (shared == NULL || pg_atomic_read_u32(&shared->any) == 0)
		return false;
	LWLockAcquire(shared->lock, LW_SHARED);
	entry = find_job(relid, job);
	if (entry != NULL && is_known(&shared->leases[entry->lease]) && !is_ending(entry))
	{
		const Lease *lease = &shared->leases[entry->lease];

		result->claim = lease->claim;
		result->until = lease->until;
		strlcpy(result->holder, holder_of(lease), sizeof(result->holder));
		found = true;
	}
	LWLockRelease(shared->lock);
	return found;
}

/* Take note of a job that this transaction is about to end. */
static void
begin_end(LeasedJob *entry, OutboxLease *result, Touch *touch)
{
	GET_VXID_FROM_PGPROC(entry->ender, *MyProc);
	touch->jobs[touch->njobs++] = entry->job;
	result->jobs[result->njobs] = entry->job;
	result->tids[result->njobs++] = entry->tid;
}

/*
 * Take note of what is asked for of a lease, but for what somebody ends already,
 * into memory that is there; the lock is held.
 */
static void
copy_lease(Lease *lease, const int64 *wanted, int nwanted, OutboxLease *result, Touch *touch)
{
	int32		i;
	int			k;

	result->subscription = lease->subscription;
	result->handler_owner = lease->handler_owner;
	result->claim = lease->claim;
	result->until = lease->until;
	result->first_due = lease->first_due;
	result->rows = lease->rows;
	strlcpy(result->holder, holder_of(lease), sizeof(result->holder));
	result->njobs = 0;
	for (k = 0; k < nwanted; k++)
	{
		LeasedJob  *entry = find_job(lease->relid, wanted[k]);

		if (entry != NULL && &shared->leases[entry->lease] == lease &&
			!VirtualTransactionIdIsValid(entry->ender))
			begin_end(entry, result, touch);
	}
	for (i = wanted == NULL ? lease->first : NOWHERE; i != NOWHERE; i = shared->jobs[i].next_of_lease)
	{
		if (!VirtualTransactionIdIsValid(shared->jobs[i].ender))
			begin_end(&shared->jobs[i], result, touch);
	}
	touch->lease = lease - shared->leases;
	touch->claim = lease->claim;
	lease->nending++;
}

/* Room for the jobs of a lease */
static void
make_room(OutboxLease *result, int n)
{
	result->jobs = palloc(Max(n, 1) * sizeof(int64));
	result->tids = palloc(Max(n, 1) * sizeof(ItemPointerData));
}

/*
 * Is another transaction about to end one of the jobs of a lease, all or those
 * that are wanted?  The lock is held.
 */
static bool
others_end(const Lease *lease, const int64 *wanted, int nwanted, VirtualTransactionId *other)
{
	const LeasedJob *entry;
	int32		i;
	int			k;

	SetInvalidVirtualTransactionId(*other);
	if (lease->nending == 0)
		return false;
	for (k = 0; k < nwanted; k++)
	{
		entry = find_job(lease->relid, wanted[k]);
		if (entry != NULL && &shared->leases[entry->lease] == lease &&
			VirtualTransactionIdIsValid(entry->ender) && !is_ending(entry))
			*other = entry->ender;
	}
	for (i = wanted == NULL ? lease->first : NOWHERE; i != NOWHERE; i = entry->next_of_lease)
	{
		entry = &shared->jobs[i];
		if (VirtualTransactionIdIsValid(entry->ender) && !is_ending(entry))
			*other = entry->ender;
	}
	return VirtualTransactionIdIsValid(*other);
}

/*
 * This transaction is about to end jobs of a claim, all or those that are
 * wanted: which are here, and has it not ended before?  When it commits they are
 * removed.  While another transaction does so, it is waited for.  False: the
 * claim holds nothing here.
 */
bool
outbox_lease_end(Oid relid, int64 claim, const int64 *wanted, int nwanted, OutboxLease *result)
{
	VirtualTransactionId other;
	Lease	   *lease;
	Touch	   *touch;
	bool		wait;
	int			n = nwanted;

	if (shared == NULL || pg_atomic_read_u32(&shared->any) == 0 || claim == 0)
		return false;
	if (wanted == NULL)
	{
		LWLockAcquire(shared->lock, LW_SHARED);
		lease = find_lease(relid, claim);
		n = lease ? lease->njobs : 0;
		LWLockRelease(shared->lock);
		if (lease == NULL)
			return false;
	}
	make_room(result, n);
	touch = touch_lease(TOUCH_ENDS, n);
	for (;;)
	{
		LWLockAcquire(shared->lock, LW_EXCLUSIVE);
		lease = find_lease(relid, claim);
		/* it only gets smaller */
		if (lease != NULL && wanted == NULL && lease->njobs > n)
			lease = NULL;
		wait = lease != NULL && others_end(lease, wanted, nwanted, &other);
		if (lease != NULL && !wait)
			copy_lease(lease, wanted, nwanted, result, touch);
		LWLockRelease(shared->lock);
		if (!wait)
			return lease != NULL;

		/*
		 * as one waits for a row; it is over when the table says what became
		 * of it
		 */
		(void) VirtualXactLock(other, true);
		CHECK_FOR_INTERRUPTS();
	}
}

/* Jobs of a claim are leased in their rows from now on. */
void
outbox_lease_has_rows(Oid relid, int64 claim)
{
	Lease	   *lease;

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	lease = find_lease(relid, claim);
	if (lease != NULL)
		lease->rows = true;
	LWLockRelease(shared->lock);
}

/*
 * Let the leases of a claim end at another time.  Takes effect at once, whatever
 * becomes of the transaction.  Returns how many there are, but for those that
 * somebody ends.
 */
int
outbox_lease_prolong(Oid relid, int64 claim, TimestampTz until, bool *rows)
{
	Lease	   *lease;
	int			result = 0;
	int32		i;

	*rows = true;
	if (shared == NULL || claim == 0)
		return 0;
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	lease = find_lease(relid, claim);
	for (i = lease ? lease->first : NOWHERE; i != NOWHERE; i = shared->jobs[i].next_of_lease)
		result += !VirtualTransactionIdIsValid(shared->jobs[i].ender);
	if (result > 0)
	{
		lease->until = until;
		*rows = lease->rows;
		if ((TimestampTz) pg_atomic_read_u64(&shared->earliest) > until)
			pg_atomic_write_u64(&shared->earliest, (uint64) until);
	}
	LWLockRelease(shared->lock);
	return result;
}

/* The subscription of a claim that holds jobs here; 0: there is none such. */
int32
outbox_lease_subscription(Oid relid, int64 claim)
{
	Lease	   *lease;
	int32		result = 0;

	if (shared == NULL || claim == 0 || pg_atomic_read_u32(&shared->any) == 0)
		return 0;
	LWLockAcquire(shared->lock, LW_SHARED);
	lease = find_lease(relid, claim);
	if (lease != NULL)
		result = lease->subscription;
	LWLockRelease(shared->lock);
	return result;
}

/* Has a lease run out, with jobs that nobody is about to end or settle? */
static bool
ran_out(const Lease *lease, TimestampTz now)
{
	int32		i;

	if (!OidIsValid(lease->dboid) || lease->until > now || !lease->held)
		return false;
	for (i = lease->first; i != NOWHERE; i = shared->jobs[i].next_of_lease)
	{
		if (!VirtualTransactionIdIsValid(shared->jobs[i].ender))
			return true;
	}
	return false;
}

/*
 * Find a lease of a subscription that has run out, and begin to settle it: this
 * transaction is about to write it to the rows, and when it commits the jobs are
 * removed.  False: there is none with jobs that nobody ends just now.
 */
bool
outbox_lease_expired(Oid relid, int32 subscription, OutboxLease *result)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz earliest = DT_NOEND;
	Lease	   *found = NULL;
	Touch	   *touch;
	int			n = 0;
	int			i;

	if (shared == NULL || (TimestampTz) pg_atomic_read_u64(&shared->earliest) > now)
		return false;
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	for (i = 0; i < shared->nleases; i++)
	{
		Lease	   *lease = &shared->leases[i];

		if (!OidIsValid(lease->dboid))
			continue;
		if (lease->held && lease->nending == 0 && lease->until < now - FORGET_US)
		{
			/* its database is gone, or nobody claims there */
			free_lease(lease);
			continue;
		}
		earliest = Min(earliest, lease->until);
		if (ran_out(lease, now) && lease->dboid == MyDatabaseId && lease->relid == relid &&
			lease->subscription == subscription)
		{
			found = lease;
			n = lease->njobs;
		}
	}
	pg_atomic_write_u64(&shared->earliest, (uint64) earliest);
	LWLockRelease(shared->lock);
	if (found == NULL)
		return false;

	make_room(result, n);
	touch = touch_lease(TOUCH_ENDS, n);
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	/* has somebody else come first? */
	if (ran_out(found, now) && found->dboid == MyDatabaseId && found->relid == relid &&
		found->subscription == subscription && found->njobs <= n)
		copy_lease(found, NULL, 0, result, touch);
	else
		found = NULL;
	LWLockRelease(shared->lock);
	return found != NULL;
}
