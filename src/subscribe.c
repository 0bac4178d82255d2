/*-------------------------------------------------------------------------
 *
 * subscribe.c
 *		outbox.subscribe(): the definition of a subscription, checked and
 *		stated.
 *
 * What is wrong with a definition is said here, when it is stated: the relay
 * would have nobody to tell.
 *
 *-------------------------------------------------------------------------
 */
#include "runner.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/timestamp.h"

#define MAX_PATTERNS 1000		/* of one subscription */
#define MAX_WILDCARDS 100		/* of them with a wildcard, which cost time */
#define MAX_FILTER (64 * 1024)	/* bytes of a filter */
#define MAX_OPTIONS (64 * 1024) /* bytes of the options */
#define MAX_INTERVAL ((double) 366 * USECS_PER_DAY)

/* Arguments of outbox.subscribe() */
enum
{
	ARG_NAME,
	ARG_TYPES,
	ARG_SCOPE,
	ARG_FILTER,
	ARG_COALESCING,
	ARG_ORDERED,
	ARG_HANDLER,
	ARG_SINK,
	ARG_OPTIONS,
	ARG_MAX_ATTEMPTS,
	ARG_RETRY_MIN,
	ARG_RETRY_MAX,
	ARG_LEASE,
	NARGS
};

/* Refuse patterns of event types that are none, or match nothing. */
static void
check_types(ArrayType *types)
{
	Datum	   *texts;
	bool	   *nulls;
	int			ntexts;
	int			wildcards = 0;
	bool		includes = false;
	int			i;

	if (ARR_NDIM(types) > 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("types must be a one-dimensional array")));
	deconstruct_array(types, TEXTOID, -1, false, TYPALIGN_INT, &texts, &nulls, &ntexts);
	if (ntexts == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("types must not be empty"),
				 errhint("'{*}' matches every type.")));
	if (ntexts > MAX_PATTERNS)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("too many types"),
				 errdetail("There are %d patterns; the limit is %d.", ntexts, MAX_PATTERNS)));
	for (i = 0; i < ntexts; i++)
	{
		char	   *pattern;
		const char *error;
		OutboxPattern *parsed;

		if (nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("types must not contain nulls")));
		pattern = TextDatumGetCString(texts[i]);
		parsed = outbox_glob_parse(pattern, strlen(pattern), &error);
		if (parsed == NULL)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("invalid pattern of event types: \"%s\"", outbox_clip(pattern, 300)),
					 errdetail_internal("%s", error),
					 errhint("\"*\" stands for any run of characters, \"?\" for one, and a leading \"!\" excludes.")));
		includes |= !parsed->exclude;
		wildcards += (strpbrk(parsed->text, "*?") != NULL);
	}
	if (wildcards > MAX_WILDCARDS)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("too many types with a wildcard"),
				 errdetail("There are %d; the limit is %d.", wildcards, MAX_WILDCARDS)));
	if (!includes)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("types match nothing"),
				 errdetail("Every pattern excludes."),
				 errhint("Add what is to be matched, as in '{*,!order.*}'.")));
}

/* Length of an interval in us; months count 30 days, as in comparisons */
static double
interval_length(const Interval *span)
{
	return (double) span->time + (double) span->day * USECS_PER_DAY +
		(double) span->month * DAYS_PER_MONTH * USECS_PER_DAY;
}

/* Refuse an interval that is negative, infinite or longer than a year. */
static void
check_interval(const Interval *span, const char *argument, bool zero_ok)
{
	double		length = interval_length(span);

	if (span->time < 0 || span->day < 0 || span->month < 0 || (length == 0 && !zero_ok))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 zero_ok ? errmsg("%s must not be negative", argument) :
				 errmsg("%s must be positive", argument)));
	if (length > MAX_INTERVAL)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not be longer than a year", argument)));
}

/* Refuse an argument that takes more bytes than a limit. */
static void
check_size(Size size, Size limit, const char *argument)
{
	if (size > limit)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s is too long", argument),
				 errdetail("It has %zu bytes; the limit is %zu.", size, limit)));
}

/*
 * Refuse a filter with a variable that no event has: it would be an error, and
 * so no match, each time.  In the text of a path a variable is a quoted name
 * after "$", which cannot be mistaken for anything else outside of quotes.
 */
