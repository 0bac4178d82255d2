/*-------------------------------------------------------------------------
 *
 * complete.c
 *		How a lease ends well: complete and complete_many.
 *
 * A job that is done stays in the table until retention takes it, unless
 * outbox.job_retention is 0: then it is deleted at once, and nobody can tell any
 * more who did it.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "catalog/pg_type.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"

/* The end of a job j, if a claim $1 has it, and what completed_many() reads */
#define SET_DONE(when) "UPDATE outbox.jobs j SET done_at = " when " FROM outbox.subscriptions s"
#define DELETE_DONE "DELETE FROM outbox.jobs j USING outbox.subscriptions s"
#define LEASED_AND_RETURNED \
	" AND j.done_at IS NULL AND j.dead_at IS NULL" \
	" AND s.id OPERATOR(pg_catalog.=) j.subscription_id" \
	" RETURNING j.due_at, j.subject_key, j.id," OUTBOX_CONSUMER_COLUMNS

/* Are jobs deleted when they are done? */
bool
outbox_deletes_done(void)
{
	return outbox_job_retention == 0;
}

/* Has that claim completed the job? */
static bool
completed_by(int64 job, int64 claim, Oid caller)
{
	static OutboxPlan find = {
		"SELECT" OUTBOX_CONSUMER_COLUMNS
		"FROM outbox.jobs j JOIN outbox.subscriptions s ON s.id OPERATOR(pg_catalog.=) j.subscription_id"
		" WHERE j.id OPERATOR(pg_catalog.=) $1 AND j.claim OPERATOR(pg_catalog.=) $2"
		" AND j.done_at IS NOT NULL AND j.cancelled IS NULL",
		2, {INT8OID, INT8OID}, NULL
	};
	OutboxConsumer consumer;
	Datum		values[2];

	values[0] = Int64GetDatum(job);
	values[1] = Int64GetDatum(claim);
	if (outbox_execute(&find, values, NULL, SPI_OK_SELECT) == 0)
		return false;
	outbox_consumer_from_row(0, 1, &consumer);
	outbox_check_consumer(&consumer, caller);
	return true;
}

/*
 * Complete a job; false when this claim has done so before, OB001 when it does
 * not hold it.
 */
bool
outbox_complete_job(int64 job, int64 claim, Oid caller)
{
#define THIS_ONE " WHERE j.id OPERATOR(pg_catalog.=) $2 AND j.claim OPERATOR(pg_catalog.=) $1" \
	LEASED_AND_RETURNED
#define THIS_ARGS 3, {INT8OID, INT8OID, TIMESTAMPTZOID}, NULL
	static OutboxPlan complete = {SET_DONE("$3") THIS_ONE, THIS_ARGS};
	static OutboxPlan delete = {DELETE_DONE THIS_ONE, THIS_ARGS};
	bool		deletes = outbox_deletes_done();
	OutboxConsumer consumer;
	Datum		values[3];
	TimestampTz due;
	Datum		key;
	bool		isnull;
	int64	   *done;
	int			ndone;
	bool		rows;

	if (outbox_complete_in_memory(claim, &job, 1, caller, &done, &ndone, &rows) && ndone > 0)
		return true;
	values[0] = Int64GetDatum(claim);
	values[1] = Int64GetDatum(job);
	values[2] = TimestampTzGetDatum(GetCurrentTimestamp());
	if (outbox_execute(deletes ? &delete : &complete, values, NULL,
					   deletes ? SPI_OK_DELETE_RETURNING : SPI_OK_UPDATE_RETURNING) == 0)
	{
		if (completed_by(job, claim, caller))
			return false;
		outbox_lease_lost(job);
	}
	due = DatumGetTimestampTz(outbox_spi_value(0, 1, &isnull));
	key = outbox_spi_value(0, 2, &isnull);
	outbox_consumer_from_row(0, 4, &consumer);
	outbox_check_consumer(&consumer, caller);
	outbox_hint_note_abort(consumer.id, due, outbox_handler_owner(&consumer));
	if (consumer.ordered && !isnull)
		outbox_free_subject(&consumer, DatumGetInt64(key), 0);
	outbox_hint_note_done(consumer.id, 1);
	return true;
}

PG_FUNCTION_INFO_V1(outbox_complete);

/* outbox.complete() */
Datum
outbox_complete(PG_FUNCTION_ARGS)
{
	OutboxOwnerContext context;
	bool		result;

	outbox_check_not_null(fcinfo, 0, "job");
	outbox_check_not_null(fcinfo, 1, "claim");
	outbox_begin_call(&context);
	result = outbox_complete_job(PG_GETARG_INT64(0), PG_GETARG_INT64(1), context.userid);
	outbox_end_change(&context);
	PG_RETURN_BOOL(result);
}

