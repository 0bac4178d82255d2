/*-------------------------------------------------------------------------
 *
 * worker.c
 *		What every background worker of the extension shares: its place in
 *		shared memory, signals, connection, identity, settings, transactions.
 *
 * A worker registers its place before it connects, under the lock that DDL on
 * its database takes too, so either the DDL sees the worker and ends it, or
 * the worker sees the DDL and does not start.  It gives the place up when it
 * has left the list of processes, so whoever finds the place empty finds the
 * database without it as well.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include "catalog/pg_authid.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "tcop/tcopprot.h"
#include "utils/acl.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/wait_event.h"

StaticAssertDecl(sizeof(OutboxWorkerArgs) <= BGW_EXTRALEN,
				 "the arguments of a worker must fit into bgw_extra");

/* SIGTERM came: an end by this is no failure */
static volatile sig_atomic_t asked_to_end = false;

/* A transaction of ours is under way, which SIGINT may cancel */
static volatile sig_atomic_t may_cancel = false;

/* Context of the caller's loop, which transactions switch away from */
static MemoryContext loop_context = NULL;

/* Statistics that were too fresh to be reported at commit */
static bool stats_pending = false;

/*
 * Settings of a worker.  A database or role may have others, given by somebody
 * who owns no more than that database or role; a worker's statements must
 * mean, find and plan the same everywhere.
 */
typedef struct PinnedSetting
{
	const char *name;
	const char *value;
	int			since;			/* first version that has it */
} PinnedSetting;

static const PinnedSetting pinned[] = {
	/*
	 * what could end the worker, or end or delay a transaction; it counts at
	 * once
	 */
	{"exit_on_error", "off", 0},
	{"transaction_timeout", "0", 170000},
	{"statement_timeout", "0", 0},
	{"idle_in_transaction_session_timeout", "0", 0},
	{"idle_session_timeout", "0", 0},
	{"lock_timeout", "5s", 0},
	{"default_transaction_isolation", "read committed", 0},
	{"default_transaction_read_only", "off", 0},
	{"default_transaction_deferrable", "off", 0},
	{"temp_file_limit", "-1", 0},

	/* what changes the meaning of a statement or a value */
	{"search_path", "pg_catalog, pg_temp", 0},
	{"row_security", "on", 0},
	{"session_replication_role", "origin", 0},
	{"restrict_nonsystem_relation_kind", "", 170000},
	{"standard_conforming_strings", "on", 0},
	{"backslash_quote", "safe_encoding", 0},
	{"transform_null_equals", "off", 0},
	{"array_nulls", "on", 0},
	{"quote_all_identifiers", "off", 0},
	{"TimeZone", "UTC", 0},
	{"DateStyle", "ISO, MDY", 0},
	{"IntervalStyle", "postgres", 0},
	{"bytea_output", "hex", 0},
	{"extra_float_digits", "1", 0},
	{"default_tablespace", "", 0},
	{"temp_tablespaces", "", 0},
	{"default_table_access_method", "heap", 0},

	/*
	 * what changes a plan: walks along an index, nothing that grows with the
	 * tables
	 */
	{"plan_cache_mode", "force_generic_plan", 0},
	{"enable_seqscan", "off", 0},
	{"enable_bitmapscan", "off", 0},
	{"enable_hashjoin", "off", 0},
	{"enable_mergejoin", "off", 0},
	{"enable_memoize", "off", 0},
	{"enable_nestloop", "on", 0},
	{"enable_indexscan", "on", 0},
	{"enable_indexonlyscan", "on", 0},
	{"enable_tidscan", "on", 0},
	{"enable_sort", "on", 0},
	{"enable_hashagg", "on", 0},
	{"enable_material", "on", 0},
	{"max_parallel_workers_per_gather", "0", 0},
	{"seq_page_cost", "1", 0},
	{"random_page_cost", "4", 0},
	{"cpu_tuple_cost", "0.01", 0},
	{"cpu_index_tuple_cost", "0.005", 0},
	{"cpu_operator_cost", "0.0025", 0},
	{"effective_cache_size", "4GB", 0},
	{"from_collapse_limit", "8", 0},
	{"join_collapse_limit", "8", 0},
	{"cursor_tuple_fraction", "0.1", 0},
	{"enable_incremental_sort", "on", 0},
#if PG_VERSION_NUM >= 160000
	{"debug_parallel_query", "off", 160000},
#else
	{"force_parallel_mode", "off", 0},
#endif
	{"jit", "off", 0},
};

