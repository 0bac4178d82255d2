/*-------------------------------------------------------------------------
 *
 * pass.c
 *		One pass: claim, route, coalesce, enqueue, mark, in one transaction.
 *
 * When it fails it is rolled back and redone in parts, which is redo.c.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include "access/genam.h"
#include "catalog/namespace.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/proc.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

/* Bytes of an error text that are stored with an event */
#define MAX_STORED_ERROR 2000

/* Jobs made by one pass, unless a single event has more */
#define MAX_JOBS 20000

/*
 * Events whose failure could not even be written down, with the time until
 * which they are left alone.  In this process's memory: after a restart they
 * are tried again.
 */
#define MAX_SHUNNED 256
static struct
{
	int64		seq;
	int			tries;
	TimestampTz until;			/* 0: posted again, not tried yet */
}			shunned[MAX_SHUNNED];
static int	nshunned = 0;

/*
 * The retries of a pass are those that were due when it began.  Else its redo
 * might never end: what failed in one transaction is due again in the next.
 */
static TimestampTz due_until;

/* Wait before try number tries, in milliseconds: doubling, without overflow */
int64
outbox_retry_wait_ms(int tries)
{
	int64		wait = outbox_relay_retry_min;
	int64		max = Max(outbox_relay_retry_max, outbox_relay_retry_min);

	while (--tries > 0 && wait < max)
		wait *= 2;
	return Min(wait, max);
}

/*
 * Is an error one that every event would meet, so that redoing them one by one
 * is of no use?
 */
static bool
hopeless(int sqlstate)
{
	switch (ERRCODE_TO_CATEGORY(sqlstate))
	{
		case MAKE_SQLSTATE('2', '5', '0', '0', '0'):	/* read-only, ... */
		case MAKE_SQLSTATE('5', '7', '0', '0', '0'):	/* operator intervention */
		case MAKE_SQLSTATE('5', '8', '0', '0', '0'):	/* I/O error */
			return true;
	}
	return sqlstate == ERRCODE_LOCK_NOT_AVAILABLE;
}

/*
 * Text of an error as it is stored, in the current memory context.  The detail
 * may hold data of the event: it is for what only the owner can read.
 */
char *
outbox_error_text(ErrorData *edata, bool detail)
{
	char	   *text;

	if (detail && edata->detail)
		text = psprintf("%s: %s\nDETAIL: %s", unpack_sql_state(edata->sqlerrcode),
						edata->message ? edata->message : "", edata->detail);

	else
		text = psprintf("%s: %s", unpack_sql_state(edata->sqlerrcode),
						edata->message ? edata->message : "");

	return outbox_clip(text, MAX_STORED_ERROR);
}

/*
 * Take the lock on the extension that every transaction of a worker takes first,
 * so that DROP and
 * ALTER EXTENSION have one lock order with it.  False when the extension that
 * this process works for has gone.
 */
bool
outbox_lock_extension(void)
{
	static Oid	extension = InvalidOid;
	static Oid	namespace = InvalidOid;

	if (!OidIsValid(extension))
	{
		extension = get_extension_oid(OUTBOX_EXTENSION, true);
		namespace = get_namespace_oid(OUTBOX_SCHEMA, true);
		if (!OidIsValid(extension) || !OidIsValid(namespace))
			return false;
	}
	LockDatabaseObject(ExtensionRelationId, extension, 0, AccessShareLock);

	/* the schema comes and goes with the extension, and is cached */
	return get_namespace_oid(OUTBOX_SCHEMA, true) == namespace;
}

/* Seqs that are shunned now, as a parameter; those whose time has come leave. */
static Datum
shunned_array(TimestampTz now)
{
	Datum		values[MAX_SHUNNED];
	int			n = 0;
	int			i;

	for (i = 0; i < nshunned; i++)
	{
		if (shunned[i].until > now)
			values[n++] = Int64GetDatum(shunned[i].seq);
	}
	return outbox_make_array(values, NULL, n, INT8OID);
}

