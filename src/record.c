/*-------------------------------------------------------------------------
 *
 * record.c
 *		Recording an event: outbox.record() and the trigger that every way
 *		into outbox.events passes through.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include "access/detoast.h"
#include "access/htup_details.h"
#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "commands/async.h"
#include "commands/trigger.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"
#include "utils/numeric.h"
#include "utils/rel.h"

/* Columns of outbox.events; they are never renumbered */
#define EVENTS_SEQ 1
#define EVENTS_TYPE 2
#define EVENTS_SUBJECT 3
#define EVENTS_SCOPE 4
#define EVENTS_PAYLOAD 5
#define EVENTS_HEADERS 6
#define EVENTS_FANNED_OUT_AT 8
#define EVENTS_POISONED_AT 15

#define MAX_ALERT_ERROR 500		/* bytes of an error that an alert tells */

/* The statement under way records an event of the extension itself */
static bool recording_internal = false;

/*
 * Is a character neither a space nor a control character, in ASCII or in UTF8,
 * nor one that changes the direction of what follows?
 */
bool
outbox_printable(const char *p, int len)
{
	unsigned char c = (unsigned char) *p;

	if (!IS_HIGHBIT_SET(c))
		return c > ' ' && c != 0x7f;
	if (GetDatabaseEncoding() == PG_UTF8 && len > 1)
	{
		pg_wchar	u = utf8_to_unicode((const unsigned char *) p);

		return !((u >= 0x80 && u <= 0xa0) || u == 0x1680 ||
				 (u >= 0x2000 && u <= 0x200f) || (u >= 0x2028 && u <= 0x202f) ||
				 (u >= 0x205f && u <= 0x206f) || u == 0x3000 || u == 0xfeff);
	}
	return true;
}

/*
 * Refuse what cannot be the type of an event.  internal: the extension itself
 * records, so types under "outbox." are allowed.
 */
void
outbox_check_type(const char *type, int len, bool internal)
{
	const char *p = type;
	const char *end = type + len;

	if (len == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("type of an event must not be empty")));
	if (len > OUTBOX_MAX_TYPE)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("type of an event is too long"),
				 errdetail("It has %d bytes; the limit is %d.", len, OUTBOX_MAX_TYPE)));
	if (*type == '!')
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("type of an event must not begin with \"!\": \"%s\"",
						pnstrdup(type, len)),
				 errhint("In a subscription a leading \"!\" excludes what it matches.")));
	while (p < end)
	{
		int			mblen = pg_mblen(p);

		if (!outbox_printable(p, mblen) || strchr("*?[]\\", *p) != NULL)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("invalid character in the type of an event: \"%s\"",
							pnstrdup(type, len)),
					 errdetail("A type has no spaces, no control characters and none of * ? [ ] \\."),
					 errhint("Use a dotted name such as \"order.created\".")));
		p += mblen;
	}
	if (!internal && len >= 7 && memcmp(type, "outbox.", 7) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("types under \"outbox.\" are recorded by the extension alone: \"%s\"",
						pnstrdup(type, len))));
}

/* Ask for the value that a sequence gave to this session last. */
static void
ask_currval(void *arg)
{
	Datum	   *value = arg;

	*value = DirectFunctionCall1(currval_oid, *value);
}

/*
 * Is a row given with its seq, as a restore gives it?  It is not when seq is
 * what the sequence gave to this session last; currval raises when it has given
 * none.
 */
static bool
seq_is_explicit(Relation rel, int64 seq)
{
	Oid			sequence = get_relname_relid("events_seq_seq", RelationGetNamespace(rel));
	Datum		value = ObjectIdGetDatum(sequence);

	return !OidIsValid(sequence) || outbox_try(ask_currval, &value) != NULL ||
		DatumGetInt64(value) != seq;
}

/*
 * Is this row one of the extension's own events that a restore loads?  The
 * owner of the table loads it, with its seq, into a database that is not
 * armed yet.
 */
static bool
restoring(Relation rel, int64 seq)
{
	static OutboxPlan armed = {
		"SELECT 1 FROM outbox.armed WHERE database OPERATOR(pg_catalog.=) $1",
		1, {OIDOID}, NULL
	};
	Datum		values[1];
	bool		result;

	if (!has_privs_of_role(GetUserId(), rel->rd_rel->relowner))
		return false;
	/* a subscriber of logical replication gets what was recorded elsewhere */
	if (SessionReplicationRole == SESSION_REPLICATION_ROLE_REPLICA)
		return true;
	outbox_spi_connect();
	values[0] = ObjectIdGetDatum(MyDatabaseId);
	result = outbox_execute(&armed, values, NULL, SPI_OK_SELECT) == 0;
	outbox_spi_finish();
	return result && seq_is_explicit(rel, seq);
}

/* Refuse a subject or scope that is too long. */
static void
check_length(const char *what, Datum value, int limit)
{
	Size		len = toast_raw_datum_size(value) - VARHDRSZ;

	if (len > (Size) limit)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("%s of an event is too long", what),
				 errdetail("It has %zu bytes; the limit is %d.", len, limit)));
}

