/*-------------------------------------------------------------------------
 *
 * runner.c
 *		The runner: a worker that runs the handlers of one role.
 *
 * It is connected as that role and nobody else, so code of a user's can become
 * no more than it could in a session of its own.  For our own statements, and
 * only for them, it is the owner of the extension (spi.c).
 *
 * A job is claimed in one transaction, which commits its attempt and its lease,
 * and run in the next.  That one calls the handler, completes the job and
 * claims the next one, so that a busy runner commits once for each job, and
 * what a handler writes is there exactly when its job is done.  When it fails,
 * nothing of it is left but the attempt, which is recorded as failed in a
 * transaction of its own.
 *
 * The subscriptions of the role are taken in turns, a job at a time.  Their
 * definitions are read again when the version of the set of subscriptions is
 * another than that under which they were read; each transaction that runs a
 * job looks.  Hints in shared memory (hint.c) say which subscriptions are worth
 * a claim.  When the runner is woken and they say of none, something is due that
 * they know nothing of: then all are tried.
 *
 *-------------------------------------------------------------------------
 */
#include "runner.h"

#include <limits.h>

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "tcop/tcopprot.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"

#define MAX_STORED_ERROR 2000	/* bytes of an error text */
#define IDLE_EXIT_US (30 * USECS_PER_SEC)	/* idle for so long, it ends */
#define LOOK_PAUSE_US USECS_PER_SEC /* between two looks without hints */
#define LOG_PAUSE_US (10 * USECS_PER_SEC)	/* between two failures logged */
#define EMPTY_PAUSE_US 100000	/* first wait after a claim in vain */
#define MAX_EMPTY_DOUBLES 6

/* A handler that takes longer lets others help with the first job already */
#define QUICK_US 20000

/* A subscription of the role with a handler */
typedef struct RunnerSubscription
{
	OutboxConsumer consumer;
	char	   *activity;		/* what is shown while its handler runs */
	TimestampTz not_before;		/* no claim before that; 0: at any time */
	int			empty;			/* claims in vain in a row */
	int64		run_us;			/* what the handler takes, on average */
} RunnerSubscription;

/* A job that has been claimed and is to be run */
typedef struct HeldJob
{
	int64		id;				/* 0: none */
	int64		seq;
	int64		claim;
	int			attempt;
	TimestampTz leased_until;
	int32		subscription;
	bool		ordered;		/* as which it was claimed */
} HeldJob;

/* How far the transaction that runs a job has come */
typedef enum RunStage
{
	STAGE_BEGIN,				/* our statements before the handler */
	STAGE_USER,					/* the handler, or what it left for the commit */
	STAGE_COMPLETE,
	STAGE_CLAIM					/* of the next job */
} RunStage;

static OutboxWorkerArgs args;
static Oid	me;					/* role whose handlers are run */
static char *holder;
static MemoryContext job_context;	/* reset for each job */

static RunnerSubscription *subs = NULL;
static int	nsubs = 0;
static int	last = 0;			/* number of the one that was served last */
static int64 version = -1;		/* under which they were read; -1: not yet */
static MemoryContext subs_context = NULL;

static HeldJob held;
static bool gone = false;		/* the extension is */
static bool refused = false;	/* the role is not to run handlers */
static bool alone = false;		/* claim the next job in a transaction of its
								 * own */
static int	streak = 0;			/* jobs claimed one after another */
static TimestampTz looked_at = 0;	/* when all were tried */

/* The subscription with an id; NULL when there is none to be served */
static RunnerSubscription *
find_sub(int32 id)
{
	int			i;

	for (i = 0; i < nsubs; i++)
	{
		if (subs[i].consumer.id == id)
			return &subs[i];
	}
	return NULL;
}

/*
 * The first thing in each transaction: see that the extension is there, and
 * become its owner.  False: it is gone.
 */
static bool
enter(OutboxOwnerContext *context)
{
	gone = !outbox_lock_extension();
	if (gone)
		return false;
	refused = superuser_arg(me) && !outbox_superuser_handlers;
	outbox_become_owner(context);
	outbox_pin_planner();
	return true;
}

