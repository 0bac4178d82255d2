/*-------------------------------------------------------------------------
 *
 * consume.h
 *		Jobs after the relay has made them: hints, leases, and how they end.
 *
 * A job is claimed by moving its due time into the future, which is its lease,
 * and by giving it the number of the claim, which fences.  An expired lease
 * needs nobody to end it: the job is simply due again.
 *
 *-------------------------------------------------------------------------
 */
#ifndef OUTBOX_CONSUME_H
#define OUTBOX_CONSUME_H

#include "outbox.h"

#include "utils/timestamp.h"

/* SQLSTATE of a lease that is lost */
#define ERRCODE_OUTBOX_LEASE_LOST MAKE_SQLSTATE('O', 'B', '0', '0', '1')

#define OUTBOX_MAX_HOLDER 255	/* bytes of the name of a holder */

/* A subscription as those who work with its jobs need it */
typedef struct OutboxConsumer
{
	int32		id;
	char	   *name;
	char	   *owner;
	Oid			owner_oid;
	bool		paused;
	bool		ordered;
	char	   *handler;		/* NULL: none */
	Oid			handler_oid;
	int32		max_attempts;
	int64		retry_min;		/* these three in us */
	int64		retry_max;
	int64		lease;
	JsonPath   *filter;			/* NULL: none */
} OutboxConsumer;

/* A job that has been claimed */
typedef struct OutboxJob
{
	ItemPointerData tid;
	int64		id;
	int64		seq;			/* of its event */
	int32		attempt;		/* this one; from 1 on */
	int64		old_claim;		/* of a lease that has run out; 0: none */
	bool		filter_pending;
	bool		keyed;			/* has a subject_key ... */
	int64		subject_key;	/* ... which is this */
	TimestampTz due_at;			/* before it was claimed */
} OutboxJob;

/* A claim: what was asked for, and what came of it */
typedef struct OutboxClaim
{
	const OutboxConsumer *consumer;
	int			max_jobs;
	int64		lease;			/* us */
	const char *holder;
	bool		only_armed;		/* a worker's: nothing while outbox rests */
	bool		in_memory;		/* leases need not be written to the rows */

	int64		claim;			/* number of the claim; 0: nothing is leased */
	TimestampTz leased_until;
	int			njobs;
	OutboxJob  *jobs;			/* in the current context */
	int			nmemory;		/* of them, the first are leased in memory ... */
	int			memory;			/* ... by this number of lease_table.c */
	bool		drained;		/* nothing more was due */
} OutboxClaim;

/* A lease that is kept in memory, or some of its jobs */
typedef struct OutboxLease
{
	int32		subscription;
	Oid			handler_owner;
	int64		claim;
	TimestampTz until;
	TimestampTz first_due;		/* of its jobs, as their rows have it */
	bool		rows;			/* others of the claim may be leased in their
								 * rows */
	int			njobs;
	int64	   *jobs;
	ItemPointerData *tids;		/* where they were */
	char		holder[OUTBOX_MAX_HOLDER + 1];
} OutboxLease;

/*
 * What a look at the jobs of a subscription may take for granted; see hint.c.
 */
typedef struct OutboxLook
{
	struct OutboxHint *hint;	/* NULL: there is no room for one */
	int32		subscription;
	TimestampTz low;			/* nothing that can be claimed is due earlier */
	uint32		nposts;			/* when the look began */
	bool		advance;		/* the hint may be raised after this look */
	bool		forgot;			/* ask the table what falls due next */
} OutboxLook;

/* hint.c */
extern Size outbox_hint_size(void);
extern void outbox_hint_shmem(void *memory, bool found);
extern void outbox_hint_init(void);
extern void outbox_hint_note(int32 subscription, TimestampTz due, Oid handler_owner);
extern void outbox_hint_note_abort(int32 subscription, TimestampTz due, Oid handler_owner);
extern void outbox_hint_post(int32 subscription, TimestampTz due, Oid handler_owner);
extern void outbox_hint_begin(int32 subscription, OutboxLook *look);
extern bool outbox_hint_may_sweep(OutboxLook *look);
extern TimestampTz outbox_hint_next_sweep(const OutboxLook *look);
extern void outbox_hint_swept(OutboxLook *look, TimestampTz began);
extern void outbox_hint_end(OutboxLook *look, TimestampTz bound, bool drained);
extern void outbox_hint_next_due(OutboxLook *look, TimestampTz due);
extern TimestampTz outbox_hint_next(int32 subscription);
extern void outbox_hint_note_done(int32 subscription, int64 n);
extern int64 outbox_hint_done(int32 subscription);
extern void outbox_hint_ran(int32 subscription, int64 us);
extern bool outbox_hint_is_fast(int32 subscription);
extern void outbox_hint_watch(int32 subscription);
extern void outbox_hint_unwatch(void);

/*
 * Order of the unfinished jobs of a subject.  Index jobs_subject alone has it:
 * by the id alone the planner might walk the primary key, or another index and
 * sort, with a plan that it made while the table was small and keeps.
 */
#define OUTBOX_OLDEST_FIRST " ORDER BY (dead_at IS NULL), id"
#define OUTBOX_YOUNGEST_FIRST " ORDER BY (dead_at IS NULL) DESC, id DESC"

