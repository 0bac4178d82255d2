-- Patterns of event types, seen through a subscription.
BEGIN;

-- "match" or "-": would a subscription with these patterns get an event of that type?
CREATE FUNCTION pg_temp.glob(types text[], type text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM outbox.subscribe('glob', types);
	RETURN CASE WHEN 'glob' IN (SELECT outbox.matching(type)) THEN 'match' ELSE '-' END;
END $$;

SELECT n, types, type, pg_temp.glob(types::text[], type) AS result
FROM (VALUES
	-- literals: the whole type, and case counts
	(1, '{order.created}', 'order.created'),
	(2, '{order.created}', 'order.create'),
	(3, '{order.created}', 'order.created.v2'),
	(4, '{order.created}', 'my.order.created'),
	(5, '{order.created}', 'Order.created'),
	(6, '{ORDER.CREATED}', 'order.created'),
	(7, '{order.created}', 'orderXcreated'),
	-- * stands for any run, dots included, and for none
	(10, '{*}', 'x'),
	(11, '{*}', 'order.created.v2'),
	(12, '{**}', 'order'),
	(13, '{***}', '.'),
	(14, '{order.*}', 'order.created'),
	(15, '{order.*}', 'order.created.v2'),
	(16, '{order.*}', 'order'),
	(17, '{order.*}', 'order.'),
	(18, '{order.*}', 'orders.created'),
	(19, '{order*}', 'order'),
	(20, '{order*}', 'orders.created'),
	(21, '{*.created}', 'order.created'),
	(22, '{*.created}', 'created'),
	(23, '{*.created}', '.created'),
	(24, '{*.created}', 'order.created.v2'),
	(25, '{*created*}', 'created'),
	(26, '{*created*}', 'order.created.v2'),
	(27, '{order.*.v2}', 'order.created.v2'),
	(28, '{order.*.v2}', 'order.v2'),
	(29, '{order.*.v2}', 'order..v2'),
	(30, '{order.*.v2}', 'order.a.b.v2'),
	(31, '{*a*b*c*}', 'xaybzc'),
	(32, '{*a*b*c*}', 'xaybz'),
	(33, '{a*a}', 'a'),
	(34, '{a*a}', 'aa'),
	(35, '{*ab}', 'aab'),
	(36, '{*ab}', 'abab'),
	(37, '{*ab}', 'aba'),
	(38, '{*aab}', 'aaab'),
	(39, '{a*b*a}', 'abba'),
	-- ? stands for one character, whatever its length in bytes
	(40, '{?}', 'a'),
	(41, '{?}', 'ab'),
	(42, '{?}', '.'),
	(43, '{a?c}', 'abc'),
	(44, '{a?c}', 'ac'),
	(45, '{a?c}', 'abbc'),
	(46, '{?*}', 'a'),
	(47, '{*?}', 'a'),
	(48, '{*??}', 'a'),
	(49, '{*??}', 'ab'),
	(50, '{*?a}', 'ba'),
	(51, '{*?a}', 'a'),
	(52, '{??.*}', 'ab.c'),
	(53, '{??.*}', 'abc.d'),
	-- nothing else means anything
	(60, '{order%}', 'order.created'),
	(61, '{order%}', 'order%'),
	(62, '{order_created}', 'order.created'),
	(63, '{order_created}', 'order_created'),
	(64, '{order.created}', 'order-created'),
	(65, '{#.created}', 'order.created'),
	(66, '{a+}', 'aa'),
	(67, '{(a|b)}', 'a'),
	(68, '{^a$}', 'a'),
	(69, E'{"a''b"}', 'a''b'),
	(70, '{"a\"b"}', 'a"b'),
	(71, '{$1}', '$1'),
	(72, '{a!b}', 'a!b'),
	(73, '{"{a,b}"}', 'a'),
	(74, '{"{a,b}"}', '{a,b}'),
	-- several patterns, and exclusion
	(80, '{order.*,invoice.*}', 'invoice.sent'),
	(81, '{order.*,invoice.*}', 'payment.sent'),
	(82, '{*,!order.*}', 'order.created'),
	(83, '{*,!order.*}', 'order'),
	(84, '{!order.*,*}', 'order.created'),
	(85, '{!order.*,*}', 'invoice.sent'),
	(86, '{order.*,!*.deleted}', 'order.deleted'),
	(87, '{order.*,!*.deleted}', 'order.created'),
	(88, '{order.*,!order.created,order.created}', 'order.created'),
	(89, '{*,!*}', 'order.created'),
	(90, '{*,!?}', 'x'),
	(91, '{*,!?}', 'xy'),
	(92, '{order.*,order.*}', 'order.created'),
	-- the extension's own events are only for those who ask for them
	(100, '{*}', 'outbox.event.poisoned'),
	(101, '{outbox*}', 'outbox.event.poisoned'),
	(102, '{?utbox.*}', 'outbox.event.poisoned'),
	(103, '{outbox.*}', 'outbox.event.poisoned'),
	(104, '{outbox.event.poisoned}', 'outbox.event.poisoned'),
	(105, '{outbox.*.poisoned}', 'outbox.event.poisoned'),
	(106, '{outbox.?*}', 'outbox.job.dead'),
	(107, '{outbox.*,!*.dead}', 'outbox.job.dead'),
	(108, '{outbox.*,!outbox.job.*}', 'outbox.job.dead'),
	(109, '{outbox.*,!outbox.job.*}', 'outbox.event.poisoned'),
	(110, '{*,outbox.*}', 'outbox.job.dead'),
	(111, '{outbox*}', 'outboxes.created'),
	(112, '{outbox}', 'outbox'),
	(113, '{*}', 'outbox'),
	(114, '{outbox.*}', 'outbox'),
	(115, '{Outbox.*}', 'outbox.job.dead'),
	(116, '{outbox.*}', 'outboxes.created')
) t (n, types, type)
ORDER BY n;

-- The longest type, and patterns on which backtracking matchers do not end
SELECT pg_temp.glob('{*a*a*a*a*a*a*a*a*b}', repeat('a', 255)),
	pg_temp.glob('{*a*a*a*a*a*a*a*a*b?}', repeat('a', 255)),
	pg_temp.glob('{*a*a*a*a*a*a*a*a*}', repeat('a', 255)),
	pg_temp.glob(ARRAY[repeat('?', 255)], repeat('a', 255)),
	pg_temp.glob(ARRAY[repeat('*?', 255)], repeat('a', 254)),
	pg_temp.glob(ARRAY[repeat('*', 10000)], 'a');

-- What is no pattern, or could match no type, is refused.
CREATE FUNCTION pg_temp.refusal(types text[]) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	detail text;
BEGIN
	PERFORM outbox.subscribe('glob', types);
	RETURN 'accepted';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL;
	RETURN concat_ws(': ', SQLSTATE, SQLERRM, nullif(detail, ''));
END $$;

SELECT types, pg_temp.refusal(types::text[])
FROM unnest(ARRAY['{}', '{""}', '{!}', '{!!a}', '{"!"}', '{!a}', '{!a,!b}', '{a,NULL}', '{NULL}', '{{a,b},{c,d}}',
	'{"a b"}', '{" "}', E'{"a\nb"}', E'{"a\tb"}', E'{a\x7f}', '{[ab]}', '{a]}', '{"a\\*"}', '{"a\\b"}', '{*,"[!a]"}'])
	WITH ORDINALITY t (types, n)
ORDER BY n;
SELECT n, regexp_replace(pg_temp.refusal(types), '(a|\?){20,}', '...') AS refusal
FROM (VALUES (1, ARRAY[repeat('a', 256)]), (2, ARRAY[repeat('?', 256)]), (3, ARRAY[repeat('a*', 255)]),
	(4, array_fill('a'::text, '{1001}')), (5, array_fill('a'::text, '{1000}'))) t (n, types)
ORDER BY n;

ROLLBACK;

-- Characters of several bytes, in the encoding of the database.  In EUC_JP the
-- second byte of one and the first of the next may look like a third.
\set dbname :DBNAME
CREATE DATABASE outbox_glob_utf8 TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C';
CREATE DATABASE outbox_glob_eucjp TEMPLATE template0 ENCODING 'EUC_JP' LOCALE 'C';
CREATE DATABASE outbox_glob_latin1 TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C';

\c outbox_glob_utf8
CREATE EXTENSION outbox;
SELECT outbox.subscribe('one', '{a?b}'), outbox.subscribe('two', '{a??b}'),
	outbox.subscribe('euro', ARRAY['*' || convert_from('\xe282ac', 'UTF8') || '?']);
SELECT n, array(SELECT outbox.matching('a' || convert_from(bytes, 'UTF8') || 'b')) AS matching
FROM (VALUES (1, 'x'::bytea), (2, '\xc3a9'), (3, '\xe282ac'), (4, '\xf09f9880'), (5, '\xc3a9e282ac'), (6, '\xc3a9c3a9c3a9')) t (n, bytes)
ORDER BY n;

\c outbox_glob_eucjp
CREATE EXTENSION outbox;
SELECT outbox.subscribe('one', '{?}'), outbox.subscribe('two', '{??}'),
	outbox.subscribe('inside', ARRAY['*' || convert_from('\xa2a4', 'EUC_JP') || '*']);
SELECT n, array(SELECT outbox.matching(convert_from(bytes, 'EUC_JP'))) AS matching
FROM (VALUES (1, '\xa4a2'::bytea), (2, '\xa4a2a4a4'), (3, '\xa2a4'), (4, '\xa4a2a2a4')) t (n, bytes)
ORDER BY n;

\c outbox_glob_latin1
CREATE EXTENSION outbox;
SELECT outbox.subscribe('one', '{?}'), outbox.subscribe('two', '{??}');
SELECT n, array(SELECT outbox.matching(convert_from(bytes, 'LATIN1'))) AS matching
FROM (VALUES (1, '\xe9'::bytea), (2, '\xe9e8')) t (n, bytes)
ORDER BY n;

\c :dbname
DROP DATABASE outbox_glob_utf8;
DROP DATABASE outbox_glob_eucjp;
DROP DATABASE outbox_glob_latin1;
