/*-------------------------------------------------------------------------
 *
 * claim_commit.c
 *		The commit of a transaction that does nothing but claim many jobs.
 *
 * Whoever asks for many jobs at once may lose the leases when the server stops,
 * since they are kept in memory when there are many (lease_many.c).  When there
 * are few they are in the rows, but nobody need wait for their flush either: a
 * transaction in which nothing else was written commits asynchronously.  Who
 * asks for few waits: the attempt is known from then on, also when it takes the
 * server down.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "access/xact.h"
#include "executor/instrument.h"
#include "utils/guc.h"

/* Has this transaction written nothing but such claims, and how much had it then? */
static bool claimed = false;
static bool alone;
static int64 wal_records;

/* A call is about to claim; many: it asks for many jobs. */
void
outbox_claim_begins(bool many)
{
	if (!claimed)
		alone = many && !TransactionIdIsValid(GetTopTransactionIdIfAny());
	else
		alone = alone && many && pgWalUsage.wal_records == wal_records;
	claimed = true;
}

/* It has claimed. */
void
outbox_claim_ended(void)
{
	wal_records = pgWalUsage.wal_records;
}

/* Before a transaction commits, and at its end */
static void
at_xact_event(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
			if (claimed && alone && pgWalUsage.wal_records == wal_records &&
				synchronous_commit != SYNCHRONOUS_COMMIT_OFF)
				(void) set_config_option("synchronous_commit", "off", PGC_USERSET, PGC_S_SESSION,
										 GUC_ACTION_LOCAL, true, 0, false);
			break;
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PREPARE:
			claimed = false;
			break;
		default:
			break;
	}
}

/* Register the callback; called once, when the library is loaded. */
void
outbox_claim_commit_init(void)
{
	RegisterXactCallback(at_xact_event, NULL);
}
