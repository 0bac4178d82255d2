/*-------------------------------------------------------------------------
 *
 * filter.c
 *		The filters of subscriptions: a jsonpath that looks at the payload.
 *
 * A path is data, not code of a user's: it can do no harm but take its time.
 * So in one call each evaluation may use FILTER_LIMIT of processor time, each
 * subscription FILTER_SHARE and all of them FILTER_TOTAL.  Beyond that, and for
 * a payload of more than MAX_FILTERED bytes, the filter is left to who takes
 * the job (filter_pending).
 *
 * Time is measured by a timer that ticks while filters are evaluated.  It
 * counts processor time, because on a busy machine a harmless filter may stand
 * still for longer than its limit.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include <time.h>

#include "access/detoast.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"

#define FILTER_TICK 10			/* ms between two ticks */
#define FILTER_LIMIT 50000		/* us for one evaluation */
#define FILTER_SHARE 250000		/* us for one subscription in one call */
#define FILTER_TOTAL 1000000	/* us for all of them in one call */
#define MAX_FILTERED (1024 * 1024)	/* bytes of payload */

/* An event of which some filter must be evaluated */
typedef struct FilterEvent
{
	OutboxEvent *event;
	OutboxContent content;
	bool		fetched;
	int			next;			/* target that comes next */
} FilterEvent;

/* The state of the loop, which outlives an error */
typedef struct FilterLoop
{
	FilterEvent *events;
	int			nevents;
	int			next;			/* event that is being looked at */
	MemoryContext event_context;	/* payload and variables of that event */
	MemoryContext context;		/* one evaluation */
	Jsonb	   *payload;		/* NULL: not read yet */
	Jsonb	   *vars;
	bool		evaluating;		/* an error now is one of the filter */
	bool		patient;		/* no filter is left to anybody else */
	int64		spent;			/* time that all filters took, in us */
} FilterLoop;

/* What the handler of the timer looks at and sets */
static TimeoutId timer = MAX_TIMEOUTS;
static volatile uint32 evaluation = 0;	/* the one under way; 0: none */
static volatile int64 spent = 0;	/* us that it surely took */
static volatile int64 charged = 0;	/* us that ticks have charged to it */
static volatile int64 limit = FILTER_LIMIT; /* of that one, in us */
static volatile sig_atomic_t out_of_time = false;
static uint32 ticked = 0;		/* evaluation at the last tick */
static int64 ticked_at = 0;		/* processor time then, in us */

/* Processor time of this process, in us; may be called by a signal handler */
static int64
processor_time(void)
{
	struct timespec ts;

	if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts) != 0)
		return 0;
	return (int64) ts.tv_sec * 1000000 + ts.tv_nsec / 1000;
}

/*
 * The timer ticks.  Time since the last tick is charged to the evaluation that
 * is under way, which is fair on average.  If it was under way then too, it
 * surely took that time, and is cancelled like a query when it has had its
 * limit.  When a cancel is pending already, it is somebody else's and wins.
 */
static void
tick(void)
{
	int64		now = processor_time();

	if (evaluation != 0)
		charged += now - ticked_at;
	if (evaluation != 0 && evaluation == ticked)
	{
		spent += now - ticked_at;
		if (spent >= limit && !QueryCancelPending)
		{
			out_of_time = true;
			QueryCancelPending = true;
			InterruptPending = true;
		}
	}
	ticked = evaluation;
	ticked_at = now;
}

/* Begin to time an evaluation. */
static void
timer_start(void)
{
	static uint32 number = 0;

	if (++number == 0)
		number = 1;
	spent = 0;
	charged = 0;
	out_of_time = false;
	evaluation = number;
}

/*
 * End it; true when it ran out of time.
 *
 * A cancel of ours that came too late must not hit the next statement.  That
 * it is not also somebody else's, who sent it in the same moment, cannot be
 * told, except for the time-outs of core.
 */
static bool
timer_stop(void)
{
	bool		result;

	evaluation = 0;
	result = out_of_time;
	out_of_time = false;
	if (result && QueryCancelPending &&
		!get_timeout_indicator(STATEMENT_TIMEOUT, false) &&
		!get_timeout_indicator(LOCK_TIMEOUT, false))
		QueryCancelPending = false;
	return result;
}

