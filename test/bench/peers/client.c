/*
 * The client side of the bench beside peers, for those that prescribe no client
 * of their own: the same program for each, so that none has a slower language.
 *
 *	client produce RATE SECONDS CONNECTIONS FILE STATEMENT
 *		business transactions, at random times (Poisson) at RATE a second;
 *		STATEMENT has the key of the transaction as $1.  FILE gets a line
 *		"KEY SENT RETURNED" for each: when COMMIT was sent and had returned.
 *	client consume [option ...] CLAIM DONE
 *		takes jobs until SIGTERM, or with --drain until there is none.
 *		CLAIM returns rows whose first three columns are key, id and token;
 *		DONE says :ids for the array of ids and :token for the token.  With
 *		--begin STATEMENT that statement returns the token, or null when there
 *		is nothing, and CLAIM is given it as $1.
 *	client relay [option ...] CLAIM INSERT MARK
 *		fans out: CLAIM, in a transaction with the other two, returns id, type
 *		and payload; INSERT is given arrays, MARK the ids.
 *	client latency FILE SUBSCRIBERS FROM TO CONSUMED ...
 *		joins what produce and consumers wrote, and checks that each key came
 *		exactly once to each subscriber.
 *
 * libpq's environment says where the server is.
 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <libpq-fe.h>

static volatile sig_atomic_t stopping;

static void
stop(int sig)
{
	(void) sig;
	stopping = 1;
}

static void
die(const char *what, PGconn *conn)
{
	fprintf(stderr, "client: %s: %s\n", what, conn ? PQerrorMessage(conn) : strerror(errno));
	exit(1);
}

static int64_t
now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void
sleep_until(int64_t when)
{
	struct timespec t = {when / 1000000000, when % 1000000000};

	while (clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &t, NULL) == EINTR && !stopping)
		;
}

static void
ignore(void *arg, const char *message)
{
	(void) arg;
	(void) message;
}

static PGconn *
open_connection(const char *name)
{
	const char *const keys[] = {"application_name", "dbname", NULL};
	const char *const values[] = {name, getenv("PGDATABASE"), NULL};
	PGconn	   *conn = PQconnectdbParams(keys, values, 0);

	if (PQstatus(conn) != CONNECTION_OK)
		die("connection", conn);
	PQsetNoticeProcessor(conn, ignore, NULL);
	return conn;
}

static void
run(PGconn *conn, const char *sql)
{
	PGresult   *res = PQexec(conn, sql);

	if (PQresultStatus(res) != PGRES_COMMAND_OK && PQresultStatus(res) != PGRES_TUPLES_OK)
		die(sql, conn);
	PQclear(res);
}

static void
prepare(PGconn *conn, const char *name, const char *sql)
{
	PGresult   *res = PQprepare(conn, name, sql, 0, NULL);

	if (PQresultStatus(res) != PGRES_COMMAND_OK)
		die(sql, conn);
	PQclear(res);
}

static PGresult *
execute(PGconn *conn, const char *name, int n, const char *const *args)
{
	PGresult   *res = PQexecPrepared(conn, name, n, args, NULL, NULL, 0);

	if (PQresultStatus(res) != PGRES_COMMAND_OK && PQresultStatus(res) != PGRES_TUPLES_OK)
		die(name, conn);
	return res;
}

/* a string that grows */
typedef struct
{
	char	   *s;
	size_t		len,
				size;
} Text;

static void
reserve(Text *t, size_t more)
{
	if (t->len + more + 1 > t->size)
	{
		t->size = 2 * (t->len + more + 1);
		if ((t->s = realloc(t->s, t->size)) == NULL)
			die("memory", NULL);
	}
}

static void
add(Text *t, const char *s)
{
	size_t		n = strlen(s);

	reserve(t, n);
	memcpy(t->s + t->len, s, n + 1);
	t->len += n;
}

/* add an element to the text of an array, which closes with finish() */
static void
add_element(Text *t, const char *s, int quote)
{
	add(t, t->len == 0 ? "{" : ",");
	if (!quote)
	{
		add(t, s);
		return;
	}
	reserve(t, 2 * strlen(s) + 2);
	t->s[t->len++] = '"';
	for (; *s; s++)
	{
		if (*s == '"' || *s == '\\')
			t->s[t->len++] = '\\';
		t->s[t->len++] = *s;
	}
	t->s[t->len++] = '"';
	t->s[t->len] = '\0';
}

