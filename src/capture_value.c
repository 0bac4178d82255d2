/*-------------------------------------------------------------------------
 *
 * capture_value.c
 *		Columns of a captured table as JSON and as text.
 *
 * The outcome is that of to_jsonb(column) and column::text under fixed
 * settings: one row gives one payload, whoever writes it.  Common types are
 * converted here without a look at settings or catalogs; the rest goes
 * through the server's own functions, with the settings pinned when the type
 * may depend on them.  All of it runs as the writer, since output functions
 * and casts may be users' code.
 *
 *-------------------------------------------------------------------------
 */
#include "capture.h"

#include "access/detoast.h"
#include "access/transam.h"
#include "catalog/pg_type.h"
#include "common/shortest_dec.h"
#include "executor/executor.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "optimizer/optimizer.h"
#include "parser/parse_coerce.h"
#include "pgtime.h"
#include "rewrite/rewriteHandler.h"
#include "utils/builtins.h"
#include "utils/bytea.h"
#include "utils/date.h"
#include "utils/datetime.h"
#include "utils/datum.h"
#include "utils/float.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/guc.h"
#include "utils/json.h"
#include "utils/lsyscache.h"
#include "utils/numeric.h"
#include "utils/typcache.h"
#include "utils/xml.h"

/* Set one setting until the GUC level ends. */
static void
pin_setting(const char *name, const char *value)
{
	(void) set_config_option(name, value, PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
}

/*
 * Pin the settings on which a conversion may depend until outbox_unpin.
 * Settings that are right already are left alone, since setting one costs
 * more than converting a value.  An error ends the level with its
 * (sub)transaction.
 */
static void
pin(OutboxPins *pins, int wanted)
{
	wanted &= ~pins->pinned;
	if (wanted == 0)
		return;
	if (pins->level == 0)
		pins->level = NewGUCNestLevel();
	if (wanted & OUTBOX_PIN_SETTINGS)
	{
		if (session_timezone == NULL ||
			strcmp(pg_get_timezone_name(session_timezone), "UTC") != 0)
			pin_setting("TimeZone", "UTC");
		if (DateStyle != USE_ISO_DATES)
			pin_setting("DateStyle", "ISO");
		if (IntervalStyle != INTSTYLE_POSTGRES)
			pin_setting("IntervalStyle", "postgres");
		if (bytea_output != BYTEA_OUTPUT_HEX)
			pin_setting("bytea_output", "hex");
		if (extra_float_digits < 1)
			pin_setting("extra_float_digits", "1");
		if (xmloption != XMLOPTION_CONTENT)
			pin_setting("xmloption", "content");
	}
	if ((wanted & OUTBOX_PIN_MONETARY) &&
		strcmp(GetConfigOption("lc_monetary", false, false), "C") != 0)
		pin_setting("lc_monetary", "C");
	pins->pinned |= wanted;
}

/* Let the session have its settings back. */
void
outbox_unpin(OutboxPins *pins)
{
	if (pins->level != 0)
		AtEOXact_GUC(true, pins->level);
	pins->level = 0;
	pins->pinned = 0;
}

/* Level under which names are printed in full and without needless quotes */
static int
pin_path(void)
{
	int			level = NewGUCNestLevel();

	pin_setting("search_path", "pg_catalog");
	pin_setting("quote_all_identifiers", "off");
	return level;
}

/*
 * On which settings may a type's JSON, or its text, depend?  What is not
 * known not to depend on any is taken to.
 */
static int
type_pins(Oid typid, bool json)
{
	Oid			element;
	int			pins;

	check_stack_depth();
	typid = getBaseType(typid);
	switch (typid)
	{
		case BOOLOID:
		case INT2OID:
		case INT4OID:
		case INT8OID:
		case NUMERICOID:
		case TEXTOID:
		case VARCHAROID:
		case BPCHAROID:
		case NAMEOID:
		case CHAROID:
		case UUIDOID:
		case JSONOID:
		case JSONBOID:
		case JSONPATHOID:
		case OIDOID:
		case XIDOID:
		case XID8OID:
		case CIDOID:
		case TIDOID:
		case PG_LSNOID:
		case INETOID:
		case CIDROID:
		case MACADDROID:
		case MACADDR8OID:
		case BITOID:
		case VARBITOID:
		case TIMEOID:
		case TIMETZOID:
		case TSVECTOROID:
		case TSQUERYOID:
		case INT2VECTOROID:
		case OIDVECTOROID:
		case INT4RANGEOID:
		case INT8RANGEOID:
		case NUMRANGEOID:
		case INT4MULTIRANGEOID:
		case INT8MULTIRANGEOID:
		case NUMMULTIRANGEOID:
			return 0;
		case DATEOID:
		case TIMESTAMPOID:
			return json ? 0 : OUTBOX_PIN_SETTINGS;
		case MONEYOID:
			return OUTBOX_PIN_MONETARY;
		case REGPROCOID:
		case REGPROCEDUREOID:
		case REGOPEROID:
		case REGOPERATOROID:
		case REGCLASSOID:
		case REGTYPEOID:
		case REGROLEOID:
		case REGNAMESPACEOID:
		case REGCONFIGOID:
		case REGDICTIONARYOID:
		case REGCOLLATIONOID:
			return OUTBOX_PIN_PATH;
		default:
			break;
	}

	element = get_element_type(typid);
	if (OidIsValid(element))
		return type_pins(element, json);
	switch (get_typtype(typid))
	{
		case TYPTYPE_ENUM:
			return 0;
		case TYPTYPE_COMPOSITE:
			/* it may get further attributes later, except that of a path */
			pins = OUTBOX_PIN_SETTINGS | OUTBOX_PIN_MONETARY;
			{
				TupleDesc	tupdesc = lookup_rowtype_tupdesc_copy(typid, -1);
				int			i;

				for (i = 0; i < tupdesc->natts; i++)
				{
					if (!TupleDescAttr(tupdesc, i)->attisdropped)
						pins |= type_pins(TupleDescAttr(tupdesc, i)->atttypid, json);
				}
			}
			return pins;
		case TYPTYPE_BASE:
			if (typid < FirstNormalObjectId)
				return OUTBOX_PIN_SETTINGS;
			break;
		default:
			break;
	}
	return OUTBOX_PIN_SETTINGS | OUTBOX_PIN_MONETARY;
}

/* Look up the output function of a type. */
static void
output_function(Oid typid, FmgrInfo *function)
{
	Oid			funcid;
	bool		isvarlena;

	getTypeOutputInfo(typid, &funcid, &isvarlena);
	fmgr_info_cxt(funcid, function, CurrentMemoryContext);
}

/* Decide how a column becomes JSON. */
static void
choose_json_route(OutboxColumn *column)
{
	Oid			typid = column->typid;
	Oid			castfunc;

	switch (typid)
	{
		case BOOLOID:
			column->json_route = OUTBOX_JSON_BOOL;
			return;
		case INT2OID:
			column->json_route = OUTBOX_JSON_INT2;
			return;
		case INT4OID:
			column->json_route = OUTBOX_JSON_INT4;
			return;
		case INT8OID:
			column->json_route = OUTBOX_JSON_INT8;
			return;
		case FLOAT4OID:
			column->json_route = OUTBOX_JSON_FLOAT4;
			return;
		case FLOAT8OID:
			column->json_route = OUTBOX_JSON_FLOAT8;
			return;
		case NUMERICOID:
			column->json_route = OUTBOX_JSON_NUMERIC;
			return;
		case TEXTOID:
		case VARCHAROID:
		case BPCHAROID:
			column->json_route = OUTBOX_JSON_TEXT;
			return;
		case BYTEAOID:
			column->json_route = OUTBOX_JSON_BYTEA;
			return;
		case DATEOID:
		case TIMESTAMPOID:
		case TIMESTAMPTZOID:
			column->json_route = OUTBOX_JSON_DATETIME;
			return;
		case JSONBOID:
			column->json_route = OUTBOX_JSON_JSONB;
			return;
		default:
			break;
	}

	column->json_pins = type_pins(typid, true);
	column->json_route = OUTBOX_JSON_CORE;
	switch (get_typtype(typid))
	{
		case TYPTYPE_BASE:
			if (typid < FirstNormalObjectId && typid != JSONOID &&
				!OidIsValid(get_element_type(typid)))
				column->json_route = OUTBOX_JSON_OUTPUT;
			break;
		case TYPTYPE_RANGE:
		case TYPTYPE_MULTIRANGE:
			if (typid < FirstNormalObjectId)
				column->json_route = OUTBOX_JSON_OUTPUT;
			break;
		case TYPTYPE_ENUM:
			/* as to_jsonb: a cast to json, if there is one, goes first */
			if (find_coercion_pathway(JSONOID, typid, COERCION_EXPLICIT,
									  &castfunc) != COERCION_PATH_FUNC)
				column->json_route = OUTBOX_JSON_OUTPUT;
			break;
		default:
			break;
	}

	if (column->json_route == OUTBOX_JSON_OUTPUT)
		output_function(typid, &column->json_function);
	else
	{
		/* to_jsonb learns the type of its argument from the call */
		Node	   *arg = (Node *) makeNullConst(typid, -1, InvalidOid);

		fmgr_info_cxt(F_TO_JSONB, &column->json_function, CurrentMemoryContext);
		fmgr_info_set_expr((Node *) makeFuncExpr(F_TO_JSONB, JSONBOID, list_make1(arg),
												 InvalidOid, InvalidOid,
												 COERCE_EXPLICIT_CALL),
						   &column->json_function);
	}
}

/* Decide how a column becomes text. */
static void
choose_text_route(OutboxColumn *column)
{
	Oid			typid = column->typid;
	Oid			castfunc;

	switch (typid)
	{
		case TEXTOID:
		case VARCHAROID:
			column->text_route = OUTBOX_TEXT_TEXT;
			return;
		case FLOAT4OID:
			column->text_route = OUTBOX_TEXT_FLOAT4;
			return;
		case FLOAT8OID:
			column->text_route = OUTBOX_TEXT_FLOAT8;
			return;
		default:
			break;
	}

	/* boolean, char(n), inet and so on are not what they look like */
	column->text_pins = type_pins(typid, false);
	if (typid < FirstNormalObjectId &&
		find_coercion_pathway(TEXTOID, typid, COERCION_EXPLICIT,
							  &castfunc) == COERCION_PATH_FUNC &&
		castfunc < FirstNormalObjectId && get_func_nargs(castfunc) == 1)
	{
		column->text_route = OUTBOX_TEXT_CAST;
		fmgr_info_cxt(castfunc, &column->text_function, CurrentMemoryContext);
		return;
	}
	column->text_route = OUTBOX_TEXT_OUTPUT;
	output_function(typid, &column->text_function);
}

/*
 * Expression of a virtual generated column, which is not in the stored row;
 * NULL for any other column.
 */
static ExprState *
generation_expression(Relation rel, AttrNumber attnum)
{
	/* 18: virtual generated columns */
#if PG_VERSION_NUM >= 180000
	if (TupleDescAttr(RelationGetDescr(rel), attnum - 1)->attgenerated ==
		ATTRIBUTE_GENERATED_VIRTUAL)
		return ExecInitExpr(expression_planner((Expr *) build_generation_expression(rel, attnum)),
							NULL);
#endif
	return NULL;
}

/*
 * What the trigger needs to know of a column, in the current memory context,
 * which must live as long as it is used.
 */
OutboxColumn *
outbox_column_make(Relation rel, AttrNumber attnum)
{
	Form_pg_attribute att = TupleDescAttr(RelationGetDescr(rel), attnum - 1);
	OutboxColumn *column = palloc0(sizeof(OutboxColumn));

	column->attnum = attnum;
	column->typlen = att->attlen;
	column->typbyval = att->attbyval;
	column->typid = getBaseType(att->atttypid);
	column->name = pstrdup(NameStr(att->attname));
	column->namelen = strlen(column->name);
	column->expression = generation_expression(rel, attnum);
	choose_json_route(column);
	choose_text_route(column);
	return column;
}

/* Value of a column in a row */
Datum
outbox_column_value(OutboxColumn *column, TupleTableSlot *slot, bool *isnull)
{
	ExprContext *econtext;

	if (column->expression == NULL)
		return slot_getattr(slot, column->attnum, isnull);

	/* goes with the row's memory, as its result must */
	econtext = CreateStandaloneExprContext();
	econtext->ecxt_scantuple = slot;
	return ExecEvalExpr(column->expression, econtext, isnull);
}

/*
 * Has a column another value in the new row?  Compared byte by byte: 1.0 and
 * 1.00 differ.  A value stored out of line is fetched only when the pointer
 * and not the size differs, so an untouched large value costs nothing.
 */
bool
outbox_column_changed(OutboxColumn *column, TupleTableSlot *oldslot, TupleTableSlot *newslot)
{
	bool		oldnull;
	bool		newnull;
	Datum		oldvalue = outbox_column_value(column, oldslot, &oldnull);
	Datum		newvalue = outbox_column_value(column, newslot, &newnull);

	if (oldnull || newnull)
		return oldnull != newnull;
	if (column->typbyval)
		return oldvalue != newvalue;
	if (column->typlen == -1 &&
		VARATT_IS_EXTERNAL_ONDISK(DatumGetPointer(oldvalue)) &&
		VARATT_IS_EXTERNAL_ONDISK(DatumGetPointer(newvalue)) &&
		memcmp(DatumGetPointer(oldvalue), DatumGetPointer(newvalue),
			   VARSIZE_EXTERNAL(DatumGetPointer(oldvalue))) == 0)
		return false;
	return !datum_image_eq(oldvalue, newvalue, false, column->typlen);
}

/* Refuse a value that no event could carry, before memory is spent on it. */
static void
check_size(OutboxColumn *column, Datum value)
{
	Size		size;

	if (column->typlen != -1)
		return;
	size = toast_raw_datum_size(value) - VARHDRSZ;
	if (size > OUTBOX_MAX_PAYLOAD)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("value is too large for an event"),
				 errdetail("It has %zu bytes; the limit is %d.",
						   size, OUTBOX_MAX_PAYLOAD)));
}

