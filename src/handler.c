/*-------------------------------------------------------------------------
 *
 * handler.c
 *		Handlers: functions f(outbox.event) that subscriptions name, and that
 *		runners call for their jobs.
 *
 * A handler is looked up once, when it is stated, as the role that states it
 * and by its search_path.  What is kept is its oid and its qualified name; what
 * runs later is the function with that oid, and only as long as that is still
 * its name, so that neither an overload nor another function of the name can
 * take its place.
 *
 *-------------------------------------------------------------------------
 */
#include "runner.h"

#include "access/htup_details.h"
#include "catalog/namespace.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_database.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "commands/async.h"
#include "commands/prepare.h"
#include "commands/sequence.h"
#include "commands/trigger.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "parser/parse_func.h"
#include "storage/lock.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/portal.h"
#include "utils/regproc.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#define SIGNATURE_HINT "A handler is a function of one argument of type outbox.event."
#define RESTATE_HINT "State the handler of subscription \"%s\" again with outbox.subscribe, or without it."

/* The attempt that is under way in this process; 0: none */
static int	current_attempt = 0;

/* Oid of type outbox.event; InvalidOid when the extension is not there */
static Oid
event_type(void)
{
	Oid			nspoid = get_namespace_oid(OUTBOX_SCHEMA, true);

	if (!OidIsValid(nspoid))
		return InvalidOid;
	return GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid, CStringGetDatum("event"),
						   ObjectIdGetDatum(nspoid));
}

/* Qualified and quoted name of a function; NULL when there is no such function */
static char *
qualified_name(Oid function)
{
	char	   *name = get_func_name(function);
	char	   *nspname = name ? get_namespace_name(get_func_namespace(function)) : NULL;

	return nspname ? quote_qualified_identifier(nspname, name) : NULL;
}

/* Refuse a function that is none a handler can be. */
static void
check_kind(Oid function, const char *name)
{
	if (get_func_prokind(function) != PROKIND_FUNCTION)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("handler %s is not an ordinary function", name),
				 errhint(SIGNATURE_HINT)));
	if (get_func_retset(function))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("handler %s must not return a set", name),
				 errhint("It is called once for each event, and what it returns is ignored.")));
}

/*
 * Look up the function that a text names, as the current role and by the
 * current search_path: before the caller becomes anybody else.
 */
void
outbox_handler_resolve(const char *text, OutboxHandler *handler)
{
	List	   *names = stringToQualifiedNameList(text, NULL);
	Oid			argtype = event_type();

	handler->oid = LookupFuncName(names, 1, &argtype, true);
	if (!OidIsValid(handler->oid))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("function %s(outbox.event) does not exist", NameListToString(names)),
				 errhint(SIGNATURE_HINT)));
	handler->name = qualified_name(handler->oid);
	if (handler->name == NULL)
		elog(ERROR, "cache lookup failed for function %u", handler->oid);
	check_kind(handler->oid, handler->name);
	if (isAnyTempNamespace(get_func_namespace(handler->oid)))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("handler %s must not be temporary", handler->name)));
}

/*
 * Find the function that now has the stored name of a handler and takes an
 * event; InvalidOid when there is none.  It says nothing of rights.
 */
Oid
outbox_handler_find(const char *name)
{
	List	   *names = stringToQualifiedNameList(name, NULL);
	Oid			argtype = event_type();
	Oid			nspoid;
	oidvector  *argtypes;
	char	   *nspname;
	char	   *proname;

	DeconstructQualifiedName(names, &nspname, &proname);
	nspoid = nspname ? get_namespace_oid(nspname, true) : InvalidOid;
	if (!OidIsValid(nspoid))
		return InvalidOid;
	argtypes = buildoidvector(&argtype, 1);
	return GetSysCacheOid3(PROCNAMEARGSNSP, Anum_pg_proc_oid, CStringGetDatum(proname),
						   PointerGetDatum(argtypes), ObjectIdGetDatum(nspoid));
}