/*
 * Begin a transaction of our own statements, which must see what others have
 * committed whatever the role has set, and be durable before a handler starts.
 * Become the owner of the extension.  False: the extension is gone.
 */
static bool
begin_ours(const char *activity, OutboxOwnerContext *context)
{
	int			isolation = DefaultXactIsoLevel;

	DefaultXactIsoLevel = XACT_READ_COMMITTED;
	PG_TRY();
	{
		outbox_worker_begin(activity);
	}
	PG_FINALLY();
	{
		DefaultXactIsoLevel = isolation;
	}
	PG_END_TRY();
	if (synchronous_commit != SYNCHRONOUS_COMMIT_LOCAL_FLUSH)
		(void) set_config_option("synchronous_commit", "local", PGC_USERSET, PGC_S_SESSION,
								 GUC_ACTION_LOCAL, true, 0, false);
	MemoryContextSwitchTo(job_context);
	return enter(context);
}

/*
 * Read the version of the set of subscriptions; first, so that a set that is
 * newer is read again.
 */
static int64
read_version(void)
{
	static OutboxPlan read = {"SELECT version FROM outbox.routing", 0, {0}, NULL};
	bool		isnull;

	if (outbox_execute(&read, NULL, NULL, SPI_OK_SELECT) != 1)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table outbox.routing must hold one row")));
	return DatumGetInt64(outbox_spi_value(0, 1, &isnull));
}

/*
 * Read the subscriptions that are to be served, unless they are those of this
 * version.  As the owner of the extension, connected to SPI.
 */
static void
load_subs(int64 wanted)
{
	static OutboxPlan load = {
		"SELECT" OUTBOX_CONSUMER_COLUMNS "FROM outbox.subscriptions s"
		" WHERE s.handler IS NOT NULL AND s.paused_at IS NULL"
		" AND s.owner_oid OPERATOR(pg_catalog.=) $1 AND s.owner OPERATOR(pg_catalog.=) $2"
		" ORDER BY s.id",
		2, {OIDOID, NAMEOID}, NULL
	};
	MemoryContext context;
	MemoryContext old;
	RunnerSubscription *loaded;
	NameData	name;
	Datum		values[2];
	char	   *role;
	int			n = 0;
	int			i;

	if (wanted == version)
		return;
	context = AllocSetContextCreate(CurrentMemoryContext, "outbox runner subscriptions",
									ALLOCSET_DEFAULT_SIZES);
	role = GetUserNameFromId(me, true);
	if (role != NULL)
	{
		namestrcpy(&name, role);
		values[0] = ObjectIdGetDatum(me);
		values[1] = NameGetDatum(&name);
		n = (int) outbox_execute(&load, values, NULL, SPI_OK_SELECT);
	}
	old = MemoryContextSwitchTo(context);
	loaded = palloc0((n + 1) * sizeof(RunnerSubscription));
	for (i = 0; i < n; i++)
	{
		RunnerSubscription *known;

		outbox_consumer_from_row(i, 1, &loaded[i].consumer);
		loaded[i].activity = psprintf("handler %s", loaded[i].consumer.handler);
		known = find_sub(loaded[i].consumer.id);
		if (known != NULL)
			loaded[i].run_us = known->run_us;
	}
	MemoryContextSwitchTo(old);
	MemoryContextSetParent(context, TopMemoryContext);
	if (subs_context != NULL)
		MemoryContextDelete(subs_context);
	subs_context = context;
	subs = loaded;
	nsubs = n;
	last = 0;
	version = wanted;
}

/* When is a subscription worth a claim? */
static TimestampTz
due_at(const RunnerSubscription *sub)
{
	return Max(outbox_hint_next(sub->consumer.id), sub->not_before);
}

/*
 * May a job of a subscription be taken?  One whose handler is not known to be
 * fast leaves a runner to the others.  If so, shared memory shows that one is.
 */
static bool
may_take(const RunnerSubscription *sub)
{
	int			most = INT_MAX;

	if (outbox_runners_setting >= 2 && !outbox_hint_is_fast(sub->consumer.id))
		most = outbox_runners_setting - 1;
	return outbox_runner_takes(sub->consumer.id, most);
}

