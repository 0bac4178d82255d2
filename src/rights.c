/*-------------------------------------------------------------------------
 *
 * rights.c
 *		outbox.grant() and outbox.revoke(): what a role needs to record, to
 *		consume or to administer, as one word.
 *
 * The words are not stored anywhere: a word is a set of ordinary privileges on
 * the objects of the extension, which pg_dump dumps.  A role has a word when it
 * has the privilege that stands first among those of that word.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include "catalog/pg_extension.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/builtins.h"

/* The words, as bits */
#define RECORD 1
#define CONSUME 2
#define ADMIN 4
#define ALL_WORDS (RECORD | CONSUME | ADMIN)

/* A privilege on an object, and the words that comprise it */
typedef struct RightsItem
{
	int			words;
	const char *privilege;		/* with its column, if any */
	const char *kind;
	const char *name;
} RightsItem;

/* The first of each word tells whether a role has the word */
static const RightsItem items[] = {
	{RECORD, "EXECUTE", "ROUTINE", "record"},
	{CONSUME, "EXECUTE", "ROUTINE", "subscribe"},
	{ADMIN, "EXECUTE", "ROUTINE", "arm"},

	{ALL_WORDS, "USAGE", "SCHEMA", "outbox"},

	{RECORD, "INSERT (type)", "TABLE", "events"},
	{RECORD, "INSERT (subject)", "TABLE", "events"},
	{RECORD, "INSERT (scope)", "TABLE", "events"},
	{RECORD, "INSERT (payload)", "TABLE", "events"},
	{RECORD, "INSERT (headers)", "TABLE", "events"},
	{RECORD, "INSERT (not_before)", "TABLE", "events"},
	{RECORD, "SELECT (seq)", "TABLE", "events"},
	{ALL_WORDS, "EXECUTE", "ROUTINE", "await_fanout"},
	{RECORD, "EXECUTE", "ROUTINE", "capture"},
	{RECORD, "EXECUTE", "ROUTINE", "uncapture"},

	/*
	 * A new partition of a captured table gets a copy of the trigger, and a
	 * restored table the trigger itself, which its owner can only make with
	 * this.  It lets nobody record what outbox.record() would refuse.
	 */
	{RECORD, "EXECUTE", "ROUTINE", "capture_row"},
	{RECORD | ADMIN, "EXECUTE", "ROUTINE", "capture_definition"},
	{RECORD | ADMIN, "SELECT", "TABLE", "captures"},

	/* to make a handler */
	{CONSUME, "USAGE", "TYPE", "event"},
	{CONSUME, "USAGE", "TYPE", "subscription"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "unsubscribe"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "pause"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "resume"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "rename"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "set_owner"},
	{CONSUME, "EXECUTE", "ROUTINE", "adopt"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "matching"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "visible"},
	{CONSUME | ADMIN, "SELECT", "TABLE", "event_status"},
	{CONSUME | ADMIN, "SELECT", "TABLE", "job_status"},
	{CONSUME | ADMIN, "SELECT", "TABLE", "stat_subscription"},
	{CONSUME | ADMIN, "SELECT", "TABLE", "dead_jobs"},
	{CONSUME | ADMIN, "SELECT", "TABLE", "blocked"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "done_total"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "leased"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "leased_until"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "lease_holder"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "claim"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "complete"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "complete_many"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "fail"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "extend"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "extend_many"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "release"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "retry"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "retry_dead"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "cancel"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "purge"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "replay"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "is_current"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "current_attempt"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "await_jobs"},
	{CONSUME | ADMIN, "EXECUTE", "ROUTINE", "await_idle"},

	{ADMIN, "EXECUTE", "ROUTINE", "requeue"},
	{ADMIN, "EXECUTE", "ROUTINE", "requeue_many"},
	{ADMIN, "EXECUTE", "ROUTINE", "discard"},
	{ADMIN, "EXECUTE", "ROUTINE", "wake"},
	{ADMIN, "EXECUTE", "ROUTINE", "stop"},
	{ADMIN, "EXECUTE", "ROUTINE", "start"},
	{ADMIN, "EXECUTE", "ROUTINE", "relays"},
	{ADMIN, "EXECUTE", "ROUTINE", "runners"},
	{ADMIN, "SELECT", "TABLE", "stat_runner"},
	{ADMIN, "EXECUTE", "ROUTINE", "check"},
	{ADMIN, "EXECUTE", "ROUTINE", "prune"},
	{ADMIN, "SELECT", "TABLE", "poisoned"},
	{ADMIN, "SELECT", "TABLE", "stat_relay"},
};

/* The bit of a word; refuses what is none. */
static int
parse_word(const char *word)
{
	if (strcmp(word, "record") == 0)
		return RECORD;
	if (strcmp(word, "consume") == 0)
		return CONSUME;
	if (strcmp(word, "admin") == 0)
		return ADMIN;
	if (strcmp(word, "webhook") == 0)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("webhooks are not supported by this version")));
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("unrecognized privilege: \"%s\"", word),
			 errhint("There are record, consume and admin.")));
	return 0;					/* keep the compiler quiet */
}

