/*-------------------------------------------------------------------------
 *
 * check.c
 *		outbox.check(): says in words what keeps events from being fanned out,
 *		and their jobs from being handled.
 *
 * Everything is looked at as the owner of the extension; who may call the
 * function sees it all.
 *
 *-------------------------------------------------------------------------
 */
#include "check.h"

#include "access/xlog.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#define CHECK_COLUMNS 3

/* One row of the result */
static void
put_row(CheckState *state, const char *level, const char *finding, const char *hint)
{
	Datum		values[CHECK_COLUMNS];
	bool		nulls[CHECK_COLUMNS] = {false, false, false};

	values[0] = CStringGetTextDatum(level);
	values[1] = CStringGetTextDatum(finding);
	if (hint != NULL)
		values[2] = CStringGetTextDatum(hint);
	else
		nulls[2] = true;
	tuplestore_putvalues(state->rsinfo->setResult, state->rsinfo->setDesc, values, nulls);
}

/* A finding, with a hint or NULL */
void
outbox_report(CheckState *state, CheckLevel level, const char *hint, const char *format,...)
{
	static const char *const words[] = {"notice", "warning", "error"};
	StringInfoData finding;
	int			needed;

	initStringInfo(&finding);
	for (;;)
	{
		va_list		args;

		va_start(args, format);
		needed = appendStringInfoVA(&finding, format, args);
		va_end(args);
		if (needed == 0)
			break;
		enlargeStringInfo(&finding, needed);
	}
	put_row(state, words[level], finding.data, hint);
	if (level > CHECK_NOTICE)
		state->problems++;
	pfree(finding.data);
}

/* How long ago a time was, in words */
char *
outbox_check_ago(TimestampTz then)
{
	int64		seconds = (GetCurrentTimestamp() - then) / USECS_PER_SEC;

	if (seconds < 120)
		return psprintf("%d s ago", (int) Max(seconds, 0));
	if (seconds < 2 * SECS_PER_HOUR)
		return psprintf("%d min ago", (int) (seconds / SECS_PER_MINUTE));
	if (seconds < 2 * SECS_PER_DAY)
		return psprintf("%d h ago", (int) (seconds / SECS_PER_HOUR));
	return psprintf("%d days ago", (int) (seconds / SECS_PER_DAY));
}

/* Run a statement without parameters; returns the number of its rows. */
int
outbox_check_query(OutboxPlan *plan)
{
	return (int) outbox_execute(plan, NULL, NULL, SPI_OK_SELECT);
}

/* Values of its result */
char *
outbox_check_text(int row, int column)
{
	return SPI_getvalue(SPI_tuptable->vals[row], SPI_tuptable->tupdesc, column);
}

int64
outbox_check_int8(int row, int column)
{
	bool		isnull;
	Datum		value = outbox_spi_value(row, column, &isnull);

	return isnull ? 0 : DatumGetInt64(value);
}

TimestampTz
outbox_check_time(int row, int column)
{
	bool		isnull;
	Datum		value = outbox_spi_value(row, column, &isnull);

	return isnull ? 0 : DatumGetTimestampTz(value);
}

/* Is a relay there to work, and may it? */
static void
check_server(CheckState *state)
{
	char	   *database = outbox_current_database();

	if (RecoveryInProgress())
		report(state, CHECK_WARNING, "After promotion the relays start by themselves.",
			   "the server is a standby, on which nothing is fanned out");
	else if (outbox_shared == NULL)
		report(state, CHECK_ERROR,
			   psprintf("Append outbox to \"shared_preload_libraries\" (now '%s') and restart the server.",
						GetConfigOption("shared_preload_libraries", true, false)),
			   "outbox is not loaded via \"shared_preload_libraries\": events are recorded but not fanned out");
	if (!outbox_database_listed(database))
		report(state, CHECK_ERROR,
			   psprintf("Add it to \"outbox.databases\" (now '%s') and reload the configuration.",
						outbox_databases),
			   "database \"%s\" is not listed in \"outbox.databases\"", database);
	if (outbox_relays_setting == 0)
		report(state, CHECK_ERROR,
			   "Set it to 1 and reload the configuration.",
			   "setting \"outbox.relays\" is 0, so that no relay runs");
	if (strcmp(GetConfigOption("autovacuum", false, false), "off") == 0 ||
		strcmp(GetConfigOption("track_counts", false, false), "off") == 0)
		report(state, CHECK_WARNING,
			   "Turn on autovacuum and track_counts.",
			   "autovacuum does not run: the tables of outbox will grow without bound");
}

