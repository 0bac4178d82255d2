/*-------------------------------------------------------------------------
 *
 * subscription.c
 *		Changing and looking at subscriptions.
 *
 * Rows are written as the owner of the extension; who may have them written
 * is decided here, for the role that calls.  A subscription belongs to a role
 * by name and by oid: a role that only has the same name, or only the same
 * oid, is another one.
 *
 * Every change first locks the one row of outbox.routing.  The trigger raises
 * its version anyway, and taken first the lock cannot deadlock with that of
 * another change.
 *
 *-------------------------------------------------------------------------
 */
#include "runner.h"

#include "access/htup_details.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/syscache.h"
#include "utils/tuplestore.h"

#define MAX_NAME 255			/* bytes of a subscription's name */
/* The name of a subscription that is an argument, which must be given */
static char *
name_argument(FunctionCallInfo fcinfo, int n, const char *argument)
{
	outbox_check_not_null(fcinfo, n, argument);
	return text_to_cstring(PG_GETARG_TEXT_PP(n));
}

/* Refuse what cannot be the name of a subscription. */
void
outbox_check_name(const char *name)
{
	const char *p;

	if (name[0] == '\0')
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("name of a subscription must not be empty")));
	if (strlen(name) > MAX_NAME)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("name of a subscription is too long"),
				 errdetail("It has %zu bytes; the limit is %d.", strlen(name), MAX_NAME)));
	for (p = name; *p; p += pg_mblen(p))
	{
		if (*p != ' ' && !outbox_printable(p, pg_mblen(p)))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("name of a subscription must not have control characters")));
	}
}

/* Has the role with an oid that name? */
bool
outbox_role_is(Oid roleid, const char *name)
{
	HeapTuple	tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(roleid));
	bool		result;

	if (!HeapTupleIsValid(tuple))
		return false;
	result = strcmp(NameStr(((Form_pg_authid) GETSTRUCT(tuple))->rolname), name) == 0;
	ReleaseSysCache(tuple);
	return result;
}

/* May a role see and change the subscriptions of an owner? */
bool
outbox_may_change(const char *owner, Oid owner_oid, Oid roleid)
{
	return outbox_is_admin(roleid) ||
		(outbox_role_is(owner_oid, owner) && has_privs_of_role(roleid, owner_oid));
}

/* Find a subscription by its name; false when there is none. */
bool
outbox_find_subscription(const char *name, OutboxSubscriptionRow *sub)
{
	static OutboxPlan find = {
		"SELECT id, owner, owner_oid, paused_at IS NOT NULL, handler, handler_oid"
		" FROM outbox.subscriptions WHERE name OPERATOR(pg_catalog.=) $1",
		1, {TEXTOID}, NULL
	};
	Datum		value = CStringGetTextDatum(name);
	bool		isnull;

	if (outbox_execute(&find, &value, NULL, SPI_OK_SELECT) == 0)
		return false;
	sub->id = DatumGetInt32(outbox_spi_value(0, 1, &isnull));
	sub->owner = pstrdup(NameStr(*DatumGetName(outbox_spi_value(0, 2, &isnull))));
	sub->owner_oid = DatumGetObjectId(outbox_spi_value(0, 3, &isnull));
	sub->paused = DatumGetBool(outbox_spi_value(0, 4, &isnull));
	sub->handler = outbox_spi_string(0, 5);
	sub->handler_oid = DatumGetObjectId(outbox_spi_value(0, 6, &isnull));
	if (isnull)
		sub->handler_oid = InvalidOid;
	return true;
}

/* Lock the version of the set of subscriptions until the transaction ends. */
void
outbox_lock_routing(void)
{
	static OutboxPlan lock = {
		"SELECT 1 FROM outbox.routing FOR UPDATE", 0, {0}, NULL
	};

	outbox_execute(&lock, NULL, NULL, SPI_OK_SELECT);
}

/*
 * A subscription has changed: at the commit, have those look who wait for its
 * jobs or run its handler.
 */
void
outbox_wake_consumers(int32 id)
{
	OutboxConsumer consumer;

	if (outbox_find_consumer(NULL, id, &consumer) && !consumer.paused)
		outbox_hint_note(id, GetCurrentTimestamp(), outbox_handler_owner(&consumer));
}

/* Refuse who may not change a subscription. */
void
outbox_check_may_change(const char *name, const OutboxSubscriptionRow *sub, Oid caller)
{
	if (outbox_may_change(sub->owner, sub->owner_oid, caller))
		return;
	if (outbox_role_is(sub->owner_oid, sub->owner))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("must be owner of subscription \"%s\"", name)));
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("must be owner of subscription \"%s\"", name),
			 errdetail("Role \"%s\", to which it belongs, is missing or was made anew.", sub->owner),
			 errhint("That role, or a superuser, can call outbox.adopt; an administrator can call outbox.set_owner.")));
}

