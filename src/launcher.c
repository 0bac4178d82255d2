/*-------------------------------------------------------------------------
 *
 * launcher.c
 *		Which worker runs where.
 *
 * The launcher is the one static worker.  It is connected to no database and
 * reads pg_database alone.  In every database that can be connected to, is no
 * template and is named by outbox.databases, it sends a probe (visit.c) to
 * see whether the extension is there; where it is, it gives the database a
 * slot in shared memory, keeps outbox.relays relays (keep.c), and up to
 * outbox.runners runners as handlers need them (keep_runners.c).  It owns their
 * restart; the server never restarts them.  A database for which there is no
 * slot is swept at intervals.
 *
 * What it knows about a database is its own and is built anew when it starts.
 * What others need to know is in shared memory.  These are the stories that
 * have to end well:
 *
 * CREATE EXTENSION commits: ddl.c tells the launcher in the commit callback,
 * which probes and starts relays.  Rolled back, nothing is told.  Prepared,
 * it is told by COMMIT PREPARED.
 *
 * DROP EXTENSION commits (by name, CASCADE or DROP OWNED): told likewise.  The
 * probe finds nothing; relays are woken, find nothing either and exit with 0;
 * those that have not after a while are ended.  Then the slot is free.  A
 * relay that finds out first exits with 0 and the launcher probes.  Rolled
 * back, a relay waited for the lock and goes on.
 *
 * DROP EXTENSION commits while a relay starts: that relay finds nothing and
 * exits with 0, which has the database probed.  Dropped and created again:
 * the probe finds it, and relays are started anew.
 *
 * DROP DATABASE, RENAME, SET TABLESPACE, CREATE DATABASE ... TEMPLATE: ddl.c
 * closes the database to workers and ends those that are there.  One that was
 * about to start finds the database closed, since it takes its place under
 * the same lock.  Commit or rollback opens it and wakes the launcher, which
 * reads the list of databases again: gone, the slot is freed; renamed, relays
 * are started under the new name; else just started.
 *
 * ALTER DATABASE ... IS_TEMPLATE true or ALLOW_CONNECTIONS false: as above;
 * then the database is no longer ours to work in, and its slot is freed.
 *
 * CREATE DATABASE, or a copy that carries the extension: the list is read
 * again, and the new database is probed.
 *
 * A relay fails: it is started again after a wait that doubles from one
 * second to a minute, and begins anew after a minute of health; the database
 * is probed before, because the owner may be another or may have lost LOGIN.
 * An end by SIGTERM or DDL is no failure.
 *
 * A relay crashes: the server resets everything, shared memory too, and
 * starts the launcher.
 *
 * The launcher fails: the server starts it again after five seconds.  Relays
 * live on; the new launcher finds them by their places, and takes them over
 * as they are.  One that its predecessor had asked for may start late, beside
 * one that it asks for itself: the second to come finds the place taken and
 * exits with 0.
 *
 * A reload changes outbox.databases or outbox.relays: relays are started, or
 * ended.
 *
 * All of max_worker_processes is in use: said once, tried again and again
 * with a growing wait.
 *
 * And of runners:
 *
 * A job of a handler is made or put back: the commit callback lowers the time
 * from which its owner wants a runner, and wakes the launcher when no runner
 * waits.  A time in the future is slept for.  What a crash or a prepared
 * transaction has kept from being told, a sweep of a relay tells.
 *
 * Roles are more than places: a runner that waits goes at once, one that works
 * at the end of its job, after a second at least.  The place is given to who
 * has fewest, then to who has waited longest.
 *
 * DROP EXTENSION: ddl.c ends the runners before it waits for its lock, which a
 * handler may keep from it for long.  If it is rolled back, they are started
 * again.  What removes the extension in another way waits for the handlers.
 * DROP DATABASE and its like end runners as they end relays; a job that was
 * under way is handled again, where there is still somebody to do so.
 *
 * A reload lowers outbox.runners, or sets it to 0: those that are too many go
 * at the end of their jobs, and are ended only if they wait and do not go.  It
 * leaves the database out: they are ended at once.
 *
 * A role was dropped, may not log in (before 17), or is a superuser while
 * outbox.superuser_handlers is off: no runner is started; this is looked at
 * again after a wait that doubles to a minute.  A relay fails its jobs that
 * are due, or leaves them alone in the last case.  A role that may not connect
 * to the database: its runner fails, with the same waits, and holds up nobody.
 *
 * A runner fails before it comes to a job: its role waits, from one second to
 * a minute.  It dies in a job, by what a handler does: its role waits for a
 * second, and that job by its own schedule.
 *
 *-------------------------------------------------------------------------
 */
