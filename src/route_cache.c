/*-------------------------------------------------------------------------
 *
 * route_cache.c
 *		Reading the subscriptions into the cache by which events are routed.
 *
 *-------------------------------------------------------------------------
 */
#include "route.h"

#include "catalog/pg_type.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

/* A subscription while the cache is made */
typedef struct LoadedSubscription
{
	OutboxSubscription sub;
	List	   *texts;			/* its patterns, as char * */
	char	   *joined;			/* the same as one text; equal in a group */
	int			rank;			/* place in the key order */
} LoadedSubscription;

/* The order of jsonb keys: by length, then by bytes */
static int
compare_names(const void *a, const void *b)
{
	const char *na = ((const LoadedSubscription *) a)->sub.name;
	const char *nb = ((const LoadedSubscription *) b)->sub.name;
	size_t		la = strlen(na);
	size_t		lb = strlen(nb);

	if (la != lb)
		return la < lb ? -1 : 1;
	return memcmp(na, nb, la);
}

/* Order that brings the members of a group together */
static int
compare_patterns(const void *a, const void *b)
{
	const LoadedSubscription *la = *(LoadedSubscription *const *) a;
	const LoadedSubscription *lb = *(LoadedSubscription *const *) b;
	int			result = strcmp(la->joined, lb->joined);

	return result != 0 ? result : la->rank - lb->rank;
}

/* By scope, if there are scopes, then by key order, in which they lie in memory */
int
outbox_route_compare(const void *a, const void *b)
{
	const OutboxSubscription *sa = *(OutboxSubscription *const *) a;
	const OutboxSubscription *sb = *(OutboxSubscription *const *) b;
	int			result = 0;

	if (sa->scope != NULL && sb->scope != NULL)
		result = strcmp(sa->scope, sb->scope);
	return result != 0 ? result : (sa > sb) - (sa < sb);
}

/* Make a table whose entries begin with a string. */
static HTAB *
make_hash(const char *name, Size keysize, Size entrysize, MemoryContext context)
{
	HASHCTL		ctl;

	memset(&ctl, 0, sizeof(ctl));
	ctl.keysize = keysize;
	ctl.entrysize = entrysize;
	ctl.hcxt = context;
	return hash_create(name, 256, &ctl, HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);
}

/* Empty the table of types seen. */
void
outbox_route_empty_types(RouteTable *table)
{
	MemoryContextReset(table->context);
	table->types = make_hash("outbox types", OUTBOX_MAX_TYPE + 1, sizeof(RouteType), table->context);
}

/* Read one row of the statement of load_subscriptions. */
static void
load_subscription(LoadedSubscription *loaded, int row)
{
	OutboxSubscription *sub = &loaded->sub;
	StringInfoData joined;
	Datum		value;
	Datum	   *texts;
	bool	   *nulls;
	bool		isnull;
	int			ntexts;
	int			i;

	memset(loaded, 0, sizeof(*loaded));
	sub->id = DatumGetInt32(outbox_spi_value(row, 2, &isnull));
	sub->name = outbox_spi_string(row, 3);
	sub->scope = outbox_spi_string(row, 5);
	value = outbox_spi_value(row, 6, &isnull);
	if (!isnull)
		sub->filter = DatumGetJsonPathPCopy(value);
	sub->coalescing = DatumGetBool(outbox_spi_value(row, 7, &isnull));
	sub->ordered = DatumGetBool(outbox_spi_value(row, 8, &isnull));
	value = outbox_spi_value(row, 9, &isnull);
	sub->handler_owner = isnull ? InvalidOid : DatumGetObjectId(value);
	sub->notify = outbox_spi_string(row, 10);

	value = outbox_spi_value(row, 4, &isnull);
	deconstruct_array(DatumGetArrayTypeP(value), TEXTOID, -1, false, TYPALIGN_INT,
					  &texts, &nulls, &ntexts);
	initStringInfo(&joined);
	for (i = 0; i < ntexts; i++)
	{
		char	   *pattern;

		if (nulls[i])
			continue;
		pattern = TextDatumGetCString(texts[i]);
		loaded->texts = lappend(loaded->texts, pattern);
		appendStringInfoString(&joined, pattern);
		appendStringInfoChar(&joined, '\n');
	}
	loaded->joined = joined.data;
}

/*
 * Read the version and all subscriptions, or only one, in one statement and so in one
 * snapshot, the given one if it is valid.  Returns them in key order, allocated where we are called.
 */
