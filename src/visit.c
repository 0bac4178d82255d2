/*-------------------------------------------------------------------------
 *
 * visit.c
 *		The launcher's short-lived workers.
 *
 * The launcher is connected to no database, so it cannot see whether the
 * extension is in one.  A probe connects there, looks, reports in shared
 * memory and ends.  A sweep fans out what is unmarked in a database for which
 * shared memory has no room, and ends.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include "catalog/pg_authid.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/syscache.h"

/*
 * Leave the place of a visit.  One that was ended by DDL did not fail; one
 * that the launcher itself has ended did, as the launcher knows.
 */
static void
leave(int code, Datum arg)
{
	OutboxVisit *visit = &outbox_shared->visits[DatumGetInt32(arg)];

	LWLockAcquire(outbox_shared->lock, LW_EXCLUSIVE);
	if (visit->pid == MyProcPid)
	{
		visit->pid = 0;
		if (visit->outcome == OUTBOX_VISIT_FAILED && outbox_worker_asked())
			visit->outcome = OUTBOX_VISIT_REFUSED;
	}
	LWLockRelease(outbox_shared->lock);
	outbox_launcher_wake();
}

/*
 * Take the place of a visit; false when the launcher waits for it no longer,
 * or DDL keeps us out.
 */
static bool
enter(OutboxVisitKind kind, const OutboxWorkerArgs *args)
{
	OutboxVisit *visit = &outbox_shared->visits[kind];
	bool		entered = false;

	on_shmem_exit(leave, Int32GetDatum(kind));
	LWLockAcquire(outbox_shared->lock, LW_EXCLUSIVE);
	if (visit->number == args->visit && visit->pid == 0)
	{
		if (outbox_ddl_closed(args->dboid))
			visit->outcome = OUTBOX_VISIT_REFUSED;
		else
		{
			visit->pid = MyProcPid;
			entered = true;
		}
	}
	LWLockRelease(outbox_shared->lock);
	return entered;
}

/* May a role log in? */
static bool
role_may_login(Oid roleid)
{
	HeapTuple	tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(roleid));
	bool		result = false;

	if (HeapTupleIsValid(tuple))
	{
		result = ((Form_pg_authid) GETSTRUCT(tuple))->rolcanlogin;
		ReleaseSysCache(tuple);
	}
	return result;
}

/* Report that the visit has come to its end. */
static void
report_done(OutboxVisitKind kind, bool present, Oid owner, bool login)
{
	OutboxVisit *visit = &outbox_shared->visits[kind];

	LWLockAcquire(outbox_shared->lock, LW_EXCLUSIVE);
	if (visit->pid == MyProcPid)
	{
		visit->present = present;
		visit->extowner = owner;
		visit->owner_login = login;
		visit->outcome = OUTBOX_VISIT_DONE;
	}
	LWLockRelease(outbox_shared->lock);
}

/* Entry of a probe */
void
outbox_probe_main(Datum main_arg)
{
	OutboxWorkerArgs args;
	bool		present;
	Oid			owner = InvalidOid;

	outbox_worker_arguments(&args);
	if (!enter(OUTBOX_VISIT_PROBE, &args))
		return;
	outbox_worker_signals();
	outbox_worker_connect(args.dboid, InvalidOid, false);

	outbox_worker_begin("looking for the extension");
	present = OidIsValid(get_extension_oid(OUTBOX_EXTENSION, true));
	if (present)
		owner = outbox_extension_owner();
	present = present && OidIsValid(owner);
	report_done(OUTBOX_VISIT_PROBE, present, owner, present && role_may_login(owner));
	outbox_worker_commit();
}

/* Entry of a sweep */
void
outbox_sweep_main(Datum main_arg)
{
	OutboxWorkerArgs args;

	outbox_worker_arguments(&args);
	if (!enter(OUTBOX_VISIT_SWEEP, &args))
		return;
	outbox_worker_signals();
	outbox_worker_connect(args.dboid, args.userid, args.nologin);

	(void) outbox_relay_sweep_once();
	outbox_worker_idle();
	report_done(OUTBOX_VISIT_SWEEP, true, args.userid, true);
}
