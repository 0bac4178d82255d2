/*-------------------------------------------------------------------------
 *
 * capture_row.c
 *		The trigger of a captured table: what changed becomes an event of the
 *		writer's own transaction.
 *
 * A row costs no catalog look-up and no planning.  Values are converted as
 * the writer; only the insertion is done as the extension's owner, so the
 * writer needs no right on schema outbox.
 *
 *-------------------------------------------------------------------------
 */
#include "capture.h"

#include "commands/trigger.h"
#include "lib/stringinfo.h"
#include "utils/builtins.h"
#include "utils/json.h"

/* What is being done with a row, for the error message */
typedef struct CaptureRow
{
	OutboxColumn *column;		/* being converted */
	bool		checking_type;
	OutboxPins	pins;
} CaptureRow;

/* Did an update change anything that is watched? */
static bool
is_changed(OutboxCapture *capture, TupleTableSlot *oldslot, TupleTableSlot *newslot)
{
	int			i;

	/* take the rows apart in one go */
	slot_getsomeattrs(oldslot, capture->last_watched);
	slot_getsomeattrs(newslot, capture->last_watched);
	for (i = 0; i < capture->nwatched; i++)
	{
		if (outbox_column_changed(capture->watched[i], oldslot, newslot))
			return true;
	}
	return false;
}

/*
 * A row as a JSON object; with another row, only those columns of which that
 * one has another value.
 */
static void
row_json(OutboxCapture *capture, CaptureRow *row, TupleTableSlot *slot, TupleTableSlot *other,
		 JsonbValue *result)
{
	JsonbPair  *pairs = palloc0(sizeof(JsonbPair) * Max(capture->ncolumns, 1));
	int			n = 0;
	int			i;

	slot_getallattrs(slot);
	for (i = 0; i < capture->ncolumns; i++)
	{
		OutboxColumn *column = capture->columns[i];
		JsonbPair  *pair = &pairs[n];
		Datum		value;
		bool		isnull;

		if (other != NULL && !outbox_column_changed(column, slot, other))
			continue;
		row->column = column;
		pair->key.type = jbvString;
		pair->key.val.string.val = column->name;
		pair->key.val.string.len = column->namelen;
		value = outbox_column_value(column, slot, &isnull);
		if (isnull)
			pair->value.type = jbvNull;
		else
			outbox_column_json(column, value, &row->pins, &pair->value);
		n++;
	}
	row->column = NULL;
	result->type = jbvObject;
	result->val.object.nPairs = n;
	result->val.object.pairs = pairs;
}

/* A pair of the payload */
static void
set_pair(JsonbPair *pair, const char *key)
{
	pair->key.type = jbvString;
	pair->key.val.string.val = unconstify(char *, key);
	pair->key.val.string.len = strlen(key);
}

/* A pair of the payload whose value is a string */
static void
set_string_pair(JsonbPair *pair, const char *key, const char *value)
{
	set_pair(pair, key);
	pair->value.type = jbvString;
	pair->value.val.string.val = unconstify(char *, value);
	pair->value.val.string.len = strlen(value);
}

/*
 * The payload of an event.  Pairs are given in the order of keys in jsonb,
 * which JsonbValueToJsonb relies on.
 */
static Jsonb *
make_payload(OutboxCapture *capture, CaptureRow *row, const char *op,
			 TupleTableSlot *oldslot, TupleTableSlot *newslot)
{
	JsonbPair	pairs[5];
	JsonbValue	object;
	int			n = 0;

	memset(pairs, 0, sizeof(pairs));
	set_string_pair(&pairs[n++], "op", op);
	if (newslot != NULL)
	{
		set_pair(&pairs[n], "new");
		row_json(capture, row, newslot, NULL, &pairs[n++].value);
	}
	if (oldslot != NULL)
	{
		set_pair(&pairs[n], "old");
		row_json(capture, row, oldslot, newslot, &pairs[n++].value);
	}
	set_string_pair(&pairs[n++], "table", capture->table);
	set_string_pair(&pairs[n++], "schema", capture->schema);
	object.type = jbvObject;
	object.val.object.nPairs = n;
	object.val.object.pairs = pairs;
	return JsonbValueToJsonb(&object);
}

/*
 * A type, subject or scope as it is for a row; NULL when it is null, as it is
 * when any of its columns is.
 */
static char *
make_row_text(OutboxCapture *capture, CaptureRow *row, OutboxCaptureText *text, const char *op,
			  TupleTableSlot *slot)
{
	StringInfoData buf;
	int			i;

	if (text->kind == OUTBOX_CAPTURE_TEXT_NULL)
		return NULL;
	initStringInfo(&buf);
	if (text->kind == OUTBOX_CAPTURE_TEXT_ARRAY)
		appendStringInfoChar(&buf, '[');
	for (i = 0; i < text->nparts; i++)
	{
		OutboxCapturePart *part = &text->parts[i];
		Datum		value;
		bool		isnull;
		char	   *string;

		if (part->column == NULL)
		{
			appendStringInfoString(&buf, part->literal != NULL ? part->literal : op);
			continue;
		}
		value = outbox_column_value(part->column, slot, &isnull);
		if (isnull && text == &capture->type)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("column \"%s\" in the type of the event is null",
							part->column->name)));
		if (isnull)
			return NULL;
		row->column = part->column;
		string = outbox_column_text(part->column, value, &row->pins);
		row->column = NULL;
		if (text->kind == OUTBOX_CAPTURE_TEXT_PARTS)
		{
			appendStringInfoString(&buf, string);
			continue;
		}
		if (i > 0)
			appendStringInfoString(&buf, ", ");
		escape_json(&buf, string);
	}
	if (text->kind == OUTBOX_CAPTURE_TEXT_ARRAY)
		appendStringInfoChar(&buf, ']');
	return buf.data;
}

