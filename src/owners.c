/*-------------------------------------------------------------------------
 *
 * owners.c
 *		At the sweeps of a relay: which roles have jobs for their handlers, and
 *		which jobs no runner can handle.
 *
 * Commits tell whose handlers have something to do (want.c), but what they told
 * is lost in a crash, and prepared transactions tell nothing.  So each sweep
 * looks at every subscription that has a handler.
 *
 * Where the role of a subscription is gone, or cannot connect, there will be no
 * runner: its jobs that are due fail here, with the reason, and wait and die by
 * their own schedule.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "access/htup_details.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_database.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/syscache.h"

/* Jobs of one subscription that fail at one sweep, at most */
#define MAX_FAILED 200

/* Lease of these jobs, for the moment until they have failed, in us */
#define FAIL_LEASE ((int64) 60 * USECS_PER_SEC)

#define SET_OWNER_HINT "Give the subscription to another role with outbox.set_owner."

/* A subscription with a handler that has an unfinished job */
typedef struct OwnedSubscription
{
	int32		id;
	char	   *owner;
	Oid			owner_oid;
	TimestampTz due;			/* of the first of its jobs */
} OwnedSubscription;

/* Can the role connect to this database? */
static bool
may_connect(Oid roleid)
{
#if PG_VERSION_NUM >= 160000
	return object_aclcheck(DatabaseRelationId, MyDatabaseId, roleid, ACL_CONNECT) == ACLCHECK_OK;
#else
	return pg_database_aclcheck(MyDatabaseId, roleid, ACL_CONNECT) == ACLCHECK_OK;
#endif
}

/*
 * What keeps a role from handling jobs, as the error of these jobs; NULL when
 * nothing does.  rests: nothing is wrong with it, but it is not to run now.
 */
static char *
owner_error(const char *owner, Oid owner_oid, bool *rests)
{
	HeapTuple	tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(owner_oid));
	Form_pg_authid role;
	char	   *result = NULL;

	*rests = false;
	if (!HeapTupleIsValid(tuple))
		return psprintf("42704: role \"%s\" does not exist\nHINT: %s", owner, SET_OWNER_HINT);
	role = (Form_pg_authid) GETSTRUCT(tuple);
	if (strcmp(NameStr(role->rolname), owner) != 0)
		result = psprintf("42704: role \"%s\" does not exist any more\nHINT: %s", owner,
						  SET_OWNER_HINT);
	else if (BGWORKER_BYPASS_ROLELOGINCHECK == 0 && !role->rolcanlogin)
		result = psprintf("28000: role \"%s\" is not permitted to log in, as its handlers have to before PostgreSQL 17\n"
						  "HINT: Give the role LOGIN, or the subscription to another role with outbox.set_owner.",
						  owner);
	else if (!may_connect(owner_oid))
		result = psprintf("42501: role \"%s\" may not connect to database \"%s\"\n"
						  "HINT: Grant the role CONNECT on the database, or give the subscription to another role with outbox.set_owner.",
						  owner, outbox_current_database());
	else
		*rests = role->rolsuper && !outbox_superuser_handlers;
	ReleaseSysCache(tuple);
	return result;
}

/*
 * The subscriptions with a handler, of which a job waits or is leased; none
 * while the database rests.  In the current memory context.
 */
static List *
owned_subscriptions(void)
{
	static OutboxPlan find = {
		"SELECT s.id, s.owner, s.owner_oid, j.due_at FROM outbox.subscriptions s"
		" CROSS JOIN LATERAL (SELECT j.due_at FROM outbox.jobs j"
		" WHERE j.subscription_id OPERATOR(pg_catalog.=) s.id"
		" AND j.done_at IS NULL AND j.dead_at IS NULL"
		" AND j.due_at OPERATOR(pg_catalog.<) 'infinity' ORDER BY j.due_at, j.id LIMIT 1) j"
		" WHERE s.handler IS NOT NULL AND s.paused_at IS NULL"
		" AND (SELECT true FROM outbox.armed a"
		" WHERE a.database OPERATOR(pg_catalog.=) $1 AND a.stopped_at IS NULL)",
		1, {OIDOID}, NULL
	};
	Datum		value = ObjectIdGetDatum(MyDatabaseId);
	List	   *result = NIL;
	bool		isnull;
	int			n;
	int			i;

	n = (int) outbox_execute(&find, &value, NULL, SPI_OK_SELECT);
	for (i = 0; i < n; i++)
	{
		OwnedSubscription *sub = palloc(sizeof(OwnedSubscription));

		sub->id = DatumGetInt32(outbox_spi_value(i, 1, &isnull));
		sub->owner = pstrdup(NameStr(*DatumGetName(outbox_spi_value(i, 2, &isnull))));
		sub->owner_oid = DatumGetObjectId(outbox_spi_value(i, 3, &isnull));
		sub->due = DatumGetTimestampTz(outbox_spi_value(i, 4, &isnull));
		result = lappend(result, sub);
	}
	SPI_freetuptable(SPI_tuptable);
	return result;
}

/*
 * The roles of jobs that were held by runners when the server, or its shared
 * memory, started: these have ended with it, and the first runner of the role
 * fails them.  As oids, in the current memory context.
 */
