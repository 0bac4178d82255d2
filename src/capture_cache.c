/*-------------------------------------------------------------------------
 *
 * capture_cache.c
 *		Captures as the trigger uses them, kept in the session.
 *
 * What a definition says is worked out once for each trigger and session and
 * kept until the table, or the table of which it is a partition, changes.
 *
 *-------------------------------------------------------------------------
 */
#include "capture.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/indexing.h"
#include "catalog/pg_constraint.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/syscache.h"

/* By trigger; lives as long as the session */
typedef struct CaptureEntry
{
	Oid			trigger;		/* key */
	Oid			relid;
	Oid			rootid;
	bool		valid;			/* cleared by invalidations */
	bool		warned;			/* of a column that is gone */
	OutboxCapture *capture;		/* NULL: none yet */
} CaptureEntry;

static HTAB *captures = NULL;
static MemoryContext captures_context = NULL;

/* A table changed: whatever is known of it has to be worked out again. */
static void
relation_changed(Datum arg, Oid relid)
{
	HASH_SEQ_STATUS status;
	CaptureEntry *entry;

	hash_seq_init(&status, captures);
	while ((entry = hash_seq_search(&status)) != NULL)
	{
		if (!OidIsValid(relid) || entry->relid == relid || entry->rootid == relid)
			entry->valid = false;
	}
}

/* A schema changed, perhaps its name. */
#if PG_VERSION_NUM >= 190000
static void
schema_changed(Datum arg, SysCacheIdentifier cacheid, uint32 hashvalue)
#else
static void
schema_changed(Datum arg, int cacheid, uint32 hashvalue)
#endif
{
	relation_changed(arg, InvalidOid);
}

