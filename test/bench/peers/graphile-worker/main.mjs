// graphile-worker at work, through its library.
//
//   main.mjs migrate
//   main.mjs relay PROCESSES CLAIM MARK SUBSCRIBER ...   events into jobs
//   main.mjs consume PROCESSES FILE                      all jobs of s1; calls into FILE
//   main.mjs work FILE SUBSCRIBER ...                    jobs as they come, until SIGTERM

import EventEmitter from 'node:events'
import { Calls, now, pool, relay, require, together } from '../npm/bench.mjs'

const { Logger, run, runMigrations, runOnce } = require('graphile-worker')
const logger = new Logger(() => (level, message) => { if (level === 'error' || level === 'warning') console.error(message) })

const concurrentJobs = Number(process.env.CONCURRENT ?? 24)
const preset = {
  worker: {
    concurrentJobs,
    maxPoolSize: concurrentJobs + 1,
    localQueue: { size: Number(process.env.LOCAL_QUEUE ?? 500) },
    completeJobBatchDelay: Number(process.env.BATCH_DELAY ?? 0),
    failJobBatchDelay: Number(process.env.BATCH_DELAY ?? 0),
    preparedStatements: true
  }
}

const [mode, ...args] = process.argv.slice(2)

if (mode === 'migrate') {
  const pgPool = pool(2)
  await runMigrations({ pgPool, logger })
  await pgPool.end()
}

// what addJobs() sends, on the connection of the transaction; the rows that it
// would return are not asked for
if (mode === 'relay') {
  const [processes, claim, mark, ...subscribers] = args
  await together(Number(processes), (start) => relay(claim, mark, start, (client, events) => {
    const specs = []
    for (const e of events) {
      for (const identifier of subscribers) specs.push({ identifier, payload: { ...e.payload, event: e.id } })
    }
    return client.query({
      name: 'add_jobs',
      text: 'SELECT count(*) FROM graphile_worker.add_jobs(ARRAY(SELECT json_populate_recordset(NULL::graphile_worker.job_spec, $1::json)))',
      values: [JSON.stringify(specs)]
    })
  }))
}

if (mode === 'consume') {
  const [processes, file] = args
  await together(Number(processes), async (start) => {
    const calls = new Calls(file)
    const events = new EventEmitter()
    const pgPool = pool(concurrentJobs + 1)
    await pgPool.query('SELECT 1')
    let t0
    events.once('localQueue:init', () => { t0 = now() })
    events.once('worker:getJob:start', () => { t0 ??= now() })
    await start()
    // ends when all jobs are taken and their completion is committed
    await runOnce({ pgPool, preset, logger, events, noHandleSignals: true, taskList: { s1: (payload) => { calls.add('s1', payload.key) } } })
    const t1 = now()
    calls.flush()
    await pgPool.end()
    return [t0 ?? t1, t1]
  })
}

if (mode === 'work') {
  const [file, ...subscribers] = args
  const calls = new Calls(file, 100)
  const taskList = Object.fromEntries(subscribers.map((s) => [s, (payload) => { calls.add(s, payload.key) }]))
  const events = new EventEmitter()
  events.on('pool:listen:success', () => console.log('ready'))
  const pgPool = pool(concurrentJobs + 1)
  const runner = await run({ pgPool, preset, logger, events, noHandleSignals: true, taskList })
  process.once('SIGTERM', () => runner.stop())
  await runner.promise
  calls.flush()
  await pgPool.end()
}
