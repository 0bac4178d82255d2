-- fanout is a jsonb like any other, however many lists of patterns match
SELECT count(outbox.subscribe(name, types)) FROM (VALUES
	('z1', ARRAY['fanout.b']), ('yy2', '{fanout.*}'), ('x3', '{*.b}'), ('w4', '{fan*,!other}'),
	('vvv5', '{fanout.?}'), ('u6', '{?anout.b}'), ('t7', '{fanout*}'), ('s8', '{fan*b}'),
	('r9', '{f*b}'), ('qq10', '{fanout.b,!other}')) s(name, types);
DO $$
DECLARE
	seq bigint;
	outcome text;
BEGIN
	FOR i IN 1..4 LOOP
		seq := outbox.record('fanout.b');
		COMMIT;
		CALL outbox.await_fanout(seq, '30s', outcome);
	END LOOP;
END $$;
SELECT count(*), bool_and(fanout = fanout::text::jsonb) AS well_formed, bool_and(fanout ? 'z1' AND fanout ? 'yy2') AS found
	FROM outbox.events WHERE type = 'fanout.b';
SELECT j.subscription, count(*) FROM outbox.job_status j JOIN outbox.events e USING (seq)
	WHERE e.type = 'fanout.b' AND (e.fanout ->> j.subscription)::bigint = j.job
	GROUP BY 1 ORDER BY length(j.subscription), 1;
SELECT count(outbox.unsubscribe(name)) FROM outbox.subscriptions WHERE name IN ('z1', 'yy2', 'x3', 'w4', 'vvv5', 'u6', 't7', 's8', 'r9', 'qq10');
