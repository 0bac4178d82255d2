/*-------------------------------------------------------------------------
 *
 * dead.c
 *		What people do with jobs: put dead ones back in line, give jobs up,
 *		and delete those that have come to an end.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "catalog/pg_type.h"
#include "common/pg_prng.h"
#include "miscadmin.h"
#include "utils/builtins.h"

/*
 * Jobs of a subject of an ordered subscription have been put back in line, due
 * at infinity.  The oldest of them is made due: now, or, while a younger one of
 * the subject is running, when its lease ends; who ends it sooner makes the next
 * one due.  A lock on that one keeps it from being ended unseen, as in jobs.c,
 * and one on a younger one that waits keeps it from being claimed before it is
 * seen that an older one waits again; either may have to be waited for.
 */
static void
put_subject_in_line(const OutboxConsumer *consumer, int64 subject_key)
{
	static OutboxPlan lock = {
		"SELECT j.due_at, j.claim IS NOT NULL FROM outbox.jobs j"
		" WHERE j.subscription_id OPERATOR(pg_catalog.=) $1"
		" AND j.subject_key OPERATOR(pg_catalog.=) $2 AND j.dead_at IS NULL AND j.done_at IS NULL"
		" AND j.due_at OPERATOR(pg_catalog.<) 'infinity'" OUTBOX_OLDEST_FIRST " FOR SHARE",
		2, {INT4OID, INT8OID}, NULL
	};
	TimestampTz now;
	TimestampTz earliest = 0;
	Datum		values[2];
	uint64		n;
	uint64		i;

	values[0] = Int32GetDatum(consumer->id);
	values[1] = Int64GetDatum(subject_key);
	n = outbox_execute(&lock, values, NULL, SPI_OK_SELECT);
	now = GetCurrentTimestamp();
	for (i = 0; i < n; i++)
	{
		bool		isnull;
		TimestampTz until = DatumGetTimestampTz(outbox_spi_value(i, 1, &isnull));

		if (DatumGetBool(outbox_spi_value(i, 2, &isnull)) && until > now)
			earliest = Max(earliest, until);
		else
		{
			/* a claim may pass over it meanwhile */
			outbox_hint_note_abort(consumer->id, until, outbox_handler_owner(consumer));
		}
	}
	outbox_free_subject(consumer, subject_key, earliest);
}

PG_FUNCTION_INFO_V1(outbox_retry);

/* outbox.retry(): put a dead job back in line; false when it is not dead. */
Datum
outbox_retry(PG_FUNCTION_ARGS)
{
	static OutboxPlan retry = {
		"UPDATE outbox.jobs SET dead_at = NULL, attempts = 0, claim = NULL, due_at = $2"
		" WHERE id OPERATOR(pg_catalog.=) $1 AND dead_at IS NOT NULL AND done_at IS NULL",
		2, {INT8OID, TIMESTAMPTZOID}, NULL
	};
	OutboxOwnerContext context;
	OutboxConsumer consumer;
	OutboxJob	job;
	bool		result = false;

	outbox_check_not_null(fcinfo, 0, "job");
	outbox_begin_call(&context);
	if (outbox_find_job(PG_GETARG_INT64(0), context.userid, &consumer, &job))
	{
		bool		held_back = consumer.ordered && job.keyed;
		TimestampTz now = GetCurrentTimestamp();
		Datum		values[2];

		values[0] = Int64GetDatum(job.id);
		values[1] = TimestampTzGetDatum(held_back ? DT_NOEND : now);
		result = outbox_execute(&retry, values, NULL, SPI_OK_UPDATE) > 0;
		if (result && held_back)
			put_subject_in_line(&consumer, job.subject_key);
		else if (result)
			outbox_hint_note(consumer.id, now, outbox_handler_owner(&consumer));
		else
		{
			/* a claim may have passed over it while it was locked */
			outbox_hint_note(consumer.id, job.due_at, outbox_handler_owner(&consumer));
		}
	}
	outbox_end_change(&context);
	PG_RETURN_BOOL(result);
}

