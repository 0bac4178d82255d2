/*-------------------------------------------------------------------------
 *
 * redo.c
 *		What is done when a pass fails.
 *
 * The pass is redone at once by halves, each in a subtransaction of its own,
 * down to the event that fails alone.  That event waits, and is poisoned when
 * it has failed often enough; the events around it are fanned out in the same
 * pass.
 *
 * Which errors are charged to an event is promise P5: those raised while it
 * was redone alone, of a class that data can cause, unless every event of the
 * redo failed.  Everything else is trouble of the server: the event waits but
 * is never poisoned for it.  See at_fault().
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"

/*
 * Writing subtransactions in one transaction.  More than 64 overflow the
 * cache of subtransaction ids, which slows every snapshot of the cluster.
 */
#define MAX_SUBXACTS 32

/* Server trouble alone, this many events in a row: leave the rest in peace */
#define MAX_TROUBLE 8

/* An event that waits uncharged for so long is reported once */
#define UNCHARGED_WARNING_MS (10 * 60 * 1000)

/* Poisonings of one pass that are reported one by one */
#define MAX_POISON_WARNINGS 10

/* An event that failed when it was redone alone */
typedef struct Failure
{
	OutboxEvent *event;
	int			sqlstate;
	char	   *message;		/* without detail, which may hold data */
	char	   *text;			/* with it: kept with the event alone */
	bool		charged;
	bool		poisoned;
	bool		warn_uncharged;
} Failure;

/* State of a redo */
typedef struct Redo
{
	OutboxPass *pass;
	int64		version;
	bool		lone;			/* the event is the only one of its pass */
	int			nsubxacts;		/* that wrote, in this transaction */
	bool		cut;			/* out of subtransactions: claim again */
	OutboxEvent *end;			/* behind the last event that is not done */
	bool		probed;			/* the last event has been tried out of turn */
	List	   *failures;		/* Failure * */
	List	   *fanned;			/* OutboxEvent *, in order */
	int64		jobs;
} Redo;

/* When this relay last made a job: the server can do its part */
static TimestampTz last_success = 0;

/* Since then, several events have failed together and were not charged */
static bool suspected = false;

/* An event with jobs has been fanned out. */
void
outbox_redo_success(void)
{
	last_success = GetCurrentTimestamp();
	suspected = false;
}

/* Is an error one that the data of an event can cause? */
static bool
chargeable(int sqlstate)
{
	switch (ERRCODE_TO_CATEGORY(sqlstate))
	{
		case MAKE_SQLSTATE('2', '2', '0', '0', '0'):
			/* no more ids: nobody's fault */
			return sqlstate != ERRCODE_SEQUENCE_GENERATOR_LIMIT_EXCEEDED;
		case MAKE_SQLSTATE('2', '1', '0', '0', '0'):
		case MAKE_SQLSTATE('2', '3', '0', '0', '0'):
		case MAKE_SQLSTATE('3', '8', '0', '0', '0'):
		case MAKE_SQLSTATE('3', '9', '0', '0', '0'):
		case MAKE_SQLSTATE('P', '0', '0', '0', '0'):
			return true;
	}
	return sqlstate == ERRCODE_DATA_CORRUPTED;
}

/* Some of the claimed events, to be fanned out in a subtransaction */
typedef struct Part
{
	Redo	   *redo;
	OutboxEvent *events;
	int			n;
	int			jobs;
} Part;

/* Route and fan out a part. */
static void
fan_out_part(void *arg)
{
	Part	   *part = arg;

	outbox_route_events(part->events, part->n, part->redo->version);
	part->jobs = outbox_enqueue(part->events, part->n);
}

/*
 * Fan out some events in a subtransaction.  Returns null, or the error for
 * which it was rolled back.
 */
static ErrorData *
try_part(Redo *redo, OutboxEvent *events, int n)
{
	Part		part = {redo, events, n, 0};
	ErrorData  *edata;
	int			i;

	redo->nsubxacts++;
	edata = outbox_try(fan_out_part, &part);
	if (edata == NULL)
	{
		redo->jobs += part.jobs;
		for (i = 0; i < n; i++)
			redo->fanned = lappend(redo->fanned, &events[i]);
	}
	return edata;
}