/* Refuse headers that are no JSON object. */
static void
check_headers(Datum value)
{
	check_length("value for the headers", value, OUTBOX_MAX_HEADERS);
	if (!JB_ROOT_IS_OBJECT(DatumGetJsonbP(value)))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("headers of an event must be a JSON object")));
}

PG_FUNCTION_INFO_V1(outbox_events_insert);

/*
 * BEFORE INSERT row trigger of outbox.events, ENABLE ALWAYS: whoever inserts
 * or copies a row passes the same checks and rings the same bell.
 *
 * It leaves the row as it is.  NOT NULL constraints say what is missing; a
 * restore may load marks, which only the owner of the table has the right to
 * write.
 */
Datum
outbox_events_insert(PG_FUNCTION_ARGS)
{
	TriggerData *trigdata = (TriggerData *) fcinfo->context;
	TupleDesc	tupdesc;
	HeapTuple	tuple;
	Datum		value;
	bool		isnull;
	int64		seq;

	if (!CALLED_AS_TRIGGER(fcinfo) ||
		!TRIGGER_FIRED_BEFORE(trigdata->tg_event) ||
		!TRIGGER_FIRED_FOR_ROW(trigdata->tg_event) ||
		!TRIGGER_FIRED_BY_INSERT(trigdata->tg_event) ||
		RelationGetDescr(trigdata->tg_relation)->natts < EVENTS_POISONED_AT ||
		TupleDescAttr(RelationGetDescr(trigdata->tg_relation), 0)->atttypid != INT8OID)
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" was not called by the trigger of outbox.events",
						"events_insert")));
	tupdesc = RelationGetDescr(trigdata->tg_relation);
	tuple = trigdata->tg_trigtuple;

	value = heap_getattr(tuple, EVENTS_SEQ, tupdesc, &isnull);
	seq = isnull ? 0 : DatumGetInt64(value);

	value = heap_getattr(tuple, EVENTS_TYPE, tupdesc, &isnull);
	if (!isnull)
	{
		text	   *type = DatumGetTextPP(value);
		char	   *data = VARDATA_ANY(type);
		int			len = VARSIZE_ANY_EXHDR(type);
		bool		internal = recording_internal;

		if (!internal && len >= 7 && memcmp(data, "outbox.", 7) == 0)
			internal = restoring(trigdata->tg_relation, seq);
		outbox_check_type(data, len, internal);
	}
	value = heap_getattr(tuple, EVENTS_SUBJECT, tupdesc, &isnull);
	if (!isnull)
		check_length("subject", value, OUTBOX_MAX_SUBJECT);
	value = heap_getattr(tuple, EVENTS_SCOPE, tupdesc, &isnull);
	if (!isnull)
		check_length("scope", value, OUTBOX_MAX_SCOPE);
	value = heap_getattr(tuple, EVENTS_PAYLOAD, tupdesc, &isnull);
	if (!isnull)
		check_length("payload", value, OUTBOX_MAX_PAYLOAD);
	value = heap_getattr(tuple, EVENTS_HEADERS, tupdesc, &isnull);
	if (!isnull)
		check_headers(value);

	if (heap_attisnull(tuple, EVENTS_FANNED_OUT_AT, tupdesc) &&
		heap_attisnull(tuple, EVENTS_POISONED_AT, tupdesc))
	{
		outbox_doorbell_note(seq);
		if (outbox_notify_on_record && outbox_record_channel[0] != '\0')
			Async_Notify(outbox_record_channel, "");
	}
	return PointerGetDatum(tuple);
}

/*
 * Insert an event as the current user and return its seq.  nulls has a flag
 * for each of the six values, in the order of the arguments.
 */
int64
outbox_record_event(Datum type, Datum subject, Datum payload, Datum scope,
					Datum headers, Datum not_before, const bool *nulls, bool internal)
{
#define INSERT_EVENT { \
		"INSERT INTO outbox.events (type, subject, payload, scope, headers, not_before)" \
		" VALUES ($1, $2, $3, $4, $5, $6) RETURNING seq", \
		6, {TEXTOID, TEXTOID, JSONBOID, TEXTOID, JSONBOID, TIMESTAMPTZOID}, NULL \
	}

	/*
	 * One for the caller and one for when we are the owner: a plan is made
	 * anew whenever search_path is not that of the last time.
	 */
	static OutboxPlan insert[2] = {INSERT_EVENT, INSERT_EVENT};
	Datum		values[6];
	char		flags[6];
	bool		isnull;
	int64		seq;
	int			i;

	values[0] = type;
	values[1] = subject;
	values[2] = payload;
	values[3] = scope;
	values[4] = headers;
	values[5] = not_before;
	for (i = 0; i < 6; i++)
		flags[i] = nulls[i] ? 'n' : ' ';

	outbox_spi_connect();
	recording_internal = internal;
	PG_TRY();
	{
		outbox_execute(&insert[InLocalUserIdChange() ? 1 : 0], values, flags, SPI_OK_INSERT_RETURNING);
	}
	PG_FINALLY();
	{
		recording_internal = false;
	}
	PG_END_TRY();
	if (SPI_processed != 1)
		ereport(ERROR,
				(errcode(ERRCODE_TRIGGERED_DATA_CHANGE_VIOLATION),
				 errmsg("event was not stored"),
				 errdetail("A trigger or rule on outbox.events suppressed it.")));
	seq = DatumGetInt64(outbox_spi_value(0, 1, &isnull));
	outbox_spi_finish();
	return seq;
}