/* Called when SIGTERM comes, by its handler; true: the worker will end by itself */
bool		(*outbox_worker_hold_sigterm) (void) = NULL;

/*
 * Settings of a runner.  Handlers are to see the settings of the role and of
 * the database, so only what could end or hinder the runner itself is pinned,
 * and what decides who may do what.
 */
static const PinnedSetting pinned_in_runner[] = {
	{"exit_on_error", "off", 0},
	{"transaction_timeout", "0", 170000},
	{"statement_timeout", "0", 0},
	{"idle_in_transaction_session_timeout", "0", 0},
	{"idle_session_timeout", "0", 0},
	{"default_transaction_read_only", "off", 0},
	{"default_transaction_deferrable", "off", 0},
	{"session_replication_role", "origin", 0},
	{"restrict_nonsystem_relation_kind", "", 170000},
};

/*
 * SIGTERM: remember that somebody asked, for the launcher; the rest is the
 * server's own handler.
 */
static void
handle_sigterm(SIGNAL_ARGS)
{
	asked_to_end = true;
	if (outbox_worker_hold_sigterm == NULL || !outbox_worker_hold_sigterm())
		die(PASS_SIGNAL_ARGS);
}

/*
 * SIGINT: cancel what is under way.  Where nothing is, the server's handler
 * would end an idle worker by an error.
 */
static void
handle_sigint(SIGNAL_ARGS)
{
	if (may_cancel)
		StatementCancelHandler(PASS_SIGNAL_ARGS);
}

/*
 * Install the signal handlers and let signals in.  SIGUSR1 stays as the server
 * has set it: database DDL elsewhere waits for every process to answer it.
 */
void
outbox_worker_signals(void)
{
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGINT, handle_sigint);
	pqsignal(SIGTERM, handle_sigterm);
	BackgroundWorkerUnblockSignals();

	/* a SIGHUP that came before had no handler */
	ConfigReloadPending = true;
}

/* Has somebody asked this worker to end? */
bool
outbox_worker_asked(void)
{
	return asked_to_end;
}

/* Read what the launcher handed to this worker. */
void
outbox_worker_arguments(OutboxWorkerArgs *args)
{
	memcpy(args, MyBgworkerEntry->bgw_extra, sizeof(*args));
}

/* Give up the place of a relay, and tell the launcher. */
static void
release_relay(int code, Datum arg)
{
	OutboxWorkerArgs args;
	OutboxDatabase *db;
	OutboxRelay *relay;

	outbox_worker_arguments(&args);
	db = &outbox_shared->databases[args.slot];
	relay = &db->relays[args.relay];
	SpinLockAcquire(&db->mutex);
	if (relay->pid == MyProcPid)
	{
		relay->pid = 0;
		relay->state = OUTBOX_RELAY_FREE;
		relay->end = code == 0 ? OUTBOX_END_CLEAN :
			asked_to_end ? OUTBOX_END_ASKED : OUTBOX_END_FAILED;
	}
	SpinLockRelease(&db->mutex);
	outbox_launcher_wake();
}

/*
 * Take the place of a relay.  False: the slot belongs to another database by
 * now, DDL keeps us out, or a relay started by an earlier launcher is there.
 */
static bool
take_place(const OutboxWorkerArgs *args)
{
	OutboxDatabase *db = &outbox_shared->databases[args->slot];
	OutboxRelay *relay = &db->relays[args->relay];
	bool		closed;
	bool		taken = false;

	LWLockAcquire(outbox_shared->lock, LW_EXCLUSIVE);
	closed = outbox_ddl_closed(args->dboid);
	SpinLockAcquire(&db->mutex);
	if (db->dboid == args->dboid && relay->pid == 0)
	{
		if (closed)
			relay->end = OUTBOX_END_ASKED;
		else
		{
			/* but for why the one before died */
			memset(relay, 0, offsetof(OutboxRelay, last_error_at));
			relay->backoff_until = 0;
			relay->pid = MyProcPid;
			relay->procno = MyProcNumber;
			relay->state = OUTBOX_RELAY_IDLE;
			taken = true;
		}
	}
	SpinLockRelease(&db->mutex);
	LWLockRelease(outbox_shared->lock);
	return taken;
}

