/*-------------------------------------------------------------------------
 *
 * outbox.h
 *		Types and functions shared by the files of the extension.
 *
 * Words are those of the README: event, subscription, job, pass, doorbell,
 * sweep, poisoned.  Every external symbol begins with outbox_.
 *
 *-------------------------------------------------------------------------
 */
#ifndef OUTBOX_H
#define OUTBOX_H

#include "postgres.h"

#include "access/xact.h"
#include "datatype/timestamp.h"
#include "executor/spi.h"
#include "fmgr.h"
#include "port/atomics.h"
#include "storage/block.h"
#include "storage/itemptr.h"
#include "storage/lwlock.h"
#include "storage/spin.h"
#include "utils/jsonb.h"
#include "utils/jsonpath.h"
#include "utils/snapshot.h"

#include "compat.h"

#define OUTBOX_EXTENSION "outbox"
#define OUTBOX_SCHEMA "outbox"
#define OUTBOX_LIBRARY "outbox"

#define OUTBOX_MAX_RELAYS 16	/* relays of one database */
#define OUTBOX_MAX_RUNNERS 32	/* runners of one database */
#define OUTBOX_MAX_WANTS 64		/* owners of handlers in one database */
#define OUTBOX_MAX_RANGES 16	/* hints kept for one database */
#define OUTBOX_MAX_PREPARED 64	/* prepared transactions whose hint is kept */
#define OUTBOX_MAX_TELLS 32		/* databases that the launcher is to probe */
#define OUTBOX_MAX_CLOSED 32	/* databases that DDL is at work on */
#define OUTBOX_ERROR_LEN 512	/* error text kept in shared memory */
#define OUTBOX_GIDSIZE 200		/* as GIDSIZE in access/xact.h */

/* Limits of an event, in bytes */
#define OUTBOX_MAX_TYPE 255
#define OUTBOX_MAX_SUBJECT (16 * 1024)
#define OUTBOX_MAX_SCOPE (16 * 1024)
#define OUTBOX_MAX_PAYLOAD (64 * 1024 * 1024)
#define OUTBOX_MAX_HEADERS (1024 * 1024)

/* A range of seqs that may hold unmarked events: a hint, never trusted */
typedef struct OutboxRange
{
	int64		low;
	int64		high;
} OutboxRange;

#define OUTBOX_SEQ_MIN PG_INT64_MIN
#define OUTBOX_SEQ_MAX PG_INT64_MAX

typedef enum OutboxRelayState
{
	OUTBOX_RELAY_FREE = 0,
	OUTBOX_RELAY_IDLE,
	OUTBOX_RELAY_PASS,
	OUTBOX_RELAY_BACKOFF,
	OUTBOX_RELAY_RESTING		/* not armed, or stopped */
} OutboxRelayState;

/* How the last relay with a number ended, for the launcher */
typedef enum OutboxRelayEnd
{
	OUTBOX_END_FAILED = 0,		/* by an error, or before it came so far */
	OUTBOX_END_CLEAN,			/* exit code 0 */
	OUTBOX_END_ASKED			/* by SIGTERM, or kept from starting by DDL */
} OutboxRelayEnd;

/*
 * One relay of one database.  Written by that relay alone, except that the
 * launcher frees it; pid and procno under the database's mutex, the counters
 * likewise (they are read by outbox.relays()).
 */
typedef struct OutboxRelay
{
	int			pid;			/* 0: no such relay */
	int			procno;			/* for ProcSendSignal */
	OutboxRelayState state;
	OutboxRelayEnd end;
	int64		passes;
	int64		events;
	int64		jobs;
	int64		failures;
	int64		notify_failures;
	TimestampTz last_pass_at;
	TimestampTz last_error_at;
	TimestampTz backoff_until;
	char		last_error[OUTBOX_ERROR_LEN];
} OutboxRelay;

/*
 * One runner of one database: a worker that runs the handlers of one role.
 * Under the database's mutex.  Written by that runner, but for this: the
 * launcher frees it and may set leaving; who wakes it sets idle to false.
 */