/*
 * Claim a job of one subscription.  The caller has begun a transaction and is
 * the owner of the extension; when it commits, the job is held.
 */
static bool
claim_of(RunnerSubscription *sub, HeldJob *job)
{
	TimestampTz now = GetCurrentTimestamp();
	OutboxClaim claim = {0};

	claim.consumer = &sub->consumer;
	claim.max_jobs = 1;
	claim.lease = sub->consumer.lease;
	claim.holder = holder;
	claim.only_armed = true;
	outbox_claim_jobs(&claim);
	if (claim.njobs == 0)
	{
		/* somebody else has locked what is due, perhaps */
		sub->not_before = 0;
		if (outbox_hint_next(sub->consumer.id) <= now)
		{
			sub->not_before = now + ((int64) EMPTY_PAUSE_US << sub->empty);
			sub->empty = Min(sub->empty + 1, MAX_EMPTY_DOUBLES);
		}
		return false;
	}
	sub->not_before = 0;
	sub->empty = 0;
	job->id = claim.jobs[0].id;
	job->seq = claim.jobs[0].seq;
	job->claim = claim.claim;
	job->attempt = claim.jobs[0].attempt;
	job->leased_until = claim.leased_until;
	job->subscription = sub->consumer.id;
	job->ordered = sub->consumer.ordered;

	/*
	 * There may be more.  Whether there is cannot be told from one job, so a
	 * handler that is done in a moment calls for help only when jobs keep
	 * coming.
	 */
	if (!claim.drained && (streak > 0 || sub->run_us == 0 || sub->run_us > QUICK_US))
		outbox_want_runner(me, now);
	return true;
}

/*
 * Claim a job: of the subscription that comes next after the one served last.
 * all: whatever the hints say.
 */
static bool
claim_next(bool all, HeldJob *job)
{
	int			i;

	for (i = 1; i <= nsubs; i++)
	{
		int			number = (last + i) % nsubs;
		RunnerSubscription *sub = &subs[number];

		CHECK_FOR_INTERRUPTS();
		if ((!all && due_at(sub) > GetCurrentTimestamp()) || !may_take(sub))
			continue;
		if (claim_of(sub, job))
		{
			last = number;
			return true;
		}
	}
	return false;
}

/*
 * Look for a job, in a transaction of its own.  True when one is held now.
 *
 * That somebody cancels it is no reason to end; any other error is, and the
 * launcher starts another runner after a while.
 */
static bool
look(bool all)
{
	OutboxOwnerContext context;
	ErrorData  *edata;
	HeldJob		job = {0};
	volatile bool found = false;

	PG_TRY();
	{
		if (begin_ours("claiming a job", &context))
		{
			load_subs(read_version());
			found = !refused && claim_next(all, &job);
			outbox_become_caller(&context);
		}
		outbox_worker_commit();
	}
	PG_CATCH();
	{
		edata = outbox_catch_error(job_context);
		outbox_worker_abort();
		if (edata->sqlerrcode != ERRCODE_QUERY_CANCELED)
			ReThrowError(edata);
		found = false;
		version = -1;
	}
	PG_END_TRY();
	if (all)
		looked_at = GetCurrentTimestamp();
	alone = false;
	if (found)
		held = job;
	outbox_runner_shows(held.id != 0 ? held.subscription : 0, held.id);
	return found;
}

/* Put the job that is held back in line, in the transaction under way. */
static void
release_in_transaction(const HeldJob *job)
{
	(void) outbox_release_job(job->id, job->claim, GetUserId(), 0);
}

/* Argument and result of release_quietly */
static void
release_attempt(void *arg)
{
	release_in_transaction(arg);
}

/*
 * Put a job back in line, of which the handler did not run: the attempt does
 * not count.  As the owner of the extension.  If somebody else has the job by
 * now, that is as well.
 */
static void
release_quietly(HeldJob *job)
{
	ErrorData  *edata = outbox_try(release_attempt, job);

	if (edata != NULL && edata->sqlerrcode != ERRCODE_OUTBOX_LEASE_LOST)
		ReThrowError(edata);
}

