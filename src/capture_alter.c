/*-------------------------------------------------------------------------
 *
 * capture_alter.c
 *		Refusing the ALTER that would break a capture.
 *
 * The server does not know that a trigger's argument names columns.  The
 * object access hook in ddl.c tells us of every column that is altered or
 * dropped.
 *
 *-------------------------------------------------------------------------
 */
#include "capture.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/indexing.h"
#include "catalog/pg_attribute.h"
#include "tcop/utility.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

/* A column of a capture that the statement under way drops */
typedef struct DroppedColumn
{
	Oid			trigger;
	char	   *type;
	char	   *column;
} DroppedColumn;

static List *dropped_columns = NIL;
static int	utility_depth = 0;
static ProcessUtility_hook_type next_ProcessUtility_hook = NULL;

/* Does a type, subject or scope name a column? */
static bool
template_uses(const char *what, const char *template, const char *column)
{
	ListCell   *lc;

	if (template == NULL)
		return false;
	foreach(lc, outbox_capture_parts(what, template))
	{
		OutboxTemplatePart *part = (OutboxTemplatePart *) lfirst(lc);

		if (part->is_column && strcmp(part->text, column) == 0)
			return true;
	}
	return false;
}

/* Does a definition name a column? */
static bool
definition_uses(OutboxCaptureDefinition *def, const char *column)
{
	return outbox_list_has(def->watch, column) ||
		outbox_list_has(def->columns, column) ||
		template_uses("type", def->type, column) ||
		template_uses("subject", def->subject, column) ||
		template_uses("scope", def->scope, column);
}

/* Refuse what is being done to a column. */
static void
refuse(const char *doing, Oid trigger, const char *type, const char *column)
{
	Oid			root;
	char	   *table;

	outbox_capture_root(&trigger, &root);
	table = outbox_relation_name(root);
	ereport(ERROR,
			(errcode(ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST),
			 errmsg("cannot %s column \"%s\" because capture \"%s\" of table %s uses it",
					doing, column, type, table),
			 errhint("Call outbox.uncapture(%s, %s) first, and outbox.capture again afterwards.",
					 quote_literal_cstr(table), quote_literal_cstr(type))));
}

/*
 * Remember that a column is dropped.  Whether that may be is known only when
 * the statement is done, since DROP SCHEMA ... CASCADE may take a column
 * first and its table later.
 */
static void
remember_dropped(Oid trigger, const char *type, const char *column)
{
	MemoryContext oldcontext = MemoryContextSwitchTo(TopTransactionContext);
	DroppedColumn *dropped = palloc(sizeof(DroppedColumn));

	dropped->trigger = trigger;
	dropped->type = pstrdup(type);
	dropped->column = pstrdup(column);
	dropped_columns = lappend(dropped_columns, dropped);
	MemoryContextSwitchTo(oldcontext);
}

/*
 * What the statement under way has made of a column, which the system cache
 * does not show yet.  False when it is gone.
 */
static bool
altered_column(Oid relid, int attnum, NameData *name, Oid *typid)
{
	Relation	rel = table_open(AttributeRelationId, AccessShareLock);
	ScanKeyData keys[2];
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&keys[0], Anum_pg_attribute_attrelid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(relid));
	ScanKeyInit(&keys[1], Anum_pg_attribute_attnum, BTEqualStrategyNumber, F_INT2EQ,
				Int16GetDatum(attnum));
	scan = systable_beginscan(rel, AttributeRelidNumIndexId, true, SnapshotSelf, 2, keys);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		*name = ((Form_pg_attribute) GETSTRUCT(tuple))->attname;
		*typid = ((Form_pg_attribute) GETSTRUCT(tuple))->atttypid;
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return HeapTupleIsValid(tuple);
}

/*
 * A column was altered or is about to be dropped: refuse it if a capture
 * names the column and it gets another name or type.  A default, NOT NULL, a
 * statistics target or a longer varchar is nobody's loss.
 *
 * Partitions need no look at their root: their triggers hold the definition.
 */
void
outbox_capture_altered(Oid relid, int attnum, bool dropped)
{
	List	   *captures;
	ListCell   *lc;
	HeapTuple	tuple;
	NameData	old_name;
	Oid			old_typid;
	NameData	new_name;
	Oid			new_typid;
	const char *doing;

	if (attnum <= 0 || !IsTransactionState())
		return;
	captures = outbox_captures_of(relid);
	if (captures == NIL)
		return;

	tuple = SearchSysCache2(ATTNUM, ObjectIdGetDatum(relid), Int16GetDatum(attnum));
	if (!HeapTupleIsValid(tuple))
		return;
	old_name = ((Form_pg_attribute) GETSTRUCT(tuple))->attname;
	old_typid = ((Form_pg_attribute) GETSTRUCT(tuple))->atttypid;
	ReleaseSysCache(tuple);

	if (dropped)
		doing = "drop";
	else if (!altered_column(relid, attnum, &new_name, &new_typid))
		return;
	else if (strcmp(NameStr(old_name), NameStr(new_name)) != 0)
		doing = "rename";
	else if (old_typid != new_typid)
		doing = "change the type of";
	else
		return;

	foreach(lc, captures)
	{
		OutboxFoundCapture *found = (OutboxFoundCapture *) lfirst(lc);

		if (!definition_uses(&found->def, NameStr(old_name)))
			continue;
		if (dropped && utility_depth > 0)
			remember_dropped(found->oid, found->def.type, NameStr(old_name));
		else
			refuse(doing, found->oid, found->def.type, NameStr(old_name));
	}
}

/* Refuse the statement if it dropped a column and left the capture. */
static void
check_dropped(void)
{
	ListCell   *lc;

	foreach(lc, dropped_columns)
	{
		DroppedColumn *dropped = (DroppedColumn *) lfirst(lc);

		if (outbox_capture_exists(dropped->trigger))
			refuse("drop", dropped->trigger, dropped->type, dropped->column);
	}
}

/* Run a utility statement, and look at what it dropped. */
static void
capture_ProcessUtility(PlannedStmt *pstmt, const char *queryString, bool readOnlyTree,
					   ProcessUtilityContext context, ParamListInfo params,
					   QueryEnvironment *queryEnv, DestReceiver *dest, QueryCompletion *qc)
{
	List	   *outer = dropped_columns;

	dropped_columns = NIL;
	utility_depth++;
	PG_TRY();
	{
		if (next_ProcessUtility_hook != NULL)
			next_ProcessUtility_hook(pstmt, queryString, readOnlyTree, context, params,
									 queryEnv, dest, qc);
		else
			standard_ProcessUtility(pstmt, queryString, readOnlyTree, context, params,
									queryEnv, dest, qc);
		check_dropped();
	}
	PG_FINALLY();
	{
		dropped_columns = outer;
		utility_depth--;
	}
	PG_END_TRY();
}

/* Called once, when the library is preloaded. */
void
outbox_capture_init(void)
{
	next_ProcessUtility_hook = ProcessUtility_hook;
	ProcessUtility_hook = capture_ProcessUtility;
}