/*
 * Does an error in the evaluation mean no match?  All do but trouble of the
 * server, and that of the session: else one filter could stop all events.
 */
static bool
is_filter_error(int sqlerrcode)
{
	switch (ERRCODE_TO_CATEGORY(sqlerrcode))
	{
		case ERRCODE_TRANSACTION_ROLLBACK:
		case ERRCODE_INSUFFICIENT_RESOURCES:
		case ERRCODE_OPERATOR_INTERVENTION:
		case ERRCODE_SYSTEM_ERROR:
			return false;
		default:
			return true;
	}
}

/* Add a key to an object that is being built. */
static void
add_key(JsonbInState *state, const char *name)
{
	JsonbValue	v;

	v.type = jbvString;
	v.val.string.val = unconstify(char *, name);
	v.val.string.len = strlen(name);
	pushJsonbValue(state, WJB_KEY, &v);
}

/* Add a text to it, or null. */
static void
add_text(JsonbInState *state, const char *name, char *value)
{
	JsonbValue	v;

	add_key(state, name);
	if (value == NULL)
		v.type = jbvNull;
	else
	{
		v.type = jbvString;
		v.val.string.val = value;
		v.val.string.len = strlen(value);
	}
	pushJsonbValue(state, WJB_VALUE, &v);
}

/* Build the variables of a path: type, subject, scope and headers. */
static Jsonb *
make_variables(const FilterEvent *fe)
{
	JsonbInState state = {0};
	JsonbValue	v;

	pushJsonbValue(&state, WJB_BEGIN_OBJECT, NULL);
	add_text(&state, "type", fe->event->type);
	add_text(&state, "subject", fe->event->subject);
	add_text(&state, "scope", fe->event->scope);
	if (fe->content.no_headers)
		add_text(&state, "headers", NULL);
	else
	{
		add_key(&state, "headers");
		JsonbToJsonbValue(DatumGetJsonbP(fe->content.headers), &v);
		pushJsonbValue(&state, WJB_VALUE, &v);
	}
	pushJsonbValue(&state, WJB_END_OBJECT, NULL);
	return JsonbValueToJsonb(state.result);
}

/* Is an item neither false nor null? */
static bool
item_accepts(Jsonb *item)
{
	JsonbValue	v;

	if (!JB_ROOT_IS_SCALAR(item))
		return true;
	(void) JsonbExtractScalar(&item->root, &v);
	return v.type == jbvBool ? v.val.boolean : v.type != jbvNull;
}

/*
 * Run a path silently on a payload: does it yield an item that is neither
 * false nor null?
 *
 * The items are asked for one by one, because an array of them could be many
 * times as large as the payload.  What is allocated is freed when the current
 * context is reset, with the state of the call.
 */
static bool
path_accepts(JsonPath *path, Jsonb *payload, Jsonb *vars)
{
	LOCAL_FCINFO(fcinfo, 4);
	FmgrInfo	flinfo;
	ReturnSetInfo rsinfo;

	fmgr_info(F_JSONB_PATH_QUERY_TZ, &flinfo);
	memset(&rsinfo, 0, sizeof(rsinfo));
	rsinfo.type = T_ReturnSetInfo;
	rsinfo.econtext = CreateStandaloneExprContext();
	rsinfo.allowedModes = (int) SFRM_ValuePerCall;
	rsinfo.returnMode = SFRM_ValuePerCall;
	InitFunctionCallInfoData(*fcinfo, &flinfo, 4, InvalidOid, NULL, (Node *) &rsinfo);
	fcinfo->args[0].value = JsonbPGetDatum(payload);
	fcinfo->args[0].isnull = false;
	fcinfo->args[1].value = PointerGetDatum(path);
	fcinfo->args[1].isnull = false;
	fcinfo->args[2].value = JsonbPGetDatum(vars);
	fcinfo->args[2].isnull = false;
	fcinfo->args[3].value = BoolGetDatum(true);
	fcinfo->args[3].isnull = false;
	for (;;)
	{
		Datum		item;

		CHECK_FOR_INTERRUPTS();
		fcinfo->isnull = false;
		rsinfo.isDone = ExprSingleResult;
		item = FunctionCallInvoke(fcinfo);
		if (rsinfo.isDone != ExprMultipleResult)
			return false;
		if (!fcinfo->isnull && item_accepts(DatumGetJsonbP(item)))
			return true;
	}
}

