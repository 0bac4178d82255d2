/*-------------------------------------------------------------------------
 *
 * keep_runners.c
 *		Keeps the runners of a database: starts them for the roles that have
 *		something to do, shares the places among them, and ends those that are
 *		not needed.
 *
 * What the roles want, and what the runners do, is in shared memory (want.c).
 * A runner ends by itself after a while without work, so nothing is ended here
 * but what is too much.
 *
 * A role gets its first runner as soon as something is due, and one more when
 * something is still due after all of its runners have been busy for a while.
 * Who has fewer runners comes first, then who was served longest ago.  When no
 * place is free, idle runners of others make room; and busy ones when a role
 * has no runner, or two less than another.
 *
 * Part of the launcher; launcher.c tells the stories.
 *
 *-------------------------------------------------------------------------
 */
#include "launcher.h"

#include "access/htup_details.h"
#include "catalog/pg_authid.h"
#include "miscadmin.h"
#include "storage/proc.h"
#include "utils/memutils.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

/* So long, in ms, may something be due while all runners of its role are busy */
#define HELP_AFTER 200

/* A look at the runners and wants of a database */
typedef struct RunnerLook
{
	OutboxKeptDatabase *db;
	OutboxDatabase *slot;
	OutboxRunner runners[OUTBOX_MAX_RUNNERS];	/* these two as of now */
	OutboxWant	wants[OUTBOX_MAX_WANTS];
	bool		alive[OUTBOX_MAX_RUNNERS];
	TimestampTz now;
	int			limit;			/* so many runners there should be at most */
	int			nalive;
	int			nleaving;		/* of these */
	int			most;			/* runners that one role has */
} RunnerLook;

/* What is to be done for a role */
typedef enum RoleNeed
{
	NEED_NOTHING,				/* now */
	NEED_PLACE,					/* a runner more */
	NEED_GIVEN					/* had a place, and got a runner */
} RoleNeed;

typedef struct RoleState
{
	RoleNeed	need;
	int			nrunners;		/* but for those that are leaving */
} RoleState;

/* Time by the clock of the launcher of a time by the clock of the system */
static int64
keep_time(const RunnerLook *look, TimestampTz at)
{
	return at <= look->now ? outbox_keep_now : outbox_keep_now + (at - look->now + 999) / 1000;
}

/*
 * What is known of a role whose runners have ended; NULL when there is nothing
 * and make is false.
 */
static OutboxKeptOwner *
find_owner(OutboxKeptDatabase *db, Oid oid, bool make)
{
	OutboxKeptOwner *result = &db->owners[0];
	int			i;

	for (i = 0; i < OUTBOX_MAX_WANTS; i++)
	{
		OutboxKeptOwner *owner = &db->owners[i];

		if (owner->oid == oid)
			return owner;
		if (!OidIsValid(owner->oid) || (OidIsValid(result->oid) && owner->start_at < result->start_at))
			result = owner;
	}
	if (!make)
		return NULL;
	memset(result, 0, sizeof(*result));
	result->oid = oid;
	return result;
}

/* A role may have no runner for a while, longer each time. */
static void
put_off(OutboxKeptOwner *owner)
{
	owner->failures++;
	owner->start_at = outbox_keep_now + outbox_keep_wait(owner->failures);
}

/* What kept a role from having a runner may be over. */
void
outbox_keep_runners_forgive(OutboxKeptDatabase *db)
{
	memset(db->owners, 0, sizeof(db->owners));
}

/*
 * May a role have a runner?  Asked before one is started, so that one that may
 * not fills no log.  What else may keep it from connecting, the runner finds
 * out.
 */
static bool
may_have_runner(Oid oid)
{
	HeapTuple	tuple;
	bool		result = false;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(oid));
	if (HeapTupleIsValid(tuple))
	{
		Form_pg_authid role = (Form_pg_authid) GETSTRUCT(tuple);

		result = (role->rolcanlogin || BGWORKER_BYPASS_ROLELOGINCHECK != 0) &&
			(!role->rolsuper || outbox_superuser_handlers);
		ReleaseSysCache(tuple);
	}
	CommitTransactionCommand();
	MemoryContextSwitchTo(TopMemoryContext);
	return result;
}

/*
 * A runner has ended: when may its role have the next one?
 *
 * Where it died in a job, that job waits by its own schedule, and other jobs of
 * the role are not to wait for long.  Where it came to no job, something keeps
 * it from working, as with one that ends of itself at once again and again.
 */
