/*-------------------------------------------------------------------------
 *
 * want.c
 *		Whose handlers have something to do: what the launcher and the runners
 *		of a database tell each other in shared memory.
 *
 * A want is a role and the earliest time at which a job of one of its handlers
 * may be claimable.  Whoever makes such a job lowers that time and wakes an
 * idle runner of the role, or the launcher when there is none.  A runner that
 * has looked at everything of its role raises it again, unless something was
 * posted while it looked; by then it is idle, and woken by the next post.
 *
 * A runner that takes a job has the launcher look, since it may be busy for
 * long; the launcher looks again by itself a little later, and until then it
 * is not told again.  What is still due then needs another runner.
 *
 * When roles wait for a place and none is free, the launcher sends idle runners
 * away, or else says how many are to go.  The first that may go take that number
 * down, each by one, and go.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "miscadmin.h"
#include "storage/proc.h"

/* A runner that others wait for works so long, at least, in us */
#define TIME_SLICE USECS_PER_SEC

/* What somebody else has locked is looked at again after that, in us */
#define LOOK_AGAIN USECS_PER_SEC

/* In a runner: its place */
static OutboxDatabase *my_db = NULL;
static OutboxRunner *me = NULL;
static bool my_role_is_super = false;

/*
 * The want of a role; NULL when there is none.  The caller holds the mutex.
 */
static OutboxWant *
find_want(OutboxDatabase *db, Oid owner)
{
	int			i;

	for (i = 0; i < OUTBOX_MAX_WANTS; i++)
	{
		if (db->wants[i].owner == owner)
			return &db->wants[i];
	}
	return NULL;
}

/* How many runners does a role have, but for those that are leaving? */
static int
count_runners(OutboxDatabase *db, Oid owner)
{
	int			n = 0;
	int			i;

	for (i = 0; i < OUTBOX_MAX_RUNNERS; i++)
		n += db->runners[i].pid != 0 && db->runners[i].owner == owner && !db->runners[i].leaving;
	return n;
}

/*
 * A want for a role that has none; NULL when there is no room.  One of a role
 * that has nothing to do and no runner makes room.  The caller holds the
 * mutex.
 */
static OutboxWant *
make_want(OutboxDatabase *db, Oid owner)
{
	OutboxWant *want = find_want(db, InvalidOid);
	int			i,
				j;

	for (i = 0; want == NULL && i < OUTBOX_MAX_WANTS; i++)
	{
		if (db->wants[i].due != DT_NOEND)
			continue;
		for (j = 0; j < OUTBOX_MAX_RUNNERS; j++)
		{
			if (db->runners[j].pid != 0 && db->runners[j].owner == db->wants[i].owner)
				break;
		}
		if (j == OUTBOX_MAX_RUNNERS)
			want = &db->wants[i];
	}
	if (want == NULL)
		return NULL;
	want->owner = owner;
	want->posts = 0;
	want->due = DT_NOEND;
	want->served_at = 0;
	return want;
}

/*
 * A job of a handler of a role is due at a time.  An idle runner of that role
 * is woken; when there is none, the launcher is, to see whether there should
 * be one.  Must not raise or allocate: the commit callback calls this.
 *
 * When there is no room for the role, the next sweep of a relay tries again.
 */
void
outbox_want_runner(Oid owner, TimestampTz due)
{
	OutboxDatabase *db = outbox_find_database(MyDatabaseId);
	TimestampTz now = GetCurrentTimestamp();
	OutboxWant *want;
	bool		tell = false;
	int			procno = -1;
	int			i;

	if (db == NULL || !OidIsValid(owner))
		return;
	SpinLockAcquire(&db->mutex);
	if (db->dboid == MyDatabaseId &&
		((want = find_want(db, owner)) != NULL || (want = make_want(db, owner)) != NULL))
	{
		bool		sooner = due < want->due;
		bool		news = sooner || due <= now;

		want->due = Min(want->due, due);
		want->posts++;

		/* what falls due after something that is known of disturbs nobody */
		for (i = 0; i < OUTBOX_MAX_RUNNERS && news && procno < 0; i++)
		{
			OutboxRunner *runner = &db->runners[i];

			if (runner->pid != 0 && runner->owner == owner && runner->idle && !runner->leaving)
			{
				procno = runner->procno;
				runner->idle = false;	/* the next one wakes another */
				runner->busy_since = now;
			}
		}
		if (procno < 0)
		{
			tell = count_runners(db, owner) == 0 ? sooner : news && !db->runners_watched;
			db->runners_watched |= tell;
		}
	}
	SpinLockRelease(&db->mutex);

	if (procno >= 0)
		ProcSendSignal(procno);
	else if (tell)
		outbox_launcher_wake();
}

/*
 * A runner can do nothing for a role: it is not wanted until something is
 * posted again.
 */
void
outbox_want_nothing(Oid owner)
{
	OutboxDatabase *db = outbox_find_database(MyDatabaseId);
	OutboxWant *want;

	if (db == NULL)
		return;
	SpinLockAcquire(&db->mutex);
	if (db->dboid == MyDatabaseId && (want = find_want(db, owner)) != NULL)
		want->due = DT_NOEND;
	SpinLockRelease(&db->mutex);
}

