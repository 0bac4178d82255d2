/*-------------------------------------------------------------------------
 *
 * glob_fuzz.c
 *		Compares src/glob.c with a naive matcher on random pairs.
 *
 *	glob_fuzz [SEED [PAIRS]]
 *
 * The naive matcher follows the definition and nothing else: it recurses on
 * every "*".  A difference prints the pair and ends with 1; the seed printed
 * at the start repeats a run.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#undef printf					/* the server brings its own */

/* What glob.c needs of a server */
void *
palloc(Size size)
{
	void	   *p = malloc(size);

	if (p == NULL)
		abort();
	return p;
}

/* Length of a UTF-8 character */
static int
utf8_length(const char *p)
{
	unsigned char c = (unsigned char) *p;

	return c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
}

/* The definition of a pattern, without the leading ! */
static bool
naive_match(const char *p, const char *t)
{
	int			n = utf8_length(t);

	if (*p == '\0')
		return *t == '\0';
	if (*p == '*')
		return naive_match(p + 1, t) || (*t != '\0' && naive_match(p, t + n));
	if (*t == '\0')
		return false;
	if (*p == '?')
		return naive_match(p + 1, t + n);
	return strncmp(p, t, n) == 0 && naive_match(p + n, t + n);
}

/* ... with the rule for the extension's own types */
static bool
naive(const char *p, const char *t)
{
	if (strncmp(t, "outbox.", 7) == 0 && strncmp(p, "outbox.", 7) != 0)
		return false;
	return naive_match(p, t);
}

/* xorshift64: the same everywhere for one seed */
static uint64 state;

static int
pick(int n)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (int) ((state >> 11) % n);
}

/* A random text of at most max pieces, of few different ones so that many match */
static void
make(char *into, const char *const *pieces, int npieces, int max)
{
	int			n = pick(max + 1);

	into[0] = '\0';
	if (pick(16) == 0)
		strcat(into, "outbox.");
	while (n-- > 0)
		strcat(into, pieces[pick(npieces)]);
}

/* Seconds that one match takes */
static double
seconds(const char *pattern, int times, const char *text, int len)
{
	const char *error;
	OutboxPattern *parsed = outbox_glob_parse(pattern, strlen(pattern), &error);
	clock_t		start = clock();
	int			i;

	for (i = 0; i < times; i++)
	{
		if (outbox_glob_match(parsed, text, len, utf8_length))
			abort();
	}
	return (double) (clock() - start) / CLOCKS_PER_SEC / times;
}

int
main(int argc, char **argv)
{
	static const char *const type_pieces[] = {"a", "b", ".", "\xc3\xa9", "\xe2\x82\xac"};
	static const char *const pattern_pieces[] = {"a", "b", ".", "\xc3\xa9", "\xe2\x82\xac", "*", "*", "?"};
	uint64		seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64) time(NULL);
	long		pairs = argc > 2 ? atol(argv[2]) : 1000000;
	long		matches = 0;
	long		i;
	char		many[10000];
	char		pattern[300];

	state = seed * UINT64CONST(0x9E3779B97F4A7C15) + 1;
	printf("seed %llu, %ld pairs\n", (unsigned long long) seed, pairs);

	for (i = 0; i < pairs; i++)
	{
		char		type[64];
		char		glob[64];
		const char *error;
		OutboxPattern *parsed;
		bool		expected;
		bool		got;

		make(type, type_pieces, lengthof(type_pieces), 10);
		make(glob, pattern_pieces, lengthof(pattern_pieces), 10);
		parsed = outbox_glob_parse(glob, strlen(glob), &error);
		if (parsed == NULL)
		{
			if (glob[0] == '\0')
				continue;
			printf("FAILED: pattern \"%s\" is refused: %s\n", glob, error);
			return 1;
		}
		expected = naive(glob, type);
		got = outbox_glob_match(parsed, type, strlen(type), utf8_length);
		free(parsed);
		matches += expected;
		if (got != expected)
		{
			printf("FAILED: pattern \"%s\", type \"%s\": %s, but should be %s\n",
				   glob, type, got ? "match" : "no match", expected ? "match" : "no match");
			return 1;
		}
	}
	if (matches < pairs / 50 || matches > pairs / 2)
	{
		printf("FAILED: %ld matches: the pairs test little\n", matches);
		return 1;
	}
	printf("%ld matches, no difference\n", matches);

	/* patterns on which backtracking matchers never end */
	memset(many, 'a', sizeof(many));
	if (seconds("*a*a*a*a*a*a*a*a*b", 100, many, sizeof(many)) > 0.001 ||
		seconds("*a*a*a*a*a*a*a*a*b?", 100, many, sizeof(many)) > 0.001)
	{
		printf("FAILED: too slow\n");
		return 1;
	}
	/* the longest type and the worst pattern for it */
	memset(pattern, 'a', sizeof(pattern));
	pattern[0] = '*';
	strcpy(pattern + OUTBOX_MAX_TYPE / 2, "b?");
	printf("worst pair: %.0f us\n", seconds(pattern, 100, many, OUTBOX_MAX_TYPE) * 1e6);
	return seconds(pattern, 100, many, OUTBOX_MAX_TYPE) > 0.001;
}