/* A subject of which a job was completed */
typedef struct Subject
{
	int			consumer;
	int64		key;
} Subject;

/* Compare two of them for qsort. */
static int
compare_subjects(const void *a, const void *b)
{
	const Subject *sa = a;
	const Subject *sb = b;

	if (sa->consumer != sb->consumer)
		return sa->consumer < sb->consumer ? -1 : 1;
	return sa->key < sb->key ? -1 : sa->key > sb->key;
}

/*
 * See to what follows from jobs that were completed: the last result, of which
 * columns 1 to 3 are the due time, the subject's key and the id, and those of a
 * consumer follow.  In the order of the subjects, so that two callers do not meet
 * crosswise.
 */
static void
completed_many(int n, Oid caller)
{
	OutboxConsumer *consumers = palloc(Max(n, 1) * sizeof(OutboxConsumer));
	Subject    *subjects = palloc(Max(n, 1) * sizeof(Subject));
	int		   *done = palloc0(Max(n, 1) * sizeof(int));
	int			nconsumers = 0;
	int			nsubjects = 0;
	int			i;

	for (i = 0; i < n; i++)
	{
		bool		isnull;
		int32		id = DatumGetInt32(outbox_spi_value(i, 4, &isnull));
		Datum		key = outbox_spi_value(i, 2, &isnull);
		bool		due_isnull;
		int			c;

		/* the jobs of one claim are of one subscription, as a rule */
		for (c = 0; c < nconsumers && consumers[c].id != id; c++)
			;
		if (c == nconsumers)
		{
			outbox_consumer_from_row(i, 4, &consumers[c]);
			outbox_check_consumer(&consumers[c], caller);
			nconsumers++;
		}
		done[c]++;
		outbox_hint_note_abort(id, DatumGetTimestampTz(outbox_spi_value(i, 1, &due_isnull)),
							   outbox_handler_owner(&consumers[c]));
		if (consumers[c].ordered && !isnull)
		{
			subjects[nsubjects].consumer = c;
			subjects[nsubjects++].key = DatumGetInt64(key);
		}
	}
	qsort(subjects, nsubjects, sizeof(Subject), compare_subjects);
	for (i = 0; i < nsubjects; i++)
	{
		if (i == 0 || compare_subjects(&subjects[i - 1], &subjects[i]) != 0)
			outbox_free_subject(&consumers[subjects[i].consumer], subjects[i].key, 0);
	}
	for (i = 0; i < nconsumers; i++)
		outbox_hint_note_done(consumers[i].id, done[i]);
}

/* Complete jobs by a plan; returns how many, and which. */
static int
complete_rows(OutboxPlan *plan, Datum *values, Oid caller, int64 **done)
{
	int			n = (int) outbox_execute(plan, values, NULL, outbox_deletes_done() ?
										 SPI_OK_DELETE_RETURNING : SPI_OK_UPDATE_RETURNING);
	bool		isnull;
	int			i;

	*done = palloc(Max(n, 1) * sizeof(int64));
	for (i = 0; i < n; i++)
		(*done)[i] = DatumGetInt64(outbox_spi_value(i, 3, &isnull));
	completed_many(n, caller);
	return n;
}

/* The elements of an array of job ids, sorted; a null is no job */
static int64 *
array_ids(ArrayType *array, int *n, bool *hasnull)
{
	Datum	   *values;
	bool	   *nulls;
	int64	   *ids;
	int16		len;
	bool		byval;
	char		align;
	int			count;
	int			i;

	get_typlenbyvalalign(INT8OID, &len, &byval, &align);
	deconstruct_array(array, INT8OID, len, byval, align, &values, &nulls, &count);
	ids = palloc(Max(count, 1) * sizeof(int64));
	*n = 0;
	*hasnull = false;
	for (i = 0; i < count; i++)
	{
		if (nulls[i])
			*hasnull = true;
		else
			ids[(*n)++] = DatumGetInt64(values[i]);
	}
	*n = outbox_unique_ids(ids, *n);
	return ids;
}

/* The same as a parameter */
static Datum
ids_and_null(const int64 *ids, int n, bool hasnull)
{
	Datum	   *values = palloc((n + 1) * sizeof(Datum));
	bool	   *nulls = palloc0((n + 1) * sizeof(bool));
	int			i;

	for (i = 0; i < n; i++)
		values[i] = Int64GetDatum(ids[i]);
	values[n] = (Datum) 0;
	nulls[n] = true;
	return outbox_make_array(values, nulls, n + hasnull, INT8OID);
}