/* Put the job that is held back in line; in a transaction of its own. */
static void
release_held(void)
{
	OutboxOwnerContext context;

	if (held.id == 0)
		return;
	if (begin_ours("releasing a job", &context))
	{
		release_quietly(&held);
		outbox_become_caller(&context);
	}
	outbox_worker_commit();
	held.id = 0;
	outbox_runner_shows(0, 0);
}

/* Text of an error as it is stored, for the owner of the subscription */
static char *
error_text(const ErrorData *edata, OutboxCancel cancelled)
{
	StringInfoData text;

	initStringInfo(&text);
	if (cancelled == OUTBOX_CANCEL_LEASE)
		appendStringInfo(&text, "%s: handler did not end within its lease",
						 unpack_sql_state(ERRCODE_QUERY_CANCELED));
	else if (cancelled == OUTBOX_CANCEL_ASKED)
		appendStringInfo(&text, "%s: handler was terminated by an administrator command",
						 unpack_sql_state(ERRCODE_ADMIN_SHUTDOWN));
	else
	{
		appendStringInfo(&text, "%s: %s", unpack_sql_state(edata->sqlerrcode),
						 edata->message ? edata->message : "");
		if (edata->detail)
			appendStringInfo(&text, "\nDETAIL: %s", edata->detail);
		if (edata->hint)
			appendStringInfo(&text, "\nHINT: %s", edata->hint);
	}
	if (edata->context)
		appendStringInfo(&text, "\nCONTEXT: %s", edata->context);
	return outbox_clip(text.data, MAX_STORED_ERROR);
}

/*
 * Log that a handler has failed, without what may hold data of the event, and
 * not each time: its owner has it all in the job.
 */
static void
log_failure(const char *handler, const char *message)
{
	static TimestampTz logged_at = 0;
	static int	unlogged = 0;
	TimestampTz now = GetCurrentTimestamp();

	if (now >= logged_at && now - logged_at < LOG_PAUSE_US)
	{
		unlogged++;
		return;
	}
	ereport(LOG,
			(errmsg("outbox handler %s failed: %s", handler, message),
			 unlogged == 0 ? 0 :
			 errdetail_plural("%d failure since the last message is not logged.",
							  "%d failures since the last message are not logged.",
							  unlogged, unlogged)));
	logged_at = now;
	unlogged = 0;
}

/* What is recorded of a failure; argument of record_attempt */
typedef struct RecordedFailure
{
	const HeldJob *job;
	const char *text;
	bool		back;			/* the job goes back in line, and nothing is
								 * recorded */
} RecordedFailure;

/* Record it; in a subtransaction. */
static void
record_attempt(void *arg)
{
	RecordedFailure *failure = arg;

	if (failure->back)
		release_in_transaction(failure->job);
	else
		(void) outbox_fail_job(failure->job->id, failure->job->claim, GetUserId(), failure->text,
							   OUTBOX_RETRY_SCHEDULE, false);
}

/*
 * Record that the job's attempt has failed, in a transaction of its own.  When
 * its lease is lost it is somebody else's, and that is only said in the log.
 */
static void
record_failure(const HeldJob *job, const char *text, bool back)
{
	OutboxOwnerContext context;
	RecordedFailure failure;
	ErrorData  *edata = NULL;

	failure.job = job;
	failure.text = text;

	failure.back = back;
	if (begin_ours("recording a failure", &context))
	{
		edata = outbox_try(record_attempt, &failure);
		outbox_become_caller(&context);
	}
	outbox_worker_commit();
	if (edata == NULL)
		return;
	if (edata->sqlerrcode != ERRCODE_OUTBOX_LEASE_LOST)
		ReThrowError(edata);
	ereport(LOG,
			(errcode(edata->sqlerrcode),
			 errmsg("outbox runner lost the lease of job " INT64_FORMAT ", of which the attempt %d failed",
					job->id, job->attempt)));
}

/* Show what is under way: a text without anything of an event's. */
static void
show_activity(const char *activity)
{
	debug_query_string = activity;
	if (activity != NULL)
		pgstat_report_activity(STATE_RUNNING, activity);
}