/* One relay of this database */
static void
check_relay(CheckState *state, int i, const OutboxRelay *relay)
{
	if (relay->pid == 0)
		report(state, CHECK_ERROR,
			   psprintf("It may be starting; if this stays, see the server's log. \"max_worker_processes\" is %s, and has to suffice for the launcher, "
						"the relays of every database, one more, and all other background workers.",
						GetConfigOption("max_worker_processes", false, false)),
			   "relay %d of this database is not running%s%s", i + 1,
			   relay->last_error[0] != '\0' ? "; its last error: " : "",
			   outbox_clip(relay->last_error, OUTBOX_ERROR_LEN));
	else if (relay->state == OUTBOX_RELAY_BACKOFF)
		report(state, CHECK_ERROR,
			   "It tries again by itself; remove the cause. outbox.wake() makes it try at once.",
			   "relay %d waits until %s after trouble of the server: %s", i + 1,
			   timestamptz_to_str(relay->backoff_until),
			   outbox_clip(relay->last_error, OUTBOX_ERROR_LEN));
	if (relay->notify_failures > 0)
		report(state, CHECK_NOTICE,
			   "Listeners have missed notifications, and should look at the table.",
			   "relay %d could not send notifications " INT64_FORMAT " times since it started",
			   i + 1, relay->notify_failures);
}

/* Is what is kept no longer deleted? */
static void
check_retention(CheckState *state, OutboxDatabase *db)
{
	OutboxPruned pruned;

	SpinLockAcquire(&db->mutex);
	pruned = db->pruned;
	SpinLockRelease(&db->mutex);
	if (pruned.failed_at != 0)
		report(state, CHECK_WARNING,
			   "It is tried again by itself; remove the cause, then CALL outbox.prune() shows whether it works.",
			   "events or jobs that are kept no longer could not be deleted, last %s: %s",
			   ago(pruned.failed_at), outbox_clip(pruned.error, OUTBOX_ERROR_LEN));
}

/* The relays of this database */
static void
check_relays(CheckState *state)
{
	OutboxDatabase *db = outbox_find_database(MyDatabaseId);
	int			launcher_pid;
	int			used = 0;
	int			i;

	if (outbox_shared == NULL || RecoveryInProgress())
		return;
	SpinLockAcquire(&outbox_shared->mutex);
	launcher_pid = outbox_shared->launcher_pid;
	SpinLockRelease(&outbox_shared->mutex);
	if (launcher_pid == 0)
	{
		report(state, CHECK_ERROR,
			   psprintf("It is started again after 5 s; if it is not, see the server's log. \"max_worker_processes\" is %s.",
						GetConfigOption("max_worker_processes", false, false)),
			   "the launcher is not running");
		return;
	}
	if (!outbox_database_listed(outbox_current_database()))
		return;
	if (db == NULL)
	{
		for (i = 0; i < outbox_shared->ndatabases; i++)
			used += OidIsValid(outbox_shared->databases[i].dboid);
		if (used == outbox_shared->ndatabases)
			report(state, CHECK_WARNING,
				   "Raise \"outbox.max_databases\" and restart the server.",
				   "the room for %d of \"outbox.max_databases\" is taken: this database is only swept every %d s",
				   used, outbox_sweep_interval / 1000);
		else
			report(state, CHECK_ERROR,
				   "The launcher looks into every database once; if this stays, see the server's log.",
				   "the launcher does not know yet that this database has outbox");
		return;
	}
	for (i = 0; i < outbox_relays_setting; i++)
	{
		OutboxRelay relay;

		if (outbox_read_relay(db, MyDatabaseId, i, &relay))
			check_relay(state, i, &relay);
	}
	check_retention(state, db);
}