static void
check_filter(Datum filter)
{
	static const char *const known[] = {"type", "subject", "scope", "headers"};
	const char *p;
	int			i;

	check_size(VARSIZE(DatumGetJsonPathP(filter)), MAX_FILTER, "filter");
	for (p = DatumGetCString(DirectFunctionCall1(jsonpath_out, filter)); *p; p++)
	{
		bool		variable = (p[0] == '$' && p[1] == '"');
		const char *name;
		int			len;

		if (variable)
			p++;
		if (*p != '"')
			continue;
		name = ++p;
		while (*p && *p != '"')
			p += (p[0] == '\\' && p[1] != '\0') ? 2 : 1;
		len = p - name;
		for (i = 0; variable && i < lengthof(known); i++)
		{
			if (len == (int) strlen(known[i]) && strncmp(name, known[i], len) == 0)
				variable = false;
		}
		if (variable)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("filter uses an unknown variable: \"%s\"", pnstrdup(name, len)),
					 errhint("There are $type, $subject, $scope and $headers; the payload is $ alone.")));
		if (*p == '\0')
			break;
	}
}

/* Refuse options that are no object, or whose channel NOTIFY would refuse. */
static void
check_options(Jsonb *options)
{
	JsonbValue	value;

	if (!JB_ROOT_IS_OBJECT(options))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("options must be a JSON object")));
	check_size(VARSIZE(options), MAX_OPTIONS, "options");
	if (getKeyJsonValueFromContainer(&options->root, "notify", strlen("notify"), &value) != NULL &&
		(value.type != jbvString || value.val.string.len < 1 ||
		 value.val.string.len >= NAMEDATALEN))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("option \"notify\" must be the name of a channel"),
				 errdetail("It is a string of 1 to %d bytes.", NAMEDATALEN - 1)));
}

/* Refuse what cannot be the definition of a subscription. */
static void
check_definition(FunctionCallInfo fcinfo)
{
	outbox_check_not_null(fcinfo, ARG_NAME, "name");
	outbox_check_not_null(fcinfo, ARG_TYPES, "types");
	outbox_check_not_null(fcinfo, ARG_COALESCING, "coalescing");
	outbox_check_not_null(fcinfo, ARG_ORDERED, "ordered");
	outbox_check_not_null(fcinfo, ARG_OPTIONS, "options");
	outbox_check_not_null(fcinfo, ARG_MAX_ATTEMPTS, "max_attempts");
	outbox_check_not_null(fcinfo, ARG_RETRY_MIN, "retry_min");
	outbox_check_not_null(fcinfo, ARG_RETRY_MAX, "retry_max");
	outbox_check_not_null(fcinfo, ARG_LEASE, "lease");

	outbox_check_name(text_to_cstring(PG_GETARG_TEXT_PP(ARG_NAME)));
	check_types(PG_GETARG_ARRAYTYPE_P(ARG_TYPES));
	if (!PG_ARGISNULL(ARG_SCOPE))
		check_size(VARSIZE_ANY_EXHDR(PG_GETARG_TEXT_PP(ARG_SCOPE)), OUTBOX_MAX_SCOPE, "scope");
	if (!PG_ARGISNULL(ARG_FILTER))
		check_filter(PG_GETARG_DATUM(ARG_FILTER));

	if (!PG_ARGISNULL(ARG_HANDLER) && !PG_ARGISNULL(ARG_SINK))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("a subscription has either a handler or a sink"),
				 errhint("Make two subscriptions, so that each can fail and be retried alone.")));
	if (!PG_ARGISNULL(ARG_SINK))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("sinks are not supported by this version"),
				 errhint("Leave it out: the jobs then wait in outbox.jobs.")));

	check_options(PG_GETARG_JSONB_P(ARG_OPTIONS));
	if (PG_GETARG_INT32(ARG_MAX_ATTEMPTS) < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_attempts must be at least 1")));
	check_interval(PG_GETARG_INTERVAL_P(ARG_RETRY_MIN), "retry_min", true);
	check_interval(PG_GETARG_INTERVAL_P(ARG_RETRY_MAX), "retry_max", true);
	check_interval(PG_GETARG_INTERVAL_P(ARG_LEASE), "lease", false);
	if (interval_length(PG_GETARG_INTERVAL_P(ARG_RETRY_MIN)) >
		interval_length(PG_GETARG_INTERVAL_P(ARG_RETRY_MAX)))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("retry_min must not be longer than retry_max")));
}

