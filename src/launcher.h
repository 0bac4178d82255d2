/*-------------------------------------------------------------------------
 *
 * launcher.h
 *		What the launcher knows, shared by launcher.c and keep.c.
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

/* One relay of a database */
typedef struct OutboxKeptRelay
{
	BackgroundWorkerHandle *handle; /* NULL: none, or started by a predecessor */
	bool		running;		/* its end has not been dealt with yet */
	bool		handle_asked;	/* the worker of the handle is to end */
	int			pid_asked;		/* and this process */
	int64		end_at;			/* not needed: ended if it is there by then */
	int64		started_at;
	int64		start_at;		/* the next one not before */
	int			failures;		/* in a row */
} OutboxKeptRelay;

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
	OutboxKeptRelay relays[OUTBOX_MAX_RELAYS];

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
extern void outbox_keep_relays(OutboxKeptDatabase *db);
extern int64 outbox_keep_due(OutboxKeptDatabase *db);
extern int64 outbox_keep_retry_start(void);

#endif							/* OUTBOX_LAUNCHER_H */
