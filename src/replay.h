/*-------------------------------------------------------------------------
 *
 * replay.h
 *		Shared by the two files of outbox.replay().
 *
 *-------------------------------------------------------------------------
 */
#ifndef OUTBOX_REPLAY_H
#define OUTBOX_REPLAY_H

#include "consume.h"

typedef struct OutboxReplay
{
	OutboxConsumer consumer;
	TimestampTz since;
	TimestampTz until;
	int64		after;			/* seq up to which events have been looked at */
	TimestampTz due;			/* earliest of what was put back; DT_NOEND:
								 * none */
	int64		njobs;
} OutboxReplay;

/* An event of a step */
typedef struct OutboxReplayEvent
{
	OutboxEvent event;
	int64	   *named;			/* jobs that it names */
	int			nnamed;
	int64		job;			/* that of the subscription; 0: none */
	bool		finished;		/* which has come to an end */
} OutboxReplayEvent;

/* replay_jobs.c: as the owner of the extension, connected to SPI */
extern void outbox_put_back(OutboxReplay *replay, OutboxReplayEvent *candidates, int n);

#endif							/* OUTBOX_REPLAY_H */
