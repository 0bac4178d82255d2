/*-------------------------------------------------------------------------
 *
 * retention.h
 *		What retention lets go (retention.c), for those who run it (prune.c).
 *
 *-------------------------------------------------------------------------
 */
#ifndef OUTBOX_RETENTION_H
#define OUTBOX_RETENTION_H

#include "outbox.h"

/* What a cycle looks at, in this order: each makes events deletable */
typedef enum OutboxRetentionPhase
{
	OUTBOX_RETENTION_GONE = 0,	/* jobs of subscriptions that are gone */
	OUTBOX_RETENTION_DEAD,		/* dead jobs */
	OUTBOX_RETENTION_JOBS,		/* done and cancelled jobs */
	OUTBOX_RETENTION_EVENTS,	/* events, with their jobs */
	OUTBOX_RETENTION_END
} OutboxRetentionPhase;

#define OUTBOX_STEP_JOBS 1000	/* jobs deleted in one step, unless one event
								 * has more */

/*
 * A walk over what one phase looks at.  Keys are ids of subscriptions for the
 * first two, which always look at all of them, ids of jobs, or seqs.
 */
typedef struct OutboxWalk
{
	int64		after;			/* in this cycle: looked at up to there */
	int64		lowest;			/* nothing is left up to there, as far as was
								 * seen */
	int64		front;			/* where the next cycle begins, usually */
	bool		full;			/* this one began at lowest */
	bool		kept;			/* something was kept; lowest is below that */
	int			young;			/* rows in a row that were too young */
	int64		wasted;			/* us that full walks took since the last one
								 * began, in which nothing was deleted */
	TimestampTz ended_at;		/* when the last full walk ended */
	TimestampTz bottom_at;		/* when lowest was last forgotten */
} OutboxWalk;

typedef struct OutboxRetention
{
	OutboxRetentionPhase phase;
	TimestampTz began;			/* of the cycle: ages are counted to then */
	OutboxWalk	walks[OUTBOX_RETENTION_END];
	TimestampTz dead_until;		/* no dead job is older, as far as was seen */

	/* the subscription whose jobs are being deleted */
	int32		subscription;	/* 0: none */
	bool		dead;			/* its dead jobs */
	TimestampTz at;				/* deleted up to this time, ... */
	int64		id;				/* ... and of that time up to this id */

	bool		careful;		/* events one by one: some cannot be deleted, */
	int			failures;		/* so many in this cycle, ... */
	char		error[OUTBOX_ERROR_LEN];	/* ... the first for this reason */

	/* deleted since the cycle began */
	int64		events;
	int64		jobs;
} OutboxRetention;

/* All in a transaction, as the owner of the extension, connected to SPI */
extern bool outbox_retention_allowed(void);
extern void outbox_retention_begin(OutboxRetention *state);
extern bool outbox_retention_step(OutboxRetention *state);
extern bool outbox_retention_trouble(int sqlstate);

/* between the two files */
extern TimestampTz outbox_retention_cutoff(const OutboxRetention *state, int retention);
extern bool outbox_walk_row(OutboxWalk *walk, int64 key, bool young, bool deletable);
extern int64 outbox_delete_jobs(Datum *tids, int n);
extern bool outbox_retention_events(OutboxRetention *state);

#endif							/* OUTBOX_RETENTION_H */