/* This process is a runner, and that is its place. */
void
outbox_runner_is(OutboxDatabase *db, OutboxRunner *runner)
{
	my_db = db;
	me = runner;
}

/* The role of this runner is a superuser, or is not. */
void
outbox_runner_is_super(bool super)
{
	my_role_is_super = super;
}

/*
 * The runner begins to look at all that its role may have to do.  The number
 * is for outbox_want_end.
 */
uint32
outbox_want_begin(Oid owner)
{
	OutboxWant *want;
	uint32		result = 0;

	SpinLockAcquire(&my_db->mutex);
	if ((want = find_want(my_db, owner)) != NULL)
		result = want->posts;
	SpinLockRelease(&my_db->mutex);
	return result;
}

/*
 * The runner has looked at everything since outbox_want_begin and found
 * nothing to do before next (DT_NOEND: nothing at all).  It is idle now, and
 * has to look again at the time returned, or when its latch is set.
 *
 * DT_NOBEGIN: something was posted while it looked.  It is not idle, and has
 * to look again at once.
 */
TimestampTz
outbox_want_end(Oid owner, uint32 seen, TimestampTz next)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz result = DT_NOBEGIN;
	OutboxWant *want;

	if (next <= now)
		next = now + LOOK_AGAIN;
	SpinLockAcquire(&my_db->mutex);
	want = find_want(my_db, owner);
	if (want == NULL || want->posts == seen)
	{
		if (want != NULL)
			want->due = next;
		me->idle = true;
		result = next;
	}
	SpinLockRelease(&my_db->mutex);
	return result;
}

/* The runner waits, or waits no longer. */
void
outbox_runner_idle(bool idle)
{
	TimestampTz now = GetCurrentTimestamp();

	SpinLockAcquire(&my_db->mutex);
	if (me->idle && !idle)
		me->busy_since = now;
	me->idle = idle;
	SpinLockRelease(&my_db->mutex);
}

/*
 * May this runner make room for another role?  One that is idle may.  One that
 * is busy may after its time slice, if no other role has more runners than its
 * own, or if nobody of that role has gone for another time slice.  The caller
 * holds the mutex.
 */
static bool
may_go(bool idle, TimestampTz now)
{
	int			mine;
	int			i;

	if (idle)
		return true;
	if (now - me->started_at < TIME_SLICE)
		return false;
	if (now - my_db->crowded_since >= TIME_SLICE)
		return true;
	mine = count_runners(my_db, me->owner);
	for (i = 0; i < OUTBOX_MAX_RUNNERS; i++)
	{
		if (my_db->runners[i].pid != 0 && count_runners(my_db, my_db->runners[i].owner) > mine)
			return false;
	}
	return true;
}

/*
 * Is this runner to end now?  Asked between two jobs, and when there is
 * nothing to do (idle).  It is, if there are to be fewer runners, or none of
 * superusers, if the launcher says so, or if other roles wait for a place and
 * it may go.  Once that is said it has to go.
 */
bool
outbox_runner_should_go(bool idle)
{
	TimestampTz now = GetCurrentTimestamp();

	SpinLockAcquire(&my_db->mutex);
	if (me - my_db->runners >= outbox_runners_setting ||
		(my_role_is_super && !outbox_superuser_handlers))
		me->leaving = true;
	else if (!me->leaving && my_db->crowd > 0 && may_go(idle, now))
	{
		my_db->crowd--;
		me->leaving = true;
	}
	idle = me->leaving;
	SpinLockRelease(&my_db->mutex);
	return idle;
}

/*
 * May the runner take a job of a subscription, when that may have no more than
 * so many runners at a time?  If so, it shows that it does, before it claims
 * one: two runners that ask at once must not both think that they may.
 */
bool
outbox_runner_takes(int32 subscription, int most)
{
	int			others = 0;
	int			i;

	SpinLockAcquire(&my_db->mutex);
	for (i = 0; i < OUTBOX_MAX_RUNNERS; i++)
	{
		OutboxRunner *runner = &my_db->runners[i];

		others += runner != me && runner->pid != 0 && runner->subscription == subscription;
	}
	if (others < most)
		me->subscription = subscription;
	SpinLockRelease(&my_db->mutex);
	return others < most;
}

/*
 * Show which job the runner runs; 0, 0: none.
 *
 * It may take long, and what else is due for its role, or falls due, must not
 * wait for that: the launcher has a look, unless it is about to have one.
 */
void
outbox_runner_shows(int32 subscription, int64 job)
{
	TimestampTz now = GetCurrentTimestamp();
	OutboxWant *want;
	bool		tell = false;

	SpinLockAcquire(&my_db->mutex);
	me->subscription = subscription;
	me->job = job;
	me->began_at = job != 0 ? now : 0;
	if (job != 0)
	{
		if ((want = find_want(my_db, me->owner)) != NULL)
			want->served_at = now;
		tell = !my_db->runners_watched;
		my_db->runners_watched = true;
	}
	SpinLockRelease(&my_db->mutex);
	if (tell)
		outbox_launcher_wake();
}

/* Count a job that was completed, or that failed. */
void
outbox_runner_count(bool failed)
{
	SpinLockAcquire(&my_db->mutex);
	if (failed)
		me->failures++;
	else
		me->jobs++;
	SpinLockRelease(&my_db->mutex);
}