/*
 * Raise the error of a change that cannot be recorded again, so that it names
 * the table, and the column if there is one: the writer may never have heard
 * of the capture.
 */
static void
raise_named(OutboxCapture *capture, CaptureRow *row, ErrorData *edata)
{
	char	   *table = psprintf("%s.%s", capture->schema, capture->table);

	if (row->column != NULL)
	{
		edata->message = psprintf("could not record column \"%s\" of table \"%s\": %s",
								  row->column->name, table, edata->message);
		edata->column_name = row->column->name;
	}
	else
		edata->message = psprintf("could not record a change of table \"%s\": %s",
								  table, edata->message);
	edata->schema_name = capture->schema;
	edata->table_name = capture->table;

	/* as it is: what it has of context is complete */
	ReThrowError(edata);
}

/*
 * Is an error one of the values, which the writer can only understand with
 * the names of table and column?
 */
static bool
is_value_error(int sqlerrcode)
{
	int			category = ERRCODE_TO_CATEGORY(sqlerrcode);

	return category == ERRCODE_DATA_EXCEPTION ||
		sqlerrcode == ERRCODE_PROGRAM_LIMIT_EXCEEDED ||
		category == ERRCODE_FEATURE_NOT_SUPPORTED;
}

/*
 * Record a change.  What cannot be recorded fails the writer's statement.
 */
static void
record_change(OutboxCapture *capture, const char *op, TupleTableSlot *oldslot,
			  TupleTableSlot *newslot)
{
	MemoryContext context = CurrentMemoryContext;
	CaptureRow *row = palloc0(sizeof(CaptureRow));
	TupleTableSlot *slot = newslot != NULL ? newslot : oldslot;

	outbox_capture_hold(capture);
	PG_TRY();
	{
		OutboxOwnerContext owner;
		char	   *type;
		char	   *subject;
		char	   *scope;
		Jsonb	   *payload;
		bool		nulls[6] = {false, false, false, false, true, true};

		type = make_row_text(capture, row, &capture->type, op, slot);
		row->checking_type = true;
		outbox_check_type(type, strlen(type), false);
		row->checking_type = false;
		subject = make_row_text(capture, row, &capture->subject, op, slot);
		scope = make_row_text(capture, row, &capture->scope, op, slot);
		payload = make_payload(capture, row, op, oldslot, newslot);
		outbox_unpin(&row->pins);

		nulls[1] = subject == NULL;
		nulls[3] = scope == NULL;
		outbox_become_owner(&owner);
		outbox_record_event(CStringGetTextDatum(type),
							subject != NULL ? CStringGetTextDatum(subject) : (Datum) 0,
							JsonbPGetDatum(payload),
							scope != NULL ? CStringGetTextDatum(scope) : (Datum) 0,
							(Datum) 0, (Datum) 0, nulls, false);
		outbox_become_caller(&owner);
	}
	PG_CATCH();
	{
		/* identity and settings come back with the end of the subtransaction */
		if (row->checking_type || is_value_error(geterrcode()))
		{
			ErrorData  *edata;

			MemoryContextSwitchTo(context);
			edata = CopyErrorData();
			FlushErrorState();
			raise_named(capture, row, edata);
		}
		PG_RE_THROW();
	}
	PG_END_TRY();
}

PG_FUNCTION_INFO_V1(outbox_capture_row);

/*
 * The trigger: AFTER INSERT, UPDATE or DELETE, for each row.
 */
Datum
outbox_capture_row(PG_FUNCTION_ARGS)
{
	TriggerData *trigdata = (TriggerData *) fcinfo->context;
	OutboxCapture *capture;

	if (!CALLED_AS_TRIGGER(fcinfo) ||
		!TRIGGER_FIRED_AFTER(trigdata->tg_event) ||
		!TRIGGER_FIRED_FOR_ROW(trigdata->tg_event) ||
		trigdata->tg_trigger->tgnargs != 1)
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" was not called by a trigger that outbox.capture made",
						"capture_row")));

	capture = outbox_capture_find(trigdata->tg_relation, trigdata->tg_trigger);
	if (TRIGGER_FIRED_BY_INSERT(trigdata->tg_event))
		record_change(capture, "created", NULL, trigdata->tg_trigslot);
	else if (TRIGGER_FIRED_BY_DELETE(trigdata->tg_event))
		record_change(capture, "deleted", trigdata->tg_trigslot, NULL);
	else if (is_changed(capture, trigdata->tg_trigslot, trigdata->tg_newslot))
		record_change(capture, "updated", trigdata->tg_trigslot, trigdata->tg_newslot);
	return PointerGetDatum(NULL);
}
