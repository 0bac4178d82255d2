/*-------------------------------------------------------------------------
 *
 * check_jobs.c
 *		The part of outbox.check() that looks at subscriptions, their handlers
 *		and their jobs.
 *
 *-------------------------------------------------------------------------
 */
#include "check.h"

#include "utils/timestamp.h"

/* Handlers that cannot run, whatever the reason */
static void
check_handlers(CheckState *state)
{
	static OutboxPlan handlers = {
		"SELECT s.name, s.handler, s.owner, p.oid IS NULL,"
		" p.oid IS NOT NULL AND o.oid IS NOT NULL"
		" AND NOT pg_catalog.has_function_privilege(o.oid, p.oid, 'EXECUTE'),"
		" COALESCE(o.rolsuper, false), COALESCE(NOT o.rolcanlogin, false),"
		" o.oid IS NOT NULL AND NOT pg_catalog.has_database_privilege(o.oid, pg_catalog.current_database(), 'CONNECT')"
		" FROM outbox.subscriptions s"
		" LEFT JOIN pg_catalog.pg_proc p ON p.oid OPERATOR(pg_catalog.=) s.handler_oid"
		" LEFT JOIN pg_catalog.pg_roles o ON o.oid OPERATOR(pg_catalog.=) s.owner_oid"
		" WHERE s.handler IS NOT NULL ORDER BY s.name COLLATE \"C\" LIMIT 1000",
		0, {0}, NULL
	};
	int			n = query(&handlers);
	bool		isnull;
	int			i;

	if (n > 0 && outbox_runners_setting == 0)
		report(state, CHECK_ERROR,
			   "Set it to 1 or more and reload the configuration.",
			   "setting \"outbox.runners\" is 0, so that no handler runs");
	for (i = 0; i < n; i++)
	{
		const char *hint = "State the subscription again with outbox.subscribe; after a restore, outbox.adopt is enough.";
		const char *reason = NULL;

		if (DatumGetBool(outbox_spi_value(i, 4, &isnull)))
			reason = "the function is gone";
		else if (DatumGetBool(outbox_spi_value(i, 5, &isnull)))
		{
			reason = psprintf("role \"%s\" may not execute it", text_at(i, 3));
			hint = "Grant EXECUTE on the function.";
		}
		else if (DatumGetBool(outbox_spi_value(i, 6, &isnull)) && !outbox_superuser_handlers)
		{
			reason = psprintf("role \"%s\" is a superuser, and \"outbox.superuser_handlers\" is off", text_at(i, 3));
			hint = "Give the subscription to another role with outbox.set_owner.";
		}
		else if (PG_VERSION_NUM < 170000 && DatumGetBool(outbox_spi_value(i, 7, &isnull)))
		{
			reason = psprintf("role \"%s\" may not log in", text_at(i, 3));
			hint = "Before PostgreSQL 17 a runner can only connect as a role that may.";
		}
		else if (DatumGetBool(outbox_spi_value(i, 8, &isnull)))
		{
			reason = psprintf("role \"%s\" may not connect to this database", text_at(i, 3));
			hint = "Grant CONNECT on the database.";
		}
		if (reason != NULL)
			report(state, CHECK_ERROR, hint, "handler %s of subscription \"%s\" cannot run: %s",
				   text_at(i, 2), text_at(i, 1), reason);
	}
}