/*
 * Read the contents of events by their ctids: locked rows stay where they are.
 * Those that are not locked are read by their seqs, and one that has gone has
 * no targets any more.
 */
static void
fetch_contents(FilterEvent *events, int nevents, bool locked)
{
	static OutboxPlan by_seq = {
		"SELECT u.ord, e.payload, e.headers"
		" FROM pg_catalog.unnest($1) WITH ORDINALITY u(seq, ord)"
		" JOIN outbox.events e ON e.seq OPERATOR(pg_catalog.=) u.seq",
		1, {INT8ARRAYOID}, NULL
	};
	static OutboxPlan fetch = {
		"SELECT u.ord, e.payload, e.headers"
		" FROM pg_catalog.unnest($1) WITH ORDINALITY u(t, ord)"
		" JOIN outbox.events e ON e.ctid OPERATOR(pg_catalog.=) u.t",
		1, {TIDARRAYOID}, NULL
	};
	Datum	   *keys = palloc(nevents * sizeof(Datum));
	Datum		value;
	uint64		nrows;
	bool		isnull;
	int			i;

	for (i = 0; i < nevents; i++)
		keys[i] = locked ? PointerGetDatum(&events[i].event->tid) :
			Int64GetDatum(events[i].event->seq);
	value = outbox_make_array(keys, NULL, nevents, locked ? TIDOID : INT8OID);
	nrows = outbox_execute(locked ? &fetch : &by_seq, &value, NULL, SPI_OK_SELECT);
	for (i = 0; i < (int) nrows; i++)
	{
		int64		ord = DatumGetInt64(outbox_spi_value(i, 1, &isnull));
		FilterEvent *fe = &events[ord - 1];

		fe->content.payload = outbox_spi_value(i, 2, &isnull);
		fe->content.headers = outbox_spi_value(i, 3, &fe->content.no_headers);
		fe->fetched = true;
	}
	for (i = 0; i < nevents; i++)
	{
		if (!events[i].fetched && !locked)
			events[i].event->ntargets = 0;
		else if (!events[i].fetched)
			elog(ERROR, "event " INT64_FORMAT " is not where it was claimed",
				 events[i].event->seq);
	}
	pfree(keys);
}

/* Take a target from its event. */
static void
remove_target(OutboxEvent *event, int i)
{
	event->ntargets--;
	memmove(&event->targets[i], &event->targets[i + 1],
			(event->ntargets - i) * sizeof(OutboxTarget));
}

/*
 * An evaluation has ended.  Either it was decided whether the target stays, or
 * the filter took too long and the target waits for another to decide.
 */
static void
settle(FilterEvent *fe, bool accepted, bool pending)
{
	OutboxTarget *target = &fe->event->targets[fe->next];

	if (pending)
		target->filter_pending = true;
	if (accepted || pending)
		fe->next++;
	else
		remove_target(fe->event, fe->next);
}

/* Evaluate the filter of the target that comes next, if it has one. */
static void
evaluate_next(FilterLoop *loop, FilterEvent *fe)
{
	OutboxSubscription *sub = fe->event->targets[fe->next].sub;
	MemoryContext old;
	bool		accepted;

	if (sub->filter == NULL)
	{
		fe->next++;
		return;
	}
	if (!loop->patient &&
		(sub->slow_filter || sub->filter_spent > FILTER_SHARE || loop->spent > FILTER_TOTAL ||
		 toast_raw_datum_size(fe->content.payload) - VARHDRSZ > MAX_FILTERED))
	{
		settle(fe, false, true);
		return;
	}
	if (loop->payload == NULL)
	{
		old = MemoryContextSwitchTo(loop->event_context);
		loop->vars = make_variables(fe);
		loop->payload = DatumGetJsonbP(fe->content.payload);
		MemoryContextSwitchTo(old);
	}

	old = MemoryContextSwitchTo(loop->context);
	loop->evaluating = true;
	timer_start();
	accepted = path_accepts(sub->filter, loop->payload, loop->vars);
	sub->slow_filter = timer_stop();
	sub->filter_spent += charged;
	loop->spent += charged;
	loop->evaluating = false;
	MemoryContextSwitchTo(old);

	settle(fe, accepted, false);
	MemoryContextReset(loop->context);
}

