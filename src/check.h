/*-------------------------------------------------------------------------
 *
 * check.h
 *		What the files of outbox.check() share.
 *
 *-------------------------------------------------------------------------
 */
#ifndef OUTBOX_CHECK_H
#define OUTBOX_CHECK_H

#include "outbox.h"

typedef enum CheckLevel
{
	CHECK_NOTICE,
	CHECK_WARNING,
	CHECK_ERROR
} CheckLevel;

typedef struct CheckState
{
	ReturnSetInfo *rsinfo;
	int			problems;		/* warnings and errors found */
} CheckState;

extern void outbox_report(CheckState *state, CheckLevel level, const char *hint,
						  const char *format,...) pg_attribute_printf(4, 5);
extern int	outbox_check_query(OutboxPlan *plan);
extern char *outbox_check_ago(TimestampTz then);
extern char *outbox_check_text(int row, int column);
extern int64 outbox_check_int8(int row, int column);
extern TimestampTz outbox_check_time(int row, int column);

/* check_jobs.c */
extern void outbox_check_subscriptions(CheckState *state);

/* Short names, for these files alone */
#define report outbox_report
#define query outbox_check_query
#define ago outbox_check_ago
#define text_at outbox_check_text
#define int8_at outbox_check_int8
#define time_at outbox_check_time

#endif							/* OUTBOX_CHECK_H */
