/*-------------------------------------------------------------------------
 *
 * ddl.c
 *		What the extension does when databases, extensions and captured tables
 *		are created, altered or dropped.
 *
 * An object_access_hook sees every way in which an extension or a database
 * comes and goes, CASCADE and DROP OWNED included; the launcher is told when
 * the transaction has committed.
 *
 * A ProcessUtility_hook makes way for DDL that no other session may be
 * connected for, or after which nobody may be.  Until PostgreSQL 18 such DDL
 * fails after five seconds because of a worker; from 19 on the server ends our
 * workers itself, but not for DROP DATABASE ... FORCE by an owner who is no
 * superuser, and it knows nothing of their restart.  So, when the caller may
 * run it at all, the database is closed to workers, those that are there are
 * ended, and the database is open again when the transaction has ended, either
 * way.  DROP EXTENSION ends the runners likewise, until it has its lock.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include <signal.h>

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/indexing.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_class.h"
#include "catalog/pg_database.h"
#include "catalog/pg_extension.h"
#include "commands/dbcommands.h"
#include "commands/defrem.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "storage/latch.h"
#include "tcop/utility.h"
#include "utils/acl.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

/* How long DDL waits for our workers to end, in ms, and how often it looks */
#define WORKERS_END_TIMEOUT 5000
#define WORKERS_END_POLL 10

/* Relays, runners, and one worker of each kind of visit */
#define MAX_WORKERS (OUTBOX_MAX_RELAYS + OUTBOX_MAX_RUNNERS + OUTBOX_VISIT_KINDS)

static object_access_hook_type prev_object_access_hook = NULL;
static ProcessUtility_hook_type prev_ProcessUtility_hook = NULL;

/* What the current transaction has done */
static bool extension_changed = false;
static bool database_changed = false;
static bool has_closed = false;

/* Is DDL at work on a database?  The caller holds OutboxShared.lock. */
bool
outbox_ddl_closed(Oid dboid)
{
	int			i;

	for (i = 0; i < OUTBOX_MAX_CLOSED; i++)
	{
		if (outbox_shared->closed[i].pid != 0 && outbox_shared->closed[i].dboid == dboid)
			return true;
	}
	return false;
}

/*
 * Close a database to workers and return the entry; -1 when there is no room,
 * and the DDL has to do without us.
 */
static int
close_database(Oid dboid)
{
	int			result = -1;
	int			i;

	LWLockAcquire(outbox_shared->lock, LW_EXCLUSIVE);
	for (i = 0; i < OUTBOX_MAX_CLOSED && result < 0; i++)
	{
		if (outbox_shared->closed[i].pid == 0)
			result = i;
	}
	if (result >= 0)
	{
		outbox_shared->closed[result].dboid = dboid;
		outbox_shared->closed[result].pid = MyProcPid;
		has_closed = true;
	}
	LWLockRelease(outbox_shared->lock);
	return result;
}

/*
 * Open what this backend has closed: one entry, or all when it is -1.  Must
 * not raise or allocate.
 */
static void
open_databases(int entry)
{
	int			i;

	LWLockAcquire(outbox_shared->lock, LW_EXCLUSIVE);
	for (i = 0; i < OUTBOX_MAX_CLOSED; i++)
	{
		if (outbox_shared->closed[i].pid == MyProcPid && (entry == -1 || entry == i))
		{
			outbox_shared->closed[i].pid = 0;
			outbox_shared->closed[i].dboid = InvalidOid;
		}
	}
	LWLockRelease(outbox_shared->lock);
	outbox_launcher_wake();
}

/*
 * Collect the pids of our workers in a database, or of its runners only, and
 * return how many.  A runner whose handler runs the DDL is not among them.
 */
