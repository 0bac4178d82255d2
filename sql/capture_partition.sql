--
-- Partitioned tables are captured as one table
--
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
	RETURN QUERY SELECT e.type, e.subject, e.scope, e.payload FROM outbox.events e
		WHERE e.seq > last ORDER BY e.seq;
END $$;
SET search_path = capture_test;

CREATE SCHEMA "Other S";
CREATE TABLE orders (id int, region text, total int, PRIMARY KEY (region, id)) PARTITION BY LIST (region);
CREATE TABLE orders_eu PARTITION OF orders FOR VALUES IN ('de', 'fr') PARTITION BY RANGE (id);
-- with columns at other places than in the root
CREATE TABLE "Other S"."P 2" (total int, gone int, region text NOT NULL, id int NOT NULL);
ALTER TABLE "Other S"."P 2" DROP COLUMN gone;
ALTER TABLE orders_eu ATTACH PARTITION "Other S"."P 2" FOR VALUES FROM (0) TO (100);
CREATE TABLE orders_eu_rest PARTITION OF orders_eu DEFAULT;
CREATE TABLE orders_rest PARTITION OF orders DEFAULT;

-- every row is the root's, by whichever way it comes
SELECT outbox.capture('orders', 'order.{op}');
SELECT outbox.capture('orders', 'order.{op}');
SELECT relation, type FROM outbox.captures WHERE type LIKE 'order%';
INSERT INTO orders VALUES (1, 'de', 10), (100, 'fr', 20), (1, 'us', 30);
INSERT INTO "Other S"."P 2" (id, region, total) VALUES (2, 'de', 11);
INSERT INTO orders_rest VALUES (2, 'us', 31);
UPDATE orders_eu SET total = total + 1 WHERE id = 1;
UPDATE "Other S"."P 2" SET total = total;
DELETE FROM orders WHERE region = 'fr';
SELECT type, subject, payload FROM recorded();

-- a row that moves is deleted and created
UPDATE orders SET id = 101 WHERE id = 1 AND region = 'de';
UPDATE orders SET region = 'us', id = 3 WHERE region = 'de' AND id = 2;
SELECT type, subject, payload->'old' AS old, payload->'new' AS new FROM recorded();
-- whatever is watched, since that is how it came there
SELECT outbox.capture('orders', 'order.{op}', watch => '{total}', columns => '{id}');
UPDATE orders SET region = 'de' WHERE id = 3;
UPDATE orders SET id = 4 WHERE id = 3;
SELECT type, subject, payload->'old' AS old, payload->'new' AS new FROM recorded();
-- without insert and delete there would be nothing, and so it is said
SELECT outbox.capture('orders', 'order.{op}', watch => '{total}', columns => '{id}', operations => '{update,insert}');
UPDATE orders SET id = 200 WHERE id = 4;
UPDATE orders SET id = 4 WHERE id = 200;
SELECT type, subject, payload->'old' AS old, payload->'new' AS new FROM recorded();
SELECT outbox.capture('orders', 'order.{op}', watch => '{total}', columns => '{id}');
-- the new definition holds in every partition
INSERT INTO orders_rest VALUES (9, 'us', 31);
UPDATE orders SET total = 1 WHERE id = 4;
SELECT type, subject, payload->'old' AS old, payload->'new' AS new FROM recorded();

-- the table and its schema get other names
ALTER TABLE orders RENAME TO purchases;
INSERT INTO orders_rest VALUES (10, 'us', 31);
CREATE SCHEMA "Third";
ALTER TABLE purchases SET SCHEMA "Third";
INSERT INTO "Other S"."P 2" VALUES (10, 'de', 32);
ALTER SCHEMA "Third" RENAME TO "Fourth";
INSERT INTO "Fourth".purchases VALUES (11, 'us', 33), (11, 'de', 34);
ALTER SCHEMA "Fourth" RENAME TO "Fifth";
INSERT INTO "Fifth".purchases VALUES (12, 'us', 33);
ALTER SCHEMA "Fifth" RENAME TO "Fourth";
SELECT payload->>'schema' AS schema, payload->>'table' AS table FROM recorded();
ALTER TABLE "Fourth".purchases SET SCHEMA capture_test;
ALTER TABLE purchases RENAME TO orders;

-- partitions that come and go
CREATE TABLE orders_asia PARTITION OF orders FOR VALUES IN ('jp');
INSERT INTO orders VALUES (20, 'jp', 1);
ALTER TABLE orders DETACH PARTITION orders_asia;
INSERT INTO orders_asia VALUES (21, 'jp', 1);
SELECT count(*) FROM pg_trigger WHERE tgrelid = 'orders_asia'::regclass;
ALTER TABLE orders ATTACH PARTITION orders_asia FOR VALUES IN ('jp');
INSERT INTO orders_asia VALUES (22, 'jp', 1);
SELECT subject FROM recorded();

-- a partition is not captured twice, nor left out, nor an attached one
SELECT outbox.capture('orders_asia', 'order.{op}');
SELECT outbox.uncapture('orders_asia');
SELECT outbox.uncapture('orders_asia', 'order.{op}');
SELECT outbox.uncapture('orders_asia', 'asia.{op}');
SELECT outbox.capture('orders_asia', 'asia.{op}');
INSERT INTO orders VALUES (23, 'jp', 1);
SELECT type, subject, payload->'table' AS table FROM recorded();
SELECT outbox.capture('orders', 'asia.{op}');
SELECT outbox.uncapture('orders_asia');
SELECT outbox.capture('orders_eu', 'eu.{op}');
SELECT outbox.capture('orders', 'eu.{op}');
INSERT INTO orders VALUES (24, 'de', 1);
SELECT type, subject, payload->'table' AS table FROM recorded();
SELECT outbox.uncapture('orders_eu');
CREATE TABLE orders_au (LIKE orders);
SELECT outbox.capture('orders_au', 'order.{op}');
ALTER TABLE orders ATTACH PARTITION orders_au FOR VALUES IN ('au');
SELECT outbox.uncapture('orders_au');
ALTER TABLE orders ATTACH PARTITION orders_au FOR VALUES IN ('au');

-- a key that only a partition has is not the root's
ALTER TABLE orders DROP CONSTRAINT orders_pkey;
ALTER TABLE orders_au ADD PRIMARY KEY (id);
INSERT INTO orders VALUES (30, 'au', 1);
SELECT subject, payload FROM recorded();

-- disabled, renamed and ended for all
SELECT trigger FROM outbox.captures WHERE relation = 'orders'::regclass \gset
ALTER TABLE orders DISABLE TRIGGER :trigger;
SELECT outbox.capture('orders', 'order.{op}', columns => '{total}');
INSERT INTO orders VALUES (31, 'au', 1);
ALTER TABLE orders ENABLE TRIGGER :trigger;
INSERT INTO orders VALUES (32, 'au', 1);
ALTER TRIGGER :trigger ON orders RENAME TO z;
SELECT outbox.capture('orders', 'order.{op}', columns => '{id}');
INSERT INTO orders VALUES (33, 'au', 1);
SELECT payload->'new' AS new FROM recorded();
SELECT outbox.uncapture('orders');
INSERT INTO orders VALUES (34, 'au', 1);
SELECT * FROM recorded();
SELECT count(*) FROM pg_trigger WHERE tgrelid IN (SELECT relid FROM pg_partition_tree('orders'));

SET client_min_messages = warning;
DROP SCHEMA "Other S", "Fourth" CASCADE;
DROP SCHEMA capture_test CASCADE;
RESET client_min_messages;
