/*-------------------------------------------------------------------------
 *
 * retention_events.c
 *		The part of retention.c that deletes events, with their jobs.
 *
 *-------------------------------------------------------------------------
 */
#include "retention.h"

#include "catalog/pg_type.h"
#include "utils/timestamp.h"

#define STEP_EVENTS 200			/* events of one step */
#define STEP_CAREFUL 32			/* the same, each in a subtransaction */

/* An event that is looked at, and an event or a job that is locked */
typedef struct Row
{
	Datum		tid;
	int64		key;			/* seq or id */
	int64		event;			/* of a job: its event */
	int64	   *jobs;			/* of an event: the jobs that it names, sorted */
	int			njobs;
	bool		young;			/* too young, or ... */
	bool		stays;			/* ... to be kept for another reason */
} Row;

/* Events to be deleted, in a subtransaction perhaps */
typedef struct Batch
{
	OutboxRetention *state;
	int64	   *seqs;
	int			nseqs;
	int64		nevents;		/* deleted */
	int64		njobs;
} Batch;

/* All jobs that some events name, sorted; returns how many. */
static int
all_jobs(const Row *events, int nevents, int64 **ids)
{
	int			n = 0;
	int			i;

	for (i = 0; i < nevents; i++)
		n += events[i].njobs;
	*ids = palloc((n + 1) * sizeof(int64));
	n = 0;
	for (i = 0; i < nevents; i++)
	{
		if (events[i].njobs > 0)
			memcpy(*ids + n, events[i].jobs, events[i].njobs * sizeof(int64));
		n += events[i].njobs;
	}
	return outbox_unique_ids(*ids, n);
}

/* Is one of the jobs that an event names among sorted ones? */
static bool
names_one_of(const Row *event, const int64 *ids, int n)
{
	int			i;

	for (i = 0; n > 0 && i < event->njobs; i++)
	{
		if (outbox_has_id(ids, n, event->jobs[i]))
			return true;
	}
	return false;
}

/* Lock those of the events of a batch that can go; returns how many. */
static int
lock_events(const Batch *batch, Row **events)
{
	static OutboxPlan lock = {
		"SELECT e.ctid, e.seq, e.fanout FROM outbox.events e"
		" WHERE e.seq OPERATOR(pg_catalog.=) ANY ($1)"
		" AND e.fanned_out_at OPERATOR(pg_catalog.<) $2 FOR UPDATE SKIP LOCKED",
		2, {INT8ARRAYOID, TIMESTAMPTZOID}, NULL
	};
	Datum		values[2];
	bool		isnull;
	int			n;
	int			i;

	values[0] = outbox_id_array(batch->seqs, batch->nseqs);
	values[1] = TimestampTzGetDatum(outbox_retention_cutoff(batch->state, outbox_event_retention));
	n = (int) outbox_execute(&lock, values, NULL, SPI_OK_SELECT);
	*events = palloc0((n + 1) * sizeof(Row));
	for (i = 0; i < n; i++)
	{
		Datum		fanout = outbox_spi_value(i, 3, &isnull);

		(*events)[i].tid = outbox_spi_value(i, 1, &isnull);
		(*events)[i].key = DatumGetInt64(outbox_spi_value(i, 2, &isnull));
		(*events)[i].njobs = outbox_named_jobs(fanout, &(*events)[i].jobs);
	}
	return n;
}

/* Lock those of some jobs that can go; returns how many. */
static int
lock_jobs(const Batch *batch, const int64 *ids, int nids, Row **jobs)
{
	static OutboxPlan lock = {
		"SELECT j.ctid, j.id, j.event_seq FROM outbox.jobs j"
		" WHERE j.id OPERATOR(pg_catalog.=) ANY ($1)"
		" AND (j.done_at OPERATOR(pg_catalog.<) $2 OR NOT EXISTS (SELECT FROM outbox.subscriptions s"
		" WHERE s.id OPERATOR(pg_catalog.=) j.subscription_id)) FOR UPDATE OF j SKIP LOCKED",
		2, {INT8ARRAYOID, TIMESTAMPTZOID}, NULL
	};
	Datum		values[2];
	bool		isnull;
	int			n;
	int			i;

	values[0] = outbox_id_array(ids, nids);
	values[1] = TimestampTzGetDatum(outbox_retention_cutoff(batch->state, outbox_event_retention));
	n = (int) outbox_execute(&lock, values, NULL, SPI_OK_SELECT);
	*jobs = palloc0((n + 1) * sizeof(Row));
	for (i = 0; i < n; i++)
	{
		(*jobs)[i].tid = outbox_spi_value(i, 1, &isnull);
		(*jobs)[i].key = DatumGetInt64(outbox_spi_value(i, 2, &isnull));
		(*jobs)[i].event = DatumGetInt64(outbox_spi_value(i, 3, &isnull));
	}
	return n;
}

