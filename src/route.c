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
 *	 matched once.
 * - A table of the types seen holds the groups of each.
 * - Types may carry ids, so a new type must be cheap too: an index from the
 *	 literal beginnings and ends of the patterns to the groups leaves few of
 *	 them to be matched.
 * - Those with a scope are kept by scope, and found by a binary search.  When
 *	 an event's scope has few, only those are matched.  When it has many, they
 *	 are found through groups and tables of their own.
 *
 *-------------------------------------------------------------------------
 */
#include "route.h"

#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

/* The table of types seen is emptied when it has so many of them, ... */
#define MAX_TYPES 10000
/* ... or when their lists of subscriptions take so much memory, in bytes */
#define MAX_TYPES_MEMORY (32 * 1024 * 1024)

/* A type that more groups match gets a group of its own when it comes again */
#define MAX_GROUPS 8

/* An event's scope with no more subscriptions than this is matched directly */
#define MAX_DIRECT 16

static RouteCache *cache = NULL;

/* Length of a character in the encoding of the database */
int
outbox_char_length(const char *text)
{
	return pg_encoding_mblen(GetDatabaseEncoding(), text);
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

/*
 * Read the cache anew, with all subscriptions or only one.  The new one is made
 * whole before the old one goes.
 */
static void
load_cache(Snapshot snapshot, int32 only)
{
	RouteCache *loaded = outbox_route_load(snapshot, only);

	outbox_route_forget();
	cache = loaded;
}

/* Try a type with groups that may match it; returns the longer list of those that do. */
static List *
try_groups(RouteTable *table, List *result, List *groups, const char *type, int len)
{
	ListCell   *lc;

	foreach(lc, groups)
	{
		RouteGroup *group = lfirst(lc);

		if (group->tried_for == table->lookups)
			continue;
		CHECK_FOR_INTERRUPTS();
		group->tried_for = table->lookups;
		if (outbox_glob_match_list(group->patterns, type, len, outbox_char_length))
			result = lappend(result, group);
	}
	return result;
}

/* The same with the groups that the index has under a key */
static List *
try_index(RouteTable *table, List *result, char kind, const char *text, int textlen,
		  const char *type, int len)
{
	char		key[OUTBOX_MAX_TYPE + 2];
	RouteIndexEntry *entry;

	key[0] = kind;
	memcpy(key + 1, text, textlen);
	key[textlen + 1] = '\0';
	entry = hash_search(table->index, key, HASH_FIND, NULL);
	return entry == NULL ? result : try_groups(table, result, entry->groups, type, len);
}

/* The groups that match a type */
static List *
groups_of_type(RouteTable *table, const char *type, int len)
{
	List	   *result = NIL;
	int			i;

	table->lookups++;
	result = try_index(table, result, KEY_WHOLE, type, len, type, len);
	for (i = 1; i <= len; i++)
	{
		if (table->prefixes[i])
			result = try_index(table, result, KEY_PREFIX, type, i, type, len);
		if (table->suffixes[i])
			result = try_index(table, result, KEY_SUFFIX, type + len - i, i, type, len);
	}
	return try_groups(table, result, table->unindexed, type, len);
}

/* Make one group of all groups of a type, so that one search finds a scope. */
static void
merge_groups(RouteType *entry)
{
	RouteGroup *merged = palloc0(sizeof(RouteGroup));
	Size		nmembers = 0;
	int			i;

	for (i = 0; i < entry->ngroups; i++)
		nmembers += entry->groups[i]->nmembers;
	merged->members = MemoryContextAllocHuge(CurrentMemoryContext,
											 nmembers * sizeof(OutboxSubscription *));
	for (i = 0; i < entry->ngroups; i++)
	{
		RouteGroup *group = entry->groups[i];

		memcpy(merged->members + merged->nmembers, group->members,
			   group->nmembers * sizeof(OutboxSubscription *));
		merged->nmembers += group->nmembers;
	}
	qsort(merged->members, merged->nmembers, sizeof(OutboxSubscription *), outbox_route_compare);
	entry->groups[0] = merged;
	entry->ngroups = 1;
}

/* Find a type in the table of those seen, or enter it. */
static RouteType *
find_type(RouteTable *table, const char *type, int len)
{
	RouteType  *entry;
	RouteGroup **list;
	MemoryContext old;
	List	   *groups;
	ListCell   *lc;

	entry = hash_search(table->types, type, HASH_FIND, NULL);
	if (entry != NULL)
	{
		if (!entry->again && entry->ngroups > MAX_GROUPS)
		{
			old = MemoryContextSwitchTo(table->context);
			merge_groups(entry);
			MemoryContextSwitchTo(old);
		}
		entry->again = true;
		return entry;
	}

	if (hash_get_num_entries(table->types) >= MAX_TYPES ||
		MemoryContextMemAllocated(table->context, true) > MAX_TYPES_MEMORY)
		outbox_route_empty_types(table);
	groups = groups_of_type(table, type, len);
	list = MemoryContextAlloc(table->context, (list_length(groups) + 1) * sizeof(RouteGroup *));
	entry = hash_search(table->types, type, HASH_ENTER, NULL);
	entry->again = false;
	entry->ngroups = 0;
	entry->groups = list;
	foreach(lc, groups)
		entry->groups[entry->ngroups++] = lfirst(lc);
	list_free(groups);
	return entry;
}

/* Find those that have a scope, in a list by scope; returns how many. */
static int
find_scope(OutboxSubscription **subs, int nsubs, const char *scope, OutboxSubscription ***found)
{
	int			low = 0;
	int			high = nsubs;
	int			end;

	while (low < high)
	{
		int			middle = low + (high - low) / 2;

		if (strcmp(subs[middle]->scope, scope) < 0)
			low = middle + 1;
		else
			high = middle;
	}
	for (end = low; end < nsubs; end++)
	{
		if (strcmp(subs[end]->scope, scope) != 0)
			break;
	}
	*found = subs + low;
	return end - low;
}

/* Make targets of subscriptions; returns whether there were any. */
static bool
add_targets(OutboxEvent *event, OutboxSubscription **members, int nmembers)
{
	int			i;

	if (nmembers == 0)
		return false;
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
	return true;
}

/*
 * Add the targets that have the event's scope; returns how many runs of them,
 * each in key order, were added.
 */
static int
route_scope(OutboxEvent *event, int len)
{
	OutboxSubscription **found;
	int			nfound = find_scope(cache->by_scope, cache->nscoped, event->scope, &found);
	RouteType  *entry;
	int			runs = 0;
	int			i;

	if (nfound <= MAX_DIRECT)
	{
		for (i = 0; i < nfound; i++)
		{
			if (outbox_glob_match_list(cache->patterns[found[i] - cache->subs],
									   event->type, len, outbox_char_length))
				runs += add_targets(event, &found[i], 1);
		}
		return Min(runs, 1);
	}

	entry = find_type(&cache->scoped, event->type, len);
	for (i = 0; i < entry->ngroups; i++)
	{
		nfound = find_scope(entry->groups[i]->members, entry->groups[i]->nmembers,
							event->scope, &found);
		runs += add_targets(event, found, nfound);
	}
	return runs;
}

/* Fill the targets of an event, as far as its type and scope decide. */
static void
route_event(OutboxEvent *event)
{
	int			len = strlen(event->type);
	RouteType  *entry;
	int			runs = 0;		/* of targets, each in key order */
	int			i;

	/* the trigger of outbox.events has refused it, if nobody turned it off */
	if (len > OUTBOX_MAX_TYPE)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("type of an event is too long"),
				 errdetail("It has %d bytes; the limit is %d.", len, OUTBOX_MAX_TYPE)));

	event->ntargets = 0;
	event->targets = NULL;
	entry = find_type(&cache->unscoped, event->type, len);
	for (i = 0; i < entry->ngroups; i++)
		runs += add_targets(event, entry->groups[i]->members, entry->groups[i]->nmembers);
	if (event->scope != NULL && cache->nscoped > 0)
		runs += route_scope(event, len);
	if (runs > 1)
		qsort(event->targets, event->ntargets, sizeof(OutboxTarget), compare_targets);
}

/*
 * Fill the targets of events, in the key order of the subscriptions' names.
 *
 * version is what the claim read in its own snapshot, which is the active one
 * still: subscriptions are read by it too, so that none that came or went since
 * the claim makes a difference.  Targets are allocated in the current context; what
 * they point to stays until the next call.  The caller is connected to SPI.
 */
void
outbox_route_events(OutboxEvent *events, int nevents, int64 version)
{
	int			i;

	if (cache == NULL || cache->version != version)
		load_cache(GetActiveSnapshot(), 0);
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
	load_cache(InvalidSnapshot, 0);
	route_event(event);
	outbox_filter_events(event, 1, content);
}

/*
 * Read one subscription, as the current statement sees it, for calls of
 * outbox_route_by_loaded; outbox_route_forget ends that.
 */
void
outbox_route_load_one(int32 subscription)
{
	load_cache(InvalidSnapshot, subscription);
}

/*
 * Match events against that subscription: each has one target or none.  Filters
 * take the time that they take.
 */
void
outbox_route_by_loaded(OutboxEvent *events, int nevents)
{
	int			i;

	for (i = 0; i < nevents; i++)
		route_event(&events[i]);
	outbox_filter_patiently(events, nevents);
}
