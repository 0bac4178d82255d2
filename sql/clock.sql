-- A clock that is set back leaves times far in the future: no event waits for them.
SELECT outbox.subscribe('clock', '{clock.*}') > 0 AS subscribed;
SELECT outbox.stop();
SELECT outbox.record('clock.set.back') AS seq \gset
UPDATE outbox.events SET tries = 1, retry_at = now() + interval '1 year' WHERE seq = :seq;
SELECT outbox.start();
CALL outbox.await_fanout(:seq, '30s');
SELECT outbox.unsubscribe('clock');
