/*-------------------------------------------------------------------------
 *
 * jobs.c
 *		From routed events to rows of outbox.jobs: coalesce, enqueue, mark.
 *
 * Everything is set-based: arrays go through unnest into one INSERT and one
 * UPDATE a pass.  The caller is connected to SPI, holds the events locked, and
 * decides what an error means.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "catalog/pg_type.h"
#include "commands/sequence.h"
#include "common/hashfn.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/numeric.h"
#include "utils/timestamp.h"

/* A delivery that may be covered by that of a later event */
typedef struct Coalesced
{
	OutboxEvent *event;
	OutboxTarget *target;
} Coalesced;

/* Compare two texts by their bytes, null before all others. */
static int
compare_text(const char *a, const char *b)
{
	if (a == NULL || b == NULL)
		return (a != NULL) - (b != NULL);
	return strcmp(a, b);
}

/* Order by what is coalesced: subscription, scope and subject, then seq. */
static int
compare_coalesced(const void *a, const void *b)
{
	const Coalesced *ca = a;
	const Coalesced *cb = b;
	int			result;

	if (ca->target->sub->id != cb->target->sub->id)
		return ca->target->sub->id < cb->target->sub->id ? -1 : 1;
	result = compare_text(ca->event->scope, cb->event->scope);
	if (result == 0)
		result = strcmp(ca->event->subject, cb->event->subject);
	if (result == 0)
		result = ca->event->seq < cb->event->seq ? -1 : ca->event->seq > cb->event->seq;
	return result;
}

/* Are two deliveries of one subscription, scope and subject? */
static bool
same_subject(const Coalesced *a, const Coalesced *b)
{
	return a->target->sub->id == b->target->sub->id &&
		compare_text(a->event->scope, b->event->scope) == 0 &&
		strcmp(a->event->subject, b->event->subject) == 0;
}

/*
 * Decide which deliveries are covered by a later one: of each coalescing
 * subscription, scope and subject only the event with the highest seq gets a
 * job, due when the first of them would be.  An event without a subject, or
 * whose filter has still to be evaluated, is never covered.
 */
static void
coalesce(OutboxEvent *events, int nevents)
{
	Coalesced  *list;
	int			n = 0;
	int			i,
				j;

	for (i = 0; i < nevents; i++)
	{
		for (j = 0; j < events[i].ntargets; j++)
		{
			OutboxTarget *target = &events[i].targets[j];

			target->covered_by = NULL;
			/* infinity means something else here */
			target->due_at = Min(events[i].not_before, END_TIMESTAMP - 1);
			if (target->sub->coalescing && events[i].subject != NULL && !target->filter_pending)
				n++;
		}
	}
	if (n < 2)
		return;

	list = palloc(n * sizeof(Coalesced));
	n = 0;
	for (i = 0; i < nevents; i++)
	{
		for (j = 0; j < events[i].ntargets; j++)
		{
			OutboxTarget *target = &events[i].targets[j];

			if (target->sub->coalescing && events[i].subject != NULL && !target->filter_pending)
			{
				list[n].event = &events[i];
				list[n++].target = target;
			}
		}
	}
	qsort(list, n, sizeof(Coalesced), compare_coalesced);
	for (i = n - 2; i >= 0; i--)
	{
		OutboxTarget *later = list[i + 1].target;

		if (!same_subject(&list[i], &list[i + 1]))
			continue;
		if (later->covered_by != NULL)
			later = later->covered_by;
		list[i].target->covered_by = later;
		later->due_at = Min(later->due_at, list[i].target->due_at);
	}
	pfree(list);
}

/*
 * Key of the scope and subject of an event, by which jobs of one subject find
 * each other.  A hash: two subjects may share one, which only makes one wait
 * for the other.
 */
int64
outbox_subject_key(const char *scope, const char *subject)
{
	uint64		hash = 0;

	if (scope != NULL)
		hash = DatumGetUInt64(hash_any_extended((const unsigned char *) scope,
												strlen(scope), 1));
	hash ^= DatumGetUInt64(hash_any_extended((const unsigned char *) subject,
											 strlen(subject), hash));
	return (int64) hash;
}

/* A job of an ordered subscription that is about to be added */
typedef struct Ordered
{
	OutboxTarget *target;
	int32		subscription;
	int64		key;
} Ordered;

/* Order by subject, the jobs of one in the order in which they are added. */
static int
compare_ordered(const void *a, const void *b)
{
	const Ordered *oa = a;
	const Ordered *ob = b;

	if (oa->subscription != ob->subscription)
		return oa->subscription < ob->subscription ? -1 : 1;
	if (oa->key != ob->key)
		return oa->key < ob->key ? -1 : 1;
	return oa->target->job < ob->target->job ? -1 : oa->target->job > ob->target->job;
}

