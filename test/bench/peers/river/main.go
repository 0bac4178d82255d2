// River at work, through its client.
//
//	river migrate
//	river version
//	river sql PAYLOAD SUBSCRIBER ...            what InsertManyTx executes for a job of each: the statements with their parameters in them
//	river load FIRST N                          N jobs of s1
//	river relay RELAYS CLAIM MARK SUBSCRIBER ... events into jobs
//	river consume FILE N                        N jobs of s1; calls into FILE
//	river work FILE RETENTION SUBSCRIBER ...    jobs as they come, until SIGTERM; RETENTION in seconds, 0 for the default
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// Args is a job: the payload of its event.
type Args struct{ Payload json.RawMessage }

func (Args) Kind() string                   { return "event" }
func (a Args) MarshalJSON() ([]byte, error) { return a.Payload, nil }
func (a *Args) UnmarshalJSON(payload []byte) error {
	a.Payload = append(a.Payload[:0], payload...)
	return nil
}

// Worker does nothing but to note the call, "SUBSCRIBER KEY NANOSECONDS".
type Worker struct {
	river.WorkerDefaults[Args]
	mutex sync.Mutex
	lines []byte
	file  *os.File
}

func (w *Worker) Work(_ context.Context, job *river.Job[Args]) error {
	at := time.Now().UnixNano()
	var payload struct{ Key string }
	if err := json.Unmarshal(job.Args.Payload, &payload); err != nil {
		return err
	}
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.lines = fmt.Appendf(w.lines, "%s %s %d\n", job.Queue, payload.Key, at)
	return nil
}

func (w *Worker) flush() {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	_, err := w.file.Write(w.lines)
	check(err)
	w.lines = w.lines[:0]
}

func newWorker(path string) *Worker {
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	check(err)
	return &Worker{file: file}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	check(err)
	return n
}

// setting is a number that the environment may change.
func setting(name string, otherwise int) int {
	if s, ok := os.LookupEnv(name); ok {
		return number(s)
	}
	return otherwise
}

func newClient(pool *pgxpool.Pool, config *river.Config) *river.Client[pgx.Tx] {
	config.Logger = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	client, err := river.NewClient(riverpgxv5.New(pool), config)
	check(err)
	return client
}

// where to is said by the environment
func newPool(ctx context.Context, tracer pgx.QueryTracer) *pgxpool.Pool {
	config, err := pgxpool.ParseConfig("")
	check(err)
	config.MaxConns = int32(setting("RIVER_CONNECTIONS", 10))
	config.ConnConfig.Tracer = tracer
	pool, err := pgxpool.NewWithConfig(ctx, config)
	check(err)
	return pool
}

// sqlTracer prints statements, with their parameters as literals.
type sqlTracer struct{ on bool }

var parameter = regexp.MustCompile(`\$[0-9]+`)

