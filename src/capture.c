/*-------------------------------------------------------------------------
 *
 * capture.c
 *		Saying what is captured: outbox.capture() and outbox.uncapture().
 *
 * Whatever could go wrong with a definition is looked for here, when it is
 * said, and not when a row is written.
 *
 *-------------------------------------------------------------------------
 */
#include "capture.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/table.h"
#include "catalog/catalog.h"
#include "catalog/dependency.h"
#include "catalog/indexing.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_trigger.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "commands/trigger.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "tcop/utility.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/inval.h"
#include "utils/json.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

/* Does a role own a relation? */
static bool
owns_relation(Oid relid)
{
	/* 16: one function for all classes */
#if PG_VERSION_NUM >= 160000
	return object_ownercheck(RelationRelationId, relid, GetUserId());
#else
	return pg_class_ownercheck(relid, GetUserId());
#endif
}

/*
 * Name of the trigger of a capture: the same on every server, whatever its
 * byte order and version.
 */
static char *
trigger_name(const char *type)
{
	uint64		hash = UINT64CONST(0xcbf29ce484222325);
	const char *p;

	for (p = type; *p; p++)
		hash = (hash ^ (unsigned char) *p) * UINT64CONST(0x100000001b3);
	return psprintf("outbox_%012llx",
					(unsigned long long) ((hash ^ (hash >> 48)) & UINT64CONST(0xffffffffffff)));
}

/*
 * Run a command on a table as the owner of the extension, who has the right
 * to attach our trigger function and needs none on the table.
 *
 * The command names the table, and a schema can be renamed under it, so the
 * caller must look afterwards whether the outcome is there.
 */
static void
run_command(const char *command)
{
	OutboxOwnerContext owner;
	int			rc;

	outbox_become_owner(&owner);
	outbox_spi_connect();
	rc = SPI_execute(command, false, 0);
	if (rc != SPI_OK_UTILITY)
		elog(ERROR, "SPI_execute returned %s for \"%s\"",
			 SPI_result_code_string(rc), command);
	outbox_spi_finish();
	outbox_become_caller(&owner);
}

/* Raise: the catalog is not what the command should have made of it. */
static void
report_changed_meanwhile(Oid relid)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_IN_USE),
			 errmsg("table with OID %u was renamed at the same time", relid),
			 errhint("Try again.")));
}

/*
 * outbox.capture()
 */

/* A text argument, NULL when it is null */
static char *
text_argument(FunctionCallInfo fcinfo, int n)
{
	return PG_ARGISNULL(n) ? NULL : text_to_cstring(PG_GETARG_TEXT_PP(n));
}

/*
 * An argument that is an array of names or texts, as a list without
 * repetitions; NIL when it is null.
 */
static List *
array_argument(FunctionCallInfo fcinfo, int n, const char *what, Oid type)
{
	ArrayType  *array;
	Datum	   *values;
	bool	   *nulls;
	int			nvalues;
	List	   *result = NIL;
	int			i;

	if (PG_ARGISNULL(n))
		return NIL;
	array = PG_GETARG_ARRAYTYPE_P(n);
	if (ARR_NDIM(array) > 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be a one-dimensional array", what)));
	if (type == NAMEOID)
		deconstruct_array(array, NAMEOID, NAMEDATALEN, false, TYPALIGN_CHAR,
						  &values, &nulls, &nvalues);
	else
		deconstruct_array(array, TEXTOID, -1, false, TYPALIGN_INT,
						  &values, &nulls, &nvalues);
	if (nvalues == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not be an empty array", what),
				 type == NAMEOID ?
				 errhint("Leave the argument out, or pass null, for every column.") : 0));
	for (i = 0; i < nvalues; i++)
	{
		char	   *value;

		if (nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("%s must not have a null element", what)));
		value = type == NAMEOID ? pstrdup(NameStr(*DatumGetName(values[i]))) :
			TextDatumGetCString(values[i]);
		if (!outbox_list_has(result, value))
			result = lappend(result, value);
	}
	return result;
}