/* Complain that there is no such subscription. */
void
outbox_no_such_subscription(const char *name)
{
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_OBJECT),
			 errmsg("subscription \"%s\" does not exist", name),
			 errhint("View outbox.stat_subscription lists those that you may see.")));
}

/*
 * Become the owner of the extension to change a subscription that exists and
 * that the caller may change; outbox_end_change undoes it.
 */
static void
begin_change(const char *name, OutboxSubscriptionRow *sub, OutboxOwnerContext *context)
{
	outbox_become_owner(context);
	outbox_spi_connect();
	outbox_lock_routing();
	if (!outbox_find_subscription(name, sub))
		outbox_no_such_subscription(name);
	outbox_check_may_change(name, sub, context->userid);
}

/* Be the caller again. */
void
outbox_end_change(OutboxOwnerContext *context)
{
	outbox_spi_finish();
	outbox_become_caller(context);
}

PG_FUNCTION_INFO_V1(outbox_unsubscribe);

/*
 * outbox.unsubscribe(): end a subscription; false when there is none.  Its jobs
 * are invisible from that commit on, and retention deletes them.
 */
Datum
outbox_unsubscribe(PG_FUNCTION_ARGS)
{
	static OutboxPlan delete = {
		"DELETE FROM outbox.subscriptions WHERE id OPERATOR(pg_catalog.=) $1",
		1, {INT4OID}, NULL
	};
	char	   *name = name_argument(fcinfo, 0, "name");
	OutboxOwnerContext context;
	OutboxSubscriptionRow sub;
	bool		found;

	outbox_become_owner(&context);
	outbox_spi_connect();
	outbox_lock_routing();
	found = outbox_find_subscription(name, &sub);
	if (found)
	{
		Datum		value = Int32GetDatum(sub.id);

		outbox_check_may_change(name, &sub, context.userid);
		outbox_execute(&delete, &value, NULL, SPI_OK_DELETE);
	}
	outbox_end_change(&context);
	PG_RETURN_BOOL(found);
}

/* Pause or resume a subscription; false when it is so already. */
static bool
set_paused(const char *name, bool paused)
{
	static OutboxPlan update = {
		"UPDATE outbox.subscriptions"
		" SET paused_at = CASE WHEN $2 THEN pg_catalog.clock_timestamp() END"
		" WHERE id OPERATOR(pg_catalog.=) $1",
		2, {INT4OID, BOOLOID}, NULL
	};
	OutboxOwnerContext context;
	OutboxSubscriptionRow sub;
	bool		changes;

	begin_change(name, &sub, &context);
	changes = (sub.paused != paused);
	if (changes)
	{
		Datum		values[2];

		values[0] = Int32GetDatum(sub.id);
		values[1] = BoolGetDatum(paused);
		outbox_execute(&update, values, NULL, SPI_OK_UPDATE);
		outbox_wake_consumers(sub.id);
	}
	outbox_end_change(&context);
	return changes;
}

PG_FUNCTION_INFO_V1(outbox_pause);

/* outbox.pause(): the jobs of a subscription rest; false when they do already. */
Datum
outbox_pause(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(set_paused(name_argument(fcinfo, 0, "name"), true));
}

PG_FUNCTION_INFO_V1(outbox_resume);

/* outbox.resume(): end the rest of a subscription; false when it does not rest. */
Datum
outbox_resume(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(set_paused(name_argument(fcinfo, 0, "name"), false));
}

PG_FUNCTION_INFO_V1(outbox_rename);

/*
 * outbox.rename(): give a subscription another name; false when it has that
 * name already.  Events keep the old name in their fanout.
 */
Datum
outbox_rename(PG_FUNCTION_ARGS)
{
	static OutboxPlan update = {
		"UPDATE outbox.subscriptions SET name = $2 WHERE id OPERATOR(pg_catalog.=) $1",
		2, {INT4OID, TEXTOID}, NULL
	};
	char	   *name = name_argument(fcinfo, 0, "name");
	char	   *new_name = name_argument(fcinfo, 1, "new_name");
	OutboxOwnerContext context;
	OutboxSubscriptionRow sub;
	OutboxSubscriptionRow other;
	bool		changes;

	outbox_check_name(new_name);
	begin_change(name, &sub, &context);
	changes = (strcmp(name, new_name) != 0);
	if (changes)
	{
		Datum		values[2];

		if (outbox_find_subscription(new_name, &other))
			ereport(ERROR,
					(errcode(ERRCODE_DUPLICATE_OBJECT),
					 errmsg("subscription \"%s\" already exists", new_name)));
		values[0] = Int32GetDatum(sub.id);
		values[1] = CStringGetTextDatum(new_name);
		outbox_execute(&update, values, NULL, SPI_OK_UPDATE);
	}
	outbox_end_change(&context);
	PG_RETURN_BOOL(changes);
}