/* Keep what a handler takes, on average. */
static void
note_time(RunnerSubscription *sub, TimestampTz began)
{
	int64		us = Max(GetCurrentTimestamp() - began, 1);

	outbox_hint_ran(sub->consumer.id, us);
	sub->run_us = sub->run_us == 0 ? us : (sub->run_us * 7 + us) / 8;
}

/*
 * The first part of the transaction that runs the job: see that it is still to
 * be run, and read its event.  Returns its subscription; NULL when it is not,
 * and the job has been dealt with.
 */
static RunnerSubscription *
prepare_run(HeldJob *job, Datum *event)
{
	OutboxOwnerContext context;
	RunnerSubscription *sub;
	int64		current;
	bool		found;

	if (!enter(&context))
		return NULL;
	*event = outbox_handler_event(job->seq, &current, &found);
	load_subs(current);
	sub = find_sub(job->subscription);
	if (sub == NULL || refused || sub->consumer.ordered != job->ordered ||
		job->leased_until <= GetCurrentTimestamp())
	{
		/* not ours any more, paused, or stopped for long before it began */
		release_quietly(job);
		sub = NULL;
	}
	else if (!found)
	{
		/* somebody has deleted the event: it can never be handled */
		(void) outbox_fail_job(job->id, job->claim, GetUserId(),
							   psprintf("event " INT64_FORMAT " does not exist", job->seq),
							   OUTBOX_RETRY_SCHEDULE, true);
		sub = NULL;
	}
	outbox_become_caller(&context);
	return sub;
}

/*
 * The last part: complete the job and claim the next one.  A transaction that
 * has one snapshot for all of it cannot claim.
 */
static void
finish_run(const HeldJob *job, volatile RunStage *stage, HeldJob *next)
{
	OutboxOwnerContext context;

	outbox_become_owner(&context);
	outbox_pin_planner();
	(void) outbox_complete_job(job->id, job->claim, GetUserId());
	*stage = STAGE_CLAIM;
	if (!alone && !IsolationUsesXactSnapshot() && !outbox_limit_asked() && !ConfigReloadPending &&
		!outbox_runner_should_go(false))
		(void) claim_next(false, next);
	outbox_become_caller(&context);
}

/* Run the job that is held. */
static void
run_job(void)
{
	HeldJob		job = held;
	HeldJob		next = {0};
	RunnerSubscription *volatile sub = NULL;
	volatile RunStage stage = STAGE_BEGIN;
	volatile TimestampTz began = GetCurrentTimestamp();
	volatile bool temp_used = false;
	ErrorData  *edata = NULL;
	OutboxCancel cancelled = OUTBOX_CANCEL_NONE;

	PG_TRY();
	{
		Datum		event;

		outbox_worker_begin("running a job");
		MemoryContextSwitchTo(job_context);
		sub = prepare_run(&job, &event);
		if (sub != NULL)
		{
			outbox_spi_finish();
			MemoryContextSwitchTo(job_context);
			show_activity(sub->activity);
			began = GetCurrentTimestamp();
			stage = STAGE_USER;
			outbox_limit_begin(job.leased_until - began);
			outbox_handler_run(&sub->consumer, event, job.attempt);
			cancelled = outbox_limit_end();
			if (cancelled != OUTBOX_CANCEL_NONE)
				ereport(ERROR,
						(errcode(ERRCODE_QUERY_CANCELED),
						 errmsg("handler caught its cancellation")));
			stage = STAGE_COMPLETE;
			outbox_spi_connect();
			MemoryContextSwitchTo(job_context);
			finish_run(&job, &stage, &next);

			/* some of the handler's work may have been left for the commit */
			temp_used = (MyXactFlags & XACT_FLAGS_ACCESSEDTEMPNAMESPACE) != 0;
			stage = STAGE_USER;
			outbox_limit_begin(Max(job.leased_until - GetCurrentTimestamp(), 0));
		}
		outbox_worker_commit();
	}
	PG_CATCH();
	{
		OutboxCancel late = outbox_limit_end();

		if (late != OUTBOX_CANCEL_NONE)
			cancelled = late;
		edata = outbox_catch_error(job_context);
		outbox_worker_abort();
	}
	PG_END_TRY();

	MemoryContextSwitchTo(job_context);
	show_activity(NULL);
	held.id = 0;
	if (sub == NULL && edata == NULL)
	{
		outbox_runner_shows(0, 0);
		return;
	}
	outbox_handler_forget(temp_used);
	if (sub != NULL)
		note_time(sub, began);
	outbox_runner_count(edata != NULL);
	if (edata == NULL)
	{
		streak = next.id != 0 ? streak + 1 : 0;
		held = next;
	}
	else
	{
		char	   *text = error_text(edata, cancelled);
		bool		lost = stage == STAGE_COMPLETE && edata->sqlerrcode == ERRCODE_OUTBOX_LEASE_LOST;

		/* that the next one could not be claimed is no fault of this one */
		alone = stage == STAGE_CLAIM;
		streak = 0;
		if (lost)
			ereport(LOG,
					(errcode(edata->sqlerrcode),
					 errmsg("outbox runner lost the lease of job " INT64_FORMAT ", and what attempt %d did is undone",
							job.id, job.attempt)));
		else
		{
			log_failure(sub ? sub->consumer.handler : "",
						edata->message ? edata->message : "");
			record_failure(&job, text, alone);
		}
	}
	outbox_runner_shows(held.id != 0 ? held.subscription : 0, held.id);
}