#include "launcher.h"

#include <limits.h>
#include <signal.h>

#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

/* How long a probe may take, in ms */
#define PROBE_TIMEOUT 10000

/* datconnlimit of a database whose DROP was interrupted */
#define INVALID_DATABASE (-2)

/* A short-lived worker under way */
typedef struct Visit
{
	BackgroundWorkerHandle *handle; /* NULL: none */
	OutboxKeptDatabase *database;	/* NULL: forgotten meanwhile */
	int64		started_at;
	bool		asked;			/* to end */
} Visit;

static dlist_head databases = DLIST_STATIC_INIT(databases);
static Visit visits[OUTBOX_VISIT_KINDS];
static int64 list_at = 0;		/* when the list of databases is to be read */

/* Wake the launcher; it looks at everything. */
void
outbox_launcher_wake(void)
{
	int			procno;
	int			pid;

	SpinLockAcquire(&outbox_shared->mutex);
	pid = outbox_shared->launcher_pid;
	procno = outbox_shared->launcher_procno;
	SpinLockRelease(&outbox_shared->mutex);
	if (pid != 0)
		ProcSendSignal(procno);
}

/* Have the launcher probe a database. */
void
outbox_launcher_tell(Oid dboid)
{
	bool		known = false;
	int			i;

	SpinLockAcquire(&outbox_shared->mutex);
	for (i = 0; i < outbox_shared->ntells; i++)
	{
		if (outbox_shared->tells[i] == dboid)
			known = true;
	}
	if (!known && outbox_shared->ntells < OUTBOX_MAX_TELLS)
		outbox_shared->tells[outbox_shared->ntells++] = dboid;
	else if (!known)
		outbox_shared->probe_all = true;
	SpinLockRelease(&outbox_shared->mutex);
	outbox_launcher_wake();
}

/* Have the launcher read the list of databases. */
void
outbox_launcher_list_again(void)
{
	SpinLockAcquire(&outbox_shared->mutex);
	outbox_shared->list_again = true;
	SpinLockRelease(&outbox_shared->mutex);
	outbox_launcher_wake();
}

/* Find what we know of a database; NULL when we have not heard of it. */
static OutboxKeptDatabase *
find_database(Oid oid)
{
	dlist_iter	iter;

	dlist_foreach(iter, &databases)
	{
		OutboxKeptDatabase *db = dlist_container(OutboxKeptDatabase, node, iter.cur);

		if (db->oid == oid)
			return db;
	}
	return NULL;
}

/* Begin to know a database. */
static OutboxKeptDatabase *
add_database(Oid oid)
{
	OutboxKeptDatabase *db = MemoryContextAllocZero(TopMemoryContext, sizeof(OutboxKeptDatabase));

	db->oid = oid;
	db->slot = -1;
	db->probe_at = OUTBOX_NEVER;
	db->watch_at = OUTBOX_NEVER;
	db->want_at = OUTBOX_NEVER;
	dlist_push_tail(&databases, &db->node);
	return db;
}

/* Forget a database, which has neither slot nor workers. */
static void
forget_database(OutboxKeptDatabase *db)
{
	int			i;

	for (i = 0; i < OUTBOX_VISIT_KINDS; i++)
	{
		if (visits[i].database == db)
			visits[i].database = NULL;
	}
	dlist_delete(&db->node);
	pfree(db);
}

/*
 * Read the list of databases: who is there, under which name, and is ours to
 * work in.
 */
