/*-------------------------------------------------------------------------
 *
 * route.c
 *		Which subscriptions get an event.
 *
 * The subscriptions are kept in a cache that carries the version of
 * outbox.routing it was read under.  A pass reads the version in the snapshot
 * of its claim; when that is another, the cache is read anew before anything
 * is routed, so a subscription that was committed before or together with an
 * event is never missed.
 *
 * The cost of an event does not grow with the number of subscriptions:
 *
 * - Subscriptions whose lists of patterns are the same form a group, which is
 *	 matched once; its members are kept apart by scope and found by a binary
 *	 search.
 * - A table of the types seen holds the groups of each.
 * - Types may carry ids, so a new type must be cheap too: an index from the
 *	 literal beginnings and ends of the patterns to the groups leaves few of
 *	 them to be matched.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include "catalog/pg_type.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"

/* The table of types seen is emptied when it has so many of them, ... */
#define MAX_TYPES 10000
/* ... or when their lists of subscriptions take so much memory, in bytes */
#define MAX_TYPES_MEMORY (32 * 1024 * 1024)

/* A type that more groups match gets a group of its own when it comes again */
#define MAX_GROUPS 8

/* Subscriptions whose patterns are the same, each list by the key order of their names */
typedef struct RouteGroup
{
	List	   *patterns;		/* OutboxPattern * */
	int			nunscoped;
	OutboxSubscription **unscoped;
	int			nscoped;
	OutboxSubscription **scoped;	/* by scope first */
	uint64		tried_for;		/* lookup for which it was tried last */
} RouteGroup;

/* Groups of which some pattern begins or ends with a text */
typedef struct RouteIndexEntry
{
	char		key[OUTBOX_MAX_TYPE + 2];	/* kind, then the text */
	List	   *groups;
} RouteIndexEntry;

/* Kinds of keys of the index */
#define KEY_WHOLE '='			/* the pattern is that text */
#define KEY_PREFIX '<'			/* the pattern is that text and a wildcard */
#define KEY_SUFFIX '>'			/* the pattern is a wildcard and that text */

/* A type that has been seen */
typedef struct RouteType
{
	char		type[OUTBOX_MAX_TYPE + 1];
	bool		again;			/* it has come more than once */
	int			ngroups;
	RouteGroup **groups;
} RouteType;

typedef struct RouteCache
{
	MemoryContext context;		/* all of it */
	MemoryContext types_context;	/* what the table of types points to */
	int64		version;		/* of outbox.routing */
	int			nsubs;
	OutboxSubscription *subs;	/* by the key order of their names */
	int			ngroups;
	RouteGroup *groups;
	uint64		lookups;
	HTAB	   *index;
	List	   *unindexed;		/* groups that every type must be tried with */
	bool		prefixes[OUTBOX_MAX_TYPE + 1];	/* lengths of prefixes in the index */
	bool		suffixes[OUTBOX_MAX_TYPE + 1];
	HTAB	   *types;
} RouteCache;

static RouteCache *cache = NULL;

/* A subscription while the cache is made */
typedef struct LoadedSubscription
{
	OutboxSubscription sub;
	List	   *texts;			/* its patterns, as char * */
	char	   *joined;			/* the same as one text; equal in a group */
	int			rank;			/* place in the key order */
} LoadedSubscription;

/* Length of a character in the encoding of the database */
int
outbox_char_length(const char *text)
{
	return pg_encoding_mblen(GetDatabaseEncoding(), text);
}

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

/* By scope, then by key order; subscriptions lie in key order in memory */
static int
compare_scopes(const void *a, const void *b)
{
	const OutboxSubscription *sa = *(OutboxSubscription *const *) a;
	const OutboxSubscription *sb = *(OutboxSubscription *const *) b;
	int			result = strcmp(sa->scope, sb->scope);

	return result != 0 ? result : (sa > sb) - (sa < sb);
}

/* By key order */
static int
compare_targets(const void *a, const void *b)
{
	const OutboxSubscription *sa = ((const OutboxTarget *) a)->sub;
	const OutboxSubscription *sb = ((const OutboxTarget *) b)->sub;

	return (sa > sb) - (sa < sb);
}

/* Drop the cache; the next call reads it anew. */
void
outbox_route_forget(void)
{
	RouteCache *old = cache;

	cache = NULL;
	if (old != NULL)
		MemoryContextDelete(old->context);
}

