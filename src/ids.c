/*-------------------------------------------------------------------------
 *
 * ids.c
 *		Sorted lists of ids, and those of the jobs that an event names.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/numeric.h"

/* Order of ids */
static int
compare_ids(const void *a, const void *b)
{
	int64		ia = *(const int64 *) a;
	int64		ib = *(const int64 *) b;

	return (ia > ib) - (ia < ib);
}

/* Sort ids and leave one of each. */
int
outbox_unique_ids(int64 *ids, int n)
{
	int			unique = 0;
	int			i;

	qsort(ids, n, sizeof(int64), compare_ids);
	for (i = 0; i < n; i++)
	{
		if (unique == 0 || ids[unique - 1] != ids[i])
			ids[unique++] = ids[i];
	}
	return unique;
}

/* Place of an id among sorted ones; -1 when it is not there. */
int
outbox_find_id(const int64 *ids, int n, int64 id)
{
	const int64 *found = NULL;

	if (n > 0)
		found = bsearch(&id, ids, n, sizeof(int64), compare_ids);
	return found == NULL ? -1 : (int) (found - ids);
}

/* Is an id among sorted ones? */
bool
outbox_has_id(const int64 *ids, int n, int64 id)
{
	return outbox_find_id(ids, n, id) >= 0;
}

/* Ids as a parameter */
Datum
outbox_id_array(const int64 *ids, int n)
{
	Datum	   *values = palloc((n + 1) * sizeof(Datum));
	int			i;

	for (i = 0; i < n; i++)
		values[i] = Int64GetDatum(ids[i]);
	return outbox_make_array(values, NULL, n, INT8OID);
}

/* Ids of the first column of the last result, sorted */
int
outbox_result_ids(uint64 nrows, int64 **ids)
{
	uint64		i;
	bool		isnull;

	*ids = palloc((nrows + 1) * sizeof(int64));
	for (i = 0; i < nrows; i++)
		(*ids)[i] = DatumGetInt64(outbox_spi_value(i, 1, &isnull));
	SPI_freetuptable(SPI_tuptable);
	return outbox_unique_ids(*ids, (int) nrows);
}

/* Ids of the jobs that an event names, sorted; returns how many. */
int
outbox_named_jobs(Datum fanout, int64 **ids)
{
	Jsonb	   *jb = DatumGetJsonbP(fanout);
	JsonbIterator *it = JsonbIteratorInit(&jb->root);
	JsonbIteratorToken token;
	JsonbValue	v;
	int			n = 0;

	*ids = palloc((JB_ROOT_COUNT(jb) + 1) * sizeof(int64));
	while ((token = JsonbIteratorNext(&it, &v, true)) != WJB_DONE)
	{
		if (token == WJB_VALUE && v.type == jbvNumeric && n < JB_ROOT_COUNT(jb))
			(*ids)[n++] = DatumGetInt64(DirectFunctionCall1(numeric_int8,
															NumericGetDatum(v.val.numeric)));
	}
	return outbox_unique_ids(*ids, n);
}