static void
list_databases(void)
{
	Relation	rel;
	TableScanDesc scan;
	HeapTuple	tuple;
	dlist_iter	iter;

	dlist_foreach(iter, &databases)
		dlist_container(OutboxKeptDatabase, node, iter.cur)->seen = false;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	(void) GetTransactionSnapshot();
	rel = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan_catalog(rel, 0, NULL);
	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_database form = (Form_pg_database) GETSTRUCT(tuple);
		OutboxKeptDatabase *db = find_database(form->oid);
		bool		ours;

		if (db == NULL)
			db = add_database(form->oid);
		db->seen = true;
		strlcpy(db->name, NameStr(form->datname), sizeof(db->name));
		ours = form->datallowconn && !form->datistemplate &&
			form->datconnlimit != INVALID_DATABASE &&
			outbox_database_listed(db->name);
		if (ours && !db->ours)
		{
			db->probed = false;
			db->probe_failures = 0;
			db->probe_at = Min(db->probe_at, outbox_keep_now);
		}
		db->ours = ours;
	}
	table_endscan(scan);
	table_close(rel, AccessShareLock);
	CommitTransactionCommand();
	MemoryContextSwitchTo(TopMemoryContext);
	pgstat_report_stat(true);

	dlist_foreach(iter, &databases)
	{
		OutboxKeptDatabase *db = dlist_container(OutboxKeptDatabase, node, iter.cur);

		if (!db->seen)
			db->ours = false;
		if (!db->ours)
		{
			db->probe_at = OUTBOX_NEVER;
			db->swept = false;
		}
	}
	list_at = outbox_keep_now + outbox_sweep_interval;
}

/* Take what others have told us. */
static void
take_tells(void)
{
	Oid			tells[OUTBOX_MAX_TELLS];
	int			ntells;
	bool		probe_all;
	bool		list_again;
	dlist_iter	iter;
	int			i;

	SpinLockAcquire(&outbox_shared->mutex);
	ntells = outbox_shared->ntells;
	memcpy(tells, outbox_shared->tells, ntells * sizeof(Oid));
	probe_all = outbox_shared->probe_all;
	list_again = outbox_shared->list_again;
	outbox_shared->ntells = 0;
	outbox_shared->probe_all = false;
	outbox_shared->list_again = false;
	SpinLockRelease(&outbox_shared->mutex);

	/* somebody is in a database that we have not heard of */
	for (i = 0; i < ntells; i++)
		list_again |= find_database(tells[i]) == NULL;
	if (list_again || probe_all || outbox_keep_now >= list_at)
		list_databases();

	dlist_foreach(iter, &databases)
	{
		OutboxKeptDatabase *db = dlist_container(OutboxKeptDatabase, node, iter.cur);
		bool		told = probe_all;

		for (i = 0; i < ntells; i++)
			told |= tells[i] == db->oid;
		if (told && db->ours)
		{
			/* what kept it or its relays from working may be over */
			db->probe_failures = 0;
			db->probe_at = outbox_keep_now;
			outbox_keep_forgive(db);
		}
	}
}

/* A probe has come back. */
static void
probe_reported(OutboxKeptDatabase *db, const OutboxVisit *report)
{
	db->probing = false;
	switch (report->outcome)
	{
		case OUTBOX_VISIT_DONE:
			db->probe_failures = 0;
			db->probed = true;
			db->present = report->present;
			if (db->present)
				outbox_keep_owner(db, report->extowner, report->owner_login);
			else
				db->swept = false;
			break;
		case OUTBOX_VISIT_REFUSED:
			db->probe_at = Min(db->probe_at, outbox_keep_now + OUTBOX_RESTART_MIN);
			break;
		case OUTBOX_VISIT_FAILED:
			/* whether it is there is not known; what runs goes on */
			db->probe_failures++;
			db->probe_at = Min(db->probe_at, outbox_keep_now + outbox_keep_wait(db->probe_failures));
			break;
	}
}

/* A sweep has come to its end. */
static void
sweep_reported(OutboxKeptDatabase *db, const OutboxVisit *report)
{
	if (report->outcome == OUTBOX_VISIT_FAILED)
	{
		db->sweep_failures++;
		db->sweep_at = outbox_keep_now +
			Max(outbox_keep_wait(db->sweep_failures), outbox_sweep_interval);
		db->probe_at = Min(db->probe_at, outbox_keep_now);
	}
	else
	{
		db->sweep_failures = 0;
		db->sweep_at = outbox_keep_now + outbox_sweep_interval;
	}
}