/* Are there enough failures to think that the server is in trouble? */
static bool
in_trouble(Redo *redo)
{
	ListCell   *lc;

	if (redo->fanned != NIL || list_length(redo->failures) < MAX_TROUBLE)
		return false;
	foreach(lc, redo->failures)
	{
		if (chargeable(((Failure *) lfirst(lc))->sqlstate))
			return false;
	}
	return true;
}

/* Try one event alone; what it failed for is kept. */
static void
redo_event(Redo *redo, OutboxEvent *event)
{
	ErrorData  *edata = try_part(redo, event, 1);
	Failure    *failure;

	if (edata == NULL)
		return;
	failure = palloc0(sizeof(Failure));
	failure->event = event;
	failure->sqlstate = edata->sqlerrcode;
	failure->message = outbox_error_text(edata, false);
	failure->text = outbox_error_text(edata, true);
	redo->failures = lappend(redo->failures, failure);
}

/*
 * Redo events by halves.  tried: they have failed together already.
 *
 * When it looks like trouble of the server, the last event is tried before that
 * is believed: a row of events that fail must not hold up those behind them.
 */
static void
redo_part(Redo *redo, OutboxEvent *events, int n, bool tried)
{
	if (!redo->probed && in_trouble(redo))
	{
		redo->probed = true;
		if (redo->nsubxacts < MAX_SUBXACTS && redo->end > events)
			redo_event(redo, --redo->end);
	}
	n = Min(n, (int) (redo->end - events));
	if (n <= 0 || redo->cut || in_trouble(redo))
		return;
	if (!tried || n == 1)
	{
		if (redo->nsubxacts >= MAX_SUBXACTS)
		{
			redo->cut = true;
			return;
		}
		if (n == 1)
		{
			redo_event(redo, events);
			return;
		}
		if (try_part(redo, events, n) == NULL)
			return;
	}
	redo_part(redo, events, n / 2, false);
	redo_part(redo, events + n / 2, n - n / 2, false);
}

/* Has any event of the redo gone, in this transaction or an earlier one? */
static bool
something_went(Redo *redo)
{
	return redo->fanned != NIL || redo->pass->fanned > 0;
}

/*
 * Is a failure the event's own fault?  It must be of a class that data can
 * cause, and something must tell the event from a server that can fan out
 * nothing:
 *
 * - another event went in the same redo, be it in an earlier transaction;
 * - or it has been charged before;
 * - or it has been tried before, and jobs were made since;
 * - or it is new and the only one of its pass, and no others wait that failed
 *   together and were charged with nothing.
 *
 * So what fails together waits uncharged, however few of it are retried at a
 * time, until something goes.  What is bad is charged from then on, even when
 * nothing else ever goes again.
 */
static bool
at_fault(Redo *redo, Failure *failure)
{
	OutboxEvent *event = failure->event;

	if (!chargeable(failure->sqlstate))
		return false;
	if (something_went(redo) || event->failures > 0)
		return true;
	if (event->tries > 0)
		return last_success >
			TimestampTzPlusMilliseconds(event->retry_at, -outbox_retry_wait_ms(event->tries));
	return redo->lone && !suspected;
}

/*
 * Decide, for each event that failed alone, whether it is charged, how long it
 * waits, and whether it is poisoned.
 */
static void
judge(Redo *redo)
{
	ListCell   *lc;

	/* all of them first: the verdict looks at the counters as they were */
	foreach(lc, redo->failures)
	{
		Failure    *failure = lfirst(lc);

		failure->charged = at_fault(redo, failure);
		if (!failure->charged && !redo->lone && !something_went(redo))
			suspected = true;
	}
	foreach(lc, redo->failures)
	{
		Failure    *failure = lfirst(lc);
		OutboxEvent *event = failure->event;

		event->tries = Min(event->tries + 1, PG_INT16_MAX);
		if (failure->charged)
		{
			event->failures = Min(event->failures + 1, PG_INT16_MAX);
			failure->poisoned = (event->failures >= outbox_poison_after);
		}
		else
		{
			/* has its wait passed the mark with this failure? */
			int64		before = 0;
			int			i;

			for (i = 1; i < event->tries && before < UNCHARGED_WARNING_MS; i++)
				before += outbox_retry_wait_ms(i);
			failure->warn_uncharged = before < UNCHARGED_WARNING_MS &&
				before + outbox_retry_wait_ms(event->tries) >= UNCHARGED_WARNING_MS;
		}
	}
}