/*
 * Arm the database if it has never had anything to do with outbox: not when
 * there are subscriptions already, which have come from a dump or a copy.
 */
static void
arm_new_database(void)
{
	static OutboxPlan arm = {
		"INSERT INTO outbox.armed (database)"
		" SELECT $1"
		" WHERE NOT EXISTS (SELECT FROM outbox.armed)"
		" AND NOT EXISTS (SELECT FROM outbox.subscriptions)"
		" ON CONFLICT DO NOTHING",
		1, {OIDOID}, NULL
	};
	Datum		value = ObjectIdGetDatum(MyDatabaseId);

	if (outbox_execute(&arm, &value, NULL, SPI_OK_INSERT) > 0)
		outbox_doorbell_note_sweep();
}

/* Values of a definition, in the order of the parameters of the statements below */
#define DEFINITION_ARGS 13
#define DEFINITION_TYPES \
	TEXTOID, TEXTARRAYOID, TEXTOID, JSONPATHOID, BOOLOID, BOOLOID, JSONBOID, INT4OID, \
	INTERVALOID, INTERVALOID, INTERVALOID, TEXTOID, OIDOID

/* Does a subscription have that definition already?  Then it is left alone. */
static bool
has_definition(Datum *values, const char *nulls)
{
	static OutboxPlan compare = {
		"SELECT 1 FROM outbox.subscriptions WHERE name OPERATOR(pg_catalog.=) $1"
		" AND types OPERATOR(pg_catalog.=) $2"
		" AND COALESCE(scope OPERATOR(pg_catalog.=) $3, scope IS NULL AND $3 IS NULL)"
		" AND COALESCE(filter::text OPERATOR(pg_catalog.=) $4::text, filter IS NULL AND $4 IS NULL)"
		" AND coalescing OPERATOR(pg_catalog.=) $5 AND ordered OPERATOR(pg_catalog.=) $6"
		" AND options OPERATOR(pg_catalog.=) $7 AND max_attempts OPERATOR(pg_catalog.=) $8"
		" AND retry_min::text OPERATOR(pg_catalog.=) $9::text"
		" AND retry_max::text OPERATOR(pg_catalog.=) $10::text"
		" AND lease::text OPERATOR(pg_catalog.=) $11::text"
		" AND COALESCE(handler OPERATOR(pg_catalog.=) $12 AND handler_oid OPERATOR(pg_catalog.=) $13,"
		" handler IS NULL AND $12 IS NULL)"
		" AND sink IS NULL",
		DEFINITION_ARGS, {DEFINITION_TYPES}, NULL
	};

	return outbox_execute(&compare, values, nulls, SPI_OK_SELECT) > 0;
}

/* Make a subscription; returns its id. */
static int32
insert_subscription(Datum *values, const char *nulls)
{
	static OutboxPlan insert = {
		"INSERT INTO outbox.subscriptions (name, types, scope, filter, coalescing, ordered,"
		" options, max_attempts, retry_min, retry_max, lease, handler, handler_oid, owner, owner_oid)"
		" VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15) RETURNING id",
		DEFINITION_ARGS + 2, {DEFINITION_TYPES, NAMEOID, OIDOID}, NULL
	};
	bool		isnull;

	outbox_execute(&insert, values, nulls, SPI_OK_INSERT_RETURNING);
	return DatumGetInt32(outbox_spi_value(0, 1, &isnull));
}

/* Restate the definition of a subscription; owner, pause and jobs stay. */
static void
update_subscription(Datum *values, const char *nulls)
{
	static OutboxPlan update = {
		"UPDATE outbox.subscriptions SET types = $2, scope = $3, filter = $4,"
		" coalescing = $5, ordered = $6, options = $7, max_attempts = $8,"
		" retry_min = $9, retry_max = $10, lease = $11,"
		" handler = $12, handler_oid = $13, sink = NULL, sink_oid = NULL"
		" WHERE name OPERATOR(pg_catalog.=) $1",
		DEFINITION_ARGS, {DEFINITION_TYPES}, NULL
	};

	outbox_execute(&update, values, nulls, SPI_OK_UPDATE);
}