/* Look after the visit of a kind that is under way. */
static void
tend_visit(OutboxVisitKind kind)
{
	Visit	   *visit = &visits[kind];
	OutboxVisit report;

	if (visit->handle == NULL)
		return;
	if (!outbox_keep_ended(&visit->handle))
	{
		if (!visit->asked &&
			(visit->database == NULL || !visit->database->ours ||
			 (kind == OUTBOX_VISIT_PROBE &&
			  outbox_keep_now >= visit->started_at + PROBE_TIMEOUT)))
		{
			visit->asked = true;
			TerminateBackgroundWorker(visit->handle);
		}
		return;
	}

	LWLockAcquire(outbox_shared->lock, LW_SHARED);
	report = outbox_shared->visits[kind];
	LWLockRelease(outbox_shared->lock);
	if (visit->asked && report.outcome != OUTBOX_VISIT_DONE)
		report.outcome = OUTBOX_VISIT_FAILED;
	if (visit->database != NULL)
	{
		if (kind == OUTBOX_VISIT_PROBE)
			probe_reported(visit->database, &report);
		else
			sweep_reported(visit->database, &report);
	}
	visit->database = NULL;
}

/* The database that has waited longest for a visit; NULL when none does */
static OutboxKeptDatabase *
next_to_visit(OutboxVisitKind kind)
{
	OutboxKeptDatabase *result = NULL;
	int64		earliest = outbox_keep_now + 1;
	dlist_iter	iter;

	dlist_foreach(iter, &databases)
	{
		OutboxKeptDatabase *db = dlist_container(OutboxKeptDatabase, node, iter.cur);
		int64		at = db->probe_at;

		if (kind == OUTBOX_VISIT_SWEEP)
			at = db->swept ? db->sweep_at : OUTBOX_NEVER;
		if (db->ours && at < earliest)
		{
			earliest = at;
			result = db;
		}
	}
	return result;
}

/* Start the next visit of a kind, unless one is under way. */
static void
start_visit(OutboxVisitKind kind)
{
	Visit	   *visit = &visits[kind];
	OutboxVisit *shared = &outbox_shared->visits[kind];
	OutboxKeptDatabase *db;
	OutboxWorkerArgs args;
	int			stranger;

	if (visit->handle != NULL || (db = next_to_visit(kind)) == NULL)
		return;

	memset(&args, 0, sizeof(args));
	args.dboid = db->oid;
	if (kind == OUTBOX_VISIT_SWEEP)
	{
		args.userid = db->owner;
		args.nologin = !db->owner_login;
	}
	LWLockAcquire(outbox_shared->lock, LW_EXCLUSIVE);
	stranger = shared->pid;
	if (stranger == 0)
	{
		args.visit = ++shared->number;
		shared->dboid = db->oid;
		shared->outcome = OUTBOX_VISIT_FAILED;
	}
	LWLockRelease(outbox_shared->lock);
	if (stranger != 0)
	{
		/* a predecessor's; we are woken when it is gone */
		kill(stranger, SIGTERM);
		return;
	}

	if (kind == OUTBOX_VISIT_PROBE)
		visit->handle = outbox_keep_start("outbox probe", "outbox_probe_main", db, &args);
	else
		visit->handle = outbox_keep_start("outbox sweep", "outbox_sweep_main", db, &args);
	if (visit->handle == NULL)
		return;
	visit->database = db;
	visit->started_at = outbox_keep_now;
	visit->asked = false;
	if (kind == OUTBOX_VISIT_PROBE)
	{
		db->probe_at = OUTBOX_NEVER;
		db->probing = true;
	}
	else
		db->sweep_at = OUTBOX_NEVER;
}