/* Leave out of sorted ids those that are among others; returns how many remain. */
static int
leave_out(int64 *ids, int n, int64 *others, int nothers)
{
	int			kept = 0;
	int			i;

	nothers = outbox_unique_ids(others, nothers);
	for (i = 0; i < n; i++)
	{
		if (!outbox_has_id(others, nothers, ids[i]))
			ids[kept++] = ids[i];
	}
	return kept;
}

PG_FUNCTION_INFO_V1(outbox_complete_many);

/*
 * outbox.complete_many(): complete the jobs of a claim, or some of them.  Returns
 * those that it does not hold any more, and raises nothing for them.
 */
Datum
outbox_complete_many(PG_FUNCTION_ARGS)
{
#define ALL_OF_CLAIM " WHERE j.claim OPERATOR(pg_catalog.=) $1" LEASED_AND_RETURNED
#define SOME_OF_CLAIM " WHERE j.id OPERATOR(pg_catalog.=) ANY ($3)" \
	" AND j.claim OPERATOR(pg_catalog.=) $1" LEASED_AND_RETURNED
#define ALL_ARGS 2, {INT8OID, TIMESTAMPTZOID}, NULL
#define SOME_ARGS 3, {INT8OID, TIMESTAMPTZOID, INT8ARRAYOID}, NULL
	static OutboxPlan all = {SET_DONE("$2") ALL_OF_CLAIM, ALL_ARGS};
	static OutboxPlan some = {SET_DONE("$2") SOME_OF_CLAIM, SOME_ARGS};
	static OutboxPlan delete_all = {DELETE_DONE ALL_OF_CLAIM, ALL_ARGS};
	static OutboxPlan delete_some = {DELETE_DONE SOME_OF_CLAIM, SOME_ARGS};
	static OutboxPlan refused = {
		"SELECT COALESCE(pg_catalog.array_agg(DISTINCT u.id), '{}') FROM pg_catalog.unnest($2) u(id)"
		" WHERE NOT EXISTS (SELECT FROM outbox.jobs j JOIN outbox.subscriptions s"
		" ON s.id OPERATOR(pg_catalog.=) j.subscription_id"
		" WHERE j.id OPERATOR(pg_catalog.=) u.id AND j.claim OPERATOR(pg_catalog.=) $1"
		" AND j.done_at IS NOT NULL AND j.cancelled IS NULL)",
		2, {INT8OID, INT8ARRAYOID}, NULL
	};
	OutboxOwnerContext context;
	MemoryContext caller = CurrentMemoryContext;
	int64		claim;
	int64	   *ids = NULL;
	int64	   *done = NULL;
	Datum		values[3];
	Datum		result;
	bool		isnull;
	bool		deletes = outbox_deletes_done();
	bool		rows;
	bool		hasnull = false;
	int			nids = 0;
	int			ndone;

	outbox_check_not_null(fcinfo, 0, "claim");
	claim = PG_GETARG_INT64(0);
	if (!PG_ARGISNULL(1))
		ids = array_ids(PG_GETARG_ARRAYTYPE_P(1), &nids, &hasnull);
	outbox_begin_call(&context);
	values[0] = Int64GetDatum(claim);
	outbox_complete_in_memory(claim, ids, nids, context.userid, &done, &ndone, &rows);
	if (ids != NULL)
		nids = leave_out(ids, nids, done, ndone);
	if (rows && ids == NULL)
	{
		values[1] = TimestampTzGetDatum(GetCurrentTimestamp());
		(void) complete_rows(deletes ? &delete_all : &all, values, context.userid, &done);
	}
	else if (rows && nids > 0)
	{
		values[1] = TimestampTzGetDatum(GetCurrentTimestamp());
		values[2] = outbox_id_array(ids, nids);
		ndone = complete_rows(deletes ? &delete_some : &some, values, context.userid, &done);
		nids = leave_out(ids, nids, done, ndone);
	}
	if (nids == 0 && !hasnull)
		result = PointerGetDatum(construct_empty_array(INT8OID));
	else
	{
		values[1] = ids_and_null(ids, nids, hasnull);
		outbox_execute(&refused, values, NULL, SPI_OK_SELECT);
		result = outbox_spi_value(0, 1, &isnull);
	}
	/* out of what SPI is about to free */
	MemoryContextSwitchTo(caller);
	result = PointerGetDatum(DatumGetArrayTypePCopy(result));
	outbox_end_change(&context);
	PG_RETURN_DATUM(result);
}
