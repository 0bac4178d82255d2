/*-------------------------------------------------------------------------
 *
 * want.c
 *		Whose handlers have something to do: what the launcher and the runners
 *		of a database tell each other in shared memory.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "miscadmin.h"
#include "storage/proc.h"

/*
 * A job of a handler of a role is due at a time.  An idle runner of that role
 * is woken; when there is none, the launcher is, to see whether there should be
 * one.  Must not raise or allocate: the commit callback calls this.
 *
 * When there is no room for the role, the next sweep of a relay tries again.
 */
void
outbox_want_runner(Oid owner, TimestampTz due)
{
	OutboxDatabase *db = outbox_find_database(MyDatabaseId);
	OutboxWant *want = NULL;
	bool		sooner = false;
	int			procno = -1;
	int			i;

	if (db == NULL)
		return;
	SpinLockAcquire(&db->mutex);
	if (db->dboid == MyDatabaseId)
	{
		for (i = 0; i < OUTBOX_MAX_WANTS; i++)
		{
			if (db->wants[i].owner == owner)
			{
				want = &db->wants[i];
				break;
			}
			if (want == NULL && !OidIsValid(db->wants[i].owner))
				want = &db->wants[i];
		}
		if (want != NULL)
		{
			if (want->owner != owner)
			{
				want->owner = owner;
				want->due = DT_NOEND;
				want->served_at = 0;
			}
			sooner = due < want->due;
			want->due = Min(want->due, due);
		}
		for (i = 0; i < OUTBOX_MAX_RUNNERS; i++)
		{
			OutboxRunner *runner = &db->runners[i];

			if (runner->pid != 0 && runner->owner == owner && runner->idle)
			{
				procno = runner->procno;
				runner->idle = false;	/* the next one wakes another */
				break;
			}
		}
	}
	SpinLockRelease(&db->mutex);

	if (procno >= 0)
		ProcSendSignal(procno);
	else if (sooner)
		outbox_launcher_wake();
}