/* Empty the table of types seen. */
static void
forget_types(RouteCache *rc)
{
	HASHCTL		ctl;

	if (rc->types != NULL)
		hash_destroy(rc->types);
	rc->types = NULL;
	MemoryContextReset(rc->types_context);
	memset(&ctl, 0, sizeof(ctl));
	ctl.keysize = OUTBOX_MAX_TYPE + 1;
	ctl.entrysize = sizeof(RouteType);
	ctl.hcxt = rc->context;
	rc->types = hash_create("outbox types", 256, &ctl,
							HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);
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
 * Read the version and all subscriptions, in one statement and so in one
 * snapshot.  Returns them in key order, allocated where we are called.
 */
static LoadedSubscription *
load_subscriptions(int64 *version, int *nsubs)
{
	static OutboxPlan load = {
		"SELECT r.version, s.id, s.name, s.types, s.scope, s.filter, s.coalescing, s.ordered"
		" FROM outbox.routing r LEFT JOIN outbox.subscriptions s ON true",
		0, {0}, NULL
	};
	LoadedSubscription *loaded;
	uint64		nrows;
	bool		isnull;
	int			i;

	nrows = outbox_execute(&load, NULL, NULL, SPI_OK_SELECT);
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

/* By key order */
static int
compare_members(const void *a, const void *b)
{
	const OutboxSubscription *sa = *(OutboxSubscription *const *) a;
	const OutboxSubscription *sb = *(OutboxSubscription *const *) b;

	return (sa > sb) - (sa < sb);
}

/*
 * Put members of a group in its two lists.  The list without scopes must be in
 * key order: from it fanout is built, and jsonb finds no key that is out of
 * order.
 */
static void
fill_group(RouteGroup *group, OutboxSubscription **members, int nmembers)
{
	int			i;

	group->unscoped = palloc(nmembers * sizeof(OutboxSubscription *));
	group->scoped = palloc(nmembers * sizeof(OutboxSubscription *));
	for (i = 0; i < nmembers; i++)
	{
		if (members[i]->scope == NULL)
			group->unscoped[group->nunscoped++] = members[i];
		else
			group->scoped[group->nscoped++] = members[i];
	}
	qsort(group->unscoped, group->nunscoped, sizeof(OutboxSubscription *), compare_members);
	qsort(group->scoped, group->nscoped, sizeof(OutboxSubscription *), compare_scopes);
}

/* Enter a group in the index under a key. */
static void
add_to_index(RouteCache *rc, RouteGroup *group, char kind, const char *text, int len)
{
	char		key[OUTBOX_MAX_TYPE + 2];
	RouteIndexEntry *entry;
	bool		found;

	key[0] = kind;
	memcpy(key + 1, text, len);
	key[len + 1] = '\0';
	entry = hash_search(rc->index, key, HASH_ENTER, &found);
	if (!found)
		entry->groups = NIL;
	if (entry->groups == NIL || llast(entry->groups) != group)
		entry->groups = lappend(entry->groups, group);
	if (kind == KEY_PREFIX)
		rc->prefixes[len] = true;
	if (kind == KEY_SUFFIX)
		rc->suffixes[len] = true;
}

/*
 * Enter a group in the index, under what must be there in a type for one of
 * its patterns to match.
 */
static void
index_group(RouteCache *rc, RouteGroup *group)
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
			add_to_index(rc, group, KEY_WHOLE, pattern->text, prefix);
		else if (prefix > 0)
			add_to_index(rc, group, KEY_PREFIX, pattern->text, prefix);
		else if (suffix > 0)
			add_to_index(rc, group, KEY_SUFFIX, pattern->text + pattern->len - suffix, suffix);
		else if (rc->unindexed == NIL || llast(rc->unindexed) != group)
			rc->unindexed = lappend(rc->unindexed, group);
	}
}

/* Make the groups and their index; called in the context of the cache. */
static void
make_groups(RouteCache *rc, LoadedSubscription *loaded)
{
	LoadedSubscription **sorted;
	OutboxSubscription **members;
	MemoryContext context = CurrentMemoryContext;
	MemoryContext work;
	HASHCTL		ctl;
	int			first,
				i;

	memset(&ctl, 0, sizeof(ctl));
	ctl.keysize = OUTBOX_MAX_TYPE + 2;
	ctl.entrysize = sizeof(RouteIndexEntry);
	ctl.hcxt = context;
	rc->index = hash_create("outbox patterns", 256, &ctl,
							HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);
	rc->groups = MemoryContextAllocExtended(context, (rc->nsubs + 1) * sizeof(RouteGroup),
											MCXT_ALLOC_HUGE | MCXT_ALLOC_ZERO);

	work = AllocSetContextCreate(context, "outbox groups", ALLOCSET_DEFAULT_SIZES);
	sorted = MemoryContextAllocHuge(work, (rc->nsubs + 1) * sizeof(void *));
	members = MemoryContextAllocHuge(work, (rc->nsubs + 1) * sizeof(void *));
	for (i = 0; i < rc->nsubs; i++)
		sorted[i] = &loaded[i];
	qsort(sorted, rc->nsubs, sizeof(LoadedSubscription *), compare_patterns);

	for (first = 0; first < rc->nsubs; first = i)
	{
		RouteGroup *group = &rc->groups[rc->ngroups++];

		for (i = first; i < rc->nsubs && strcmp(sorted[i]->joined, sorted[first]->joined) == 0; i++)
			members[i - first] = &rc->subs[sorted[i]->rank];
		group->patterns = parse_patterns(sorted[first]);
		fill_group(group, members, i - first);
		index_group(rc, group);
	}
	MemoryContextDelete(work);
}