static int
workers_of(Oid dboid, bool only_runners, int *pids)
{
	OutboxDatabase *db;
	int			n = 0;
	int			i;

	LWLockAcquire(outbox_shared->lock, LW_SHARED);
	db = outbox_find_database(dboid);
	for (i = 0; db != NULL && i < OUTBOX_MAX_RUNNERS; i++)
	{
		if (db->runners[i].pid != 0 && db->runners[i].pid != MyProcPid)
			pids[n++] = db->runners[i].pid;
	}
	for (i = 0; db != NULL && !only_runners && i < OUTBOX_MAX_RELAYS; i++)
	{
		if (db->relays[i].pid != 0)
			pids[n++] = db->relays[i].pid;
	}
	for (i = 0; !only_runners && i < OUTBOX_VISIT_KINDS; i++)
	{
		OutboxVisit *visit = &outbox_shared->visits[i];

		if (visit->pid != 0 && visit->dboid == dboid)
			pids[n++] = visit->pid;
	}
	LWLockRelease(outbox_shared->lock);
	return n;
}

/*
 * End our workers in a database, or its runners only.  It is closed to new
 * ones.  Wait until they are gone, but not for ever: if they stay, it is the
 * server's turn to say that somebody is connected, or to wait for a lock.
 */
static void
end_workers(Oid dboid, bool only_runners)
{
	int			pids[MAX_WORKERS];
	int			n = workers_of(dboid, only_runners, pids);
	TimestampTz start = GetCurrentTimestamp();

	while (n > 0)
		kill(pids[--n], SIGTERM);
	while (workers_of(dboid, only_runners, pids) > 0 &&
		   !TimestampDifferenceExceeds(start, GetCurrentTimestamp(), WORKERS_END_TIMEOUT))
	{
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 WORKERS_END_POLL, outbox_wait_event("OutboxDatabaseDDL"));
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
}

/* Does the current role own a database? */
static bool
owns_database(Oid dboid)
{
#if PG_VERSION_NUM >= 160000
	return object_ownercheck(DatabaseRelationId, dboid, GetUserId());
#else
	return pg_database_ownercheck(dboid, GetUserId());
#endif
}

/*
 * May the current role create and rename databases?  The server's own function
 * for this is not exported by every minor release of 15.
 */
static bool
may_create_databases(void)
{
	HeapTuple	tuple;
	bool		result = false;

	if (superuser())
		return true;
	tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(GetUserId()));
	if (HeapTupleIsValid(tuple))
	{
		result = ((Form_pg_authid) GETSTRUCT(tuple))->rolcreatedb;
		ReleaseSysCache(tuple);
	}
	return result;
}

/* May the current role copy a database, as far as createdb() asks? */
static bool
may_copy_database(Oid dboid)
{
	HeapTuple	tuple;
	bool		istemplate = false;

	if (!may_create_databases())
		return false;
	tuple = SearchSysCache1(DATABASEOID, ObjectIdGetDatum(dboid));
	if (HeapTupleIsValid(tuple))
	{
		istemplate = ((Form_pg_database) GETSTRUCT(tuple))->datistemplate;
		ReleaseSysCache(tuple);
	}
	return istemplate || owns_database(dboid);
}

/* The database that CREATE DATABASE copies */
static const char *
template_of(CreatedbStmt *stmt)
{
	const char *name = "template1";
	ListCell   *lc;

	foreach(lc, stmt->options)
	{
		DefElem    *option = lfirst_node(DefElem, lc);

		if (strcmp(option->defname, "template") == 0 && option->arg != NULL)
			name = defGetString(option);
	}
	return name;
}

/*
 * Which database does a statement need for itself, or takes away from us?
 * InvalidOid when it is none, the current one, or one that the caller has no
 * right to treat so: what is wrong with the statement the server will say.
 */