static void
runner_ended(RunnerLook *look, int number)
{
	OutboxKeptWorker *worker = &look->db->runners[number];
	const OutboxRunner *runner = &look->runners[number];
	OutboxKeptOwner *owner = find_owner(look->db, worker->owner, true);
	int64		lived = outbox_keep_now - worker->started_at;
	bool		worked = runner->jobs + runner->failures > 0;

	worker->running = false;
	worker->handle_asked = false;
	worker->pid_asked = 0;
	worker->end_at = OUTBOX_NEVER;

	if (worked || lived >= OUTBOX_HEALTHY_AFTER || runner->leaving)
		owner->failures = 0;
	owner->start_at = worker->started_at + OUTBOX_START_INTERVAL;
	switch (runner->end)
	{
		case OUTBOX_END_ASKED:
			break;
		case OUTBOX_END_CLEAN:
			if (worked || runner->leaving || lived >= OUTBOX_ENDED_AT_ONCE)
				owner->failures = 0;
			else if (owner->failures++ > 0)
				owner->start_at = outbox_keep_now + outbox_keep_wait(owner->failures);
			break;
		case OUTBOX_END_FAILED:
			if (runner->died_at_work)
				owner->start_at = worker->started_at + OUTBOX_RESTART_MIN;
			else
				put_off(owner);
			break;
	}
}

/*
 * A runner is not needed: the extension was dropped, or there are to be fewer.
 * It goes when its job is over.  Where the extension is gone, one that has not
 * after a while is ended, and at once where a database is no longer ours;
 * where it is not, only if it is idle.
 */
static void
dismiss_runner(RunnerLook *look, int number, bool wanted)
{
	OutboxKeptWorker *worker = &look->db->runners[number];
	OutboxRunner *runner = &look->slot->runners[number];
	int			pid = look->runners[number].pid;
	int			procno = -1;

	if (!look->db->ours ||
		(outbox_keep_now >= worker->end_at && (!wanted || look->runners[number].idle)))
	{
		outbox_keep_end(worker, pid);
		return;
	}
	if (outbox_keep_now >= worker->end_at || worker->end_at == OUTBOX_NEVER)
		worker->end_at = outbox_keep_now + OUTBOX_GO_BY_ITSELF;
	if (pid == 0 || look->runners[number].leaving)
		return;
	SpinLockAcquire(&look->slot->mutex);
	if (runner->pid == pid)
	{
		runner->leaving = true;
		procno = runner->procno;
	}
	SpinLockRelease(&look->slot->mutex);
	look->runners[number].leaving = true;
	if (procno >= 0)
		ProcSendSignal(procno);
}

/* See which runners are there, which have ended, and which are too many. */
static void
tend_runners(RunnerLook *look, bool wanted)
{
	int			i;

	for (i = 0; i < OUTBOX_MAX_RUNNERS; i++)
	{
		OutboxKeptWorker *worker = &look->db->runners[i];
		const OutboxRunner *runner = &look->runners[i];

		look->alive[i] |= runner->pid != 0;
		if (worker->running && !look->alive[i])
			runner_ended(look, i);
		else if (!worker->running && look->alive[i])
		{
			/* a predecessor's */
			worker->running = true;
			worker->end_at = OUTBOX_NEVER;
			worker->started_at = outbox_keep_now;
		}
		if (!look->alive[i])
			continue;
		if (runner->pid != 0)
			worker->owner = runner->owner;
		look->nalive++;
		if (i >= look->limit)
			dismiss_runner(look, i, wanted);
		else
			worker->end_at = OUTBOX_NEVER;
		look->nleaving += look->runners[i].leaving;
	}
}

/* Look at the runners again soon, and at that time. */
static void
watch(RunnerLook *look, int64 at)
{
	look->db->watch_at = Min(look->db->watch_at, at);
}

/* Wake an idle runner. */
static void
wake_runner(RunnerLook *look, int number)
{
	OutboxRunner *runner = &look->slot->runners[number];
	int			procno = -1;

	SpinLockAcquire(&look->slot->mutex);
	if (runner->pid == look->runners[number].pid && runner->idle)
	{
		runner->idle = false;
		runner->busy_since = look->now;
		procno = runner->procno;
	}
	SpinLockRelease(&look->slot->mutex);
	if (procno >= 0)
		ProcSendSignal(procno);
}

/*
 * Does a role need a runner more?  If it may later, that is noted.
 */