/* Turn the argument operations into bits. */
static int
operations_argument(List *names)
{
	int			result = 0;
	ListCell   *lc;

	foreach(lc, names)
	{
		char	   *name = (char *) lfirst(lc);

		if (strcmp(name, "insert") == 0)
			result |= OUTBOX_CAPTURE_INSERT;
		else if (strcmp(name, "update") == 0)
			result |= OUTBOX_CAPTURE_UPDATE;
		else if (strcmp(name, "delete") == 0)
			result |= OUTBOX_CAPTURE_DELETE;
		else
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("unknown operation: \"%s\"", name),
					 errhint("Operations are insert, update and delete.")));
	}
	return result;
}

/*
 * Check the type of a capture as far as it is known before there is a row:
 * with the longest operation for {op}.  A column stands for itself where its
 * name could stand in a type, so that the message shows what was said.
 */
static void
check_type_template(const char *type)
{
	StringInfoData buf;
	ListCell   *lc;

	initStringInfo(&buf);
	foreach(lc, outbox_capture_parts("type", type))
	{
		OutboxTemplatePart *part = (OutboxTemplatePart *) lfirst(lc);

		if (part->is_op)
			appendStringInfoString(&buf, "updated");
		else if (!part->is_column)
			appendStringInfoString(&buf, part->text);
		else if (strspn(part->text, "abcdefghijklmnopqrstuvwxyz0123456789_") == strlen(part->text))
			appendStringInfo(&buf, "{%s}", part->text);
		else
			appendStringInfoString(&buf, "{}");
	}
	outbox_check_type(buf.data, buf.len, false);
}

/* Get the definition from the arguments; what needs no table is checked. */
static void
get_definition(FunctionCallInfo fcinfo, OutboxCaptureDefinition *def)
{
	memset(def, 0, sizeof(OutboxCaptureDefinition));
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("relation of a capture must not be null")));
	def->type = text_argument(fcinfo, 1);
	if (def->type == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("type of a capture must not be null")));
	check_type_template(def->type);
	def->subject = text_argument(fcinfo, 2);
	def->watch = array_argument(fcinfo, 3, "watch", NAMEOID);
	if (PG_ARGISNULL(4))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("operations of a capture must not be null")));
	def->operations = operations_argument(array_argument(fcinfo, 4, "operations", TEXTOID));
	def->columns = array_argument(fcinfo, 5, "columns", NAMEOID);
	def->scope = text_argument(fcinfo, 6);
}

/* Refuse a column that a table does not have. */
static void
check_column(Relation rel, const char *what, const char *name)
{
	TupleDesc	tupdesc = RelationGetDescr(rel);
	bool		plain = strcmp(what, "subject") == 0 || strcmp(what, "scope") == 0;
	int			i;

	for (i = 0; i < tupdesc->natts; i++)
	{
		if (!TupleDescAttr(tupdesc, i)->attisdropped &&
			strcmp(NameStr(TupleDescAttr(tupdesc, i)->attname), name) == 0)
			return;
	}
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_COLUMN),
			 errmsg("column \"%s\" in the %s of a capture does not exist in table \"%s\"",
					name, what, RelationGetRelationName(rel)),
			 plain ? errhint("A %s is the exact name of a column, or a template such as note/{id}.", what) : 0));
}

/* Check the columns of a list. */
static void
check_columns(Relation rel, const char *what, List *names)
{
	ListCell   *lc;

	foreach(lc, names)
		check_column(rel, what, (char *) lfirst(lc));
}

/* Check the columns of a type, subject or scope. */
static void
check_template(Relation rel, const char *what, const char *template)
{
	ListCell   *lc;

	if (template == NULL)
		return;
	foreach(lc, outbox_capture_parts(what, template))
	{
		OutboxTemplatePart *part = (OutboxTemplatePart *) lfirst(lc);

		if (part->is_column)
			check_column(rel, what, part->text);
	}
}

