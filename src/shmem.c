/*-------------------------------------------------------------------------
 *
 * shmem.c
 *		Shared memory of the extension.
 *
 * One block: the launcher's mail box, the slots of the databases, the hints
 * of prepared transactions, and a place for every backend that waits.  Others
 * for the hints of subscriptions (hint.c) and for leases (lease_table.c).  All
 * start empty with the server; relays sweep at their start, and jobs whose leases
 * were lost are due, so nothing in them is ever needed for correctness.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "storage/shmem.h"

OutboxShared *outbox_shared = NULL;

static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

/* Number of PGPROC entries that can wait: every process with a latch. */
static int
number_of_procs(void)
{
	return MaxBackends + NUM_AUXILIARY_PROCS;
}

/* Size of the block, without the waiters */
static Size
shared_size(void)
{
	return MAXALIGN(offsetof(OutboxShared, databases) +
					(Size) outbox_max_databases * sizeof(OutboxDatabase));
}

/* Ask for the memory; MaxBackends is known by now. */
static void
shmem_request(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	RequestAddinShmemSpace(add_size(shared_size(),
									mul_size(number_of_procs(), sizeof(OutboxWaiter))));
	RequestAddinShmemSpace(outbox_hint_size());
	RequestAddinShmemSpace(outbox_leases_size());
	RequestNamedLWLockTranche("outbox", 3);
}

/* Set the memory up, or attach to it. */
static void
shmem_startup(void)
{
	void	   *hints;
	void	   *leases;
	bool		found;
	int			i;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	outbox_shared = ShmemInitStruct("outbox",
									add_size(shared_size(),
											 mul_size(number_of_procs(), sizeof(OutboxWaiter))),
									&found);
	if (!found)
	{
		memset(outbox_shared, 0, shared_size());
		outbox_shared->lock = &(GetNamedLWLockTranche("outbox"))->lock;
		SpinLockInit(&outbox_shared->mutex);
		outbox_shared->epoch = GetCurrentTimestamp();
		outbox_shared->probe_all = true;
		/* transactions prepared before the start may have recorded events */
		outbox_shared->prepared_unknown = true;
		outbox_shared->ndatabases = outbox_max_databases;
		for (i = 0; i < outbox_shared->ndatabases; i++)
			SpinLockInit(&outbox_shared->databases[i].mutex);
		outbox_shared->nwaiters = number_of_procs();
		outbox_shared->waiters = (OutboxWaiter *) ((char *) outbox_shared + shared_size());
		for (i = 0; i < outbox_shared->nwaiters; i++)
		{
			pg_atomic_init_u32(&outbox_shared->waiters[i].dboid, InvalidOid);
			pg_atomic_init_u32(&outbox_shared->waiters[i].subscription, 0);
			pg_atomic_init_u64(&outbox_shared->waiters[i].seq, 0);
		}
	}
	hints = ShmemInitStruct("outbox hints", outbox_hint_size(), &found);
	outbox_hint_shmem(hints, found);
	leases = ShmemInitStruct("outbox leases", outbox_leases_size(), &found);
	outbox_leases_shmem(leases, found);
	LWLockRelease(AddinShmemInitLock);
}

/* Install the hooks; called once, while the library is preloaded. */
void
outbox_shmem_init(void)
{
	prev_shmem_request_hook = shmem_request_hook;
	shmem_request_hook = shmem_request;
	prev_shmem_startup_hook = shmem_startup_hook;
	shmem_startup_hook = shmem_startup;
}

/*
 * Find the slot of a database; NULL when it has none.
 *
 * No lock is taken: the commit callback calls this.  The slot may be given to
 * another database at any moment, so whoever writes to it looks at dboid again
 * under its mutex.  A slot that appears just after we looked belongs to a
 * relay that has not started yet, and a relay sweeps at its start.
 */
OutboxDatabase *
outbox_find_database(Oid dboid)
{
	static int	last = 0;		/* where it was found last time */
	int			i;

	if (outbox_shared == NULL)
		return NULL;
	if (last < outbox_shared->ndatabases && outbox_shared->databases[last].dboid == dboid)
		return &outbox_shared->databases[last];
	for (i = 0; i < outbox_shared->ndatabases; i++)
	{
		if (outbox_shared->databases[i].dboid == dboid)
		{
			last = i;
			return &outbox_shared->databases[i];
		}
	}
	return NULL;
}