/*
 * Leave an event alone for a while, although that cannot be written down.
 * When there is no room, the one whose time comes first makes some.
 */
void
outbox_shun(int64 seq)
{
	int			first = 0;
	int			i;

	for (i = 0; i < nshunned && shunned[i].seq != seq; i++)
	{
		if (shunned[i].until < shunned[first].until)
			first = i;
	}
	if (i == MAX_SHUNNED)
		i = first;
	else if (i == nshunned)
		nshunned++;
	if (shunned[i].seq != seq)
		shunned[i].tries = 0;
	shunned[i].seq = seq;
	shunned[i].tries = Min(shunned[i].tries + 1, PG_INT16_MAX);
	shunned[i].until = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
												   outbox_retry_wait_ms(shunned[i].tries));
}

/* Post the events again that have been left alone long enough. */
void
outbox_unshun(OutboxDatabase *db)
{
	TimestampTz now = GetCurrentTimestamp();
	int			i;

	for (i = 0; i < nshunned; i++)
	{
		if (shunned[i].until != 0 && shunned[i].until <= now)
		{
			shunned[i].until = 0;
			outbox_doorbell_post(db, shunned[i].seq, shunned[i].seq);
		}
	}
}

/*
 * Claim rows, in the current memory context, and read in the same statement,
 * so in the same snapshot, the version of the set of subscriptions.  An
 * unarmed or stopped database has none.
 *
 * Small columns only: an event whose payload cannot be read must not fail the
 * claim.
 */
static OutboxEvent *
claim(OutboxPass *pass, int64 *version)
{
#define CLAIM_COLUMNS \
		"SELECT e.ctid, e.seq, e.type, e.subject, e.scope, e.not_before, e.tries, e.failures, e.retry_at," \
		" (SELECT r.version FROM outbox.routing r)" \
		" FROM outbox.events e" \
		" WHERE e.fanned_out_at IS NULL AND e.poisoned_at IS NULL" \
		" AND (SELECT true FROM outbox.armed a" \
		" WHERE a.database OPERATOR(pg_catalog.=) $1 AND a.stopped_at IS NULL)" \
		" AND e.seq OPERATOR(pg_catalog.<>) ALL ($2)"
	/* what has failed before is left to the retries, and so holds up nothing */
	static OutboxPlan fresh = {
		CLAIM_COLUMNS
		" AND e.retry_at IS NULL"
		" AND e.seq OPERATOR(pg_catalog.>=) $5 AND e.seq OPERATOR(pg_catalog.<=) $6"
		" ORDER BY e.seq LIMIT $4 FOR NO KEY UPDATE OF e SKIP LOCKED",
		6, {OIDOID, INT8ARRAYOID, TIMESTAMPTZOID, INT8OID, INT8OID, INT8OID}, NULL
	};
	static OutboxPlan due = {
		CLAIM_COLUMNS
		" AND e.retry_at IS NOT NULL AND e.retry_at OPERATOR(pg_catalog.<=) $3"
		" ORDER BY e.retry_at LIMIT $4 FOR NO KEY UPDATE OF e SKIP LOCKED",
		4, {OIDOID, INT8ARRAYOID, TIMESTAMPTZOID, INT8OID}, NULL
	};
	TimestampTz now = GetCurrentTimestamp();
	Datum		values[6];
	OutboxEvent *events;
	bool		isnull;
	int			n;
	int			i;

	values[0] = ObjectIdGetDatum(MyDatabaseId);
	values[1] = shunned_array(now);
	values[2] = TimestampTzGetDatum(due_until);
	values[3] = Int64GetDatum(outbox_batch_size);
	values[4] = Int64GetDatum(pass->range.low);
	values[5] = Int64GetDatum(pass->range.high);
	n = (int) outbox_execute_snapshot(pass->retry ? &due : &fresh, values, NULL,
									  SPI_OK_SELECT, GetActiveSnapshot());

	pass->claimed = n;
	pass->full = (n == outbox_batch_size);
	if (n == 0)
		return NULL;
	events = palloc0(n * sizeof(OutboxEvent));
	for (i = 0; i < n; i++)
	{
		OutboxEvent *event = &events[i];
		Datum		value;

		event->tid = *(ItemPointer) DatumGetPointer(outbox_spi_value(i, 1, &isnull));
		event->seq = DatumGetInt64(outbox_spi_value(i, 2, &isnull));
		event->type = outbox_spi_string(i, 3);
		event->subject = outbox_spi_string(i, 4);
		event->scope = outbox_spi_string(i, 5);
		value = outbox_spi_value(i, 6, &isnull);
		event->not_before = isnull ? 0 : DatumGetTimestampTz(value);
		event->tries = DatumGetInt16(outbox_spi_value(i, 7, &isnull));
		event->failures = DatumGetInt16(outbox_spi_value(i, 8, &isnull));
		value = outbox_spi_value(i, 9, &isnull);
		event->retry_at = isnull ? 0 : DatumGetTimestampTz(value);
		pass->last = Max(pass->last, event->seq);
	}
	*version = DatumGetInt64(outbox_spi_value(0, 10, &isnull));
	if (isnull)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table outbox.routing is empty"),
				 errhint("See outbox.check().")));
	SPI_freetuptable(SPI_tuptable);
	return events;
}