PG_FUNCTION_INFO_V1(outbox_record);

/*
 * outbox.record(): the event is part of the caller's transaction and is
 * inserted with the caller's rights, so that column privileges on
 * outbox.events decide.
 */
Datum
outbox_record(PG_FUNCTION_ARGS)
{
	bool		nulls[6];
	int			i;

	for (i = 0; i < 6; i++)
		nulls[i] = PG_ARGISNULL(i);
	if (nulls[0])
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("type of an event must not be null")));
	if (nulls[2])
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("payload of an event must not be null"),
				 errhint("Leave the argument out, or pass 'null'::jsonb.")));
	{
		text	   *type = PG_GETARG_TEXT_PP(0);

		/*
		 * also in a database that is not armed: only a restore is let in
		 * there
		 */
		outbox_check_type(VARDATA_ANY(type), VARSIZE_ANY_EXHDR(type), false);
	}
	PG_RETURN_INT64(outbox_record_event(PG_GETARG_DATUM(0), PG_GETARG_DATUM(1),
										PG_GETARG_DATUM(2), PG_GETARG_DATUM(3),
										PG_GETARG_DATUM(4), PG_GETARG_DATUM(5),
										nulls, false));
}

/* A pair of an object of an alert: a text, which may be NULL, or a number */
static void
set_pair(JsonbPair *pair, const char *key, const char *text, int64 number, bool is_number)
{
	memset(pair, 0, sizeof(*pair));
	pair->key.type = jbvString;
	pair->key.val.string.val = unconstify(char *, key);
	pair->key.val.string.len = strlen(key);
	if (is_number)
	{
		pair->value.type = jbvNumeric;
		pair->value.val.numeric = int64_to_numeric(number);
	}
	else if (text == NULL)
		pair->value.type = jbvNull;
	else
	{
		pair->value.type = jbvString;
		pair->value.val.string.val = unconstify(char *, text);
		pair->value.val.string.len = strlen(text);
	}
}

/*
 * Record an alert as an event of the extension's own, so that a subscription
 * can carry it.  The pairs are in the order that jsonb wants: by the length of
 * their keys, then by bytes.
 */
static void
record_alert(const char *type, const char *subject, const char *scope, JsonbPair *pairs, int npairs)
{
	bool		nulls[6] = {false, true, false, true, true, true};
	Datum		subject_value = (Datum) 0;
	Datum		scope_value = (Datum) 0;
	JsonbValue	object;

	object.type = jbvObject;
	object.val.object.nPairs = npairs;
	object.val.object.pairs = pairs;
	if (subject != NULL)
	{
		subject_value = CStringGetTextDatum(subject);
		nulls[1] = false;
	}
	if (scope != NULL)
	{
		scope_value = CStringGetTextDatum(scope);
		nulls[3] = false;
	}
	outbox_record_event(CStringGetTextDatum(type), subject_value,
						PointerGetDatum(JsonbValueToJsonb(&object)), scope_value,
						(Datum) 0, (Datum) 0, nulls, true);
}

/*
 * Record that an event has been poisoned, with its subject and scope.  Called by
 * the relay, in the transaction that poisons.
 */
void
outbox_record_poisoned(const OutboxEvent *event, const char *error)
{
	JsonbPair	pairs[5];

	set_pair(&pairs[0], "seq", NULL, event->seq, true);
	set_pair(&pairs[1], "type", event->type, 0, false);
	set_pair(&pairs[2], "subject", event->subject, 0, false);
	set_pair(&pairs[3], "failures", NULL, event->failures, true);
	set_pair(&pairs[4], "last_error", error, 0, false);
	record_alert("outbox.event.poisoned", event->subject, event->scope, pairs, 5);
}

/*
 * Record that a job is dead, with subject and scope of its event, whose type is
 * NULL when the event is gone.  In the transaction that sets the job aside, as
 * the owner of the extension.  Of the error only the first line is told: what
 * follows may be data.
 */
void
outbox_record_dead(const char *subscription, int64 job, int64 seq, int attempts,
				   const char *type, const char *subject, const char *scope, const char *error)
{
	JsonbPair	pairs[7];
	char	   *line = pnstrdup(error, strcspn(error, "\n"));

	set_pair(&pairs[0], "job", NULL, job, true);
	set_pair(&pairs[1], "seq", NULL, seq, true);
	set_pair(&pairs[2], "type", type, 0, false);
	set_pair(&pairs[3], "subject", subject, 0, false);
	set_pair(&pairs[4], "attempts", NULL, attempts, true);
	set_pair(&pairs[5], "last_error", outbox_clip(line, MAX_ALERT_ERROR), 0, false);
	set_pair(&pairs[6], "subscription", subscription, 0, false);
	record_alert("outbox.job.dead", subject, scope, pairs, 7);
}