/* Bring everything to what it should be. */
static void
tend_everything(void)
{
	dlist_mutable_iter iter;
	int			kind;

	for (kind = 0; kind < OUTBOX_VISIT_KINDS; kind++)
		tend_visit(kind);

	dlist_foreach_modify(iter, &databases)
	{
		OutboxKeptDatabase *db = dlist_container(OutboxKeptDatabase, node, iter.cur);

		if (db->slot >= 0)
			outbox_keep_workers(db);
		if (db->slot < 0 && !db->seen)
			forget_database(db);
	}

	/* what has become free above is given to those who wait for it */
	dlist_foreach_modify(iter, &databases)
	{
		OutboxKeptDatabase *db = dlist_container(OutboxKeptDatabase, node, iter.cur);

		if (db->slot < 0 && db->ours && db->probed && db->present)
		{
			outbox_keep_assign_slot(db);
			if (db->slot >= 0)
				outbox_keep_workers(db);
		}
	}

	for (kind = 0; kind < OUTBOX_VISIT_KINDS; kind++)
		start_visit(kind);
}

/*
 * The next moment at which something falls due.  What waits for somebody to
 * end has no time of its own: we are woken then.
 */
static int64
next_due(void)
{
	int64		due = list_at;
	dlist_iter	iter;

#define CONSIDER(at) \
	do { if ((at) > outbox_keep_now && (at) < due) due = (at); } while (0)
	CONSIDER(outbox_keep_retry_start());
	if (visits[OUTBOX_VISIT_PROBE].handle != NULL)
		CONSIDER(visits[OUTBOX_VISIT_PROBE].started_at + PROBE_TIMEOUT);
	dlist_foreach(iter, &databases)
	{
		OutboxKeptDatabase *db = dlist_container(OutboxKeptDatabase, node, iter.cur);

		CONSIDER(db->probe_at);
		if (db->swept)
			CONSIDER(db->sweep_at);
		if (db->slot >= 0)
		{
			int64		at = outbox_keep_due(db);

			CONSIDER(at);
		}
	}
#undef CONSIDER
	return due;
}

/* The launcher ends: nobody is to be woken. */
static void
unregister_launcher(int code, Datum arg)
{
	SpinLockAcquire(&outbox_shared->mutex);
	if (outbox_shared->launcher_pid == MyProcPid)
		outbox_shared->launcher_pid = 0;
	SpinLockRelease(&outbox_shared->mutex);
}

/* Take over the slots of a predecessor. */
static void
adopt_slots(void)
{
	int			i;

	for (i = 0; i < outbox_shared->ndatabases; i++)
	{
		Oid			dboid = outbox_shared->databases[i].dboid;

		if (OidIsValid(dboid))
			add_database(dboid)->slot = i;
	}
}

/* The settings have changed: what kept a role from having a runner may be over. */
static void
forgive_runners(void)
{
	dlist_iter	iter;

	dlist_foreach(iter, &databases)
		outbox_keep_runners_forgive(dlist_container(OutboxKeptDatabase, node, iter.cur));
}

/* Entry of the launcher */
void
outbox_launcher_main(Datum main_arg)
{
	uint32		wait_event;

	outbox_worker_signals();
	on_shmem_exit(unregister_launcher, (Datum) 0);
	SpinLockAcquire(&outbox_shared->mutex);
	outbox_shared->launcher_pid = MyProcPid;
	outbox_shared->launcher_procno = MyProcNumber;
	outbox_shared->probe_all = true;
	SpinLockRelease(&outbox_shared->mutex);
	outbox_worker_connect(InvalidOid, InvalidOid, false);

	wait_event = outbox_wait_event("OutboxLauncherMain");
	MemoryContextSwitchTo(TopMemoryContext);
	adopt_slots();

	for (;;)
	{
		long		timeout;

		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			outbox_worker_reload();
			list_at = 0;
			forgive_runners();
		}
		outbox_keep_set_now();
		take_tells();
		tend_everything();

		timeout = (long) Min(next_due() - outbox_keep_now, INT_MAX);
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 timeout, wait_event);
		ResetLatch(MyLatch);
	}
}

/* Register the launcher; called once, while the library is preloaded. */
void
outbox_launcher_register(void)
{
	BackgroundWorker worker;

	memset(&worker, 0, sizeof(worker));
	strlcpy(worker.bgw_name, "outbox launcher", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "outbox launcher", BGW_MAXLEN);
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = 5;
	strlcpy(worker.bgw_library_name, OUTBOX_LIBRARY, sizeof(worker.bgw_library_name));
	strlcpy(worker.bgw_function_name, "outbox_launcher_main", BGW_MAXLEN);
	RegisterBackgroundWorker(&worker);
}
