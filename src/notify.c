/*-------------------------------------------------------------------------
 *
 * notify.c
 *		Notifications that the relay sends and hears.
 *
 * What it sends goes out after the commit of the pass, in a transaction of its
 * own: a commit with a pending notification holds a lock of the whole cluster
 * over its flush, but a transaction of nothing else flushes nothing.  And when
 * the queue is full, the pass stands.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

/* we need the type of PqCommMethods only, not the headers of GSSAPI */
#undef ENABLE_GSS
#include "libpq/libpq.h"

#include "catalog/pg_type.h"
#include "commands/async.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "tcop/tcopprot.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

/* A payload must be shorter than 8000 bytes */
#define MAX_PAYLOAD 7999

int64		outbox_notify_failures = 0;

/* The channel listened on now; "": none */
static char listening[NAMEDATALEN];

static bool was_heard;

/*
 * The queue is full.  The server moves its tail on only when a notification has
 * been sent, or when it is asked how full the queue is; without this, a queue
 * that others have read meanwhile would stay full.
 */
static void
advance_queue(void)
{
	StartTransactionCommand();
	(void) OidFunctionCall0(F_PG_NOTIFICATION_QUEUE_USAGE);
	CommitTransactionCommand();
}

/*
 * Send payloads on a channel, in a transaction of its own.  Called outside a
 * transaction.  False when it failed, which is said once a minute at most.
 */
static bool
send_notifications(const char *channel, List *payloads)
{
	static TimestampTz warned_at = 0;
	MemoryContext context = CurrentMemoryContext;
	volatile bool ok = true;
	ListCell   *lc;

	PG_TRY();
	{
		SetCurrentStatementStartTimestamp();
		StartTransactionCommand();
		foreach(lc, payloads)
			Async_Notify(channel, (char *) lfirst(lc));
		CommitTransactionCommand();
		MemoryContextSwitchTo(context);
	}
	PG_CATCH();
	{
		ErrorData  *edata = outbox_catch_error(context);
		TimestampTz now = GetCurrentTimestamp();

		AbortCurrentTransaction();
		MemoryContextSwitchTo(context);
		outbox_notify_failures++;
		if (TimestampDifferenceExceeds(warned_at, now, 60 * 1000))
		{
			ereport(WARNING,
					(errcode(edata->sqlerrcode),
					 errmsg("outbox relay could not send notifications on channel \"%s\": %s",
							channel, edata->message ? edata->message : ""),
					 errdetail("Events are fanned out all the same.")));
			warned_at = now;
		}
		ok = false;
	}
	PG_END_TRY();
	if (!ok)
	{
		advance_queue();
		MemoryContextSwitchTo(context);
	}
	return ok;
}

/*
 * Announce seqs that have been fanned out: JSON arrays, as many as the limit
 * on the length of a payload needs.
 */
void
outbox_notify_fanned(const int64 *seqs, int nseqs)
{
	List	   *payloads = NIL;
	StringInfoData buf;
	int			i;

	if (outbox_fanned_channel[0] == '\0' || nseqs == 0)
		return;
	initStringInfo(&buf);
	for (i = 0; i < nseqs; i++)
	{
		char		number[32];

		snprintf(number, sizeof(number), INT64_FORMAT, seqs[i]);
		if (buf.len > 0 && buf.len + strlen(number) + 2 > MAX_PAYLOAD)
		{
			appendStringInfoChar(&buf, ']');
			payloads = lappend(payloads, buf.data);
			initStringInfo(&buf);
		}
		appendStringInfoChar(&buf, buf.len == 0 ? '[' : ',');
		appendStringInfoString(&buf, number);
	}
	appendStringInfoChar(&buf, ']');
	payloads = lappend(payloads, buf.data);
	send_notifications(outbox_fanned_channel, payloads);
}

/* Announce that an event is poisoned; anyone may listen, so no text of it. */
void
outbox_notify_poisoned(const OutboxEvent *event, int sqlstate)
{
	if (outbox_poisoned_channel[0] == '\0')
		return;
	send_notifications(outbox_poisoned_channel,
					   list_make1(psprintf("{\"seq\": " INT64_FORMAT ", \"failures\": %d, \"sqlstate\": \"%s\"}",
										   event->seq, event->failures,
										   unpack_sql_state(sqlstate))));
}

/* Tell a channel of a subscription's own that it has jobs. */
void
outbox_notify_jobs(const char *channel, const char *subscription)
{
	/* NOTIFY would refuse it; outbox.subscribe does so before */
	if (channel[0] == '\0' || strlen(channel) >= NAMEDATALEN)
		return;
	send_notifications(channel, list_make1(pstrdup(subscription)));
}