/* Give up the place of a runner, and tell the launcher. */
static void
release_runner(int code, Datum arg)
{
	OutboxWorkerArgs args;
	OutboxDatabase *db;
	OutboxRunner *runner;
	TimestampTz now = GetCurrentTimestamp();
	int			i;

	outbox_worker_arguments(&args);
	db = &outbox_shared->databases[args.slot];
	runner = &db->runners[args.runner];
	SpinLockAcquire(&db->mutex);
	if (runner->pid == MyProcPid)
	{
		runner->pid = 0;
		runner->end = code == 0 ? OUTBOX_END_CLEAN :
			asked_to_end ? OUTBOX_END_ASKED : OUTBOX_END_FAILED;
		runner->died_at_work = runner->job != 0;
		runner->subscription = 0;
		runner->job = 0;
		for (i = 0; i < OUTBOX_MAX_WANTS; i++)
		{
			if (db->wants[i].owner == runner->owner)
				db->wants[i].served_at = now;
		}
	}
	SpinLockRelease(&db->mutex);
	outbox_launcher_wake();
}

/* Take the place of a runner.  False: as of take_place. */
static bool
take_runner_place(const OutboxWorkerArgs *args)
{
	OutboxDatabase *db = &outbox_shared->databases[args->slot];
	OutboxRunner *runner = &db->runners[args->runner];
	TimestampTz now = GetCurrentTimestamp();
	bool		closed;
	bool		taken = false;

	LWLockAcquire(outbox_shared->lock, LW_EXCLUSIVE);
	closed = outbox_ddl_closed(args->dboid);
	SpinLockAcquire(&db->mutex);
	if (db->dboid == args->dboid && runner->pid == 0)
	{
		if (closed)
			runner->end = OUTBOX_END_ASKED;
		else
		{
			memset(runner, 0, sizeof(*runner));
			runner->pid = MyProcPid;
			runner->procno = MyProcNumber;
			runner->owner = args->userid;
			runner->started_at = now;
			runner->busy_since = now;
			taken = true;
		}
	}
	SpinLockRelease(&db->mutex);
	LWLockRelease(outbox_shared->lock);
	if (taken)
		outbox_runner_is(db, runner);
	return taken;
}

/*
 * Start of a relay: take its place and connect.  False: there is nothing for
 * this process to do, and it is to exit with code 0.
 *
 * The place is given up after all that the caller registers with
 * before_shmem_exit has run, and after a transaction has been rolled back.
 */
bool
outbox_worker_attach(OutboxWorkerArgs *args)
{
	outbox_worker_arguments(args);
	on_shmem_exit(release_relay, (Datum) 0);
	if (!take_place(args))
		return false;
	outbox_worker_signals();
	outbox_worker_connect(args->dboid, args->userid, args->nologin);
	return true;
}

/*
 * Pin settings.  No reload can change what has this source, and RESET goes
 * back to it; most need no transaction, so that none is exposed to what a
 * database has set.
 */