/* A string of JSON; the bytes are not copied. */
static void
json_string(JsonbValue *result, char *data, int len)
{
	result->type = jbvString;
	result->val.string.val = data;
	result->val.string.len = len;
}

/*
 * A number given as text, or a string when JSON has no such number: NaN and
 * the infinities.
 */
static void
json_number(JsonbValue *result, char *text)
{
	if (strchr(text, 'N') != NULL || strchr(text, 'I') != NULL)
	{
		json_string(result, text, strlen(text));
		return;
	}
	result->type = jbvNumeric;
	result->val.numeric =
		DatumGetNumeric(DirectFunctionCall3(numeric_in, CStringGetDatum(text),
											ObjectIdGetDatum(InvalidOid),
											Int32GetDatum(-1)));
}

/*
 * The value that an iterator has just begun, as a tree, which is the form in
 * which it can become part of another.  Order and uniqueness of keys are
 * those of the source.
 */
static void
json_tree(JsonbIterator **it, JsonbIteratorToken token, JsonbValue *value, JsonbValue *result)
{
	JsonbValue	item;
	int			n = 0;

	check_stack_depth();
	if (token == WJB_BEGIN_ARRAY)
	{
		result->type = jbvArray;
		result->val.array.rawScalar = false;
		result->val.array.elems = palloc(sizeof(JsonbValue) *
										 Max(value->val.array.nElems, 1));
		while ((token = JsonbIteratorNext(it, &item, false)) != WJB_END_ARRAY)
			json_tree(it, token, &item, &result->val.array.elems[n++]);
		result->val.array.nElems = n;
	}
	else if (token == WJB_BEGIN_OBJECT)
	{
		result->type = jbvObject;
		result->val.object.pairs = palloc0(sizeof(JsonbPair) *
										   Max(value->val.object.nPairs, 1));
		while (JsonbIteratorNext(it, &item, false) == WJB_KEY)
		{
			JsonbPair  *pair = &result->val.object.pairs[n++];

			pair->key = item;
			token = JsonbIteratorNext(it, &item, false);
			json_tree(it, token, &item, &pair->value);
		}
		result->val.object.nPairs = n;
	}
	else
		*result = *value;
}