func (t *sqlTracer) TraceQueryStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if !t.on || len(data.Args) == 0 {
		return ctx
	}
	t.on = false
	description, err := conn.Prepare(ctx, "", data.SQL)
	check(err)
	t.on = true
	text := parameter.ReplaceAllStringFunc(data.SQL, func(name string) string {
		arg := data.Args[number(name[1:])-1]
		if times, ok := arg.([]time.Time); ok {
			return "ARRAY[now()" + strings.Repeat(", now()", len(times)-1) + "]"
		}
		literal, err := conn.TypeMap().Encode(description.ParamOIDs[number(name[1:])-1], pgx.TextFormatCode, arg, nil)
		check(err)
		if literal == nil {
			return "NULL"
		}
		// pgbench takes ":name" for a variable
		return "'" + strings.ReplaceAll(strings.ReplaceAll(string(literal), "'", "''"), `":`, `": `) + "'"
	})
	fmt.Println(text + ";")
	return ctx
}
func (t *sqlTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func jobFor(subscriber string, payload json.RawMessage) river.InsertManyParams {
	return river.InsertManyParams{Args: Args{payload}, InsertOpts: &river.InsertOpts{Queue: subscriber}}
}

func printSQL(ctx context.Context, payload string, subscribers []string) {
	tracer := &sqlTracer{}
	pool := newPool(ctx, tracer)
	client := newClient(pool, &river.Config{})
	tx, err := pool.Begin(ctx)
	check(err)
	var jobs []river.InsertManyParams
	for _, s := range subscribers {
		jobs = append(jobs, jobFor(s, json.RawMessage(payload)))
	}
	// what it asks of the server once and keeps is no part of it
	savepoint, err := tx.Begin(ctx)
	check(err)
	_, err = client.InsertManyTx(ctx, savepoint, jobs)
	check(err)
	check(savepoint.Rollback(ctx))
	// with a limiter of its own, since a client notifies only now and then
	client = newClient(pool, &river.Config{})
	tracer.on = true
	_, err = client.InsertManyTx(ctx, tx, jobs)
	check(err)
	tracer.on = false
	check(tx.Rollback(ctx))
	pool.Close()
}

func load(ctx context.Context, first, n int) {
	pool := newPool(ctx, nil)
	client := newClient(pool, &river.Config{})
	for i := 0; i < n; i += 10000 {
		var jobs []river.InsertManyParams
		for k := i; k < n && k < i+10000; k++ {
			jobs = append(jobs, jobFor("s1", json.RawMessage(fmt.Sprintf(`{"total": 100, "key": "%d"}`, first+k))))
		}
		_, err := client.InsertManyFast(ctx, jobs)
		check(err)
	}
	pool.Close()
}

func relay(ctx context.Context, relays int, claim, mark string, subscribers []string) {
	pool := newPool(ctx, nil)
	client := newClient(pool, &river.Config{})
	conns := make([]*pgxpool.Conn, relays)
	for i := range conns {
		var err error
		conns[i], err = pool.Acquire(ctx)
		check(err)
	}
	t0 := time.Now()
	var all sync.WaitGroup
	for _, conn := range conns {
		all.Go(func() {
			for relayBatch(ctx, client, conn, claim, mark, subscribers) {
			}
		})
	}
	all.Wait()
	fmt.Printf("%.6f\n", time.Since(t0).Seconds())
	for _, conn := range conns {
		conn.Release()
	}
	pool.Close()
}

// relayBatch is a transaction of the relay; false if no event waits.
func relayBatch(ctx context.Context, client *river.Client[pgx.Tx], conn *pgxpool.Conn, claim, mark string, subscribers []string) bool {
	tx, err := conn.Begin(ctx)
	check(err)
	rows, err := tx.Query(ctx, claim)
	check(err)
	var ids []int64
	var jobs []river.InsertManyParams
	for rows.Next() {
		var id int64
		var kind string
		var payload []byte
		check(rows.Scan(&id, &kind, &payload))
		ids = append(ids, id)
		// the payload is an object: the event's number goes into it
		args := fmt.Appendf(nil, `{"event": %d, %s`, id, payload[1:])
		for _, s := range subscribers {
			jobs = append(jobs, jobFor(s, args))
		}
	}
	check(rows.Err())
	if len(ids) == 0 {
		check(tx.Rollback(ctx))
		return false
	}
	_, err = client.InsertManyFastTx(ctx, tx, jobs)
	check(err)
	_, err = tx.Exec(ctx, mark, ids)
	check(err)
	check(tx.Commit(ctx))
	return true
}

func consume(ctx context.Context, path string, n int) {
	worker := newWorker(path)
	workers := river.NewWorkers()
	river.AddWorker(workers, worker)
	pool := newPool(ctx, nil)
	client := newClient(pool, &river.Config{
		FetchCooldown:     time.Duration(setting("RIVER_COOLDOWN", 2)) * time.Millisecond,
		FetchPollInterval: 20 * time.Millisecond,
		Queues:            map[string]river.QueueConfig{"s1": {MaxWorkers: setting("RIVER_WORKERS", 2000)}},
		Workers:           workers,
	})
	completed, cancel := client.SubscribeConfig(&river.SubscribeConfig{ChanSize: n + 1, Kinds: []river.EventKind{river.EventKindJobCompleted}})
	check(pool.Ping(ctx))
	t0 := time.Now()
	check(client.Start(ctx))
	for range n {
		<-completed
	}
	fmt.Printf("%.6f\n", time.Since(t0).Seconds())
	cancel()
	check(client.Stop(ctx))
	worker.flush()
	pool.Close()
}

func work(ctx context.Context, path string, retention int, subscribers []string) {
	worker := newWorker(path)
	workers := river.NewWorkers()
	river.AddWorker(workers, worker)
	pool := newPool(ctx, nil)
	queues := map[string]river.QueueConfig{}
	for _, s := range subscribers {
		queues[s] = river.QueueConfig{MaxWorkers: setting("RIVER_LATENCY_WORKERS", 100)}
	}
	client := newClient(pool, &river.Config{
		CompletedJobRetentionPeriod: time.Duration(retention) * time.Second,
		FetchCooldown:               time.Duration(setting("RIVER_LATENCY_COOLDOWN", 1)) * time.Millisecond,
		Queues:                      queues,
		Workers:                     workers,
	})
	check(client.Start(ctx))
	fmt.Println("ready")
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	every := time.NewTicker(100 * time.Millisecond)
	for running := true; running; {
		select {
		case <-every.C:
			worker.flush()
		case <-stop:
			running = false
		}
	}
	check(client.Stop(ctx))
	worker.flush()
	pool.Close()
}

func main() {
	ctx := context.Background()
	args := os.Args[1:]
	switch {
	case len(args) == 1 && args[0] == "migrate":
		pool := newPool(ctx, nil)
		migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Logger: slog.New(slog.DiscardHandler)})
		check(err)
		_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
		check(err)
		pool.Close()
	case len(args) == 1 && args[0] == "version":
		info, _ := debug.ReadBuildInfo()
		versions := map[string]string{}
		for _, d := range info.Deps {
			versions[d.Path] = strings.TrimPrefix(d.Version, "v")
		}
		fmt.Printf("River %s (pgx %s, %s)\n", versions["github.com/riverqueue/river"], versions["github.com/jackc/pgx/v5"],
			strings.Replace(runtime.Version(), "go", "go ", 1))
	case len(args) > 2 && args[0] == "sql":
		printSQL(ctx, args[1], args[2:])
	case len(args) == 3 && args[0] == "load":
		load(ctx, number(args[1]), number(args[2]))
	case len(args) > 4 && args[0] == "relay":
		relay(ctx, number(args[1]), args[2], args[3], args[4:])
	case len(args) == 3 && args[0] == "consume":
		consume(ctx, args[1], number(args[2]))
	case len(args) > 3 && args[0] == "work":
		work(ctx, args[1], number(args[2]), args[3:])
	default:
		fmt.Fprintln(os.Stderr, "usage: see main.go")
		os.Exit(2)
	}
}