/* May a role log in, which a runner of its handlers has to? */
static bool
may_log_in(Oid roleid)
{
#if PG_VERSION_NUM >= 170000
	return true;				/* workers may connect as any role */
#else
	HeapTuple	tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(roleid));
	bool		result;

	if (!HeapTupleIsValid(tuple))
		return false;
	result = ((Form_pg_authid) GETSTRUCT(tuple))->rolcanlogin;
	ReleaseSysCache(tuple);
	return result;
#endif
}

/* Refuse a role that may not execute a handler. */
static void
check_rights(const OutboxHandler *handler, const char *role, Oid roleid)
{
	if (!outbox_may_execute(handler->oid, roleid) ||
		object_aclcheck(NamespaceRelationId, get_func_namespace(handler->oid), roleid,
						ACL_USAGE) != ACLCHECK_OK)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("role \"%s\" may not execute handler %s", role, handler->name),
				 errhint("Grant it EXECUTE on the function and USAGE on its schema.")));
	if (superuser_arg(roleid) && !outbox_superuser_handlers)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("handlers of superusers are not run"),
				 errdetail("Role \"%s\" is a superuser, and \"outbox.superuser_handlers\" is off.", role),
				 errhint("Give the subscription to another role with outbox.set_owner.")));
}

/*
 * Refuse a handler that the owner of its subscription could not run: jobs
 * would only fail, or wait for a runner that cannot connect.
 */
void
outbox_handler_check_owner(const OutboxHandler *handler, const char *owner, Oid owner_oid)
{
	check_rights(handler, owner, owner_oid);
	if (object_aclcheck(DatabaseRelationId, MyDatabaseId, owner_oid, ACL_CONNECT) != ACLCHECK_OK)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("role \"%s\" may not connect to the database, as its handlers have to", owner),
				 errhint("Grant it CONNECT on the database.")));
	if (!may_log_in(owner_oid))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("role \"%s\" may not log in, as its handlers have to before PostgreSQL 17", owner),
				 errhint("Give it LOGIN; without a password nobody else can log in as that role.")));
}

/*
 * The event of a job, as a value of type outbox.event in the current memory
 * context, and the version of the set of subscriptions that the same snapshot
 * has.  As the owner of the extension, connected to SPI.
 */
Datum
outbox_handler_event(int64 seq, int64 *version, bool *found)
{
	static OutboxPlan fetch = {
		"SELECT r.version, ROW(e.seq, e.type, e.subject, e.scope, e.payload, e.headers,"
		" e.recorded_at)::outbox.event, e.seq IS NOT NULL"
		" FROM outbox.routing r LEFT JOIN outbox.events e ON e.seq OPERATOR(pg_catalog.=) $1",
		1, {INT8OID}, NULL
	};
	Datum		value = Int64GetDatum(seq);
	Datum		event;
	bool		isnull;

	if (outbox_execute(&fetch, &value, NULL, SPI_OK_SELECT) != 1)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table outbox.routing must hold one row")));
	*version = DatumGetInt64(outbox_spi_value(0, 1, &isnull));
	*found = DatumGetBool(outbox_spi_value(0, 3, &isnull));
	event = outbox_spi_value(0, 2, &isnull);
	event = datumCopy(event, false, -1);
	SPI_freetuptable(SPI_tuptable);
	return event;
}

/*
 * Is the handler still what was stated, and may it run?  Checked before every
 * run, as the role that runs it.
 */
static void
check_before_run(const OutboxConsumer *consumer)
{
	OutboxHandler handler;
	char	   *name = qualified_name(consumer->handler_oid);
	Oid			argtype = event_type();
	HeapTuple	tuple;
	Form_pg_proc proc;

	handler.oid = consumer->handler_oid;
	handler.name = consumer->handler;
	if (name == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("handler %s does not exist any more", handler.name),
				 errhint(RESTATE_HINT, consumer->name)));
	if (strcmp(name, handler.name) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("handler %s has another name now: %s", handler.name, name),
				 errhint(RESTATE_HINT, consumer->name)));
	check_kind(handler.oid, name);

	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(handler.oid));
	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for function %u", handler.oid);
	proc = (Form_pg_proc) GETSTRUCT(tuple);
	if (proc->pronargs != 1 || proc->proargtypes.values[0] != argtype)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_FUNCTION_DEFINITION),
				 errmsg("handler %s does not take an event", name),
				 errhint(SIGNATURE_HINT)));
	ReleaseSysCache(tuple);
	check_rights(&handler, GetUserNameFromId(GetUserId(), false), GetUserId());
}

