/*-------------------------------------------------------------------------
 *
 * launcher.h
 *		What the launcher knows, shared by launcher.c, keep.c and
 *		keep_runners.c.
 *
 *-------------------------------------------------------------------------
 */
#ifndef OUTBOX_LAUNCHER_H
#define OUTBOX_LAUNCHER_H

#include "outbox.h"

#include "lib/ilist.h"
#include "postmaster/bgworker.h"

/* Times in ms, by a clock that only goes forward */
#define OUTBOX_NEVER PG_INT64_MAX

#define OUTBOX_RESTART_MIN 1000 /* first wait after a failure */
#define OUTBOX_RESTART_MAX 60000	/* longest wait */
#define OUTBOX_HEALTHY_AFTER 60000	/* after such a life waits begin anew */
#define OUTBOX_START_INTERVAL 100	/* at least, between two starts */
#define OUTBOX_ENDED_AT_ONCE 1000	/* in so short a life nothing was done */
#define OUTBOX_GO_BY_ITSELF 5000	/* for one that is not needed */

/* A relay or runner of a database */
typedef struct OutboxKeptWorker
{
	BackgroundWorkerHandle *handle; /* NULL: none, or started by a predecessor */
	bool		running;		/* its end has not been dealt with yet */
	bool		handle_asked;	/* the worker of the handle is to end */
	int			pid_asked;		/* and this process */
	int64		end_at;			/* not needed: ended if it is there by then */
	int64		started_at;
	int64		start_at;		/* a relay: the next one not before */
	int			failures;		/* a relay: in a row */
	Oid			owner;			/* a runner: whose handlers it runs */
} OutboxKeptWorker;

/* A role whose runners fail, or have just ended, in a database */
typedef struct OutboxKeptOwner
{
	Oid			oid;			/* InvalidOid: free */
	int64		start_at;		/* the next one not before */
	int			failures;		/* in a row */
} OutboxKeptOwner;

/* One database */
typedef struct OutboxKeptDatabase
{
	dlist_node	node;
	Oid			oid;
	char		name[NAMEDATALEN];
	bool		seen;			/* in the list that is being read */
	bool		ours;			/* outbox may work there */

	int64		probe_at;		/* when a probe is due */
	bool		probing;		/* a probe is under way */
	int			probe_failures; /* in a row */
	bool		probed;			/* the following three are known */
	bool		present;		/* the extension is there */
	Oid			owner;
	bool		owner_login;

	int			slot;			/* -1: none */
	OutboxKeptWorker relays[OUTBOX_MAX_RELAYS];
	OutboxKeptWorker runners[OUTBOX_MAX_RUNNERS];
	OutboxKeptOwner owners[OUTBOX_MAX_WANTS];
	int64		watch_at;		/* when to look at its runners again: soon,
								 * ... */
	int64		want_at;		/* ... and when something falls due */

	bool		swept;			/* it has no slot and is swept */
	int64		sweep_at;
	int			sweep_failures; /* in a row */
} OutboxKeptDatabase;

extern int64 outbox_keep_now;	/* of this turn of the loop */

extern void outbox_keep_set_now(void);
extern int64 outbox_keep_wait(int failures);
extern BackgroundWorkerHandle *outbox_keep_start(const char *type, const char *function,
												 OutboxKeptDatabase *db, const OutboxWorkerArgs *args);
extern bool outbox_keep_ended(BackgroundWorkerHandle **handle);
extern void outbox_keep_assign_slot(OutboxKeptDatabase *db);
extern void outbox_keep_owner(OutboxKeptDatabase *db, Oid owner, bool login);
extern void outbox_keep_forgive(OutboxKeptDatabase *db);
extern bool outbox_keep_closed(OutboxKeptDatabase *db);
extern void outbox_keep_end(OutboxKeptWorker *worker, int pid);
extern void outbox_keep_workers(OutboxKeptDatabase *db);
extern int64 outbox_keep_due(OutboxKeptDatabase *db);
extern int64 outbox_keep_retry_start(void);

/* keep_runners.c */
extern bool outbox_keep_runners(OutboxKeptDatabase *db, bool wanted);
extern void outbox_keep_runners_forgive(OutboxKeptDatabase *db);
extern int64 outbox_keep_runners_due(OutboxKeptDatabase *db);

#endif							/* OUTBOX_LAUNCHER_H */
