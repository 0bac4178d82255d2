// What the programs of the peers that run on Node.js share.

import { appendFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { fork } from 'node:child_process'

// packages are not beside the sources
export const require = createRequire(process.env.BENCH_MODULES + '/')
const pg = require('pg')

// milliseconds since the epoch, much finer than Date.now()
export const now = () => performance.timeOrigin + performance.now()

// a pool as their documentations ask for; the environment says where to
export const pool = (max) => {
  const p = new pg.Pool({ max })
  p.on('error', (e) => console.error(e.message))
  p.on('connect', (c) => c.on('error', (e) => console.error(e.message)))
  return p
}

// calls of handlers, "SUBSCRIBER KEY NANOSECONDS" a line, written to a file
// every 100 ms and at the end
export class Calls {
  lines = []
  constructor (file, every) {
    this.file = file
    if (every) setInterval(() => this.flush(), every).unref()
  }

  add (subscriber, key) { this.lines.push(`${subscriber} ${key} ${Math.round(now() * 1e6)}`) }
  flush () {
    if (this.lines.length === 0) return
    appendFileSync(this.file, this.lines.join('\n') + '\n')
    this.lines = []
  }
}

// The relay: claims events, has ENQUEUE make their jobs in the same
// transaction, and marks them, until there are none.  Returns when it began and
// ended.
export async function relay (claim, mark, start, enqueue) {
  const client = new pg.Client()
  await client.connect()
  await start()
  const t0 = now()
  for (;;) {
    await client.query('BEGIN')
    const { rows } = await client.query({ name: 'claim', text: claim })
    if (rows.length === 0) break
    await enqueue(client, rows)
    await client.query({ name: 'mark', text: mark, values: [rows.map((r) => r.id)] })
    await client.query('COMMIT')
  }
  const t1 = now()
  await client.query('ROLLBACK')
  await client.end()
  return [t0, t1]
}

// Runs WORK in so many processes at once and prints the seconds from the first
// beginning to the last end.  WORK gets a function to wait for the start with,
// and returns both times.  If they say how many jobs each has done, by done(),
// they are told at JOBS to finish, for which they wait by finish().
export const done = (jobs) => process.send({ jobs })
let finished
export const finish = () => finished

export async function together (processes, work, jobs = 0) {
  if (process.send) {
    let go, end
    const started = new Promise((resolve) => { go = resolve })
    finished = new Promise((resolve) => { end = resolve })
    process.on('message', (m) => m === 'go' ? go() : end())
    const times = await work(() => { process.send('ready'); return started })
    process.send({ times }, () => process.disconnect())
    return
  }
  let ready = 0
  const children = Array.from({ length: processes }, () => fork(process.argv[1], process.argv.slice(2)))
  const times = await Promise.all(children.map((child) => new Promise((resolve, reject) => {
    child.on('message', (m) => {
      if (m.times) resolve(m.times)
      else if (m.jobs) { if ((jobs -= m.jobs) === 0) children.forEach((c) => c.send('finish')) }
      else if (++ready === processes) children.forEach((c) => c.send('go'))
    })
    child.on('exit', (code) => { if (code !== 0) reject(new Error(`a process ended with ${code}`)) })
  })))
  const t0 = Math.min(...times.map((t) => t[0]))
  const t1 = Math.max(...times.map((t) => t[1]))
  console.log(((t1 - t0) / 1000).toFixed(6))
}
