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
 * over these, and another replay waits.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

#define STEP_EVENTS 1000		/* events of one step ... */
#define STEP_JOBS 20000			/* ... unless they name more jobs than this */

typedef struct Replay
{
	OutboxConsumer consumer;
	TimestampTz since;
	TimestampTz until;
	int64		after;			/* seq up to which events have been looked at */
	TimestampTz due;			/* earliest of what was put back; DT_NOEND:
								 * none */
	int64		njobs;
} Replay;

/* An event of a step */
typedef struct Candidate
{
	OutboxEvent event;
	int64	   *named;			/* jobs that it names */
	int			nnamed;
	int64		job;			/* that of the subscription; 0: none */
	bool		finished;		/* which has come to an end */
} Candidate;

/* A job that is put back in line */
typedef struct PutBack
{
	int64		id;
	Datum		tid;
	bool		keyed;
	int64		key;			/* of scope and subject */
	TimestampTz due;
} PutBack;

/* Order of seqs, and of ids */
static int
compare_int64(int64 a, int64 b)
{
	return (a > b) - (a < b);
}

/* By id */
static int
compare_put_back_ids(const void *a, const void *b)
{
	return compare_int64(((const PutBack *) a)->id, ((const PutBack *) b)->id);
}

/* By subject, then by id */
static int
compare_put_back(const void *a, const void *b)
{
	const PutBack *pa = a;
	const PutBack *pb = b;
	int			result = compare_int64(pa->keyed, pb->keyed);

	if (result == 0)
		result = compare_int64(pa->key, pb->key);
	return result != 0 ? result : compare_int64(pa->id, pb->id);
}

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
	Oid			relid = get_relname_relid("subscriptions", get_namespace_oid(OUTBOX_SCHEMA, false));

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
read_events(Replay *replay, Candidate **candidates, bool *more)
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
	*candidates = palloc0((nrows + 1) * sizeof(Candidate));
	for (n = 0; n < nrows && nnamed < STEP_JOBS; n++)
	{
		Candidate  *candidate = &(*candidates)[n];
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
match_events(Candidate *candidates, int n)
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
find_jobs(const Replay *replay, Candidate *candidates, int n)
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
		Candidate  *candidate = &candidates[i];

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
 * When do jobs of an ordered subscription fall due?  Those of one subject that
 * are put back together wait behind the first of them, and that one behind an
 * older one of ours.  Else it is due now, or when the lease of one that runs
 * ends; the claim sees to the order.  No job of others is locked, so nothing
 * but a time may wait for one.
 */
static void
set_dues(const Replay *replay, PutBack *jobs, int n, TimestampTz now)
{
	static OutboxPlan look = {
		"SELECT u.ord, o.own, (SELECT f.due_at FROM (SELECT j.due_at, j.claim, j.attempts"
		" FROM outbox.jobs j WHERE j.subscription_id OPERATOR(pg_catalog.=) $3"
		" AND j.subject_key OPERATOR(pg_catalog.=) u.key AND j.dead_at IS NULL AND j.done_at IS NULL"
		OUTBOX_OLDEST_FIRST " LIMIT 1) f WHERE o.own IS NOT TRUE"
		" AND (f.claim IS NOT NULL OR f.attempts OPERATOR(pg_catalog.=) 0)"
		" AND f.due_at OPERATOR(pg_catalog.<) 'infinity')"
		" FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2))"
		" WITH ORDINALITY AS u(key, id, ord)"
		" LEFT JOIN LATERAL (SELECT j.xmin OPERATOR(pg_catalog.=) $4 AS own FROM outbox.jobs j"
		" WHERE j.subscription_id OPERATOR(pg_catalog.=) $3"
		" AND j.subject_key OPERATOR(pg_catalog.=) u.key AND j.dead_at IS NULL AND j.done_at IS NULL"
		" AND j.id OPERATOR(pg_catalog.<) u.id" OUTBOX_YOUNGEST_FIRST " LIMIT 1) o ON true",
		4, {INT8ARRAYOID, INT8ARRAYOID, INT4OID, XIDOID}, NULL
	};
	int64	   *keys = palloc(n * sizeof(int64));
	int64	   *ids = palloc(n * sizeof(int64));
	PutBack   **firsts = palloc(n * sizeof(PutBack *));
	Datum		values[4];
	int			nfirsts = 0;
	int			i;

	qsort(jobs, n, sizeof(PutBack), compare_put_back);
	for (i = 0; i < n; i++)
	{
		if (!jobs[i].keyed)
			continue;
		if (i > 0 && jobs[i - 1].keyed && jobs[i - 1].key == jobs[i].key)
		{
			jobs[i].due = DT_NOEND;
			continue;
		}
		firsts[nfirsts] = &jobs[i];
		keys[nfirsts] = jobs[i].key;
		ids[nfirsts++] = jobs[i].id;
	}
	if (nfirsts == 0)
		return;
	values[0] = outbox_id_array(keys, nfirsts);
	values[1] = outbox_id_array(ids, nfirsts);
	values[2] = Int32GetDatum(replay->consumer.id);
	values[3] = TransactionIdGetDatum(GetCurrentTransactionId());
	nfirsts = (int) outbox_execute(&look, values, NULL, SPI_OK_SELECT);
	for (i = 0; i < nfirsts; i++)
	{
		bool		own_null;
		bool		due_null;
		int64		ord = DatumGetInt64(outbox_spi_value(i, 1, &own_null));
		bool		own = DatumGetBool(outbox_spi_value(i, 2, &own_null));
		Datum		due = outbox_spi_value(i, 3, &due_null);

		if (!own_null && own)
			firsts[ord - 1]->due = DT_NOEND;
		else if (!due_null)
			firsts[ord - 1]->due = Max(firsts[ord - 1]->due, DatumGetTimestampTz(due));
	}
	SPI_freetuptable(SPI_tuptable);
}

/* Lock those of some jobs that have come to an end; returns how many. */
static int
lock_finished(const Replay *replay, PutBack *jobs, int n)
{
	static OutboxPlan lock = {
		"SELECT j.ctid, j.id FROM outbox.jobs j WHERE j.id OPERATOR(pg_catalog.=) ANY ($1)"
		" AND j.subscription_id OPERATOR(pg_catalog.=) $2"
		" AND (j.done_at IS NOT NULL OR j.dead_at IS NOT NULL) ORDER BY j.id FOR NO KEY UPDATE",
		2, {INT8ARRAYOID, INT4OID}, NULL
	};
	int64	   *ids = palloc(n * sizeof(int64));
	Datum		values[2];
	int			nlocked;
	int			i,
				j = 0;

	for (i = 0; i < n; i++)
		ids[i] = jobs[i].id;
	values[0] = outbox_id_array(ids, n);
	values[1] = Int32GetDatum(replay->consumer.id);
	nlocked = (int) outbox_execute(&lock, values, NULL, SPI_OK_SELECT);
	for (i = 0; i < nlocked; i++)
	{
		bool		isnull;
		int64		id = DatumGetInt64(outbox_spi_value(i, 2, &isnull));

		while (jobs[j].id != id)
			j++;
		jobs[i] = jobs[j];
		jobs[i].tid = outbox_spi_value(i, 1, &isnull);
	}
	return nlocked;
}

/* Put jobs that are locked back in line. */
static void
update_jobs(Replay *replay, PutBack *jobs, int n)
{
	static OutboxPlan update = {
		"UPDATE outbox.jobs j SET done_at = NULL, dead_at = NULL, cancelled = NULL, claim = NULL,"
		" holder = NULL, last_error = NULL, attempts = 0, filter_pending = NULL,"
		" due_at = u.due, subject_key = u.key"
		" FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3))"
		" AS u(tid, due, key) WHERE j.ctid OPERATOR(pg_catalog.=) u.tid",
		3, {TIDARRAYOID, TIMESTAMPTZARRAYOID, INT8ARRAYOID}, NULL
	};
	Datum	   *columns[3];
	bool	   *nokey = palloc(n * sizeof(bool));
	Datum		values[3];
	int			i;

	for (i = 0; i < 3; i++)
		columns[i] = palloc(n * sizeof(Datum));
	for (i = 0; i < n; i++)
	{
		columns[0][i] = jobs[i].tid;
		columns[1][i] = TimestampTzGetDatum(jobs[i].due);
		columns[2][i] = Int64GetDatum(jobs[i].key);
		nokey[i] = !jobs[i].keyed;
		replay->due = Min(replay->due, jobs[i].due);
	}
	values[0] = outbox_make_array(columns[0], NULL, n, TIDOID);
	values[1] = outbox_make_array(columns[1], NULL, n, TIMESTAMPTZOID);
	values[2] = outbox_make_array(columns[2], nokey, n, INT8OID);
	if (outbox_execute(&update, values, NULL, SPI_OK_UPDATE) != (uint64) n)
		elog(ERROR, "jobs were not where they were locked");
	replay->njobs += n;
}

/* Which of some ids are those of no job? */
static int
find_gone(int64 *ids, int n)
{
	static OutboxPlan find = {
		"SELECT j.id FROM outbox.jobs j WHERE j.id OPERATOR(pg_catalog.=) ANY ($1)",
		1, {INT8ARRAYOID}, NULL
	};
	Datum		value = outbox_id_array(ids, n);
	int64	   *there;
	int			nthere = outbox_result_ids(outbox_execute(&find, &value, NULL, SPI_OK_SELECT), &there);
	int			ngone = 0;
	int			i;

	for (i = 0; i < n; i++)
	{
		if (!outbox_has_id(there, nthere, ids[i]))
			ids[ngone++] = ids[i];
	}
	return ngone;
}

/*
 * Put the jobs that have come to an end back in line, one that several events
 * name once.  Those that somebody has deleted meanwhile are forgotten.
 */
static void
put_back(Replay *replay, Candidate *candidates, int n)
{
	TimestampTz now = GetCurrentTimestamp();
	PutBack    *jobs = palloc((n + 1) * sizeof(PutBack));
	int64	   *rest = palloc((n + 1) * sizeof(int64));
	int			njobs = 0;
	int			nlocked;
	int			nrest = 0;
	int			i,
				j;

	for (i = 0; i < n; i++)
	{
		OutboxEvent *event = &candidates[i].event;
		OutboxSubscription *sub = event->targets[0].sub;
		PutBack    *job = &jobs[njobs];

		if (candidates[i].job == 0 || !candidates[i].finished)
			continue;
		job->id = candidates[i].job;
		job->keyed = (sub->ordered || sub->coalescing) && event->subject != NULL;
		job->key = job->keyed ? outbox_subject_key(event->scope, event->subject) : 0;
		job->due = Max(now, event->not_before);
		njobs++;
	}
	if (njobs == 0)
		return;
	qsort(jobs, njobs, sizeof(PutBack), compare_put_back_ids);
	for (i = 1, j = 1; i < njobs; i++)
	{
		if (jobs[i].id != jobs[i - 1].id)
			jobs[j++] = jobs[i];
	}
	njobs = j;
	for (i = 0; i < njobs; i++)
		rest[i] = jobs[i].id;
	nlocked = lock_finished(replay, jobs, njobs);
	if (nlocked < njobs)
	{
		for (i = 0, j = 0; i < njobs; i++)
		{
			if (j < nlocked && jobs[j].id == rest[i])
				j++;
			else
				rest[nrest++] = rest[i];
		}
		nrest = find_gone(rest, nrest);
		for (i = 0; i < n; i++)
		{
			if (outbox_has_id(rest, nrest, candidates[i].job))
				candidates[i].job = 0;
		}
	}
	if (nlocked == 0)
		return;
	if (replay->consumer.ordered)
		set_dues(replay, jobs, nlocked, now);
	update_jobs(replay, jobs, nlocked);
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
name_jobs(const Replay *replay, OutboxEvent *events, int n)
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
make_jobs(Replay *replay, Candidate *candidates, int n)
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
replay_step(Replay *replay)
{
	Candidate  *candidates;
	bool		more;
	int			n = read_events(replay, &candidates, &more);

	if (n > 0)
		n = match_events(candidates, n);
	if (n > 0)
	{
		find_jobs(replay, candidates, n);
		put_back(replay, candidates, n);
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
	Replay		replay = {0};
	char	   *name;
	bool		more;

	outbox_check_not_null(fcinfo, 0, "subscription");
	outbox_check_not_null(fcinfo, 1, "since");
	name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	replay.since = PG_GETARG_TIMESTAMPTZ(1);
	replay.until = PG_ARGISNULL(2) ? DT_NOEND : PG_GETARG_TIMESTAMPTZ(2);
	replay.after = PG_INT64_MIN;
	replay.due = DT_NOEND;

	outbox_become_owner(&owner);
	outbox_pin_planner();
	outbox_spi_connect();
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