static LoadedSubscription *
load_subscriptions(int64 *version, int *nsubs, Snapshot snapshot, int32 only)
{
#define LOAD_SUBSCRIPTIONS \
		"SELECT r.version, s.id, s.name, s.types, s.scope, s.filter, s.coalescing, s.ordered," \
		" CASE WHEN s.handler IS NOT NULL THEN s.owner_oid END," \
		" s.options OPERATOR(pg_catalog.->>) 'notify'" \
		" FROM outbox.routing r LEFT JOIN outbox.subscriptions s ON "
	static OutboxPlan load = {LOAD_SUBSCRIPTIONS "true", 0, {0}, NULL};
	static OutboxPlan load_one = {
		LOAD_SUBSCRIPTIONS "s.id OPERATOR(pg_catalog.=) $1", 1, {INT4OID}, NULL
	};
	Datum		value = Int32GetDatum(only);
	LoadedSubscription *loaded;
	uint64		nrows;
	bool		isnull;
	int			i;

	nrows = outbox_execute_snapshot(only != 0 ? &load_one : &load, &value, NULL, SPI_OK_SELECT, snapshot);
	if (nrows == 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table outbox.routing is empty"),
				 errhint("See outbox.check().")));
	*version = DatumGetInt64(outbox_spi_value(0, 1, &isnull));
	(void) outbox_spi_value(0, 2, &isnull);
	*nsubs = isnull ? 0 : (int) nrows;
	loaded = MemoryContextAllocHuge(CurrentMemoryContext,
									((Size) *nsubs + 1) * sizeof(LoadedSubscription));
	for (i = 0; i < *nsubs; i++)
		load_subscription(&loaded[i], i);
	qsort(loaded, *nsubs, sizeof(LoadedSubscription), compare_names);
	for (i = 0; i < *nsubs; i++)
		loaded[i].rank = i;
	SPI_freetuptable(SPI_tuptable);
	return loaded;
}

/*
 * Parse the patterns of a group.  outbox.subscribe has refused what is no
 * pattern; if somebody wrote one into the table by hand, it matches nothing,
 * and the server's log says so.
 */
static List *
parse_patterns(const LoadedSubscription *loaded)
{
	List	   *result = NIL;
	ListCell   *lc;

	foreach(lc, loaded->texts)
	{
		const char *text = lfirst(lc);
		const char *error;
		OutboxPattern *pattern = outbox_glob_parse(text, strlen(text), &error);

		if (pattern != NULL)
			result = lappend(result, pattern);
		else
			ereport(WARNING,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("pattern \"%s\" of subscription \"%s\" is ignored",
							text, loaded->sub.name),
					 errdetail_internal("%s", error)));
	}
	return result;
}

/* Enter a group in the index under a key. */
static void
add_to_index(RouteTable *table, RouteGroup *group, char kind, const char *text, int len)
{
	char		key[OUTBOX_MAX_TYPE + 2];
	RouteIndexEntry *entry;
	bool		found;

	key[0] = kind;
	memcpy(key + 1, text, len);
	key[len + 1] = '\0';
	entry = hash_search(table->index, key, HASH_ENTER, &found);
	if (!found)
		entry->groups = NIL;
	if (entry->groups == NIL || llast(entry->groups) != group)
		entry->groups = lappend(entry->groups, group);
	if (kind == KEY_PREFIX)
		table->prefixes[len] = true;
	if (kind == KEY_SUFFIX)
		table->suffixes[len] = true;
}

/*
 * Enter a group in the index, under what must be there in a type for one of
 * its patterns to match.
 */
static void
index_group(RouteTable *table, RouteGroup *group)
{
	ListCell   *lc;

	foreach(lc, group->patterns)
	{
		OutboxPattern *pattern = lfirst(lc);
		int			prefix = 0;
		int			suffix = 0;

		if (pattern->exclude)
			continue;
		while (prefix < pattern->len && strchr("*?", pattern->text[prefix]) == NULL)
			prefix++;
		while (suffix < pattern->len &&
			   strchr("*?", pattern->text[pattern->len - 1 - suffix]) == NULL)
			suffix++;
		if (prefix == pattern->len)
			add_to_index(table, group, KEY_WHOLE, pattern->text, prefix);
		else if (prefix > 0)
			add_to_index(table, group, KEY_PREFIX, pattern->text, prefix);
		else if (suffix > 0)
			add_to_index(table, group, KEY_SUFFIX, &pattern->text[pattern->len - suffix], suffix);
		else if (table->unindexed == NIL || llast(table->unindexed) != group)
			table->unindexed = lappend(table->unindexed, group);
	}
}

/*
 * Make the groups of those subscriptions that have a scope, or of those that
 * have none, and their index; called in the context of the cache.
 */