/* Failures to be written down: n of them, from number first on */
typedef struct Writing
{
	List	   *failures;
	int			first;
	int			n;
	TimestampTz now;
} Writing;

/* Write failures down, set-based. */
static void
write_failures(void *arg)
{
	Writing    *writing = arg;
	List	   *failures = writing->failures;
	int			first = writing->first;
	int			n = writing->n;
	TimestampTz now = writing->now;
	static OutboxPlan write = {
		"UPDATE outbox.events e SET tries = u.tries, failures = u.failures,"
		" last_error = u.error, retry_at = u.retry_at, poisoned_at = u.poisoned_at"
		" FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3),"
		" pg_catalog.unnest($4), pg_catalog.unnest($5), pg_catalog.unnest($6))"
		" AS u(tid, tries, failures, error, retry_at, poisoned_at)"
		" WHERE e.ctid OPERATOR(pg_catalog.=) u.tid",
		6, {TIDARRAYOID, INT2ARRAYOID, INT2ARRAYOID, TEXTARRAYOID,
		TIMESTAMPTZARRAYOID, TIMESTAMPTZARRAYOID}, NULL
	};
	Datum	   *columns[6];
	bool	   *noretry = palloc0(n * sizeof(bool));
	bool	   *nopoison = palloc0(n * sizeof(bool));
	Datum		values[6];
	int			i;

	for (i = 0; i < 6; i++)
		columns[i] = palloc(n * sizeof(Datum));
	for (i = 0; i < n; i++)
	{
		Failure    *failure = list_nth(failures, first + i);
		OutboxEvent *event = failure->event;

		columns[0][i] = PointerGetDatum(&event->tid);
		columns[1][i] = Int16GetDatum(event->tries);
		columns[2][i] = Int16GetDatum(event->failures);
		columns[3][i] = CStringGetTextDatum(failure->text);
		columns[4][i] = TimestampTzGetDatum(TimestampTzPlusMilliseconds(now,
																		outbox_retry_wait_ms(event->tries)));
		columns[5][i] = TimestampTzGetDatum(now);
		noretry[i] = failure->poisoned;
		nopoison[i] = !failure->poisoned;
	}
	values[0] = outbox_make_array(columns[0], NULL, n, TIDOID);
	values[1] = outbox_make_array(columns[1], NULL, n, INT2OID);
	values[2] = outbox_make_array(columns[2], NULL, n, INT2OID);
	values[3] = outbox_make_array(columns[3], NULL, n, TEXTOID);
	values[4] = outbox_make_array(columns[4], noretry, n, TIMESTAMPTZOID);
	values[5] = outbox_make_array(columns[5], nopoison, n, TIMESTAMPTZOID);
	if (outbox_execute(&write, values, NULL, SPI_OK_UPDATE) != (uint64) n)
		elog(ERROR, "failures of events could not be written down");

	for (i = 0; i < n; i++)
	{
		Failure    *failure = list_nth(failures, first + i);

		if (failure->poisoned && strncmp(failure->event->type, "outbox.", 7) != 0)
			outbox_record_poisoned(failure->event, failure->message);
	}
}

/* As write_failures, in a subtransaction; false when it was rolled back. */
static bool
try_write_failures(OutboxPass *pass, List *failures, int first, int n, TimestampTz now)
{
	Writing		writing = {failures, first, n, now};
	ErrorData  *edata = outbox_try(write_failures, &writing);

	if (edata != NULL)
		pass->unwritten_error = edata->message;
	return edata == NULL;
}

/*
 * Write down what failed: all at once, or one by one when that fails.  An
 * event of which not even that can be written is left alone for a while, so
 * that it blocks nobody.  Returns how many were written.
 */
