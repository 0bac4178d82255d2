/*-------------------------------------------------------------------------
 *
 * route.h
 *		The cache of subscriptions, shared by route.c and route_cache.c.
 *
 *-------------------------------------------------------------------------
 */
#ifndef OUTBOX_ROUTE_H
#define OUTBOX_ROUTE_H

#include "outbox.h"

#include "utils/hsearch.h"

/* Subscriptions whose patterns are the same */
typedef struct RouteGroup
{
	List	   *patterns;		/* OutboxPattern * */
	int			nmembers;
	OutboxSubscription **members;	/* by scope, then in key order */
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

/* All subscriptions without a scope, or all with one */
typedef struct RouteTable
{
	int			ngroups;
	RouteGroup *groups;
	uint64		lookups;
	HTAB	   *index;
	List	   *unindexed;		/* groups that every type must be tried with */
	bool		prefixes[OUTBOX_MAX_TYPE + 1];	/* lengths in the index */
	bool		suffixes[OUTBOX_MAX_TYPE + 1];
	HTAB	   *types;			/* those seen */
	MemoryContext context;		/* what it points to */
} RouteTable;

typedef struct RouteCache
{
	MemoryContext context;		/* all of it */
	int64		version;		/* of outbox.routing */
	int			nsubs;
	OutboxSubscription *subs;	/* by the key order of their names */
	List	  **patterns;		/* of each */
	int			nscoped;
	OutboxSubscription **by_scope;	/* those with a scope */
	RouteTable	unscoped;
	RouteTable	scoped;
} RouteCache;

extern RouteCache *outbox_route_load(Snapshot snapshot, int32 only);
extern void outbox_route_empty_types(RouteTable *table);
extern int	outbox_route_compare(const void *a, const void *b);

#endif							/* OUTBOX_ROUTE_H */
