/*-------------------------------------------------------------------------
 *
 * runner_job.c
 *		Running one job in a runner, and what follows from it.
 *
 * The handler, the completion of its job and the claim of the next one are one
 * transaction.  When it fails, only its own job is charged, in a transaction
 * that follows; one that failed in the claim of the next is charged to nobody.
 *
 *-------------------------------------------------------------------------
 */
#include "runner.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/interrupt.h"
#include "tcop/tcopprot.h"
#include "utils/memutils.h"

#define MAX_STORED_ERROR 2000	/* bytes of an error text */
#define LOG_PAUSE_US (10 * USECS_PER_SEC)	/* between two failures logged */

/* How far the transaction that runs a job has come */
typedef enum RunStage
{
	STAGE_BEGIN,				/* our statements before the handler */
	STAGE_USER,					/* the handler, or what it left for the commit */
	STAGE_COMPLETE,
	STAGE_CLAIM					/* of the next job */
} RunStage;

/* The run of a job; in memory that outlives an error */
typedef struct JobRun
{
	OutboxHeldJob job;
	OutboxRunnerSubscription *sub;	/* NULL: it is not to be run */
	RunStage	stage;
	TimestampTz began;			/* the handler did */
	OutboxCancel cancelled;
	bool		temp_used;		/* temporary objects */
	OutboxHeldJob next;			/* claimed with the completion */
} JobRun;

/* What went wrong: the message of the error, or why the handler was cancelled */
static const char *
failure_message(const ErrorData *edata, OutboxCancel cancelled)
{
	switch (cancelled)
	{
		case OUTBOX_CANCEL_LEASE:
			return "handler did not end within its lease";
		case OUTBOX_CANCEL_ASKED:
			return "handler was terminated by an administrator command";
		case OUTBOX_CANCEL_NONE:
			break;
	}
	return edata->message ? edata->message : "";
}

/* Text of a failure as it is stored, for the owner of the subscription */
static char *
failure_text(const ErrorData *edata, OutboxCancel cancelled)
{
	int			sqlstate = cancelled == OUTBOX_CANCEL_ASKED ? ERRCODE_ADMIN_SHUTDOWN :
		cancelled == OUTBOX_CANCEL_LEASE ? ERRCODE_QUERY_CANCELED : edata->sqlerrcode;
	StringInfoData text;

	initStringInfo(&text);
	appendStringInfo(&text, "%s: %s", unpack_sql_state(sqlstate), failure_message(edata, cancelled));
	if (edata->detail && cancelled == OUTBOX_CANCEL_NONE)
		appendStringInfo(&text, "\nDETAIL: %s", edata->detail);
	if (edata->hint && cancelled == OUTBOX_CANCEL_NONE)
		appendStringInfo(&text, "\nHINT: %s", edata->hint);
	if (edata->context)
		appendStringInfo(&text, "\nCONTEXT: %s", edata->context);
	return outbox_clip(text.data, MAX_STORED_ERROR);
}

/*
 * Log that a handler has failed, without what may hold data of the event, and
 * not each time: its owner has it all in the job.
 */
static void
log_failure(const char *handler, const char *message)
{
	static TimestampTz logged_at = 0;
	static int	unlogged = 0;
	TimestampTz now = GetCurrentTimestamp();

	if (now >= logged_at && now - logged_at < LOG_PAUSE_US)
	{
		unlogged++;
		return;
	}
	ereport(LOG,
			(errmsg("outbox handler %s failed: %s", handler, message),
			 unlogged == 0 ? 0 :
			 errdetail_plural("%d failure since the last message is not logged.",
							  "%d failures since the last message are not logged.",
							  unlogged, unlogged)));
	logged_at = now;
	unlogged = 0;
}

/* An attempt that failed; argument of fail_attempt */
typedef struct FailedAttempt
{
	const OutboxHeldJob *job;
	const char *text;
} FailedAttempt;

/* End it; in a subtransaction. */
static void
fail_attempt(void *arg)
{
	FailedAttempt *failed = arg;

	(void) outbox_fail_job(failed->job->id, failed->job->claim, GetUserId(), failed->text,
						   OUTBOX_RETRY_SCHEDULE, false);
}

/*
 * Record that the job's attempt has failed, in a transaction of its own.  When
 * its lease is lost it is somebody else's, and that is only said in the log.
 */
static void
record_failure(const OutboxHeldJob *job, const char *text)
{
	OutboxOwnerContext context;
	FailedAttempt failed;
	ErrorData  *edata = NULL;

	failed.job = job;
	failed.text = text;

	if (outbox_run_begin("recording a failure", &context))
	{
		edata = outbox_try(fail_attempt, &failed);
		outbox_become_caller(&context);
	}
	outbox_worker_commit();
	if (edata == NULL)
		return;
	if (edata->sqlerrcode != ERRCODE_OUTBOX_LEASE_LOST)
		ReThrowError(edata);
	ereport(LOG,
			(errcode(edata->sqlerrcode),
			 errmsg("outbox runner lost the lease of job " INT64_FORMAT ", of which attempt %d failed",
					job->id, job->attempt)));
}

/* Show what is under way: a text without anything of an event's. */
static void
show_activity(const char *activity)
{
	debug_query_string = activity;
	if (activity != NULL)
		pgstat_report_activity(STATE_RUNNING, activity);
}

/* Keep what a handler takes, on average. */
static void
note_time(OutboxRunnerSubscription *sub, TimestampTz began)
{
	int64		us = Max(GetCurrentTimestamp() - began, 1);

	outbox_hint_ran(sub->consumer.id, us);
	sub->run_us = sub->run_us == 0 ? us : (sub->run_us * 7 + us) / 8;
}