/* Evaluate until all is done, or an error throws us out. */
static void
evaluate_some(FilterLoop *loop)
{
	while (loop->next < loop->nevents)
	{
		FilterEvent *fe = &loop->events[loop->next];

		while (fe->next < fe->event->ntargets)
		{
			CHECK_FOR_INTERRUPTS();
			evaluate_next(loop, fe);
		}
		loop->next++;
		loop->payload = NULL;
		loop->vars = NULL;
		MemoryContextReset(loop->event_context);
	}
}

/*
 * An evaluation has thrown an error: is it the filter's own?  Then the target
 * is settled and the loop goes on; any other goes on its way.  In either case
 * the subtransaction must be over first: an abort of the whole transaction
 * would take it for a savepoint of the user's.
 */
static void
handle_error(FilterLoop *loop)
{
	FilterEvent *fe = &loop->events[loop->next];
	OutboxSubscription *sub;
	bool		slow = timer_stop();
	ErrorData  *error = CopyErrorData();
	bool		timed_out = (slow && error->sqlerrcode == ERRCODE_QUERY_CANCELED);

	FlushErrorState();
	RollbackAndReleaseCurrentSubTransaction();
	if (!loop->evaluating || (!timed_out && !is_filter_error(error->sqlerrcode)))
		ReThrowError(error);
	FreeErrorData(error);

	loop->evaluating = false;
	sub = fe->event->targets[fe->next].sub;
	sub->slow_filter = slow;
	sub->filter_spent += charged;
	loop->spent += charged;
	settle(fe, false, timed_out);
	MemoryContextReset(loop->context);
}

/*
 * Evaluate in a subtransaction, which an error rolls back and the next one
 * follows.  Nothing is written, so it gets no xid and costs little.
 */
static void
evaluate_all(FilterLoop *loop)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;

	while (loop->next < loop->nevents)
	{
		BeginInternalSubTransaction(NULL);
		MemoryContextSwitchTo(context);
		ticked = 0;
		ticked_at = processor_time();
		if (!loop->patient)
			enable_timeout_every(timer,
								 TimestampTzPlusMilliseconds(GetCurrentTimestamp(), FILTER_TICK),
								 FILTER_TICK);
		PG_TRY();
		{
			evaluate_some(loop);
			disable_timeout(timer, false);
			ReleaseCurrentSubTransaction();
		}
		PG_CATCH();
		{
			disable_timeout(timer, false);
			MemoryContextSwitchTo(context);
			handle_error(loop);
		}
		PG_END_TRY();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = owner;
	}
}

/* List the events of which some filter must be evaluated; returns how many. */
static int
list_events(OutboxEvent *events, int nevents, FilterEvent *list)
{
	int			n = 0;
	int			i,
				j;

	for (i = 0; i < nevents; i++)
	{
		bool		wanted = false;

		for (j = 0; j < events[i].ntargets; j++)
		{
			OutboxTarget *target = &events[i].targets[j];

			if (target->sub->filter == NULL)
				continue;
			target->sub->filter_spent = 0;
			if (target->sub->slow_filter)
				target->filter_pending = true;
			else
				wanted = true;
		}
		if (wanted)
			list[n++].event = &events[i];
	}
	return n;
}

/*
 * Take away the targets of events whose filters do not accept them, and mark
 * those that cannot be decided here, unless there is all the time in the world.
 */
