// Handle the jobs of a subscription until SIGTERM.
//
//     node worker.js "postgresql:///shop" search-index

const { Client } = require('pg')

const [connectionString, subscription] = process.argv.slice(2)
const client = new Client({ connectionString, application_name: 'worker.js' })
let stopping = false

// Finish the job in hand, release the others.
process.on('SIGTERM', () => { stopping = true })

// Do what an event asks for. It may come twice: the second time must do no harm.
async function handle (job) {
  await client.query(
    'INSERT INTO note_index (seq, title) VALUES ($1, $2) ON CONFLICT (seq) DO NOTHING',
    [job.seq, job.payload.title])
}

async function work (job) {
  try {
    if (stopping) {
      await client.query('SELECT outbox.release($1, $2)', [job.job, job.claim])
      return
    }
    let failure
    try {
      await handle(job)
    } catch (error) {
      failure = error
    }
    if (failure) {
      await client.query('SELECT outbox.fail($1, $2, $3)', [job.job, job.claim, String(failure)])
    } else {
      await client.query('SELECT outbox.complete($1, $2)', [job.job, job.claim])
    }
  } catch (error) {
    if (error.code !== 'OB001') throw error // lease lost: another has claimed the job
  }
}

async function main () {
  await client.connect()
  while (!stopping) {
    // wait for up to 5 s, which is also how long SIGTERM may have to wait
    await client.query("CALL outbox.await_jobs($1, '5s')", [subscription])
    const jobs = await client.query('SELECT * FROM outbox.claim($1, 10)', [subscription])
    for (const job of jobs.rows) await work(job)
  }
  await client.end()
}

main()
