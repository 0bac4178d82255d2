/*-------------------------------------------------------------------------
 *
 * replay.c
 *		outbox.replay(): jobs of a subscription for events that were fanned out
 *		before.
 *
 * It walks the events by seq, some at a time, matches them as the relay does,
 * and sees to it that each has a job that is not finished: one that has come to
 * an end is put back in line, and an event without one gets a new job.  What
 * was fanned out counts, not what was recorded: a transaction that began before
 * a rebuild and committed after it is not missed.
 *
 * It may take long, so it holds nothing that others wait for: it locks jobs
 * that have come to an end, and events that are marked.  Only retention passes
 * over these, and another replay waits.  Of ordered subscriptions it locks jobs
 * that wait, too, when older ones of their subject are put back in line: claims
 * pass over them, as they will when it has committed.
 *
 * Nothing keeps a job that is made meanwhile, of an ordered subscription, from
 * being claimed before older ones of its subject are put back in line, and so
 * from running beside them, unless the subscription is paused.
 *
 *-------------------------------------------------------------------------
 */
#include "replay.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

#define STEP_EVENTS 1000		/* events of one step ... */
#define STEP_JOBS 20000			/* ... unless they name more jobs than this */

/*
 * Wait until the passes that are under way have ended.  They may have claimed
 * before the subscription was committed, and would mark events that it never
 * gets when we have come past them; later ones know it.
 */
static void
wait_for_passes(void)
{
	OutboxDatabase *db = outbox_find_database(MyDatabaseId);
	int			pids[OUTBOX_MAX_RELAYS + 1];
	int			i;

	memset(pids, 0, sizeof(pids));
	if (outbox_shared == NULL)
		return;
	LWLockAcquire(outbox_shared->lock, LW_SHARED);
	if (db != NULL)
	{
		SpinLockAcquire(&db->mutex);
		for (i = 0; db->dboid == MyDatabaseId && i < OUTBOX_MAX_RELAYS; i++)
			pids[i] = db->relays[i].pid;
		SpinLockRelease(&db->mutex);
	}
	if (outbox_shared->visits[OUTBOX_VISIT_SWEEP].dboid == MyDatabaseId)
		pids[OUTBOX_MAX_RELAYS] = outbox_shared->visits[OUTBOX_VISIT_SWEEP].pid;
	LWLockRelease(outbox_shared->lock);

	for (i = 0; i < (int) lengthof(pids); i++)
	{
		PGPROC	   *proc = pids[i] == 0 || pids[i] == MyProcPid ? NULL : BackendPidGetProc(pids[i]);
		VirtualTransactionId vxid;

		if (proc == NULL)
			continue;
		GET_VXID_FROM_PGPROC(vxid, *proc);
		if (VirtualTransactionIdIsValid(vxid))
			(void) VirtualXactLock(vxid, true);
	}
}

/*
 * One replay of a subscription at a time.  Nobody else takes this lock, so
 * jobs, relays, and changes of the subscription go on.
 */
static void
lock_subscription(int32 id)
{
	Oid			relid = outbox_our_relation("subscriptions");

	LockDatabaseObject(relid, (Oid) id, 0, ExclusiveLock);
}

/* Say so when the relay cannot know the subscription as it is now. */
static void
check_committed(const OutboxConsumer *consumer)
{
	static OutboxPlan find = {
		"SELECT s.xmin FROM outbox.subscriptions s WHERE s.id OPERATOR(pg_catalog.=) $1",
		1, {INT4OID}, NULL
	};
	Datum		value = Int32GetDatum(consumer->id);
	bool		isnull;

	if (outbox_execute(&find, &value, NULL, SPI_OK_SELECT) > 0 &&
		TransactionIdIsCurrentTransactionId(DatumGetTransactionId(outbox_spi_value(0, 1, &isnull))))
		ereport(WARNING,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("subscription \"%s\" was changed in this transaction", consumer->name),
				 errdetail("Events that are fanned out before it commits may be missed."),
				 errhint("Commit first, then call outbox.replay.")));
}