typedef struct OutboxRunner
{
	int			pid;			/* 0: no such runner */
	int			procno;			/* for ProcSendSignal */
	Oid			owner;			/* whose handlers it runs */
	bool		idle;			/* waits for something to do */
	bool		leaving;		/* ends when its job is over */
	OutboxRelayEnd end;
	bool		died_at_work;	/* ended in the middle of a job */
	TimestampTz started_at;
	TimestampTz busy_since;		/* since when it is not idle */
	int32		subscription;	/* whose job it runs; 0: none */
	int64		job;
	TimestampTz began_at;		/* when it took that job */
	int64		jobs;			/* completed */
	int64		failures;
} OutboxRunner;

/* What retention has done in one database; under the database's mutex */
typedef struct OutboxPruned
{
	int64		events;			/* deleted since the slot was taken */
	int64		jobs;
	TimestampTz ended_at;		/* of the last whole cycle */
	TimestampTz failed_at;		/* 0: the last one went well */
	char		error[OUTBOX_ERROR_LEN];	/* why it did not */
} OutboxPruned;

/* A role whose handlers have something to do, from a time on */
typedef struct OutboxWant
{
	Oid			owner;			/* InvalidOid: free */
	uint32		posts;			/* how often something was posted */
	TimestampTz due;			/* DT_NOEND: nothing known */
	TimestampTz served_at;		/* when a runner last worked for it */
} OutboxWant;

/*
 * A database in which outbox works.  dboid is set and cleared by the launcher
 * with both OutboxShared.lock and the mutex held; it may be read without a
 * lock, but must be looked at again under the mutex before anything is
 * written.
 */
typedef struct OutboxDatabase
{
	slock_t		mutex;
	Oid			dboid;			/* InvalidOid: free */
	Oid			extowner;		/* owner of the extension there */

	/* the doorbell */
	int			nranges;
	OutboxRange ranges[OUTBOX_MAX_RANGES];	/* by low; disjoint */
	bool		sweep_wanted;	/* rung without a hint */
	TimestampTz swept_at;		/* when the last sweep began */
	TimestampTz next_retry;		/* earliest retry_at known; 0: none */

	OutboxPruned pruned;
	OutboxRelay relays[OUTBOX_MAX_RELAYS];
	OutboxRunner runners[OUTBOX_MAX_RUNNERS];
	OutboxWant	wants[OUTBOX_MAX_WANTS];
	bool		runners_watched;	/* the launcher looks at them again soon */
	int			crowd;			/* runners that are to make room for others */
	TimestampTz crowded_since;	/* since when crowd is not 0 */
} OutboxDatabase;

/* A prepared transaction that recorded events */
typedef struct OutboxPrepared
{
	char		gid[OUTBOX_GIDSIZE];	/* "": free */
	Oid			dboid;
	OutboxRange range;
} OutboxPrepared;

/*
 * A backend that waits for an event to be fanned out, or for jobs of a
 * subscription; one for each backend
 */
typedef struct OutboxWaiter
{
	pg_atomic_uint32 dboid;		/* 0: does not wait */
	pg_atomic_uint32 subscription;	/* 0: waits for an event */
	pg_atomic_uint64 seq;
} OutboxWaiter;

/* The launcher's short-lived workers; at most one of each kind at a time */
typedef enum OutboxVisitKind
{
	OUTBOX_VISIT_PROBE = 0,		/* is the extension there? */
	OUTBOX_VISIT_SWEEP			/* one sweep, where no relay is kept */
} OutboxVisitKind;

#define OUTBOX_VISIT_KINDS 2

typedef enum OutboxVisitOutcome
{
	OUTBOX_VISIT_FAILED = 0,
	OUTBOX_VISIT_REFUSED,		/* kept from starting by DDL */
	OUTBOX_VISIT_DONE
} OutboxVisitOutcome;

typedef struct OutboxVisit
{
	uint32		number;			/* of the visit the launcher waits for */
	Oid			dboid;
	int			pid;			/* of its worker; 0: none runs */
	OutboxVisitOutcome outcome;
	bool		present;		/* probe: the extension is there */
	Oid			extowner;		/* probe: its owner ... */
	bool		owner_login;	/* ... who may log in */
} OutboxVisit;