/*
 * Jobs of an ordered subscription wait behind an older one of their subject:
 * they are due at infinity until that one has come to an end, and so are not in
 * the way of a claim.
 *
 * The youngest of those that are unfinished is locked until we have committed,
 * so that who ends it finds ours.  When that cannot be locked, somebody is about
 * to end it, and may have looked for the next one already: then the first of
 * ours is due, and the claim sees to the order.
 *
 * A claim passes over a job while it is locked, so when it is due that is posted
 * once more when the lock is gone.
 *
 * A long transaction must not keep others from ending their jobs: it locks none
 * and waits only behind jobs of its own.
 */
static void
hold_back(OutboxEvent *events, int nevents, bool only_own)
{
	static OutboxPlan lock = {
		"SELECT u.ord, o.due_at FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2))"
		" WITH ORDINALITY AS u(sub, key, ord)"
		" CROSS JOIN LATERAL (SELECT j.due_at FROM outbox.jobs j"
		" WHERE j.subscription_id OPERATOR(pg_catalog.=) u.sub"
		" AND j.subject_key OPERATOR(pg_catalog.=) u.key AND j.dead_at IS NULL AND j.done_at IS NULL"
		OUTBOX_YOUNGEST_FIRST " LIMIT 1 FOR SHARE SKIP LOCKED) o",
		2, {INT4ARRAYOID, INT8ARRAYOID}, NULL
	};
	static OutboxPlan own = {
		"SELECT u.ord, 'infinity'::timestamptz FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2))"
		" WITH ORDINALITY AS u(sub, key, ord)"
		" CROSS JOIN LATERAL (SELECT j.xmin FROM outbox.jobs j"
		" WHERE j.subscription_id OPERATOR(pg_catalog.=) u.sub"
		" AND j.subject_key OPERATOR(pg_catalog.=) u.key AND j.dead_at IS NULL AND j.done_at IS NULL"
		OUTBOX_YOUNGEST_FIRST " LIMIT 1) o WHERE o.xmin OPERATOR(pg_catalog.=) $3",
		3, {INT4ARRAYOID, INT8ARRAYOID, XIDOID}, NULL
	};
	Ordered    *list;
	OutboxTarget **firsts;
	Datum	   *columns[2];
	Datum		values[3];
	uint64		nlocked;
	int			nfirsts = 0;
	int			n = 0;
	int			i,
				j;

	for (i = 0; i < nevents; i++)
	{
		for (j = 0; j < events[i].ntargets; j++)
			n += events[i].targets[j].sub->ordered;
	}
	if (n == 0)
		return;
	list = palloc(n * sizeof(Ordered));
	n = 0;
	for (i = 0; i < nevents; i++)
	{
		for (j = 0; j < events[i].ntargets; j++)
		{
			OutboxTarget *target = &events[i].targets[j];

			if (!target->sub->ordered || events[i].subject == NULL || target->covered_by != NULL)
				continue;
			list[n].target = target;
			list[n].subscription = target->sub->id;
			list[n++].key = outbox_subject_key(events[i].scope, events[i].subject);
		}
	}
	if (n == 0)
		return;
	qsort(list, n, sizeof(Ordered), compare_ordered);

	firsts = palloc(n * sizeof(OutboxTarget *));
	columns[0] = palloc(n * sizeof(Datum));
	columns[1] = palloc(n * sizeof(Datum));
	for (i = 0; i < n; i++)
	{
		if (i > 0 && list[i].subscription == list[i - 1].subscription && list[i].key == list[i - 1].key)
		{
			list[i].target->due_at = DT_NOEND;
			continue;
		}
		firsts[nfirsts] = list[i].target;
		columns[0][nfirsts] = Int32GetDatum(list[i].subscription);
		columns[1][nfirsts++] = Int64GetDatum(list[i].key);
	}
	values[0] = outbox_make_array(columns[0], NULL, nfirsts, INT4OID);
	values[1] = outbox_make_array(columns[1], NULL, nfirsts, INT8OID);
	values[2] = TransactionIdGetDatum(only_own ? GetCurrentTransactionId() : InvalidTransactionId);
	nlocked = outbox_execute(only_own ? &own : &lock, values, NULL, SPI_OK_SELECT);
	for (i = 0; i < (int) nlocked; i++)
	{
		bool		isnull;
		int64		ord = DatumGetInt64(outbox_spi_value(i, 1, &isnull));
		TimestampTz due = DatumGetTimestampTz(outbox_spi_value(i, 2, &isnull));
		OutboxTarget *target = firsts[ord - 1];

		target->due_at = DT_NOEND;
		if (due != DT_NOEND)
		{
			outbox_hint_note(target->sub->id, due, target->sub->handler_owner);
			outbox_hint_note_abort(target->sub->id, due, target->sub->handler_owner);
		}
	}
	SPI_freetuptable(SPI_tuptable);
}

