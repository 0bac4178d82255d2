/*-------------------------------------------------------------------------
 *
 * finish.c
 *		How a lease ends otherwise than well: fail, release, the death of a job;
 *		how it goes on: extend; and what becomes of the jobs behind it.
 *
 * The number of the claim fences: a statement that ends or prolongs a lease
 * finds the job only while it has that number, so that nobody can end the
 * lease of another.  That the lease has run out does not matter while nobody
 * else has claimed the job.
 *
 * Jobs of one subject of an ordered subscription hold each other back: all but
 * the oldest are due at infinity, and whoever brings that one to an end makes
 * the next one due, in the same transaction.  The relay, when it adds a job
 * behind another, holds a lock on that other until it has committed (see
 * jobs.c), so either the relay finds the other ended, or who ends it finds
 * the new one.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"

#define MAX_STORED_ERROR 2000	/* bytes of an error text */

/*
 * How far back the hint goes when the last job of a subject has ended: a relay
 * that met that end half way has added a job that is due, but could not be
 * claimed until now.
 */
#define IN_FLUX_US (10 * USECS_PER_SEC)

/* Complain that the lease of a job is lost. */
void
outbox_lease_lost(int64 job)
{
	ereport(ERROR,
			(errcode(ERRCODE_OUTBOX_LEASE_LOST),
			 errmsg("lease of job " INT64_FORMAT " is lost", job),
			 errdetail("The job has been claimed again, has come to an end, or its subscription has.")));
}

/*
 * The oldest job of a subject has ended: make the next one due, at a time or now
 * when that has passed.  One that has been tried waits as it was told to.
 *
 * It is looked up by a snapshot taken now, also in a transaction that has one
 * for all its statements: a job that was added behind ours must be found.
 */
void
outbox_free_subject(const OutboxConsumer *consumer, int64 subject_key, TimestampTz earliest)
{
	static OutboxPlan next = {
		"SELECT j.ctid, j.due_at, (SELECT e.not_before FROM outbox.events e"
		" WHERE e.seq OPERATOR(pg_catalog.=) j.event_seq),"
		" j.attempts OPERATOR(pg_catalog.=) 0 AND j.claim IS NULL"
		" FROM outbox.jobs j WHERE j.subscription_id OPERATOR(pg_catalog.=) $1"
		" AND j.subject_key OPERATOR(pg_catalog.=) $2 AND j.dead_at IS NULL AND j.done_at IS NULL"
		OUTBOX_OLDEST_FIRST " LIMIT 1",
		2, {INT4OID, INT8OID}, NULL
	};
	static OutboxPlan free_next = {
		"UPDATE outbox.jobs SET due_at = $2 WHERE ctid OPERATOR(pg_catalog.=) $1"
		" AND done_at IS NULL AND dead_at IS NULL AND claim IS NULL",
		2, {TIDOID, TIMESTAMPTZOID}, NULL
	};
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz due;
	ItemPointerData tid;
	Datum		values[2];
	Datum		value;
	bool		fresh;
	bool		isnull;
	Snapshot	snapshot = InvalidSnapshot;

	CommandCounterIncrement();
	if (IsolationUsesXactSnapshot())
		snapshot = GetLatestSnapshot();
	values[0] = Int32GetDatum(consumer->id);
	values[1] = Int64GetDatum(subject_key);
	if (outbox_execute_snapshot(&next, values, NULL, SPI_OK_SELECT, snapshot) == 0)
	{
		outbox_hint_note(consumer->id, now - IN_FLUX_US, outbox_handler_owner(consumer));
		return;
	}
	tid = *(ItemPointer) DatumGetPointer(outbox_spi_value(0, 1, &isnull));
	due = DatumGetTimestampTz(outbox_spi_value(0, 2, &isnull));
	fresh = DatumGetBool(outbox_spi_value(0, 4, &isnull));
	if (due == DT_NOEND || (due > now && fresh))
	{
		value = outbox_spi_value(0, 3, &isnull);
		due = Max(now, earliest);
		if (!isnull)
			due = Max(due, DatumGetTimestampTz(value));
		values[0] = PointerGetDatum(&tid);
		values[1] = TimestampTzGetDatum(due);
		outbox_execute_snapshot(&free_next, values, NULL, SPI_OK_UPDATE, snapshot);
	}
	outbox_hint_note(consumer->id, due, outbox_handler_owner(consumer));
}

