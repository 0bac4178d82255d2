/*-------------------------------------------------------------------------
 *
 * spi.c
 *		Running the extension's own SQL: as the extension's owner, with a
 *		pinned search_path, through kept plans.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/indexing.h"
#include "catalog/namespace.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_class.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_proc.h"
#include "commands/dbcommands.h"
#include "commands/extension.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/resowner.h"
#include "utils/syscache.h"

/*
 * Owner of the extension; InvalidOid when the extension is not there.
 *
 * Asked for by every call that acts as the owner, so it is read through the
 * system cache: the owner of schema outbox, which the install script makes
 * and which belongs to the extension.
 */
Oid
outbox_extension_owner(void)
{
	Oid			nspoid = get_namespace_oid(OUTBOX_SCHEMA, true);
	HeapTuple	tuple;
	Oid			owner;

	if (!OidIsValid(nspoid))
		return InvalidOid;
	tuple = SearchSysCache1(NAMESPACEOID, ObjectIdGetDatum(nspoid));
	if (!HeapTupleIsValid(tuple))
		return InvalidOid;
	owner = ((Form_pg_namespace) GETSTRUCT(tuple))->nspowner;
	ReleaseSysCache(tuple);
	return owner;
}

/* Name of the current database, in the current memory context */
char *
outbox_current_database(void)
{
	char	   *name = get_database_name(MyDatabaseId);

	if (name == NULL)
		elog(ERROR, "cache lookup failed for database %u", MyDatabaseId);
	return name;
}

/*
 * Oid of one of our functions without arguments, by its name; InvalidOid when
 * there is none.
 */
Oid
outbox_function_oid(const char *name)
{
	Oid			nspoid = get_namespace_oid(OUTBOX_SCHEMA, true);
	oidvector  *noargs;

	if (!OidIsValid(nspoid))
		return InvalidOid;
	noargs = buildoidvector(NULL, 0);
	return GetSysCacheOid3(PROCNAMEARGSNSP, Anum_pg_proc_oid,
						   CStringGetDatum(name),
						   PointerGetDatum(noargs),
						   ObjectIdGetDatum(nspoid));
}

/*
 * May a role do everything with outbox?  A superuser, a member of the role
 * that owns the extension, or who was given admin, which is EXECUTE on
 * outbox.arm().
 */
bool
outbox_is_admin(Oid roleid)
{
	Oid			owner = outbox_extension_owner();
	Oid			arm;

	if (superuser_arg(roleid))
		return true;
	if (OidIsValid(owner) && has_privs_of_role(roleid, owner))
		return true;
	arm = outbox_function_oid("arm");
	return OidIsValid(arm) && outbox_may_execute(arm, roleid);
}

/* Has a role EXECUTE on a function? */
bool
outbox_may_execute(Oid function, Oid roleid)
{
#if PG_VERSION_NUM >= 160000
	return object_aclcheck(ProcedureRelationId, function, roleid, ACL_EXECUTE) == ACLCHECK_OK;
#else
	return pg_proc_aclcheck(function, roleid, ACL_EXECUTE) == ACLCHECK_OK;
#endif
}

/*
 * Become the owner of the extension until outbox_become_caller.
 *
 * SECURITY_LOCAL_USERID_CHANGE keeps SET ROLE from climbing,
 * SECURITY_RESTRICTED_OPERATION keeps deferred triggers and temporary tables
 * out, and a GUC level of our own makes search_path ours.  An error that
 * escapes restores the identity at the end of the (sub)transaction.  Run
 * nothing of a user's in between.
 */
void
outbox_become_owner(OutboxOwnerContext *context)
{
	Oid			owner = outbox_extension_owner();

	if (!OidIsValid(owner))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("extension \"%s\" is not installed in this database", OUTBOX_EXTENSION)));
	GetUserIdAndSecContext(&context->userid, &context->sec_context);
	SetUserIdAndSecContext(owner,
						   context->sec_context |
						   SECURITY_LOCAL_USERID_CHANGE | SECURITY_RESTRICTED_OPERATION);
	context->guc_level = NewGUCNestLevel();
	(void) set_config_option("search_path", "pg_catalog, pg_temp",
							 PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
}

/* Be who we were before outbox_become_owner. */
void
outbox_become_caller(OutboxOwnerContext *context)
{
	AtEOXact_GUC(false, context->guc_level);
	SetUserIdAndSecContext(context->userid, context->sec_context);
}