static int
record_failures(Redo *redo)
{
	TimestampTz now = GetCurrentTimestamp();
	int			n = list_length(redo->failures);
	int			written = 0;
	int			i;

	if (n == 0)
		return 0;
	if (try_write_failures(redo->pass, redo->failures, 0, n, now))
		return n;
	for (i = n - 1; i >= 0; i--)
	{
		Failure    *failure = list_nth(redo->failures, i);

		if (n > 1 && try_write_failures(redo->pass, redo->failures, i, 1, now))
			written++;
		else
		{
			redo->pass->unwritten++;
			outbox_shun(failure->event->seq);
			redo->failures = list_delete_nth_cell(redo->failures, i);
		}
	}
	return written;
}

/* Say what was poisoned, or waits for long, after the commit. */
static void
report_failures(Redo *redo)
{
	OutboxPass *pass = redo->pass;
	ListCell   *lc;

	foreach(lc, redo->failures)
	{
		Failure    *failure = lfirst(lc);
		OutboxEvent *event = failure->event;

		if (failure->poisoned)
		{
			if (++pass->poisoned <= MAX_POISON_WARNINGS)
				ereport(WARNING,
						(errcode(ERRCODE_WARNING),
						 errmsg_plural("outbox event " INT64_FORMAT " is poisoned after %d failure",
									   "outbox event " INT64_FORMAT " is poisoned after %d failures",
									   event->failures, event->seq, event->failures),
						 errdetail_log("%s", failure->message),
						 errhint("Mend the cause, then call outbox.requeue(" INT64_FORMAT ").",
								 event->seq)));
			outbox_await_wake(MyDatabaseId, &event->seq, 1);
			if (strncmp(event->type, "outbox.", 7) != 0)
				outbox_notify_poisoned(event, failure->sqlstate);
		}
		else if (failure->warn_uncharged)
			ereport(WARNING,
					(errcode(ERRCODE_WARNING),
					 errmsg("outbox event " INT64_FORMAT " has not been fanned out for a long time",
							event->seq),
					 errdetail_log("%s", failure->message)));
	}
}

/* At the end of a whole redo: say what was not said one by one. */
void
outbox_redo_report(OutboxPass *pass)
{
	int			more = pass->poisoned - MAX_POISON_WARNINGS;

	if (more > 0)
		ereport(WARNING,
				(errcode(ERRCODE_WARNING),
				 errmsg_plural("%d more outbox event is poisoned",
							   "%d more outbox events are poisoned",
							   more, more)));
	if (pass->unwritten > 0)
		ereport(LOG,
				(errcode(ERRCODE_WARNING),
				 errmsg_plural("outbox relay could not write down the failure of %d event: %s",
							   "outbox relay could not write down the failures of %d events: %s",
							   pass->unwritten, pass->unwritten,
							   pass->unwritten_error ? pass->unwritten_error : "")));
}

/*
 * One transaction of a redo.  Returns true when it ran out of subtransactions
 * and there is more to redo.
 */
bool
outbox_redo_once(OutboxPass *pass)
{
	Redo		redo = {0};
	OutboxEvent *events = NULL;
	Failure    *failure;

	/* in the pass too: not what is left of several, by us or another relay */
	redo.lone = (pass->claimed == 1);
	redo.pass = pass;
	if (!outbox_begin_and_claim(pass, &events, &redo.version))
	{
		outbox_worker_commit();
		return false;
	}
	redo.lone = redo.lone && pass->claimed == 1;
	redo.end = events + pass->claimed;
	redo_part(&redo, events, pass->claimed, pass->claimed > 1);
	judge(&redo);
	pass->trouble = in_trouble(&redo);
	failure = redo.failures ? linitial(redo.failures) : NULL;
	pass->failures += list_length(redo.failures);
	if (redo.failures != NIL)
	{
		pass->retry_set = true;
		if (record_failures(&redo) == 0 && redo.fanned == NIL)
			pass->trouble = true;
	}
	outbox_worker_commit();

	if (failure != NULL)
		pass->error = pstrdup(failure->message);
	pass->fanned += list_length(redo.fanned);
	pass->jobs += redo.jobs;
	if (redo.jobs > 0)
		outbox_redo_success();
	if (redo.fanned != NIL)
		outbox_announce(redo.fanned, NULL, 0);
	report_failures(&redo);
	return redo.cut && !pass->trouble;
}