/*
 * Read the cache anew.  It is made whole before the old one goes, and made
 * below the current context until then, so that an error leaves nothing
 * behind.
 */
static void
load_cache(void)
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
	rc->types_context = AllocSetContextCreate(context, "outbox types seen", ALLOCSET_DEFAULT_SIZES);
	loaded = load_subscriptions(&rc->version, &rc->nsubs);

	MemoryContextSwitchTo(context);
	rc->subs = MemoryContextAllocHuge(context, ((Size) rc->nsubs + 1) * sizeof(OutboxSubscription));
	for (i = 0; i < rc->nsubs; i++)
	{
		OutboxSubscription *sub = &rc->subs[i];

		*sub = loaded[i].sub;
		sub->name = pstrdup(sub->name);
		if (sub->scope != NULL)
			sub->scope = pstrdup(sub->scope);
		if (sub->filter != NULL)
			sub->filter = DatumGetJsonPathPCopy(PointerGetDatum(sub->filter));
	}
	make_groups(rc, loaded);
	forget_types(rc);
	MemoryContextSwitchTo(old);
	MemoryContextDelete(work);

	outbox_route_forget();
	MemoryContextSetParent(context, TopMemoryContext);
	cache = rc;
}

/* Try a type with groups that may match it; returns the longer list of those that do. */
static List *
try_groups(List *result, List *groups, const char *type, int len)
{
	ListCell   *lc;

	foreach(lc, groups)
	{
		RouteGroup *group = lfirst(lc);

		if (group->tried_for == cache->lookups)
			continue;
		CHECK_FOR_INTERRUPTS();
		group->tried_for = cache->lookups;
		if (outbox_glob_match_list(group->patterns, type, len, outbox_char_length))
			result = lappend(result, group);
	}
	return result;
}

/* The same with the groups that the index has under a key */
static List *
try_index(List *result, char kind, const char *text, int textlen, const char *type, int len)
{
	char		key[OUTBOX_MAX_TYPE + 2];
	RouteIndexEntry *entry;

	key[0] = kind;
	memcpy(key + 1, text, textlen);
	key[textlen + 1] = '\0';
	entry = hash_search(cache->index, key, HASH_FIND, NULL);
	return entry == NULL ? result : try_groups(result, entry->groups, type, len);
}

/* The groups that match a type */
static List *
groups_of_type(const char *type)
{
	List	   *result = NIL;
	int			len = strlen(type);
	int			i;

	cache->lookups++;
	result = try_index(result, KEY_WHOLE, type, len, type, len);
	for (i = 1; i <= len; i++)
	{
		if (cache->prefixes[i])
			result = try_index(result, KEY_PREFIX, type, i, type, len);
		if (cache->suffixes[i])
			result = try_index(result, KEY_SUFFIX, type + len - i, i, type, len);
	}
	return try_groups(result, cache->unindexed, type, len);
}

/* Make one group of all groups of a type, so that one search finds a scope. */
static void
merge_groups(RouteType *entry)
{
	RouteGroup *merged = palloc0(sizeof(RouteGroup));
	OutboxSubscription **members;
	int			nmembers = 0;
	int			i;

	for (i = 0; i < entry->ngroups; i++)
		nmembers += entry->groups[i]->nunscoped + entry->groups[i]->nscoped;
	members = palloc(nmembers * sizeof(OutboxSubscription *));
	nmembers = 0;
	for (i = 0; i < entry->ngroups; i++)
	{
		RouteGroup *group = entry->groups[i];

		memcpy(members + nmembers, group->unscoped, group->nunscoped * sizeof(OutboxSubscription *));
		nmembers += group->nunscoped;
		memcpy(members + nmembers, group->scoped, group->nscoped * sizeof(OutboxSubscription *));
		nmembers += group->nscoped;
	}
	fill_group(merged, members, nmembers);
	pfree(members);
	entry->groups[0] = merged;
	entry->ngroups = 1;
}

