/*-------------------------------------------------------------------------
 *
 * guc.c
 *		Settings.
 *
 * All take effect on reload but outbox.max_databases, which sizes shared
 * memory.  What decides who may do what, or what the workers do, is
 * PGC_SIGHUP: no session can set it for the relay.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include <limits.h>

#include "commands/async.h"
#include "datatype/timestamp.h"
#include "miscadmin.h"
#include "utils/guc.h"
#include "utils/varlena.h"

char	   *outbox_databases = NULL;
int			outbox_relays_setting = 1;
int			outbox_batch_size = 200;
int			outbox_sweep_interval = 60 * 1000;
int			outbox_relay_retry_min = 2 * 1000;
int			outbox_relay_retry_max = 60 * 1000;
int			outbox_poison_after = 5;
int			outbox_max_databases = 16;
int			outbox_runners_setting = 2;
int			outbox_event_retention = 7 * SECS_PER_DAY;
int			outbox_job_retention = -1;
int			outbox_dead_retention = 30 * SECS_PER_DAY;
bool		outbox_superuser_handlers = true;
char	   *outbox_record_channel = NULL;
char	   *outbox_fanned_channel = NULL;
char	   *outbox_poisoned_channel = NULL;
char	   *outbox_dead_channel = NULL;
bool		outbox_notify_on_record = false;
bool		outbox_synchronous_pass = true;

/*
 * Check hook of outbox.databases: '*', '' or a list of names.  The list keeps
 * the case of quoted names and folds the others, as SQL does.
 */
static bool
check_databases(char **newval, void **extra, GucSource source)
{
	char	   *raw;
	List	   *names;
	ListCell   *lc;
	bool		ok;

	if (strcmp(*newval, "*") == 0)
		return true;
	raw = pstrdup(*newval);
	ok = SplitIdentifierString(raw, ',', &names);
	foreach(lc, names)
		ok &= strcmp((char *) lfirst(lc), "*") != 0;
	if (!ok)
		GUC_check_errdetail("It must be '*' or a list of database names separated by commas.");
	list_free(names);
	pfree(raw);
	return ok;
}

/* Check hook of the channels: empty, or a name that NOTIFY accepts. */
static bool
check_channel(char **newval, void **extra, GucSource source)
{
	if (strlen(*newval) >= NAMEDATALEN)
	{
		GUC_check_errdetail("A channel name must be shorter than %d bytes.", NAMEDATALEN);
		return false;
	}
	return true;
}

/* Is a database among those that outbox.databases names? */
bool
outbox_database_listed(const char *datname)
{
	char	   *raw;
	List	   *names;
	ListCell   *lc;
	bool		found = false;

	if (outbox_databases == NULL || outbox_databases[0] == '\0')
		return false;
	if (strcmp(outbox_databases, "*") == 0)
		return true;
	raw = pstrdup(outbox_databases);
	if (SplitIdentifierString(raw, ',', &names))
	{
		foreach(lc, names)
		{
			if (strcmp((char *) lfirst(lc), datname) == 0)
				found = true;
		}
	}
	list_free(names);
	pfree(raw);
	return found;
}

/* Define one of the channel settings. */
static void
define_channel(const char *name, const char *description, char **variable, const char *value)
{
	DefineCustomStringVariable(name, description,
							   "An empty value turns it off.",
							   variable, value, PGC_SIGHUP, 0,
							   check_channel, NULL, NULL);
}

