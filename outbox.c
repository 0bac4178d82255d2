/*-------------------------------------------------------------------------
 *
 * outbox.c
 *		Transactional outbox: module entry.
 *
 * An event travels through src/record.c (or src/capture.c), src/doorbell.c,
 * src/relay.c, src/route.c and src/jobs.c, in that order.
 *
 *-------------------------------------------------------------------------
 */
#include "consume.h"

#include "commands/extension.h"
#include "miscadmin.h"
#include "utils/guc.h"

#ifdef PG_MODULE_MAGIC_EXT
PG_MODULE_MAGIC_EXT(.name = "outbox",.version = "1.0");
#else
PG_MODULE_MAGIC;
#endif

void		_PG_init(void);

/*
 * Report that the library is not preloaded.  The hint appends, since a list
 * that is overwritten takes other extensions down.
 */
static void
report_not_preloaded(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("outbox must be loaded via \"shared_preload_libraries\""),
			 errhint("Append outbox to \"shared_preload_libraries\" (now '%s') and restart the server.",
					 GetConfigOption("shared_preload_libraries", true, false) ?
					 GetConfigOption("shared_preload_libraries", true, false) : "")));
}

/*
 * Load the library.
 *
 * Preloaded by the postmaster it brings shared memory and the launcher.
 * Loaded later, by the first session that records an event after outbox was
 * taken out of shared_preload_libraries, it only records: there is no
 * doorbell to ring (promise P9).
 */
void
_PG_init(void)
{
	if (!process_shared_preload_libraries_in_progress && creating_extension)
		report_not_preloaded();

	outbox_guc_init();
	outbox_doorbell_init();
	outbox_hint_init();
	outbox_leases_init();		/* after the hints */
	outbox_claim_commit_init();

	if (!process_shared_preload_libraries_in_progress)
		return;

	outbox_shmem_init();
	outbox_capture_init();
	outbox_ddl_init();
	if (!IsBinaryUpgrade)
		outbox_launcher_register();
}

PG_FUNCTION_INFO_V1(outbox_require_preload);

/*
 * Called once by the install script: refuse to install what could not work,
 * and say when the database is left out of outbox.databases.
 */
Datum
outbox_require_preload(PG_FUNCTION_ARGS)
{
	char	   *datname;

	/* pg_upgrade restores the schema in a server that starts no workers */
	if (outbox_shared == NULL && !IsBinaryUpgrade)
		report_not_preloaded();

	datname = outbox_current_database();
	if (!outbox_database_listed(datname))
		ereport(WARNING,
				(errcode(ERRCODE_WARNING),
				 errmsg("database \"%s\" is not listed in \"outbox.databases\"", datname),
				 errhint("Events are recorded but not fanned out until it is listed.")));

	PG_RETURN_BOOL(true);
}