static Oid
database_to_close(Node *stmt)
{
	const char *name = NULL;
	bool		copy = false;
	Oid			dboid;

	if (IsA(stmt, DropdbStmt))
		name = ((DropdbStmt *) stmt)->dbname;
	else if (IsA(stmt, CreatedbStmt))
	{
		name = template_of((CreatedbStmt *) stmt);
		copy = true;
	}
	else if (IsA(stmt, RenameStmt) && ((RenameStmt *) stmt)->renameType == OBJECT_DATABASE)
	{
		if (may_create_databases())
			name = ((RenameStmt *) stmt)->subname;
	}
	else if (IsA(stmt, AlterDatabaseStmt))
	{
		AlterDatabaseStmt *alter = (AlterDatabaseStmt *) stmt;
		ListCell   *lc;

		foreach(lc, alter->options)
		{
			DefElem    *option = lfirst_node(DefElem, lc);

			if (strcmp(option->defname, "tablespace") == 0 ||
				strcmp(option->defname, "is_template") == 0 ||
				strcmp(option->defname, "allow_connections") == 0)
				name = alter->dbname;
		}
	}
	if (name == NULL || !IsTransactionState())
		return InvalidOid;

	dboid = get_database_oid(name, true);
	if (!OidIsValid(dboid) || (dboid == MyDatabaseId && !copy) ||
		!(copy ? may_copy_database(dboid) : owns_database(dboid)))
		return InvalidOid;
	return dboid;
}

/*
 * Does a statement drop our extension, by name?  A handler under way holds a
 * lock that the DROP has to wait for.
 *
 * Who may not drop it is told so here.  The server would wait for its lock
 * first, and have all relays and runners wait behind it.
 */
static bool
drops_extension(Node *stmt)
{
	DropStmt   *drop = (DropStmt *) stmt;
	Oid			owner;
	ListCell   *lc;

	if (!IsA(stmt, DropStmt) || drop->removeType != OBJECT_EXTENSION || !IsTransactionState())
		return false;
	foreach(lc, drop->objects)
	{
		if (strcmp(strVal(lfirst(lc)), OUTBOX_EXTENSION) != 0)
			continue;
		if (!OidIsValid(get_extension_oid(OUTBOX_EXTENSION, true)))
			return false;
		owner = outbox_extension_owner();
		if (!OidIsValid(owner) || !has_privs_of_role(GetUserId(), owner))
			aclcheck_error(ACLCHECK_NOT_OWNER, OBJECT_EXTENSION, OUTBOX_EXTENSION);
		return true;
	}
	return false;
}

/* Run a statement as whoever had the hook before us does. */
static void
run_utility(PlannedStmt *pstmt, const char *queryString, bool readOnlyTree,
			ProcessUtilityContext context, ParamListInfo params,
			QueryEnvironment *queryEnv, DestReceiver *dest, QueryCompletion *qc)
{
	if (prev_ProcessUtility_hook)
		prev_ProcessUtility_hook(pstmt, queryString, readOnlyTree, context,
								 params, queryEnv, dest, qc);
	else
		standard_ProcessUtility(pstmt, queryString, readOnlyTree, context,
								params, queryEnv, dest, qc);
}

/*
 * An extension was created or dropped in this database.  Relays that are
 * there look by themselves, so that they go even if no worker can be started
 * to have a look.
 */
static void
extension_has_changed(void)
{
	OutboxDatabase *db = outbox_find_database(MyDatabaseId);

	if (db != NULL)
		outbox_doorbell_sweep(db);
	outbox_launcher_tell(MyDatabaseId);
}

/* What there is to do around PREPARE TRANSACTION and what follows it */
static void
transaction_statement(TransactionStmt *stmt, bool done)
{
	if (!done)
	{
		if (stmt->kind == TRANS_STMT_PREPARE)
		{
			outbox_doorbell_preparing(stmt->gid);
			if (extension_changed)
			{
				LWLockAcquire(outbox_shared->lock, LW_EXCLUSIVE);
				outbox_shared->prepared_ddl = true;
				LWLockRelease(outbox_shared->lock);
			}
		}
		return;
	}
	if (stmt->kind == TRANS_STMT_COMMIT_PREPARED)
	{
		outbox_doorbell_finish_prepared(stmt->gid, true);
		if (outbox_shared->prepared_ddl)
			extension_has_changed();
	}
	else if (stmt->kind == TRANS_STMT_ROLLBACK_PREPARED)
		outbox_doorbell_finish_prepared(stmt->gid, false);
}