/* Refuse a table that cannot carry the trigger. */
static void
check_table(Relation rel)
{
	Oid			relid = RelationGetRelid(rel);
	const char *name = RelationGetRelationName(rel);
	Oid			extension = get_extension_oid(OUTBOX_EXTENSION, true);

	if (rel->rd_rel->relkind != RELKIND_RELATION &&
		rel->rd_rel->relkind != RELKIND_PARTITIONED_TABLE)
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("relation \"%s\" cannot be captured", name),
				 errdetail_relkind_not_supported(rel->rd_rel->relkind)));
	if (IsSystemRelation(rel) ||
		RelationGetNamespace(rel) == get_namespace_oid("information_schema", true))
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("table \"%s\" cannot be captured", name),
				 errdetail("It belongs to the system catalogs.")));
	if (rel->rd_rel->relpersistence == RELPERSISTENCE_TEMP)
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("table \"%s\" cannot be captured", name),
				 errdetail("It is a temporary table.")));
	if (OidIsValid(extension) &&
		getExtensionOfObject(RelationRelationId, relid) == extension)
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("table \"%s\" cannot be captured", name),
				 errdetail("It belongs to extension \"%s\" itself.", OUTBOX_EXTENSION)));
}

/*
 * Refuse a partitioned table of which a partition cannot carry the trigger.
 * Locks the partitions.  The caller must own them too, since the trigger is
 * cloned to them with rights that are not the caller's.
 */
static void
check_partitions(Relation rel, const char *type)
{
	ListCell   *lc;

	if (rel->rd_rel->relkind != RELKIND_PARTITIONED_TABLE)
		return;
	foreach(lc, find_all_inheritors(RelationGetRelid(rel), ShareRowExclusiveLock, NULL))
	{
		Oid			relid = lfirst_oid(lc);
		OutboxFoundCapture *found;

		if (relid == RelationGetRelid(rel))
			continue;
		if (get_rel_relkind(relid) == RELKIND_FOREIGN_TABLE)
			ereport(ERROR,
					(errcode(ERRCODE_WRONG_OBJECT_TYPE),
					 errmsg("table \"%s\" cannot be captured", RelationGetRelationName(rel)),
					 errdetail("Its partition \"%s\" is a foreign table.", get_rel_name(relid))));
		if (!owns_relation(relid))
			aclcheck_error(ACLCHECK_NOT_OWNER, OBJECT_TABLE, get_rel_name(relid));
		found = outbox_capture_of_type(relid, type);
		if (found != NULL && !OidIsValid(found->parent))
			ereport(ERROR,
					(errcode(ERRCODE_DUPLICATE_OBJECT),
					 errmsg("partition \"%s\" is captured as \"%s\" already",
							get_rel_name(relid), type),
					 errhint("Call outbox.uncapture for the partition first: it is captured with the table.")));
	}
}

/* Say what a capture of this table will not do, though nobody is at fault. */
static void
warn_limits(Relation rel, int operations)
{
	Oid			relid = RelationGetRelid(rel);
	Oid			extension = getExtensionOfObject(RelationRelationId, relid);

	if (rel->rd_rel->relkind == RELKIND_RELATION &&
		find_inheritance_children(relid, NoLock) != NIL)
		ereport(WARNING,
				(errcode(ERRCODE_WARNING),
				 errmsg("tables that inherit from \"%s\" are not captured with it",
						RelationGetRelationName(rel)),
				 errhint("Call outbox.capture for each of them.")));
	if (rel->rd_rel->relkind == RELKIND_PARTITIONED_TABLE &&
		(operations & OUTBOX_CAPTURE_UPDATE) &&
		(operations & (OUTBOX_CAPTURE_INSERT | OUTBOX_CAPTURE_DELETE)) !=
		(OUTBOX_CAPTURE_INSERT | OUTBOX_CAPTURE_DELETE))
		ereport(WARNING,
				(errcode(ERRCODE_WARNING),
				 errmsg("an update that moves a row of \"%s\" to another partition is not recorded in full",
						RelationGetRelationName(rel)),
				 errdetail("It deletes and creates the row, and the capture is not of both."),
				 errhint("Add insert and delete to the operations.")));
	if (OidIsValid(extension))
		ereport(WARNING,
				(errcode(ERRCODE_WARNING),
				 errmsg("table \"%s\" belongs to extension \"%s\"",
						RelationGetRelationName(rel), get_extension_name(extension)),
				 errdetail("Dumps do not contain triggers of such tables."),
				 errhint("Call outbox.capture again after a restore.")));
}