/*
 * Write the owner of a subscription and the oid of its handler; false when they
 * are that already.
 */
static bool
write_owner(const OutboxSubscriptionRow *sub, const char *owner, Oid owner_oid, Oid handler_oid)
{
	static OutboxPlan update = {
		"UPDATE outbox.subscriptions SET owner = $2, owner_oid = $3,"
		" handler_oid = CASE WHEN handler IS NOT NULL THEN $4 END"
		" WHERE id OPERATOR(pg_catalog.=) $1",
		4, {INT4OID, NAMEOID, OIDOID, OIDOID}, NULL
	};
	NameData	name;
	Datum		values[4];

	if (sub->owner_oid == owner_oid && strcmp(sub->owner, owner) == 0 &&
		sub->handler_oid == handler_oid)
		return false;
	namestrcpy(&name, owner);
	values[0] = Int32GetDatum(sub->id);
	values[1] = NameGetDatum(&name);
	values[2] = ObjectIdGetDatum(owner_oid);
	values[3] = ObjectIdGetDatum(handler_oid);
	outbox_execute(&update, values, NULL, SPI_OK_UPDATE);
	outbox_wake_consumers(sub->id);
	return true;
}

/*
 * The handler of a subscription, for an owner who must be able to run it;
 * InvalidOid when it has none.  adopt: bind it anew by its name and signature;
 * else it must be the function still that was stated.
 */
static Oid
find_handler(const OutboxSubscriptionRow *sub, const char *name, const char *owner, Oid owner_oid,
			 bool adopt)
{
	OutboxHandler handler;

	if (sub->handler == NULL)
		return InvalidOid;
	handler.name = sub->handler;
	handler.oid = outbox_handler_find(sub->handler);
	if (!OidIsValid(handler.oid))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("function %s(outbox.event), the handler of subscription \"%s\", does not exist",
						sub->handler, name),
				 errhint("Create it, or state the subscription again without it.")));
	if (!adopt && handler.oid != sub->handler_oid)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("function %s(outbox.event), the handler of subscription \"%s\", was made anew",
						sub->handler, name),
				 errhint("Call outbox.adopt first if it is the same, or state the subscription again without it.")));
	outbox_handler_check_owner(&handler, owner, owner_oid);
	return handler.oid;
}

PG_FUNCTION_INFO_V1(outbox_set_owner);

/*
 * outbox.set_owner(): give a subscription to another role, which must be one
 * that the caller could become; false when it has it already.
 */
Datum
outbox_set_owner(PG_FUNCTION_ARGS)
{
	char	   *name = name_argument(fcinfo, 0, "name");
	char	   *owner;
	Oid			owner_oid;
	OutboxOwnerContext context;
	OutboxSubscriptionRow sub;
	bool		changed;

	outbox_check_not_null(fcinfo, 1, "owner");
	owner = NameStr(*PG_GETARG_NAME(1));
	begin_change(name, &sub, &context);
	owner_oid = get_role_oid(owner, false);
	if (!member_can_set_role(context.userid, owner_oid))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("must be able to SET ROLE \"%s\"", owner)));
	changed = write_owner(&sub, owner, owner_oid, find_handler(&sub, name, owner, owner_oid, false));
	outbox_end_change(&context);
	PG_RETURN_BOOL(changed);
}

PG_FUNCTION_INFO_V1(outbox_adopt);

/*
 * outbox.adopt(): bind a subscription to the role that has its owner's name
 * now, and to the function that has its handler's, after a restore or when
 * they were made anew; false when it is bound to them already.  Only that role
 * itself or a superuser may say that it is the same.
 */
