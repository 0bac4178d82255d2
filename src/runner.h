/*-------------------------------------------------------------------------
 *
 * runner.h
 *		Running handlers: shared by handler.c, limit.c, runner.c and those who
 *		state which handler a subscription has.
 *
 *-------------------------------------------------------------------------
 */
#ifndef OUTBOX_RUNNER_H
#define OUTBOX_RUNNER_H

#include "consume.h"

/* A handler as it is stored with its subscription */
typedef struct OutboxHandler
{
	Oid			oid;			/* InvalidOid: none */
	char	   *name;			/* qualified and quoted */
} OutboxHandler;

/* Why code of a user's was cancelled */
typedef enum OutboxCancel
{
	OUTBOX_CANCEL_NONE = 0,
	OUTBOX_CANCEL_LEASE,		/* its lease has ended */
	OUTBOX_CANCEL_ASKED			/* the worker is to end */
} OutboxCancel;

/* A subscription that a runner serves */
typedef struct OutboxRunnerSubscription
{
	OutboxConsumer consumer;
	char	   *activity;		/* what is shown while its handler runs */
	TimestampTz not_before;		/* no claim before that; 0: at any time */
	int			empty;			/* claims in vain in a row */
	int64		run_us;			/* what the handler takes, on average */
} OutboxRunnerSubscription;

/* A job that has been claimed and is to be run */
typedef struct OutboxHeldJob
{
	int64		id;				/* 0: none */
	int64		seq;
	int64		claim;
	int			attempt;
	TimestampTz leased_until;
	int32		subscription;
	bool		ordered;		/* as which it was claimed */
} OutboxHeldJob;

/* The runner that this process is */
typedef struct OutboxRun
{
	Oid			role;			/* whose handlers are run */
	char	   *holder;			/* name under which jobs are claimed */
	MemoryContext context;		/* reset for each job */
	OutboxHeldJob held;
	int			nsubs;			/* subscriptions served */
	int			streak;			/* jobs claimed one after another */
	bool		gone;			/* the extension is */
	bool		refused;		/* the role is not to run handlers */
	bool		alone;			/* claim the next job in a transaction of its
								 * own */
} OutboxRun;

/* handler.c: stating a handler */
extern void outbox_handler_resolve(const char *text, OutboxHandler *handler);
extern Oid	outbox_handler_find(const char *name);
extern void outbox_handler_check_owner(const OutboxHandler *handler, const char *owner,
									   Oid owner_oid);

/* handler.c: in a runner */
extern Datum outbox_handler_event(int64 seq, int64 *version, bool *found);
extern void outbox_handler_run(const OutboxConsumer *consumer, Datum event, int attempt);
extern void outbox_handler_forget(bool temp_used);

/* limit.c: in a runner */
extern void outbox_limit_init(void);
extern void outbox_limit_busy(bool busy);
extern bool outbox_limit_asked(void);
extern void outbox_limit_begin(int64 us);
extern OutboxCancel outbox_limit_end(void);

/* runner.c */
extern OutboxRun outbox_run;

/* runner_claim.c */
extern bool outbox_run_enter(OutboxOwnerContext *context);
extern bool outbox_run_begin(const char *activity, OutboxOwnerContext *context);
extern int64 outbox_run_version(void);
extern void outbox_run_load(int64 wanted);
extern OutboxRunnerSubscription *outbox_run_find(int32 id);
extern Datum outbox_run_ids(void);
extern TimestampTz outbox_run_next_due(void);
extern bool outbox_run_claim(bool all, OutboxHeldJob *job);
extern bool outbox_run_look(bool all);
extern void outbox_run_release(OutboxHeldJob *job);
extern void outbox_run_release_held(void);

/* runner_job.c */
extern void outbox_run_job(void);

#endif							/* OUTBOX_RUNNER_H */