/* Read the next events; returns how many. */
static int
read_events(OutboxReplay *replay, OutboxReplayEvent **candidates, bool *more)
{
	static OutboxPlan read = {
		"SELECT e.seq, e.type, e.subject, e.scope, e.not_before, e.fanout FROM outbox.events e"
		" WHERE e.seq OPERATOR(pg_catalog.>) $1 AND e.fanned_out_at OPERATOR(pg_catalog.>=) $2"
		" AND e.fanned_out_at OPERATOR(pg_catalog.<) $3 ORDER BY e.seq LIMIT $4",
		4, {INT8OID, TIMESTAMPTZOID, TIMESTAMPTZOID, INT8OID}, NULL
	};
	Datum		values[4];
	int			nrows;
	int			nnamed = 0;
	int			n;

	values[0] = Int64GetDatum(replay->after);
	values[1] = TimestampTzGetDatum(replay->since);
	values[2] = TimestampTzGetDatum(replay->until);
	values[3] = Int64GetDatum(STEP_EVENTS);
	nrows = (int) outbox_execute(&read, values, NULL, SPI_OK_SELECT);
	*candidates = palloc0((nrows + 1) * sizeof(OutboxReplayEvent));
	for (n = 0; n < nrows && nnamed < STEP_JOBS; n++)
	{
		OutboxReplayEvent *candidate = &(*candidates)[n];
		OutboxEvent *event = &candidate->event;
		bool		isnull;
		Datum		value;

		event->seq = DatumGetInt64(outbox_spi_value(n, 1, &isnull));
		event->type = outbox_spi_string(n, 2);
		event->subject = outbox_spi_string(n, 3);
		event->scope = outbox_spi_string(n, 4);
		value = outbox_spi_value(n, 5, &isnull);
		event->not_before = isnull ? 0 : DatumGetTimestampTz(value);
		candidate->nnamed = outbox_named_jobs(outbox_spi_value(n, 6, &isnull), &candidate->named);
		nnamed += candidate->nnamed;
		replay->after = event->seq;
	}
	SPI_freetuptable(SPI_tuptable);
	*more = (nrows == STEP_EVENTS || n < nrows);
	return n;
}

/* Leave those that match; returns how many. */
static int
match_events(OutboxReplayEvent *candidates, int n)
{
	OutboxEvent *events = palloc(n * sizeof(OutboxEvent));
	int			nmatched = 0;
	int			i;

	for (i = 0; i < n; i++)
		events[i] = candidates[i].event;
	outbox_route_by_loaded(events, n);
	for (i = 0; i < n; i++)
	{
		if (events[i].ntargets == 0)
			continue;
		candidates[nmatched] = candidates[i];
		candidates[nmatched++].event = events[i];
	}
	return nmatched;
}

/*
 * Find the job of the subscription that each event names: by its subscription,
 * since that may have had another name, or the name another subscription.
 */