static void
finish(Text *t)
{
	add(t, t->len == 0 ? "{}" : "}");
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* wait for a notification, or as long as it may take */
static void
await_notification(PGconn *conn, int timeout_ms)
{
	struct pollfd p = {PQsocket(conn), POLLIN, 0};
	PGnotify   *n;
	int			seen = 0;

	while ((n = PQnotifies(conn)) != NULL)
		PQfreemem(n), seen = 1;
	if (seen)
		return;
	poll(&p, 1, timeout_ms);
	if (!PQconsumeInput(conn))
		die("notification", conn);
	while ((n = PQnotifies(conn)) != NULL)
		PQfreemem(n);
}

/*
 * produce
 */
static struct
{
	double		rate;
	int64_t		next,
				end;
	long		key;
	const char *statement;
	FILE	   *out;
	uint64_t	random;
} p;

/* xorshift, seeded the same in every run */
static double
uniform(void)
{
	p.random ^= p.random << 13;
	p.random ^= p.random >> 7;
	p.random ^= p.random << 17;
	return ((p.random >> 11) + 1) / 9007199254740993.0;
}

static void *
produce_thread(void *arg)
{
	PGconn	   *conn = arg;
	char		key[24];
	const char *args[1] = {key};
	int64_t		when,
				sent,
				returned;

	for (;;)
	{
		pthread_mutex_lock(&mutex);
		when = p.next;
		p.next += (int64_t) (-log(uniform()) / p.rate * 1e9);
		/* who falls behind stops in time all the same, with fewer events */
		if (when >= p.end || now() >= p.end || stopping)
		{
			pthread_mutex_unlock(&mutex);
			return NULL;
		}
		snprintf(key, sizeof key, "%ld", ++p.key);
		pthread_mutex_unlock(&mutex);
		sleep_until(when);
		PQclear(execute(conn, "begin", 0, NULL));
		PQclear(execute(conn, "order", 0, NULL));
		PQclear(execute(conn, "record", 1, args));
		sent = now();
		PQclear(execute(conn, "commit", 0, NULL));
		returned = now();
		flockfile(p.out);
		fprintf(p.out, "%s %lld %lld\n", key, (long long) sent, (long long) returned);
		funlockfile(p.out);
	}
}

static int
produce(int argc, char **argv)
{
	int			n;
	pthread_t  *threads;
	PGconn	  **conns;

	if (argc != 6)
		return 2;
	p.rate = atof(argv[1]);
	n = atoi(argv[3]);
	p.statement = argv[5];
	p.random = UINT64_C(88172645463325252);
	if ((p.out = fopen(argv[4], "w")) == NULL)
		die(argv[4], NULL);
	threads = calloc(n, sizeof *threads);
	conns = calloc(n, sizeof *conns);
	for (int i = 0; i < n; i++)
	{
		conns[i] = open_connection("producer");
		prepare(conns[i], "begin", "BEGIN");
		prepare(conns[i], "order", "INSERT INTO orders (note) VALUES ('x')");
		prepare(conns[i], "record", p.statement);
		prepare(conns[i], "commit", "COMMIT");
	}
	p.next = now() + 100000000;
	p.end = p.next + (int64_t) (atof(argv[2]) * 1e9);
	for (int i = 0; i < n; i++)
		pthread_create(&threads[i], NULL, produce_thread, conns[i]);
	for (int i = 0; i < n; i++)
	{
		pthread_join(threads[i], NULL);
		PQfinish(conns[i]);
	}
	if (fclose(p.out) != 0)
		die(argv[4], NULL);
	printf("%ld\n", p.key);
	return 0;
}

/*
 * consume and relay
 */
static struct
{
	const char *subscriber,
			   *file,
			   *listen,
			   *wait,
			   *begin,
			   *setup,
			   *claim,
			   *done,
			   *insert,
			   *mark,
			   *route;
	int			threads,
				drain,
				poll_ms;
	long		until;
} o = {.subscriber = "s1",.threads = 1,.poll_ms = 1000};

/* name the parameters of DONE by number, and say which they are */
static int	takes_ids,
			takes_token;

static char *
numbered(const char *statement)
{
	Text		t = {0};

	for (const char *s = statement; *s; s++)
	{
		char		one[2] = {*s, 0};

		if (strncmp(s, ":ids", 4) == 0)
		{
			add(&t, "$1");
			takes_ids = 1;
			s += 3;
		}
		else if (strncmp(s, ":token", 6) == 0)
		{
			add(&t, strstr(statement, ":ids") ? "$2" : "$1");
			takes_token = 1;
			s += 5;
		}
		else
			add(&t, one);
	}
	return t.s;
}

static pthread_barrier_t barrier;
static int64_t first,
			last;
static long total;
static int	out = -1;

static void
flush(Text *t)
{
	if (out >= 0 && t->len > 0 && write(out, t->s, t->len) != (ssize_t) t->len)
		die("write", NULL);
	t->len = 0;
}

static void
account(long n, int64_t since)
{
	pthread_mutex_lock(&mutex);
	if (first == 0 || since < first)
		first = since;
	last = now();
	total += n;
	pthread_mutex_unlock(&mutex);
}

/* what to do when there was nothing to take */
static void
idle(PGconn *conn, Text *lines)
{
	flush(lines);
	if (o.wait)
		PQclear(execute(conn, "wait", 0, NULL));
	else if (o.listen)
		await_notification(conn, o.poll_ms);
	else
		usleep(o.poll_ms * 1000);
}

static void *
consume_thread(void *arg)
{
	PGconn	   *conn = open_connection("consumer");
	Text		ids = {0},
				lines = {0};
	int64_t		flushed = now();

	(void) arg;
	if (o.setup)
		run(conn, o.setup);
	if (o.listen)
	{
		Text		t = {0};

		add(&t, "LISTEN ");
		add(&t, o.listen);
		run(conn, t.s);
	}
	if (o.wait)
		prepare(conn, "wait", o.wait);
	if (o.begin)
		prepare(conn, "begin", o.begin);
	prepare(conn, "claim", o.claim);
	prepare(conn, "done", o.done);
	pthread_barrier_wait(&barrier);
	while (!stopping)
	{
		PGresult   *res;
		int64_t		since = now(),
					got;
		int			n;
		char		token[64] = "";
		const char *args[2] = {NULL, token};

		if (o.begin)
		{
			res = execute(conn, "begin", 0, NULL);
			if (PQntuples(res) == 0 || PQgetisnull(res, 0, 0))
			{
				PQclear(res);
				if (o.drain)
					break;
				idle(conn, &lines);
				continue;
			}
			snprintf(token, sizeof token, "%s", PQgetvalue(res, 0, 0));
			PQclear(res);
			res = execute(conn, "claim", 1, args + 1);
		}
		else
			res = execute(conn, "claim", 0, NULL);
		got = now();
		n = PQntuples(res);
		if (n == 0 && !o.begin)
		{
			PQclear(res);
			if (o.drain)
				break;
			idle(conn, &lines);
			continue;
		}
		ids.len = 0;
		for (int i = 0; i < n; i++)
		{
			char		line[128];

			snprintf(line, sizeof line, "%s %s %lld\n", o.subscriber, PQgetvalue(res, i, 0), (long long) got);
			add(&lines, line);
			add_element(&ids, PQgetvalue(res, i, 1), 0);
			if (i == 0 && !o.begin)
				snprintf(token, sizeof token, "%s", PQgetvalue(res, i, 2));
		}
		finish(&ids);
		PQclear(res);
		args[0] = ids.s;
		PQclear(execute(conn, "done", takes_ids + takes_token, takes_ids ? args : args + 1));
		if (n > 0)
			account(n, since);
		if (!o.drain && got - flushed > 50000000)
		{
			flush(&lines);
			flushed = got;
		}
	}
	flush(&lines);
	PQfinish(conn);
	return NULL;
}

/* subscriptions that a relay's own cache has, by type */
static struct
{
	char	   *type;
	int			id;
}		   *routes;
static int	n_routes;

static void *
relay_thread(void *arg)
{
	PGconn	   *conn = open_connection("relay");
	Text		ids = {0},
				texts = {0},
				subscriptions = {0},
				pairs = {0},
				none = {0};
	PGresult   *res;
	char		cached[256] = "";
	int			matched[4096],
				n_matched = 0;

	(void) arg;
	if (o.setup)
		run(conn, o.setup);
	if (o.listen)
	{
		add(&texts, "LISTEN ");
		add(&texts, o.listen);
		run(conn, texts.s);
	}
	if (o.route)
	{
		pthread_mutex_lock(&mutex);
		if (routes == NULL)
		{
			res = PQexec(conn, o.route);
			if (PQresultStatus(res) != PGRES_TUPLES_OK)
				die(o.route, conn);
			n_routes = PQntuples(res);
			routes = calloc(n_routes + 1, sizeof *routes);
			for (int i = 0; i < n_routes; i++)
			{
				routes[i].id = atoi(PQgetvalue(res, i, 0));
				routes[i].type = strdup(PQgetvalue(res, i, 1));
			}
			PQclear(res);
		}
		pthread_mutex_unlock(&mutex);
	}
	prepare(conn, "begin", "BEGIN");
	prepare(conn, "commit", "COMMIT");
	prepare(conn, "claim", o.claim);
	prepare(conn, "insert", o.insert);
	prepare(conn, "mark", o.mark);
	pthread_barrier_wait(&barrier);
	while (!stopping)
	{
		int64_t		since = now();
		int			n;
		const char *args[3];

		PQclear(execute(conn, "begin", 0, NULL));
		res = execute(conn, "claim", 0, NULL);
		n = PQntuples(res);
		if (n == 0)
		{
			PQclear(res);
			PQclear(execute(conn, "commit", 0, NULL));
			if (o.drain)
				break;
			idle(conn, &none);
			continue;
		}
		ids.len = texts.len = subscriptions.len = pairs.len = 0;
		for (int i = 0; i < n; i++)
		{
			char	   *id = PQgetvalue(res, i, 0);
			char	   *type = PQgetvalue(res, i, 1);

			add_element(&ids, id, 0);
			if (!o.route)
			{
				add_element(&texts, PQgetvalue(res, i, 2), 1);
				continue;
			}
			if (strcmp(cached, type) != 0)
			{
				snprintf(cached, sizeof cached, "%s", type);
				n_matched = 0;
				for (int r = 0; r < n_routes && n_matched < 4096; r++)
					if (strcmp(routes[r].type, type) == 0)
						matched[n_matched++] = routes[r].id;
			}
			for (int m = 0; m < n_matched; m++)
			{
				char		number[16];

				snprintf(number, sizeof number, "%d", matched[m]);
				add_element(&subscriptions, number, 0);
				add_element(&pairs, id, 0);
			}
		}
		PQclear(res);
		finish(&ids);
		if (o.route)
		{
			finish(&subscriptions);
			finish(&pairs);
			args[0] = subscriptions.s;
			args[1] = pairs.s;
			PQclear(execute(conn, "insert", 2, args));
		}
		else
		{
			finish(&texts);
			args[0] = texts.s;
			PQclear(execute(conn, "insert", 1, args));
		}
		args[0] = ids.s;
		PQclear(execute(conn, "mark", 1, args));
		PQclear(execute(conn, "commit", 0, NULL));
		account(n, since);
	}
	PQfinish(conn);
	return NULL;
}

static int
work(int argc, char **argv, int relay)
{
	static const struct option options[] = {
		{"subscriber", required_argument, NULL, 's'},
		{"file", required_argument, NULL, 'f'},
		{"listen", required_argument, NULL, 'l'},
		{"wait", required_argument, NULL, 'w'},
		{"begin", required_argument, NULL, 'b'},
		{"setup", required_argument, NULL, 'S'},
		{"route", required_argument, NULL, 'r'},
		{"threads", required_argument, NULL, 't'},
		{"poll", required_argument, NULL, 'p'},
		{"drain", no_argument, NULL, 'd'},
		{NULL, 0, NULL, 0}};
	pthread_t	threads[64];
	int			c;

	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1)
		switch (c)
		{
			case 's': o.subscriber = optarg; break;
			case 'f': o.file = optarg; break;
			case 'l': o.listen = optarg; break;
			case 'w': o.wait = optarg; break;
			case 'b': o.begin = optarg; break;
			case 'S': o.setup = optarg; break;
			case 'r': o.route = optarg; break;
			case 't': o.threads = atoi(optarg); break;
			case 'p': o.poll_ms = atoi(optarg); break;
			case 'd': o.drain = 1; break;
			default: return 2;
		}
	if (argc - optind != (relay ? 3 : 2) || o.threads < 1 || o.threads > 64)
		return 2;
	o.claim = argv[optind];
	if (relay)
	{
		o.insert = argv[optind + 1];
		o.mark = argv[optind + 2];
	}
	else
		o.done = numbered(argv[optind + 1]);
	if (o.file && (out = open(o.file, O_WRONLY | O_CREAT | O_APPEND, 0644)) < 0)
		die(o.file, NULL);
	pthread_barrier_init(&barrier, NULL, o.threads + 1);
	for (int i = 0; i < o.threads; i++)
		pthread_create(&threads[i], NULL, relay ? relay_thread : consume_thread, NULL);
	pthread_barrier_wait(&barrier);
	if (!o.drain)
	{
		printf("ready\n");
		fflush(stdout);
	}
	for (int i = 0; i < o.threads; i++)
		pthread_join(threads[i], NULL);
	/* seconds from the first claim to the last commit, and how many */
	printf("%.6f %ld\n", (last - first) / 1e9, total);
	return 0;
}

