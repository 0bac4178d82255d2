/*-------------------------------------------------------------------------
 *
 * keep.c
 *		Keeps the workers of a database: gives it a slot, starts as many relays
 *		as there should be, ends those that should not be, starts those that
 *		ended anew, and takes the slot back.
 *
 * Part of the launcher; launcher.c tells the stories.
 *
 *-------------------------------------------------------------------------
 */
#include "launcher.h"

#include <signal.h>

#include "miscadmin.h"
#include "portability/instr_time.h"

/* Between two messages that there is no room, in ms */
#define NO_ROOM_LOG_INTERVAL 600000

int64		outbox_keep_now = 0;

/* While workers cannot be registered: when to try again, and how often tried */
static int64 no_room_until = 0;
static int	no_room_times = 0;
static int64 no_room_logged_at = -NO_ROOM_LOG_INTERVAL;

/* Read the clock.  It is monotonic: steps of the system's time delay nothing. */
void
outbox_keep_set_now(void)
{
	instr_time	t;

	INSTR_TIME_SET_CURRENT(t);
	outbox_keep_now = (int64) INSTR_TIME_GET_MILLISEC(t);
}

/* Wait after so many failures in a row */
int64
outbox_keep_wait(int failures)
{
	return failures > 6 ? OUTBOX_RESTART_MAX :
		Min(OUTBOX_RESTART_MAX, (int64) OUTBOX_RESTART_MIN << (failures - 1));
}

/* When start is tried again, after there was no room; past when there was */
int64
outbox_keep_retry_start(void)
{
	return no_room_until;
}

/*
 * Register a worker; NULL when all of max_worker_processes is in use.  That is
 * logged when it begins.
 */
BackgroundWorkerHandle *
outbox_keep_start(const char *type, const char *function,
				  OutboxKeptDatabase *db, const OutboxWorkerArgs *args)
{
	BackgroundWorker worker;
	BackgroundWorkerHandle *handle = NULL;

	if (outbox_keep_now < no_room_until)
		return NULL;

	memset(&worker, 0, sizeof(worker));
	snprintf(worker.bgw_name, BGW_MAXLEN, "%s for %s", type, db->name);
	strlcpy(worker.bgw_type, type, BGW_MAXLEN);
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION |
		BGWORKER_INTERRUPTIBLE;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker.bgw_library_name, OUTBOX_LIBRARY, sizeof(worker.bgw_library_name));
	strlcpy(worker.bgw_function_name, function, BGW_MAXLEN);
	memcpy(worker.bgw_extra, args, sizeof(*args));
	worker.bgw_notify_pid = MyProcPid;

	if (RegisterDynamicBackgroundWorker(&worker, &handle))
	{
		no_room_times = 0;
		return handle;
	}
	if (no_room_times++ == 0 && outbox_keep_now - no_room_logged_at >= NO_ROOM_LOG_INTERVAL)
	{
		ereport(LOG,
				(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				 errmsg("no background worker slot is free for \"%s\"", worker.bgw_name),
				 errhint("Consider increasing the configuration parameter \"max_worker_processes\".")));
		no_room_logged_at = outbox_keep_now;
	}
	no_room_until = outbox_keep_now + outbox_keep_wait(no_room_times);
	return NULL;
}

/*
 * Has a worker that we registered come to its end?  Then forget the handle; and
 * if there was no room for another, there is now.
 */
bool
outbox_keep_ended(BackgroundWorkerHandle **handle)
{
	pid_t		pid;

	if (*handle != NULL && GetBackgroundWorkerPid(*handle, &pid) != BGWH_STOPPED)
		return false;
	if (*handle != NULL)
	{
		pfree(*handle);
		no_room_until = 0;
	}
	*handle = NULL;
	return true;
}

/* Is DDL at work on a database? */
bool
outbox_keep_closed(OutboxKeptDatabase *db)
{
	bool		result;

	LWLockAcquire(outbox_shared->lock, LW_SHARED);
	result = outbox_ddl_closed(db->oid);
	LWLockRelease(outbox_shared->lock);
	return result;
}

/*
 * Give a database a slot.  When none is free it is swept at intervals, until
 * one is.
 */
