/*-------------------------------------------------------------------------
 *
 * retention.c
 *		What is kept no longer, and deleting it in small steps.
 *
 * A cycle looks at four things one after another: jobs of subscriptions that
 * are gone, dead jobs, jobs that are done, and events with their jobs.  A step
 * is what is done of it in one transaction: it looks until it has something to
 * delete, or for a few milliseconds.
 *
 * Nothing is deleted but rows that are locked, and found deletable in the
 * version that is locked; rows that somebody else holds are left to a later
 * cycle, so nobody is waited for.  An event goes only when all of its jobs are
 * locked too.  Who puts a finished job back in line updates it, and so either
 * has its lock or finds it deleted; who names a new job in an event updates the
 * event.
 *
 * Walks go by key from where they stopped.  What is kept although it is old
 * (events whose jobs are not finished), and index entries of what was deleted
 * while a snapshot keeps them from being removed, would be walked over in
 * every cycle; so the next cycle usually begins where the last one came to
 * what is too young, and only now and then at the bottom: as often as these
 * walks take a hundredth of the time.
 *
 *-------------------------------------------------------------------------
 */
#include "retention.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/timestamp.h"

#define LOOK_US 5000			/* a step without anything to delete */
#define YOUNG_ROWS 1000			/* so many in a row: all others are too */
#define WASTE_SHARE 100			/* of the time that walks over what is kept
								 * may take */
#define BOTTOM_US USECS_PER_HOUR	/* between two walks from the very bottom */

/* The time before which something must have ended; retention in s, not -1 */
TimestampTz
outbox_retention_cutoff(const OutboxRetention *state, int retention)
{
	return state->began - (int64) retention * USECS_PER_SEC;
}

/* May anything be deleted: is this database armed and not stopped? */
bool
outbox_retention_allowed(void)
{
	static OutboxPlan armed = {
		"SELECT FROM outbox.armed a"
		" WHERE a.database OPERATOR(pg_catalog.=) $1 AND a.stopped_at IS NULL",
		1, {OIDOID}, NULL
	};
	Datum		value = ObjectIdGetDatum(MyDatabaseId);

	return outbox_execute(&armed, &value, NULL, SPI_OK_SELECT) > 0;
}

/*
 * Begin the walk of the phase at hand.  Times in the future come from a clock
 * that was set back.
 */
static void
begin_walk(OutboxRetention *state, TimestampTz now)
{
	OutboxWalk *walk = &state->walks[state->phase];

	walk->full = now < walk->ended_at || now - walk->ended_at >= WASTE_SHARE * walk->wasted;
	if (walk->full && (now < walk->bottom_at || now - walk->bottom_at >= BOTTOM_US))
	{
		walk->lowest = PG_INT64_MIN;
		walk->bottom_at = now;
	}
	if (walk->full)
		walk->wasted = 0;
	walk->kept = false;
	walk->young = 0;

	/* the first two go by subscription, of which there are few */
	if (state->phase <= OUTBOX_RETENTION_DEAD)
		walk->after = PG_INT32_MIN;
	else
		walk->after = walk->full ? walk->lowest : walk->front;
}

/* Begin a cycle.  A state of zeros knows nothing yet. */
void
outbox_retention_begin(OutboxRetention *state)
{
	state->phase = OUTBOX_RETENTION_GONE;
	state->began = GetCurrentTimestamp();
	state->subscription = 0;
	state->careful = false;
	state->failures = 0;
	state->events = 0;
	state->jobs = 0;
	begin_walk(state, state->began);
}

/*
 * Keep account of a row that a walk has come to, in the order of the keys.
 * Returns false when everything behind it is too young as well.
 */
bool
outbox_walk_row(OutboxWalk *walk, int64 key, bool young, bool deletable)
{
	if (walk->full && !walk->kept && !deletable)
	{
		walk->lowest = key - 1;
		walk->kept = true;
	}
	if (!young)
		walk->young = 0;
	else if (walk->young++ == 0)
		walk->front = walk->after;
	walk->after = key;
	return walk->young < YOUNG_ROWS;
}

/* A walk has come to its end. */
static void
end_walk(OutboxWalk *walk)
{
	if (walk->young == 0)
		walk->front = walk->after;
	if (walk->full && !walk->kept)
		walk->lowest = walk->front;
	if (walk->full)
		walk->ended_at = GetCurrentTimestamp();
}