/* Read what events of type outbox.job.dead say, as payloads of notifications. */
static List *
read_dead(const int64 *seqs, int nseqs)
{
	static OutboxPlan read = {
		"SELECT pg_catalog.jsonb_build_object('job', e.payload OPERATOR(pg_catalog.->) 'job',"
		" 'seq', e.payload OPERATOR(pg_catalog.->) 'seq',"
		" 'subscription', e.payload OPERATOR(pg_catalog.->) 'subscription')::text"
		" FROM outbox.events e WHERE e.seq OPERATOR(pg_catalog.=) ANY ($1) ORDER BY e.seq",
		1, {INT8ARRAYOID}, NULL
	};
	MemoryContext context = CurrentMemoryContext;
	Datum	   *values = palloc(nseqs * sizeof(Datum));
	Datum		value;
	List	   *result = NIL;
	uint64		n;
	uint64		i;

	for (i = 0; i < (uint64) nseqs; i++)
		values[i] = Int64GetDatum(seqs[i]);
	outbox_worker_begin("announcing dead jobs");
	value = outbox_make_array(values, NULL, nseqs, INT8OID);
	n = outbox_execute(&read, &value, NULL, SPI_OK_SELECT);
	MemoryContextSwitchTo(context);
	for (i = 0; i < n; i++)
		result = lappend(result, outbox_spi_string(i, 1));
	outbox_worker_commit();
	return result;
}

/* Announce dead jobs, by the events that tell of them. */
void
outbox_notify_dead(const int64 *seqs, int nseqs)
{
	MemoryContext context = CurrentMemoryContext;
	List	   *volatile payloads = NIL;

	if (nseqs == 0 || outbox_dead_channel[0] == '\0')
		return;
	PG_TRY();
	{
		payloads = read_dead(seqs, nseqs);
	}
	PG_CATCH();
	{
		ErrorData  *edata = outbox_catch_error(context);

		outbox_worker_abort();
		MemoryContextSwitchTo(context);
		ereport(LOG,
				(errcode(edata->sqlerrcode),
				 errmsg("outbox relay could not announce dead jobs: %s",
						edata->message ? edata->message : "")));
	}
	PG_END_TRY();
	if (payloads != NIL)
		send_notifications(outbox_dead_channel, payloads);
}

/*
 * Listen on outbox.record_channel, as it is set now.  Called outside a
 * transaction.  The SQL command LISTEN is refused in a background worker; the
 * function behind it is not.
 */
void
outbox_listen_update(void)
{
	MemoryContext context = CurrentMemoryContext;

	if (strcmp(listening, outbox_record_channel) == 0)
		return;
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	Async_UnlistenAll();
	if (outbox_record_channel[0] != '\0')
		Async_Listen(outbox_record_channel);
	CommitTransactionCommand();
	MemoryContextSwitchTo(context);
	strlcpy(listening, outbox_record_channel, sizeof(listening));
}

/*
 * A client that is told of notifications and forgets them.  The server has no
 * other way to say that one has come on the channel listened on: before
 * PostgreSQL 19 it also wakes for those on every other channel.
 */
static void
client_reset(void)
{
}

static int
client_flush(void)
{
	return 0;
}

static bool
client_is_send_pending(void)
{
	return false;
}

static int
client_putmessage(char msgtype, const char *s, size_t len)
{
	if (msgtype == 'A')
		was_heard = true;
	return 0;
}

static void
client_putmessage_noblock(char msgtype, const char *s, size_t len)
{
	(void) client_putmessage(msgtype, s, len);
}

static const PQcommMethods client = {
	.comm_reset = client_reset,
	.flush = client_flush,
	.flush_if_writable = client_flush,
	.is_send_pending = client_is_send_pending,
	.putmessage = client_putmessage,
	.putmessage_noblock = client_putmessage_noblock
};

/*
 * Read the queue of notifications, if something has come.  True when one came
 * on our channel.  Called outside a transaction: it starts one.
 */
bool
outbox_listen_heard(void)
{
	MemoryContext context = CurrentMemoryContext;
	const PQcommMethods *save_methods = PqCommMethods;
	CommandDest save_dest = whereToSendOutput;

	if (!notifyInterruptPending)
		return false;
	was_heard = false;
	PG_TRY();
	{
		PqCommMethods = &client;
		whereToSendOutput = DestRemote;
		ProcessNotifyInterrupt(false);
	}
	PG_FINALLY();
	{
		PqCommMethods = save_methods;
		whereToSendOutput = save_dest;
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	return was_heard;
}