void
outbox_keep_assign_slot(OutboxKeptDatabase *db)
{
	int			i;

	LWLockAcquire(outbox_shared->lock, LW_EXCLUSIVE);
	for (i = 0; i < outbox_shared->ndatabases && db->slot < 0; i++)
	{
		OutboxDatabase *slot = &outbox_shared->databases[i];

		if (OidIsValid(slot->dboid))
			continue;
		SpinLockAcquire(&slot->mutex);
		slot->dboid = db->oid;
		slot->extowner = db->owner;
		slot->nranges = 0;
		slot->sweep_wanted = true;
		slot->swept_at = 0;
		slot->next_retry = 0;
		memset(&slot->pruned, 0, sizeof(slot->pruned));
		memset(slot->relays, 0, sizeof(slot->relays));
		memset(slot->runners, 0, sizeof(slot->runners));
		memset(slot->wants, 0, sizeof(slot->wants));
		slot->runners_watched = false;
		slot->crowd = 0;
		SpinLockRelease(&slot->mutex);
		db->slot = i;
	}
	LWLockRelease(outbox_shared->lock);

	if (db->slot >= 0)
	{
		memset(db->relays, 0, sizeof(db->relays));
		memset(db->runners, 0, sizeof(db->runners));
		memset(db->owners, 0, sizeof(db->owners));
		db->watch_at = OUTBOX_NEVER;
		db->want_at = OUTBOX_NEVER;
		db->swept = false;
	}
	else if (!db->swept)
	{
		ereport(LOG,
				(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				 errmsg("no room to keep a relay in database \"%s\", which is swept only", db->name),
				 errhint("Consider increasing the configuration parameter \"outbox.max_databases\".")));
		db->swept = true;
		db->sweep_at = outbox_keep_now;
		db->sweep_failures = 0;
	}
}

/* Take the slot from a database that has no worker any more. */
static void
free_slot(OutboxKeptDatabase *db)
{
	OutboxDatabase *slot = &outbox_shared->databases[db->slot];

	LWLockAcquire(outbox_shared->lock, LW_EXCLUSIVE);
	SpinLockAcquire(&slot->mutex);
	slot->dboid = InvalidOid;
	slot->extowner = InvalidOid;
	slot->nranges = 0;
	SpinLockRelease(&slot->mutex);
	LWLockRelease(outbox_shared->lock);
	db->slot = -1;
}

/*
 * End a relay or runner: the worker that we registered, and the process that
 * has the place, which may be another, of a predecessor's.
 */
void
outbox_keep_end(OutboxKeptWorker *worker, int pid)
{
	if (worker->handle != NULL && !worker->handle_asked)
	{
		worker->handle_asked = true;
		TerminateBackgroundWorker(worker->handle);
	}
	if (pid != 0 && pid != worker->pid_asked)
	{
		worker->pid_asked = pid;
		kill(pid, SIGTERM);
	}
}

/*
 * A relay has ended: when may the next one start?  wanted: there should be a
 * next one.
 */
static void
relay_ended(OutboxKeptDatabase *db, OutboxKeptWorker *relay, OutboxRelayEnd end, bool wanted)
{
	int64		lived = outbox_keep_now - relay->started_at;

	relay->running = false;
	relay->handle_asked = false;
	relay->pid_asked = 0;
	relay->end_at = OUTBOX_NEVER;

	if (lived >= OUTBOX_HEALTHY_AFTER)
		relay->failures = 0;
	if (end == OUTBOX_END_ASKED)
	{
		relay->start_at = relay->started_at + OUTBOX_START_INTERVAL;
		return;
	}

	/*
	 * One that ends of itself at once, again and again, although the
	 * extension is there, waits like one that fails.  Once is no reason: the
	 * extension may have been dropped and created again.
	 */
	if (end == OUTBOX_END_FAILED || lived < OUTBOX_ENDED_AT_ONCE)
		relay->failures++;
	else
		relay->failures = 0;
	if (end == OUTBOX_END_FAILED || relay->failures > 1)
		relay->start_at = outbox_keep_now + outbox_keep_wait(relay->failures);
	else
		relay->start_at = relay->started_at + OUTBOX_START_INTERVAL;

	/* the extension, its owner or what the owner may do has changed perhaps */
	if (wanted)
		db->probe_at = Min(db->probe_at, relay->start_at);
}

/* The extension has changed: earlier failures of its workers tell nothing. */
void
outbox_keep_forgive(OutboxKeptDatabase *db)
{
	int			i;

	for (i = 0; i < OUTBOX_MAX_RELAYS; i++)
	{
		db->relays[i].failures = 0;
		db->relays[i].start_at = Min(db->relays[i].start_at, outbox_keep_now + OUTBOX_START_INTERVAL);
	}
	outbox_keep_runners_forgive(db);
}

/* Start a relay. */
static void
start_relay(OutboxKeptDatabase *db, int number)
{
	OutboxKeptWorker *relay = &db->relays[number];
	OutboxDatabase *slot = &outbox_shared->databases[db->slot];
	OutboxWorkerArgs args;

	memset(&args, 0, sizeof(args));
	args.dboid = db->oid;
	args.userid = db->owner;
	args.nologin = !db->owner_login;
	args.slot = db->slot;
	args.relay = number;

	SpinLockAcquire(&slot->mutex);
	if (slot->relays[number].pid == 0)
		slot->relays[number].end = OUTBOX_END_FAILED;	/* unless it tells */
	SpinLockRelease(&slot->mutex);

	relay->handle = outbox_keep_start("outbox relay", "outbox_relay_main", db, &args);
	if (relay->handle != NULL)
	{
		relay->running = true;
		relay->end_at = OUTBOX_NEVER;
		relay->started_at = outbox_keep_now;
	}
}