/* Is the database armed, and not stopped? */
static void
check_armed(CheckState *state)
{
	static OutboxPlan armed = {
		"SELECT a.stopped_at, a.database IS NOT NULL,"
		" EXISTS (SELECT FROM outbox.armed), EXISTS (SELECT FROM outbox.subscriptions)"
		" FROM (VALUES (1)) one LEFT JOIN outbox.armed a ON a.database OPERATOR(pg_catalog.=)"
		" (SELECT oid FROM pg_catalog.pg_database WHERE datname OPERATOR(pg_catalog.=) pg_catalog.current_database())",
		0, {0}, NULL
	};
	TimestampTz stopped_at;
	bool		isnull;
	bool		here;
	bool		elsewhere;
	bool		subscriptions;

	query(&armed);
	stopped_at = time_at(0, 1);
	here = DatumGetBool(outbox_spi_value(0, 2, &isnull));
	elsewhere = DatumGetBool(outbox_spi_value(0, 3, &isnull));
	subscriptions = DatumGetBool(outbox_spi_value(0, 4, &isnull));

	if (!here && (elsewhere || subscriptions))
		report(state, CHECK_ERROR,
			   "If this database is to act, and not only to be looked at, call outbox.arm().",
			   "the database is not armed, because it was %s: events wait unmarked",
			   elsewhere ? "copied" : "restored");
	else if (stopped_at != 0)
		report(state, CHECK_ERROR, "Call outbox.start().",
			   "outbox.stop() was called %s: events wait unmarked", ago(stopped_at));
	if (!subscriptions)
		report(state, here ? CHECK_NOTICE : CHECK_WARNING,
			   here ? "Make one with outbox.subscribe." :
			   "Make one with outbox.subscribe, or call outbox.arm().",
			   "there is no subscription: events %s", here ? "get no jobs" : "wait unmarked");
}

/* Are the objects as the install script made them? */
static void
check_objects(CheckState *state)
{
	static OutboxPlan triggers = {
		"SELECT v.rel, v.name FROM (VALUES ('events', 'events_insert'), ('subscriptions', 'routing_changed')) v (rel, name)"
		" WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_trigger t"
		" JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) t.tgrelid"
		" WHERE c.relnamespace OPERATOR(pg_catalog.=) 'outbox'::pg_catalog.regnamespace"
		" AND c.relname OPERATOR(pg_catalog.=) v.rel AND t.tgname OPERATOR(pg_catalog.=) v.name"
		" AND t.tgenabled OPERATOR(pg_catalog.=) 'A')",
		0, {0}, NULL
	};
	static OutboxPlan routing = {"SELECT version FROM outbox.routing", 0, {0}, NULL};
	static OutboxPlan captures = {
		"SELECT relation::text, trigger::text FROM outbox.captures WHERE NOT enabled ORDER BY 1, 2 LIMIT 20",
		0, {0}, NULL
	};
	int			n;
	int			i;

	n = query(&triggers);
	for (i = 0; i < n; i++)
		report(state, CHECK_ERROR,
			   psprintf("ALTER TABLE outbox.%s ENABLE ALWAYS TRIGGER %s", text_at(i, 1), text_at(i, 2)),
			   "trigger %s of table outbox.%s does not always fire", text_at(i, 2), text_at(i, 1));
	if (query(&routing) != 1)
		report(state, CHECK_ERROR,
			   "Give it a version that it never had: INSERT INTO outbox.routing (version) SELECT EXTRACT(epoch FROM now()) * 1000000.",
			   "table outbox.routing does not hold one row, without which no relay can work");
	n = query(&captures);
	for (i = 0; i < n; i++)
		report(state, CHECK_WARNING,
			   "Enable the trigger, or end the capture with outbox.uncapture.",
			   "changes of table %s are not recorded: trigger %s is disabled", text_at(i, 1), text_at(i, 2));
}

/* Events that wait, or were set aside */
static void
check_events(CheckState *state)
{
	static OutboxPlan unmarked = {
		"SELECT pg_catalog.count(*), pg_catalog.min(recorded_at)"
		" FROM (SELECT recorded_at, retry_at FROM outbox.events"
		" WHERE fanned_out_at IS NULL AND poisoned_at IS NULL ORDER BY seq LIMIT 100000) e"
		" WHERE retry_at IS NULL",
		0, {0}, NULL
	};
	static OutboxPlan retrying = {
		"SELECT pg_catalog.count(*), pg_catalog.min(retry_at),"
		" (pg_catalog.array_agg(last_error ORDER BY retry_at, seq))[1]"
		" FROM (SELECT seq, retry_at, last_error FROM outbox.events"
		" WHERE retry_at IS NOT NULL AND fanned_out_at IS NULL AND poisoned_at IS NULL LIMIT 1000) e",
		0, {0}, NULL
	};
	static OutboxPlan poisoned = {
		"SELECT pg_catalog.count(*), pg_catalog.min(poisoned_at)"
		" FROM (SELECT poisoned_at FROM outbox.events"
		" WHERE poisoned_at IS NOT NULL AND fanned_out_at IS NULL LIMIT 100000) e",
		0, {0}, NULL
	};
	int64		n;

	query(&unmarked);
	n = int8_at(0, 1);
	if (n > 0 && TimestampDifferenceExceeds(time_at(0, 2), GetCurrentTimestamp(), 60 * 1000))
		report(state, CHECK_WARNING,
			   "If nothing else is said here, a transaction may hold them locked, or the relay is behind: see outbox.stat_relay.",
			   "events that wait to be fanned out: " INT64_FORMAT "%s; the oldest was recorded %s",
			   n, n == 100000 ? " or more" : "", ago(time_at(0, 2)));
	query(&retrying);
	n = int8_at(0, 1);
	if (n > 0)
		report(state, CHECK_WARNING,
			   "They are tried again by themselves; remove the cause.",
			   "events that failed and wait for their next try: " INT64_FORMAT "%s; the next at %s, after: %s",
			   n, n == 1000 ? " or more" : "", timestamptz_to_str(time_at(0, 2)), text_at(0, 3));
	query(&poisoned);
	n = int8_at(0, 1);
	if (n > 0)
		report(state, CHECK_WARNING,
			   "View outbox.poisoned says why; outbox.requeue puts one back in line, outbox.discard gives it up.",
			   "poisoned events: " INT64_FORMAT "%s; the first was set aside %s",
			   n, n == 100000 ? " or more" : "", ago(time_at(0, 2)));
}