static void
filter_events(OutboxEvent *events, int nevents, const OutboxContent *content, bool patient)
{
	FilterLoop	loop;
	int			guc_level;

	memset(&loop, 0, sizeof(loop));
	loop.events = palloc0((nevents + 1) * sizeof(FilterEvent));
	loop.patient = patient;
	loop.nevents = list_events(events, nevents, loop.events);
	if (loop.nevents == 0)
	{
		pfree(loop.events);
		return;
	}
	if (content != NULL)
		loop.events[0].content = *content;
	else
		fetch_contents(loop.events, loop.nevents, !patient);

	if (timer == MAX_TIMEOUTS)
		timer = RegisterTimeout(USER_TIMEOUT, tick);
	loop.event_context = AllocSetContextCreate(CurrentMemoryContext, "outbox filtered event",
											   ALLOCSET_DEFAULT_SIZES);
	loop.context = AllocSetContextCreate(CurrentMemoryContext, "outbox filter",
										 ALLOCSET_DEFAULT_SIZES);

	/* a path may compare times: the session's zone must not decide */
	guc_level = NewGUCNestLevel();
	(void) set_config_option("TimeZone", "UTC", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	PushActiveSnapshot(GetTransactionSnapshot());	/* for TOAST */
	evaluate_all(&loop);
	PopActiveSnapshot();
	AtEOXact_GUC(true, guc_level);

	MemoryContextDelete(loop.context);
	MemoryContextDelete(loop.event_context);
	if (content == NULL)
		SPI_freetuptable(SPI_tuptable);
	pfree(loop.events);
}

/*
 * For the relay, and who asks what it would do.  content is that of the one
 * event, or NULL: then the contents of those events, which are locked, that
 * need it are read from the table, so that an unreadable payload troubles
 * nobody who does not look at it.  The caller is connected to SPI.
 */
void
outbox_filter_events(OutboxEvent *events, int nevents, const OutboxContent *content)
{
	filter_events(events, nevents, content, false);
}

/*
 * For a caller whose own time it is: nothing is left to anybody else.  The
 * events need not be locked.
 */
void
outbox_filter_patiently(OutboxEvent *events, int nevents)
{
	filter_events(events, nevents, NULL, true);
}

/* One evaluation outside of a pass */
typedef struct SingleFilter
{
	FilterEvent fe;
	JsonPath   *filter;
	bool		accepted;
} SingleFilter;

/* Evaluate it; in a subtransaction. */
static void
evaluate_single(void *arg)
{
	SingleFilter *single = arg;
	Jsonb	   *vars = make_variables(&single->fe);

	timer_start();
	single->accepted = path_accepts(single->filter, DatumGetJsonbP(single->fe.content.payload), vars);
	disable_timeout(timer, false);
	if (timer_stop())
		ereport(ERROR,
				(errcode(ERRCODE_QUERY_CANCELED),
				 errmsg("filter takes too long")));
}

/*
 * Does a filter accept an event?  For a delivery that the relay left undecided:
 * here it may take limit_ms of processor time.  One that takes longer does not
 * accept, like one that fails.  The caller is connected to SPI.
 */
bool
outbox_filter_accepts(JsonPath *filter, int64 seq, int limit_ms)
{
	static OutboxPlan fetch = {
		"SELECT e.type, e.subject, e.scope, e.payload, e.headers FROM outbox.events e"
		" WHERE e.seq OPERATOR(pg_catalog.=) $1",
		1, {INT8OID}, NULL
	};
	SingleFilter single = {0};
	OutboxEvent event = {0};
	Datum		value = Int64GetDatum(seq);
	ErrorData  *error;
	int			guc_level;
	bool		isnull;

	if (outbox_execute(&fetch, &value, NULL, SPI_OK_SELECT) == 0)
		return true;			/* who takes the job will find that out */
	event.type = outbox_spi_string(0, 1);
	event.subject = outbox_spi_string(0, 2);
	event.scope = outbox_spi_string(0, 3);
	single.fe.event = &event;
	single.fe.content.payload = outbox_spi_value(0, 4, &isnull);
	single.fe.content.headers = outbox_spi_value(0, 5, &single.fe.content.no_headers);
	single.filter = filter;

	if (timer == MAX_TIMEOUTS)
		timer = RegisterTimeout(USER_TIMEOUT, tick);
	guc_level = NewGUCNestLevel();
	(void) set_config_option("TimeZone", "UTC", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	PushActiveSnapshot(GetTransactionSnapshot());	/* for TOAST */
	limit = (int64) limit_ms * 1000;
	ticked = 0;
	ticked_at = processor_time();
	enable_timeout_every(timer,
						 TimestampTzPlusMilliseconds(GetCurrentTimestamp(), FILTER_TICK),
						 FILTER_TICK);
	error = outbox_try(evaluate_single, &single);
	disable_timeout(timer, false);
	limit = FILTER_LIMIT;
	if (error != NULL)
	{
		bool		slow = timer_stop();

		if (!(slow && error->sqlerrcode == ERRCODE_QUERY_CANCELED) &&
			!is_filter_error(error->sqlerrcode))
			ReThrowError(error);
	}
	PopActiveSnapshot();
	AtEOXact_GUC(true, guc_level);
	return error == NULL && single.accepted;
}