/* Which of some jobs are there, but not among those that are locked? */
static int
jobs_in_the_way(const int64 *ids, int nids, const Row *jobs, int njobs, int64 **result)
{
	static OutboxPlan find = {
		"SELECT j.id FROM outbox.jobs j WHERE j.id OPERATOR(pg_catalog.=) ANY ($1)",
		1, {INT8ARRAYOID}, NULL
	};
	int64	   *locked = palloc((njobs + 1) * sizeof(int64));
	int64	   *rest = palloc((nids + 1) * sizeof(int64));
	int			nrest = 0;
	Datum		value;
	int			i;

	for (i = 0; i < njobs; i++)
		locked[i] = jobs[i].key;
	njobs = outbox_unique_ids(locked, njobs);
	for (i = 0; i < nids; i++)
	{
		if (!outbox_has_id(locked, njobs, ids[i]))
			rest[nrest++] = ids[i];
	}
	if (nrest == 0)
		return 0;
	value = outbox_id_array(rest, nrest);
	return outbox_result_ids(outbox_execute(&find, &value, NULL, SPI_OK_SELECT), result);
}

/*
 * Delete the events of a batch that can be locked, with their jobs; an event
 * stays when one of its jobs is there and cannot be locked, or must stay.  A job
 * that several events name goes with the one that it is about.
 */
static void
delete_batch(void *arg)
{
	static OutboxPlan delete = {
		"DELETE FROM outbox.events WHERE ctid OPERATOR(pg_catalog.=) ANY ($1)",
		1, {TIDARRAYOID}, NULL
	};
	Batch	   *batch = arg;
	Row		   *events;
	Row		   *jobs;
	int64	   *ids;
	int64	   *in_the_way = NULL;
	int64	   *seqs;
	Datum	   *event_tids;
	Datum	   *job_tids;
	int			ngoing = 0;
	int			njobs_going = 0;
	Datum		value;
	int			nevents = lock_events(batch, &events);
	int			nids = all_jobs(events, nevents, &ids);
	int			njobs = lock_jobs(batch, ids, nids, &jobs);
	int			nin_the_way = jobs_in_the_way(ids, nids, jobs, njobs, &in_the_way);
	int			i;

	event_tids = palloc((nevents + 1) * sizeof(Datum));
	seqs = palloc((nevents + 1) * sizeof(int64));
	for (i = 0; i < nevents; i++)
	{
		if (names_one_of(&events[i], in_the_way, nin_the_way))
			continue;
		seqs[ngoing] = events[i].key;
		event_tids[ngoing++] = events[i].tid;
	}
	if (ngoing == 0)
		return;
	ngoing = outbox_unique_ids(seqs, ngoing);
	job_tids = palloc((njobs + 1) * sizeof(Datum));
	for (i = 0; i < njobs; i++)
	{
		if (outbox_has_id(seqs, ngoing, jobs[i].event))
			job_tids[njobs_going++] = jobs[i].tid;
	}
	batch->njobs = outbox_delete_jobs(job_tids, njobs_going);
	value = outbox_make_array(event_tids, NULL, ngoing, TIDOID);
	batch->nevents = (int64) outbox_execute(&delete, &value, NULL, SPI_OK_DELETE);
}

/*
 * Is an error one that every event would meet?  Then there is no use in trying
 * them one by one.
 */
bool
outbox_retention_trouble(int sqlstate)
{
	switch (ERRCODE_TO_CATEGORY(sqlstate))
	{
		case ERRCODE_INVALID_TRANSACTION_STATE:
		case ERRCODE_TRANSACTION_ROLLBACK:
		case ERRCODE_INSUFFICIENT_RESOURCES:
		case ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE:
		case ERRCODE_OPERATOR_INTERVENTION:
		case ERRCODE_SYSTEM_ERROR:
			return true;
	}
	return false;
}