/*
 * A relay is not needed: the extension was dropped, or there are to be fewer.
 * It finds out by itself when it looks, which leaves nothing in the log; one
 * that has not after a while is ended.  Where a database is no longer ours,
 * that is at once.
 */
static void
dismiss_relay(OutboxKeptDatabase *db, int number, int pid)
{
	OutboxDatabase *slot = &outbox_shared->databases[db->slot];
	OutboxKeptWorker *relay = &db->relays[number];

	if (!db->ours || outbox_keep_now >= relay->end_at)
	{
		outbox_keep_end(relay, pid);
		return;
	}
	if (relay->end_at != OUTBOX_NEVER)
		return;
	relay->end_at = outbox_keep_now + OUTBOX_GO_BY_ITSELF;
	SpinLockAcquire(&slot->mutex);
	slot->sweep_wanted = true;
	SpinLockRelease(&slot->mutex);
	outbox_doorbell_wake(slot);
}

/*
 * A probe has seen the extension, and who owns it.  Relays that work as
 * somebody else are ended; the next ones work as the owner.
 */
void
outbox_keep_owner(OutboxKeptDatabase *db, Oid owner, bool login)
{
	OutboxDatabase *slot;
	int			i;

	db->owner = owner;
	db->owner_login = login;
	if (db->slot < 0)
		return;
	slot = &outbox_shared->databases[db->slot];
	if (slot->extowner == owner)
		return;
	SpinLockAcquire(&slot->mutex);
	slot->extowner = owner;
	SpinLockRelease(&slot->mutex);
	for (i = 0; i < OUTBOX_MAX_RELAYS; i++)
		outbox_keep_end(&db->relays[i], slot->relays[i].pid);
}

/*
 * Bring the relays of a database to what they should be.  True when there are
 * any.
 */
static bool
keep_relays(OutboxKeptDatabase *db, bool wanted)
{
	OutboxDatabase *slot = &outbox_shared->databases[db->slot];
	int			nwanted = wanted ? outbox_relays_setting : 0;
	bool		closed = outbox_keep_closed(db);
	bool		any = false;
	int			i;

	for (i = 0; i < OUTBOX_MAX_RELAYS; i++)
	{
		OutboxKeptWorker *relay = &db->relays[i];
		bool		alive;
		int			pid;
		OutboxRelayEnd end;

		alive = !outbox_keep_ended(&relay->handle);
		SpinLockAcquire(&slot->mutex);
		pid = slot->relays[i].pid;
		end = slot->relays[i].end;
		SpinLockRelease(&slot->mutex);
		alive |= pid != 0;
		any |= alive;

		if (relay->running && !alive)
			relay_ended(db, relay, end, i < nwanted);
		else if (!relay->running && alive)
		{
			/* a predecessor's */
			relay->running = true;
			relay->end_at = OUTBOX_NEVER;
			relay->started_at = outbox_keep_now;
		}

		if (alive && i >= nwanted)
			dismiss_relay(db, i, pid);
		else if (alive)
			relay->end_at = OUTBOX_NEVER;
		else if (i < nwanted && !closed && outbox_keep_now >= relay->start_at)
		{
			/*
			 * A probe that is due comes first; one that waits for another
			 * relay comes now, but not one that waits because it failed.
			 */
			if (db->probing)
				continue;
			if (db->probed && db->probe_at == OUTBOX_NEVER)
				start_relay(db, i);
			else if (db->probe_failures == 0)
				db->probe_at = Min(db->probe_at, outbox_keep_now);
		}
	}
	return any;
}

/*
 * Bring the workers of a database with a slot to what they should be.  When
 * none should be, and none is left, the slot is freed.
 */
void
outbox_keep_workers(OutboxKeptDatabase *db)
{
	bool		wanted = db->ours && (db->present || !db->probed);
	bool		any = keep_relays(db, wanted);

	any |= outbox_keep_runners(db, wanted);
	if (!wanted && !any)
		free_slot(db);
}

/* When the workers of a database are to be looked at next, if nobody wakes us */
int64
outbox_keep_due(OutboxKeptDatabase *db)
{
	int64		due = outbox_keep_runners_due(db);
	int			i;

	for (i = 0; i < OUTBOX_MAX_RELAYS; i++)
	{
		OutboxKeptWorker *relay = &db->relays[i];
		int64		at = relay->running ? relay->end_at : relay->start_at;

		if (at > outbox_keep_now)
			due = Min(due, at);
	}
	return due;
}
