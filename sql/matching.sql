-- Which subscriptions get which events: outbox.matching() and the relay, which
-- run the same code.  In a database of its own, for nobody else's to match.
\set dbname :DBNAME
CREATE DATABASE outbox_matching TEMPLATE template0;
\c outbox_matching
CREATE EXTENSION outbox;
CREATE TEMP TABLE wanted (n int, type text, scope text, payload jsonb, subject text, headers jsonb, seq bigint);

-- Record the events in wanted and wait for them.  For each: what matching says,
-- and whether the relay did the same.
CREATE FUNCTION pg_temp.ours(names text[]) RETURNS text LANGUAGE sql AS $$
	SELECT coalesce(string_agg(name, ' ' ORDER BY length(name), name COLLATE "C"), '')
	FROM unnest(names) name WHERE name LIKE 'm\_%'
$$;
CREATE PROCEDURE pg_temp.record_wanted() LANGUAGE plpgsql AS $$
BEGIN
	UPDATE wanted SET seq = outbox.record(type, subject, payload, scope, headers);
	COMMIT;
END $$;
CREATE TEMP VIEW result AS
SELECT w.n, w.type, w.scope, w.payload, m.matching,
	CASE WHEN pg_temp.ours(ARRAY(SELECT jsonb_object_keys(e.fanout))) = m.matching
		THEN 'same' ELSE 'DIFFERS: ' || coalesce(e.fanout::text, 'not fanned') END AS relay
FROM wanted w JOIN outbox.events e USING (seq)
	CROSS JOIN LATERAL (SELECT pg_temp.ours(ARRAY(
		SELECT outbox.matching(w.type, w.scope, w.payload, w.subject, w.headers))) AS matching OFFSET 0) m;

--
-- Scope: null matches every event, another only its own; an event without a
-- scope goes only to subscriptions without one.
--
SELECT count(outbox.subscribe('m_' || name, '{m.scope}', scope))
FROM (VALUES ('all', NULL), ('t1', 't1'), ('t1b', 't1'), ('t2', 't2'), ('upper', 'T1'), ('empty', ''), ('space', 't1 ')) s (name, scope);
INSERT INTO wanted
SELECT row_number() OVER (), 'm.scope', scope, '{}'
FROM unnest(ARRAY[NULL, 't1', 't2', 'T1', '', 't1 ', ' t1', 't', 't11', '%', 'null']) scope;
CALL pg_temp.record_wanted();
SELECT max(seq) AS last FROM wanted \gset
CALL outbox.await_fanout(:last, '30s');
SELECT n, '"' || scope || '"' AS scope, matching, relay FROM result ORDER BY n;
TRUNCATE wanted;