/* A database that a backend runs DDL on: no worker may start there */
typedef struct OutboxClosed
{
	Oid			dboid;
	int			pid;			/* of that backend; 0: free */
} OutboxClosed;

typedef struct OutboxShared
{
	LWLock	   *lock;			/* slots, places, visits, closed, prepared */
	TimestampTz epoch;			/* when shared memory was set up */

	/* the launcher */
	slock_t		mutex;			/* protects the following six */
	int			launcher_pid;
	int			launcher_procno;
	bool		probe_all;		/* look into every database again */
	bool		list_again;		/* look at the list of databases again */
	int			ntells;
	Oid			tells[OUTBOX_MAX_TELLS];	/* databases to probe */

	OutboxVisit visits[OUTBOX_VISIT_KINDS];
	OutboxClosed closed[OUTBOX_MAX_CLOSED];
	bool		prepared_ddl;	/* see ddl.c */

	/* prepared transactions, under lock */
	bool		prepared_unknown;	/* some may have recorded unknown seqs */
	uint32		prepared_doubts;	/* how often that has become so */
	OutboxPrepared prepared[OUTBOX_MAX_PREPARED];

	/* waiters, one for each PGPROC */
	int			nwaiters;
	OutboxWaiter *waiters;

	int			ndatabases;
	OutboxDatabase databases[FLEXIBLE_ARRAY_MEMBER];
} OutboxShared;

/* One event of a pass */
typedef struct OutboxEvent
{
	ItemPointerData tid;
	int64		seq;
	char	   *type;			/* as C strings, in the pass's context */
	char	   *subject;		/* may be NULL */
	char	   *scope;			/* may be NULL */
	TimestampTz not_before;		/* 0: none */
	int			tries;
	int			failures;
	TimestampTz retry_at;		/* 0: none */

	/* filled by outbox_route_events */
	int			ntargets;
	struct OutboxTarget *targets;
} OutboxEvent;

/* A subscription as the relay needs it */
typedef struct OutboxSubscription
{
	int32		id;
	char	   *name;
	char	   *scope;			/* NULL: every scope */
	JsonPath   *filter;			/* NULL: none */
	bool		coalescing;
	bool		ordered;
	Oid			handler_owner;	/* whose runners handle its jobs; InvalidOid:
								 * none */
	char	   *notify;			/* channel to be told of jobs; NULL: none */
	bool		slow_filter;	/* its filter ran out of time: not evaluated
								 * here */
	int64		filter_spent;	/* time that its filter took in this call, in
								 * us */
	TimestampTz noted;			/* scratch of outbox_enqueue */
	bool		told;			/* scratch of outbox_announce */
} OutboxSubscription;

/* A subscription that an event matched */
typedef struct OutboxTarget
{
	OutboxSubscription *sub;
	bool		filter_pending; /* too slow or too large to evaluate here */

	/* filled by outbox_enqueue */
	struct OutboxTarget *covered_by;	/* coalesced: the later delivery */
	TimestampTz due_at;
	int64		job;
} OutboxTarget;

/* What the filters look at, of an event that is in no table */
typedef struct OutboxContent
{
	Datum		payload;
	Datum		headers;
	bool		no_headers;
} OutboxContent;

/* guc.c */
extern char *outbox_databases;
extern int	outbox_relays_setting;
extern int	outbox_batch_size;
extern int	outbox_sweep_interval;	/* ms */
extern int	outbox_relay_retry_min; /* ms */
extern int	outbox_relay_retry_max; /* ms */
extern int	outbox_poison_after;
extern int	outbox_max_databases;
extern int	outbox_runners_setting;
extern int	outbox_event_retention; /* these three in s; -1: for ever */
extern int	outbox_job_retention;
extern int	outbox_dead_retention;
extern char *outbox_dead_channel;
extern bool outbox_superuser_handlers;
extern char *outbox_record_channel;
extern char *outbox_fanned_channel;
extern char *outbox_poisoned_channel;
extern bool outbox_notify_on_record;
extern bool outbox_synchronous_pass;
extern void outbox_guc_init(void);
extern bool outbox_database_listed(const char *datname);

