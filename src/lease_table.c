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
 * A claim that writes its leases to the rows locks those first and then looks
 * here; one that keeps them here enters the jobs first and then looks whether
 * their rows are locked.  So no two claims can take one job.
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
#include "lease_table.h"

#include "common/hashfn.h"
#include "miscadmin.h"
#include "storage/proc.h"
#include "utils/memutils.h"

LeaseShared *outbox_leases = NULL;

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

	outbox_leases = memory;
	if (found)
		return;
	memset(outbox_leases, 0, sizeof(LeaseShared));
	outbox_leases->lock = &(GetNamedLWLockTranche("outbox"))[2].lock;
	pg_atomic_init_u32(&outbox_leases->any, 0);
	pg_atomic_init_u64(&outbox_leases->earliest, (uint64) DT_NOEND);
	outbox_leases->free_lease = NOWHERE;
	for (i = 0; i < MAX_LEASED; i++)
	{
		outbox_leases->job_buckets[i] = NOWHERE;
		outbox_leases->jobs[i].next = i + 1 < MAX_LEASED ? i + 1 : NOWHERE;
	}
	for (i = 0; i < MAX_LEASES; i++)
		outbox_leases->claim_buckets[i] = NOWHERE;
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
	return &outbox_leases->job_buckets[spread(dboid, job) % MAX_LEASED];
}

/* The bucket of a claim */
static int32 *
claim_bucket(Oid dboid, int64 claim)
{
	return &outbox_leases->claim_buckets[spread(dboid, claim) % MAX_LEASES];
}

/* Who holds a lease */
char *
outbox_lease_holder_of(const Lease *lease)
{
	return outbox_leases->holders[lease - outbox_leases->leases];
}

/*
 * Find the entry of a job of this database; NULL when it is not leased.  The
 * caller holds the lock.
 */
LeasedJob *
outbox_leased_job(Oid relid, int64 job)
{
	int32		i;

	for (i = *job_bucket(MyDatabaseId, job); i != NOWHERE; i = outbox_leases->jobs[i].next)
	{
		LeasedJob  *entry = &outbox_leases->jobs[i];

		if (entry->job == job && outbox_leases->leases[entry->lease].dboid == MyDatabaseId &&
			outbox_leases->leases[entry->lease].relid == relid)
			return entry;
	}
	return NULL;
}

/* Has the claim of a lease committed, or is it our own? */
bool
outbox_lease_is_known(const Lease *lease)
{
	return lease->claim != 0 && (lease->held || lease->taker == MyProcPid);
}

/*
 * The lease of a claim of this database; NULL when there is none, or when it is
 * that of another transaction that has not committed yet.  As above.
 */
Lease *
outbox_lease_by_claim(Oid relid, int64 claim)
{
	int32		i;

	for (i = *claim_bucket(MyDatabaseId, claim); i != NOWHERE; i = outbox_leases->leases[i].next)
	{
		Lease	   *lease = &outbox_leases->leases[i];

		if (lease->claim == claim && lease->dboid == MyDatabaseId && lease->relid == relid)
			return outbox_lease_is_known(lease) ? lease : NULL;
	}
	return NULL;
}

/*
 * Is this transaction about to end or settle a job?  Then the row says whether it
 * can be claimed.
 */
bool
outbox_is_ending(const LeasedJob *entry)
{
	VirtualTransactionId me;

	GET_VXID_FROM_PGPROC(me, *MyProc);
	return VirtualTransactionIdEquals(entry->ender, me);
}

/* Take the entry of a job out of its bucket, and free it. */
static void
remove_entry(int32 number)
{
	LeasedJob  *entry = &outbox_leases->jobs[number];
	int32	   *link;

	for (link = job_bucket(outbox_leases->leases[entry->lease].dboid, entry->job); *link != number; link = &outbox_leases->jobs[*link].next)
		;
	*link = entry->next;
	entry->next = outbox_leases->free_job;
	outbox_leases->free_job = number;
	if (--outbox_leases->njobs == 0)
		pg_atomic_write_u32(&outbox_leases->any, 0);
}