/* A jsonb as part of another */
static void
json_embed(Jsonb *jsonb, JsonbValue *result)
{
	JsonbIterator *it;
	JsonbIteratorToken token;
	JsonbValue	value;

	if (JB_ROOT_IS_SCALAR(jsonb))
	{
		JsonbExtractScalar(&jsonb->root, result);
		return;
	}
	it = JsonbIteratorInit(&jsonb->root);
	token = JsonbIteratorNext(&it, &value, false);
	json_tree(&it, token, &value, result);
}

/* bytea in hex, whatever bytea_output says */
static char *
bytea_text(Datum value, int *len)
{
	bytea	   *bytes = DatumGetByteaPP(value);
	int			n = VARSIZE_ANY_EXHDR(bytes);
	char	   *text = palloc(2 * (Size) n + 2);

	text[		0] = '\\';
	text[		1] = 'x';

	*len = 2 + (int) hex_encode(VARDATA_ANY(bytes), n, text +2);
	return text;
}

/*
 * JSON of a column's value, which is not null; may point into the value.
 */
void
outbox_column_json(OutboxColumn *column, Datum value, OutboxPins *pins, JsonbValue *result)
{
	char	   *str;
	int			len;
	int			utc = 0;
	int			path = 0;

	check_size(column, value);
	switch (column->json_route)
	{
		case OUTBOX_JSON_BOOL:
			result->type = jbvBool;
			result->val.boolean = DatumGetBool(value);
			return;
		case OUTBOX_JSON_INT2:
			result->type = jbvNumeric;
			result->val.numeric = int64_to_numeric(DatumGetInt16(value));
			return;
		case OUTBOX_JSON_INT4:
			result->type = jbvNumeric;
			result->val.numeric = int64_to_numeric(DatumGetInt32(value));
			return;
		case OUTBOX_JSON_INT8:
			result->type = jbvNumeric;
			result->val.numeric = int64_to_numeric(DatumGetInt64(value));
			return;
		case OUTBOX_JSON_FLOAT4:
			str = palloc(FLOAT_SHORTEST_DECIMAL_LEN);
			float_to_shortest_decimal_buf(DatumGetFloat4(value), str);
			json_number(result, str);
			return;
		case OUTBOX_JSON_FLOAT8:
			str = palloc(DOUBLE_SHORTEST_DECIMAL_LEN);
			double_to_shortest_decimal_buf(DatumGetFloat8(value), str);
			json_number(result, str);
			return;
		case OUTBOX_JSON_NUMERIC:
			if (numeric_is_nan(DatumGetNumeric(value)) ||
				numeric_is_inf(DatumGetNumeric(value)))
				json_number(result,
							DatumGetCString(DirectFunctionCall1(numeric_out, value)));
			else
			{
				result->type = jbvNumeric;
				result->val.numeric = DatumGetNumeric(value);
			}
			return;
		case OUTBOX_JSON_TEXT:
			{
				text	   *string = DatumGetTextPP(value);

				json_string(result, VARDATA_ANY(string), VARSIZE_ANY_EXHDR(string));
			}
			return;
		case OUTBOX_JSON_BYTEA:
			str = bytea_text(value, &len);
			json_string(result, str, len);
			return;
		case OUTBOX_JSON_DATETIME:
			str = palloc(MAXDATELEN + 1);
			JsonEncodeDateTime(str, value, column->typid,
							   column->typid == TIMESTAMPTZOID ? &utc : NULL);
			json_string(result, str, strlen(str));
			return;
		case OUTBOX_JSON_JSONB:
			json_embed(DatumGetJsonbP(value), result);
			return;
		case OUTBOX_JSON_OUTPUT:
		case OUTBOX_JSON_CORE:
			break;
	}

	pin(pins, column->json_pins & ~OUTBOX_PIN_PATH);
	if (column->json_pins & OUTBOX_PIN_PATH)
		path = pin_path();
	if (column->json_route == OUTBOX_JSON_OUTPUT)
	{
		str = OutputFunctionCall(&column->json_function, value);
		json_string(result, str, strlen(str));
	}
	else
		json_embed(DatumGetJsonbP(FunctionCall1(&column->json_function, value)), result);
	if (path != 0)
		AtEOXact_GUC(true, path);
}