/* shmem.c */
extern OutboxShared *outbox_shared; /* NULL: the library is not preloaded */
extern void outbox_shmem_init(void);
extern OutboxDatabase *outbox_find_database(Oid dboid);

/* doorbell.c */
extern void outbox_doorbell_init(void);
extern void outbox_doorbell_note(int64 seq);
extern void outbox_doorbell_note_sweep(void);
extern void outbox_doorbell_preparing(const char *gid);
extern void outbox_doorbell_post(OutboxDatabase *db, int64 low, int64 high);
extern void outbox_doorbell_sweep(OutboxDatabase *db);
extern bool outbox_doorbell_take(OutboxDatabase *db, OutboxRange *range);
extern uint32 outbox_doorbell_doubts(void);
extern void outbox_doorbell_no_doubts(uint32 doubts);
extern void outbox_doorbell_finish_prepared(const char *gid, bool commit);
extern void outbox_doorbell_wake(OutboxDatabase *db);

/* want.c */
extern void outbox_want_runner(Oid owner, TimestampTz due); /* must not raise or
															 * allocate */
extern void outbox_want_nothing(Oid owner);

/* want.c: in a runner */
extern void outbox_runner_is(OutboxDatabase *db, OutboxRunner *runner);
extern void outbox_runner_is_super(bool super);
extern uint32 outbox_want_begin(Oid owner);
extern TimestampTz outbox_want_end(Oid owner, uint32 seen, TimestampTz next);
extern bool outbox_runner_should_go(bool idle);
extern bool outbox_runner_takes(int32 subscription, int most);
extern void outbox_runner_shows(int32 subscription, int64 job);
extern void outbox_runner_idle(bool idle);
extern void outbox_runner_count(bool failed);

/* owners.c */
extern void outbox_want_owners(void);

/* await.c */
extern void outbox_await_wake(Oid dboid, const int64 *seqs, int nseqs);

/* record.c */
extern void outbox_record_poisoned(const OutboxEvent *event, const char *error);
extern void outbox_record_dead(const char *subscription, int64 job, int64 seq, int attempts,
							   const char *type, const char *subject, const char *scope,
							   const char *error);
extern bool outbox_printable(const char *p, int len);
extern void outbox_check_type(const char *type, int len, bool internal);
extern int64 outbox_record_event(Datum type, Datum subject, Datum payload, Datum scope,
								 Datum headers, Datum not_before, const bool *nulls,
								 bool internal);

/* spi.c */
typedef struct OutboxOwnerContext
{
	Oid			userid;
	int			sec_context;
	int			guc_level;
} OutboxOwnerContext;

typedef struct OutboxPlan
{
	const char *query;
	int			nargs;
	Oid			argtypes[16];
	SPIPlanPtr	plan;			/* kept; NULL: not prepared yet */
} OutboxPlan;

extern Oid	outbox_extension_owner(void);
extern char *outbox_current_database(void);
extern Oid	outbox_function_oid(const char *name);
extern bool outbox_is_admin(Oid roleid);
extern bool outbox_may_execute(Oid function, Oid roleid);
extern void outbox_become_owner(OutboxOwnerContext *context);
extern void outbox_become_caller(OutboxOwnerContext *context);
extern void outbox_spi_connect(void);
extern void outbox_spi_finish(void);
extern uint64 outbox_execute(OutboxPlan *plan, Datum *values, const char *nulls, int expected);
extern uint64 outbox_execute_snapshot(OutboxPlan *plan, Datum *values, const char *nulls,
									  int expected, Snapshot snapshot);
extern Datum outbox_spi_value(int row, int column, bool *isnull);
extern char *outbox_spi_string(int row, int column);
extern void outbox_check_not_null(FunctionCallInfo fcinfo, int n, const char *name);
extern Datum outbox_make_array(Datum *values, bool *nulls, int n, Oid type);
extern ErrorData *outbox_try(void (*attempt) (void *arg), void *arg);
extern ErrorData *outbox_catch_error(MemoryContext context);
extern char *outbox_clip(const char *text, int limit);