/*
 * The lease of a job of an ordered subscription ends then, sooner or later than
 * before.  An older job of its subject that was put back in line meanwhile is
 * due at that time.  It is looked up by a snapshot taken now, as above.
 */
static void
move_older(const OutboxConsumer *consumer, int64 subject_key, int64 id, TimestampTz due)
{
	static OutboxPlan move = {
		"UPDATE outbox.jobs SET due_at = $4"
		" WHERE id OPERATOR(pg_catalog.=) (SELECT j.id FROM outbox.jobs j"
		" WHERE j.subscription_id OPERATOR(pg_catalog.=) $1"
		" AND j.subject_key OPERATOR(pg_catalog.=) $2 AND j.dead_at IS NULL AND j.done_at IS NULL"
		" AND j.id OPERATOR(pg_catalog.<) $3" OUTBOX_OLDEST_FIRST " LIMIT 1)"
		" AND attempts OPERATOR(pg_catalog.=) 0 AND claim IS NULL"
		" AND done_at IS NULL AND dead_at IS NULL",
		4, {INT4OID, INT8OID, INT8OID, TIMESTAMPTZOID}, NULL
	};
	Datum		values[4];

	values[0] = Int32GetDatum(consumer->id);
	values[1] = Int64GetDatum(subject_key);
	values[2] = Int64GetDatum(id);
	values[3] = TimestampTzGetDatum(due);
	if (outbox_execute_snapshot(&move, values, NULL, SPI_OK_UPDATE,
								IsolationUsesXactSnapshot() ? GetLatestSnapshot() : InvalidSnapshot) > 0)
		outbox_hint_note(consumer->id, due, outbox_handler_owner(consumer));
}

#define FOUND_COLUMNS \
	"SELECT j.ctid, j.id, j.event_seq, j.attempts, j.claim, j.filter_pending, j.subject_key, j.due_at," \
	OUTBOX_CONSUMER_COLUMNS

/* Read the one row that was found, of FOUND_COLUMNS. */
static void
read_found(OutboxConsumer *consumer, OutboxJob *job)
{
	bool		isnull;
	Datum		value;

	memset(job, 0, sizeof(*job));
	job->tid = *(ItemPointer) DatumGetPointer(outbox_spi_value(0, 1, &isnull));
	job->id = DatumGetInt64(outbox_spi_value(0, 2, &isnull));
	job->seq = DatumGetInt64(outbox_spi_value(0, 3, &isnull));
	job->attempt = DatumGetInt32(outbox_spi_value(0, 4, &isnull));
	value = outbox_spi_value(0, 5, &isnull);
	job->old_claim = isnull ? 0 : DatumGetInt64(value);
	value = outbox_spi_value(0, 7, &isnull);
	job->keyed = !isnull;
	job->subject_key = isnull ? 0 : DatumGetInt64(value);
	job->due_at = DatumGetTimestampTz(outbox_spi_value(0, 8, &isnull));
	outbox_consumer_from_row(0, 9, consumer);
}

/*
 * Lock a job that a claim holds, and find its subscription; raises OB001 when
 * it does not hold it any more.
 */
static void
find_leased(int64 id, int64 claim, Oid caller, OutboxConsumer *consumer, OutboxJob *job)
{
	static OutboxPlan find = {
		FOUND_COLUMNS
		"FROM outbox.jobs j JOIN outbox.subscriptions s ON s.id OPERATOR(pg_catalog.=) j.subscription_id"
		" WHERE j.id OPERATOR(pg_catalog.=) $1 AND j.claim OPERATOR(pg_catalog.=) $2"
		" AND j.done_at IS NULL AND j.dead_at IS NULL FOR NO KEY UPDATE OF j",
		2, {INT8OID, INT8OID}, NULL
	};
	Datum		values[2];

	outbox_settle_job(id, claim);
	values[0] = Int64GetDatum(id);
	values[1] = Int64GetDatum(claim);
	if (outbox_execute(&find, values, NULL, SPI_OK_SELECT) == 0)
		outbox_lease_lost(id);
	read_found(consumer, job);
	outbox_check_consumer(consumer, caller);
	outbox_hint_note_abort(consumer->id, job->due_at, outbox_handler_owner(consumer));
}

/*
 * Lock a job that is not done, whoever holds it, and find its subscription;
 * false when there is none.
 */