/* Text of a column's value, which is not null, as a C string of its own */
char *
outbox_column_text(OutboxColumn *column, Datum value, OutboxPins *pins)
{
	char	   *str;
	int			path = 0;

	check_size(column, value);
	switch (column->text_route)
	{
		case OUTBOX_TEXT_TEXT:
			return TextDatumGetCString(value);
		case OUTBOX_TEXT_FLOAT4:
			str = palloc(FLOAT_SHORTEST_DECIMAL_LEN);
			float_to_shortest_decimal_buf(DatumGetFloat4(value), str);
			return str;
		case OUTBOX_TEXT_FLOAT8:
			str = palloc(DOUBLE_SHORTEST_DECIMAL_LEN);
			double_to_shortest_decimal_buf(DatumGetFloat8(value), str);
			return str;
		case OUTBOX_TEXT_CAST:
		case OUTBOX_TEXT_OUTPUT:
			break;
	}

	pin(pins, column->text_pins & ~OUTBOX_PIN_PATH);
	if (column->text_pins & OUTBOX_PIN_PATH)
		path = pin_path();
	if (column->text_route == OUTBOX_TEXT_CAST)
		str = TextDatumGetCString(FunctionCall1(&column->text_function, value));
	else
		str = OutputFunctionCall(&column->text_function, value);
	if (path != 0)
		AtEOXact_GUC(true, path);
	return str;
}