/* SPI_connect that cannot fail silently */
void
outbox_spi_connect(void)
{
	int			rc = SPI_connect();

	if (rc != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed: %s", SPI_result_code_string(rc));
}

/* SPI_finish that cannot fail silently */
void
outbox_spi_finish(void)
{
	int			rc = SPI_finish();

	if (rc != SPI_OK_FINISH)
		elog(ERROR, "SPI_finish failed: %s", SPI_result_code_string(rc));
}

/*
 * Run one of our statements, of which the plan is kept for the life of the
 * process, and return how many rows it processed.  The caller is connected to
 * SPI, and is in the same memory context afterwards.  All names in our statements are qualified, so a plan does not depend
 * on the search_path under which it was made.
 */
uint64
outbox_execute(OutboxPlan *plan, Datum *values, const char *nulls, int expected)
{
	return outbox_execute_snapshot(plan, values, nulls, expected, InvalidSnapshot);
}

/* The same with a snapshot that was taken before. */
uint64
outbox_execute_snapshot(OutboxPlan *plan, Datum *values, const char *nulls, int expected,
						Snapshot snapshot)
{
	MemoryContext context = CurrentMemoryContext;
	int			rc;

	if (plan->plan == NULL)
	{
		SPIPlanPtr	prepared = SPI_prepare(plan->query, plan->nargs, plan->argtypes);

		if (prepared == NULL)
			elog(ERROR, "SPI_prepare failed: %s", SPI_result_code_string(SPI_result));
		if (SPI_keepplan(prepared) != 0)
			elog(ERROR, "SPI_keepplan failed");
		plan->plan = prepared;
	}
	rc = SPI_execute_snapshot(plan->plan, values, nulls, snapshot, InvalidSnapshot,
							  false, true, 0);
	MemoryContextSwitchTo(context); /* SPI leaves its own */
	if (rc != expected)
		elog(ERROR, "SPI_execute_snapshot returned %s for \"%s\"",
			 SPI_result_code_string(rc), plan->query);
	return SPI_processed;
}

/* Value of the last result: row from 0, column from 1 */
Datum
outbox_spi_value(int row, int column, bool *isnull)
{
	return SPI_getbinval(SPI_tuptable->vals[row], SPI_tuptable->tupdesc, column, isnull);
}

/*
 * Text value of the last result as a C string in the current memory context;
 * NULL when it is null.
 */
char *
outbox_spi_string(int row, int column)
{
	bool		isnull;
	Datum		value = outbox_spi_value(row, column, &isnull);

	return isnull ? NULL : TextDatumGetCString(value);
}

/*
 * Copy of a text that can be stored: at most limit bytes, cut between
 * characters, and valid in the database's encoding whatever it was made of.
 */
char *
outbox_clip(const char *text, int limit)
{
	int			encoding = GetDatabaseEncoding();
	int			len = strlen(text);
	char	   *result;
	char	   *p;

	if (len > limit)
		len = pg_encoding_mbcliplen(encoding, text, len, limit);
	result = pnstrdup(text, len);
	if (pg_verify_mbstr(encoding, result, len, true))
		return result;

	/* not valid: keep what is plain ASCII */
	for (p = result; *p; p++)
	{
		if (IS_HIGHBIT_SET(*p))
			*p = '?';
	}
	return result;
}

/* Refuse an argument that is null. */
void
outbox_check_not_null(FunctionCallInfo fcinfo, int n, const char *name)
{
	if (PG_ARGISNULL(n))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not be null", name)));
}

/* Array of n elements, some of them null, as a parameter of a plan */
Datum
outbox_make_array(Datum *values, bool *nulls, int n, Oid type)
{
	int16		len;
	bool		byval;
	char		align;
	int			lbound = 1;

	get_typlenbyvalalign(type, &len, &byval, &align);
	return PointerGetDatum(construct_md_array(values, nulls, 1, &n, &lbound,
											  type, len, byval, align));
}

/*
 * Run something in a subtransaction.  Returns null, or the error for which the
 * subtransaction was rolled back, in the caller's memory context.
 */
ErrorData *
outbox_try(void (*attempt) (void *arg), void *arg)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	ErrorData  *edata = NULL;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		attempt(arg);
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		edata = outbox_catch_error(context);
		RollbackAndReleaseCurrentSubTransaction();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;
	return edata;
}

/*
 * Copy the error under way, and be in the given memory context again; in a
 * PG_CATCH block.
 */
ErrorData *
outbox_catch_error(MemoryContext context)
{
	ErrorData  *edata;

	MemoryContextSwitchTo(context);
	edata = CopyErrorData();
	FlushErrorState();
	return edata;
}