--
-- Filters: at least one item that is neither false nor null; errors are no match.
--
SELECT count(outbox.subscribe('m_' || name, '{m.filter}', filter => filter::jsonpath))
FROM (VALUES
	('gt', '$.total > 100'),
	('strict', 'strict $.total > 100'),
	('items', '$.items[*] ? (@.qty > 1)'),
	('urgent', '$.urgent'),
	('all', '$.all[*]'),
	('exists', 'exists($.total)'),
	('no', '!exists($.total)'),
	('true', 'true'),
	('false', 'false'),
	('null', 'null'),
	('type', '$type == "m.filter"'),
	('subject', '$subject starts with "a"'),
	('nosubj', '$subject == null'),
	('scope', '$scope == "t1"'),
	('headers', '$headers.v == 1'),
	('nohead', '$headers == null'),
	('regex', '$.name like_regex "^A.c$" flag "i"'),
	('div', '1 / $.zero > 0'),
	('time', '$.at.datetime() < "2020-01-01T00:00:00+03:00".datetime()'),
	('deep', '$.** ? (@.deep == 1)')
) s (name, filter);
INSERT INTO wanted
SELECT n, 'm.filter', scope, payload::jsonb, subject, headers::jsonb
FROM (VALUES
	(1, '{}', NULL, NULL, NULL),
	(2, '{"total":100}', 'abc', 't1', '{}'),
	(3, '{"total":101}', 'bcd', 't2', '{"v":1}'),
	(4, '{"total":"101"}', 'a', NULL, '{"v":"1"}'),
	(5, '{"items":[{"qty":1},{"qty":2}]}', 'b', NULL, NULL),
	(6, '{"items":[{"qty":1},{"qty":"2"}]}', 'b', NULL, NULL),
	(7, '{"urgent":true}', 'b', NULL, NULL),
	(8, '{"urgent":false}', 'b', NULL, NULL),
	(9, '{"urgent":null}', 'b', NULL, NULL),
	(10, '{"urgent":0}', 'b', NULL, NULL),
	(11, '{"urgent":""}', 'b', NULL, NULL),
	(12, '{"urgent":{}}', 'b', NULL, NULL),
	(13, '{"urgent":[]}', 'b', NULL, NULL),
	(14, '{"all":[false,null]}', 'b', NULL, NULL),
	(15, '{"all":[false,null,1]}', 'b', NULL, NULL),
	(16, '{"all":[]}', 'b', NULL, NULL),
	(17, '{"name":"abc"}', 'b', NULL, NULL),
	(18, '{"name":"abbc"}', 'b', NULL, NULL),
	(19, '{"zero":0}', 'b', NULL, NULL),
	(20, '{"zero":1}', 'b', NULL, NULL),
	(21, '{"at":"2019-12-31T21:30:00"}', 'b', NULL, NULL),
	(22, '{"at":"2019-12-31T20:30:00"}', 'b', NULL, NULL),
	(23, '{"at":"nonsense"}', 'b', NULL, NULL),
	(24, '{"x":[{"y":{"deep":1}}]}', 'b', NULL, NULL),
	(25, '[]', 'b', NULL, NULL),
	(26, '[{"total":101}]', 'b', NULL, NULL),
	(27, '"text"', 'b', NULL, NULL),
	(28, 'null', 'b', NULL, NULL)
) e (n, payload, subject, scope, headers);
CALL pg_temp.record_wanted();
SELECT max(seq) AS last FROM wanted \gset
CALL outbox.await_fanout(:last, '30s');
SELECT n, payload, matching, relay FROM result ORDER BY n;
-- The time zone of the session does not matter.
SET TimeZone = 'Asia/Tokyo';
SELECT n, matching, relay FROM result WHERE n IN (21, 22) ORDER BY n;
SET TimeZone = 'America/Anchorage';
SELECT n, matching, relay FROM result WHERE n IN (21, 22) ORDER BY n;
SHOW TimeZone;
RESET TimeZone;
TRUNCATE wanted;

-- What takes too long, or is too large, becomes a job whose filter is still to
-- be evaluated; the other subscriptions do not notice.
SELECT outbox.subscribe('m_slow', '{m.slow}', filter => '$.** ? (exists ($ ? (@.a[*] == $.a[*])))') > 0 AS slow,
	outbox.subscribe('m_quick', '{m.slow}', filter => '$.a[0] == 1') > 0 AS quick,
	outbox.subscribe('m_never', '{m.slow}', filter => '$.b') > 0 AS never;
INSERT INTO wanted
SELECT 1, 'm.slow', NULL, jsonb_build_object('a', jsonb_agg(i)) FROM generate_series(1, 20000) i;
INSERT INTO wanted
SELECT 2, 'm.slow', NULL, jsonb_build_object('a', ARRAY[1], 'text', repeat('x', 1024 * 1024));
CALL pg_temp.record_wanted();
SELECT max(seq) AS last FROM wanted \gset
CALL outbox.await_fanout(:last, '30s');
SELECT n, length(payload::text) > 100000 AS large, matching, relay FROM result ORDER BY n;
SELECT w.n, s.name, j.filter_pending
FROM wanted w JOIN outbox.jobs j ON j.event_seq = w.seq JOIN outbox.subscriptions s ON s.id = j.subscription_id
WHERE s.name LIKE 'm\_%' ORDER BY w.n, s.name COLLATE "C";
TRUNCATE wanted;
SELECT count(outbox.unsubscribe(name)) > 0 AS ended FROM outbox.subscriptions WHERE name LIKE 'm\_%';

-- A filter that fails, which outbox.subscribe would have refused, stops nobody.
INSERT INTO outbox.subscriptions (name, types, filter, owner, owner_oid)
VALUES ('m_bad', '{m.bad}', '$nosuch == 1', current_user, (SELECT oid FROM pg_roles WHERE rolname = current_user)),
	('m_good', '{m.bad}', '$.a == 1', current_user, (SELECT oid FROM pg_roles WHERE rolname = current_user));