static RoleState
look_at_role(RunnerLook *look, const OutboxWant *want)
{
	OutboxKeptOwner *owner;
	TimestampTz busy_since = want->due;
	int			idle = -1;
	bool		starting = false;
	RoleState	state = {NEED_NOTHING, 0};
	int64		at;
	int			i;

	if (!OidIsValid(want->owner))
		return state;
	for (i = 0; i < OUTBOX_MAX_RUNNERS; i++)
	{
		const OutboxRunner *runner = &look->runners[i];

		if (!look->alive[i] || look->db->runners[i].owner != want->owner || runner->leaving)
			continue;
		state.nrunners++;
		if (runner->pid == 0)
			starting = true;
		else if (runner->idle)
			idle = i;
		else
			busy_since = Max(busy_since, runner->busy_since);
	}
	look->most = Max(look->most, state.nrunners);
	if (want->due == DT_NOEND)
		return state;

	at = keep_time(look, busy_since);
	if (state.nrunners > 0)
		at = keep_time(look, Max(busy_since, look->now - HELP_AFTER * 1000) + HELP_AFTER * 1000);
	owner = find_owner(look->db, want->owner, false);
	if (owner != NULL)
		at = Max(at, owner->start_at);
	if (at > outbox_keep_now)
	{
		if (want->due <= look->now && state.nrunners > 0)
			watch(look, at);
		else
			look->db->want_at = Min(look->db->want_at, at);
	}
	else if (idle >= 0)
	{
		/* it knows of something later, perhaps, but not of this */
		wake_runner(look, idle);
		watch(look, outbox_keep_now + HELP_AFTER);
	}
	else if (starting)
		watch(look, outbox_keep_now + HELP_AFTER);
	else
		state.need = NEED_PLACE;
	return state;
}

/* Start a runner.  False when that cannot be done now. */
static bool
start_runner(RunnerLook *look, int number, Oid owner)
{
	OutboxKeptWorker *worker = &look->db->runners[number];
	OutboxRunner *runner = &look->slot->runners[number];
	OutboxWorkerArgs args;

	memset(&args, 0, sizeof(args));
	args.dboid = look->db->oid;
	args.userid = owner;
	args.slot = look->db->slot;
	args.runner = number;

	SpinLockAcquire(&look->slot->mutex);
	if (runner->pid == 0)
	{
		memset(runner, 0, sizeof(*runner));
		runner->owner = owner;
		runner->end = OUTBOX_END_FAILED;	/* unless it tells */
	}
	SpinLockRelease(&look->slot->mutex);

	worker->handle = outbox_keep_start("outbox runner", "outbox_runner_main", look->db, &args);
	if (worker->handle == NULL)
		return false;
	worker->running = true;
	worker->end_at = OUTBOX_NEVER;
	worker->started_at = outbox_keep_now;
	worker->owner = owner;
	look->alive[number] = true;
	look->nalive++;
	return true;
}

/* The want whose role comes next, of those that need a place; -1: none */
static int
next_role(const RunnerLook *look, const RoleState *roles)
{
	int			result = -1;
	int			i;

	for (i = 0; i < OUTBOX_MAX_WANTS; i++)
	{
		if (roles[i].need != NEED_PLACE)
			continue;
		if (result < 0 || roles[i].nrunners < roles[result].nrunners ||
			(roles[i].nrunners == roles[result].nrunners &&
			 look->wants[i].served_at < look->wants[result].served_at))
			result = i;
	}
	return result;
}

/* Give the free places to those who need one. */
static void
give_places(RunnerLook *look, RoleState *roles)
{
	int			place = 0;
	int			i;

	while (look->nalive < look->limit && (i = next_role(look, roles)) >= 0)
	{
		Oid			owner = look->wants[i].owner;

		while (place < look->limit && look->alive[place])
			place++;
		if (place == look->limit)
			return;
		if (!may_have_runner(owner))
		{
			put_off(find_owner(look->db, owner, true));
			roles[i].need = NEED_NOTHING;
			look->db->want_at = Min(look->db->want_at,
									find_owner(look->db, owner, true)->start_at);
			continue;
		}
		if (!start_runner(look, place, owner))
		{
			/* no more than there are; the launcher tries again */
			look->limit = look->nalive;
			return;
		}
		roles[i].need = NEED_GIVEN;
		roles[i].nrunners++;
		look->most = Max(look->most, roles[i].nrunners);
		watch(look, outbox_keep_now + HELP_AFTER);
	}
}

