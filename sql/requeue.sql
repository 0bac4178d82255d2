-- Events set aside: requeue, requeue_many, discard.
SET client_min_messages = warning;
SELECT outbox.subscribe('requeue', '{req.*}') > 0 AS subscribed;

-- Nothing but a poisoned event can be put back in line.
SELECT outbox.requeue(NULL);
SELECT outbox.requeue_many(NULL);
SELECT outbox.discard(NULL);
SELECT outbox.requeue(-1), outbox.requeue(0), outbox.requeue(9223372036854775807), outbox.discard(-1);
SELECT outbox.requeue_many('{}'), outbox.requeue_many('{NULL}'), outbox.requeue_many('{-1,0,9223372036854775807}'), outbox.requeue_many('{{1},{2}}'::bigint[]);
SELECT outbox.record('req.fanned') AS seq \gset
CALL outbox.await_fanout(:seq, '60s');
SELECT outbox.requeue(:seq), outbox.discard(:seq);
SELECT outbox.stop();
SELECT outbox.record('req.unmarked') AS seq \gset
SELECT outbox.requeue(:seq), outbox.discard(:seq);
SELECT event_state, tries FROM outbox.event_status WHERE seq = :seq;

-- Poisoned ones, as the relay leaves them
SELECT min(s) AS first, max(s) AS last FROM (SELECT outbox.record('req.bad', i::text, jsonb_build_object('n', i), 'acme') AS s FROM generate_series(1, 6) i) r \gset
UPDATE outbox.events SET tries = 7, failures = 5, last_error = '23514: no', poisoned_at = now() WHERE type = 'req.bad';
SELECT subject, type, scope, payload, tries, failures, last_error, poisoned_at IS NOT NULL AS poisoned FROM outbox.poisoned WHERE type = 'req.bad' ORDER BY seq;
SELECT event_state, tries, failures, event_error FROM outbox.event_status WHERE seq = :first;
BEGIN;
SELECT outbox.requeue(:first);
ROLLBACK;
SELECT outbox.requeue(:first);
SELECT outbox.requeue(:first);
SELECT tries, failures, retry_at, poisoned_at, fanned_out_at FROM outbox.events WHERE seq = :first;
SELECT outbox.requeue_many(ARRAY[:first, :first + 1, :first + 1, :first + 2, NULL, 0]);
SELECT outbox.discard(:first + 3);
SELECT outbox.discard(:first + 3), outbox.requeue(:first + 3);
SELECT fanned_out_at IS NOT NULL AS marked, fanout, poisoned_at, retry_at, last_error FROM outbox.events WHERE seq = :first + 3;
SELECT event_state FROM outbox.event_status WHERE seq = :first + 3;
-- one that fails and waits can be given up too
UPDATE outbox.events SET poisoned_at = NULL, tries = 3, retry_at = now() + interval '20 seconds' WHERE seq = :last;
SELECT event_state FROM outbox.event_status WHERE seq = :last;
SELECT outbox.requeue(:last), outbox.discard(:last);

-- Once the relay works again, those in line are fanned out and the others are not.
SELECT outbox.start();
CALL outbox.await_fanout(:first, '60s');
CALL outbox.await_fanout(:first + 2, '60s');
CALL outbox.await_fanout(:first + 3, '60s');
CALL outbox.await_fanout(:last - 1, '60s');
SELECT subject, event_state, subscription, state FROM outbox.event_status WHERE type = 'req.bad' ORDER BY seq;
-- and the bell rings for what is requeued now
SELECT outbox.requeue(:last - 1);
CALL outbox.await_fanout(:last - 1, '60s');
SELECT count(*) FROM outbox.poisoned;
SELECT outbox.unsubscribe('requeue');