INSERT INTO wanted VALUES (1, 'm.bad', NULL, '{"a":1}');
CALL pg_temp.record_wanted();
SELECT max(seq) AS last FROM wanted \gset
CALL outbox.await_fanout(:last, '30s');
SELECT n, matching, relay FROM result ORDER BY n;
TRUNCATE wanted;
SELECT outbox.subscribe('m_bad', '{m.bad}', filter => '$nosuch == 1');
SELECT outbox.subscribe('m_bad', '{m.bad}', filter => '$.a == "$nosuch" && $."$nosuch" == $type') > 0 AS subscribed;
DELETE FROM outbox.subscriptions WHERE name LIKE 'm\_%';

--
-- A subscription committed together with an event, or before it, gets it.
--
CREATE PROCEDURE pg_temp.together() LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1..100 LOOP
		PERFORM outbox.subscribe('m_' || i, ARRAY['m.together.' || i]);
		INSERT INTO wanted (n, type, payload, seq) VALUES (i, '', '{}', outbox.record('m.together.' || i));
		COMMIT;
		INSERT INTO wanted (n, type, payload, seq) VALUES (100 + i, '', '{}', outbox.record('m.together.' || i));
		COMMIT;
	END LOOP;
END $$;
CALL pg_temp.together();
SELECT max(seq) AS last FROM wanted \gset
CALL outbox.await_fanout(:last, '30s');
SELECT (w.n - 1) / 100 AS kind, count(*), count(*) FILTER (WHERE e.fanout ? ('m_' || (w.n - 1) % 100 + 1)) AS got
FROM wanted w JOIN outbox.events e USING (seq) GROUP BY 1 ORDER BY 1;
TRUNCATE wanted;

-- One that was ended gets nothing more, one restated what it says now.
SELECT outbox.unsubscribe('m_1'), outbox.subscribe('m_2', '{m.other}') > 0 AS restated, outbox.pause('m_3');
INSERT INTO wanted
SELECT i, type, NULL, '{}' FROM unnest('{m.together.1,m.together.2,m.other,m.together.3}'::text[]) WITH ORDINALITY t (type, i);
CALL pg_temp.record_wanted();
SELECT max(seq) AS last FROM wanted \gset
CALL outbox.await_fanout(:last, '30s');
SELECT n, type, matching, relay FROM result ORDER BY n;
TRUNCATE wanted;
DELETE FROM outbox.subscriptions WHERE name LIKE 'm\_%';

--
-- Many subscriptions, against the definition written in SQL: patterns as
-- regular expressions.
--
CREATE FUNCTION pg_temp.pseudo(seed text, n int) RETURNS int LANGUAGE sql IMMUTABLE AS $$
	SELECT (('x' || left(md5(seed), 7))::bit(28)::int) % n