/*
 * Delete events; when that has failed, each in a subtransaction of its own, so
 * that one that cannot be deleted keeps no other.
 */
static void
delete_events(OutboxRetention *state, int64 *seqs, int nseqs)
{
	int			size = state->careful ? 1 : nseqs;
	int			i;

	for (i = 0; i < nseqs; i += size)
	{
		Batch		batch = {state, seqs + i, size, 0, 0};
		ErrorData  *error = NULL;

		if (state->careful)
			error = outbox_try(delete_batch, &batch);
		else
			delete_batch(&batch);
		if (error == NULL)
		{
			state->events += batch.nevents;
			state->jobs += batch.njobs;
			continue;
		}
		if (outbox_retention_trouble(error->sqlerrcode))
			ReThrowError(error);
		if (state->failures++ == 0)
			snprintf(state->error, sizeof(state->error), "event " INT64_FORMAT ": %s", seqs[i],
					 outbox_error_text(error, false));
	}
}

/*
 * Events, by seq: those that were fanned out long enough ago, and whose jobs
 * are gone or have ended long enough ago.
 */
bool
outbox_retention_events(OutboxRetention *state)
{
	static OutboxPlan look = {
		"SELECT e.seq, e.recorded_at OPERATOR(pg_catalog.>=) $2,"
		" CASE WHEN e.fanned_out_at OPERATOR(pg_catalog.<) $2 THEN e.fanout END"
		" FROM outbox.events e WHERE e.seq OPERATOR(pg_catalog.>) $1 ORDER BY e.seq LIMIT $3",
		3, {INT8OID, TIMESTAMPTZOID, INT8OID}, NULL
	};
	static OutboxPlan find_unfinished = {
		"SELECT j.id FROM outbox.jobs j WHERE j.id OPERATOR(pg_catalog.=) ANY ($1)"
		" AND (j.done_at IS NULL OR j.done_at OPERATOR(pg_catalog.>=) $2)"
		" AND EXISTS (SELECT FROM outbox.subscriptions s"
		" WHERE s.id OPERATOR(pg_catalog.=) j.subscription_id)",
		2, {INT8ARRAYOID, TIMESTAMPTZOID}, NULL
	};
	OutboxWalk *walk = &state->walks[state->phase];
	int			limit = state->careful ? STEP_CAREFUL : STEP_EVENTS;
	Datum		values[3];
	Row		   *events;
	int64	   *ids;
	int64	   *seqs;
	bool		more;
	int			nrows;
	int			nids = 0;
	int			nseqs = 0;
	int			n;
	int			i;

	if (outbox_event_retention < 0)
		return false;
	values[0] = Int64GetDatum(walk->after);
	values[1] = TimestampTzGetDatum(outbox_retention_cutoff(state, outbox_event_retention));
	values[2] = Int64GetDatum(limit);
	nrows = (int) outbox_execute(&look, values, NULL, SPI_OK_SELECT);
	events = palloc0((nrows + 1) * sizeof(Row));
	for (n = 0; n < nrows && nids < OUTBOX_STEP_JOBS; n++)
	{
		Datum		fanout;
		bool		isnull;

		events[n].key = DatumGetInt64(outbox_spi_value(n, 1, &isnull));
		events[n].young = DatumGetBool(outbox_spi_value(n, 2, &isnull));
		fanout = outbox_spi_value(n, 3, &isnull);
		events[n].stays = isnull;
		if (!isnull)
			events[n].njobs = outbox_named_jobs(fanout, &events[n].jobs);
		nids += events[n].njobs;
	}
	more = (nrows == limit || n < nrows);
	SPI_freetuptable(SPI_tuptable);

	nids = all_jobs(events, n, &ids);
	if (nids > 0)
	{
		values[0] = outbox_id_array(ids, nids);
		nids = outbox_result_ids(outbox_execute(&find_unfinished, values, NULL, SPI_OK_SELECT), &ids);
	}
	seqs = palloc((n + 1) * sizeof(int64));
	for (i = 0; i < n; i++)
	{
		events[i].stays |= names_one_of(&events[i], ids, nids);
		if (!events[i].stays)
			seqs[nseqs++] = events[i].key;
		more &= outbox_walk_row(walk, events[i].key, events[i].young, !events[i].stays);
	}
	if (nseqs > 0)
		delete_events(state, seqs, nseqs);
	return more;
}
