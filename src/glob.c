/*-------------------------------------------------------------------------
 *
 * glob.c
 *		Patterns of event types.
 *
 * "*" stands for any run of characters, dots included, "?" for one
 * character, and a leading "!" excludes.  Everything else stands for itself;
 * case counts, and the whole type must match.  There are no classes and no
 * escapes, because a type cannot hold any of these characters.
 *
 * Nothing here knows of the server: no state, no errors raised, and the
 * length of a character is asked of the caller.  test/glob.sh compiles this
 * file alone and compares it with a naive matcher.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

/* Types under this are the extension's own */
#define INTERNAL_PREFIX "outbox."
#define INTERNAL_PREFIX_LEN 7

/* Is this one of the extension's own types, or a pattern for them? */
static inline bool
is_internal(const char *name, int len)
{
	return len >= INTERNAL_PREFIX_LEN &&
		memcmp(name, INTERNAL_PREFIX, INTERNAL_PREFIX_LEN) == 0;
}

/* Length of the character at p, which never reaches beyond the end */
static inline int
character_length(const char *p, const char *end, OutboxCharLength char_length)
{
	int			len;

	if (!IS_HIGHBIT_SET(*p) || char_length == NULL)
		return 1;
	len = char_length(p);
	return len < 1 ? 1 : Min(len, (int) (end - p));
}

/*
 * Parse a pattern.  Returns NULL and says why in *error when it is none.
 *
 * What no type could ever match is refused, so that nobody waits for events
 * that cannot come.  Runs of "*" are made one.
 */
OutboxPattern *
outbox_glob_parse(const char *pattern, int len, const char **error)
{
	OutboxPattern *result;
	int			literal = 0;	/* bytes that a type must have at least */
	int			i;

	*error = NULL;
	result = palloc(offsetof(OutboxPattern, text) + len + 1);
	result->exclude = (len > 0 && pattern[0] == '!');
	result->len = 0;
	if (result->exclude)
	{
		pattern++;
		len--;
	}
	if (len == 0)
		*error = "A pattern must not be empty.";
	else if (pattern[0] == '!')
		*error = "Only one \"!\" may stand at the beginning of a pattern.";
	for (i = 0; i < len && *error == NULL; i++)
	{
		unsigned char c = (unsigned char) pattern[i];

		if (c == '[' || c == ']' || c == '\\')
			*error = "Patterns know \"*\", \"?\" and a leading \"!\", but neither classes nor escapes.";
		else if (c <= ' ' || c == 0x7f)
			*error = "Types of events have no spaces and no control characters.";
		if (c != '*')
			literal++;
		else if (result->len > 0 && result->text[result->len - 1] == '*')
			continue;
		result->text[result->len++] = (char) c;
	}
	if (*error == NULL && literal > OUTBOX_MAX_TYPE)
		*error = "The pattern is longer than the type of any event.";
	if (*error != NULL)
		return NULL;
	result->text[result->len] = '\0';
	result->internal = is_internal(result->text, result->len);
	return result;
}

/*
 * Does a pattern match the whole of a type?  Whether it excludes is for the
 * caller to look at.
 *
 * When a character does not fit, only the last "*" need take one more: what
 * an earlier one could take, the last can take too.  So there is one point to
 * go back to, no recursion, and at most len * pattern->len steps.
 */
bool
outbox_glob_match(const OutboxPattern *pattern, const char *type, int len,
				  OutboxCharLength char_length)
{
	const char *p = pattern->text;
	const char *pend = p + pattern->len;
	const char *t = type;
	const char *tend = type + len;
	const char *after_star = NULL;	/* in the pattern */
	const char *resume = NULL;	/* in the type: what that star has not taken */

	if (pattern->internal != is_internal(type, len))
		return false;

	/* most patterns that do not match can be told from their last byte */
	if (pend[-1] != '*' && pend[-1] != '?' && (len == 0 || pend[-1] != tend[-1]))
		return false;

	while (t < tend)
	{
		int			n = character_length(t, tend, char_length);

		if (p < pend && *p == '*')
		{
			after_star = ++p;
			if (p == pend)
				return true;
			resume = t;
		}
		else if (p < pend && *p == '?')
		{
			p++;
			t += n;
		}
		else if (pend - p >= n && memcmp(p, t, n) == 0)
		{
			p += n;
			t += n;
		}
		else if (after_star != NULL)
		{
			resume += character_length(resume, tend, char_length);
			t = resume;
			p = after_star;
		}
		else
			return false;
	}
	while (p < pend && *p == '*')
		p++;
	return p == pend;
}

/*
 * Does a list of patterns match a type: some pattern does, and none that
 * excludes?
 */
bool
outbox_glob_match_list(List *patterns, const char *type, int len,
					   OutboxCharLength char_length)
{
	bool		matched = false;
	ListCell   *lc;

	foreach(lc, patterns)
	{
		const OutboxPattern *pattern = (const OutboxPattern *) lfirst(lc);

		if (matched && !pattern->exclude)
			continue;
		if (!outbox_glob_match(pattern, type, len, char_length))
			continue;
		if (pattern->exclude)
			return false;
		matched = true;
	}
	return matched;
}