static void
make_table(RouteCache *rc, RouteTable *table, LoadedSubscription **sorted, bool scoped)
{
	const char *joined = NULL;
	RouteGroup *group = NULL;
	int			i;

	table->index = make_hash("outbox patterns", OUTBOX_MAX_TYPE + 2, sizeof(RouteIndexEntry), rc->context);
	table->context = AllocSetContextCreate(rc->context, "outbox types seen", ALLOCSET_DEFAULT_SIZES);
	outbox_route_empty_types(table);
	table->groups = MemoryContextAllocExtended(rc->context, ((Size) rc->nsubs + 1) * sizeof(RouteGroup),
											   MCXT_ALLOC_HUGE | MCXT_ALLOC_ZERO);
	for (i = 0; i < rc->nsubs; i++)
	{
		OutboxSubscription *sub = &rc->subs[sorted[i]->rank];

		if ((sub->scope != NULL) != scoped)
			continue;
		if (joined == NULL || strcmp(joined, sorted[i]->joined) != 0)
		{
			joined = sorted[i]->joined;
			group = &table->groups[table->ngroups++];
			group->patterns = parse_patterns(sorted[i]);
			group->members = palloc(sizeof(OutboxSubscription *));
		}
		else if ((group->nmembers & (group->nmembers - 1)) == 0)
			group->members = repalloc_huge(group->members,
										   (Size) group->nmembers * 2 * sizeof(OutboxSubscription *));
		group->members[group->nmembers++] = sub;
		rc->patterns[sorted[i]->rank] = group->patterns;
		if (scoped)
			rc->by_scope[rc->nscoped++] = sub;
	}
	for (i = 0; i < table->ngroups; i++)
	{
		qsort(table->groups[i].members, table->groups[i].nmembers, sizeof(OutboxSubscription *),
			  outbox_route_compare);
		index_group(table, &table->groups[i]);
	}
}

/* Make the tables of the cache; called in its context. */
static void
make_tables(RouteCache *rc, LoadedSubscription *loaded)
{
	LoadedSubscription **sorted;
	int			i;

	rc->patterns = MemoryContextAllocHuge(rc->context, ((Size) rc->nsubs + 1) * sizeof(List *));
	rc->by_scope = MemoryContextAllocHuge(rc->context, ((Size) rc->nsubs + 1) * sizeof(OutboxSubscription *));
	sorted = MemoryContextAllocHuge(rc->context, ((Size) rc->nsubs + 1) * sizeof(LoadedSubscription *));
	for (i = 0; i < rc->nsubs; i++)
		sorted[i] = &loaded[i];
	qsort(sorted, rc->nsubs, sizeof(LoadedSubscription *), compare_patterns);
	make_table(rc, &rc->unscoped, sorted, false);
	make_table(rc, &rc->scoped, sorted, true);
	qsort(rc->by_scope, rc->nscoped, sizeof(OutboxSubscription *), outbox_route_compare);
	pfree(sorted);
}

/*
 * Read all subscriptions, or only one if that is not 0, by the given snapshot or, when that is invalid, by a
 * new one.  The cache is made below the current context and
 * moved to the top when it is whole, so that an error leaves nothing behind.
 */
RouteCache *
outbox_route_load(Snapshot snapshot, int32 only)
{
	MemoryContext context;
	MemoryContext work;
	MemoryContext old;
	RouteCache *rc;
	LoadedSubscription *loaded;
	int			i;

	context = AllocSetContextCreate(CurrentMemoryContext, "outbox routing", ALLOCSET_DEFAULT_SIZES);
	work = AllocSetContextCreate(CurrentMemoryContext, "outbox loading", ALLOCSET_DEFAULT_SIZES);

	old = MemoryContextSwitchTo(work);
	rc = MemoryContextAllocZero(context, sizeof(RouteCache));
	rc->context = context;
	loaded = load_subscriptions(&rc->version, &rc->nsubs, snapshot, only);

	MemoryContextSwitchTo(context);
	rc->subs = MemoryContextAllocHuge(context, ((Size) rc->nsubs + 1) * sizeof(OutboxSubscription));
	for (i = 0; i < rc->nsubs; i++)
	{
		OutboxSubscription *sub = &rc->subs[i];

		*sub = loaded[i].sub;
		sub->name = pstrdup(sub->name);
		if (sub->scope != NULL)
			sub->scope = pstrdup(sub->scope);
		if (sub->notify != NULL)
			sub->notify = pstrdup(sub->notify);
		if (sub->filter != NULL)
			sub->filter = DatumGetJsonPathPCopy(PointerGetDatum(sub->filter));
	}
	make_tables(rc, loaded);
	MemoryContextSwitchTo(old);
	MemoryContextDelete(work);

	MemoryContextSetParent(context, TopMemoryContext);
	return rc;
}