$$;
CREATE FUNCTION pg_temp.pattern(seed text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
	SELECT string_agg((ARRAY['a', 'b', 'ab', '.', 'm.', '*', '*', '?'])[1 + pg_temp.pseudo(seed || '/' || i, 8)], '')
	FROM generate_series(0, pg_temp.pseudo(seed, 4)) i
$$;
CREATE FUNCTION pg_temp.reference(types text[], type text) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
	SELECT bool_or(t !~ '^!' AND m) AND NOT bool_or(t ~ '^!' AND m)
	FROM (SELECT t, type ~ ('^' || replace(replace(replace(ltrim(t, '!'), '.', '\.'), '*', '.*'), '?', '.') || '$') AS m
		FROM unnest(types) t) p
$$;
INSERT INTO outbox.subscriptions (name, types, scope, owner, owner_oid)
SELECT 'm_' || i,
	ARRAY[pg_temp.pattern('p' || i), pg_temp.pattern('q' || i)] ||
	CASE pg_temp.pseudo('e' || i, 3) WHEN 0 THEN ARRAY['!' || pg_temp.pattern('r' || i)] ELSE '{}' END,
	CASE pg_temp.pseudo('s' || i, 2) WHEN 0 THEN 't' || pg_temp.pseudo('t' || i, 5) END,
	current_user, (SELECT oid FROM pg_roles WHERE rolname = current_user)
FROM generate_series(1, 400) i;
INSERT INTO outbox.subscriptions (name, types, scope, owner, owner_oid)
SELECT 'm_tenant_' || i, '{m.*}', 't' || i, current_user, (SELECT oid FROM pg_roles WHERE rolname = current_user)
FROM generate_series(1, 200) i;
INSERT INTO wanted
SELECT i, (SELECT string_agg((ARRAY['a', 'b', 'ab', '.', 'm.'])[1 + pg_temp.pseudo('y' || i % 40 || '/' || j, 5)], '')
	FROM generate_series(0, pg_temp.pseudo('z' || i % 40, 5)) j),
	CASE pg_temp.pseudo('u' || i, 3) WHEN 0 THEN NULL ELSE 't' || pg_temp.pseudo('v' || i, 8) END, '{}'
FROM generate_series(1, 300) i;
CALL pg_temp.record_wanted();
SELECT max(seq) AS last FROM wanted \gset
CALL outbox.await_fanout(:last, '30s');
WITH expected AS (
	SELECT w.seq, pg_temp.ours(array_agg(s.name) FILTER (WHERE pg_temp.reference(s.types, w.type)
		AND (s.scope IS NULL OR s.scope = w.scope))) AS names
	FROM wanted w CROSS JOIN outbox.subscriptions s GROUP BY w.seq
), got AS (
	SELECT w.seq, pg_temp.ours(ARRAY(SELECT jsonb_object_keys(e.fanout))) AS names,
		pg_temp.ours(ARRAY(SELECT outbox.matching(w.type, w.scope))) AS matching
	FROM wanted w JOIN outbox.events e USING (seq)
)
SELECT count(*) AS events, count(DISTINCT w.type) AS types, sum(length(e.names)) > 10000 AS many,
	count(*) FILTER (WHERE e.names IS DISTINCT FROM g.names) AS relay_differs,
	count(*) FILTER (WHERE e.names IS DISTINCT FROM g.matching) AS matching_differs
FROM expected e JOIN got g USING (seq) JOIN wanted w USING (seq);
-- jobs and fanout agree
SELECT count(*) AS events, count(*) FILTER (WHERE e.fanout <> j.jobs) AS differ
FROM wanted w JOIN outbox.events e USING (seq)
	CROSS JOIN LATERAL (SELECT coalesce(jsonb_object_agg(s.name, j.id), '{}') AS jobs
		FROM outbox.jobs j JOIN outbox.subscriptions s ON s.id = j.subscription_id WHERE j.event_seq = w.seq OFFSET 0) j;
DELETE FROM outbox.subscriptions WHERE name LIKE 'm\_%';

-- What somebody wrote into the table by hand, and is no pattern, matches
-- nothing and troubles nobody.
INSERT INTO outbox.subscriptions (name, types, owner, owner_oid)
SELECT 'm_' || name, types::text[], current_user, (SELECT oid FROM pg_roles WHERE rolname = current_user)
FROM (VALUES ('class', '{[a-z]*}'), ('empty', '{}'), ('null', '{NULL}'), ('half', '{"a b",m.hand}')) s (name, types);
SELECT outbox.record('m.hand') AS seq \gset
CALL outbox.await_fanout(:seq, '30s');
SELECT pg_temp.ours(ARRAY(SELECT jsonb_object_keys(fanout))) AS fanout FROM outbox.events WHERE seq = :seq;
SELECT pg_temp.ours(ARRAY(SELECT outbox.matching('m.hand')));
DELETE FROM outbox.subscriptions WHERE name LIKE 'm\_%';

-- Arguments
SELECT outbox.matching(NULL);
SELECT outbox.matching('');
SELECT outbox.matching('a b');
SELECT outbox.matching('m.x', payload => NULL);
SELECT outbox.matching('m.x', headers => '[]');
SELECT outbox.matching('m.x', NULL, 'null', NULL, NULL) = 'm_x' AS nobody;
-- A subscription that was rolled back is not remembered.
BEGIN;
SELECT outbox.subscribe('m_rolled_back', '{m.x}') > 0 AS subscribed;
SELECT outbox.matching('m.x');
ROLLBACK;
SELECT outbox.subscribe('m_other', '{m.x}') > 0 AS subscribed;
SELECT outbox.matching('m.x');
SELECT outbox.unsubscribe('m_other');
SELECT outbox.matching('m.x');

\c :dbname
DROP DATABASE outbox_matching;