static void
pin_settings(const PinnedSetting *settings, int n)
{
	int			i;

	for (i = 0; i < n; i++)
	{
		if (PG_VERSION_NUM >= settings[i].since)
			SetConfigOption(settings[i].name, settings[i].value, PGC_SUSET, PGC_S_OVERRIDE);
	}
	SetConfigOption("client_encoding", GetDatabaseEncodingName(), PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("application_name", MyBgworkerEntry->bgw_name, PGC_SUSET, PGC_S_OVERRIDE);
}

/* Pin the settings of a worker that runs no code of a user's. */
static void
pin_all_settings(void)
{
	pin_settings(pinned, lengthof(pinned));
}

/*
 * Become a role, in the session and for good: the owner of a database may give
 * it a role or session_authorization of its own, which workers take over like
 * anybody who connects.  Returns whether the role is a superuser.
 */
static bool
become_role(Oid userid)
{
	bool		super;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	SetConfigOption("session_authorization", GetUserNameFromId(userid, false),
					PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("role", "none", PGC_SUSET, PGC_S_OVERRIDE);
	super = superuser_arg(userid);
	CommitTransactionCommand();
	MemoryContextSwitchTo(TopMemoryContext);
	return super;
}

/*
 * Connect to a database and become the role that the worker was started for.
 *
 * userid: InvalidOid is the bootstrap superuser.  nologin: the role may not
 * log in.  Before PostgreSQL 17 only the bootstrap superuser can then connect,
 * and becomes that role.  dboid: InvalidOid is no database at all.
 */
void
outbox_worker_connect(Oid dboid, Oid userid, bool nologin)
{
	if (!OidIsValid(dboid))
	{
		BackgroundWorkerInitializeConnection(NULL, NULL, 0);
		pin_all_settings();
		outbox_worker_reload();
		pgstat_report_activity(STATE_IDLE, NULL);
		return;
	}
#if PG_VERSION_NUM >= 170000
	nologin = false;
#endif
	BackgroundWorkerInitializeConnectionByOid(dboid, nologin ? InvalidOid : userid,
											  BGWORKER_BYPASS_ROLELOGINCHECK);
	pin_all_settings();
	(void) become_role(OidIsValid(userid) ? userid : BOOTSTRAP_SUPERUSERID);
	outbox_worker_reload();
	pgstat_report_activity(STATE_IDLE, NULL);
}

/*
 * Start of a runner: take its place and connect as the role whose handlers it
 * runs, and as nobody else: that role is what is authenticated, so nothing
 * that a handler does gets it more.  False: there is nothing for this process
 * to do, and it is to exit with code 0.
 *
 * Before PostgreSQL 17 a role that may not log in cannot connect.
 */
bool
outbox_runner_attach(OutboxWorkerArgs *args)
{
	outbox_worker_arguments(args);
	on_shmem_exit(release_runner, (Datum) 0);
	if (!take_runner_place(args))
		return false;
	outbox_worker_signals();
	BackgroundWorkerInitializeConnectionByOid(args->dboid, args->userid,
											  BGWORKER_BYPASS_ROLELOGINCHECK);
	pin_settings(pinned_in_runner, lengthof(pinned_in_runner));
	outbox_runner_is_super(become_role(args->userid));
	outbox_worker_reload();
	pgstat_report_activity(STATE_IDLE, NULL);
	return true;
}

/*
 * Begin a transaction in which SPI can be used.  activity is shown in
 * pg_stat_activity: a constant text, nothing of an event's.
 */
void
outbox_worker_begin(const char *activity)
{
	loop_context = CurrentMemoryContext;
	may_cancel = true;
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	outbox_spi_connect();
	PushActiveSnapshot(GetTransactionSnapshot());
	pgstat_report_activity(STATE_RUNNING, activity);
}

/* What both ends of a transaction have in common */
static void
transaction_ended(void)
{
	may_cancel = false;
	QueryCancelPending = false;
	stats_pending = pgstat_report_stat(false) > 0;
	pgstat_report_activity(STATE_IDLE, NULL);
	MemoryContextSwitchTo(loop_context);
}

/* Commit what outbox_worker_begin began. */
void
outbox_worker_commit(void)
{
	outbox_spi_finish();
	PopActiveSnapshot();
	CommitTransactionCommand();
	transaction_ended();
}

/* Roll back what outbox_worker_begin began; also after an error. */
void
outbox_worker_abort(void)
{
	AbortCurrentTransaction();
	transaction_ended();
}

/*
 * The worker is about to wait: report the statistics that the rate limit has
 * kept back.  Autovacuum would otherwise hear of them at the next transaction.
 */
void
outbox_worker_idle(void)
{
	if (stats_pending)
		pgstat_report_stat(true);
	stats_pending = false;
}

/* Read the configuration again when SIGHUP has come. */
void
outbox_worker_reload(void)
{
	if (ConfigReloadPending)
	{
		ConfigReloadPending = false;
		ProcessConfigFile(PGC_SIGHUP);
	}
}

/*
 * Number of a wait event by its name, which must be a constant.  From 17 on
 * it is shown in pg_stat_activity.
 */
uint32
outbox_wait_event(const char *name)
{
	static struct
	{
		const char *name;
		uint32		event;
	}			known[16];
	static int	nknown = 0;
	int			i;

	for (i = 0; i < nknown; i++)
	{
		if (known[i].name == name || strcmp(known[i].name, name) == 0)
			return known[i].event;
	}
	if (nknown == (int) lengthof(known))
		return PG_WAIT_EXTENSION;
	known[nknown].name = name;
	known[nknown].event = WaitEventExtensionNew(name);
	return known[nknown++].event;
}