/*
 * Refuse a handler that the owner of the subscription could not run, or that
 * somebody who is not that role would have run as that role.  Who may change a
 * subscription for another reason may restate all but its handler.  sub: NULL
 * when the subscription is new, and will be the caller's.
 */
static void
check_handler(const OutboxHandler *handler, const OutboxSubscriptionRow *sub, Oid caller)
{
	bool		same;

	if (!OidIsValid(handler->oid))
		return;
	if (sub == NULL)
	{
		outbox_handler_check_owner(handler, GetUserNameFromId(caller, false), caller);
		return;
	}
	if (!outbox_role_is(sub->owner_oid, sub->owner))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("role \"%s\", to which the subscription belongs, is missing or was made anew",
						sub->owner),
				 errhint("Call outbox.adopt or outbox.set_owner first.")));
	same = sub->handler != NULL && sub->handler_oid == handler->oid &&
		strcmp(sub->handler, handler->name) == 0;
	if (!same && !has_privs_of_role(caller, sub->owner_oid))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("must be able to act as role \"%s\"", sub->owner),
				 errdetail("The handler of a subscription runs as the role that owns it.")));
	outbox_handler_check_owner(handler, sub->owner, sub->owner_oid);
}

PG_FUNCTION_INFO_V1(outbox_subscribe);

/*
 * outbox.subscribe(): make a subscription, or restate the whole definition of
 * one.  Repeating it, as a deployment does, locks and changes nothing.
 */
Datum
outbox_subscribe(PG_FUNCTION_ARGS)
{
	static const int arguments[] = {
		ARG_NAME, ARG_TYPES, ARG_SCOPE, ARG_FILTER, ARG_COALESCING, ARG_ORDERED,
		ARG_OPTIONS, ARG_MAX_ATTEMPTS, ARG_RETRY_MIN, ARG_RETRY_MAX, ARG_LEASE
	};
	Oid			caller = GetUserId();
	OutboxOwnerContext context;
	OutboxHandler handler = {InvalidOid, NULL};
	OutboxSubscriptionRow sub;
	NameData	owner;
	Datum		values[DEFINITION_ARGS + 2];
	char		nulls[DEFINITION_ARGS + 2];
	char	   *name;
	bool		exists;
	int			i;

	Assert(PG_NARGS() == NARGS);
	check_definition(fcinfo);
	name = text_to_cstring(PG_GETARG_TEXT_PP(ARG_NAME));
	memset(nulls, ' ', sizeof(nulls));
	for (i = 0; i < lengthof(arguments); i++)
	{
		values[i] = PG_GETARG_DATUM(arguments[i]);
		if (PG_ARGISNULL(arguments[i]))
			nulls[i] = 'n';
	}
	if (!PG_ARGISNULL(ARG_HANDLER))
		outbox_handler_resolve(text_to_cstring(PG_GETARG_TEXT_PP(ARG_HANDLER)), &handler);
	values[i] = OidIsValid(handler.oid) ? CStringGetTextDatum(handler.name) : (Datum) 0;
	values[i + 1] = ObjectIdGetDatum(handler.oid);
	if (!OidIsValid(handler.oid))
		nulls[i] = nulls[i + 1] = 'n';
	namestrcpy(&owner, GetUserNameFromId(caller, false));
	values[DEFINITION_ARGS] = NameGetDatum(&owner);
	values[DEFINITION_ARGS + 1] = ObjectIdGetDatum(caller);

	outbox_become_owner(&context);
	outbox_spi_connect();
	exists = outbox_find_subscription(name, &sub);
	if (exists)
		outbox_check_may_change(name, &sub, caller);
	check_handler(&handler, exists ? &sub : NULL, caller);
	if (!exists || !has_definition(values, nulls))
	{
		outbox_lock_routing();
		/* it may have come, gone or changed hands meanwhile */
		if (outbox_find_subscription(name, &sub))
		{
			outbox_check_may_change(name, &sub, caller);
			check_handler(&handler, &sub, caller);
			update_subscription(values, nulls);
			outbox_wake_consumers(sub.id);
		}
		else
		{
			check_handler(&handler, NULL, caller);
			arm_new_database();
			sub.id = insert_subscription(values, nulls);
		}
	}
	outbox_end_change(&context);
	PG_RETURN_INT32(sub.id);
}