/*
 * Begin a pass's transaction and claim.  False when there is nothing to do;
 * the transaction is open in either case.
 *
 * What a full claim leaves is posted at once, so that another relay may take
 * it now.
 */
bool
outbox_begin_and_claim(OutboxPass *pass, OutboxEvent **events, int64 *version)
{
	MemoryContext context = CurrentMemoryContext;

	outbox_worker_begin("fanning out events");
	MemoryContextSwitchTo(context);
	/* "on" is what is announced; a database may be set to less */
	if (outbox_synchronous_pass ? synchronous_commit == SYNCHRONOUS_COMMIT_OFF :
		synchronous_commit != SYNCHRONOUS_COMMIT_OFF)
		(void) set_config_option("synchronous_commit", outbox_synchronous_pass ? "local" : "off",
								 PGC_USERSET, PGC_S_SESSION, GUC_ACTION_LOCAL, true, 0, false);
	if (!outbox_lock_extension())
	{
		pass->gone = true;
		return false;
	}
	pass->last = OUTBOX_SEQ_MIN;

	/*
	 * The claim's snapshot: taken after the hint was, and the one by which
	 * the subscriptions are read, if they must be.
	 */
	PopActiveSnapshot();
	PushActiveSnapshot(GetTransactionSnapshot());
	*events = claim(pass, version);
	if (pass->full && !pass->retry && pass->db != NULL && pass->last < pass->range.high)
	{
		outbox_doorbell_post(pass->db, pass->last + 1, pass->range.high);
		pass->range.high = pass->last;
	}
	return pass->claimed > 0;
}

/*
 * How many of the claimed events fit into one pass: at least one.  The rest
 * stays unmarked and is posted again, after the commit: until then it is
 * locked, and another relay would skip it.
 */
static int
within_job_limit(OutboxPass *pass, OutboxEvent *events)
{
	int64		jobs = 0;
	int			i;

	for (i = 0; i < pass->claimed; i++)
	{
		jobs += events[i].ntargets;
		if (jobs > MAX_JOBS && i > 0)
		{
			pass->left = true;
			pass->left_low = pass->retry ? OUTBOX_SEQ_MIN : events[i].seq;
			pass->left_high = pass->retry ? OUTBOX_SEQ_MAX : pass->last;
			pass->last = events[i - 1].seq;
			pass->full = true;
			return i;
		}
	}
	return pass->claimed;
}

/*
 * Tell those who listen for the jobs of a subscription of their own that there
 * are some, once for all of the events.
 */