Datum
outbox_adopt(PG_FUNCTION_ARGS)
{
	char	   *name = name_argument(fcinfo, 0, "name");
	OutboxOwnerContext context;
	OutboxSubscriptionRow sub;
	Oid			owner_oid;
	bool		changed;

	outbox_become_owner(&context);
	outbox_spi_connect();
	outbox_lock_routing();
	if (!outbox_find_subscription(name, &sub))
		outbox_no_such_subscription(name);
	owner_oid = get_role_oid(sub.owner, true);
	if (context.userid != owner_oid && !superuser_arg(context.userid))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("must be superuser or role \"%s\" to adopt subscription \"%s\"",
						sub.owner, name)));
	if (!OidIsValid(owner_oid))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("role \"%s\" does not exist", sub.owner),
				 errhint("Give subscription \"%s\" to another role with outbox.set_owner.", name)));
	changed = write_owner(&sub, sub.owner, owner_oid,
						  find_handler(&sub, name, sub.owner, owner_oid, true));
	outbox_end_change(&context);
	PG_RETURN_BOOL(changed);
}

PG_FUNCTION_INFO_V1(outbox_visible);

/*
 * outbox.visible(): may the current role see the subscriptions of an owner?
 * The views ask for every row.  Without an owner: does it see everything?
 */
Datum
outbox_visible(PG_FUNCTION_ARGS)
{
	Oid			caller = GetUserId();

	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		PG_RETURN_BOOL(outbox_is_admin(caller));
	PG_RETURN_BOOL(outbox_may_change(NameStr(*PG_GETARG_NAME(0)), PG_GETARG_OID(1), caller));
}

PG_FUNCTION_INFO_V1(outbox_routing_changed);

/* Statement trigger of outbox.subscriptions: raise the version of the set. */
Datum
outbox_routing_changed(PG_FUNCTION_ARGS)
{
	static OutboxPlan raise = {
		"UPDATE outbox.routing SET version = version OPERATOR(pg_catalog.+) 1", 0, {0}, NULL
	};
	OutboxOwnerContext context;

	if (!CALLED_AS_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" was not called by the trigger manager", "routing_changed")));
	outbox_become_owner(&context);
	outbox_spi_connect();
	if (outbox_execute(&raise, NULL, NULL, SPI_OK_UPDATE) != 1)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table outbox.routing must hold one row")));
	outbox_end_change(&context);
	PG_RETURN_POINTER(NULL);
}

/* May a role see the subscription with an id? */
static bool
sees_subscription(Oid roleid, int32 id)
{
	static OutboxPlan find = {
		"SELECT owner, owner_oid FROM outbox.subscriptions WHERE id OPERATOR(pg_catalog.=) $1",
		1, {INT4OID}, NULL
	};
	Datum		value = Int32GetDatum(id);
	bool		isnull;

	if (outbox_execute(&find, &value, NULL, SPI_OK_SELECT) == 0)
		return false;
	return outbox_may_change(NameStr(*DatumGetName(outbox_spi_value(0, 1, &isnull))),
							 DatumGetObjectId(outbox_spi_value(0, 2, &isnull)), roleid);
}

PG_FUNCTION_INFO_V1(outbox_matching);

/*
 * outbox.matching(): names of the subscriptions that would get such an event,
 * of those that the caller may see.  It is routed by the code of the relay.
 */
Datum
outbox_matching(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	OutboxOwnerContext context;
	OutboxContent content;
	OutboxEvent event;
	int			i;

	outbox_check_not_null(fcinfo, 0, "type");
	outbox_check_not_null(fcinfo, 2, "payload");
	memset(&event, 0, sizeof(event));
	event.type = text_to_cstring(PG_GETARG_TEXT_PP(0));
	outbox_check_type(event.type, strlen(event.type), true);
	if (!PG_ARGISNULL(1))
		event.scope = text_to_cstring(PG_GETARG_TEXT_PP(1));
	if (!PG_ARGISNULL(3))
		event.subject = text_to_cstring(PG_GETARG_TEXT_PP(3));
	content.payload = PG_GETARG_DATUM(2);
	content.headers = PG_GETARG_DATUM(4);
	content.no_headers = PG_ARGISNULL(4);
	if (!content.no_headers && !JB_ROOT_IS_OBJECT(PG_GETARG_JSONB_P(4)))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("headers of an event must be a JSON object")));
	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);

	outbox_become_owner(&context);
	outbox_spi_connect();
	outbox_route_given(&event, &content);
	for (i = 0; i < event.ntargets; i++)
	{
		OutboxTarget *target = &event.targets[i];
		Datum		value = CStringGetTextDatum(target->sub->name);
		bool		isnull = false;

		if (!sees_subscription(context.userid, target->sub->id))
			continue;
		if (target->filter_pending)
			ereport(NOTICE,
					(errmsg("filter of subscription \"%s\" takes too long to be evaluated here",
							target->sub->name)));
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, &value, &isnull);
	}
	outbox_route_forget();
	outbox_end_change(&context);
	PG_RETURN_NULL();
}