/* Is there a runner of this database with that holder's name? */
static bool
holder_lives(const char *name)
{
	OutboxDatabase *db = &outbox_shared->databases[args.slot];
	bool		result = false;
	int			i;

	/* one that had this process's number before is none */
	if (strcmp(name, holder) == 0)
		return false;
	for (i = 0; i < OUTBOX_MAX_RUNNERS && !result; i++)
	{
		int			pid;

		SpinLockAcquire(&db->mutex);
		pid = db->runners[i].pid;
		SpinLockRelease(&db->mutex);
		result = pid != 0 &&
			strcmp(name, psprintf("outbox runner " INT64_FORMAT "/%d", outbox_shared->epoch, pid)) == 0;
	}
	return result;
}

/*
 * Fail the jobs that runners held which are no more: in a crash, say, or
 * because the handler ended its own process.  They need not wait for the end of
 * the lease.
 *
 * Whether a holder lives is looked up after the jobs were: a runner takes its
 * place before it claims.
 */
static void
fail_orphans(void)
{
	static OutboxPlan find = {
		"SELECT j.id, j.claim, j.attempts, j.holder FROM outbox.jobs j"
		" WHERE j.claim IS NOT NULL AND j.done_at IS NULL AND j.dead_at IS NULL"
		" AND j.due_at OPERATOR(pg_catalog.>) $1 AND j.due_at OPERATOR(pg_catalog.<) 'infinity'"
		" AND j.subscription_id OPERATOR(pg_catalog.=) ANY ($2)"
		" AND pg_catalog.starts_with(j.holder, 'outbox runner ')"
		" ORDER BY j.claim FOR NO KEY UPDATE OF j SKIP LOCKED",
		2, {TIMESTAMPTZOID, INT4ARRAYOID}, NULL
	};
	OutboxOwnerContext context;
	Datum	   *ids;
	Datum		values[2];
	SPITupleTable *rows;
	int			n;
	int			i;

	if (begin_ours("failing jobs that did not return", &context))
	{
		load_subs(read_version());
		ids = palloc((nsubs + 1) * sizeof(Datum));
		for (i = 0; i < nsubs; i++)
			ids[i] = Int32GetDatum(subs[i].consumer.id);
		values[0] = TimestampTzGetDatum(GetCurrentTimestamp());
		values[1] = outbox_make_array(ids, NULL, nsubs, INT4OID);
		n = (int) outbox_execute(&find, values, NULL, SPI_OK_SELECT);
		rows = SPI_tuptable;
		for (i = 0; i < n; i++)
		{
			bool		isnull;
			int64		id = DatumGetInt64(SPI_getbinval(rows->vals[i], rows->tupdesc, 1, &isnull));
			int64		claim = DatumGetInt64(SPI_getbinval(rows->vals[i], rows->tupdesc, 2, &isnull));
			int			attempt = DatumGetInt32(SPI_getbinval(rows->vals[i], rows->tupdesc, 3, &isnull));
			char	   *name = SPI_getvalue(rows->vals[i], rows->tupdesc, 4);

			if (!holder_lives(name))
				(void) outbox_fail_job(id, claim, GetUserId(),
									   psprintf("attempt %d did not return", attempt),
									   OUTBOX_RETRY_SCHEDULE, false);
		}
		SPI_freetuptable(rows);
		outbox_become_caller(&context);
	}
	outbox_worker_commit();
}