/* Have the due times of the new jobs posted when they have been committed. */
static void
note_jobs(OutboxEvent *events, int nevents, TimestampTz now)
{
	int			i,
				j;

	for (i = 0; i < nevents; i++)
	{
		for (j = 0; j < events[i].ntargets; j++)
			events[i].targets[j].sub->noted = DT_NOEND;
	}
	for (i = 0; i < nevents; i++)
	{
		for (j = 0; j < events[i].ntargets; j++)
		{
			OutboxTarget *target = &events[i].targets[j];

			if (target->covered_by == NULL && target->due_at != DT_NOEND)
				target->sub->noted = Min(target->sub->noted, Max(target->due_at, now));
		}
	}
	for (i = 0; i < nevents; i++)
	{
		for (j = 0; j < events[i].ntargets; j++)
		{
			OutboxSubscription *sub = events[i].targets[j].sub;

			if (sub->noted != DT_NOEND)
				outbox_hint_note(sub->id, sub->noted, sub->handler_owner);
			sub->noted = DT_NOEND;
		}
	}
}

/*
 * Insert the job rows of the events, set-based.  Ids are drawn from the
 * sequence first, since the marks need them too.
 */
static int
insert_jobs(OutboxEvent *events, int nevents, int njobs, TimestampTz now, bool only_own)
{
	/* the common case: every job is due now and needs no key */
	static OutboxPlan simple = {
		"INSERT INTO outbox.jobs (id, subscription_id, event_seq, due_at, created_at)"
		" OVERRIDING SYSTEM VALUE"
		" SELECT u.id, u.sub, u.seq, $4, $4"
		" FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3))"
		" AS u(id, sub, seq)",
		4, {INT8ARRAYOID, INT4ARRAYOID, INT8ARRAYOID, TIMESTAMPTZOID}, NULL
	};
	static OutboxPlan full = {
		"INSERT INTO outbox.jobs (id, subscription_id, event_seq, due_at, created_at, subject_key, filter_pending)"
		" OVERRIDING SYSTEM VALUE"
		" SELECT u.id, u.sub, u.seq, u.due, $4, u.key, u.pending"
		" FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3),"
		" pg_catalog.unnest($5), pg_catalog.unnest($6), pg_catalog.unnest($7))"
		" AS u(id, sub, seq, due, key, pending)",
		7, {INT8ARRAYOID, INT4ARRAYOID, INT8ARRAYOID, TIMESTAMPTZOID,
		TIMESTAMPTZARRAYOID, INT8ARRAYOID, BOOLARRAYOID}, NULL
	};
	Oid			sequence = outbox_our_relation("jobs_id_seq");
	Datum	   *columns[6];
	bool	   *nokey = palloc0(njobs * sizeof(bool));
	bool	   *nopending = palloc0(njobs * sizeof(bool));
	bool		plain = true;
	Datum		values[7];
	uint64		inserted;
	int			n = 0;
	int			i,
				j;

	for (i = 0; i < nevents; i++)
	{
		for (j = 0; j < events[i].ntargets; j++)
		{
			if (events[i].targets[j].covered_by == NULL)
				events[i].targets[j].job = nextval_internal(sequence, false);
		}
	}
	hold_back(events, nevents, only_own);

	for (i = 0; i < 6; i++)
		columns[i] = palloc(njobs * sizeof(Datum));
	for (i = 0; i < nevents; i++)
	{
		OutboxEvent *event = &events[i];

		for (j = 0; j < event->ntargets; j++)
		{
			OutboxTarget *target = &event->targets[j];
			bool		keyed = (target->sub->ordered || target->sub->coalescing) &&
				event->subject != NULL;

			if (target->covered_by != NULL)
				continue;
			columns[0][n] = Int64GetDatum(target->job);
			columns[1][n] = Int32GetDatum(target->sub->id);
			columns[2][n] = Int64GetDatum(event->seq);
			columns[3][n] = TimestampTzGetDatum(Max(target->due_at, now));
			columns[4][n] = Int64GetDatum(keyed ? outbox_subject_key(event->scope, event->subject) : 0);
			columns[5][n] = BoolGetDatum(true);
			nokey[n] = !keyed;
			nopending[n] = !target->filter_pending;
			plain &= !keyed && !target->filter_pending && target->due_at <= now;
			n++;
		}
	}

	values[0] = outbox_make_array(columns[0], NULL, n, INT8OID);
	values[1] = outbox_make_array(columns[1], NULL, n, INT4OID);
	values[2] = outbox_make_array(columns[2], NULL, n, INT8OID);
	values[3] = TimestampTzGetDatum(now);
	if (plain)
		inserted = outbox_execute(&simple, values, NULL, SPI_OK_INSERT);
	else
	{
		values[4] = outbox_make_array(columns[3], NULL, n, TIMESTAMPTZOID);
		values[5] = outbox_make_array(columns[4], nokey, n, INT8OID);
		values[6] = outbox_make_array(columns[5], nopending, n, BOOLOID);
		inserted = outbox_execute(&full, values, NULL, SPI_OK_INSERT);
	}
	if (inserted != (uint64) n)
		ereport(ERROR,
				(errcode(ERRCODE_TRIGGERED_DATA_CHANGE_VIOLATION),
				 errmsg("only " UINT64_FORMAT " of %d jobs were stored", inserted, n)));
	note_jobs(events, nevents, now);
	return n;
}