bool
outbox_find_job(int64 id, Oid caller, OutboxConsumer *consumer, OutboxJob *job)
{
	static OutboxPlan find = {
		FOUND_COLUMNS
		"FROM outbox.jobs j JOIN outbox.subscriptions s ON s.id OPERATOR(pg_catalog.=) j.subscription_id"
		" WHERE j.id OPERATOR(pg_catalog.=) $1 AND j.done_at IS NULL FOR NO KEY UPDATE OF j",
		1, {INT8OID}, NULL
	};
	Datum		value = Int64GetDatum(id);

	outbox_settle_job(id, 0);
	if (outbox_execute(&find, &value, NULL, SPI_OK_SELECT) == 0)
		return false;
	read_found(consumer, job);
	outbox_check_consumer(consumer, caller);
	outbox_hint_note_abort(consumer->id, job->due_at, outbox_handler_owner(consumer));
	return true;
}

/*
 * Set a job aside that is locked and has had its last attempt: it is dead.  That
 * is said by a WARNING, and by an event, which the relay announces.  Events of
 * the extension's own raise no alert.
 */
void
outbox_bury_job(const OutboxConsumer *consumer, OutboxJob *job, const char *error)
{
	static OutboxPlan bury = {
		"UPDATE outbox.jobs j SET dead_at = $2, last_error = $3, claim = NULL"
		" FROM (SELECT $1 AS id) x LEFT JOIN outbox.events e ON e.seq OPERATOR(pg_catalog.=) $4"
		" WHERE j.id OPERATOR(pg_catalog.=) x.id RETURNING e.type, e.subject, e.scope",
		4, {INT8OID, TIMESTAMPTZOID, TEXTOID, INT8OID}, NULL
	};
	Datum		values[4];
	char	   *type;
	char	   *subject;
	char	   *scope;

	values[0] = Int64GetDatum(job->id);
	values[1] = TimestampTzGetDatum(GetCurrentTimestamp());
	values[2] = CStringGetTextDatum(outbox_clip(error, MAX_STORED_ERROR));
	values[3] = Int64GetDatum(job->seq);
	if (outbox_execute(&bury, values, NULL, SPI_OK_UPDATE_RETURNING) != 1)
		elog(ERROR, "job " INT64_FORMAT " could not be set aside", job->id);
	type = outbox_spi_string(0, 1);
	subject = outbox_spi_string(0, 2);
	scope = outbox_spi_string(0, 3);
	if (consumer->ordered && job->keyed)
		outbox_free_subject(consumer, job->subject_key, 0);
	if (type == NULL || strncmp(type, "outbox.", 7) != 0)
		outbox_record_dead(consumer->name, job->id, job->seq, job->attempt, type, subject, scope,
						   error);
	ereport(WARNING,
			(errcode(ERRCODE_WARNING),
			 errmsg_plural("outbox job " INT64_FORMAT " of subscription \"%s\" is dead after %d attempt",
						   "outbox job " INT64_FORMAT " of subscription \"%s\" is dead after %d attempts",
						   job->attempt, job->id, consumer->name, job->attempt),
			 errhint("Mend the cause, then call outbox.retry(" INT64_FORMAT ").", job->id)));
}

/* Put a job that is locked back in line. */
static void
put_back(const OutboxConsumer *consumer, const OutboxJob *job, TimestampTz due, const char *error,
		 int attempts)
{
	static OutboxPlan put = {
		"UPDATE outbox.jobs SET due_at = $2, last_error = COALESCE($3, last_error), attempts = $4, claim = NULL"
		" WHERE ctid OPERATOR(pg_catalog.=) $1",
		4, {TIDOID, TIMESTAMPTZOID, TEXTOID, INT4OID}, NULL
	};
	Datum		values[4];
	char		nulls[4] = {' ', ' ', ' ', ' '};

	values[0] = PointerGetDatum(&job->tid);
	values[1] = TimestampTzGetDatum(due);
	values[2] = (Datum) 0;
	if (error != NULL)
		values[2] = CStringGetTextDatum(outbox_clip(error, MAX_STORED_ERROR));
	else
		nulls[2] = 'n';
	values[3] = Int32GetDatum(attempts);
	if (outbox_execute(&put, values, nulls, SPI_OK_UPDATE) != 1)
		elog(ERROR, "job " INT64_FORMAT " could not be put back", job->id);
	outbox_hint_note(consumer->id, due, outbox_handler_owner(consumer));
	if (consumer->ordered && job->keyed)
		move_older(consumer, job->subject_key, job->id, GetCurrentTimestamp());
}

/*
 * End an attempt that failed.  The job waits as long as retry_in says, in us, or
 * as its subscription has it; after its last attempt, or when this is said to
 * be final, it is dead.  Returns when it is due again, or 0.
 */
