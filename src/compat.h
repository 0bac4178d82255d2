/*-------------------------------------------------------------------------
 *
 * compat.h
 *		Differences between PostgreSQL 15 and 19.
 *
 * Callers are written to the newest signature; what is here adapts down,
 * one comment with the version each.
 *
 *-------------------------------------------------------------------------
 */
#ifndef OUTBOX_COMPAT_H
#define OUTBOX_COMPAT_H

#if PG_VERSION_NUM < 150000
#error "outbox needs PostgreSQL 15 or later"
#endif

/* 16: SET ROLE is a right of its own; before that every member has it */
#if PG_VERSION_NUM < 160000
#define member_can_set_role(member, role) is_member_of_role(member, role)
#endif

/* 16: one function for the rights to any kind of object */
#if PG_VERSION_NUM < 160000
#include "catalog/pg_namespace.h"
#include "catalog/pg_proc.h"
#include "utils/acl.h"
#define object_aclcheck(classid, objectid, roleid, mode) \
	((classid) == NamespaceRelationId ? pg_namespace_aclcheck(objectid, roleid, mode) : \
	 (classid) == ProcedureRelationId ? pg_proc_aclcheck(objectid, roleid, mode) : \
	 pg_database_aclcheck(objectid, roleid, mode))
#endif

/* 16: errors of input functions can be had without being thrown */
#if PG_VERSION_NUM < 160000
#include "utils/regproc.h"
#define stringToQualifiedNameList(string, escontext) stringToQualifiedNameList(string)
#endif

/* 17: PGPROC numbers got a name of their own */
#if PG_VERSION_NUM < 170000
#define MyProcNumber (MyProc->pgprocno)
#endif

/* 17: custom wait events */
#if PG_VERSION_NUM < 170000
#include "utils/wait_event.h"
#define WaitEventExtensionNew(name) PG_WAIT_EXTENSION
#endif

/* 17: a worker may connect as a role that may not log in */
#if PG_VERSION_NUM < 170000
#define BGWORKER_BYPASS_ROLELOGINCHECK 0
#endif

/* 19: a worker may be ended by DDL on its database */
#if PG_VERSION_NUM < 190000
#define BGWORKER_INTERRUPTIBLE 0
#endif

/* 18: pg_noreturn is a prefix; before that an attribute */
#ifndef pg_noreturn
#define pg_noreturn pg_attribute_noreturn()
#endif

/* 19: signal handlers get a second argument */
#if PG_VERSION_NUM >= 190000
#define PASS_SIGNAL_ARGS postgres_signal_arg, pg_siginfo
#else
#define PASS_SIGNAL_ARGS postgres_signal_arg
#endif

/* 19: what is built of JSON is in a JsonbInState */
#if PG_VERSION_NUM < 190000
typedef struct JsonbInState
{
	JsonbValue *result;
	JsonbParseState *parseState;
} JsonbInState;
#define pushJsonbValue(state, seq, value) \
	((state)->result = pushJsonbValue(&(state)->parseState, seq, value))
#endif

#endif							/* OUTBOX_COMPAT_H */