/* glob.c */
typedef struct OutboxPattern
{
	bool		exclude;		/* began with ! */
	bool		internal;		/* begins with "outbox.": matches the
								 * extension's own events */
	int			len;
	char text[	FLEXIBLE_ARRAY_MEMBER]; /* without the ! */
} OutboxPattern;

/* Length in bytes of the character that begins there */
typedef int (*OutboxCharLength) (const char *text);

extern OutboxPattern *outbox_glob_parse(const char *pattern, int len, const char **error);
extern bool outbox_glob_match(const OutboxPattern *pattern, const char *type, int len,
							  OutboxCharLength char_length);
extern bool outbox_glob_match_list(List *patterns, const char *type, int len,
								   OutboxCharLength char_length);

/* route.c */
extern int	outbox_char_length(const char *text);
extern void outbox_route_events(OutboxEvent *events, int nevents, int64 version);
extern void outbox_route_given(OutboxEvent *event, const OutboxContent *content);
extern void outbox_route_load_one(int32 subscription);
extern void outbox_route_by_loaded(OutboxEvent *events, int nevents);
extern void outbox_route_forget(void);

/* filter.c */
extern void outbox_filter_events(OutboxEvent *events, int nevents, const OutboxContent *content);
extern void outbox_filter_patiently(OutboxEvent *events, int nevents);

/* jobs.c */
extern int	outbox_enqueue(OutboxEvent *events, int nevents);
extern int	outbox_enqueue_again(OutboxEvent *events, int nevents);
extern int64 outbox_subject_key(const char *scope, const char *subject);

/* pass.c */
typedef struct OutboxPass
{
	OutboxRange range;			/* what is claimed, unless retry */
	bool		retry;			/* claim the rows whose retry_at has come */
	OutboxDatabase *db;			/* slot to which the rest is posted; NULL:
								 * none */

	/* results */
	int			claimed;
	bool		full;			/* the claim was full: there may be more */
	int64		last;			/* highest seq claimed */
	bool		left;			/* some claimed events were left unmarked: */
	int64		left_low;
	int64		left_high;
	int64		fanned;
	int64		jobs;
	int64		failures;		/* events that failed alone */
	int			poisoned;
	int			unwritten;		/* failures that could not be written down */
	char	   *unwritten_error;
	bool		retry_set;		/* some event waits for retry_at now */
	bool		gone;			/* the extension is not there any more */
	bool		trouble;		/* nothing went: the relay should back off */
	char	   *error;			/* last error, in the caller's context */
} OutboxPass;

extern void outbox_pass(OutboxPass *pass);
extern TimestampTz outbox_pass_next_retry(bool *resting);
extern bool outbox_lock_extension(void);
extern bool outbox_begin_and_claim(OutboxPass *pass, OutboxEvent **events, int64 *version);
extern void outbox_announce(List *fanned, OutboxEvent *events, int nevents);
extern int64 outbox_retry_wait_ms(int tries);
extern char *outbox_error_text(ErrorData *edata, bool detail);
extern void outbox_shun(int64 seq);
extern void outbox_unshun(OutboxDatabase *db);

/* redo.c */
extern bool outbox_redo_once(OutboxPass *pass);
extern void outbox_redo_success(void);
extern void outbox_redo_report(OutboxPass *pass);

/* subscription.c */
/* A subscription as those who change it look at it */
typedef struct OutboxSubscriptionRow
{
	int32		id;
	char	   *owner;
	Oid			owner_oid;
	bool		paused;
	char	   *handler;		/* NULL: none */
	Oid			handler_oid;
} OutboxSubscriptionRow;

