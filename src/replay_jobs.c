/*-------------------------------------------------------------------------
 *
 * replay_jobs.c
 *		The part of outbox.replay() that puts jobs back in line.
 *
 *-------------------------------------------------------------------------
 */
#include "replay.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "utils/array.h"

/* A job that is put back in line */
typedef struct PutBack
{
	int64		id;
	Datum		tid;
	bool		keyed;
	int64		key;			/* of scope and subject */
	int64		in_front_of;	/* oldest unfinished job of the subject, which
								 * is younger */
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
 * Of one subject nothing may be claimed before what is put back in line in front
 * of it: lock the oldest jobs of subjects that wait, which claims then pass over
 * until we have committed.  Returns those that are locked, sorted; the others
 * are being claimed, or end.
 */
static int
lock_waiting(const OutboxReplay *replay, const PutBack *const *jobs, int n, TimestampTz now, int64 **locked)
{
	static OutboxPlan lock = {
		"SELECT j.id, j.due_at FROM outbox.jobs j WHERE j.id OPERATOR(pg_catalog.=) ANY ($1)"
		" AND j.done_at IS NULL AND j.dead_at IS NULL"
		" AND (j.claim IS NULL OR j.due_at OPERATOR(pg_catalog.<=) $2) FOR SHARE SKIP LOCKED",
		2, {INT8ARRAYOID, TIMESTAMPTZOID}, NULL
	};
	int64	   *ids = palloc((n + 1) * sizeof(int64));
	Datum		values[2];
	uint64		nlocked;
	uint64		i;

	for (i = 0; i < (uint64) n; i++)
		ids[i] = jobs[i]->in_front_of;
	values[0] = outbox_id_array(ids, n);
	values[1] = TimestampTzGetDatum(now);
	nlocked = outbox_execute(&lock, values, NULL, SPI_OK_SELECT);
	for (i = 0; i < nlocked; i++)
	{
		bool		isnull;

		/* when we are rolled back it can be claimed again */
		outbox_hint_note_abort(replay->consumer.id,
							   DatumGetTimestampTz(outbox_spi_value(i, 2, &isnull)),
							   outbox_handler_owner(&replay->consumer));
	}
	return outbox_result_ids(nlocked, locked);
}

/*
 * When do jobs of an ordered subscription fall due?  Those of one subject that
 * are put back together wait behind the first of them, and that one behind an
 * older one of ours.  Else it is due now, and the claim sees to the order; but
 * when a younger one runs already, it is due when that one's lease ends.  Who
 * ends it sooner, or makes it longer, changes that once we have committed.
 */
static void
set_dues(const OutboxReplay *replay, PutBack *jobs, int n, TimestampTz now)
{
	static OutboxPlan look = {
		"SELECT u.ord, o.own, f.id, CASE WHEN f.claim IS NOT NULL THEN f.due_at END"
		" FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2))"
		" WITH ORDINALITY AS u(key, id, ord)"
		" LEFT JOIN LATERAL (SELECT j.xmin OPERATOR(pg_catalog.=) $4 AS own FROM outbox.jobs j"
		" WHERE j.subscription_id OPERATOR(pg_catalog.=) $3"
		" AND j.subject_key OPERATOR(pg_catalog.=) u.key AND j.dead_at IS NULL AND j.done_at IS NULL"
		" AND j.id OPERATOR(pg_catalog.<) u.id ORDER BY j.id DESC LIMIT 1) o ON true"
		" LEFT JOIN LATERAL (SELECT j.id, j.claim, j.due_at FROM outbox.jobs j"
		" WHERE o.own IS NULL AND j.subscription_id OPERATOR(pg_catalog.=) $3"
		" AND j.subject_key OPERATOR(pg_catalog.=) u.key AND j.dead_at IS NULL AND j.done_at IS NULL"
		" ORDER BY j.id LIMIT 1) f ON true",
		4, {INT8ARRAYOID, INT8ARRAYOID, INT4OID, XIDOID}, NULL
	};
	int64	   *keys = palloc(n * sizeof(int64));
	int64	   *ids = palloc(n * sizeof(int64));
	PutBack   **firsts = palloc(n * sizeof(PutBack *));
	PutBack   **waiting = palloc(n * sizeof(PutBack *));
	int64	   *locked;
	Datum		values[4];
	int			nfirsts = 0;
	int			nwaiting = 0;
	int			nlocked;
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
		bool		isnull;
		PutBack    *job = firsts[DatumGetInt64(outbox_spi_value(i, 1, &isnull)) - 1];
		bool		own = DatumGetBool(outbox_spi_value(i, 2, &isnull));
		TimestampTz until;

		if (!isnull)
		{
			/* behind an older one, which is ours or not */
			if (own)
				job->due = DT_NOEND;
			continue;
		}
		job->in_front_of = DatumGetInt64(outbox_spi_value(i, 3, &isnull));
		if (isnull)
			continue;
		until = DatumGetTimestampTz(outbox_spi_value(i, 4, &isnull));
		if (!isnull && until > now)
			job->due = Max(job->due, until);
		else
			waiting[nwaiting++] = job;
	}
	SPI_freetuptable(SPI_tuptable);
	nlocked = lock_waiting(replay, (const PutBack *const *) waiting, nwaiting, now, &locked);
	for (i = 0; i < nwaiting; i++)
	{
		if (!outbox_has_id(locked, nlocked, waiting[i]->in_front_of))
			waiting[i]->due = Max(waiting[i]->due, now + replay->consumer.lease);
	}
}

/* Lock those of some jobs that have come to an end; returns how many. */
static int
lock_finished(const OutboxReplay *replay, PutBack *jobs, int n)
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
update_jobs(OutboxReplay *replay, PutBack *jobs, int n)
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
void
outbox_put_back(OutboxReplay *replay, OutboxReplayEvent *candidates, int n)
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
		/* infinity means something else here */
		job->due = Max(now, Min(event->not_before, END_TIMESTAMP - 1));
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