/* Delete jobs by their tids, which are locked; returns how many. */
int64
outbox_delete_jobs(Datum *tids, int n)
{
	static OutboxPlan delete = {
		"DELETE FROM outbox.jobs WHERE ctid OPERATOR(pg_catalog.=) ANY ($1)",
		1, {TIDARRAYOID}, NULL
	};
	Datum		value;

	if (n == 0)
		return 0;
	value = outbox_make_array(tids, NULL, n, TIDOID);
	return (int64) outbox_execute(&delete, &value, NULL, SPI_OK_DELETE);
}

/*
 * Delete some jobs of the subscription at hand: those that died before a time,
 * or those that are not finished.  False when there are no more of them.
 */
static bool
delete_of_subscription(OutboxRetention *state, TimestampTz before)
{
#define OF_SUBSCRIPTION(column) \
		"SELECT j.ctid, j." column ", j.id FROM outbox.jobs j" \
		" WHERE j.subscription_id OPERATOR(pg_catalog.=) $1" \
		" AND ROW(j." column ", j.id) OPERATOR(pg_catalog.>) ROW($2, $3)" \
		" AND j." column " OPERATOR(pg_catalog.<=) $4 AND j.done_at IS NULL AND j.dead_at IS "
#define OF_SUBSCRIPTION_END(column) \
		" ORDER BY j." column ", j.id LIMIT $5 FOR UPDATE SKIP LOCKED"
	static OutboxPlan dead = {
		OF_SUBSCRIPTION("dead_at") "NOT NULL" OF_SUBSCRIPTION_END("dead_at"),
		5, {INT4OID, TIMESTAMPTZOID, INT8OID, TIMESTAMPTZOID, INT8OID}, NULL
	};
	static OutboxPlan unfinished = {
		OF_SUBSCRIPTION("due_at") "NULL" OF_SUBSCRIPTION_END("due_at"),
		5, {INT4OID, TIMESTAMPTZOID, INT8OID, TIMESTAMPTZOID, INT8OID}, NULL
	};
	Datum		values[5];
	Datum	   *tids;
	bool		isnull;
	int			n;
	int			i;

	values[0] = Int32GetDatum(state->subscription);
	values[1] = TimestampTzGetDatum(state->at);
	values[2] = Int64GetDatum(state->id);
	values[3] = TimestampTzGetDatum(before);
	values[4] = Int64GetDatum(OUTBOX_STEP_JOBS);
	n = (int) outbox_execute(state->dead ? &dead : &unfinished, values, NULL, SPI_OK_SELECT);
	tids = palloc((n + 1) * sizeof(Datum));
	for (i = 0; i < n; i++)
		tids[i] = outbox_spi_value(i, 1, &isnull);
	if (n > 0)
	{
		state->at = DatumGetTimestampTz(outbox_spi_value(n - 1, 2, &isnull));
		state->id = DatumGetInt64(outbox_spi_value(n - 1, 3, &isnull));
	}
	state->jobs += outbox_delete_jobs(tids, n);
	return n == OUTBOX_STEP_JOBS;
}

/*
 * Go on to the next subscription that a statement finds; false when there is
 * none.  It looks at some subscriptions at a time, and returns the last of
 * them, whether there may be more, and the one that is found.
 */
static bool
next_subscription(OutboxRetention *state, OutboxPlan *find, Datum *values)
{
	OutboxWalk *walk = &state->walks[state->phase];
	int64		last;
	int32		found;
	bool		more;
	bool		isnull;

	values[0] = Int64GetDatum(walk->after);
	outbox_execute(find, values, NULL, SPI_OK_SELECT);
	last = DatumGetInt64(outbox_spi_value(0, 1, &isnull));
	more = DatumGetBool(outbox_spi_value(0, 2, &isnull));
	found = DatumGetInt32(outbox_spi_value(0, 3, &isnull));
	SPI_freetuptable(SPI_tuptable);
	if (isnull && !more)
		return false;
	walk->after = isnull ? last : found;
	state->subscription = isnull ? 0 : found;
	return true;
}

