/*-------------------------------------------------------------------------
 *
 * capture.h
 *		What the files of capture share: the definition of a capture, and the
 *		columns of a captured table as JSON and as text.
 *
 *-------------------------------------------------------------------------
 */
#ifndef OUTBOX_CAPTURE_H
#define OUTBOX_CAPTURE_H

#include "outbox.h"

#include "executor/tuptable.h"
#include "nodes/execnodes.h"
#include "nodes/pg_list.h"
#include "utils/rel.h"

/* Operations of a capture */
#define OUTBOX_CAPTURE_INSERT 0x01
#define OUTBOX_CAPTURE_UPDATE 0x02
#define OUTBOX_CAPTURE_DELETE 0x04

/* A capture as its trigger's argument says it */
typedef struct OutboxCaptureDefinition
{
	char	   *type;
	char	   *subject;		/* NULL: the primary key */
	char	   *scope;			/* NULL: none */
	List	   *watch;			/* char *; NIL: every column */
	List	   *columns;		/* char *; NIL: every column */
	int			operations;
} OutboxCaptureDefinition;

/* A trigger of ours, as found in pg_trigger */
typedef struct OutboxFoundCapture
{
	Oid			oid;
	Oid			parent;			/* trigger of which it is a clone, or 0 */
	char	   *name;
	char		enabled;
	char	   *argument;
	OutboxCaptureDefinition def;
} OutboxFoundCapture;

/* A piece of a type, subject or scope */
typedef struct OutboxTemplatePart
{
	bool		is_column;
	bool		is_op;			/* {op}, in a type */
	char	   *text;			/* literal text, or the column's name */
} OutboxTemplatePart;

/* How a column becomes JSON */
typedef enum OutboxJsonRoute
{
	OUTBOX_JSON_BOOL,
	OUTBOX_JSON_INT2,
	OUTBOX_JSON_INT4,
	OUTBOX_JSON_INT8,
	OUTBOX_JSON_FLOAT4,
	OUTBOX_JSON_FLOAT8,
	OUTBOX_JSON_NUMERIC,
	OUTBOX_JSON_TEXT,
	OUTBOX_JSON_BYTEA,
	OUTBOX_JSON_DATETIME,
	OUTBOX_JSON_JSONB,
	OUTBOX_JSON_OUTPUT,			/* string of the type's output function */
	OUTBOX_JSON_CORE			/* to_jsonb() */
} OutboxJsonRoute;

/* How a column becomes text, as column::text would be */
typedef enum OutboxTextRoute
{
	OUTBOX_TEXT_TEXT,
	OUTBOX_TEXT_FLOAT4,
	OUTBOX_TEXT_FLOAT8,
	OUTBOX_TEXT_CAST,			/* a cast function of the server's own */
	OUTBOX_TEXT_OUTPUT
} OutboxTextRoute;

/* Settings on which the outcome may depend */
#define OUTBOX_PIN_SETTINGS 0x01
#define OUTBOX_PIN_MONETARY 0x02	/* apart, because setting it is slow */
#define OUTBOX_PIN_PATH 0x04	/* apart, because users' functions run under
								 * it */

typedef struct OutboxPins
{
	int			level;			/* GUC nest level; 0: nothing pinned */
	int			pinned;
} OutboxPins;

/* A column of a captured table, as the trigger needs it */
typedef struct OutboxColumn
{
	AttrNumber	attnum;
	int16		typlen;
	bool		typbyval;
	Oid			typid;			/* below domains */
	char	   *name;
	int			namelen;
	ExprState  *expression;		/* virtual generated column */
	OutboxJsonRoute json_route;
	int			json_pins;
	FmgrInfo	json_function;
	OutboxTextRoute text_route;
	int			text_pins;
	FmgrInfo	text_function;
} OutboxColumn;

/* A piece of a text that is made of a row */
typedef struct OutboxCapturePart
{
	const char *literal;		/* NULL: not literal */
	OutboxColumn *column;		/* NULL: not a column; neither: the operation */
} OutboxCapturePart;

typedef enum OutboxCaptureTextKind
{
	OUTBOX_CAPTURE_TEXT_NULL,
	OUTBOX_CAPTURE_TEXT_PARTS,	/* one after another */
	OUTBOX_CAPTURE_TEXT_ARRAY	/* a JSON array of them */
} OutboxCaptureTextKind;

typedef struct OutboxCaptureText
{
	OutboxCaptureTextKind kind;
	int			nparts;
	OutboxCapturePart *parts;
} OutboxCaptureText;

/* A capture, ready for use */
typedef struct OutboxCapture
{
	MemoryContext context;		/* everything lives here */
	int			users;			/* rows being recorded with it */
	bool		stale;			/* to be freed by the last user */

	char	   *schema;			/* of the captured root */
	char	   *table;
	int			natts;

	int			nwatched;
	OutboxColumn **watched;
	int			last_watched;	/* highest attnum */
	int			ncolumns;
	OutboxColumn **columns;		/* in the order of keys in jsonb */

	OutboxCaptureText type;
	OutboxCaptureText subject;
	OutboxCaptureText scope;
} OutboxCapture;

/* capture_definition.c */
extern bool outbox_list_has(List *names, const char *name);
extern List *outbox_capture_parts(const char *what, const char *text);
extern bool outbox_capture_parse(const char *argument, OutboxCaptureDefinition *def);
extern char *outbox_capture_argument(OutboxCaptureDefinition *def);
extern void outbox_capture_root(Oid *trigger, Oid *relid);
extern List *outbox_captures_of(Oid relid);
extern OutboxFoundCapture *outbox_capture_of_type(Oid relid, const char *type);
extern bool outbox_capture_exists(Oid trigger);
extern char *outbox_relation_name(Oid relid);

/* capture_cache.c */
extern OutboxCapture *outbox_capture_find(Relation rel, Trigger *trigger);
extern void outbox_capture_hold(OutboxCapture *capture);

/* capture_value.c */
extern OutboxColumn *outbox_column_make(Relation rel, AttrNumber attnum);
extern Datum outbox_column_value(OutboxColumn *column, TupleTableSlot *slot, bool *isnull);
extern bool outbox_column_changed(OutboxColumn *column, TupleTableSlot *oldslot,
								  TupleTableSlot *newslot);
extern void outbox_column_json(OutboxColumn *column, Datum value, OutboxPins *pins,
							   JsonbValue *result);
extern char *outbox_column_text(OutboxColumn *column, Datum value, OutboxPins *pins);
extern void outbox_unpin(OutboxPins *pins);

#endif							/* OUTBOX_CAPTURE_H */