TimestampTz
outbox_fail_job(int64 id, int64 claim, Oid caller, const char *error, int64 retry_in, bool final)
{
	OutboxConsumer consumer;
	OutboxJob	job;
	TimestampTz due;

	find_leased(id, claim, caller, &consumer, &job);
	if (final || job.attempt >= consumer.max_attempts)
	{
		outbox_bury_job(&consumer, &job, error);
		return 0;
	}
	if (retry_in == OUTBOX_RETRY_SCHEDULE)
		retry_in = outbox_retry_wait_us(&consumer, job.attempt);
	due = GetCurrentTimestamp() + retry_in;
	put_back(&consumer, &job, due, error, job.attempt);
	return due;
}

/* Put a job back in line after a time, in us; the attempt does not count. */
bool
outbox_release_job(int64 id, int64 claim, Oid caller, int64 retry_in)
{
	OutboxConsumer consumer;
	OutboxJob	job;

	find_leased(id, claim, caller, &consumer, &job);
	put_back(&consumer, &job, GetCurrentTimestamp() + retry_in, NULL, Max(job.attempt - 1, 0));
	return true;
}

PG_FUNCTION_INFO_V1(outbox_fail);

/* outbox.fail() */
Datum
outbox_fail(PG_FUNCTION_ARGS)
{
	OutboxOwnerContext context;
	int64		retry_in = OUTBOX_RETRY_SCHEDULE;
	char	   *error;
	TimestampTz due;

	outbox_check_not_null(fcinfo, 0, "job");
	outbox_check_not_null(fcinfo, 1, "claim");
	outbox_check_not_null(fcinfo, 4, "final");
	error = PG_ARGISNULL(2) ? pstrdup("") : text_to_cstring(PG_GETARG_TEXT_PP(2));
	if (!PG_ARGISNULL(3))
		retry_in = outbox_interval_us(PG_GETARG_INTERVAL_P(3), "retry_in", true);
	outbox_begin_call(&context);
	due = outbox_fail_job(PG_GETARG_INT64(0), PG_GETARG_INT64(1), context.userid, error,
						  retry_in, PG_GETARG_BOOL(4));
	outbox_end_change(&context);
	if (due == 0)
		PG_RETURN_NULL();
	PG_RETURN_TIMESTAMPTZ(due);
}

PG_FUNCTION_INFO_V1(outbox_release);

/* outbox.release() */
Datum
outbox_release(PG_FUNCTION_ARGS)
{
	OutboxOwnerContext context;
	int64		retry_in;
	bool		result;

	outbox_check_not_null(fcinfo, 0, "job");
	outbox_check_not_null(fcinfo, 1, "claim");
	outbox_check_not_null(fcinfo, 2, "retry_in");
	retry_in = outbox_interval_us(PG_GETARG_INTERVAL_P(2), "retry_in", true);
	outbox_begin_call(&context);
	result = outbox_release_job(PG_GETARG_INT64(0), PG_GETARG_INT64(1), context.userid, retry_in);
	outbox_end_change(&context);
	PG_RETURN_BOOL(result);
}

/* The lease that an argument gives, in us; null: that of the subscription */
static int64
lease_argument(FunctionCallInfo fcinfo, int n)
{
	return PG_ARGISNULL(n) ? 0 : outbox_interval_us(PG_GETARG_INTERVAL_P(n), "lease", false);
}

PG_FUNCTION_INFO_V1(outbox_extend);

/* outbox.extend(): let the lease of a job end so long from now. */
Datum
outbox_extend(PG_FUNCTION_ARGS)
{
	static OutboxPlan extend = {
		"UPDATE outbox.jobs SET due_at = $2 WHERE ctid OPERATOR(pg_catalog.=) $1",
		2, {TIDOID, TIMESTAMPTZOID}, NULL
	};
	OutboxOwnerContext context;
	OutboxConsumer consumer;
	OutboxJob	job;
	TimestampTz until;
	Datum		values[2];
	int64		lease;

	outbox_check_not_null(fcinfo, 0, "job");
	outbox_check_not_null(fcinfo, 1, "claim");
	lease = lease_argument(fcinfo, 2);
	outbox_begin_call(&context);
	find_leased(PG_GETARG_INT64(0), PG_GETARG_INT64(1), context.userid, &consumer, &job);
	until = GetCurrentTimestamp() + (lease > 0 ? lease : consumer.lease);
	values[0] = PointerGetDatum(&job.tid);
	values[1] = TimestampTzGetDatum(until);
	outbox_execute(&extend, values, NULL, SPI_OK_UPDATE);
	outbox_hint_note(consumer.id, until, outbox_handler_owner(&consumer));
	if (consumer.ordered && job.keyed)
		move_older(&consumer, job.subject_key, job.id, until);
	outbox_end_change(&context);
	PG_RETURN_TIMESTAMPTZ(until);
}