/* Refuse a call by anyone but those who could grant by hand. */
static void
check_caller(Oid caller)
{
	Oid			owner = outbox_extension_owner();

	if (!superuser_arg(caller) && !(OidIsValid(owner) && has_privs_of_role(caller, owner)))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied to grant or revoke privileges of outbox"),
				 errdetail("Only superusers and members of the role that owns the extension may do it.")));
}

/* Which of the items has a role been given itself? */
static void
read_held(Oid roleid, bool *held)
{
	static OutboxPlan read = {
		"SELECT x.kind, x.name, x.privilege FROM ("
		" SELECT 'ROUTINE' AS kind, p.proname::text AS name, a.privilege_type AS privilege, a.grantee"
		" FROM pg_catalog.pg_proc p, pg_catalog.aclexplode(p.proacl) a"
		" WHERE p.pronamespace OPERATOR(pg_catalog.=) 'outbox'::pg_catalog.regnamespace"
		" UNION ALL"
		" SELECT 'TABLE', c.relname::text, a.privilege_type, a.grantee"
		" FROM pg_catalog.pg_class c, pg_catalog.aclexplode(c.relacl) a"
		" WHERE c.relnamespace OPERATOR(pg_catalog.=) 'outbox'::pg_catalog.regnamespace"
		" UNION ALL"
		" SELECT 'TABLE', c.relname::text, pg_catalog.format('%s (%s)', a.privilege_type, t.attname), a.grantee"
		" FROM pg_catalog.pg_class c JOIN pg_catalog.pg_attribute t ON t.attrelid OPERATOR(pg_catalog.=) c.oid,"
		" pg_catalog.aclexplode(t.attacl) a"
		" WHERE c.relnamespace OPERATOR(pg_catalog.=) 'outbox'::pg_catalog.regnamespace"
		" UNION ALL"
		" SELECT 'TYPE', t.typname::text, a.privilege_type, a.grantee"
		" FROM pg_catalog.pg_type t, pg_catalog.aclexplode(t.typacl) a"
		" WHERE t.typnamespace OPERATOR(pg_catalog.=) 'outbox'::pg_catalog.regnamespace"
		" UNION ALL"
		" SELECT 'SCHEMA', n.nspname::text, a.privilege_type, a.grantee"
		" FROM pg_catalog.pg_namespace n, pg_catalog.aclexplode(n.nspacl) a"
		" WHERE n.nspname OPERATOR(pg_catalog.=) 'outbox'"
		") x WHERE x.grantee OPERATOR(pg_catalog.=) $1",
		1, {OIDOID}, NULL
	};
	Datum		value = ObjectIdGetDatum(roleid);
	uint64		nrows;
	uint64		row;
	int			i;

	memset(held, 0, lengthof(items) * sizeof(bool));
	nrows = outbox_execute(&read, &value, NULL, SPI_OK_SELECT);
	for (row = 0; row < nrows; row++)
	{
		char	   *kind = outbox_spi_string(row, 1);
		char	   *name = outbox_spi_string(row, 2);
		char	   *privilege = outbox_spi_string(row, 3);

		for (i = 0; i < lengthof(items); i++)
		{
			if (strcmp(items[i].kind, kind) == 0 && strcmp(items[i].name, name) == 0 &&
				strcmp(items[i].privilege, privilege) == 0)
				held[i] = true;
		}
	}
}

/* The words that a role has, but one */
static int
other_words(const bool *held, int word)
{
	int			seen = 0;
	int			result = 0;
	int			i;

	for (i = 0; i < lengthof(items); i++)
	{
		if (held[i])
			result |= items[i].words & ~seen;
		seen |= items[i].words;
	}
	return result & ~word;
}

/* Give an item to a role, or take it. */
static void
change_item(const RightsItem *item, const char *role, bool give)
{
	const char *quoted = quote_identifier(role);
	char	   *command;
	int			rc;

	command = psprintf("%s %s ON %s %s%s %s %s",
					   give ? "GRANT" : "REVOKE", item->privilege, item->kind,
					   strcmp(item->kind, "SCHEMA") == 0 ? "" : "outbox.", item->name,
					   give ? "TO" : "FROM", quoted);
	rc = SPI_execute(command, false, 0);
	if (rc != SPI_OK_UTILITY)
		elog(ERROR, "SPI_execute returned %s for \"%s\"", SPI_result_code_string(rc), command);
	pfree(command);
}

/*
 * Give a word to a role, or take it, except what another word that the role
 * keeps comprises too.  False when there was nothing to do.
 */