static void
announce_jobs(OutboxEvent **events, int nevents)
{
	int			i,
				j;

	for (i = 0; i < nevents; i++)
	{
		for (j = 0; j < events[i]->ntargets; j++)
			events[i]->targets[j].sub->told = false;
	}
	for (i = 0; i < nevents; i++)
	{
		for (j = 0; j < events[i]->ntargets; j++)
		{
			OutboxSubscription *sub = events[i]->targets[j].sub;

			if (sub->notify != NULL && !sub->told)
				outbox_notify_jobs(sub->notify, sub->name);
			sub->told = true;
		}
	}
}

/* Tell those who wait, and everybody who listens, what has been fanned out. */
void
outbox_announce(List *fanned, OutboxEvent *events, int nevents)
{
	int			n = fanned ? list_length(fanned) : nevents;
	OutboxEvent **list;
	int64	   *seqs;
	int64	   *dead;
	int			ndead = 0;
	int			i;

	if (n == 0)
		return;
	list = palloc(n * sizeof(OutboxEvent *));
	seqs = palloc(n * sizeof(int64));
	dead = palloc(n * sizeof(int64));
	for (i = 0; i < n; i++)
	{
		list[i] = fanned ? (OutboxEvent *) list_nth(fanned, i) : &events[i];
		seqs[i] = list[i]->seq;
		if (strcmp(list[i]->type, "outbox.job.dead") == 0)
			dead[ndead++] = seqs[i];
	}
	outbox_await_wake(MyDatabaseId, seqs, n);
	outbox_notify_fanned(seqs, n);
	announce_jobs(list, n);
	outbox_notify_dead(dead, ndead);
}

/*
 * Run one pass, and redo it in parts when it fails.  Raises nothing but what
 * ends the process: other errors are reported in *pass, and what was claimed
 * and not finished is unmarked still.
 *
 * Memory is allocated in the current context, which the caller resets.
 */
void
outbox_pass(OutboxPass *pass)
{
	MemoryContext context = CurrentMemoryContext;
	OutboxEvent *events = NULL;
	OutboxRange range = pass->range;
	ErrorData  *edata = NULL;
	volatile int nfanned = 0;
	volatile int njobs = 0;

	due_until = GetCurrentTimestamp();
	PG_TRY();
	{
		int64		version;

		if (outbox_begin_and_claim(pass, &events, &version))
		{
			outbox_route_events(events, pass->claimed, version);
			nfanned = within_job_limit(pass, events);
			njobs = outbox_enqueue(events, nfanned);
		}
		outbox_worker_commit();
	}
	PG_CATCH();
	{
		edata = outbox_catch_error(context);
		outbox_worker_abort();
		MemoryContextSwitchTo(context);
	}
	PG_END_TRY();
	if (edata == NULL)
	{
		pass->fanned = nfanned;
		pass->jobs = njobs;
		if (njobs > 0)
			outbox_redo_success();
		if (pass->left && pass->db != NULL)
			outbox_doorbell_post(pass->db, pass->left_low, pass->left_high);
		outbox_announce(NIL, events, nfanned);
		return;
	}

	pass->error = outbox_error_text(edata, false);
	ereport(LOG,
			(errcode(edata->sqlerrcode),
			 errmsg_plural("outbox relay failed to fan out %d event: %s",
						   "outbox relay failed to fan out %d events: %s",
						   pass->claimed, pass->claimed,
						   edata->message ? edata->message : "")));
	if (hopeless(edata->sqlerrcode) || pass->claimed == 0)
	{
		/*
		 * a claim that failed has posted nothing, so all of it is to be
		 * redone
		 */
		if (pass->claimed == 0)
			pass->range = range;
		pass->trouble = true;
		return;
	}
	PG_TRY();
	{
		while (outbox_redo_once(pass))
			CHECK_FOR_INTERRUPTS();
	}
	PG_CATCH();
	{
		edata = outbox_catch_error(context);
		outbox_worker_abort();
		MemoryContextSwitchTo(context);
		pass->error = outbox_error_text(edata, false);
		pass->trouble = true;
		ereport(LOG,
				(errcode(edata->sqlerrcode),
				 errmsg("outbox relay failed to redo events: %s",
						edata->message ? edata->message : "")));
	}
	PG_END_TRY();
	outbox_redo_report(pass);
}