extern void outbox_check_name(const char *name);
extern bool outbox_find_subscription(const char *name, OutboxSubscriptionRow *sub);
pg_noreturn extern void outbox_no_such_subscription(const char *name);
extern bool outbox_may_change(const char *owner, Oid owner_oid, Oid roleid);
extern bool outbox_role_is(Oid roleid, const char *name);
extern void outbox_lock_routing(void);
extern void outbox_wake_consumers(int32 id);
extern void outbox_check_may_change(const char *name, const OutboxSubscriptionRow *sub, Oid caller);
extern void outbox_end_change(OutboxOwnerContext *context);

/* ids.c */
extern int	outbox_unique_ids(int64 *ids, int n);
extern int	outbox_find_id(const int64 *ids, int n, int64 id);
extern bool outbox_has_id(const int64 *ids, int n, int64 id);
extern Datum outbox_id_array(const int64 *ids, int n);
extern int	outbox_result_ids(uint64 nrows, int64 **ids);
extern int	outbox_named_jobs(Datum fanout, int64 **ids);

/* prune.c */
extern bool outbox_prune_turn(OutboxDatabase *db, bool busy);
extern long outbox_prune_sleep_ms(TimestampTz now);
extern void outbox_prune_in_sweep(void);

/* stats.c */
extern bool outbox_read_relay(OutboxDatabase *db, Oid dboid, int i, OutboxRelay *relay);

/* notify.c */
extern int64 outbox_notify_failures;
extern void outbox_notify_fanned(const int64 *seqs, int nseqs);
extern void outbox_notify_poisoned(const OutboxEvent *event, int sqlstate);
extern void outbox_notify_dead(const int64 *seqs, int nseqs);
extern void outbox_notify_jobs(const char *channel, const char *subscription);
extern void outbox_listen_update(void);
extern bool outbox_listen_heard(void);

/* worker.c */

/* What the launcher hands to a worker, in bgw_extra */
typedef struct OutboxWorkerArgs
{
	Oid			dboid;
	Oid			userid;			/* whom it works as; InvalidOid: the bootstrap
								 * superuser */
	bool		nologin;		/* who may not log in */
	int			slot;			/* of the database, in OutboxShared.databases */
	int			relay;			/* in OutboxDatabase.relays */
	int			runner;			/* in OutboxDatabase.runners */
	uint32		visit;			/* OutboxVisit.number */
} OutboxWorkerArgs;

extern bool (*outbox_worker_hold_sigterm) (void);
extern bool outbox_worker_attach(OutboxWorkerArgs *args);
extern bool outbox_runner_attach(OutboxWorkerArgs *args);
extern void outbox_worker_arguments(OutboxWorkerArgs *args);
extern void outbox_worker_signals(void);
extern bool outbox_worker_asked(void);
extern void outbox_worker_connect(Oid dboid, Oid userid, bool nologin);
extern void outbox_worker_begin(const char *activity);
extern void outbox_worker_commit(void);
extern void outbox_worker_abort(void);
extern void outbox_worker_idle(void);
extern void outbox_worker_reload(void);
extern uint32 outbox_wait_event(const char *name);

/* relay.c */
extern PGDLLEXPORT void outbox_relay_main(Datum main_arg);
extern bool outbox_relay_sweep_once(void);

/* runner.c */
extern PGDLLEXPORT void outbox_runner_main(Datum main_arg);

/* launcher.c */
extern void outbox_launcher_register(void);
extern void outbox_launcher_tell(Oid dboid);	/* these three: must not raise
												 * or allocate */
extern void outbox_launcher_list_again(void);
extern void outbox_launcher_wake(void);
extern PGDLLEXPORT void outbox_launcher_main(Datum main_arg);

/* visit.c */
extern PGDLLEXPORT void outbox_probe_main(Datum main_arg);
extern PGDLLEXPORT void outbox_sweep_main(Datum main_arg);

/* ddl.c */
extern void outbox_ddl_init(void);
extern bool outbox_ddl_closed(Oid dboid);
extern void outbox_ddl_at_xact_end(bool committed); /* commit or abort: must
													 * not raise or allocate */

/* capture.c */
extern void outbox_capture_init(void);
extern void outbox_capture_altered(Oid relid, int attnum, bool dropped);

#endif							/* OUTBOX_H */
