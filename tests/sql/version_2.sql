-- A store of schema version 2 as it was before rows told their first claims: schema and rows, as they
-- were written at ManualClock(), +26,010 ms at the end. tests/sql/test_version_2.py says what it holds.
CREATE TABLE schema_version ( version integer PRIMARY KEY );
INSERT INTO schema_version VALUES (2);
CREATE TABLE instance ( one smallint PRIMARY KEY CHECK (one = 1), store_id bigint NOT NULL, created_at_ms bigint NOT NULL, routing text NOT NULL, ring_size integer NOT NULL, ring_high integer NOT NULL, next_queue integer NOT NULL, epoch bigint NOT NULL, log_settings bytea NOT NULL, filter_changes bytea NOT NULL );
CREATE SEQUENCE message_ids CACHE 1;
CREATE TABLE log_heads ( log integer PRIMARY KEY, next_offset bigint NOT NULL, specs_version bigint NOT NULL, zones_version bigint NOT NULL, filters_version bigint NOT NULL, segment_ms bigint NOT NULL, time_ms bigint NOT NULL DEFAULT 0, published bigint NOT NULL DEFAULT 0, duplicates bigint NOT NULL DEFAULT 0, unrouted bigint NOT NULL DEFAULT 0 );
CREATE TABLE requests ( token bytea PRIMARY KEY, message_ids bigint[] NOT NULL, at_ms bigint NOT NULL );
CREATE INDEX requests_by_time ON requests (at_ms);
CREATE TABLE log ( log integer NOT NULL, message_id bigint NOT NULL, published_at_ms bigint NOT NULL, metadata bytea NOT NULL, PRIMARY KEY (log, message_id) );
CREATE TABLE log_segments ( number bigint PRIMARY KEY, start_offset bigint NOT NULL, start_ms bigint NOT NULL );
CREATE TABLE log_cursors ( log integer PRIMARY KEY, cursor bigint NOT NULL, unrouted bigint NOT NULL DEFAULT 0 );
CREATE TABLE messages ( message_id bigint PRIMARY KEY, refs integer NOT NULL, metadata bytea NOT NULL, payload bytea NOT NULL );
CREATE INDEX messages_unheld ON messages (message_id) WHERE refs = 0;
CREATE TABLE dedup ( scope bytea NOT NULL, dedup_id bytea NOT NULL, message_id bigint NOT NULL, expires_at_ms bigint NOT NULL, PRIMARY KEY (scope, dedup_id) );
CREATE INDEX dedup_by_time ON dedup (expires_at_ms);
CREATE TABLE queues ( number integer PRIMARY KEY, name text NOT NULL UNIQUE, spec bytea NOT NULL, coverage bytea NOT NULL, fifo boolean NOT NULL, max_attempts integer NOT NULL, unclaimed_retention_ms bigint NOT NULL );
CREATE TABLE queue_counts ( queue integer NOT NULL, slot smallint NOT NULL, live bigint NOT NULL DEFAULT 0, live_bytes bigint NOT NULL DEFAULT 0, in_flight bigint NOT NULL DEFAULT 0, done bigint NOT NULL DEFAULT 0, failed bigint NOT NULL DEFAULT 0, enqueued_total bigint NOT NULL DEFAULT 0, claimed_total bigint NOT NULL DEFAULT 0, acked_total bigint NOT NULL DEFAULT 0, released_total bigint NOT NULL DEFAULT 0, lease_expired_total bigint NOT NULL DEFAULT 0, failed_total bigint NOT NULL DEFAULT 0, redriven_total bigint NOT NULL DEFAULT 0, removed_total bigint NOT NULL DEFAULT 0, moved_in_total bigint NOT NULL DEFAULT 0, moved_out_total bigint NOT NULL DEFAULT 0, next_sequence bigint NOT NULL DEFAULT 0, time_ms bigint NOT NULL DEFAULT 0, PRIMARY KEY (queue, slot) );
CREATE TABLE items ( queue integer NOT NULL, message_id bigint NOT NULL, zone bytea NOT NULL, rank smallint NOT NULL, vesting_ms bigint NOT NULL, lease_id bytea, attempts integer NOT NULL, forgiven integer NOT NULL, claimed_at_ms bigint NOT NULL, visible_at_ms bigint NOT NULL, expires_at_ms bigint, size integer NOT NULL, delayed boolean NOT NULL, consumer bytea NOT NULL, PRIMARY KEY (queue, message_id) );
CREATE INDEX items_lanes ON items (queue, zone, rank, vesting_ms, message_id) WHERE rank >= 0;
CREATE INDEX items_order ON items (queue, zone, message_id) WHERE rank < 0 AND lease_id IS NULL;
CREATE INDEX items_holders ON items (queue, zone, vesting_ms) WHERE rank < 0 AND lease_id IS NOT NULL;
CREATE INDEX items_deadlines ON items (queue, vesting_ms, lease_id) WHERE lease_id IS NOT NULL;
CREATE INDEX items_delayed ON items (queue, vesting_ms) WHERE delayed;
CREATE INDEX items_unclaimed ON items (expires_at_ms) WHERE expires_at_ms IS NOT NULL;
CREATE TABLE pointers ( queue integer NOT NULL, token integer NOT NULL, zone bytea NOT NULL, vesting_ms bigint NOT NULL, turn bigint NOT NULL, lease_id bytea, PRIMARY KEY (queue, token, zone) );
CREATE INDEX pointers_vesting ON pointers ((queue::bigint), token, vesting_ms, turn);
CREATE TABLE pointer_index ( queue integer NOT NULL, zone bytea NOT NULL, token integer NOT NULL, vesting_ms bigint NOT NULL, empty_since_ms bigint, PRIMARY KEY (queue, zone) );
CREATE INDEX pointer_index_empty ON pointer_index (empty_since_ms) WHERE empty_since_ms IS NOT NULL;
CREATE INDEX pointer_index_tokens ON pointer_index (token) WHERE token > 0;
CREATE TABLE ended ( queue integer NOT NULL, failed boolean NOT NULL, sequence bigint NOT NULL, message_id bigint NOT NULL, ended_at_ms bigint NOT NULL, attempts integer NOT NULL, reason bytea NOT NULL, consumer bytea NOT NULL DEFAULT '', claimed_at_ms bigint NOT NULL DEFAULT 0, lease_id bytea NOT NULL DEFAULT '', PRIMARY KEY (queue, failed, sequence) );
CREATE INDEX ended_by_message ON ended (queue, message_id);
CREATE TABLE attempts ( queue integer NOT NULL, message_id bigint NOT NULL, number integer NOT NULL, consumer bytea NOT NULL, claimed_at_ms bigint NOT NULL, ended_at_ms bigint NOT NULL, ending smallint NOT NULL, reason bytea NOT NULL, lease_id bytea NOT NULL, PRIMARY KEY (queue, message_id, number) );
DELETE FROM schema_version;
INSERT INTO attempts VALUES
('1','9','1',E'\\x','1700000025510','1700000026010','1',E'\\x6e6f',E'\\x018bcfe5cba67e6e9a164106cf6a0000'),
('2','2','1',E'\\x','1700000004500','1700000005000','1',E'\\x6e6f',E'\\x018bcfe57994782fb728b4fa42480000'),
('2','3','1',E'\\x','1700000008500','1700000009000','1',E'\\x6e6f',E'\\x018bcfe5893474db94713d60c8a70000'),
('2','3','2',E'\\x','1700000010000','1700000010500','1',E'\\x6e6f',E'\\x018bcfe58f1075b9ba024204f7c10000'),
('2','4','1',E'\\x','1700000012500','1700000013000','1',E'\\x6e6f',E'\\x018bcfe598d47e87a443df7895580000'),
('2','4','2',E'\\x','1700000014000','1700000014500','1',E'\\x6e6f',E'\\x018bcfe59eb0723a8133287637eb0000'),
('2','4','3',E'\\x','1700000015510','1700000016010','1',E'\\x6e6f',E'\\x018bcfe5a4967c14a3c6612f48260000'),
('2','6','1',E'\\x','1700000021010','1700000021510','1',E'\\x6c61746572',E'\\x018bcfe5ba127b4bbb97d43588560000');
INSERT INTO ended VALUES
('2','false','1782579202621440004','1','1700000002500','1',E'\\x',E'\\x','1700000002000',E'\\x018bcfe56fd070a5abaa9455e3e70000'),
('2','false','1782579206815744004','2','1700000006500','2',E'\\x',E'\\x','1700000006000',E'\\x018bcfe57f707eb1a7a9c3787c650000'),
('2','true','1782579211010048004','3','1700000010500','2',E'\\x6e6f',E'\\x','0',E'\\x');
INSERT INTO instance VALUES
('1','3626764237','1700000000000','inline','1','1','4','0',E'\\x82a76368616e67657391920001ac726574656e74696f6e5f6d73ce240c8400',E'\\x93920101920201920301');
INSERT INTO items VALUES
('1','8',E'\\x','255','1700000026010',NULL,'0','0','0','1700000026010',NULL,'7','false',E'\\x'),
('1','9',E'\\x','255','1700000026010',NULL,'1','1','0','1700000026010',NULL,'11','false',E'\\x'),
('2','4',E'\\x','255','1700000077010',E'\\x018bcfe5aa727cca9e4d6e3c18460000','4','2','1700000017010','1700000016010',NULL,'8','false',E'\\x'),
('2','5',E'\\x','255','1700000619010',E'\\x018bcfe5b2427e8fbcbd04c340210000','1','0','1700000019010','1700000018010',NULL,'9','false',E'\\x'),
('2','6',E'\\x','255','1700003621510',NULL,'1','0','1700000021010','1700003621510',NULL,'10','true',E'\\x'),
('2','7',E'\\x','255','1700000022510',NULL,'0','0','0','1700000022510',NULL,'13','false',E'\\x');
INSERT INTO log VALUES
('0','1','1700000001000',E'\\x0196cf0000018bcfe56be8a0000c0081a57175657565a171'),
('0','2','1700000003500',E'\\x0196cf0000018bcfe575aca0001a0081a57175657565a171'),
('0','3','1700000007500',E'\\x0196cf0000018bcfe5854ca000060081a57175657565a171'),
('0','4','1700000011500',E'\\x0196cf0000018bcfe594eca000080081a57175657565a171'),
('0','5','1700000018010',E'\\x0196cf0000018bcfe5ae5aa000090081a57175657565a171'),
('0','6','1700000020010',E'\\x0196cf0000018bcfe5b62aa0000a0081a57175657565a171'),
('0','7','1700000022510',E'\\x0196cf0000018bcfe5bfeea0000d0081a57175657565a171'),
('0','8','1700000023510',E'\\x0196cf0000018bcfe5c3d6a000070081a57175657565a3666577'),
('0','9','1700000024510',E'\\x0196cf0000018bcfe5c7bea0000b0081a57175657565a3666577');
INSERT INTO log_heads VALUES
('-1','4611686018427387904','4','1','3','1700000001000','1700000000000','0','0','0'),
('0','10','4','1','3','1700000001000','1700000024510','9','0','0');
INSERT INTO log_segments VALUES
('1','1','1700000001000');
INSERT INTO messages VALUES
('1','1',E'\\x0196cf0000018bcfe56be8a0000c0081a57175657565a171',E'\\x646f6e65206174206f6e6365'),
('2','1',E'\\x0196cf0000018bcfe575aca0001a0081a57175657565a171',E'\\x646f6e6520617420746865207365636f6e6420617474656d7074'),
('3','1',E'\\x0196cf0000018bcfe5854ca000060081a57175657565a171',E'\\x6661696c6564'),
('4','1',E'\\x0196cf0000018bcfe594eca000080081a57175657565a171',E'\\x726564726976656e'),
('5','1',E'\\x0196cf0000018bcfe5ae5aa000090081a57175657565a171',E'\\x696e20666c69676874'),
('6','1',E'\\x0196cf0000018bcfe5b62aa0000a0081a57175657565a171',E'\\x676976656e206261636b'),
('7','1',E'\\x0196cf0000018bcfe5bfeea0000d0081a57175657565a171',E'\\x6e6576657220636c61696d6564'),
('8','1',E'\\x0196cf0000018bcfe5c3d6a000070081a57175657565a3666577',E'\\x64726f70706564'),
('9','1',E'\\x0196cf0000018bcfe5c7bea0000b0081a57175657565a3666577',E'\\x64656164206c6574746572');
INSERT INTO pointer_index VALUES
('1',E'\\x','0','1700000026010',NULL),
('2',E'\\x','0','1700000021310',NULL),
('3',E'\\x','0','1700000055510','1700000026010');
INSERT INTO pointers VALUES
('1','0',E'\\x','1700000026010','48',NULL),
('2','0',E'\\x','1700000021310','41',E'\\x5eaab20dcf1e42998938000000000025'),
('3','0',E'\\x','1700000025810','45',E'\\x5eaab20dcf1e4299893800000000002a');
INSERT INTO queue_counts VALUES
('1','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('1','1','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('1','10','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('1','11','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('1','12','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('1','13','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('1','14','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('1','15','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('1','2','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('1','3','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('1','4','2','18','0','0','0','0','0','0','0','0','0','0','0','2','0','0','1700000026010'),
('1','5','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('1','6','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('1','7','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('1','8','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('1','9','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('2','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('2','1','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('2','10','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('2','11','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('2','12','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('2','13','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('2','14','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('2','15','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('2','16','7','84','0','0','0','7','0','0','0','0','0','0','0','0','0','0','1700000022510'),
('2','2','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('2','3','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('2','4','-3','-44','2','2','1','0','11','2','7','0','2','1','0','0','0','111411200950272001','1700000021510'),
('2','5','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('2','6','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('2','7','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('2','8','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('2','9','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('3','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('3','1','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('3','10','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('3','11','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('3','12','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('3','13','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('3','14','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('3','15','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('3','16','2','18','0','0','0','2','0','0','0','0','0','0','0','0','0','0','1700000024510'),
('3','2','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('3','3','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('3','4','-2','-18','0','0','0','0','1','0','1','0','2','0','0','0','2','111411201704591361','1700000026010'),
('3','5','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('3','6','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('3','7','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('3','8','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000'),
('3','9','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','0','1700000000000');
INSERT INTO queues VALUES
('1','dead',E'\\xde0014a46e616d65a464656164a666696c746572ae7175657565203d20276465616427a86f72646572696e67a87374616e64617264a86c656173655f6d73cd7530ac6d61785f617474656d70747305af6261636b6f66665f626173655f6d73cd03e8ae6261636b6f66665f6361705f6d73ce000493e0a864656c61795f6d7300b1646f6e655f726574656e74696f6e5f6d73ce05265c00b36661696c65645f726574656e74696f6e5f6d73ce48190800b6756e636c61696d65645f726574656e74696f6e5f6d7300af6275636b65745f6578706f6e656e7402ab6465736372697074696f6ea0ab646561645f6c6574746572a0a66c6162656c7380ad637265617465645f61745f6d73cf0000018bcfe56800a776657273696f6e01ac6d61785f6d6573736167657300a96d61785f627974657300a86f766572666c6f77a6726566757365',E'\\x84a46c6976659183a5626567696e01a3656e64c0a666696c746572ae7175657565203d20276465616427aa6261636b66696c6c656490a8647261696e696e67c2aa6b6e6f776e5f66726f6d00','false','5','0'),
('2','q',E'\\xde0014a46e616d65a171a666696c746572ab7175657565203d20277127a86f72646572696e67a87374616e64617264a86c656173655f6d73cdea60ac6d61785f617474656d70747302af6261636b6f66665f626173655f6d7300ae6261636b6f66665f6361705f6d73ce000493e0a864656c61795f6d7300b1646f6e655f726574656e74696f6e5f6d73ce05265c00b36661696c65645f726574656e74696f6e5f6d73ce48190800b6756e636c61696d65645f726574656e74696f6e5f6d7300af6275636b65745f6578706f6e656e7402ab6465736372697074696f6ea0ab646561645f6c6574746572a0a66c6162656c7380ad637265617465645f61745f6d73cf0000018bcfe56800a776657273696f6e01ac6d61785f6d6573736167657300a96d61785f627974657300a86f766572666c6f77a6726566757365',E'\\x84a46c6976659183a5626567696e01a3656e64c0a666696c746572ab7175657565203d20277127aa6261636b66696c6c656490a8647261696e696e67c2aa6b6e6f776e5f66726f6d00','false','2','0'),
('3','few',E'\\xde0014a46e616d65a3666577a666696c746572ad7175657565203d202766657727a86f72646572696e67a87374616e64617264a86c656173655f6d73cd7530ac6d61785f617474656d70747301af6261636b6f66665f626173655f6d73cd03e8ae6261636b6f66665f6361705f6d73ce000493e0a864656c61795f6d7300b1646f6e655f726574656e74696f6e5f6d73ce05265c00b36661696c65645f726574656e74696f6e5f6d73ce48190800b6756e636c61696d65645f726574656e74696f6e5f6d7300af6275636b65745f6578706f6e656e7402ab6465736372697074696f6ea0ab646561645f6c6574746572a464656164a66c6162656c7380ad637265617465645f61745f6d73cf0000018bcfe56800a776657273696f6e01ac6d61785f6d6573736167657301a96d61785f627974657300a86f766572666c6f77ab64726f705f6f6c64657374',E'\\x84a46c6976659183a5626567696e01a3656e64c0a666696c746572ad7175657565203d202766657727aa6261636b66696c6c656490a8647261696e696e67c2aa6b6e6f776e5f66726f6d00','false','1','0');
INSERT INTO requests VALUES
(E'\\x5eaab20dcf1e42998938000000000001','{1}','1700000001000'),
(E'\\x5eaab20dcf1e42998938000000000006','{2}','1700000003500'),
(E'\\x5eaab20dcf1e4299893800000000000b','{3}','1700000007500'),
(E'\\x5eaab20dcf1e42998938000000000012','{4}','1700000011500'),
(E'\\x5eaab20dcf1e4299893800000000001d','{5}','1700000018010'),
(E'\\x5eaab20dcf1e42998938000000000020','{6}','1700000020010'),
(E'\\x5eaab20dcf1e42998938000000000024','{7}','1700000022510'),
(E'\\x5eaab20dcf1e42998938000000000026','{8}','1700000023510'),
(E'\\x5eaab20dcf1e42998938000000000028','{9}','1700000024510');
INSERT INTO schema_version VALUES
('2');
SELECT setval('message_ids', 9, true);
