/*-------------------------------------------------------------------------
 *
 * stats.c
 *		What relays and runners say of themselves in shared memory.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include "catalog/pg_authid.h"
#include "commands/dbcommands.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#define RELAYS_COLUMNS 14
#define RUNNERS_COLUMNS 8

/* The state of a relay in a word */
static const char *
state_word(const OutboxRelay *relay)
{
	if (relay->pid == 0)
		return "not running";
	switch (relay->state)
	{
		case OUTBOX_RELAY_FREE:
			return "starting";
		case OUTBOX_RELAY_IDLE:
			return "idle";
		case OUTBOX_RELAY_PASS:
			return "pass";
		case OUTBOX_RELAY_BACKOFF:
			return "backoff";
		case OUTBOX_RELAY_RESTING:
			return "resting";
	}
	return "unknown";
}

/*
 * Copy a relay of a database; false when the slot is another database's by
 * now.  Nothing is done under the spinlock but to copy.
 */
bool
outbox_read_relay(OutboxDatabase *db, Oid dboid, int i, OutboxRelay *relay)
{
	bool		ours;

	SpinLockAcquire(&db->mutex);
	ours = (db->dboid == dboid);
	if (ours)
		*relay = db->relays[i];
	SpinLockRelease(&db->mutex);
	return ours;
}

/*
 * One row of the result.  Error texts of other databases may hold their data,
 * and may be in their encoding: they are for those who may read all
 * statistics, and are made valid here.
 */
static void
put_relay(ReturnSetInfo *rsinfo, Oid dboid, char *datname, int i, const OutboxRelay *relay)
{
	Datum		values[RELAYS_COLUMNS];
	bool		nulls[RELAYS_COLUMNS];
	NameData	database;
	bool		running = (relay->pid != 0);
	bool		ours = (dboid == MyDatabaseId);

	memset(values, 0, sizeof(values));
	memset(nulls, 0, sizeof(nulls));
	namestrcpy(&database, datname);
	values[0] = NameGetDatum(&database);
	values[1] = ObjectIdGetDatum(dboid);
	values[2] = Int32GetDatum(i + 1);
	values[3] = Int32GetDatum(relay->pid);
	nulls[3] = !running;
	values[4] = CStringGetTextDatum(state_word(relay));
	values[5] = Int64GetDatum(relay->passes);
	values[6] = Int64GetDatum(relay->events);
	values[7] = Int64GetDatum(relay->jobs);
	values[8] = Int64GetDatum(relay->failures);
	values[9] = Int64GetDatum(relay->notify_failures);
	values[10] = TimestampTzGetDatum(relay->last_pass_at);
	nulls[10] = (relay->last_pass_at == 0);
	if (relay->last_error[0] == '\0')
		nulls[11] = true;
	else if (ours || has_privs_of_role(GetUserId(), ROLE_PG_READ_ALL_STATS))
		values[11] = CStringGetTextDatum(outbox_clip(relay->last_error, OUTBOX_ERROR_LEN));
	else
		values[11] = CStringGetTextDatum("<insufficient privilege>");
	values[12] = TimestampTzGetDatum(relay->last_error_at);
	nulls[12] = (relay->last_error_at == 0);
	values[13] = TimestampTzGetDatum(relay->backoff_until);
	nulls[13] = (relay->backoff_until == 0 || relay->state != OUTBOX_RELAY_BACKOFF);
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

PG_FUNCTION_INFO_V1(outbox_relays);

/*
 * outbox.relays(): the relays of the server, also those that should run and do
 * not.  Without shared memory there are none.
 */
Datum
outbox_relays(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	int			i,
				j;

	InitMaterializedSRF(fcinfo, 0);
	if (outbox_shared == NULL)
		PG_RETURN_NULL();
	for (i = 0; i < outbox_shared->ndatabases; i++)
	{
		OutboxDatabase *db = &outbox_shared->databases[i];
		Oid			dboid = db->dboid;
		char	   *datname;

		if (!OidIsValid(dboid))
			continue;
		datname = get_database_name(dboid);
		if (datname == NULL)
			continue;			/* dropped; the launcher has still to learn it */
		for (j = 0; j < OUTBOX_MAX_RELAYS; j++)
		{
			OutboxRelay relay;

			if (outbox_read_relay(db, dboid, j, &relay) &&
				(relay.pid != 0 || j < outbox_relays_setting))
				put_relay(rsinfo, dboid, datname, j, &relay);
		}
	}
	PG_RETURN_NULL();
}

/* One row of the result */
static void
put_runner(ReturnSetInfo *rsinfo, const OutboxRunner *runner)
{
	Datum		values[RUNNERS_COLUMNS];
	bool		nulls[RUNNERS_COLUMNS] = {false};
	bool		running = runner->subscription != 0;

	values[0] = Int32GetDatum(runner->pid);
	values[1] = ObjectIdGetDatum(runner->owner);
	values[2] = CStringGetTextDatum(running ? "running" : runner->idle ? "idle" : "looking");
	values[3] = Int32GetDatum(runner->subscription);
	values[4] = Int64GetDatum(runner->job);
	values[5] = TimestampTzGetDatum(runner->began_at);
	nulls[3] = nulls[4] = nulls[5] = !running;
	values[6] = Int64GetDatum(runner->jobs);
	values[7] = Int64GetDatum(runner->failures);
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

PG_FUNCTION_INFO_V1(outbox_runners);

/* outbox.runners(): the runners of this database; none without shared memory. */
Datum
outbox_runners(PG_FUNCTION_ARGS)
{
	OutboxDatabase *db = outbox_find_database(MyDatabaseId);
	int			i;

	InitMaterializedSRF(fcinfo, 0);
	for (i = 0; db != NULL && i < OUTBOX_MAX_RUNNERS; i++)
	{
		OutboxRunner runner;
		bool		ours;

		SpinLockAcquire(&db->mutex);
		ours = (db->dboid == MyDatabaseId);
		runner = db->runners[i];
		SpinLockRelease(&db->mutex);
		if (ours && runner.pid != 0)
			put_runner((ReturnSetInfo *) fcinfo->resultinfo, &runner);
	}
	PG_RETURN_NULL();
}