/* Remove those jobs of a lease that are gone, or all of them. */
static void
remove_jobs(Lease *lease, bool all)
{
	int32	   *link = &lease->first;

	while (*link != NOWHERE)
	{
		int32		number = *link;
		LeasedJob  *entry = &outbox_leases->jobs[number];

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
void
outbox_lease_free(Lease *lease)
{
	int32		number = lease - outbox_leases->leases;
	int32	   *link;

	remove_jobs(lease, true);
	if (lease->claim != 0)
	{
		for (link = claim_bucket(lease->dboid, lease->claim); *link != number;
			 link = &outbox_leases->leases[*link].next)
			;
		*link = lease->next;
	}
	lease->dboid = InvalidOid;
	lease->claim = 0;
	lease->next = outbox_leases->free_lease;
	outbox_leases->free_lease = number;
}

/* Let a lease end then. */
void
outbox_lease_runs_until(Lease *lease, TimestampTz until)
{
	lease->until = until;
	if ((TimestampTz) pg_atomic_read_u64(&outbox_leases->earliest) > until)
		pg_atomic_write_u64(&outbox_leases->earliest, (uint64) until);
}

/* Note what this transaction does to a lease; before it does so. */
Touch *
outbox_lease_touch(TouchKind kind, int njobs)
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
	lease = &outbox_leases->leases[touch->lease];
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
		/* without a number: the claim has failed */
		if (commit && lease->claim != 0 && lease->njobs > 0)
			lease->held = true;
		else
			outbox_lease_free(lease);
		return;
	}
	lease->nending--;
	for (i = 0; i < touch->njobs; i++)
	{
		LeasedJob  *entry = outbox_leased_job(lease->relid, touch->jobs[i]);

		if (entry == NULL || &outbox_leases->leases[entry->lease] != lease)
			continue;
		SetInvalidVirtualTransactionId(entry->ender);
		entry->gone = commit;
	}
	if (commit)
		remove_jobs(lease, false);
	if (lease->njobs == 0 && lease->nending == 0 && lease->held)
		outbox_lease_free(lease);
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
	LWLockAcquire(outbox_leases->lock, LW_EXCLUSIVE);
	for (; touches != NULL; touches = touches->below)
		end_touch(touches, event != XACT_EVENT_ABORT);
	LWLockRelease(outbox_leases->lock);
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
		LWLockAcquire(outbox_leases->lock, LW_EXCLUSIVE);
		while (touches != NULL && touches->level >= level)
		{
			touch = touches;
			touches = touch->below;
			end_touch(touch, false);
			pfree(touch->jobs);
			pfree(touch);
		}
		LWLockRelease(outbox_leases->lock);
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

	if (outbox_leases == NULL)
		return false;
	LWLockAcquire(outbox_leases->lock, LW_EXCLUSIVE);
	for (i = 0; i < MAX_NUMBERS && !found; i++)
	{
		Numbers    *numbers = &outbox_leases->numbers[i];

		if (numbers->dboid == MyDatabaseId && numbers->relid == sequence && numbers->next < numbers->end)
		{
			*number = numbers->next++;
			found = true;
		}
	}
	LWLockRelease(outbox_leases->lock);
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

	if (outbox_leases == NULL)
		return false;
	LWLockAcquire(outbox_leases->lock, LW_SHARED);
	for (i = 0; i < MAX_NUMBERS && !result; i++)
	{
		const Numbers *numbers = &outbox_leases->numbers[i];

		result = numbers->dboid == MyDatabaseId && numbers->relid == sequence &&
			number >= numbers->next && number < numbers->end;
	}
	LWLockRelease(outbox_leases->lock);
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

	if (outbox_leases == NULL)
		return;
	LWLockAcquire(outbox_leases->lock, LW_EXCLUSIVE);
	/* its own place, or a free one, or any */
	place = &outbox_leases->numbers[(MyDatabaseId + sequence) % MAX_NUMBERS];
	for (i = 0; i < MAX_NUMBERS; i++)
	{
		Numbers    *numbers = &outbox_leases->numbers[i];

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
	LWLockRelease(outbox_leases->lock);
}

/*
 * Begin to take jobs of a subscription; returns the number of the lease, or -1
 * when there is no room.
 *
 * When the transaction ends the lease is dropped, unless it was given the
 * number of a claim.
 */
int
outbox_lease_open(Oid relid, int32 subscription, Oid handler_owner)
{
	Touch	   *touch;
	Lease	   *lease;
	int32		number;

	if (outbox_leases == NULL)
		return NOWHERE;
	touch = outbox_lease_touch(TOUCH_TAKES, 0);
	LWLockAcquire(outbox_leases->lock, LW_EXCLUSIVE);
	number = outbox_leases->free_lease;
	if (number != NOWHERE)
		outbox_leases->free_lease = outbox_leases->leases[number].next;
	else if (outbox_leases->nleases < MAX_LEASES)
		number = outbox_leases->nleases++;
	if (number != NOWHERE)
	{
		lease = &outbox_leases->leases[number];
		memset(lease, 0, sizeof(Lease));
		lease->dboid = MyDatabaseId;
		lease->relid = relid;
		lease->subscription = subscription;
		lease->handler_owner = handler_owner;
		lease->first = NOWHERE;
		lease->first_due = DT_NOEND;
		lease->until = DT_NOEND;
		lease->taker = MyProcPid;
		touch->lease = number;
	}
	LWLockRelease(outbox_leases->lock);
	return number;
}

/*
 * Take jobs for a lease: sets taken of each, to whether nobody else has it and
 * there was room.  False when room was lacking.
 */
bool
outbox_lease_take(int number, const OutboxJob *jobs, int n, bool *taken)
{
	Lease	   *lease = &outbox_leases->leases[number];
	bool		enough = true;
	int			i;

	LWLockAcquire(outbox_leases->lock, LW_EXCLUSIVE);
	for (i = 0; i < n; i++)
	{
		LeasedJob  *entry = outbox_leased_job(lease->relid, jobs[i].id);
		int32	   *bucket;
		int32		place = outbox_leases->free_job;

		taken[i] = entry == NULL && place != NOWHERE;
		enough &= taken[i] || entry != NULL;
		if (!taken[i])
			continue;
		entry = &outbox_leases->jobs[place];
		outbox_leases->free_job = entry->next;
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
		outbox_leases->njobs++;
	}
	if (outbox_leases->njobs > 0)
		pg_atomic_write_u32(&outbox_leases->any, 1);
	LWLockRelease(outbox_leases->lock);
	return enough;
}

/* Nothing was taken for the lease that was opened last: leave its place. */
void
outbox_lease_close(int number)
{
	Touch	   *touch = touches;

	Assert(touch->kind == TOUCH_TAKES && touch->lease == number);
	LWLockAcquire(outbox_leases->lock, LW_EXCLUSIVE);
	outbox_lease_free(&outbox_leases->leases[number]);
	LWLockRelease(outbox_leases->lock);
	touches = touch->below;
	pfree(touch->jobs);
	pfree(touch);
}

/* Leave jobs that were taken to others again. */
void
outbox_lease_drop(int number, const OutboxJob *jobs, int n)
{
	Lease	   *lease = &outbox_leases->leases[number];
	int			i;

	LWLockAcquire(outbox_leases->lock, LW_EXCLUSIVE);
	for (i = 0; i < n; i++)
	{
		LeasedJob  *entry = outbox_leased_job(lease->relid, jobs[i].id);

		if (entry != NULL && entry->lease == number)
			entry->gone = true;
	}
	remove_jobs(lease, false);
	LWLockRelease(outbox_leases->lock);
}

/*
 * The jobs that were taken are leased by a claim, from the end of this
 * transaction on.  rows: others of the claim are leased in their rows.
 */
void
outbox_lease_keep(int number, int64 claim, TimestampTz until, const char *holder, bool rows)
{
	Lease	   *lease = &outbox_leases->leases[number];
	int32	   *bucket = claim_bucket(MyDatabaseId, claim);
	Touch	   *touch;

	for (touch = touches; touch->lease != number || touch->kind != TOUCH_TAKES; touch = touch->below)
		;
	LWLockAcquire(outbox_leases->lock, LW_EXCLUSIVE);
	lease->claim = touch->claim = claim;
	outbox_lease_runs_until(lease, until);
	lease->rows = rows;
	lease->next = *bucket;
	*bucket = number;
	strlcpy(outbox_lease_holder_of(lease), holder, OUTBOX_MAX_HOLDER + 1);
	LWLockRelease(outbox_leases->lock);
}