/* Columns of outbox.subscriptions s that make an OutboxConsumer */
#define OUTBOX_CONSUMER_COLUMNS \
	" s.id, s.name, s.owner, s.owner_oid, s.paused_at IS NOT NULL, s.ordered, s.handler, s.handler_oid," \
	" s.max_attempts, s.retry_min, s.retry_max, s.lease, s.filter "

/* consumer.c: as the owner of the extension, connected to SPI */
extern bool outbox_find_consumer(const char *name, int32 id, OutboxConsumer *consumer);
extern void outbox_consumer_by_name(const char *name, Oid caller, OutboxConsumer *consumer);
extern void outbox_consumer_from_row(int row, int column, OutboxConsumer *consumer);
extern void outbox_check_consumer(const OutboxConsumer *consumer, Oid caller);
extern Oid	outbox_handler_owner(const OutboxConsumer *consumer);
extern int64 outbox_interval_us(const Interval *interval, const char *argument, bool zero_ok);
extern int64 outbox_retry_wait_us(const OutboxConsumer *consumer, int attempts);
extern void outbox_pin_planner(void);
extern void outbox_begin_call(OutboxOwnerContext *context);

/* lease_table.c */
extern Size outbox_leases_size(void);
extern void outbox_leases_shmem(void *memory, bool found);
extern void outbox_leases_init(void);
extern bool outbox_lease_number(Oid sequence, int64 *number);
extern void outbox_lease_numbers(Oid sequence, int64 next, int64 end);
extern bool outbox_lease_number_is_durable(Oid sequence, int64 number);
extern int	outbox_lease_open(Oid relid, int32 subscription, Oid handler_owner);
extern bool outbox_lease_take(int number, const OutboxJob *jobs, int n, bool *taken);
extern void outbox_lease_close(int number);
extern void outbox_lease_drop(int number, const OutboxJob *jobs, int n);
extern void outbox_lease_keep(int number, int64 claim, TimestampTz until, const char *holder,
							  bool rows);
extern bool outbox_is_leased(Oid relid, int64 job);
extern bool outbox_lease_of(Oid relid, int64 job, OutboxLease *result);
extern bool outbox_lease_end(Oid relid, int64 claim, const int64 *wanted, int nwanted,
							 OutboxLease *result);
extern void outbox_lease_has_rows(Oid relid, int64 claim);
extern int	outbox_lease_prolong(Oid relid, int64 claim, TimestampTz until, bool *rows);
extern int32 outbox_lease_subscription(Oid relid, int64 claim);
extern bool outbox_lease_expired(Oid relid, int32 subscription, OutboxLease *result);

/* Who asks for fewer jobs wants to know that the attempt is on disk */
#define OUTBOX_MANY_JOBS 8

/* claim_commit.c */
extern void outbox_claim_commit_init(void);
extern void outbox_claim_begins(bool many);
extern void outbox_claim_ended(void);

/* claim_number.c */
extern Oid	outbox_our_relation(const char *name);
extern int64 outbox_next_claim(bool in_memory);

/* lease_many.c: as the owner of the extension, connected to SPI */
extern Oid	outbox_jobs_relid(void);
extern void outbox_begin_lease(OutboxClaim *claim);
extern void outbox_claim_in_memory(OutboxClaim *claim);
extern int	outbox_leave_leased(const OutboxConsumer *consumer, OutboxJob *jobs, int n);
extern void outbox_settle_expired(const OutboxConsumer *consumer);
extern void outbox_settle_job(int64 job, int64 claim);
extern bool outbox_consumer_of_lease(Oid relid, int64 claim, Oid caller, OutboxConsumer *consumer);
extern bool outbox_complete_in_memory(int64 claim, const int64 *wanted, int nwanted, Oid caller,
									  int64 **done, int *ndone, bool *rows);

/* lease.c: as the owner of the extension, connected to SPI */
extern void outbox_claim_jobs(OutboxClaim *claim);
extern bool outbox_look_for_jobs(const OutboxConsumer *consumer, TimestampTz *again);

/* complete.c: as the owner of the extension, connected to SPI */
extern bool outbox_deletes_done(void);
extern bool outbox_complete_job(int64 job, int64 claim, Oid caller);

/* finish.c: as the owner of the extension, connected to SPI */
pg_noreturn extern void outbox_lease_lost(int64 job);
extern TimestampTz outbox_fail_job(int64 job, int64 claim, Oid caller, const char *error,
								   int64 retry_in, bool final);
extern bool outbox_release_job(int64 job, int64 claim, Oid caller, int64 retry_in);
extern void outbox_bury_job(const OutboxConsumer *consumer, OutboxJob *job, const char *error);
extern bool outbox_find_job(int64 job, Oid caller, OutboxConsumer *consumer, OutboxJob *row);
extern void outbox_free_subject(const OutboxConsumer *consumer, int64 subject_key,
								TimestampTz earliest);

/* filter.c: connected to SPI */
extern bool outbox_filter_accepts(JsonPath *filter, int64 seq, int limit_ms);

/* await.c */
extern int64 outbox_await_us(const Interval *interval);
extern void outbox_await_check(FunctionCallInfo fcinfo, const char *procedure);
extern Datum outbox_await_result(FunctionCallInfo fcinfo, Datum value);

/* Retry as the schedule of the subscription has it */
#define OUTBOX_RETRY_SCHEDULE ((int64) -1)

#endif							/* OUTBOX_CONSUME_H */
