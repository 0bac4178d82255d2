// pg-boss at work, through its library.
//
//   main.mjs setup poll|notify SUBSCRIBER ...  the schema and a queue for each
//   main.mjs sql PAYLOAD SUBSCRIBER ...        what send() executes for each: the statement with its parameter in it
//   main.mjs relay PROCESSES CLAIM MARK SUBSCRIBER ...   events into jobs
//   main.mjs consume PROCESSES FILE N kept|deleted  N jobs of s1; calls into FILE
//   main.mjs work FILE poll|notify SUBSCRIBER ...  jobs as they come, until SIGTERM

import { setTimeout as sleep } from 'node:timers/promises'
import { Calls, done, finish, now, relay, require, together } from '../npm/bench.mjs'

const { PgBoss } = require('pg-boss')
const { PGHOST, PGDATABASE, PGUSER, PGPORT, PGBOSS_RETENTION } = process.env
const batchSize = Number(process.env.BATCH_SIZE ?? 1000)
const localConcurrency = Number(process.env.LOCAL_CONCURRENCY ?? 1)

const start = async (options) => {
  const boss = new PgBoss({ host: PGHOST, database: PGDATABASE, user: PGUSER, port: Number(PGPORT), ...options })
  boss.on('error', (e) => console.error(e.message))
  await boss.start()
  return boss
}
// what only enqueues has no upkeep to do
const client = { supervise: false, schedule: false }
const stop = (boss) => boss.stop({ graceful: true, timeout: 10000 })

const [mode, ...args] = process.argv.slice(2)

if (mode === 'setup') {
  const [wakeup, ...subscribers] = args
  const boss = await start(client)
  for (const s of subscribers) await boss.createQueue(s, { notify: wakeup === 'notify' })
  await stop(boss)
}

if (mode === 'sql') {
  const [payload, ...subscribers] = args
  const boss = await start(client)
  for (const s of subscribers) {
    await boss.send(s, JSON.parse(payload), {
      db: {
        executeSql: async (text, [jobs]) => {
          // pgbench takes ":name" for a variable
          console.log(text.replaceAll('$1', () => `'${jobs.replaceAll("'", "''").replaceAll('":', '": ')}'`) + ';')
          return { rows: [{ id: null }] }
        }
      }
    })
  }
  await stop(boss)
}

if (mode === 'relay') {
  const [processes, claim, mark, ...subscribers] = args
  await together(Number(processes), async (begin) => {
    const boss = await start(client)
    const times = await relay(claim, mark, begin, async (connection, events) => {
      const db = { executeSql: (text, values) => connection.query(text, values) }
      const jobs = events.map((e) => ({ data: { ...e.payload, event: e.id } }))
      for (const s of subscribers) await boss.insert(s, jobs, { db })
    })
    await stop(boss)
    return times
  })
}

if (mode === 'consume') {
  const [processes, file, n, variant] = args
  await together(Number(processes), async (begin) => {
    const calls = new Calls(file)
    const boss = await start({ schedule: false, max: localConcurrency + 2 })
    await begin()
    const t0 = now()
    await boss.work('s1', { batchSize, localConcurrency, burstWhenBatchFull: true, pollingIntervalSeconds: 0.5 }, async (jobs) => {
      for (const job of jobs) calls.add('s1', job.data.key)
      if (variant === 'deleted') await boss.deleteJob('s1', jobs.map((job) => job.id))
      done(jobs.length)
    })
    await finish()
    // a worker has no jobs in hand any more when their completion is committed
    while (boss.getWipData().some((w) => w.count > 0)) await sleep(1)
    const t1 = now()
    calls.flush()
    await stop(boss)
    return [t0, t1]
  }, Number(n))
}

if (mode === 'work') {
  const [file, wakeup, ...subscribers] = args
  const calls = new Calls(file, 100)
  // as often as the retention has parts of a fifth
  const upkeep = Math.max(1, Math.round(Number(PGBOSS_RETENTION ?? 0) / 5))
  const boss = await start({
    useListenNotify: wakeup === 'notify',
    schedule: false,
    max: 2 * subscribers.length + 2,
    ...(PGBOSS_RETENTION ? { maintenanceIntervalSeconds: upkeep, superviseIntervalSeconds: upkeep } : {})
  })
  for (const s of subscribers) {
    if (PGBOSS_RETENTION) await boss.updateQueue(s, { deleteAfterSeconds: Number(PGBOSS_RETENTION) })
    await boss.work(s, { batchSize: Number(process.env.LATENCY_BATCH ?? 100), localConcurrency: Number(process.env.LATENCY_WORKERS ?? 1), burstWhenBatchFull: true, pollingIntervalSeconds: 0.5 }, async (jobs) => {
      for (const job of jobs) calls.add(s, job.data.key)
    })
  }
  console.log('ready')
  await new Promise((resolve) => process.once('SIGTERM', resolve))
  await stop(boss)
  calls.flush()
}
