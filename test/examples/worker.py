"""Handle the jobs of a subscription until SIGTERM.

    python worker.py "dbname=shop" search-index
"""

import signal
import sys

import psycopg
from psycopg.rows import namedtuple_row

stopping = False


def stop(*_):
    """Finish the job in hand, release the others."""
    global stopping
    stopping = True


def handle(conn, job):
    """Do what an event asks for. It may come twice: the second time must do no harm."""
    conn.execute(
        "INSERT INTO note_index (seq, title) VALUES (%s, %s) ON CONFLICT (seq) DO NOTHING",
        (job.seq, job.payload.get("title")))


def work(conn, job):
    try:
        if stopping:
            conn.execute("SELECT outbox.release(%s, %s)", (job.job, job.claim))
            return
        try:
            handle(conn, job)
        except Exception as error:
            conn.execute("SELECT outbox.fail(%s, %s, %s)", (job.job, job.claim, str(error)))
        else:
            conn.execute("SELECT outbox.complete(%s, %s)", (job.job, job.claim))
    except psycopg.Error as error:
        if error.sqlstate != "OB001":   # lease lost: another has claimed the job
            raise


def main(conninfo, subscription):
    signal.signal(signal.SIGTERM, stop)
    with psycopg.connect(conninfo, autocommit=True, row_factory=namedtuple_row,
                         application_name="worker.py") as conn:
        while not stopping:
            # wait for up to 5 s, which is also how long SIGTERM may have to wait
            conn.execute("CALL outbox.await_jobs(%s, '5s')", (subscription,))
            jobs = conn.execute("SELECT * FROM outbox.claim(%s, 10)", (subscription,))
            for job in jobs.fetchall():
                work(conn, job)


main(*sys.argv[1:])