/*
 * latency
 */
static int
compare(const void *a, const void *b)
{
	double		x = *(const double *) a,
				y = *(const double *) b;

	return (x > y) - (x < y);
}

static void
quantiles(double *values, long n)
{
	const double q[] = {0.5, 0.99, 0.999};

	qsort(values, n, sizeof *values, compare);
	for (int i = 0; i < 3; i++)
		printf(" %.3f", n ? values[(long) fmin(n - 1, q[i] * n)] : NAN);
}

static int
latency(int argc, char **argv)
{
	long		n = 0,
				size = 1024,
				key,
				missing = 0,
				twice = 0,
				strange = 0,
				used = 0,
				receipts = 0;
	long long	sent,
				returned,
				at,
				begin = 0;
	long long  *times = malloc(2 * size * sizeof *times);
	long long  *came;
	int			subscribers,
				s;
	double		from,
				to,
			   *values[2];
	FILE	   *f;

	if (argc < 6)
		return 2;
	subscribers = atoi(argv[2]);
	from = atof(argv[3]);
	to = atof(argv[4]);
	if ((f = fopen(argv[1], "r")) == NULL)
		die(argv[1], NULL);
	memset(times, 0, 2 * size * sizeof *times);
	while (fscanf(f, "%ld %lld %lld", &key, &sent, &returned) == 3)
	{
		while (key >= size)
		{
			times = realloc(times, 4 * size * sizeof *times);
			memset(times + 2 * size, 0, 2 * size * sizeof *times);
			size *= 2;
		}
		times[2 * key] = sent;
		times[2 * key + 1] = returned;
		if (key > n)
			n = key;
		if (begin == 0 || sent < begin)
			begin = sent;
	}
	fclose(f);
	came = calloc((n + 1) * subscribers, sizeof *came);
	for (int i = 5; i < argc; i++)
	{
		if ((f = fopen(argv[i], "r")) == NULL)
			die(argv[i], NULL);
		while (fscanf(f, " s%d %ld %lld", &s, &key, &at) == 3)
		{
			if (s < 1 || s > subscribers || key < 1 || key > n || times[2 * key] == 0)
				strange++;
			else if (came[key * subscribers + s - 1])
				twice++;
			else
				came[key * subscribers + s - 1] = at;
			if ((at - begin) / 1e9 >= from && (at - begin) / 1e9 < to)
				receipts++;
		}
		if (!feof(f))
			strange++;
		fclose(f);
	}
	values[0] = malloc((n * subscribers + 1) * sizeof(double));
	values[1] = malloc((n * subscribers + 1) * sizeof(double));
	for (key = 1; key <= n; key++)
		for (s = 0; s < subscribers; s++)
		{
			if (times[2 * key] == 0 || came[key * subscribers + s] == 0)
			{
				missing++;
				continue;
			}
			/* the time after the start in which it was committed */
			if ((times[2 * key] - begin) / 1e9 < from || (times[2 * key] - begin) / 1e9 >= to)
				continue;
			/* a consumer may have it before the producer has been told */
			values[0][used] = fmax(0, (came[key * subscribers + s] - times[2 * key + 1]) / 1e6);
			values[1][used++] = (came[key * subscribers + s] - times[2 * key]) / 1e6;
		}
	if (missing || twice || strange || n == 0)
	{
		fprintf(stderr, "client: of %ld keys for %d subscribers %ld are missing, %ld came twice, %ld are strange\n",
				n, subscribers, missing, twice, strange);
		return 1;
	}
	printf("%ld", used);
	quantiles(values[0], used);
	quantiles(values[1], used);
	/* and what came in that time, a second */
	printf(" %.0f\n", receipts / (to - from));
	return 0;
}

int
main(int argc, char **argv)
{
	struct sigaction action = {.sa_handler = stop};
	int			status = 2;

	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGINT, &action, NULL);
	if (argc >= 2)
	{
		if (strcmp(argv[1], "produce") == 0)
			status = produce(argc - 1, argv + 1);
		else if (strcmp(argv[1], "consume") == 0)
			status = work(argc - 1, argv + 1, 0);
		else if (strcmp(argv[1], "relay") == 0)
			status = work(argc - 1, argv + 1, 1);
		else if (strcmp(argv[1], "latency") == 0)
			status = latency(argc - 1, argv + 1);
	}
	if (status == 2)
		fprintf(stderr, "usage: client produce | consume | relay | latency ...; see client.c\n");
	return status;
}