/* Define the settings; called once, when the library is loaded. */
void
outbox_guc_init(void)
{
	DefineCustomStringVariable("outbox.databases",
							   "Databases in which outbox works.",
							   "'*' is every database that has the extension, an empty value none.",
							   &outbox_databases, "*", PGC_SIGHUP, 0,
							   check_databases, NULL, NULL);
	DefineCustomIntVariable("outbox.relays",
							"Number of relays in each database.",
							NULL,
							&outbox_relays_setting, 1, 0, OUTBOX_MAX_RELAYS, PGC_SIGHUP, 0,
							NULL, NULL, NULL);
	DefineCustomIntVariable("outbox.batch_size",
							"Most events that one pass of a relay claims.",
							NULL,
							&outbox_batch_size, 200, 1, 10000, PGC_SIGHUP, 0,
							NULL, NULL, NULL);
	DefineCustomIntVariable("outbox.sweep_interval",
							"Time between two passes that look at every unmarked event.",
							NULL,
							&outbox_sweep_interval, 60 * 1000, 100, INT_MAX, PGC_SIGHUP, GUC_UNIT_MS,
							NULL, NULL, NULL);
	DefineCustomIntVariable("outbox.relay_retry_min",
							"Wait after the first failure of an event or of a relay; it doubles from then on.",
							NULL,
							&outbox_relay_retry_min, 2 * 1000, 1, INT_MAX, PGC_SIGHUP, GUC_UNIT_MS,
							NULL, NULL, NULL);
	DefineCustomIntVariable("outbox.relay_retry_max",
							"Longest wait between two tries of an event or of a relay.",
							NULL,
							&outbox_relay_retry_max, 60 * 1000, 1, INT_MAX, PGC_SIGHUP, GUC_UNIT_MS,
							NULL, NULL, NULL);
	DefineCustomIntVariable("outbox.poison_after",
							"Failures of its own after which an event is poisoned.",
							NULL,
							&outbox_poison_after, 5, 1, PG_INT16_MAX, PGC_SIGHUP, 0,
							NULL, NULL, NULL);
	DefineCustomIntVariable("outbox.runners",
							"Most runners of handlers in each database.",
							NULL,
							&outbox_runners_setting, 2, 0, OUTBOX_MAX_RUNNERS, PGC_SIGHUP, 0,
							NULL, NULL, NULL);
	DefineCustomBoolVariable("outbox.superuser_handlers",
							 "Lets handlers of superusers run.",
							 NULL,
							 &outbox_superuser_handlers, true, PGC_SIGHUP, 0,
							 NULL, NULL, NULL);
	DefineCustomIntVariable("outbox.event_retention",
							"How long an event is kept after its jobs have come to an end.",
							"-1 keeps events for ever.",
							&outbox_event_retention, 7 * SECS_PER_DAY, -1, INT_MAX, PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);
	DefineCustomIntVariable("outbox.job_retention",
							"How long a job is kept after it is done.",
							"-1 keeps it as long as its event.",
							&outbox_job_retention, -1, -1, INT_MAX, PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);
	DefineCustomIntVariable("outbox.dead_retention",
							"How long a dead job is kept.",
							"-1 keeps dead jobs for ever.",
							&outbox_dead_retention, 30 * SECS_PER_DAY, -1, INT_MAX, PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);
	define_channel("outbox.record_channel",
				   "Channel whose notifications wake the relay.",
				   &outbox_record_channel, "standmeet_events");
	define_channel("outbox.fanned_channel",
				   "Channel on which fanned out events are announced.",
				   &outbox_fanned_channel, "standmeet_events_fanned");
	define_channel("outbox.poisoned_channel",
				   "Channel on which poisoned events are announced.",
				   &outbox_poisoned_channel, "standmeet_events_poisoned");
	define_channel("outbox.dead_channel",
				   "Channel on which dead jobs are announced.",
				   &outbox_dead_channel, "standmeet_jobs_dead");
	DefineCustomBoolVariable("outbox.notify_on_record",
							 "Sends a notification from every transaction that records an event.",
							 "For relays outside the server. Commits then no longer share a flush.",
							 &outbox_notify_on_record, false, PGC_SIGHUP, 0,
							 NULL, NULL, NULL);
	DefineCustomBoolVariable("outbox.synchronous_pass",
							 "Waits for the flush of each pass before it is announced.",
							 NULL,
							 &outbox_synchronous_pass, true, PGC_SIGHUP, 0,
							 NULL, NULL, NULL);
	if (process_shared_preload_libraries_in_progress)
		DefineCustomIntVariable("outbox.max_databases",
								"Most databases for which shared memory is kept.",
								"Further databases are swept only.",
								&outbox_max_databases, 16, 1, 1024, PGC_POSTMASTER, 0,
								NULL, NULL, NULL);

	/* loaded later, the setting above is unknown, but not wrong */
	if (process_shared_preload_libraries_in_progress)
		MarkGUCPrefixReserved("outbox");
}