/*
 * Call the function with the handler's oid.  The expression is not planned:
 * nothing is looked up, folded or inlined, the function is called as it is, and
 * the executor checks that the role may.
 */
static void
call_handler(const OutboxConsumer *consumer, Datum event)
{
	Const	   *argument = makeConst(event_type(), -1, InvalidOid, -1, event, false, false);
	FuncExpr   *call = makeFuncExpr(consumer->handler_oid, get_func_rettype(consumer->handler_oid),
									list_make1(argument), InvalidOid, InvalidOid,
									COERCE_EXPLICIT_CALL);
	EState	   *estate = CreateExecutorState();
	ExprContext *econtext = GetPerTupleExprContext(estate);
	MemoryContext old;
	ExprState  *state;
	bool		isnull;

	old = MemoryContextSwitchTo(estate->es_query_cxt);
	state = ExecInitExpr((Expr *) call, NULL);
	MemoryContextSwitchTo(old);
	PushActiveSnapshot(GetTransactionSnapshot());
	(void) ExecEvalExprSwitchContext(state, econtext, &isnull);
	PopActiveSnapshot();
	FreeExecutorState(estate);
}

/*
 * Let everything happen now that a handler has left for the commit: deferred
 * triggers and constraints fire, and cursors are closed, those that would be
 * kept beyond the commit included.  The role is still that of the handler.
 */
static void
finish_user_work(void)
{
	ConstraintsSetStmt *immediate = makeNode(ConstraintsSetStmt);

	immediate->constraints = NIL;
	immediate->deferred = false;
	AfterTriggerSetState(immediate);
	PortalHashTableDeleteAll();
}

/*
 * Run the handler of a subscription for an event, and all that follows from
 * it, as the current role; outside of SPI.
 */
void
outbox_handler_run(const OutboxConsumer *consumer, Datum event, int attempt)
{
	check_before_run(consumer);
	ResetSequenceCaches();		/* lastval() must not tell of our sequences */
	current_attempt = attempt;
	PG_TRY();
	{
		call_handler(consumer, event);
		finish_user_work();
	}
	PG_FINALLY();
	{
		current_attempt = 0;
	}
	PG_END_TRY();
}

/*
 * Have a setting go back to where a RESET takes it, which is what the runner
 * began with.
 */
static void
reset_setting(const char *name)
{
	(void) set_config_option(name, NULL, PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SET, true, 0,
							 false);
}

/*
 * Undo what a handler may have left in the session, so that nothing of it
 * reaches the next one.  Plans of our own are kept.  temp_used: it has used
 * temporary objects, which takes a transaction to remove.  Outside of a
 * transaction.
 */
void
outbox_handler_forget(bool temp_used)
{
	ResetAllOptions();
	if (GetSessionUserId() != GetAuthenticatedUserId())
		reset_setting("session_authorization");
	if (OidIsValid(GetCurrentRoleId()))
		reset_setting("role");
	if (GetUserId() != GetAuthenticatedUserId() || GetSessionUserId() != GetAuthenticatedUserId())
		elog(FATAL, "outbox runner is role %u and was started as %u", GetUserId(),
			 GetAuthenticatedUserId());
	DropAllPreparedStatements();
	PortalHashTableDeleteAll();
	LockReleaseAll(USER_LOCKMETHOD, true);
	ResetSequenceCaches();
	if (temp_used)
	{
		outbox_worker_begin("removing temporary objects");
		Async_UnlistenAll();
		ResetTempTableNamespace();
		outbox_worker_commit();
	}
}

PG_FUNCTION_INFO_V1(outbox_current_attempt);

/* outbox.current_attempt(): number of the attempt that runs a handler */
Datum
outbox_current_attempt(PG_FUNCTION_ARGS)
{
	if (current_attempt == 0)
		PG_RETURN_NULL();
	PG_RETURN_INT32(current_attempt);
}