/* The subscriptions that the next statements look at */
#define SOME_SUBSCRIPTIONS \
	"WITH s AS MATERIALIZED (SELECT s.id FROM outbox.subscriptions s" \
	" WHERE s.id OPERATOR(pg_catalog.>) $1 ORDER BY s.id LIMIT 500)," \
	" n AS MATERIALIZED (SELECT pg_catalog.count(*) OPERATOR(pg_catalog.=) 500 AS more," \
	" pg_catalog.max(s.id)::bigint AS last FROM s)"

/*
 * Jobs of subscriptions that are gone, unless they are done: then they go with
 * their events.  Such subscriptions are looked for between the ids of those
 * that are there, so that no index entry of these is in the way.
 */
static bool
step_gone(OutboxRetention *state)
{
	static OutboxPlan find = {
		SOME_SUBSCRIPTIONS
		", g AS (SELECT x.id OPERATOR(pg_catalog.+) 1 AS low,"
		" COALESCE(pg_catalog.lead(x.id) OVER (ORDER BY x.id) OPERATOR(pg_catalog.-) 1,"
		" CASE WHEN (SELECT n.more FROM n) THEN x.id ELSE 2147483647 END) AS high"
		" FROM (SELECT $1 AS id UNION ALL SELECT s.id FROM s) x)"
		"SELECT n.last, n.more, (SELECT j.id FROM g CROSS JOIN LATERAL ("
		"(SELECT j.subscription_id AS id FROM outbox.jobs j"
		" WHERE j.subscription_id OPERATOR(pg_catalog.>=) g.low"
		" AND j.subscription_id OPERATOR(pg_catalog.<=) g.high"
		" AND j.done_at IS NULL AND j.dead_at IS NULL ORDER BY j.subscription_id LIMIT 1)"
		" UNION ALL "
		"(SELECT j.subscription_id FROM outbox.jobs j"
		" WHERE j.subscription_id OPERATOR(pg_catalog.>=) g.low"
		" AND j.subscription_id OPERATOR(pg_catalog.<=) g.high"
		" AND j.done_at IS NULL AND j.dead_at IS NOT NULL ORDER BY j.subscription_id LIMIT 1)"
		") j WHERE g.low OPERATOR(pg_catalog.<=) g.high ORDER BY j.id LIMIT 1) FROM n",
		1, {INT8OID}, NULL
	};
	Datum		values[1];

	if (state->subscription == 0)
	{
		if (!state->walks[state->phase].full || !next_subscription(state, &find, values))
			return false;
		state->dead = false;
		state->at = DT_NOBEGIN;
		state->id = PG_INT64_MIN;
		if (state->subscription == 0)
			return true;
	}
	if (!delete_of_subscription(state, DT_NOEND))
	{
		if (state->dead)
			state->subscription = 0;
		state->dead = true;
		state->at = DT_NOBEGIN;
		state->id = PG_INT64_MIN;
	}
	return true;
}

/* Dead jobs */
static bool
step_dead(OutboxRetention *state)
{
	static OutboxPlan find = {
		SOME_SUBSCRIPTIONS
		"SELECT n.last, n.more, (SELECT s.id FROM s WHERE EXISTS (SELECT FROM outbox.jobs j"
		" WHERE j.subscription_id OPERATOR(pg_catalog.=) s.id"
		" AND j.dead_at OPERATOR(pg_catalog.>=) $2 AND j.dead_at OPERATOR(pg_catalog.<=) $3"
		" AND j.done_at IS NULL AND j.dead_at IS NOT NULL) ORDER BY s.id LIMIT 1) FROM n",
		3, {INT8OID, TIMESTAMPTZOID, TIMESTAMPTZOID}, NULL
	};
	OutboxWalk *walk = &state->walks[state->phase];
	TimestampTz from;
	TimestampTz before;
	Datum		values[3];

	if (outbox_dead_retention < 0)
		return false;
	from = walk->full ? DT_NOBEGIN : state->dead_until;
	before = outbox_retention_cutoff(state, outbox_dead_retention);
	if (state->subscription == 0)
	{
		values[1] = TimestampTzGetDatum(from);
		values[2] = TimestampTzGetDatum(before);
		if (!next_subscription(state, &find, values))
		{
			state->dead_until = before;
			return false;
		}
		state->dead = true;
		state->at = from;
		state->id = PG_INT64_MIN;
		if (state->subscription == 0)
			return true;
	}
	if (!delete_of_subscription(state, before))
		state->subscription = 0;
	return true;
}

