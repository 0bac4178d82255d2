/*-------------------------------------------------------------------------
 *
 * poll.c
 *		Asking whether there is something to do, or to wait for: await_jobs,
 *		await_idle and is_current.
 *
 * The procedures wait like outbox.await_fanout (await.c): between two looks they
 * hold no snapshot, no lock and no transaction id.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"

/* Look at shared memory again after so long, in ms, even when not woken */
#define LOOK_AGAIN_MS 1000

/* Waits between two looks of await_idle, in ms */
#define IDLE_WAIT_MIN 10
#define IDLE_WAIT_MAX 500

/* Unmarked events that is_current looks at before it says no */
#define MAX_CURRENT_EVENTS 1000

/*
 * A look at the jobs of a subscription: is one due?  If not, *again is when to
 * look again whatever the hints say.  Connected to SPI by itself, so that a long
 * wait gathers no results.
 */
static bool
look_for_jobs(const char *name, int32 *id, bool *paused, TimestampTz *again)
{
	OutboxOwnerContext context;
	OutboxConsumer consumer;
	bool		result = false;

	outbox_begin_call(&context);
	outbox_consumer_by_name(name, context.userid, &consumer);
	*id = consumer.id;
	*paused = consumer.paused;
	*again = DT_NOEND;

	/* before the look, so that nothing posted meanwhile is missed */
	outbox_hint_watch(consumer.id);
	if (!consumer.paused)
		result = outbox_look_for_jobs(&consumer, again);
	*again = Min(*again, GetCurrentTimestamp() + (int64) outbox_sweep_interval * 1000);
	outbox_end_change(&context);
	return result;
}

/* Sleep for a time, in ms, or until somebody wakes us; holds nothing. */
static void
sleep_without_snapshot(int64 ms, const char *event)
{
	InvalidateCatalogSnapshot();
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, (long) ms,
					 outbox_wait_event(event));
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}

/*
 * Wait until a job can be claimed, or the time is up.
 *
 * A look may leave the hint as it was, although it found nothing: in a
 * transaction with one snapshot for all of it.  Then the waits between looks
 * grow, until somebody wakes us.  While the subscription is paused, the hint
 * says nothing at all.
 */
static bool
await_jobs(const char *name, TimestampTz until)
{
	int64		pause = IDLE_WAIT_MIN;

	for (;;)
	{
		TimestampTz now;
		TimestampTz again;
		TimestampTz next;
		bool		paused;
		int32		id;
		bool		ready = look_for_jobs(name, &id, &paused, &again);

		SPI_commit();
		if (ready)
			return true;
		now = GetCurrentTimestamp();
		do
		{
			int64		wait = LOOK_AGAIN_MS;

			if (now >= until)
				return false;
			next = Min(outbox_hint_next(id), again);
			if (next > now)
				pause = IDLE_WAIT_MIN;
			if (!paused && next > now)
				wait = Min(wait, TimestampDifferenceMilliseconds(now, next));
			else if (!paused)
			{
				wait = Min(wait, pause);
				pause = Min(pause * 2, LOOK_AGAIN_MS);
			}
			sleep_without_snapshot(Min(wait, TimestampDifferenceMilliseconds(now, until)),
								   "OutboxAwaitJobs");
			now = GetCurrentTimestamp();
			next = Min(outbox_hint_next(id), again);
		} while (!paused && now < until && now < next);
	}
}

PG_FUNCTION_INFO_V1(outbox_await_jobs);

/*
 * outbox.await_jobs(): the long poll.  Who is told that there is a job may find
 * that another has claimed it.
 */
Datum
outbox_await_jobs(PG_FUNCTION_ARGS)
{
	TimestampTz until;
	char	   *name;
	bool		ready;

	outbox_await_check(fcinfo, "outbox.await_jobs");
	outbox_check_not_null(fcinfo, 0, "subscription");
	outbox_check_not_null(fcinfo, 1, "timeout");
	name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	until = GetCurrentTimestamp() + outbox_await_us(PG_GETARG_INTERVAL_P(1));
	if (SPI_connect_ext(SPI_OPT_NONATOMIC) != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect_ext failed");
	PG_TRY();
	{
		ready = await_jobs(name, until);
	}
	PG_FINALLY();
	{
		outbox_hint_unwatch();
	}
	PG_END_TRY();
	SPI_finish();
	return outbox_await_result(fcinfo, BoolGetDatum(ready));
}

/*
 * Is everything done?  No event is unmarked, and no job of the subscription, or
 * of all that are not paused and that the caller may work with, is unfinished.
 */
static bool
look_idle(const char *name)
{
	static OutboxPlan unmarked = {
		"SELECT 1 FROM outbox.events WHERE fanned_out_at IS NULL AND poisoned_at IS NULL"
		" ORDER BY seq LIMIT 1", 0, {0}, NULL
	};
	static OutboxPlan busy = {
		"SELECT" OUTBOX_CONSUMER_COLUMNS
		"FROM outbox.subscriptions s WHERE COALESCE(s.name OPERATOR(pg_catalog.=) $1, s.paused_at IS NULL)"
		" AND EXISTS (SELECT FROM outbox.jobs j WHERE j.subscription_id OPERATOR(pg_catalog.=) s.id"
		" AND j.done_at IS NULL AND j.dead_at IS NULL)",
		1, {TEXTOID}, NULL
	};
	OutboxOwnerContext context;
	OutboxConsumer consumer;
	Datum		value = (Datum) 0;
	bool		idle;
	uint64		n;
	uint64		i;

	outbox_begin_call(&context);
	if (name != NULL)
	{
		outbox_consumer_by_name(name, context.userid, &consumer);
		value = CStringGetTextDatum(name);
	}
	idle = outbox_execute(&unmarked, NULL, NULL, SPI_OK_SELECT) == 0;
	n = idle ? outbox_execute(&busy, &value, name ? " " : "n", SPI_OK_SELECT) : 0;
	for (i = 0; i < n && idle; i++)
	{
		outbox_consumer_from_row(i, 1, &consumer);
		idle = !outbox_may_change(consumer.owner, consumer.owner_oid, context.userid);
	}
	outbox_end_change(&context);
	return idle;
}

PG_FUNCTION_INFO_V1(outbox_await_idle);

/* outbox.await_idle(): wait until everything is done, for drains and tests. */
Datum
outbox_await_idle(PG_FUNCTION_ARGS)
{
	char	   *name = NULL;
	int64		wait = IDLE_WAIT_MIN;
	TimestampTz until;
	bool		idle;

	outbox_await_check(fcinfo, "outbox.await_idle");
	outbox_check_not_null(fcinfo, 1, "timeout");
	if (!PG_ARGISNULL(0))
		name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	until = GetCurrentTimestamp() + outbox_await_us(PG_GETARG_INTERVAL_P(1));
	if (SPI_connect_ext(SPI_OPT_NONATOMIC) != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect_ext failed");
	for (;;)
	{
		int64		remaining;

		idle = look_idle(name);
		SPI_commit();
		remaining = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), until);
		if (idle || remaining <= 0)
			break;
		sleep_without_snapshot(Min(remaining, wait), "OutboxAwaitIdle");
		wait = Min(wait * 2, IDLE_WAIT_MAX);
	}
	SPI_finish();
	return outbox_await_result(fcinfo, BoolGetDatum(idle));
}