static List *
orphaned_owners(void)
{
	static OutboxPlan find = {
		"SELECT DISTINCT s.owner_oid FROM outbox.jobs j"
		" JOIN outbox.subscriptions s ON s.id OPERATOR(pg_catalog.=) j.subscription_id"
		" WHERE j.claim IS NOT NULL AND j.done_at IS NULL AND j.dead_at IS NULL"
		" AND pg_catalog.starts_with(j.holder, 'outbox runner ')"
		" AND NOT pg_catalog.starts_with(j.holder, $2)"
		" AND s.handler IS NOT NULL AND s.paused_at IS NULL"
		" AND (SELECT true FROM outbox.armed a"
		" WHERE a.database OPERATOR(pg_catalog.=) $1 AND a.stopped_at IS NULL)",
		2, {OIDOID, TEXTOID}, NULL
	};
	Datum		values[2];
	List	   *result = NIL;
	bool		isnull;
	int			n;
	int			i;

	values[0] = ObjectIdGetDatum(MyDatabaseId);
	values[1] = CStringGetTextDatum(psprintf("outbox runner " INT64_FORMAT "/",
											 outbox_shared->epoch));
	n = (int) outbox_execute(&find, values, NULL, SPI_OK_SELECT);
	for (i = 0; i < n; i++)
		result = lappend_oid(result, DatumGetObjectId(outbox_spi_value(i, 1, &isnull)));
	SPI_freetuptable(SPI_tuptable);
	return result;
}

/*
 * Tell the launcher and the runners who has something to do and when, and
 * return the subscriptions of which jobs are due that nobody can handle, in
 * the current memory context.
 */
static List *
tell_owners(void)
{
	MemoryContext context = CurrentMemoryContext;
	List	   *broken = NIL;
	List	   *orphaned;
	ListCell   *lc;

	outbox_worker_begin("looking for jobs of handlers");
	MemoryContextSwitchTo(context);
	if (outbox_lock_extension())
	{
		orphaned = orphaned_owners();
		foreach(lc, owned_subscriptions())
		{
			OwnedSubscription *sub = lfirst(lc);
			bool		rests;
			char	   *error = owner_error(sub->owner, sub->owner_oid, &rests);

			if (error == NULL && !rests)
				outbox_want_runner(sub->owner_oid,
								   list_member_oid(orphaned, sub->owner_oid) ?
								   GetCurrentTimestamp() : sub->due);
			else
				outbox_want_nothing(sub->owner_oid);
			if (error != NULL && sub->due <= GetCurrentTimestamp())
				broken = lappend(broken, sub);
		}
	}
	outbox_worker_commit();
	return broken;
}

/*
 * Fail the jobs of a subscription that are due, if still nobody can handle
 * them.
 */
static void
fail_due_jobs(const OwnedSubscription *sub)
{
	MemoryContext context = CurrentMemoryContext;
	OutboxConsumer consumer;
	OutboxClaim claim = {0};
	char	   *error;
	bool		rests;
	int			i;

	outbox_worker_begin("failing jobs that nobody can handle");
	MemoryContextSwitchTo(context);
	if (outbox_lock_extension() && outbox_find_consumer(NULL, sub->id, &consumer) &&
		consumer.handler != NULL &&
		(error = owner_error(consumer.owner, consumer.owner_oid, &rests)) != NULL)
	{
		claim.consumer = &consumer;
		claim.max_jobs = MAX_FAILED;
		claim.lease = FAIL_LEASE;
		claim.holder = "outbox relay";
		claim.only_armed = true;
		outbox_claim_jobs(&claim);
		for (i = 0; i < claim.njobs; i++)
			outbox_fail_job(claim.jobs[i].id, claim.claim, GetUserId(), error,
							OUTBOX_RETRY_SCHEDULE, false);
	}
	outbox_worker_commit();

	/* that they wait for their next try is no reason to start a runner */
	outbox_want_nothing(sub->owner_oid);
}

/* Say what has gone wrong; it is tried again at the next sweep. */
static void
log_failure(MemoryContext context, const char *what)
{
	ErrorData  *edata = outbox_catch_error(context);

	outbox_worker_abort();
	MemoryContextSwitchTo(context);
	ereport(LOG,
			(errcode(edata->sqlerrcode),
			 errmsg("outbox relay failed to %s: %s", what, edata->message ? edata->message : "")));
}

/*
 * Look at the subscriptions that have handlers: see to it that there are
 * runners for those who have something to do, and that what nobody can handle
 * fails.  By a relay, outside of a transaction; errors are logged.  Memory is
 * allocated in the current context, which the caller resets.
 */
void
outbox_want_owners(void)
{
	MemoryContext context = CurrentMemoryContext;
	List	   *volatile broken = NIL;
	ListCell   *lc;

	PG_TRY();
	{
		broken = tell_owners();
	}
	PG_CATCH();
	{
		log_failure(context, "look for jobs of handlers");
	}
	PG_END_TRY();

	foreach(lc, broken)
	{
		PG_TRY();
		{
			fail_due_jobs(lfirst(lc));
		}
		PG_CATCH();
		{
			log_failure(context, "fail jobs that nobody can handle");
		}
		PG_END_TRY();
	}
}