static bool
change_rights(FunctionCallInfo fcinfo, bool give)
{
	OutboxOwnerContext context;
	bool		held[lengthof(items)];
	char	   *role;
	Oid			roleid;
	int			word;
	int			kept = 0;
	int			changed = 0;
	int			i;

	outbox_check_not_null(fcinfo, 0, "role");
	outbox_check_not_null(fcinfo, 1, "privilege");
	check_caller(GetUserId());
	role = NameStr(*PG_GETARG_NAME(0));
	word = parse_word(text_to_cstring(PG_GETARG_TEXT_PP(1)));
	if (pg_strcasecmp(role, "public") == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("privileges of outbox are not for PUBLIC"),
				 errhint("Name a role.")));
	roleid = get_role_oid(role, false);
	if (roleid == outbox_extension_owner())
	{
		if (!give)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("role \"%s\" owns the extension and has every privilege", role)));
		return false;
	}

	outbox_become_owner(&context);
	outbox_spi_connect();
	/* two changes of one ACL at a time would fail */
	LockDatabaseObject(ExtensionRelationId, get_extension_oid(OUTBOX_EXTENSION, false), 0,
					   ShareUpdateExclusiveLock);
	read_held(roleid, held);
	if (!give)
		kept = other_words(held, word);
	for (i = 0; i < lengthof(items); i++)
	{
		if ((items[i].words & word) == 0 || (items[i].words & kept) != 0 || held[i] == give)
			continue;
		change_item(&items[i], role, give);
		changed++;
	}
	outbox_end_change(&context);
	return changed > 0;
}

PG_FUNCTION_INFO_V1(outbox_grant);

/* outbox.grant(): give a role what it needs; false when it has all of it. */
Datum
outbox_grant(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(change_rights(fcinfo, true));
}

PG_FUNCTION_INFO_V1(outbox_revoke);

/* outbox.revoke(): take it again; false when the role has none of it. */
Datum
outbox_revoke(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(change_rights(fcinfo, false));
}

PG_FUNCTION_INFO_V1(outbox_revoke_defaults);

/*
 * Last step of the install script: take back what default privileges have
 * given to anybody but the owner.  A role that may make a trigger on our
 * tables would run its code as the relay.
 */
Datum
outbox_revoke_defaults(PG_FUNCTION_ARGS)
{
	static OutboxPlan read = {
		"SELECT DISTINCT pg_catalog.format('REVOKE ALL ON %s %s FROM %s CASCADE', x.kind, x.name,"
		" CASE WHEN a.grantee OPERATOR(pg_catalog.=) 0 THEN 'PUBLIC'"
		" ELSE (SELECT pg_catalog.quote_ident(r.rolname) FROM pg_catalog.pg_roles r"
		" WHERE r.oid OPERATOR(pg_catalog.=) a.grantee) END)"
		" FROM ("
		" SELECT 'ROUTINE' AS kind, p.oid::pg_catalog.regprocedure::text AS name, p.proacl AS acl, p.proowner AS owner"
		" FROM pg_catalog.pg_proc p WHERE p.pronamespace OPERATOR(pg_catalog.=) 'outbox'::pg_catalog.regnamespace"
		" UNION ALL"
		" SELECT CASE WHEN c.relkind OPERATOR(pg_catalog.=) 'S' THEN 'SEQUENCE' ELSE 'TABLE' END,"
		" c.oid::pg_catalog.regclass::text, c.relacl, c.relowner"
		" FROM pg_catalog.pg_class c WHERE c.relnamespace OPERATOR(pg_catalog.=) 'outbox'::pg_catalog.regnamespace"
		" UNION ALL"
		" SELECT 'TYPE', t.oid::pg_catalog.regtype::text, t.typacl, t.typowner"
		" FROM pg_catalog.pg_type t WHERE t.typnamespace OPERATOR(pg_catalog.=) 'outbox'::pg_catalog.regnamespace"
		" UNION ALL"
		" SELECT 'SCHEMA', n.oid::pg_catalog.regnamespace::text, n.nspacl, n.nspowner"
		" FROM pg_catalog.pg_namespace n WHERE n.nspname OPERATOR(pg_catalog.=) 'outbox'"
		") x, pg_catalog.aclexplode(x.acl) a"
		" WHERE a.grantee OPERATOR(pg_catalog.<>) x.owner",
		0, {0}, NULL
	};
	List	   *commands = NIL;
	ListCell   *lc;
	uint64		n;
	uint64		i;

	if (!creating_extension)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("this function is for the install script of the extension")));
	outbox_spi_connect();
	n = outbox_execute(&read, NULL, NULL, SPI_OK_SELECT);
	for (i = 0; i < n; i++)
		commands = lappend(commands, outbox_spi_string(i, 1));
	foreach(lc, commands)
	{
		if (SPI_execute((const char *) lfirst(lc), false, 0) != SPI_OK_UTILITY)
			elog(ERROR, "could not run \"%s\"", (char *) lfirst(lc));
	}
	outbox_spi_finish();
	PG_RETURN_BOOL(n > 0);
}