static void
find_jobs(const OutboxReplay *replay, OutboxReplayEvent *candidates, int n)
{
	static OutboxPlan find = {
		"SELECT j.id, j.done_at IS NOT NULL OR j.dead_at IS NOT NULL FROM outbox.jobs j"
		" WHERE j.id OPERATOR(pg_catalog.=) ANY ($1)"
		" AND j.subscription_id OPERATOR(pg_catalog.=) $2 ORDER BY j.id",
		2, {INT8ARRAYOID, INT4OID}, NULL
	};
	Datum		values[2];
	int64	   *ids;
	bool	   *finished;
	int			nids = 0;
	int			i,
				j;

	for (i = 0; i < n; i++)
		nids += candidates[i].nnamed;
	ids = palloc((nids + 1) * sizeof(int64));
	nids = 0;
	for (i = 0; i < n; i++)
	{
		for (j = 0; j < candidates[i].nnamed; j++)
			ids[nids++] = candidates[i].named[j];
	}
	nids = outbox_unique_ids(ids, nids);
	values[0] = outbox_id_array(ids, nids);
	values[1] = Int32GetDatum(replay->consumer.id);
	nids = (int) outbox_execute(&find, values, NULL, SPI_OK_SELECT);
	finished = palloc((nids + 1) * sizeof(bool));
	for (i = 0; i < nids; i++)
	{
		bool		isnull;

		ids[i] = DatumGetInt64(outbox_spi_value(i, 1, &isnull));
		finished[i] = DatumGetBool(outbox_spi_value(i, 2, &isnull));
	}
	SPI_freetuptable(SPI_tuptable);

	for (i = 0; i < n; i++)
	{
		OutboxReplayEvent *candidate = &candidates[i];

		for (j = 0; j < candidate->nnamed; j++)
		{
			int			found = outbox_find_id(ids, nids, candidate->named[j]);

			if (found < 0 || (candidate->job != 0 && !candidate->finished))
				continue;
			candidate->job = ids[found];
			candidate->finished = finished[found];
		}
	}
}

/*
 * Lock events that are to get jobs; returns how many are there still.  Waiting
 * for another replay is in the order of the seqs.
 */
static int
lock_events(OutboxEvent *events, int n)
{
	static OutboxPlan lock = {
		"SELECT e.ctid, e.seq FROM outbox.events e WHERE e.seq OPERATOR(pg_catalog.=) ANY ($1)"
		" ORDER BY e.seq FOR NO KEY UPDATE",
		1, {INT8ARRAYOID}, NULL
	};
	int64	   *seqs = palloc(n * sizeof(int64));
	Datum		value;
	int			nlocked;
	int			i,
				j = 0;

	for (i = 0; i < n; i++)
		seqs[i] = events[i].seq;
	value = outbox_id_array(seqs, n);
	nlocked = (int) outbox_execute(&lock, &value, NULL, SPI_OK_SELECT);
	for (i = 0; i < nlocked; i++)
	{
		bool		isnull;
		int64		seq = DatumGetInt64(outbox_spi_value(i, 2, &isnull));

		while (events[j].seq != seq)
			j++;
		events[i] = events[j++];
		events[i].tid = *(ItemPointer) DatumGetPointer(outbox_spi_value(i, 1, &isnull));
	}
	SPI_freetuptable(SPI_tuptable);
	return nlocked;
}

/*
 * Have events name their new jobs.  The name may stand for the job of another
 * subscription, which had it before: then that one is named by the name it has
 * now, or by its number, so that it goes with the event when its time comes.
 */
static void
name_jobs(const OutboxReplay *replay, OutboxEvent *events, int n)
{
	static OutboxPlan name = {
		"UPDATE outbox.events e SET fanout = COALESCE((SELECT pg_catalog.jsonb_build_object("
		"COALESCE(s.name, pg_catalog.format('subscription %s', j.subscription_id)), j.id)"
		" FROM outbox.jobs j LEFT JOIN outbox.subscriptions s"
		" ON s.id OPERATOR(pg_catalog.=) j.subscription_id"
		" WHERE j.id OPERATOR(pg_catalog.=) (e.fanout OPERATOR(pg_catalog.->>) $3)::bigint"
		" AND j.subscription_id OPERATOR(pg_catalog.<>) $4), '{}')"
		" OPERATOR(pg_catalog.||) e.fanout"
		" OPERATOR(pg_catalog.||) pg_catalog.jsonb_build_object($3, u.job)"
		" FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2)) AS u(tid, job)"
		" WHERE e.ctid OPERATOR(pg_catalog.=) u.tid",
		4, {TIDARRAYOID, INT8ARRAYOID, TEXTOID, INT4OID}, NULL
	};
	Datum	   *tids = palloc(n * sizeof(Datum));
	Datum	   *jobs = palloc(n * sizeof(Datum));
	Datum		values[4];
	int			i;

	for (i = 0; i < n; i++)
	{
		OutboxTarget *target = &events[i].targets[0];

		tids[i] = PointerGetDatum(&events[i].tid);
		jobs[i] = Int64GetDatum(target->covered_by ? target->covered_by->job : target->job);
	}
	values[0] = outbox_make_array(tids, NULL, n, TIDOID);
	values[1] = outbox_make_array(jobs, NULL, n, INT8OID);
	values[2] = CStringGetTextDatum(replay->consumer.name);
	values[3] = Int32GetDatum(replay->consumer.id);
	if (outbox_execute(&name, values, NULL, SPI_OK_UPDATE) != (uint64) n)
		elog(ERROR, "events were not where they were locked");
}