/* Open a table that the caller owns. */
static Relation
open_owned(Oid relid, LOCKMODE lockmode)
{
	char	   *name = get_rel_name(relid);
	Relation	rel;

	/* before the lock, which is none of other people's business */
	if (name != NULL && !owns_relation(relid))
		aclcheck_error(ACLCHECK_NOT_OWNER, get_relkind_objtype(get_rel_relkind(relid)), name);
	rel = name != NULL ? try_relation_open(relid, lockmode) : NULL;
	if (rel == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("relation with OID %u does not exist", relid)));
	if (!owns_relation(relid))
		aclcheck_error(ACLCHECK_NOT_OWNER, get_relkind_objtype(rel->rd_rel->relkind),
					   RelationGetRelationName(rel));
	return rel;
}

/*
 * Check a definition against a table, and find the capture that it restates;
 * NULL when there is none.
 */
static OutboxFoundCapture *
check_definition(Relation rel, OutboxCaptureDefinition *def)
{
	OutboxFoundCapture *found;

	check_table(rel);
	check_template(rel, "type", def->type);
	check_template(rel, "subject", def->subject);
	check_columns(rel, "watch", def->watch);
	check_columns(rel, "columns", def->columns);
	check_template(rel, "scope", def->scope);

	found = outbox_capture_of_type(RelationGetRelid(rel), def->type);
	if (found != NULL && OidIsValid(found->parent))
	{
		Oid			trigger = found->oid;
		Oid			root;

		outbox_capture_root(&trigger, &root);
		ereport(ERROR,
				(errcode(ERRCODE_DUPLICATE_OBJECT),
				 errmsg("table \"%s\" is captured as \"%s\" already",
						RelationGetRelationName(rel), def->type),
				 errdetail("It is a partition of the captured table %s.", outbox_relation_name(root))));
	}
	return found;
}

/* Make the trigger of a capture, or replace it. */
static void
make_trigger(Oid relid, OutboxCaptureDefinition *def, const char *argument,
			 OutboxFoundCapture *old)
{
	const char *name = old != NULL ? old->name : trigger_name(def->type);
	StringInfoData buf;
	const char *glue = "";
	OutboxFoundCapture *made;

	/* OR REPLACE of what is known to be ours: it might be anybody's trigger */
	initStringInfo(&buf);
	appendStringInfo(&buf, "CREATE%s TRIGGER %s AFTER ",
					 old != NULL ? " OR REPLACE" : "", quote_identifier(name));
	if (def->operations & OUTBOX_CAPTURE_INSERT)
	{
		appendStringInfoString(&buf, "INSERT");
		glue = " OR ";
	}
	if (def->operations & OUTBOX_CAPTURE_UPDATE)
	{
		appendStringInfo(&buf, "%sUPDATE", glue);
		glue = " OR ";
	}
	if (def->operations & OUTBOX_CAPTURE_DELETE)
		appendStringInfo(&buf, "%sDELETE", glue);
	appendStringInfo(&buf, " ON %s FOR EACH ROW EXECUTE FUNCTION outbox.capture_row(%s)",
					 outbox_relation_name(relid), quote_literal_cstr(argument));
	run_command(buf.data);

	/* disabled, or enabled for replicas, stays what it is */
	if (old != NULL && old->enabled != TRIGGER_FIRES_ON_ORIGIN)
		run_command(psprintf("ALTER TABLE %s %s TRIGGER %s", outbox_relation_name(relid),
							 old->enabled == TRIGGER_DISABLED ? "DISABLE" :
							 old->enabled == TRIGGER_FIRES_ALWAYS ? "ENABLE ALWAYS" :
							 "ENABLE REPLICA",
							 quote_identifier(name)));

	made = outbox_capture_of_type(relid, def->type);
	if (made == NULL || strcmp(made->argument, argument) != 0)
		report_changed_meanwhile(relid);
}