/*
 * The runner is to end: because somebody has sent SIGTERM, because there are to
 * be fewer, or because the role is not to run handlers.
 */
static void
end_if_told(void)
{
	if (outbox_limit_asked())
	{
		release_held();
		outbox_limit_busy(false);
		ProcDiePending = true;
		InterruptPending = true;
		CHECK_FOR_INTERRUPTS();
	}
	if (outbox_runner_should_go(false))
	{
		release_held();
		proc_exit(0);
	}
}

/* Nothing is left to do for this role, or in this database. */
static void
end_if_useless(void)
{
	if (gone)
		proc_exit(0);
	if (held.id == 0 && (refused || (version >= 0 && nsubs == 0)))
	{
		outbox_want_nothing(me);
		proc_exit(0);
	}
}

/* The earliest time at which a subscription is worth a claim */
static TimestampTz
next_due(void)
{
	TimestampTz result = DT_NOEND;
	int			i;

	for (i = 0; i < nsubs; i++)
		result = Min(result, due_at(&subs[i]));
	return result;
}

/*
 * Wait until there may be something to do.  seen is of outbox_want_begin.  True
 * when somebody has woken us.
 */
static bool
wait_for_work(uint32 seen, TimestampTz idle_since)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz until = outbox_want_end(me, seen, next_due());
	int			rc;

	if (until == DT_NOBEGIN)
		return true;
	if (outbox_runner_should_go(true) || now - idle_since >= IDLE_EXIT_US || now < idle_since)
		proc_exit(0);
	outbox_limit_busy(false);
	outbox_worker_idle();
	until = Min(until, idle_since + IDLE_EXIT_US);
	rc = WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
				   TimestampDifferenceMilliseconds(now, until),
				   outbox_wait_event("OutboxRunnerMain"));
	outbox_limit_busy(true);
	outbox_runner_idle(false);
	return (rc & WL_LATCH_SET) != 0;
}

/* Entry point of an outbox runner. */
void
outbox_runner_main(Datum main_arg)
{
	TimestampTz idle_since = 0;
	bool		woken = true;

	if (!outbox_runner_attach(&args))
		proc_exit(0);
	me = args.userid;
	holder = MemoryContextStrdup(TopMemoryContext,
								 psprintf("outbox runner " INT64_FORMAT "/%d", outbox_shared->epoch, MyProcPid));
	job_context = AllocSetContextCreate(TopMemoryContext, "outbox job", ALLOCSET_DEFAULT_SIZES);
	outbox_limit_init();
	outbox_limit_busy(true);
	MemoryContextSwitchTo(job_context);
	fail_orphans();
	end_if_useless();

	for (;;)
	{
		TimestampTz now;
		uint32		seen;
		bool		all;

		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
		outbox_worker_reload();
		end_if_told();
		MemoryContextSwitchTo(job_context);
		MemoryContextReset(job_context);
		if (held.id != 0)
		{
			run_job();
			end_if_useless();
			idle_since = 0;
			woken = false;
			continue;
		}

		seen = outbox_want_begin(me);
		now = GetCurrentTimestamp();
		all = woken && next_due() > now && (looked_at > now || now - looked_at >= LOOK_PAUSE_US);
		if ((woken || next_due() <= now) && look(all))
			continue;
		end_if_useless();
		if (idle_since == 0)
			idle_since = now;
		woken = wait_for_work(seen, idle_since);
	}
}
