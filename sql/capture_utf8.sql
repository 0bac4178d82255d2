--
-- Captures in a database whose encoding is UTF8
--
SELECT getdatabaseencoding() <> 'UTF8' AS skip \gset
\if :skip
\quit
\endif
SET client_encoding = 'UTF8';
CREATE SCHEMA capture_test;
CREATE TABLE capture_test.mark (seq bigint);
INSERT INTO capture_test.mark SELECT COALESCE(max(seq), 0) FROM outbox.events;
-- events recorded since the last call
CREATE FUNCTION capture_test.recorded() RETURNS TABLE (type text, subject text, scope text, payload jsonb)
LANGUAGE plpgsql AS $$
DECLARE
	last bigint := (SELECT seq FROM capture_test.mark);
BEGIN
	UPDATE capture_test.mark SET seq = (SELECT max(e.seq) FROM outbox.events e) WHERE EXISTS (SELECT FROM outbox.events);
	RETURN QUERY SELECT e.type, e.subject, e.scope, e.payload - '{schema,table}'::text[] FROM outbox.events e
		WHERE e.seq > last ORDER BY e.seq;
END $$;
SET search_path = capture_test;
\pset format unaligned

CREATE TABLE "Tëst 😀" (id int PRIMARY KEY, "Straße 😀" text, "日本" json);
SELECT outbox.capture('"Tëst 😀"', 'bestellung.{op}.{Straße 😀}', 'ß/{Straße 😀}', '{"Straße 😀"}', columns => '{"Straße 😀","日本"}', scope => 'Straße 😀');
SELECT outbox.capture(relation, type, subject, watch, operations, columns, scope) FROM outbox.captures WHERE type LIKE 'bestellung%';
INSERT INTO "Tëst 😀" VALUES (1, 'größe😀', '{"ключ": "\u20ac", "k": "\ud83d\ude00"}');
SELECT type, subject, scope, payload FROM recorded();
-- what cannot be told from nothing, or turns the line around, is no type
\set VERBOSITY sqlstate
UPDATE "Tëst 😀" SET "Straße 😀" = U&'a\0085b';
UPDATE "Tëst 😀" SET "Straße 😀" = U&'a\00a0b';
UPDATE "Tëst 😀" SET "Straße 😀" = U&'a\200fb';
UPDATE "Tëst 😀" SET "Straße 😀" = U&'a\2028b';
SELECT outbox.capture('"Tëst 😀"', U&'a\3000b');
\set VERBOSITY default
ALTER TABLE "Tëst 😀" RENAME "日本" TO "中国";
DELETE FROM "Tëst 😀";
SELECT type, payload->'old' AS old FROM recorded();

SET client_min_messages = warning;
DROP SCHEMA capture_test CASCADE;
RESET client_min_messages;