PG_FUNCTION_INFO_V1(outbox_capture);

/*
 * outbox.capture(): state the whole definition of a capture; true if that
 * changed anything.
 *
 * A repetition that changes nothing takes no lock that a writer would meet,
 * so it may stand in every deploy.
 */
Datum
outbox_capture(PG_FUNCTION_ARGS)
{
	OutboxCaptureDefinition def;
	Oid			relid;
	Relation	rel;
	OutboxFoundCapture *found;
	char	   *argument;

	get_definition(fcinfo, &def);
	relid = PG_GETARG_OID(0);
	argument = outbox_capture_argument(&def);

	rel = open_owned(relid, AccessShareLock);
	found = check_definition(rel, &def);
	relation_close(rel, NoLock);
	if (found != NULL && strcmp(found->argument, argument) == 0)
		PG_RETURN_BOOL(false);

	/* the lock that CREATE TRIGGER takes; look again under it */
	rel = open_owned(relid, ShareRowExclusiveLock);
	found = check_definition(rel, &def);
	if (found != NULL && strcmp(found->argument, argument) == 0)
	{
		relation_close(rel, NoLock);
		PG_RETURN_BOOL(false);
	}
	check_partitions(rel, def.type);
	warn_limits(rel, def.operations);
	relation_close(rel, NoLock);
	make_trigger(relid, &def, argument, found);
	PG_RETURN_BOOL(true);
}

PG_FUNCTION_INFO_V1(outbox_uncapture);

/*
 * outbox.uncapture(): end the capture of a table, of one type or of all;
 * returns how many were ended.  A partition that is captured with its table
 * cannot be left out.
 */
Datum
outbox_uncapture(PG_FUNCTION_ARGS)
{
	Oid			relid;
	char	   *type;
	Relation	rel;
	ListCell   *lc;
	OutboxFoundCapture *clone = NULL;
	int			n = 0;

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("relation of a capture must not be null")));
	relid = PG_GETARG_OID(0);
	type = text_argument(fcinfo, 1);

	rel = open_owned(relid, AccessShareLock);
	relation_close(rel, NoLock);
	if (outbox_captures_of(relid) == NIL)
		PG_RETURN_INT32(0);

	/* the lock that DROP TRIGGER takes */
	rel = open_owned(relid, AccessExclusiveLock);
	relation_close(rel, NoLock);
	foreach(lc, outbox_captures_of(relid))
	{
		OutboxFoundCapture *found = (OutboxFoundCapture *) lfirst(lc);

		if (type != NULL && strcmp(found->def.type, type) != 0)
			continue;
		if (OidIsValid(found->parent))
		{
			clone = found;
			continue;
		}
		run_command(psprintf("DROP TRIGGER %s ON %s",
							 quote_identifier(found->name), outbox_relation_name(relid)));
		if (outbox_capture_exists(found->oid))
			report_changed_meanwhile(relid);
		n++;
	}
	if (n == 0 && clone != NULL)
	{
		Oid			trigger = clone->oid;
		Oid			root;

		outbox_capture_root(&trigger, &root);
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"%s\" is captured as \"%s\" with the table of which it is a partition",
						get_rel_name(relid), clone->def.type),
				 errhint("Call outbox.uncapture for %s.", outbox_relation_name(root))));
	}
	PG_RETURN_INT32(n);
}
