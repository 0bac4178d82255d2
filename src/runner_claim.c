/*-------------------------------------------------------------------------
 *
 * runner_claim.c
 *		What a runner takes next: the subscriptions that it serves, and claims
 *		of their jobs.
 *
 * The subscriptions of the role are taken in turns, a job at a time.  Their
 * definitions are read again when the version of the set of subscriptions is
 * another than that under which they were read; each transaction that claims or
 * runs a job looks.  Hints in shared memory (hint.c) say which subscriptions
 * are worth a claim.
 *
 *-------------------------------------------------------------------------
 */
#include "runner.h"

#include <limits.h>

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "storage/proc.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"

#define EMPTY_PAUSE_US 100000	/* first wait after a claim in vain */
#define MAX_EMPTY_DOUBLES 6

/*
 * A handler has as long as the lease of its subscription; the job is held a
 * little longer, so that the runner can end it and say so before another finds
 * the job due.
 */
#define LEASE_MARGIN_US (3 * USECS_PER_SEC)

/* A handler that takes longer lets others help with the first job already */
#define QUICK_US 20000

/* Of the subscriptions there are outbox_run.nsubs */
static OutboxRunnerSubscription *subs = NULL;
static int	last = 0;			/* number of the one that was served last */
static int64 version = -1;		/* under which they were read; -1: not yet */
static MemoryContext subs_context = NULL;
static NameData role_name;		/* of the role, as it was last; "": none */

/* The subscription with an id; NULL when there is none to be served */
OutboxRunnerSubscription *
outbox_run_find(int32 id)
{
	int			i;

	for (i = 0; i < outbox_run.nsubs; i++)
	{
		if (subs[i].consumer.id == id)
			return &subs[i];
	}
	return NULL;
}

/*
 * The first thing in each transaction: see that the extension is there, and
 * become its owner.  False: it is gone.
 *
 * Where the role has been dropped or has another name, no subscription is its
 * own any more, which the version of their set does not tell.
 */
bool
outbox_run_enter(OutboxOwnerContext *context)
{
	char	   *name;

	outbox_run.gone = !outbox_lock_extension();
	if (outbox_run.gone)
		return false;
	name = GetUserNameFromId(outbox_run.role, true);
	if (name == NULL || strcmp(name, NameStr(role_name)) != 0)
	{
		namestrcpy(&role_name, name ? name : "");
		version = -1;
	}
	outbox_run.refused = superuser_arg(outbox_run.role) && !outbox_superuser_handlers;
	outbox_become_owner(context);
	outbox_pin_planner();
	return true;
}

/*
 * Begin a transaction of our own statements, which must see what others have
 * committed and wait for locks whatever the role has set, and be durable before
 * a handler starts.  Become the owner of the extension.  False: the extension
 * is gone.
 */
bool
outbox_run_begin(const char *activity, OutboxOwnerContext *context)
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
	if (LockTimeout != 0)
		(void) set_config_option("lock_timeout", "0", PGC_USERSET, PGC_S_SESSION,
								 GUC_ACTION_LOCAL, true, 0, false);
	MemoryContextSwitchTo(outbox_run.context);
	return outbox_run_enter(context);
}

/*
 * Read the version of the set of subscriptions; first, so that a set that is
 * newer is read again.
 */
int64
outbox_run_version(void)
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
void
outbox_run_load(int64 wanted)
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
	OutboxRunnerSubscription *loaded;
	Datum		values[2];
	int			n;
	int			i;

	if (wanted == version)
		return;
	context = AllocSetContextCreate(CurrentMemoryContext, "outbox runner subscriptions",
									ALLOCSET_DEFAULT_SIZES);
	values[0] = ObjectIdGetDatum(outbox_run.role);
	values[1] = NameGetDatum(&role_name);
	n = (int) outbox_execute(&load, values, NULL, SPI_OK_SELECT);
	old = MemoryContextSwitchTo(context);
	loaded = palloc0((n + 1) * sizeof(OutboxRunnerSubscription));
	for (i = 0; i < n; i++)
	{
		OutboxRunnerSubscription *known;

		outbox_consumer_from_row(i, 1, &loaded[i].consumer);
		loaded[i].activity = psprintf("handler %s", loaded[i].consumer.handler);
		known = outbox_run_find(loaded[i].consumer.id);
		if (known != NULL)
			loaded[i].run_us = known->run_us;
	}
	MemoryContextSwitchTo(old);
	MemoryContextSetParent(context, TopMemoryContext);
	if (subs_context != NULL)
		MemoryContextDelete(subs_context);
	subs_context = context;
	subs = loaded;
	outbox_run.nsubs = n;
	last = 0;
	version = wanted;
}