/*
 * The first part of the transaction that runs the job: see that it is still to
 * be run, and read its event.  Returns its subscription; NULL when it is not,
 * and the job has been dealt with.
 */
static OutboxRunnerSubscription *
prepare_run(OutboxHeldJob *job, Datum *event)
{
	OutboxOwnerContext context;
	OutboxRunnerSubscription *sub;
	int64		current;
	bool		found;

	if (!outbox_run_enter(&context))
		return NULL;
	*event = outbox_handler_event(job->seq, &current, &found);
	outbox_run_load(current);
	sub = outbox_run_find(job->subscription);
	if (sub == NULL || outbox_run.refused || sub->consumer.ordered != job->ordered ||
		job->leased_until <= GetCurrentTimestamp())
	{
		/* not ours any more, paused, or stopped for long before it began */
		outbox_run_release(job);
		sub = NULL;
	}
	else if (!found)
	{
		/* somebody has deleted the event: it can never be handled */
		(void) outbox_fail_job(job->id, job->claim, GetUserId(),
							   psprintf("event " INT64_FORMAT " does not exist", job->seq),
							   OUTBOX_RETRY_SCHEDULE, true);
		sub = NULL;
	}
	outbox_become_caller(&context);
	return sub;
}

/*
 * The last part: complete the job and claim the next one.  A transaction that
 * has one snapshot for all of it cannot claim.
 */
static void
finish_run(JobRun *run)
{
	OutboxOwnerContext context;

	outbox_become_owner(&context);
	outbox_pin_planner();
	(void) outbox_complete_job(run->job.id, run->job.claim, GetUserId());
	run->stage = STAGE_CLAIM;
	if (!outbox_run.alone && !IsolationUsesXactSnapshot() && !outbox_limit_asked() &&
		!ConfigReloadPending && !outbox_runner_should_go(false))
		(void) outbox_run_claim(false, &run->next);
	outbox_become_caller(&context);
}

/*
 * The transaction of a job: all of it but its end.  False when the job was not
 * to be run, and has been dealt with.
 */
static bool
run_in_transaction(JobRun *run)
{
	OutboxHeldJob *job = &run->job;
	Datum		event;

	run->sub = prepare_run(job, &event);
	if (run->sub == NULL)
		return false;
	outbox_spi_finish();
	MemoryContextSwitchTo(outbox_run.context);
	show_activity(run->sub->activity);
	run->began = GetCurrentTimestamp();
	run->stage = STAGE_USER;
	outbox_limit_begin(job->leased_until - run->began);
	outbox_handler_run(&run->sub->consumer, event, job->attempt);
	run->cancelled = outbox_limit_end();
	if (run->cancelled != OUTBOX_CANCEL_NONE)
		ereport(ERROR,
				(errcode(ERRCODE_QUERY_CANCELED),
				 errmsg("handler caught its cancellation")));

	run->stage = STAGE_COMPLETE;
	outbox_spi_connect();
	MemoryContextSwitchTo(outbox_run.context);
	finish_run(run);

	/* some of the handler's work may have been left for the commit */
	run->temp_used = (MyXactFlags & XACT_FLAGS_ACCESSEDTEMPNAMESPACE) != 0;
	run->stage = STAGE_USER;
	outbox_limit_begin(Max(job->leased_until - GetCurrentTimestamp(), 0));
	return true;
}

/* The job has failed: record it, unless it is somebody else's by now. */
static void
run_failed(const JobRun *run, const ErrorData *edata)
{
	outbox_run.streak = 0;
	if (run->stage == STAGE_COMPLETE && edata->sqlerrcode == ERRCODE_OUTBOX_LEASE_LOST)
	{
		ereport(LOG,
				(errcode(edata->sqlerrcode),
				 errmsg("outbox runner lost the lease of job " INT64_FORMAT ", and what attempt %d did is undone",
						run->job.id, run->job.attempt)));
		return;
	}
	if (run->stage == STAGE_CLAIM)
	{
		/* that the next one could not be claimed is no fault of this one */
		outbox_run.alone = true;
		outbox_run.held = run->job;
		outbox_run_release_held();
		return;
	}
	log_failure(run->sub ? run->sub->consumer.handler : "", failure_message(edata, run->cancelled));
	record_failure(&run->job, failure_text(edata, run->cancelled));
}

/* Run the job that is held. */
void
outbox_run_job(void)
{
	JobRun	   *run = palloc0(sizeof(JobRun));
	ErrorData  *edata = NULL;

	run->job = outbox_run.held;
	PG_TRY();
	{
		outbox_worker_begin("running a job");
		MemoryContextSwitchTo(outbox_run.context);
		(void) run_in_transaction(run);
		outbox_worker_commit();
	}
	PG_CATCH();
	{
		OutboxCancel late = outbox_limit_end();

		if (late != OUTBOX_CANCEL_NONE)
			run->cancelled = late;
		edata = outbox_catch_error(outbox_run.context);
		outbox_worker_abort();
	}
	PG_END_TRY();

	MemoryContextSwitchTo(outbox_run.context);
	show_activity(NULL);
	outbox_run.held.id = 0;
	if (run->sub != NULL)
	{
		outbox_handler_forget(run->temp_used);
		note_time(run->sub, run->began);
		outbox_runner_count(edata != NULL);
	}
	if (edata != NULL)
		run_failed(run, edata);
	else if (run->next.id != 0)
	{
		outbox_run.streak++;
		outbox_run.held = run->next;
	}
	else
		outbox_run.streak = 0;
	outbox_runner_shows(outbox_run.held.id != 0 ? outbox_run.held.subscription : 0,
						outbox_run.held.id);
}
