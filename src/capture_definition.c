/*-------------------------------------------------------------------------
 *
 * capture_definition.c
 *		What a capture is: a trigger whose one argument is the definition.
 *
 * The definition is JSON, with columns by name, so that a dump of the table
 * carries it and nothing of it is anywhere else.  Triggers are told by their
 * function, not by their name, which may change.
 *
 *-------------------------------------------------------------------------
 */
#include "capture.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/indexing.h"
#include "catalog/pg_trigger.h"
#include "lib/stringinfo.h"
#if PG_VERSION_NUM >= 160000
#include "nodes/miscnodes.h"
#endif
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/json.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"

/* Is a name in a list? */
bool
outbox_list_has(List *names, const char *name)
{
	ListCell   *lc;

	foreach(lc, names)
	{
		if (strcmp((char *) lfirst(lc), name) == 0)
			return true;
	}
	return false;
}

/*
 * Definitions
 */

/* Add a piece to the parts of a template. */
static List *
add_part(List *parts, bool is_column, bool is_op, char *text)
{
	OutboxTemplatePart *part = palloc(sizeof(OutboxTemplatePart));

	part->is_column = is_column;
	part->is_op = is_op;
	part->text = text;

	return lappend(parts, part);
}

/*
 * Take a type, subject or scope apart.  Braces hold the exact name of a
 * column; in a type {op} is the operation.  A subject or scope without braces
 * is a column's name.
 */
List *
outbox_capture_parts(const char *what, const char *text)
{
	bool		is_type = strcmp(what, "type") == 0;
	const char *p = text;
	List	   *parts = NIL;

	if (!is_type && strpbrk(text, "{}") == NULL)
		return add_part(NIL, true, false, pstrdup(text));
	while (*p)
	{
		const char *end;

		if (*p != '{')
		{
			end = p + strcspn(p, "{}");
			if (*end == '}')
				ereport(ERROR,
						(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
						 errmsg("\"}\" without \"{\" in the %s of a capture: \"%s\"", what, text)));
			parts = add_part(parts, false, false, pnstrdup(p, end - p));
			p = end;
			continue;
		}
		p++;
		end = p + strcspn(p, "{}");
		if (*end != '}')
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("\"{\" without \"}\" in the %s of a capture: \"%s\"", what, text)));
		if (end == p)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("empty placeholder in the %s of a capture: \"%s\"", what, text),
					 is_type ?
					 errhint("A placeholder is {op} or the name of a column in braces.") :
					 errhint("A placeholder is the name of a column in braces.")));
		if (is_type && strncmp(p, "op}", 3) == 0)
			parts = add_part(parts, false, true, pstrdup("op"));
		else
			parts = add_part(parts, true, false, pnstrdup(p, end - p));
		p = end + 1;
	}
	return parts;
}

/* A string of the trigger's argument; NULL when it is not there */
static char *
definition_string(Jsonb *jsonb, const char *key)
{
	JsonbValue *value = getKeyJsonValueFromContainer(&jsonb->root, key, strlen(key), NULL);

	if (value == NULL || value->type != jbvString)
		return NULL;
	return pnstrdup(value->val.string.val, value->val.string.len);
}

/* A list of strings of the trigger's argument; NIL when it is not there */
static List *
definition_list(Jsonb *jsonb, const char *key)
{
	JsonbValue *value = getKeyJsonValueFromContainer(&jsonb->root, key, strlen(key), NULL);
	List	   *result = NIL;
	uint32		i;

	if (value == NULL || value->type != jbvBinary ||
		!JsonContainerIsArray(value->val.binary.data))
		return NIL;
	for (i = 0; i < JsonContainerSize(value->val.binary.data); i++)
	{
		JsonbValue *item = getIthJsonbValueFromContainer(value->val.binary.data, i);

		if (item != NULL && item->type == jbvString)
			result = lappend(result, pnstrdup(item->val.string.val, item->val.string.len));
	}
	return result;
}