/* A time that may be left out */
static Datum
time_argument(FunctionCallInfo fcinfo, int n, TimestampTz otherwise)
{
	return PG_ARGISNULL(n) ? TimestampTzGetDatum(otherwise) : PG_GETARG_DATUM(n);
}

/* Put the dead jobs of an ordered subscription in line, subject by subject. */
static void
put_subjects_in_line(const OutboxConsumer *consumer, int n)
{
	Datum	   *keys = palloc(Max(n, 1) * sizeof(Datum));
	int			nkeys = 0;
	int			i;

	/* they come sorted by subject */
	for (i = 0; i < n; i++)
	{
		bool		isnull;
		Datum		key = outbox_spi_value(i, 1, &isnull);

		if (!isnull && (nkeys == 0 || DatumGetInt64(keys[nkeys - 1]) != DatumGetInt64(key)))
			keys[nkeys++] = key;
	}
	for (i = 0; i < nkeys; i++)
	{
		CHECK_FOR_INTERRUPTS();
		put_subject_in_line(consumer, DatumGetInt64(keys[i]));
	}
}

PG_FUNCTION_INFO_V1(outbox_retry_dead);

/*
 * outbox.retry_dead(): put the dead jobs of a subscription back in line, those
 * that died from a time on and before another.  They fall due one by one over an
 * interval, so that what was mended is not run over.  Of ordered subscriptions
 * each subject goes on at once, in its order.
 */
Datum
outbox_retry_dead(PG_FUNCTION_ARGS)
{
	static OutboxPlan retry = {
		"WITH r AS (UPDATE outbox.jobs SET dead_at = NULL, attempts = 0, claim = NULL,"
		" due_at = CASE WHEN $6 AND subject_key IS NOT NULL THEN 'infinity'"
		" ELSE $4 OPERATOR(pg_catalog.+) (pg_catalog.random() OPERATOR(pg_catalog.*) $5) END"
		" WHERE subscription_id OPERATOR(pg_catalog.=) $1 AND done_at IS NULL"
		" AND dead_at IS NOT NULL AND dead_at OPERATOR(pg_catalog.>=) $2"
		" AND dead_at OPERATOR(pg_catalog.<) $3 RETURNING subject_key)"
		" SELECT r.subject_key FROM r ORDER BY r.subject_key",
		6, {INT4OID, TIMESTAMPTZOID, TIMESTAMPTZOID, TIMESTAMPTZOID, INTERVALOID, BOOLOID}, NULL
	};
	OutboxOwnerContext context;
	OutboxConsumer consumer;
	TimestampTz now = GetCurrentTimestamp();
	Datum		values[6];
	char	   *name;
	uint64		n;

	outbox_check_not_null(fcinfo, 0, "subscription");
	outbox_check_not_null(fcinfo, 3, "spread");
	(void) outbox_interval_us(PG_GETARG_INTERVAL_P(3), "spread", true);
	name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	outbox_begin_call(&context);
	outbox_consumer_by_name(name, context.userid, &consumer);
	values[0] = Int32GetDatum(consumer.id);
	values[1] = time_argument(fcinfo, 1, DT_NOBEGIN);
	values[2] = time_argument(fcinfo, 2, DT_NOEND);
	values[3] = TimestampTzGetDatum(now);
	values[4] = PG_GETARG_DATUM(3);
	values[5] = BoolGetDatum(consumer.ordered);
	n = outbox_execute(&retry, values, NULL, SPI_OK_SELECT);
	if (n > 0)
		outbox_hint_note(consumer.id, now, outbox_handler_owner(&consumer));
	if (consumer.ordered)
		put_subjects_in_line(&consumer, (int) n);
	outbox_end_change(&context);
	PG_RETURN_INT64((int64) n);
}