/* Done and cancelled jobs, by id */
static bool
step_jobs(OutboxRetention *state)
{
	static OutboxPlan look = {
		"SELECT j.id, j.created_at OPERATOR(pg_catalog.>=) $2,"
		" j.done_at IS NOT NULL AND j.done_at OPERATOR(pg_catalog.<) $2"
		" FROM outbox.jobs j WHERE j.id OPERATOR(pg_catalog.>) $1 ORDER BY j.id LIMIT $3",
		3, {INT8OID, TIMESTAMPTZOID, INT8OID}, NULL
	};
	static OutboxPlan lock = {
		"SELECT j.ctid FROM outbox.jobs j WHERE j.id OPERATOR(pg_catalog.=) ANY ($1)"
		" AND j.done_at OPERATOR(pg_catalog.<) $2 FOR UPDATE SKIP LOCKED",
		2, {INT8ARRAYOID, TIMESTAMPTZOID}, NULL
	};
	OutboxWalk *walk = &state->walks[state->phase];
	Datum		values[3];
	Datum	   *tids;
	int64	   *ids;
	bool		more;
	bool		isnull;
	int			nrows;
	int			n = 0;
	int			i;

	if (outbox_job_retention < 0)
		return false;
	values[0] = Int64GetDatum(walk->after);
	values[1] = TimestampTzGetDatum(outbox_retention_cutoff(state, outbox_job_retention));
	values[2] = Int64GetDatum(OUTBOX_STEP_JOBS);
	nrows = (int) outbox_execute(&look, values, NULL, SPI_OK_SELECT);
	ids = palloc((nrows + 1) * sizeof(int64));
	more = (nrows == OUTBOX_STEP_JOBS);
	for (i = 0; i < nrows; i++)
	{
		int64		id = DatumGetInt64(outbox_spi_value(i, 1, &isnull));
		bool		young = DatumGetBool(outbox_spi_value(i, 2, &isnull));
		bool		deletable = DatumGetBool(outbox_spi_value(i, 3, &isnull));

		if (deletable)
			ids[n++] = id;
		more &= outbox_walk_row(walk, id, young, deletable);
	}
	SPI_freetuptable(SPI_tuptable);
	if (n > 0)
	{
		values[0] = outbox_id_array(ids, n);
		n = (int) outbox_execute(&lock, values, NULL, SPI_OK_SELECT);
		tids = palloc((n + 1) * sizeof(Datum));
		for (i = 0; i < n; i++)
			tids[i] = outbox_spi_value(i, 1, &isnull);
		state->jobs += outbox_delete_jobs(tids, n);
	}
	return more;
}

/* Number of rows deleted since the cycle began */
static int64
deleted(const OutboxRetention *state)
{
	return state->events + state->jobs;
}

/*
 * One step of a cycle: until something has been deleted, or some milliseconds
 * have passed.  False when the cycle is over.
 *
 * After an error the state must be what it was before: the walk has come past
 * rows that are there still.
 */
bool
outbox_retention_step(OutboxRetention *state)
{
	static bool (*const steps[]) (OutboxRetention *state) = {
		step_gone, step_dead, step_jobs, outbox_retention_events
	};
	TimestampTz began = GetCurrentTimestamp();
	TimestampTz now = began;
	int64		before = deleted(state);

	while (state->phase < OUTBOX_RETENTION_END && deleted(state) == before &&
		   now >= began && now - began < LOOK_US)
	{
		OutboxWalk *walk = &state->walks[state->phase];
		TimestampTz last = now;
		bool		more;

		CHECK_FOR_INTERRUPTS();
		more = steps[state->phase] (state);
		now = GetCurrentTimestamp();
		if (walk->full && deleted(state) == before)
			walk->wasted += Max(now - last, 0);
		if (more)
			continue;
		end_walk(walk);
		state->subscription = 0;
		if (++state->phase < OUTBOX_RETENTION_END)
			begin_walk(state, now);
	}
	return state->phase < OUTBOX_RETENTION_END;
}