/* The argument of a trigger as JSON; NULL when it is none */
static Jsonb *
argument_jsonb(const char *argument)
{
	/* 16: input functions that need not raise */
#if PG_VERSION_NUM >= 160000
	ErrorSaveContext escontext = {.type = T_ErrorSaveContext};
	Datum		result;

	if (!DirectInputFunctionCallSafe(jsonb_in, unconstify(char *, argument),
									 InvalidOid, -1, (Node *) &escontext, &result))
		return NULL;
	return DatumGetJsonbP(result);
#else
	MemoryContext context = CurrentMemoryContext;
	Jsonb	   *volatile result = NULL;

	/* jsonb_in does nothing but allocate, so there is nothing to roll back */
	PG_TRY();
	{
		result = DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum(argument)));
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		if (ERRCODE_TO_CATEGORY(geterrcode()) != ERRCODE_DATA_EXCEPTION)
			PG_RE_THROW();
		FlushErrorState();
	}
	PG_END_TRY();
	return result;
#endif
}

/*
 * Read a definition from the argument of its trigger.  False when it is none:
 * owners of tables may use our function for triggers of their own making.
 */
bool
outbox_capture_parse(const char *argument, OutboxCaptureDefinition *def)
{
	Jsonb	   *jsonb = argument_jsonb(argument);
	List	   *operations;

	memset(def, 0, sizeof(OutboxCaptureDefinition));
	if (jsonb != NULL && JB_ROOT_IS_OBJECT(jsonb))
		def->type = definition_string(jsonb, "type");
	if (def->type == NULL)
		return false;
	def->subject = definition_string(jsonb, "subject");
	def->scope = definition_string(jsonb, "scope");
	def->watch = definition_list(jsonb, "watch");
	def->columns = definition_list(jsonb, "columns");
	operations = definition_list(jsonb, "operations");
	if (outbox_list_has(operations, "insert"))
		def->operations |= OUTBOX_CAPTURE_INSERT;
	if (outbox_list_has(operations, "update"))
		def->operations |= OUTBOX_CAPTURE_UPDATE;
	if (outbox_list_has(operations, "delete"))
		def->operations |= OUTBOX_CAPTURE_DELETE;
	return true;
}

/* Append a member of the definition, unless it is null. */
static void
append_string(StringInfo buf, const char *key, const char *value)
{
	if (value == NULL)
		return;
	appendStringInfo(buf, "%s\"%s\": ", buf->len > 1 ? ", " : "", key);
	escape_json(buf, value);
}

/* Append a member of the definition that is a list, unless it is null. */
static void
append_list(StringInfo buf, const char *key, List *values)
{
	ListCell   *lc;

	if (values == NIL)
		return;
	appendStringInfo(buf, "%s\"%s\": [", buf->len > 1 ? ", " : "", key);
	foreach(lc, values)
	{
		if (lc != list_head(values))
			appendStringInfoString(buf, ", ");
		escape_json(buf, (char *) lfirst(lc));
	}
	appendStringInfoChar(buf, ']');
}

/* A definition as the argument of its trigger */
char *
outbox_capture_argument(OutboxCaptureDefinition *def)
{
	StringInfoData buf;
	List	   *operations = NIL;

	if (def->operations & OUTBOX_CAPTURE_INSERT)
		operations = lappend(operations, "insert");
	if (def->operations & OUTBOX_CAPTURE_UPDATE)
		operations = lappend(operations, "update");
	if (def->operations & OUTBOX_CAPTURE_DELETE)
		operations = lappend(operations, "delete");

	initStringInfo(&buf);
	appendStringInfoChar(&buf, '{');
	append_string(&buf, "type", def->type);
	append_string(&buf, "subject", def->subject);
	append_list(&buf, "watch", def->watch);
	append_list(&buf, "operations", operations);
	append_list(&buf, "columns", def->columns);
	append_string(&buf, "scope", def->scope);
	appendStringInfoChar(&buf, '}');
	return buf.data;
}

/*
 * Triggers
 */

/*
 * Go from a trigger that was cloned to a partition to the one that was made,
 * and to its table.  Raises when the trigger is gone.
 */
void
outbox_capture_root(Oid *trigger, Oid *relid)
{
	Relation	rel = table_open(TriggerRelationId, AccessShareLock);

	for (;;)
	{
		ScanKeyData key;
		SysScanDesc scan;
		HeapTuple	tuple;
		Oid			parent;

		ScanKeyInit(&key, Anum_pg_trigger_oid, BTEqualStrategyNumber, F_OIDEQ,
					ObjectIdGetDatum(*trigger));
		scan = systable_beginscan(rel, TriggerOidIndexId, true, NULL, 1, &key);
		tuple = systable_getnext(scan);
		if (!HeapTupleIsValid(tuple))
			elog(ERROR, "could not find tuple for trigger %u", *trigger);
		*relid = ((Form_pg_trigger) GETSTRUCT(tuple))->tgrelid;
		parent = ((Form_pg_trigger) GETSTRUCT(tuple))->tgparentid;
		systable_endscan(scan);
		if (!OidIsValid(parent))
			break;
		*trigger = parent;
	}
	table_close(rel, AccessShareLock);
}