/* Have a runner go, if it is still idle. */
static bool
send_idle_away(RunnerLook *look, int number)
{
	OutboxRunner *runner = &look->slot->runners[number];
	int			procno = -1;

	if (look->runners[number].pid == 0 || look->runners[number].leaving ||
		!look->runners[number].idle)
		return false;
	SpinLockAcquire(&look->slot->mutex);
	if (runner->pid == look->runners[number].pid && runner->idle)
	{
		runner->leaving = true;
		procno = runner->procno;
	}
	SpinLockRelease(&look->slot->mutex);
	if (procno < 0)
		return false;
	ProcSendSignal(procno);
	look->nleaving++;
	return true;
}

/*
 * Make room for those who need a place.  Idle runners of others go.  When that
 * is not enough, it is said how many of the busy ones are to go, for roles that
 * have none, or two less than another has.
 */
static void
make_room(RunnerLook *look, const RoleState *roles)
{
	int			needed = 0;
	int			crowd = 0;
	int			i;

	for (i = 0; i < OUTBOX_MAX_WANTS; i++)
	{
		if (roles[i].need != NEED_PLACE)
			continue;
		needed++;
		crowd += roles[i].nrunners == 0 || roles[i].nrunners + 2 <= look->most;
	}
#define ROOM() Max(look->limit - (look->nalive - look->nleaving), 0)
	for (i = 0; i < OUTBOX_MAX_RUNNERS && needed > ROOM(); i++)
		(void) send_idle_away(look, i);
	crowd = Max(crowd - ROOM(), 0);
#undef ROOM

	SpinLockAcquire(&look->slot->mutex);
	if (look->slot->crowd == 0)
		look->slot->crowded_since = look->now;
	look->slot->crowd = crowd;
	SpinLockRelease(&look->slot->mutex);
}

/*
 * Copy what is in shared memory.  From now on posts are told to the launcher
 * again; at the end of the look it may turn that off, if it looks again soon
 * by itself.
 */
static void
begin_look(RunnerLook *look, OutboxKeptDatabase *db, bool wanted)
{
	bool		watched;
	int			i;

	memset(look, 0, sizeof(*look));
	look->db = db;
	look->slot = &outbox_shared->databases[db->slot];
	look->limit = wanted ? outbox_runners_setting : 0;
	look->now = GetCurrentTimestamp();
	/* first, so that of one that has ended we know all that it has to say */
	for (i = 0; i < OUTBOX_MAX_RUNNERS; i++)
		look->alive[i] = !outbox_keep_ended(&db->runners[i].handle);
	SpinLockAcquire(&look->slot->mutex);
	memcpy(look->runners, look->slot->runners, sizeof(look->runners));
	memcpy(look->wants, look->slot->wants, sizeof(look->wants));
	watched = look->slot->runners_watched;
	look->slot->runners_watched = false;
	SpinLockRelease(&look->slot->mutex);

	if (db->watch_at <= outbox_keep_now)
		db->watch_at = OUTBOX_NEVER;
	else if (watched)
		watch(look, outbox_keep_now + HELP_AFTER);	/* somebody told us */
	db->want_at = OUTBOX_NEVER;
}

/*
 * Bring the runners of a database to what they should be.  True when there are
 * any.  wanted: outbox works there.
 */
bool
outbox_keep_runners(OutboxKeptDatabase *db, bool wanted)
{
	RunnerLook	look;
	RoleState	roles[OUTBOX_MAX_WANTS];
	int			i;

	begin_look(&look, db, wanted);
	tend_runners(&look, wanted);
	if (look.limit > 0)
	{
		for (i = 0; i < OUTBOX_MAX_WANTS; i++)
			roles[i] = look_at_role(&look, &look.wants[i]);
		if (!outbox_keep_closed(db))
			give_places(&look, roles);
		make_room(&look, roles);
	}
	if (db->watch_at != OUTBOX_NEVER)
	{
		SpinLockAcquire(&look.slot->mutex);
		look.slot->runners_watched = true;
		SpinLockRelease(&look.slot->mutex);
	}
	return look.nalive > 0;
}

/* When the runners of a database are to be looked at next, if nobody wakes us */
int64
outbox_keep_runners_due(OutboxKeptDatabase *db)
{
	int64		due = Min(db->watch_at, db->want_at);
	int			i;

	for (i = 0; i < OUTBOX_MAX_RUNNERS; i++)
	{
		if (db->runners[i].running && db->runners[i].end_at > outbox_keep_now)
			due = Min(due, db->runners[i].end_at);
	}
	return due;
}
