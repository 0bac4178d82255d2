/*-------------------------------------------------------------------------
 *
 * claim_number.c
 *		The numbers of claims.
 *
 * No two claims may ever have the same number, or who lost a lease in a crash
 * could end the work of another.  But not every claim is flushed: one whose
 * leases are in memory writes nothing, and a client may commit asynchronously.
 * So a number is used only when the record by which the sequence knows that it
 * was drawn has been flushed.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "access/xlog.h"
#include "access/xlog_internal.h"
#include "catalog/namespace.h"
#include "commands/sequence.h"
#include "executor/instrument.h"
#include "utils/lsyscache.h"

/* As the install script has it: one draw of claims_in_memory is so many claims */
#define CLAIMS_A_DRAW 1000

/* One record of a sequence that draws one by one is good for so many more */
#define LOGGED_AHEAD 32

/* A relation of ours; raises when it is gone. */
Oid
outbox_our_relation(const char *name)
{
	Oid			relid = get_relname_relid(name, get_namespace_oid(OUTBOX_SCHEMA, false));

	if (!OidIsValid(relid))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("relation \"%s.%s\" does not exist", OUTBOX_SCHEMA, name)));
	return relid;
}

/*
 * Flush what has been written so far.  At the very end of a page the next record
 * is said to begin behind the header of the next page, which is not there yet.
 */
static void
flush_so_far(void)
{
	XLogRecPtr	lsn = GetXLogInsertRecPtr();
	bool		first = XLogSegmentOffset(lsn, wal_segment_size) < XLOG_BLCKSZ;

	if (lsn % XLOG_BLCKSZ == (first ? SizeOfXLogLongPHD : SizeOfXLogShortPHD))
		lsn -= lsn % XLOG_BLCKSZ;
	XLogFlush(lsn);
}

/* The number of a claim that may write nothing, of those that were drawn at once */
static int64
next_in_memory(void)
{
	Oid			sequence = outbox_our_relation("claims_in_memory");
	int64		result;

	if (!outbox_lease_number(sequence, &result))
	{
		result = nextval_internal(sequence, false);
		flush_so_far();
		outbox_lease_numbers(sequence, result + 1, result + CLAIMS_A_DRAW);
	}
	return result;
}

/* The number of a claim that writes its leases to the rows */
static int64
next_in_rows(void)
{
	Oid			sequence = outbox_our_relation("claims");
	int64		before = pgWalUsage.wal_records;
	int64		result = nextval_internal(sequence, false);
	bool		logged = pgWalUsage.wal_records != before;

	if (logged || !outbox_lease_number_is_durable(sequence, result))
	{
		flush_so_far();
		outbox_lease_numbers(sequence, result, logged ? result + LOGGED_AHEAD + 1 : result + 1);
	}
	return result;
}

/*
 * The number of a new claim.  No two have the same, also when the server has
 * crashed in between.
 */
int64
outbox_next_claim(bool in_memory)
{
	return in_memory ? next_in_memory() : next_in_rows();
}