/* The argument of a trigger of ours; NULL when it has none */
static char *
trigger_argument(HeapTuple tuple, TupleDesc tupdesc)
{
	Datum		value;
	bool		isnull;
	bytea	   *args;

	if (((Form_pg_trigger) GETSTRUCT(tuple))->tgnargs != 1)
		return NULL;
	value = heap_getattr(tuple, Anum_pg_trigger_tgargs, tupdesc, &isnull);
	if (isnull)
		return NULL;

	/* each argument ends with a zero byte */
	args = DatumGetByteaPP(value);
	return pstrdup(VARDATA_ANY(args));
}

/* Captures of a table, clones included, as a list of OutboxFoundCapture */
List *
outbox_captures_of(Oid relid)
{
	Oid			function = outbox_function_oid("capture_row");
	Relation	rel;
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	List	   *result = NIL;

	if (!OidIsValid(function))
		return NIL;
	rel = table_open(TriggerRelationId, AccessShareLock);
	ScanKeyInit(&key, Anum_pg_trigger_tgrelid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(relid));
	scan = systable_beginscan(rel, TriggerRelidNameIndexId, true, NULL, 1, &key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_trigger form = (Form_pg_trigger) GETSTRUCT(tuple);
		OutboxFoundCapture *found;
		OutboxCaptureDefinition def;
		char	   *argument;

		if (form->tgfoid != function)
			continue;
		argument = trigger_argument(tuple, RelationGetDescr(rel));
		if (argument == NULL || !outbox_capture_parse(argument, &def))
			continue;
		found = palloc(sizeof(OutboxFoundCapture));
		found->oid = form->oid;
		found->parent = form->tgparentid;
		found->name = pstrdup(NameStr(form->tgname));
		found->enabled = form->tgenabled;
		found->argument = argument;
		found->def = def;
		result = lappend(result, found);
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return result;
}

/* The capture of one type among those of a table; NULL when there is none */
OutboxFoundCapture *
outbox_capture_of_type(Oid relid, const char *type)
{
	ListCell   *lc;

	foreach(lc, outbox_captures_of(relid))
	{
		OutboxFoundCapture *found = (OutboxFoundCapture *) lfirst(lc);

		if (strcmp(found->def.type, type) == 0)
			return found;
	}
	return NULL;
}

/* Is a trigger still there, as the statement under way sees it? */
bool
outbox_capture_exists(Oid trigger)
{
	Relation	rel = table_open(TriggerRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	bool		result;

	ScanKeyInit(&key, Anum_pg_trigger_oid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(trigger));
	scan = systable_beginscan(rel, TriggerOidIndexId, true, SnapshotSelf, 1, &key);
	result = HeapTupleIsValid(systable_getnext(scan));
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return result;
}

/* Qualified and quoted name of a relation */
char *
outbox_relation_name(Oid relid)
{
	char	   *relname = get_rel_name(relid);
	char	   *nspname = get_namespace_name(get_rel_namespace(relid));

	if (relname == NULL || nspname == NULL)
		elog(ERROR, "cache lookup failed for relation %u", relid);
	return quote_qualified_identifier(nspname, relname);
}

PG_FUNCTION_INFO_V1(outbox_capture_definition);

/*
 * outbox.capture_definition(): the definition that a trigger of ours holds;
 * null for any other oid.
 */
Datum
outbox_capture_definition(PG_FUNCTION_ARGS)
{
	Oid			function = outbox_function_oid("capture_row");
	Relation	rel = table_open(TriggerRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	char	   *argument = NULL;
	OutboxCaptureDefinition def;

	ScanKeyInit(&key, Anum_pg_trigger_oid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(PG_GETARG_OID(0)));
	scan = systable_beginscan(rel, TriggerOidIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple) && ((Form_pg_trigger) GETSTRUCT(tuple))->tgfoid == function)
		argument = trigger_argument(tuple, RelationGetDescr(rel));
	systable_endscan(scan);
	table_close(rel, AccessShareLock);

	if (argument == NULL || !outbox_capture_parse(argument, &def))
		PG_RETURN_NULL();
	PG_RETURN_POINTER(argument_jsonb(argument));
}
