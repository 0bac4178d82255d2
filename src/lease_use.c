/*-------------------------------------------------------------------------
 *
 * lease_use.c
 *		Asking the table of leases, and ending or prolonging what is there.
 *
 * See lease_table.c for what the table is, and how what a transaction does here
 * takes effect.
 *
 *-------------------------------------------------------------------------
 */
#include "lease_table.h"

#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/proc.h"

/* Is a job leased, or being claimed? */
bool
outbox_is_leased(Oid relid, int64 job)
{
	const LeasedJob *entry;
	bool		result;

	if (outbox_leases == NULL || pg_atomic_read_u32(&outbox_leases->any) == 0)
		return false;
	LWLockAcquire(outbox_leases->lock, LW_SHARED);
	entry = outbox_leased_job(relid, job);
	result = entry != NULL && !outbox_is_ending(entry);
	LWLockRelease(outbox_leases->lock);
	return result;
}

/* Which claim holds a job here?  False: none does, or the row of the job says it. */
bool
outbox_lease_of(Oid relid, int64 job, OutboxLease *result)
{
	LeasedJob  *entry;
	bool		found = false;

	if (outbox_leases == NULL || pg_atomic_read_u32(&outbox_leases->any) == 0)
		return false;
	LWLockAcquire(outbox_leases->lock, LW_SHARED);
	entry = outbox_leased_job(relid, job);
	if (entry != NULL && outbox_lease_is_known(&outbox_leases->leases[entry->lease]) && !outbox_is_ending(entry))
	{
		const Lease *lease = &outbox_leases->leases[entry->lease];

		result->claim = lease->claim;
		result->until = lease->until;
		strlcpy(result->holder, outbox_lease_holder_of(lease), sizeof(result->holder));
		found = true;
	}
	LWLockRelease(outbox_leases->lock);
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
	strlcpy(result->holder, outbox_lease_holder_of(lease), sizeof(result->holder));
	result->njobs = 0;
	for (k = 0; k < nwanted; k++)
	{
		LeasedJob  *entry = outbox_leased_job(lease->relid, wanted[k]);

		if (entry != NULL && &outbox_leases->leases[entry->lease] == lease &&
			!VirtualTransactionIdIsValid(entry->ender))
			begin_end(entry, result, touch);
	}
	for (i = wanted == NULL ? lease->first : NOWHERE; i != NOWHERE; i = outbox_leases->jobs[i].next_of_lease)
	{
		if (!VirtualTransactionIdIsValid(outbox_leases->jobs[i].ender))
			begin_end(&outbox_leases->jobs[i], result, touch);
	}
	touch->lease = lease - outbox_leases->leases;
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
		entry = outbox_leased_job(lease->relid, wanted[k]);
		if (entry != NULL && &outbox_leases->leases[entry->lease] == lease &&
			VirtualTransactionIdIsValid(entry->ender) && !outbox_is_ending(entry))
			*other = entry->ender;
	}
	for (i = wanted == NULL ? lease->first : NOWHERE; i != NOWHERE; i = entry->next_of_lease)
	{
		entry = &outbox_leases->jobs[i];
		if (VirtualTransactionIdIsValid(entry->ender) && !outbox_is_ending(entry))
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

	if (outbox_leases == NULL || pg_atomic_read_u32(&outbox_leases->any) == 0 || claim == 0)
		return false;
	if (wanted == NULL)
	{
		LWLockAcquire(outbox_leases->lock, LW_SHARED);
		lease = outbox_lease_by_claim(relid, claim);
		n = lease ? lease->njobs : 0;
		LWLockRelease(outbox_leases->lock);
		if (lease == NULL)
			return false;
	}
	make_room(result, n);
	touch = outbox_lease_touch(TOUCH_ENDS, n);
	for (;;)
	{
		LWLockAcquire(outbox_leases->lock, LW_EXCLUSIVE);
		lease = outbox_lease_by_claim(relid, claim);
		/* it only gets smaller */
		if (lease != NULL && wanted == NULL && lease->njobs > n)
			lease = NULL;
		wait = lease != NULL && others_end(lease, wanted, nwanted, &other);
		if (lease != NULL && !wait)
			copy_lease(lease, wanted, nwanted, result, touch);
		LWLockRelease(outbox_leases->lock);
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

	LWLockAcquire(outbox_leases->lock, LW_EXCLUSIVE);
	lease = outbox_lease_by_claim(relid, claim);
	if (lease != NULL)
		lease->rows = true;
	LWLockRelease(outbox_leases->lock);
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
	if (outbox_leases == NULL || claim == 0)
		return 0;
	LWLockAcquire(outbox_leases->lock, LW_EXCLUSIVE);
	lease = outbox_lease_by_claim(relid, claim);
	for (i = lease ? lease->first : NOWHERE; i != NOWHERE; i = outbox_leases->jobs[i].next_of_lease)
		result += !VirtualTransactionIdIsValid(outbox_leases->jobs[i].ender);
	if (result > 0)
	{
		outbox_lease_runs_until(lease, until);
		*rows = lease->rows;
	}
	LWLockRelease(outbox_leases->lock);
	return result;
}

/* The subscription of a claim that holds jobs here; 0: there is none such. */
int32
outbox_lease_subscription(Oid relid, int64 claim)
{
	Lease	   *lease;
	int32		result = 0;

	if (outbox_leases == NULL || claim == 0 || pg_atomic_read_u32(&outbox_leases->any) == 0)
		return 0;
	LWLockAcquire(outbox_leases->lock, LW_SHARED);
	lease = outbox_lease_by_claim(relid, claim);
	if (lease != NULL)
		result = lease->subscription;
	LWLockRelease(outbox_leases->lock);
	return result;
}

/* Has a lease run out, with jobs that nobody is about to end or settle? */
static bool
ran_out(const Lease *lease, TimestampTz now)
{
	int32		i;

	if (!OidIsValid(lease->dboid) || lease->until > now || !lease->held)
		return false;
	for (i = lease->first; i != NOWHERE; i = outbox_leases->jobs[i].next_of_lease)
	{
		if (!VirtualTransactionIdIsValid(outbox_leases->jobs[i].ender))
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

	if (outbox_leases == NULL || (TimestampTz) pg_atomic_read_u64(&outbox_leases->earliest) > now)
		return false;
	LWLockAcquire(outbox_leases->lock, LW_EXCLUSIVE);
	for (i = 0; i < outbox_leases->nleases; i++)
	{
		Lease	   *lease = &outbox_leases->leases[i];

		if (!OidIsValid(lease->dboid))
			continue;
		if (lease->held && lease->nending == 0 && lease->until < now - FORGET_US)
		{
			/* its database is gone, or nobody claims there */
			outbox_lease_free(lease);
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
	pg_atomic_write_u64(&outbox_leases->earliest, (uint64) earliest);
	LWLockRelease(outbox_leases->lock);
	if (found == NULL)
		return false;

	make_room(result, n);
	touch = outbox_lease_touch(TOUCH_ENDS, n);
	LWLockAcquire(outbox_leases->lock, LW_EXCLUSIVE);
	/* has somebody else come first? */
	if (ran_out(found, now) && found->dboid == MyDatabaseId && found->relid == relid &&
		found->subscription == subscription && found->njobs <= n)
		copy_lease(found, NULL, 0, result, touch);
	else
		found = NULL;
	LWLockRelease(outbox_leases->lock);
	return found != NULL;
}