/* Sessions and the like that hold back the whole server */
static void
check_others(CheckState *state)
{
	static OutboxPlan notify = {
		"SELECT pg_catalog.round((100 OPERATOR(pg_catalog.*) pg_catalog.pg_notification_queue_usage())::numeric)::bigint",
		0, {0}, NULL
	};
	static OutboxPlan snapshots = {
		"SELECT pid::text, COALESCE(usename::text, '?'), COALESCE(application_name, ''), xact_start"
		" FROM pg_catalog.pg_stat_activity"
		" WHERE pid OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid()"
		" AND COALESCE(backend_xmin, backend_xid) IS NOT NULL"
		" AND backend_type OPERATOR(pg_catalog.<>) 'autovacuum worker'"
		" AND xact_start OPERATOR(pg_catalog.<) (pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) '5 min'::interval)"
		" ORDER BY xact_start LIMIT 1",
		0, {0}, NULL
	};
	static OutboxPlan prepared = {
		"SELECT gid, prepared FROM pg_catalog.pg_prepared_xacts"
		" WHERE prepared OPERATOR(pg_catalog.<) (pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) '5 min'::interval)"
		" ORDER BY prepared LIMIT 1",
		0, {0}, NULL
	};
	static OutboxPlan slots = {
		"SELECT slot_name::text, pg_catalog.age(xmin)::bigint FROM pg_catalog.pg_replication_slots"
		" WHERE NOT active AND xmin IS NOT NULL"
		" ORDER BY 2 DESC LIMIT 1",
		0, {0}, NULL
	};
	const char *hint = "What is dead since then cannot be removed, and slows claims down.";

	query(&notify);
	if (int8_at(0, 1) > 50)
		report(state, CHECK_WARNING,
			   "A session that listens keeps a transaction open. When the queue is full, receipts are not sent; fan-out goes on.",
			   "the queue of notifications is " INT64_FORMAT " %% full", int8_at(0, 1));
	if (query(&snapshots) > 0)
		report(state, CHECK_WARNING, hint,
			   "the oldest transaction is that of process %s (role \"%s\", application \"%s\"), begun %s",
			   text_at(0, 1), text_at(0, 2), text_at(0, 3), ago(time_at(0, 4)));
	if (query(&prepared) > 0)
		report(state, CHECK_WARNING, hint,
			   "transaction \"%s\" was prepared %s and has not been finished",
			   text_at(0, 1), ago(time_at(0, 2)));
	if (query(&slots) > 0)
		report(state, CHECK_WARNING, hint,
			   "replication slot \"%s\" is not used and holds a snapshot " INT64_FORMAT " transactions old",
			   text_at(0, 1), int8_at(0, 2));
}

PG_FUNCTION_INFO_V1(outbox_check);

/* outbox.check(): one row for each finding; one row that says ok when all is well. */
Datum
outbox_check(PG_FUNCTION_ARGS)
{
	OutboxOwnerContext context;
	CheckState	state;

	InitMaterializedSRF(fcinfo, 0);
	state.rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	state.problems = 0;

	outbox_become_owner(&context);
	outbox_spi_connect();
	check_server(&state);
	check_relays(&state);
	check_armed(&state);
	check_objects(&state);
	check_events(&state);
	outbox_check_subscriptions(&state);
	check_others(&state);
	if (state.problems == 0)
		put_row(&state, "ok", "nothing keeps events from being fanned out", NULL);
	outbox_end_change(&context);
	PG_RETURN_NULL();
}