/* Make jobs for the events that have none. */
static void
make_jobs(OutboxReplay *replay, OutboxReplayEvent *candidates, int n)
{
	OutboxEvent *events = palloc((n + 1) * sizeof(OutboxEvent));
	int			nevents = 0;
	int			i;

	for (i = 0; i < n; i++)
	{
		if (candidates[i].job == 0)
			events[nevents++] = candidates[i].event;
	}
	if (nevents > 0)
		nevents = lock_events(events, nevents);
	if (nevents == 0)
		return;
	replay->njobs += outbox_enqueue_again(events, nevents);
	name_jobs(replay, events, nevents);
}

/* Some events; false when there are no more. */
static bool
replay_step(OutboxReplay *replay)
{
	OutboxReplayEvent *candidates;
	bool		more;
	int			n = read_events(replay, &candidates, &more);

	if (n > 0)
		n = match_events(candidates, n);
	if (n > 0)
	{
		find_jobs(replay, candidates, n);
		outbox_put_back(replay, candidates, n);
		make_jobs(replay, candidates, n);
	}
	return more;
}

PG_FUNCTION_INFO_V1(outbox_replay);

/*
 * outbox.replay(): returns how many jobs were made or put back in line.  Each
 * step connects to SPI anew and has its own memory, so that neither grows.
 */
Datum
outbox_replay(PG_FUNCTION_ARGS)
{
	MemoryContext caller = CurrentMemoryContext;
	MemoryContext context;
	OutboxOwnerContext owner;
	OutboxReplay replay = {0};
	char	   *name;
	bool		more;

	outbox_check_not_null(fcinfo, 0, "subscription");
	outbox_check_not_null(fcinfo, 1, "since");
	name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	replay.since = PG_GETARG_TIMESTAMPTZ(1);
	replay.until = PG_ARGISNULL(2) ? DT_NOEND : PG_GETARG_TIMESTAMPTZ(2);
	replay.after = PG_INT64_MIN;
	replay.due = DT_NOEND;

	outbox_begin_call(&owner);
	MemoryContextSwitchTo(caller);	/* out of what SPI frees */
	outbox_consumer_by_name(name, owner.userid, &replay.consumer);
	lock_subscription(replay.consumer.id);
	check_committed(&replay.consumer);
	wait_for_passes();
	outbox_route_load_one(replay.consumer.id);
	outbox_spi_finish();

	context = AllocSetContextCreate(caller, "outbox replay", ALLOCSET_DEFAULT_SIZES);
	do
	{
		CHECK_FOR_INTERRUPTS();
		outbox_spi_connect();
		MemoryContextSwitchTo(context);
		more = replay_step(&replay);
		outbox_spi_finish();
		MemoryContextReset(context);
	} while (more);
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(context);
	outbox_route_forget();
	if (replay.due != DT_NOEND)
		outbox_hint_note(replay.consumer.id, replay.due, outbox_handler_owner(&replay.consumer));
	outbox_become_caller(&owner);
	PG_RETURN_INT64(replay.njobs);
}