/* fanout of an event: the name of each subscription and the id of its job */
static Datum
make_fanout(OutboxEvent *event)
{
	JsonbValue	object;
	int			i;

	object.type = jbvObject;
	object.val.object.nPairs = event->ntargets;
	object.val.object.pairs = palloc0(Max(event->ntargets, 1) * sizeof(JsonbPair));
	for (i = 0; i < event->ntargets; i++)
	{
		OutboxTarget *target = &event->targets[i];
		OutboxTarget *winner = target->covered_by ? target->covered_by : target;
		JsonbPair  *pair = &object.val.object.pairs[i];

		/* the targets come in the order that jsonb wants of its keys */
		pair->key.type = jbvString;
		pair->key.val.string.val = target->sub->name;
		pair->key.val.string.len = strlen(target->sub->name);
		pair->value.type = jbvNumeric;
		pair->value.val.numeric = int64_to_numeric(winner->job);
		Assert(i == 0 || pair[-1].key.val.string.len < pair->key.val.string.len ||
			   (pair[-1].key.val.string.len == pair->key.val.string.len &&
				strcmp(pair[-1].key.val.string.val, pair->key.val.string.val) < 0));
	}
	return PointerGetDatum(JsonbValueToJsonb(&object));
}

/*
 * Mark the events as fanned out.  They are held locked, so each tid is still
 * that of the row that was claimed; the count is checked all the same.
 */
static void
mark_events(OutboxEvent *events, int nevents, TimestampTz now)
{
	static OutboxPlan mark = {
		"UPDATE outbox.events e SET fanned_out_at = $3, fanout = u.fanout, retry_at = NULL"
		" FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2)) AS u(tid, fanout)"
		" WHERE e.ctid OPERATOR(pg_catalog.=) u.tid",
		3, {TIDARRAYOID, JSONBARRAYOID, TIMESTAMPTZOID}, NULL
	};
	Datum	   *tids = palloc(nevents * sizeof(Datum));
	Datum	   *fanouts = palloc(nevents * sizeof(Datum));
	Datum		values[3];
	uint64		marked;
	int			i;

	for (i = 0; i < nevents; i++)
	{
		tids[i] = PointerGetDatum(&events[i].tid);
		fanouts[i] = make_fanout(&events[i]);
	}
	values[0] = outbox_make_array(tids, NULL, nevents, TIDOID);
	values[1] = outbox_make_array(fanouts, NULL, nevents, JSONBOID);
	values[2] = TimestampTzGetDatum(now);
	marked = outbox_execute(&mark, values, NULL, SPI_OK_UPDATE);
	if (marked != (uint64) nevents)
		ereport(ERROR,
				(errcode(ERRCODE_TRIGGERED_DATA_CHANGE_VIOLATION),
				 errmsg("only " UINT64_FORMAT " of %d events were marked", marked, nevents)));
}

/* Number of jobs that the events are to get, after coalescing */
static int
coalesce_and_count(OutboxEvent *events, int nevents)
{
	int			njobs = 0;
	int			i,
				j;

	coalesce(events, nevents);
	for (i = 0; i < nevents; i++)
	{
		for (j = 0; j < events[i].ntargets; j++)
			njobs += (events[i].targets[j].covered_by == NULL);
	}
	return njobs;
}

/*
 * Fan out routed events: their jobs and their marks.  Returns the number of
 * jobs made.
 */
int
outbox_enqueue(OutboxEvent *events, int nevents)
{
	TimestampTz now = GetCurrentTimestamp();
	int			njobs = coalesce_and_count(events, nevents);

	if (njobs > 0)
		insert_jobs(events, nevents, njobs, now, false);
	mark_events(events, nevents, now);
	return njobs;
}

/*
 * Make jobs for events that are marked already, and locked; the caller sees to
 * it that they name them.  Nobody is kept waiting until the transaction ends.
 * Returns the number of jobs made.
 */
int
outbox_enqueue_again(OutboxEvent *events, int nevents)
{
	int			njobs = coalesce_and_count(events, nevents);

	if (njobs > 0)
		insert_jobs(events, nevents, njobs, GetCurrentTimestamp(), true);
	return njobs;
}