PG_FUNCTION_INFO_V1(outbox_is_current);

/*
 * outbox.is_current(): has a subscription handled everything that was recorded
 * about a subject?  False when it may not have: while an event of that scope and
 * subject waits to be fanned out or is poisoned, whatever its type, or a job for
 * it has not been completed.  Too many events that wait are too many to look at,
 * which is said to be false too.  One statement, so one snapshot.
 */
Datum
outbox_is_current(PG_FUNCTION_ARGS)
{
	static OutboxPlan ask = {
		"SELECT NOT EXISTS (SELECT FROM outbox.jobs j WHERE j.subscription_id OPERATOR(pg_catalog.=) $1"
		" AND j.subject_key OPERATOR(pg_catalog.=) $2 AND j.done_at IS NULL)"
		" AND NOT EXISTS (SELECT FROM (SELECT e.subject, e.scope, pg_catalog.row_number() OVER () AS n"
		" FROM (SELECT subject, scope FROM outbox.events"
		" WHERE fanned_out_at IS NULL AND poisoned_at IS NULL ORDER BY seq LIMIT $5) e"
		" UNION ALL SELECT p.subject, p.scope, pg_catalog.row_number() OVER ()"
		" FROM (SELECT subject, scope FROM outbox.events"
		" WHERE poisoned_at IS NOT NULL AND fanned_out_at IS NULL ORDER BY seq LIMIT $5) p) u"
		" WHERE u.n OPERATOR(pg_catalog.=) $5 OR (u.subject OPERATOR(pg_catalog.=) $3"
		" AND COALESCE(u.scope OPERATOR(pg_catalog.=) $4, u.scope IS NULL AND $4 IS NULL)))",
		5, {INT4OID, INT8OID, TEXTOID, TEXTOID, INT8OID}, NULL
	};
	static OutboxPlan keyed = {
		"SELECT ordered OR coalescing FROM outbox.subscriptions WHERE id OPERATOR(pg_catalog.=) $1",
		1, {INT4OID}, NULL
	};
	OutboxOwnerContext context;
	OutboxConsumer consumer;
	char		nulls[5] = {' ', ' ', ' ', ' ', ' '};
	Datum		values[5];
	char	   *name;
	char	   *subject;
	char	   *scope = NULL;
	bool		isnull;
	bool		result;

	outbox_check_not_null(fcinfo, 0, "subscription");
	outbox_check_not_null(fcinfo, 1, "subject");
	name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	subject = text_to_cstring(PG_GETARG_TEXT_PP(1));
	if (!PG_ARGISNULL(2))
		scope = text_to_cstring(PG_GETARG_TEXT_PP(2));

	outbox_begin_call(&context);
	outbox_consumer_by_name(name, context.userid, &consumer);
	values[0] = Int32GetDatum(consumer.id);
	outbox_execute(&keyed, values, NULL, SPI_OK_SELECT);
	if (!DatumGetBool(outbox_spi_value(0, 1, &isnull)))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("subscription \"%s\" is neither ordered nor coalescing", name),
				 errhint("Only those know their jobs by subject.")));
	values[1] = Int64GetDatum(outbox_subject_key(scope, subject));
	values[2] = PG_GETARG_DATUM(1);
	values[3] = PG_GETARG_DATUM(2);
	if (scope == NULL)
		nulls[3] = 'n';
	values[4] = Int64GetDatum(MAX_CURRENT_EVENTS);
	outbox_execute(&ask, values, nulls, SPI_OK_SELECT);
	result = DatumGetBool(outbox_spi_value(0, 1, &isnull));
	outbox_end_change(&context);
	PG_RETURN_BOOL(result);
}

PG_FUNCTION_INFO_V1(outbox_done_total);

/* outbox.done_total(): for outbox.stat_subscription */
Datum
outbox_done_total(PG_FUNCTION_ARGS)
{
	PG_RETURN_INT64(outbox_hint_done(PG_GETARG_INT32(0)));
}
