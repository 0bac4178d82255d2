/*-------------------------------------------------------------------------
 *
 * runner.h
 *		Running handlers: shared by handler.c, limit.c, runner.c and those who
 *		state which handler a subscription has.
 *
 *-------------------------------------------------------------------------
 */
#ifndef OUTBOX_RUNNER_H
#define OUTBOX_RUNNER_H

#include "consume.h"

/* A handler as it is stored with its subscription */
typedef struct OutboxHandler
{
	Oid			oid;			/* InvalidOid: none */
	char	   *name;			/* qualified and quoted */
} OutboxHandler;

/* Why code of a user's was cancelled */
typedef enum OutboxCancel
{
	OUTBOX_CANCEL_NONE = 0,
	OUTBOX_CANCEL_LEASE,		/* its lease has ended */
	OUTBOX_CANCEL_ASKED			/* the worker is to end */
} OutboxCancel;

/* handler.c: stating a handler */
extern void outbox_handler_resolve(const char *text, OutboxHandler *handler);
extern Oid	outbox_handler_find(const char *name);
extern void outbox_handler_check_owner(const OutboxHandler *handler, const char *owner,
									   Oid owner_oid);

/* handler.c: in a runner */
extern Datum outbox_handler_event(int64 seq, int64 *version, bool *found);
extern void outbox_handler_run(const OutboxConsumer *consumer, Datum event, int attempt);
extern void outbox_handler_forget(bool temp_used);

/* limit.c: in a runner */
extern void outbox_limit_init(void);
extern void outbox_limit_busy(bool busy);
extern bool outbox_limit_asked(void);
extern void outbox_limit_begin(int64 us);
extern OutboxCancel outbox_limit_end(void);

#endif							/* OUTBOX_RUNNER_H */