/* When is a subscription worth a claim? */
static TimestampTz
due_at(const OutboxRunnerSubscription *sub)
{
	return Max(outbox_hint_next(sub->consumer.id), sub->not_before);
}

/* The earliest time at which a subscription is worth a claim */
TimestampTz
outbox_run_next_due(void)
{
	TimestampTz result = DT_NOEND;
	int			i;

	for (i = 0; i < outbox_run.nsubs; i++)
		result = Min(result, due_at(&subs[i]));
	return result;
}

/*
 * May a job of a subscription be taken?  One whose handler is not known to be
 * fast leaves a runner to the others.  If so, shared memory shows that one is.
 */
static bool
may_take(const OutboxRunnerSubscription *sub)
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
claim_of(OutboxRunnerSubscription *sub, OutboxHeldJob *job)
{
	TimestampTz now = GetCurrentTimestamp();
	OutboxClaim claim = {0};

	claim.consumer = &sub->consumer;
	claim.max_jobs = 1;
	claim.lease = sub->consumer.lease + LEASE_MARGIN_US;
	claim.holder = outbox_run.holder;
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
	job->leased_until = claim.leased_until - LEASE_MARGIN_US;
	job->subscription = sub->consumer.id;
	job->ordered = sub->consumer.ordered;

	/*
	 * There may be more.  Whether there is cannot be told from one job, so a
	 * handler that is done in a moment calls for help only when jobs keep
	 * coming.
	 */
	if (!claim.drained && (outbox_run.streak > 0 || sub->run_us == 0 || sub->run_us > QUICK_US))
		outbox_want_runner(outbox_run.role, now);
	return true;
}

/*
 * Claim a job: of the subscription that comes next after the one served last.
 * all: whatever the hints say.
 */
bool
outbox_run_claim(bool all, OutboxHeldJob *job)
{
	int			i;

	for (i = 1; i <= outbox_run.nsubs; i++)
	{
		int			number = (last + i) % outbox_run.nsubs;
		OutboxRunnerSubscription *sub = &subs[number];

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
bool
outbox_run_look(bool all)
{
	OutboxOwnerContext context;
	ErrorData  *edata;
	OutboxHeldJob job = {0};
	volatile bool found = false;

	PG_TRY();
	{
		if (outbox_run_begin("claiming a job", &context))
		{
			outbox_run_load(outbox_run_version());
			found = !outbox_run.refused && outbox_run_claim(all, &job);
			outbox_become_caller(&context);
		}
		outbox_worker_commit();
	}
	PG_CATCH();
	{
		edata = outbox_catch_error(outbox_run.context);
		outbox_worker_abort();
		if (edata->sqlerrcode != ERRCODE_QUERY_CANCELED)
			ReThrowError(edata);
		found = false;
		version = -1;
	}
	PG_END_TRY();
	outbox_run.alone = false;
	if (found)
		outbox_run.held = job;
	outbox_runner_shows(outbox_run.held.id != 0 ? outbox_run.held.subscription : 0, outbox_run.held.id);
	return found;
}

/* Put a job back in line; in a subtransaction. */
static void
release(void *arg)
{
	const OutboxHeldJob *job = arg;

	(void) outbox_release_job(job->id, job->claim, GetUserId(), 0);
}

/*
 * Put a job back in line, of which the handler did not run: the attempt does
 * not count.  As the owner of the extension.  If somebody else has the job by
 * now, that is as well.
 */
void
outbox_run_release(OutboxHeldJob *job)
{
	ErrorData  *edata = outbox_try(release, job);

	if (edata != NULL && edata->sqlerrcode != ERRCODE_OUTBOX_LEASE_LOST)
		ReThrowError(edata);
}

/* Put the job that is held back in line; in a transaction of its own. */
void
outbox_run_release_held(void)
{
	OutboxOwnerContext context;

	if (outbox_run.held.id == 0)
		return;
	if (outbox_run_begin("releasing a job", &context))
	{
		outbox_run_release(&outbox_run.held);
		outbox_become_caller(&context);
	}
	outbox_worker_commit();
	outbox_run.held.id = 0;
	outbox_runner_shows(0, 0);
}

/* The ids of the subscriptions that are served, as an array of int */
Datum
outbox_run_ids(void)
{
	Datum	   *ids = palloc((outbox_run.nsubs + 1) * sizeof(Datum));
	int			i;

	for (i = 0; i < outbox_run.nsubs; i++)
		ids[i] = Int32GetDatum(subs[i].consumer.id);
	return outbox_make_array(ids, NULL, outbox_run.nsubs, INT4OID);
}