/* Subscriptions whose jobs nobody can take, or takes */
void
outbox_check_subscriptions(CheckState *state)
{
	static OutboxPlan owners = {
		"SELECT s.name, s.owner, EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.rolname OPERATOR(pg_catalog.=) s.owner)"
		" FROM outbox.subscriptions s WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_roles o"
		" WHERE o.oid OPERATOR(pg_catalog.=) s.owner_oid AND o.rolname OPERATOR(pg_catalog.=) s.owner)"
		" ORDER BY s.name COLLATE \"C\" LIMIT 20",
		0, {0}, NULL
	};
	static OutboxPlan paused = {
		"SELECT s.name, s.paused_at, (SELECT pg_catalog.count(*) FROM (SELECT FROM outbox.jobs j"
		" WHERE j.subscription_id OPERATOR(pg_catalog.=) s.id AND j.done_at IS NULL AND j.dead_at IS NULL LIMIT 10000) j)"
		" FROM outbox.subscriptions s WHERE s.paused_at IS NOT NULL ORDER BY s.name COLLATE \"C\" LIMIT 20",
		0, {0}, NULL
	};
	static OutboxPlan unread = {
		"SELECT s.name, j.created_at FROM outbox.subscriptions s"
		" CROSS JOIN LATERAL (SELECT j.created_at, j.due_at FROM outbox.jobs j"
		" WHERE j.subscription_id OPERATOR(pg_catalog.=) s.id AND j.done_at IS NULL AND j.dead_at IS NULL"
		" AND NOT outbox.leased(j.id) ORDER BY j.due_at, j.id LIMIT 1) j"
		" WHERE s.paused_at IS NULL"
		" AND j.due_at OPERATOR(pg_catalog.<) (pg_catalog.now() OPERATOR(pg_catalog.-) '1 day'::interval)"
		" ORDER BY s.name COLLATE \"C\" LIMIT 20",
		0, {0}, NULL
	};
	static OutboxPlan dead = {
		"SELECT s.name, d.n, d.first FROM outbox.subscriptions s"
		" CROSS JOIN LATERAL (SELECT pg_catalog.count(*) AS n, pg_catalog.min(j.dead_at) AS first"
		" FROM (SELECT dead_at FROM outbox.jobs"
		" WHERE subscription_id OPERATOR(pg_catalog.=) s.id AND done_at IS NULL AND dead_at IS NOT NULL"
		" ORDER BY dead_at LIMIT 10000) j) d"
		" WHERE d.n OPERATOR(pg_catalog.>) 0 ORDER BY s.name COLLATE \"C\" LIMIT 20",
		0, {0}, NULL
	};
	static OutboxPlan failing = {
		"SELECT s.name, f.n, f.error FROM outbox.subscriptions s"
		" CROSS JOIN LATERAL (SELECT pg_catalog.count(*) AS n,"
		" (pg_catalog.array_agg(j.last_error ORDER BY j.attempts DESC, j.id))[1] AS error"
		" FROM (SELECT id, attempts, last_error, claim FROM outbox.jobs"
		" WHERE subscription_id OPERATOR(pg_catalog.=) s.id AND done_at IS NULL AND dead_at IS NULL"
		" ORDER BY due_at, id LIMIT 10000) j"
		" WHERE j.attempts OPERATOR(pg_catalog.>=) 3 AND j.claim IS NULL) f"
		" WHERE f.n OPERATOR(pg_catalog.>) 0 ORDER BY s.name COLLATE \"C\" LIMIT 20",
		0, {0}, NULL
	};
	bool		isnull;
	int			n;
	int			i;

	n = query(&owners);
	for (i = 0; i < n; i++)
	{
		bool		reborn = DatumGetBool(outbox_spi_value(i, 3, &isnull));

		report(state, CHECK_WARNING,
			   reborn ? "If it is the same, call outbox.adopt; else outbox.set_owner." :
			   "Give it to another role with outbox.set_owner, or end it with outbox.unsubscribe.",
			   "subscription \"%s\" has no owner: role \"%s\" %s", text_at(i, 1), text_at(i, 2),
			   reborn ? "was made anew" : "is missing");
	}
	n = query(&paused);
	for (i = 0; i < n; i++)
		report(state, CHECK_NOTICE, "outbox.resume() ends the pause.",
			   "subscription \"%s\" was paused %s; jobs that wait: " INT64_FORMAT "%s", text_at(i, 1),
			   ago(time_at(i, 2)), int8_at(i, 3), int8_at(i, 3) == 10000 ? " or more" : "");
	n = query(&unread);
	for (i = 0; i < n; i++)
		report(state, CHECK_WARNING,
			   "Nobody seems to take them. End a subscription that is not needed with outbox.unsubscribe.",
			   "jobs of subscription \"%s\" wait; the oldest was made %s", text_at(i, 1), ago(time_at(i, 2)));
	n = query(&failing);
	for (i = 0; i < n; i++)
		report(state, CHECK_WARNING,
			   "They are tried again by themselves, until they are dead; remove the cause.",
			   "jobs of subscription \"%s\" that have failed three times or more: " INT64_FORMAT "%s; one after: %s",
			   text_at(i, 1), int8_at(i, 2), int8_at(i, 2) == 10000 ? " or more" : "",
			   text_at(i, 3) ? text_at(i, 3) : "");
	n = query(&dead);
	for (i = 0; i < n; i++)
		report(state, CHECK_WARNING,
			   "View outbox.dead_jobs says why; outbox.retry_dead puts them back in line, outbox.purge gives them up.",
			   "dead jobs of subscription \"%s\": " INT64_FORMAT "%s; the first died %s", text_at(i, 1),
			   int8_at(i, 2), int8_at(i, 2) == 10000 ? " or more" : "", ago(time_at(i, 3)));
	check_handlers(state);
}
