/*-------------------------------------------------------------------------
 *
 * control.c
 *		Functions by which people steer the relay.
 *
 * EXECUTE on the function decides who may call it; the tables are changed as
 * the owner of the extension.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"

/*
 * Run one statement as the owner.  With note set, the seqs that it returns are
 * noted, so that the relay looks at them when this transaction commits.
 */
static uint64
run_as_owner(OutboxPlan *plan, Datum *values, int expected, bool note)
{
	OutboxOwnerContext owner;
	uint64		n;
	uint64		i;

	outbox_become_owner(&owner);
	outbox_spi_connect();
	n = outbox_execute(plan, values, NULL, expected);
	for (i = 0; note && i < n; i++)
	{
		bool		isnull;

		outbox_doorbell_note(DatumGetInt64(outbox_spi_value(i, 1, &isnull)));
	}
	outbox_spi_finish();
	outbox_become_caller(&owner);
	return n;
}

/*
 * Put poisoned events back in line.  In the order of their seqs, so that two
 * callers do not lock them crosswise.
 */
static uint64
requeue(Datum seqs)
{
	static OutboxPlan plan = {
		"UPDATE outbox.events e SET tries = 0, failures = 0, retry_at = NULL, poisoned_at = NULL"
		" FROM (SELECT seq FROM outbox.events WHERE seq OPERATOR(pg_catalog.=) ANY ($1)"
		" AND poisoned_at IS NOT NULL AND fanned_out_at IS NULL ORDER BY seq FOR NO KEY UPDATE) p"
		" WHERE e.seq OPERATOR(pg_catalog.=) p.seq RETURNING e.seq",
		1, {INT8ARRAYOID}, NULL
	};

	return run_as_owner(&plan, &seqs, SPI_OK_UPDATE_RETURNING, true);
}

PG_FUNCTION_INFO_V1(outbox_requeue);

/* outbox.requeue() */
Datum
outbox_requeue(PG_FUNCTION_ARGS)
{
	Datum		seq;

	outbox_check_not_null(fcinfo, 0, "seq");
	seq = PG_GETARG_DATUM(0);
	PG_RETURN_BOOL(requeue(outbox_make_array(&seq, NULL, 1, INT8OID)) > 0);
}

PG_FUNCTION_INFO_V1(outbox_requeue_many);

/* outbox.requeue_many() */
Datum
outbox_requeue_many(PG_FUNCTION_ARGS)
{
	outbox_check_not_null(fcinfo, 0, "seqs");
	PG_RETURN_INT64((int64) requeue(PG_GETARG_DATUM(0)));
}

PG_FUNCTION_INFO_V1(outbox_discard);

/*
 * outbox.discard(): give up an event that is poisoned, or fails and waits.  It
 * is marked like any other, so those who wait for it are told, and retention
 * sees to it; its last error stays.
 */
Datum
outbox_discard(PG_FUNCTION_ARGS)
{
	static OutboxPlan plan = {
		"UPDATE outbox.events SET fanned_out_at = pg_catalog.clock_timestamp(), fanout = '{}',"
		" retry_at = NULL, poisoned_at = NULL"
		" WHERE seq OPERATOR(pg_catalog.=) $1 AND fanned_out_at IS NULL"
		" AND (poisoned_at IS NOT NULL OR tries OPERATOR(pg_catalog.>) 0)",
		1, {INT8OID}, NULL
	};
	Datum		values[1];

	outbox_check_not_null(fcinfo, 0, "seq");
	values[0] = PG_GETARG_DATUM(0);
	PG_RETURN_BOOL(run_as_owner(&plan, values, SPI_OK_UPDATE, false) > 0);
}

PG_FUNCTION_INFO_V1(outbox_wake);

/* outbox.wake(): ring without a hint, now.  False when there is no relay. */
Datum
outbox_wake(PG_FUNCTION_ARGS)
{
	OutboxDatabase *db = outbox_find_database(MyDatabaseId);
	bool		found = false;
	int			i;

	if (db == NULL)
		PG_RETURN_BOOL(false);
	for (i = 0; i < OUTBOX_MAX_RELAYS; i++)
		found |= (db->relays[i].pid != 0);
	outbox_doorbell_sweep(db);
	PG_RETURN_BOOL(found);
}

PG_FUNCTION_INFO_V1(outbox_stop);

/* outbox.stop(): the claims of the relay find nothing from the commit on */
Datum
outbox_stop(PG_FUNCTION_ARGS)
{
	static OutboxPlan plan = {
		"UPDATE outbox.armed SET stopped_at = pg_catalog.clock_timestamp()"
		" WHERE database OPERATOR(pg_catalog.=) $1 AND stopped_at IS NULL",
		1, {OIDOID}, NULL
	};
	Datum		values[1];
	bool		stopped;

	values[0] = ObjectIdGetDatum(MyDatabaseId);
	stopped = run_as_owner(&plan, values, SPI_OK_UPDATE, false) > 0;
	if (stopped)
		outbox_doorbell_note_sweep();
	PG_RETURN_BOOL(stopped);
}

PG_FUNCTION_INFO_V1(outbox_start);

/* outbox.start(): what has waited is looked for at the commit */
Datum
outbox_start(PG_FUNCTION_ARGS)
{
	static OutboxPlan plan = {
		"UPDATE outbox.armed SET stopped_at = NULL"
		" WHERE database OPERATOR(pg_catalog.=) $1 AND stopped_at IS NOT NULL",
		1, {OIDOID}, NULL
	};
	Datum		values[1];
	bool		restarted;

	values[0] = ObjectIdGetDatum(MyDatabaseId);
	restarted = run_as_owner(&plan, values, SPI_OK_UPDATE, false) > 0;
	if (restarted)
		outbox_doorbell_note_sweep();
	PG_RETURN_BOOL(restarted);
}

PG_FUNCTION_INFO_V1(outbox_arm);

/*
 * outbox.arm(): this database is the one to work in.  Rows of the database
 * that it was copied from go.
 */
Datum
outbox_arm(PG_FUNCTION_ARGS)
{
	static OutboxPlan forget = {
		"DELETE FROM outbox.armed WHERE database OPERATOR(pg_catalog.<>) $1",
		1, {OIDOID}, NULL
	};
	static OutboxPlan arm = {
		"INSERT INTO outbox.armed (database) VALUES ($1) ON CONFLICT DO NOTHING",
		1, {OIDOID}, NULL
	};
	Datum		values[1];
	bool		armed;

	values[0] = ObjectIdGetDatum(MyDatabaseId);
	run_as_owner(&forget, values, SPI_OK_DELETE, false);
	armed = run_as_owner(&arm, values, SPI_OK_INSERT, false) > 0;
	if (armed)
		outbox_doorbell_note_sweep();
	PG_RETURN_BOOL(armed);
}
