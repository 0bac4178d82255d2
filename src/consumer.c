/*-------------------------------------------------------------------------
 *
 * consumer.c
 *		What all who work with the jobs of a subscription share: finding it,
 *		who may do so, its times, and how statements about jobs are planned.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "catalog/pg_type.h"
#include "common/pg_prng.h"
#include "jit/jit.h"
#include "miscadmin.h"
#include "optimizer/cost.h"
#include "optimizer/optimizer.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/jsonpath.h"
#include "utils/plancache.h"

#define MAX_INTERVAL_US ((double) 366 * USECS_PER_DAY)

/* Length of an interval in us; months count 30 days, as in comparisons */
static double
interval_length(const Interval *span)
{
	return (double) span->time + (double) span->day * USECS_PER_DAY +
		(double) span->month * DAYS_PER_MONTH * USECS_PER_DAY;
}

/* A time that a caller gives, in us; refuses what is no length of time. */
int64
outbox_interval_us(const Interval *interval, const char *argument, bool zero_ok)
{
	double		length = interval_length(interval);

	if (length < 0 || (length == 0 && !zero_ok))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 zero_ok ? errmsg("%s must not be negative", argument) :
				 errmsg("%s must be positive", argument)));
	if (length > MAX_INTERVAL_US)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not be longer than a year", argument)));
	return (int64) length;
}

/* A time of a subscription, whatever somebody may have written there, in us */
static int64
stored_us(int row, int column)
{
	bool		isnull;
	Datum		value = outbox_spi_value(row, column, &isnull);
	double		length = isnull ? 0 : interval_length(DatumGetIntervalP(value));

	return (int64) Min(Max(length, 0), MAX_INTERVAL_US);
}

/*
 * Read OUTBOX_CONSUMER_COLUMNS from a row of the last result, from a column on,
 * into the current memory context.
 */
void
outbox_consumer_from_row(int row, int column, OutboxConsumer *consumer)
{
	bool		isnull;
	Datum		value;

	consumer->id = DatumGetInt32(outbox_spi_value(row, column, &isnull));
	consumer->name = outbox_spi_string(row, column + 1);
	consumer->owner = pstrdup(NameStr(*DatumGetName(outbox_spi_value(row, column + 2, &isnull))));
	consumer->owner_oid = DatumGetObjectId(outbox_spi_value(row, column + 3, &isnull));
	consumer->paused = DatumGetBool(outbox_spi_value(row, column + 4, &isnull));
	consumer->ordered = DatumGetBool(outbox_spi_value(row, column + 5, &isnull));
	consumer->handler = outbox_spi_string(row, column + 6);
	value = outbox_spi_value(row, column + 7, &isnull);
	consumer->handler_oid = isnull ? InvalidOid : DatumGetObjectId(value);
	consumer->max_attempts = DatumGetInt32(outbox_spi_value(row, column + 8, &isnull));
	consumer->retry_min = stored_us(row, column + 9);
	consumer->retry_max = stored_us(row, column + 10);
	consumer->lease = stored_us(row, column + 11);
	value = outbox_spi_value(row, column + 12, &isnull);
	consumer->filter = isnull ? NULL : DatumGetJsonPathPCopy(value);
}

/*
 * Find a subscription by its name, or by its id when that is NULL; false when
 * there is none.
 */
bool
outbox_find_consumer(const char *name, int32 id, OutboxConsumer *consumer)
{
	static OutboxPlan by_name = {
		"SELECT" OUTBOX_CONSUMER_COLUMNS
		"FROM outbox.subscriptions s WHERE s.name OPERATOR(pg_catalog.=) $1",
		1, {TEXTOID}, NULL
	};
	static OutboxPlan by_id = {
		"SELECT" OUTBOX_CONSUMER_COLUMNS
		"FROM outbox.subscriptions s WHERE s.id OPERATOR(pg_catalog.=) $1",
		1, {INT4OID}, NULL
	};
	Datum		value = name ? CStringGetTextDatum(name) : Int32GetDatum(id);

	if (outbox_execute(name ? &by_name : &by_id, &value, NULL, SPI_OK_SELECT) == 0)
		return false;
	outbox_consumer_from_row(0, 1, consumer);
	return true;
}

/* Refuse who may not work with the jobs of a subscription. */
void
outbox_check_consumer(const OutboxConsumer *consumer, Oid caller)
{
	OutboxSubscriptionRow row;

	row.id = consumer->id;
	row.owner = consumer->owner;
	row.owner_oid = consumer->owner_oid;
	row.paused = consumer->paused;
	outbox_check_may_change(consumer->name, &row, caller);
}

/* Find a subscription that the caller may work with; raises what keeps it. */
void
outbox_consumer_by_name(const char *name, Oid caller, OutboxConsumer *consumer)
{
	if (!outbox_find_consumer(name, 0, consumer))
		outbox_no_such_subscription(name);
	outbox_check_consumer(consumer, caller);
}

/* Whose runners handle the jobs of a subscription?  InvalidOid: nobody's. */
Oid
outbox_handler_owner(const OutboxConsumer *consumer)
{
	return consumer->handler ? consumer->owner_oid : InvalidOid;
}

/*
 * Wait after a number of attempts, in us: retry_min doubling to retry_max, plus
 * up to a tenth at random, so that what failed together does not come back
 * together.  Without overflow, whatever the number.
 */
int64
outbox_retry_wait_us(const OutboxConsumer *consumer, int attempts)
{
	int64		wait = consumer->retry_min;

	while (--attempts > 0 && wait > 0 && wait < consumer->retry_max)
		wait *= 2;
	wait = Min(wait, Max(consumer->retry_max, consumer->retry_min));
	return wait + (int64) (wait * 0.1 * pg_prng_double(&pg_global_prng_state));
}

/*
 * Have the statements that follow planned as walks along an index, whatever
 * the session has set: a plan that is made while the tables are small is kept,
 * and must not be a scan of the whole when they have grown.  Undone with the
 * GUC level of outbox_become_owner.
 */
void
outbox_pin_planner(void)
{
#define PIN(name, variable, wanted) \
	do { \
		if ((variable) != (wanted)) \
			(void) set_config_option(name, (wanted) ? "on" : "off", PGC_USERSET, PGC_S_SESSION, \
									 GUC_ACTION_SAVE, true, 0, false); \
	} while (0)

	PIN("enable_seqscan", enable_seqscan, false);
	PIN("enable_bitmapscan", enable_bitmapscan, false);
	PIN("enable_hashjoin", enable_hashjoin, false);
	PIN("enable_mergejoin", enable_mergejoin, false);
	PIN("enable_indexscan", enable_indexscan, true);
	PIN("enable_nestloop", enable_nestloop, true);
	PIN("enable_tidscan", enable_tidscan, true);
	PIN("enable_sort", enable_sort, true);
	PIN("jit", jit_enabled, false);
#undef PIN
	if (plan_cache_mode != PLAN_CACHE_MODE_FORCE_GENERIC_PLAN)
		(void) set_config_option("plan_cache_mode", "force_generic_plan", PGC_USERSET,
								 PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
}

/* Begin a call: as the owner of the extension, connected to SPI. */
void
outbox_begin_call(OutboxOwnerContext *context)
{
	outbox_become_owner(context);
	outbox_pin_planner();
	outbox_spi_connect();
}
