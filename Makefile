# outbox: a transactional outbox inside the server
#
#	make && make install && make installcheck
#
# installcheck starts its own servers (with the library preloaded) from the
# installation that PG_CONFIG names, so nothing needs to be running; like the
# server it refuses to run as root.  "test/run.sh" does it all.

MODULE_big = outbox
OBJS = \
	outbox.o \
	src/await.o \
	src/capture.o \
	src/capture_alter.o \
	src/capture_cache.o \
	src/capture_definition.o \
	src/capture_row.o \
	src/capture_value.o \
	src/check.o \
	src/check_jobs.o \
	src/claim_commit.o \
	src/claim_number.o \
	src/complete.o \
	src/consumer.o \
	src/control.o \
	src/dead.o \
	src/ddl.o \
	src/doorbell.o \
	src/filter.o \
	src/finish.o \
	src/glob.o \
	src/guc.o \
	src/handler.o \
	src/hint.o \
	src/ids.o \
	src/jobs.o \
	src/keep.o \
	src/keep_runners.o \
	src/launcher.o \
	src/lease.o \
	src/lease_many.o \
	src/lease_table.o \
	src/lease_use.o \
	src/limit.o \
	src/notify.o \
	src/owners.o \
	src/pass.o \
	src/poll.o \
	src/prune.o \
	src/record.o \
	src/redo.o \
	src/relay.o \
	src/replay.o \
	src/replay_jobs.o \
	src/retention.o \
	src/retention_events.o \
	src/rights.o \
	src/route.o \
	src/route_cache.o \
	src/runner.o \
	src/runner_claim.o \
	src/runner_job.o \
	src/shmem.o \
	src/spi.o \
	src/stats.o \
	src/subscribe.o \
	src/subscription.o \
	src/visit.o \
	src/want.o \
	src/worker.o

EXTENSION = outbox
DATA = outbox--1.0.sql
PGFILEDESC = "outbox - transactional outbox inside the server"

PG_CPPFLAGS = -I$(srcdir)/src

# The first test creates the extension, so it must run first.
REGRESS = install \
	$(filter-out install,$(patsubst $(srcdir)/sql/%.sql,%,$(sort $(wildcard $(srcdir)/sql/*.sql))))
REGRESS_OPTS = \
	--inputdir=$(srcdir) \
	--temp-instance=./tmp_check --encoding=UTF8 --no-locale \
	--temp-config=$(srcdir)/test/regress.conf

ISOLATION = $(patsubst $(srcdir)/test/isolation/specs/%.spec,%,$(sort $(wildcard $(srcdir)/test/isolation/specs/*.spec)))
ISOLATION_OPTS = \
	--inputdir=$(srcdir)/test/isolation \
	--temp-instance=./tmp_check_iso --encoding=UTF8 --no-locale \
	--temp-config=$(srcdir)/test/regress.conf

TAP_TESTS = 1
PROVE_TESTS = test/t/*.pl

# "make WERROR=1" is for our own checks.  It is never the default: a later
# compiler must not break the build of people who only want to use it.
ifdef WERROR
# Off: what the server's own headers and macros do not keep to, -Wclobbered
# because gcc takes PG_TRY for more dangerous than it is.
PG_CFLAGS += -Wall -Wextra -Werror -Wno-unused-parameter -Wno-sign-compare
ifneq ($(findstring clang,$(CC)),)
# The server was configured for gcc, and its flags come along.
PG_CFLAGS += -Wno-unknown-warning-option -Wno-ignored-attributes \
	-Wno-ignored-optimization-argument -Wno-unused-command-line-argument
else
PG_CFLAGS += -Wno-clobbered
endif
endif

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

ifneq ($(shell test $(MAJORVERSION) -ge 15 && echo ok),ok)
$(error outbox needs PostgreSQL 15 or later, and $(PG_CONFIG) is of $(VERSION))
endif

# Debian's PostgreSQL is built without dependency tracking.
$(OBJS) $(OBJS:.o=.bc): $(wildcard $(srcdir)/src/*.h)