/* Make the table of captures, once a session. */
static void
make_captures(void)
{
	HASHCTL		ctl;

	if (captures_context == NULL)
		captures_context = AllocSetContextCreate(TopMemoryContext, "outbox captures",
												 ALLOCSET_DEFAULT_SIZES);
	ctl.keysize = sizeof(Oid);
	ctl.entrysize = sizeof(CaptureEntry);
	ctl.hcxt = captures_context;
	captures = hash_create("outbox captures", 32, &ctl,
						   HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	CacheRegisterRelcacheCallback(relation_changed, (Datum) 0);
	CacheRegisterSyscacheCallback(NAMESPACEOID, schema_changed, (Datum) 0);
}

/* Free a capture, or let its last user do it. */
static void
discard_capture(OutboxCapture *capture)
{
	if (capture->users > 0)
		capture->stale = true;
	else
		MemoryContextDelete(capture->context);
}

/* The memory of a row goes, and with it the row's hold on its capture. */
static void
release_capture(void *arg)
{
	OutboxCapture *capture = (OutboxCapture *) arg;

	capture->users--;
	if (capture->stale && capture->users == 0)
		MemoryContextDelete(capture->context);
}

/*
 * Hold a capture until the memory of the row goes, also by an error: users'
 * output functions may alter the table, or write to it and come here again.
 */
void
outbox_capture_hold(OutboxCapture *capture)
{
	MemoryContextCallback *callback = palloc(sizeof(MemoryContextCallback));

	callback->func = release_capture;
	callback->arg = capture;
	MemoryContextRegisterResetCallback(CurrentMemoryContext, callback);
	capture->users++;
}

/*
 * Say, once a session, that a column of the definition is gone, which
 * happened where the library was not loaded to refuse it.  The write goes on.
 */
static void
warn_missing(CaptureEntry *entry, OutboxCapture *capture, const char *type, const char *name)
{
	if (entry->warned)
		return;
	entry->warned = true;
	ereport(WARNING,
			(errcode(ERRCODE_UNDEFINED_COLUMN),
			 errmsg("capture \"%s\" of table \"%s.%s\" goes on without column \"%s\", which does not exist",
					type, capture->schema, capture->table, name),
			 errhint("Call outbox.capture again with a definition that fits the table.")));
}

/* A column of a table by name; NULL when there is none */
static OutboxColumn *
make_column(Relation rel, const char *name)
{
	TupleDesc	tupdesc = RelationGetDescr(rel);
	int			i;

	for (i = 0; i < tupdesc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(tupdesc, i);

		if (!att->attisdropped && strcmp(NameStr(att->attname), name) == 0)
			return outbox_column_make(rel, att->attnum);
	}
	return NULL;
}

/*
 * Columns of a definition; all, or all stored ones, when it names none that
 * exists.
 */
static OutboxColumn **
make_columns(CaptureEntry *entry, OutboxCapture *capture, Relation rel, const char *type,
			 List *names, bool stored_only, int *n)
{
	TupleDesc	tupdesc = RelationGetDescr(rel);
	OutboxColumn **result = palloc(sizeof(OutboxColumn *) *
								   Max(Max(tupdesc->natts, list_length(names)), 1));
	ListCell   *lc;
	int			i;

	*n = 0;
	foreach(lc, names)
	{
		OutboxColumn *column = make_column(rel, (char *) lfirst(lc));

		if (column != NULL)
			result[(*n)++] = column;
		else
			warn_missing(entry, capture, type, (char *) lfirst(lc));
	}
	if (*n > 0)
		return result;
	for (i = 0; i < tupdesc->natts; i++)
	{
		OutboxColumn *column;

		if (TupleDescAttr(tupdesc, i)->attisdropped)
			continue;
		column = outbox_column_make(rel, i + 1);

		/* a virtual column changes when those it is made of do */
		if (!stored_only || column->expression == NULL)
			result[(*n)++] = column;
	}
	return result;
}

/* Order of keys in jsonb: by length, then by bytes */
static int
compare_columns(const void *a, const void *b)
{
	const OutboxColumn *left = *(OutboxColumn *const *) a;
	const OutboxColumn *right = *(OutboxColumn *const *) b;

	if (left->namelen != right->namelen)
		return left->namelen < right->namelen ? -1 : 1;
	return memcmp(left->name, right->name, left->namelen);
}

/*
 * Work out a type, subject or scope.  A column that is gone makes a subject
 * or scope null; in a type its placeholder stands for itself, since the event
 * must have one.
 */
static void
make_text(CaptureEntry *entry, OutboxCapture *capture, Relation rel, const char *type,
		  const char *what, const char *template, OutboxCaptureText *result)
{
	List	   *parts;
	ListCell   *lc;

	result->kind = OUTBOX_CAPTURE_TEXT_NULL;
	if (template == NULL)
		return;
	parts = outbox_capture_parts(what, template);
	result->kind = OUTBOX_CAPTURE_TEXT_PARTS;
	result->parts = palloc0(sizeof(OutboxCapturePart) * Max(list_length(parts), 1));
	foreach(lc, parts)
	{
		OutboxTemplatePart *part = (OutboxTemplatePart *) lfirst(lc);
		OutboxCapturePart *made = &result->parts[result->nparts++];

		if (part->is_op)
			continue;
		if (!part->is_column)
		{
			made->literal = pstrdup(part->text);
			continue;
		}
		made->column = make_column(rel, part->text);
		if (made->column == NULL)
		{
			warn_missing(entry, capture, type, part->text);
			if (result == &capture->type)
				made->literal = psprintf("{%s}", part->text);
			else
			{
				result->kind = OUTBOX_CAPTURE_TEXT_NULL;
				return;
			}
		}
	}
}

/*
 * Names of the columns of a table's primary key, in the order of the key;
 * NIL when it has none.
 */
static List *
primary_key(Oid relid)
{
	Relation	rel = table_open(ConstraintRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	List	   *result = NIL;

	ScanKeyInit(&key, Anum_pg_constraint_conrelid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(relid));
	scan = systable_beginscan(rel, ConstraintRelidTypidNameIndexId, true, NULL, 1, &key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Datum		conkey;
		bool		isnull;
		ArrayType  *array;
		int			i;

		if (((Form_pg_constraint) GETSTRUCT(tuple))->contype != CONSTRAINT_PRIMARY)
			continue;
		conkey = heap_getattr(tuple, Anum_pg_constraint_conkey, RelationGetDescr(rel), &isnull);
		if (isnull)
			continue;
		array = DatumGetArrayTypeP(conkey);
		for (i = 0; i < ArrayGetNItems(ARR_NDIM(array), ARR_DIMS(array)); i++)
			result = lappend(result,
							 get_attname(relid, ((int16 *) ARR_DATA_PTR(array))[i], false));
		break;
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return result;
}

/*
 * The subject of a capture that names none: the primary key of the captured
 * table, whatever keys a partition may have of its own.
 */
static void
make_key(Relation rel, Oid rootid, OutboxCaptureText *result)
{
	List	   *names = primary_key(rootid);
	ListCell   *lc;

	result->kind = OUTBOX_CAPTURE_TEXT_NULL;
	if (names == NIL)
		return;
	result->parts = palloc0(sizeof(OutboxCapturePart) * list_length(names));
	foreach(lc, names)
	{
		OutboxColumn *column = make_column(rel, (char *) lfirst(lc));

		if (column == NULL)
			return;
		result->parts[result->nparts++].column = column;
	}
	result->kind = result->nparts == 1 ? OUTBOX_CAPTURE_TEXT_PARTS : OUTBOX_CAPTURE_TEXT_ARRAY;
}

/* Work out a capture from its trigger and the table as it is now. */
static OutboxCapture *
make_capture(CaptureEntry *entry, Relation rel, Trigger *trigger)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "outbox capture",
												  ALLOCSET_SMALL_SIZES);
	MemoryContext oldcontext;
	OutboxCaptureDefinition def;
	OutboxCapture *capture;
	int			i;

	if (!outbox_capture_parse(trigger->tgargs[0], &def))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid definition of a capture: %s", trigger->tgargs[0]),
				 errhint("Let outbox.capture make the trigger.")));

	oldcontext = MemoryContextSwitchTo(context);
	capture = palloc0(sizeof(OutboxCapture));
	capture->context = context;
	capture->natts = RelationGetDescr(rel)->natts;
	capture->schema = get_namespace_name(get_rel_namespace(entry->rootid));
	capture->table = get_rel_name(entry->rootid);
	if (capture->schema == NULL || capture->table == NULL)
		elog(ERROR, "cache lookup failed for relation %u", entry->rootid);

	capture->watched = make_columns(entry, capture, rel, def.type, def.watch, true,
									&capture->nwatched);
	for (i = 0; i < capture->nwatched; i++)
	{
		if (capture->watched[i]->expression == NULL)
			capture->last_watched = Max(capture->last_watched, capture->watched[i]->attnum);
	}
	capture->columns = make_columns(entry, capture, rel, def.type, def.columns, false,
									&capture->ncolumns);
	qsort(capture->columns, capture->ncolumns, sizeof(OutboxColumn *), compare_columns);

	make_text(entry, capture, rel, def.type, "type", def.type, &capture->type);
	if (def.subject == NULL)
		make_key(rel, entry->rootid, &capture->subject);
	else
		make_text(entry, capture, rel, def.type, "subject", def.subject, &capture->subject);
	make_text(entry, capture, rel, def.type, "scope", def.scope, &capture->scope);
	MemoryContextSwitchTo(oldcontext);

	MemoryContextSetParent(context, captures_context);
	return capture;
}