/* See to the subjects of jobs of which the leases were prolonged: the last result */
static void
move_all_older(const OutboxConsumer *consumer, int n, TimestampTz until)
{
	int64	   *ids = palloc(Max(n, 1) * sizeof(int64));
	int64	   *keys = palloc(Max(n, 1) * sizeof(int64));
	int			nkeyed = 0;
	int			i;

	for (i = 0; i < n; i++)
	{
		bool		isnull;

		ids[nkeyed] = DatumGetInt64(outbox_spi_value(i, 1, &isnull));
		keys[nkeyed] = DatumGetInt64(outbox_spi_value(i, 2, &isnull));
		nkeyed += !isnull;
	}
	for (i = 0; i < nkeyed; i++)
		move_older(consumer, keys[i], ids[i], until);
}

/*
 * Prolong the leases of a claim that are kept in memory, and return how many they
 * are.  *rows: others may be in their rows.
 */
static int
extend_in_memory(int64 claim, int64 lease, Oid caller, bool *rows)
{
	Oid			relid = outbox_jobs_relid();
	OutboxConsumer consumer;
	TimestampTz until;
	int			n;

	*rows = true;
	if (!outbox_consumer_of_lease(relid, claim, caller, &consumer))
		return 0;
	until = GetCurrentTimestamp() + (lease > 0 ? lease : consumer.lease);
	n = outbox_lease_prolong(relid, claim, until, rows);
	outbox_hint_note(consumer.id, until, outbox_handler_owner(&consumer));
	return n;
}

PG_FUNCTION_INFO_V1(outbox_extend_many);

/*
 * outbox.extend_many(): the same for all jobs of a claim, those that it holds;
 * returns how many they are.
 */
Datum
outbox_extend_many(PG_FUNCTION_ARGS)
{
	static OutboxPlan find = {
		FOUND_COLUMNS
		"FROM outbox.jobs j JOIN outbox.subscriptions s ON s.id OPERATOR(pg_catalog.=) j.subscription_id"
		" WHERE j.claim OPERATOR(pg_catalog.=) $1 AND j.done_at IS NULL AND j.dead_at IS NULL"
		" ORDER BY j.due_at LIMIT 1",
		1, {INT8OID}, NULL
	};
	static OutboxPlan extend = {
		"UPDATE outbox.jobs SET due_at = $3 WHERE claim OPERATOR(pg_catalog.=) $1"
		" AND subscription_id OPERATOR(pg_catalog.=) $2 AND done_at IS NULL AND dead_at IS NULL"
		" RETURNING id, subject_key",
		3, {INT8OID, INT4OID, TIMESTAMPTZOID}, NULL
	};
	OutboxOwnerContext context;
	OutboxConsumer consumer;
	OutboxJob	job;
	TimestampTz until;
	Datum		values[3];
	int64		lease;
	uint64		n = 0;
	int			in_memory;
	bool		rows;

	outbox_check_not_null(fcinfo, 0, "claim");
	lease = lease_argument(fcinfo, 1);
	outbox_begin_call(&context);
	in_memory = extend_in_memory(PG_GETARG_INT64(0), lease, context.userid, &rows);
	values[0] = PG_GETARG_DATUM(0);
	if (rows && outbox_execute(&find, values, NULL, SPI_OK_SELECT) > 0)
	{
		read_found(&consumer, &job);
		outbox_check_consumer(&consumer, context.userid);
		outbox_hint_note_abort(consumer.id, job.due_at, outbox_handler_owner(&consumer));
		until = GetCurrentTimestamp() + (lease > 0 ? lease : consumer.lease);
		values[1] = Int32GetDatum(consumer.id);
		values[2] = TimestampTzGetDatum(until);
		n = outbox_execute(&extend, values, NULL, SPI_OK_UPDATE_RETURNING);
		outbox_hint_note(consumer.id, until, outbox_handler_owner(&consumer));
		if (consumer.ordered)
			move_all_older(&consumer, (int) n, until);
	}
	outbox_end_change(&context);
	PG_RETURN_INT32((int32) n + in_memory);
}