/* Find a type in the table of those seen, or enter it. */
static RouteType *
find_type(const char *type)
{
	RouteType  *entry;
	RouteGroup **list;
	MemoryContext old;
	List	   *groups;
	ListCell   *lc;

	/* the trigger of outbox.events has refused it, if nobody turned it off */
	if (strlen(type) > OUTBOX_MAX_TYPE)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("type of an event is too long"),
				 errdetail("It has %zu bytes; the limit is %d.", strlen(type), OUTBOX_MAX_TYPE)));

	entry = hash_search(cache->types, type, HASH_FIND, NULL);
	if (entry != NULL)
	{
		if (!entry->again && entry->ngroups > MAX_GROUPS)
		{
			old = MemoryContextSwitchTo(cache->types_context);
			merge_groups(entry);
			MemoryContextSwitchTo(old);
		}
		entry->again = true;
		return entry;
	}

	if (hash_get_num_entries(cache->types) >= MAX_TYPES ||
		MemoryContextMemAllocated(cache->types_context, false) > MAX_TYPES_MEMORY)
		forget_types(cache);
	groups = groups_of_type(type);
	list = MemoryContextAlloc(cache->types_context,
							  (list_length(groups) + 1) * sizeof(RouteGroup *));
	entry = hash_search(cache->types, type, HASH_ENTER, NULL);
	entry->again = false;
	entry->ngroups = 0;
	entry->groups = list;
	foreach(lc, groups)
		entry->groups[entry->ngroups++] = lfirst(lc);
	list_free(groups);
	return entry;
}

/* Find the members of a group that have a scope; returns how many. */
static int
find_scope(const RouteGroup *group, const char *scope, OutboxSubscription ***members)
{
	int			low = 0;
	int			high = group->nscoped;
	int			end;

	while (low < high)
	{
		int			middle = low + (high - low) / 2;

		if (strcmp(group->scoped[middle]->scope, scope) < 0)
			low = middle + 1;
		else
			high = middle;
	}
	for (end = low; end < group->nscoped; end++)
	{
		if (strcmp(group->scoped[end]->scope, scope) != 0)
			break;
	}
	*members = group->scoped + low;
	return end - low;
}

/* Make targets of subscriptions. */
static void
add_targets(OutboxEvent *event, OutboxSubscription **members, int nmembers)
{
	int			i;

	if (nmembers == 0)
		return;
	if (event->targets == NULL)
		event->targets = palloc0(nmembers * sizeof(OutboxTarget));
	else
	{
		event->targets = repalloc(event->targets,
								  (event->ntargets + nmembers) * sizeof(OutboxTarget));
		memset(event->targets + event->ntargets, 0, nmembers * sizeof(OutboxTarget));
	}
	for (i = 0; i < nmembers; i++)
		event->targets[event->ntargets++].sub = members[i];
}

/* Fill the targets of an event, as far as its type and scope decide. */
static void
route_event(OutboxEvent *event)
{
	RouteType  *entry = find_type(event->type);
	int			parts = 0;		/* lists of which each is in key order */
	int			i;

	event->ntargets = 0;
	event->targets = NULL;
	for (i = 0; i < entry->ngroups; i++)
	{
		RouteGroup *group = entry->groups[i];

		parts += group->nunscoped > 0;
		add_targets(event, group->unscoped, group->nunscoped);
		if (event->scope != NULL && group->nscoped > 0)
		{
			OutboxSubscription **members;
			int			nmembers = find_scope(group, event->scope, &members);

			parts += nmembers > 0;
			add_targets(event, members, nmembers);
		}
	}
	if (parts > 1)
		qsort(event->targets, event->ntargets, sizeof(OutboxTarget), compare_targets);
}

/*
 * Fill the targets of events, in the key order of the subscriptions' names.
 *
 * version is what the claim read in its own snapshot.  The cache may be newer
 * than that, never older.  Targets are allocated in the current context; what
 * they point to stays until the next call.  The caller is connected to SPI.
 */
void
outbox_route_events(OutboxEvent *events, int nevents, int64 version)
{
	int			i;

	if (cache == NULL || cache->version != version)
		load_cache();
	for (i = 0; i < nevents; i++)
		route_event(&events[i]);
	outbox_filter_events(events, nevents, NULL);
}

/*
 * The same for one event that is in no table, by the subscriptions that the
 * current statement sees.
 *
 * Here, unlike in a relay, subscriptions of a transaction that is not over may
 * have been read, whose version another transaction may use again: nothing is
 * kept from one call for the next.
 */
void
outbox_route_given(OutboxEvent *event, const OutboxContent *content)
{
	load_cache();
	route_event(event);
	outbox_filter_events(event, 1, content);
}