/*
 * The capture of a trigger, from the cache if it still holds.
 *
 * The entry is called valid before anything is read, so an invalidation that
 * comes in while it is read is not lost.
 */
OutboxCapture *
outbox_capture_find(Relation rel, Trigger *trigger)
{
	CaptureEntry *entry;
	bool		found;
	OutboxCapture *old;

	if (captures == NULL)
		make_captures();
	entry = hash_search(captures, &trigger->tgoid, HASH_ENTER, &found);
	if (!found)
	{
		entry->relid = InvalidOid;
		entry->rootid = InvalidOid;
		entry->valid = false;
		entry->warned = false;
		entry->capture = NULL;
	}
	if (entry->valid && entry->capture != NULL &&
		entry->relid == RelationGetRelid(rel) &&
		entry->capture->natts == RelationGetDescr(rel)->natts)
		return entry->capture;

	old = entry->capture;
	entry->capture = NULL;
	if (old != NULL)
		discard_capture(old);
	entry->valid = true;
	entry->relid = RelationGetRelid(rel);
	entry->rootid = entry->relid;
	if (trigger->tgisclone)
	{
		Oid			root = trigger->tgoid;

		outbox_capture_root(&root, &entry->rootid);
	}
	entry->capture = make_capture(entry, rel, trigger);
	return entry->capture;
}