/*
 * Look up the earliest retry_at, whether the database is at rest, and whether
 * there may be prepared transactions of which nothing is known.
 */
static TimestampTz
look_up_retry(bool *resting)
{
	static OutboxPlan next = {
		"SELECT (SELECT e.retry_at FROM outbox.events e"
		" WHERE e.retry_at IS NOT NULL AND e.fanned_out_at IS NULL AND e.poisoned_at IS NULL"
		" ORDER BY e.retry_at LIMIT 1),"
		" EXISTS (SELECT FROM outbox.armed a"
		" WHERE a.database OPERATOR(pg_catalog.=) $1 AND a.stopped_at IS NULL),"
		" EXISTS (SELECT FROM pg_catalog.pg_prepared_xact())",
		1, {OIDOID}, NULL
	};

	/* a time too far in the future is due to a clock that was set back */
	static OutboxPlan mend = {
		"UPDATE outbox.events SET retry_at = $1"
		" WHERE retry_at OPERATOR(pg_catalog.>) $2 AND retry_at IS NOT NULL"
		" AND fanned_out_at IS NULL AND poisoned_at IS NULL"
		" AND (SELECT true FROM outbox.armed a"
		" WHERE a.database OPERATOR(pg_catalog.=) $3 AND a.stopped_at IS NULL)",
		3, {TIMESTAMPTZOID, TIMESTAMPTZOID, OIDOID}, NULL
	};
	uint32		doubts = outbox_doorbell_doubts();
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz result = 0;
	Datum		values[3];
	Datum		value;
	bool		isnull;

	*resting = true;
	outbox_worker_begin("looking for events that wait for a retry");
	if (outbox_lock_extension())
	{
		values[0] = TimestampTzGetDatum(now);
		values[1] = TimestampTzGetDatum(now + 2 * 1000 * outbox_retry_wait_ms(PG_INT16_MAX));
		values[2] = ObjectIdGetDatum(MyDatabaseId);
		outbox_execute(&mend, values, NULL, SPI_OK_UPDATE);
		values[0] = ObjectIdGetDatum(MyDatabaseId);
		outbox_execute(&next, values, NULL, SPI_OK_SELECT);
		value = outbox_spi_value(0, 1, &isnull);
		if (!isnull)
			result = DatumGetTimestampTz(value);
		*resting = !DatumGetBool(outbox_spi_value(0, 2, &isnull));
		if (!DatumGetBool(outbox_spi_value(0, 3, &isnull)))
			outbox_doorbell_no_doubts(doubts);
	}
	outbox_worker_commit();
	return result;
}

/*
 * When is the next event to be retried?  0: none waits.  In a transaction of
 * its own; when that fails, it is asked again after a while.
 */
TimestampTz
outbox_pass_next_retry(bool *resting)
{
	MemoryContext context = CurrentMemoryContext;
	TimestampTz now = GetCurrentTimestamp();
	volatile TimestampTz result = 0;
	int			i;

	PG_TRY();
	{
		result = look_up_retry(resting);
	}
	PG_CATCH();
	{
		ErrorData  *edata = outbox_catch_error(context);

		outbox_worker_abort();
		MemoryContextSwitchTo(context);
		ereport(LOG,
				(errcode(edata->sqlerrcode),
				 errmsg("outbox relay failed to look for events that wait for a retry: %s",
						edata->message ? edata->message : "")));
		result = TimestampTzPlusMilliseconds(now, outbox_retry_wait_ms(1));
	}
	PG_END_TRY();

	for (i = 0; i < nshunned; i++)
	{
		if (shunned[i].until == 0)
			continue;
		result = (result == 0) ? shunned[i].until : Min(result, shunned[i].until);
	}
	return result;
}