PG_FUNCTION_INFO_V1(outbox_cancel);

/*
 * outbox.cancel(): give up a job that is not done; false when there is none such.
 * Who holds it finds the lease lost.
 */
Datum
outbox_cancel(PG_FUNCTION_ARGS)
{
	static OutboxPlan cancel = {
		"UPDATE outbox.jobs SET done_at = $2, cancelled = true, claim = NULL, dead_at = NULL"
		" WHERE ctid OPERATOR(pg_catalog.=) $1",
		2, {TIDOID, TIMESTAMPTZOID}, NULL
	};
	OutboxOwnerContext context;
	OutboxConsumer consumer;
	OutboxJob	job;
	bool		found;

	outbox_check_not_null(fcinfo, 0, "job");
	outbox_begin_call(&context);
	found = outbox_find_job(PG_GETARG_INT64(0), context.userid, &consumer, &job);
	if (found)
	{
		Datum		values[2];

		values[0] = PointerGetDatum(&job.tid);
		values[1] = TimestampTzGetDatum(GetCurrentTimestamp());
		if (outbox_execute(&cancel, values, NULL, SPI_OK_UPDATE) != 1)
			elog(ERROR, "job " INT64_FORMAT " could not be cancelled", job.id);
		if (consumer.ordered && job.keyed)
			outbox_free_subject(&consumer, job.subject_key, 0);
	}
	outbox_end_change(&context);
	PG_RETURN_BOOL(found);
}

PG_FUNCTION_INFO_V1(outbox_purge);

/*
 * outbox.purge(): delete the jobs of a subscription that are dead, or done, or
 * cancelled, and came to that before a time.
 */
Datum
outbox_purge(PG_FUNCTION_ARGS)
{
	static OutboxPlan dead = {
		"DELETE FROM outbox.jobs WHERE subscription_id OPERATOR(pg_catalog.=) $1"
		" AND done_at IS NULL AND dead_at IS NOT NULL AND dead_at OPERATOR(pg_catalog.<) $2",
		2, {INT4OID, TIMESTAMPTZOID}, NULL
	};
	static OutboxPlan done = {
		"DELETE FROM outbox.jobs WHERE subscription_id OPERATOR(pg_catalog.=) $1"
		" AND done_at OPERATOR(pg_catalog.<) $2 AND cancelled IS NULL",
		2, {INT4OID, TIMESTAMPTZOID}, NULL
	};
	static OutboxPlan cancelled = {
		"DELETE FROM outbox.jobs WHERE subscription_id OPERATOR(pg_catalog.=) $1"
		" AND done_at OPERATOR(pg_catalog.<) $2 AND cancelled",
		2, {INT4OID, TIMESTAMPTZOID}, NULL
	};
	OutboxOwnerContext context;
	OutboxConsumer consumer;
	OutboxPlan *plan;
	Datum		values[2];
	char	   *name;
	char	   *state;
	uint64		n;

	outbox_check_not_null(fcinfo, 0, "subscription");
	outbox_check_not_null(fcinfo, 1, "state");
	name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	state = text_to_cstring(PG_GETARG_TEXT_PP(1));
	if (strcmp(state, "dead") == 0)
		plan = &dead;
	else if (strcmp(state, "done") == 0)
		plan = &done;
	else if (strcmp(state, "cancelled") == 0)
		plan = &cancelled;
	else
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("jobs in state \"%s\" cannot be purged", outbox_clip(state, 100)),
				 errhint("Those that are dead, done or cancelled can; outbox.cancel gives up others.")));
	outbox_begin_call(&context);
	outbox_consumer_by_name(name, context.userid, &consumer);
	values[0] = Int32GetDatum(consumer.id);
	values[1] = time_argument(fcinfo, 2, DT_NOEND);
	n = outbox_execute(plan, values, NULL, SPI_OK_DELETE);
	outbox_end_change(&context);
	PG_RETURN_INT64((int64) n);
}
