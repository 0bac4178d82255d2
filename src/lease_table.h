/*-------------------------------------------------------------------------
 *
 * lease_table.h
 *		The table of leases in shared memory, for those two files that work
 *		on it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef OUTBOX_LEASE_TABLE_H
#define OUTBOX_LEASE_TABLE_H

#include "consume.h"

#include "storage/lock.h"
#include "storage/lwlock.h"

#define MAX_LEASES 3072			/* claims of the server */
#define MAX_LEASED 49152		/* jobs */
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
	int			taker;			/* process that has claimed */
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
	int32		free_lease;
	int32		free_job;
	int			njobs;
	pg_atomic_uint32 any;		/* is a job entered? */
	pg_atomic_uint64 earliest;	/* no lease runs out before that */
	int32		job_buckets[MAX_LEASED];
	LeasedJob	jobs[MAX_LEASED];
	int32		claim_buckets[MAX_LEASES];
	Lease		leases[MAX_LEASES];
	char		holders[MAX_LEASES][OUTBOX_MAX_HOLDER + 1];
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

extern LeaseShared *outbox_leases;

/* lease_table.c: the caller holds the lock, but for outbox_lease_touch */
extern LeasedJob *outbox_leased_job(Oid relid, int64 job);
extern Lease *outbox_lease_by_claim(Oid relid, int64 claim);
extern char *outbox_lease_holder_of(const Lease *lease);
extern bool outbox_lease_is_known(const Lease *lease);
extern bool outbox_is_ending(const LeasedJob *entry);
extern void outbox_lease_free(Lease *lease);
extern void outbox_lease_runs_until(Lease *lease, TimestampTz until);
extern Touch *outbox_lease_touch(TouchKind kind, int njobs);

#endif							/* OUTBOX_LEASE_TABLE_H */