/* ProcessUtility_hook */
static void
process_utility(PlannedStmt *pstmt, const char *queryString, bool readOnlyTree,
				ProcessUtilityContext context, ParamListInfo params,
				QueryEnvironment *queryEnv, DestReceiver *dest, QueryCompletion *qc)
{
	Node	   *stmt = pstmt->utilityStmt;
	bool		only_runners = drops_extension(stmt);
	Oid			dboid;
	int			entry;

	if (IsA(stmt, TransactionStmt))
	{
		TransactionStmt copy = *(TransactionStmt *) stmt;
		char		gid[OUTBOX_GIDSIZE];

		/* the statement may not outlive the transaction that it ends */
		if (copy.gid != NULL)
		{
			strlcpy(gid, copy.gid, sizeof(gid));
			copy.gid = gid;
			transaction_statement(&copy, false);
		}
		run_utility(pstmt, queryString, readOnlyTree, context, params, queryEnv, dest, qc);
		if (copy.gid != NULL)
			transaction_statement(&copy, true);
		return;
	}

	dboid = only_runners ? MyDatabaseId : database_to_close(stmt);
	if (!OidIsValid(dboid) || (entry = close_database(dboid)) < 0)
	{
		run_utility(pstmt, queryString, readOnlyTree, context, params, queryEnv, dest, qc);
		return;
	}

	PG_TRY();
	{
		end_workers(dboid, only_runners);
		run_utility(pstmt, queryString, readOnlyTree, context, params, queryEnv, dest, qc);

		/* a lock keeps the workers out from now on */
		if (only_runners)
			open_databases(entry);
	}
	PG_CATCH();
	{
		/* a savepoint may go on living for long */
		open_databases(entry);
		PG_RE_THROW();
	}
	PG_END_TRY();
}

/*
 * Is an extension that this command has just made ours?  The row is too new
 * for the caches.
 */
static bool
created_ours(Oid extoid)
{
	Relation	rel;
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		result = false;

	rel = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyInit(&key, Anum_pg_extension_oid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(extoid));
	scan = systable_beginscan(rel, ExtensionOidIndexId, true, SnapshotSelf, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		result = strcmp(NameStr(((Form_pg_extension) GETSTRUCT(tuple))->extname),
						OUTBOX_EXTENSION) == 0;
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return result;
}

/* Is an extension ours? */
static bool
is_ours(Oid extoid)
{
	char	   *name = get_extension_name(extoid);

	return name != NULL && strcmp(name, OUTBOX_EXTENSION) == 0;
}

/* object_access_hook */
static void
object_access(ObjectAccessType access, Oid classId, Oid objectId, int subId, void *arg)
{
	if (prev_object_access_hook)
		prev_object_access_hook(access, classId, objectId, subId, arg);

	if (access != OAT_POST_CREATE && access != OAT_POST_ALTER && access != OAT_DROP)
		return;
	switch (classId)
	{
		case ExtensionRelationId:
			if (access == OAT_POST_CREATE ? created_ours(objectId) : is_ours(objectId))
				extension_changed = true;
			break;
		case DatabaseRelationId:
			database_changed = true;
			break;
		case RelationRelationId:
			if (subId > 0 && access != OAT_POST_CREATE)
				outbox_capture_altered(objectId, subId, access == OAT_DROP);
			break;
		default:
			break;
	}
}

/*
 * The transaction has ended: tell the launcher what has changed, and open what
 * was closed.  Must not raise or allocate.
 */
void
outbox_ddl_at_xact_end(bool committed)
{
	if (committed && extension_changed)
		extension_has_changed();
	if (committed && database_changed)
		outbox_launcher_list_again();
	extension_changed = false;
	database_changed = false;
	if (has_closed)
		open_databases(-1);
	has_closed = false;
}

/* Install the hooks; called once, while the library is preloaded. */
void
outbox_ddl_init(void)
{
	if (IsBinaryUpgrade)
		return;
	prev_object_access_hook = object_access_hook;
	object_access_hook = object_access;
	prev_ProcessUtility_hook = ProcessUtility_hook;
	ProcessUtility_hook = process_utility;
}
