-- Every statement of the SQL store. A statement is named; what it is for stands below its name.
-- ":word" is a parameter. "-- dialect: NAME": no other dialect has the statement.
-- "-- part: NAME" is a text that statements have as {NAME}. "-- each: WORDS" makes a statement of each
-- word, which its name and its text have as {each}.
-- "-- plan: once": one plan is right whatever the parameters; it is kept for a few seconds. Others
-- are planned each time: a plan that was made for a queue of ten must not serve one of a million.
-- Locks are taken in the order log_heads (by log), log_cursors, queues, instance, pointers (by queue
-- and zone), pointer_index, items and ended (by queue and message), queue_counts, messages, attempts.
-- The visit of a claim locks pointers and then waits for items that are not leased: so a transaction
-- that takes such items out of a queue, and writes pointers too, locks those first. Items that are
-- leased may be locked before pointers (ack, release, expiry): no visit waits for them. No statement
-- changes a table in two of its parts, which CockroachDB refuses (docs/cockroachdb.md).

-- === The store itself

-- name: find_remains
-- Whether there is anything that only a store can have left.
SELECT EXISTS (SELECT 1 FROM log_heads) OR EXISTS (SELECT 1 FROM queues)
    OR EXISTS (SELECT 1 FROM messages);

-- name: load_instance
-- Read what the store says of itself.
SELECT store_id, routing, ring_size, ring_high, epoch, log_settings, filter_changes FROM instance;

-- name: make_instance
-- Write what a new store says of itself, and begin its logs, whose messages are numbered from 1 on;
-- nothing happens if another process was faster.
WITH heads AS (
    INSERT INTO log_heads (log, next_offset, specs_version, zones_version, filters_version,
                           segment_ms)
    SELECT log, CASE WHEN log < 0 THEN :never ELSE 1 END, 1, 1, 0, :segment_ms
    FROM generate_series(-1, :logs - 1) AS each (log)
    ON CONFLICT DO NOTHING
)
INSERT INTO instance
VALUES (1, :store_id, :now_ms, :routing, :ring_size, :ring_size, 1, 0, :log_settings,
        :filter_changes)
ON CONFLICT DO NOTHING;

-- name: fresh_id
-- Sixteen bytes that no other process has: what this one names its requests and its writes by.
SELECT decode(replace(gen_random_uuid()::text, '-', ''), 'hex');

-- name: server_time
-- The time of the server, for a clock that follows it.
SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint;

-- part: next_id
-- The id that the next message gets.
(SELECT last_value + is_called::integer FROM message_ids)

-- name: read_heads
-- plan: once
-- Read the end of the log, the id that the next message gets, the versions of what processes keep in
-- memory, and totals. CockroachDB may read the sequence as it was before the heads.
SELECT min(next_offset), greatest({next_id}, max(next_offset) FILTER (WHERE log >= 0)), count(*) - 1,
       min(specs_version), array_agg(zones_version ORDER BY log), min(filters_version),
       min(segment_ms),
       sum(published)::bigint, sum(duplicates)::bigint,
       sum(unrouted)::bigint + (SELECT coalesce(sum(c.unrouted), 0) FROM log_cursors c)::bigint
FROM log_heads;

-- name: lock_heads
-- Keep others from publishing, into all logs or some, and from changing queues, until the commit.
SELECT log FROM log_heads
WHERE :logs::integer[] IS NULL OR log = ANY (:logs::integer[])
ORDER BY log FOR UPDATE;

-- name: advance_heads
-- Let the end of the log pass logs that nothing was published into of late. :next_id was read before:
-- an id that is given out later, by who locks the head then, is no lower. The head of a log that
-- something is being published into is left alone. Readers wait for each other at row -1, so that none
-- takes another reader for a publish.
WITH turn AS MATERIALIZED (
    SELECT log FROM log_heads WHERE log = -1 FOR UPDATE
), free AS MATERIALIZED (
    SELECT log FROM log_heads
    WHERE next_offset < :next_id AND (SELECT count(*) FROM turn) > 0
    ORDER BY log FOR UPDATE SKIP LOCKED
)
UPDATE log_heads h SET next_offset = :next_id
FROM free f WHERE h.log = f.log AND h.next_offset < :next_id;

-- name: add_heads
-- Begin logs at the end of those that there are. The caller has locked all heads.
INSERT INTO log_heads (log, next_offset, specs_version, zones_version, filters_version, segment_ms)
SELECT each.log, {next_id}, h.specs_version, h.zones_version, h.filters_version, h.segment_ms
FROM log_heads h, generate_series(:first::bigint, :last::bigint) AS each (log)
WHERE h.log = -1;

-- name: bump_heads
-- Note that queues or settings have changed: specs, and filters if they are among it. The caller has
-- locked all heads.
UPDATE log_heads
SET specs_version = specs_version + 1, filters_version = filters_version + :filters::bigint,
    next_offset = greatest(next_offset, {next_id}), time_ms = greatest(time_ms, :now_ms)
RETURNING specs_version, filters_version;

-- name: time_floor
-- plan: once
-- The latest time that anything has happened at.
SELECT greatest((SELECT max(time_ms) FROM log_heads), (SELECT max(time_ms) FROM queue_counts));

-- name: put_{each}
-- each: log_settings filter_changes ring_size
-- Change the {each} of the store. A change of the ring waits for transactions that make zones.
UPDATE instance SET {each} = :value;

-- part: tokens_in_use
-- The number of tokens that claims must look at.
greatest(ring_size, (SELECT coalesce(max(token), 0) + 1 FROM pointer_index WHERE token > 0))

-- name: put_ring_high
-- Let claims look at the tokens of all zones that were made before. The caller has locked all heads.
UPDATE instance SET ring_high = {tokens_in_use} RETURNING ring_high;

-- name: ring_in_use
-- The ring, the tokens that claims look at, and those that would do.
SELECT ring_size, ring_high, {tokens_in_use} FROM instance;

-- name: split_pointers
-- Give each token of a queue a range of its own, which another node may serve: Q_C itself.
-- dialect: cockroachdb
ALTER TABLE pointers SPLIT AT
SELECT :queue::bigint, t.token FROM generate_series(0, :tokens::bigint - 1) AS t (token);

-- name: split_vesting
-- The same for the index that claims look at.
-- dialect: cockroachdb
ALTER INDEX pointers@pointers_vesting SPLIT AT
SELECT :queue::bigint, t.token FROM generate_series(0, :tokens::bigint - 1) AS t (token);

-- name: take_epoch
-- Fence every pipeline that took an epoch before.
UPDATE instance SET epoch = epoch + 1 RETURNING epoch;

-- name: switch_routing
-- Change who routes, and fence every pipeline. The caller has locked all heads and all cursors.
UPDATE instance SET routing = :routing, epoch = epoch + 1;

-- === Queues

-- name: load_queues
-- Read every queue's settings and what it has been filled from.
SELECT number, name, spec, coverage FROM queues ORDER BY name;

-- name: add_queue
-- Add a queue with its counters, under a number that was never used before: receipts name it.
WITH taken AS (
    UPDATE instance SET next_queue = next_queue + 1 RETURNING next_queue - 1 AS number
), counters AS (
    INSERT INTO queue_counts (queue, slot, time_ms)
    SELECT number, slot, :now_ms FROM taken, generate_series(0, :slots - 1) AS each (slot)
)
INSERT INTO queues
SELECT number, :name::text, :spec::bytea, :coverage::bytea, :fifo::boolean,
       :max_attempts::bigint, :unclaimed_retention_ms::bigint
FROM taken RETURNING number;

-- name: lock_queue
-- Keep a queue from being changed or deleted until the commit, and read what it was filled from.
SELECT spec, coverage FROM queues WHERE number = :number FOR UPDATE;

-- name: share_queues
-- Keep queues from being deleted until the commit; those that are there are returned.
SELECT number FROM queues WHERE number = ANY (:numbers::integer[]) ORDER BY number FOR KEY SHARE;

-- name: put_spec
-- Write a queue's settings.
UPDATE queues
SET spec = :spec, max_attempts = :max_attempts, unclaimed_retention_ms = :unclaimed_retention_ms
WHERE number = :number;

-- name: put_coverage
-- Write what a queue has been filled from.
UPDATE queues SET coverage = :coverage WHERE number = :number;

-- name: clear_queue
-- Remove the live messages of a queue, before its other rows: an ack that is under way is waited for,
-- and the next statement sees the message that it has ended.
DELETE FROM items WHERE queue = :number AND message_id = ANY (ARRAY(
    SELECT message_id FROM items WHERE queue = :number ORDER BY message_id FOR UPDATE))
RETURNING message_id;

-- name: remove_queue
-- Remove a queue with its other rows; tell which done and failed messages it held.
WITH a AS (DELETE FROM pointers WHERE queue = :number),
     b AS (DELETE FROM pointer_index WHERE queue = :number),
     c AS (DELETE FROM attempts WHERE queue = :number),
     d AS (DELETE FROM queue_counts WHERE queue = :number),
     e AS (DELETE FROM queues WHERE number = :number)
DELETE FROM ended WHERE queue = :number RETURNING message_id;

-- name: sum_counts
-- The depths and totals of one queue, or of each.
SELECT queue, sum(live)::bigint, sum(in_flight)::bigint, sum(done)::bigint, sum(failed)::bigint,
       sum(enqueued_total)::bigint, sum(claimed_total)::bigint, sum(acked_total)::bigint,
       sum(released_total)::bigint, sum(lease_expired_total)::bigint, sum(failed_total)::bigint,
       sum(redriven_total)::bigint, sum(removed_total)::bigint, sum(moved_in_total)::bigint,
       sum(moved_out_total)::bigint, sum(live_bytes)::bigint
FROM queue_counts WHERE :queue::integer IS NULL OR queue = :queue
GROUP BY queue;

-- name: sum_load
-- plan: once
-- The live messages of queues that have limits, and the bytes of their payloads.
SELECT queue, sum(live)::bigint, sum(live_bytes)::bigint
FROM queue_counts WHERE queue = ANY (:queues::bigint[]) GROUP BY queue;

-- part: next_sequences
-- The next sequence numbers of a row of counters: they begin with the time.
greatest(next_sequence, :now_ms * :each_ms)

-- name: add_to_counts
-- plan: once
-- Add to a queue's depths and totals.
UPDATE queue_counts
SET live = live + :live, live_bytes = live_bytes + :live_bytes,
    in_flight = in_flight + :in_flight, done = done + :done,
    failed = failed + :failed, enqueued_total = enqueued_total + :enqueued,
    redriven_total = redriven_total + :redriven, removed_total = removed_total + :removed,
    moved_in_total = moved_in_total + :moved_in, moved_out_total = moved_out_total + :moved_out,
    time_ms = greatest(time_ms, :now_ms)
WHERE queue = :queue AND slot = :slot;

-- part: lowered_pointers
-- Let pointers vest earlier that would be late for the zones of "lower" (queue, zone, vesting_ms,
-- freed). A zone of a FIFO queue that is freed of an item gets a new lease_id in any case: else a
-- visit that has seen the item held a moment before would raise the pointer over what is behind it.
late AS MATERIALIZED (
    SELECT q.queue, q.token, q.zone, z.vesting_ms
    FROM lower z
    JOIN pointer_index p ON p.queue = z.queue AND p.zone = z.zone
    JOIN pointers q ON q.queue = p.queue AND q.token = p.token AND q.zone = p.zone
    WHERE z.freed OR p.vesting_ms > z.vesting_ms
      AND (z.vesting_ms <= :now_ms OR p.vesting_ms - z.vesting_ms > :threshold_ms)
    ORDER BY q.queue, q.zone FOR UPDATE OF q
), lowered AS (
    UPDATE pointers q
    SET vesting_ms = least(q.vesting_ms, z.vesting_ms), lease_id = :stamp,
        turn = CASE WHEN q.vesting_ms > z.vesting_ms THEN :turn ELSE q.turn END
    FROM late z WHERE q.queue = z.queue AND q.token = z.token AND q.zone = z.zone
    RETURNING q.queue, q.zone, q.vesting_ms
), known AS (
    UPDATE pointer_index p SET vesting_ms = l.vesting_ms, empty_since_ms = NULL
    FROM lowered l WHERE p.queue = l.queue AND p.zone = l.zone AND p.vesting_ms > l.vesting_ms
)

-- === Publish

-- part: given_items
-- The messages that come into queues.
unnest(:queues::bigint[], :message_ids::bigint[], :zones::bytea[], :ranks::bigint[],
       :vestings::bigint[], :attempts::bigint[], :expiries::bigint[], :sizes::bigint[])
    AS i (queue, message_id, zone, rank, vesting_ms, attempts, expires_at_ms, size)

-- name: add_items
-- Put messages into queues other than by publish. Their zones were made sure of before.
INSERT INTO items
SELECT i.queue, i.message_id, i.zone, i.rank, i.vesting_ms, NULL, i.attempts, i.attempts, 0,
       i.vesting_ms, i.expires_at_ms, i.size, i.vesting_ms > :now_ms, ''
FROM {given_items};

-- name: find_dedup
-- plan: once
-- Which dedup ids are known, and for which messages.
SELECT w.nth, d.message_id
FROM unnest(:scopes::bytea[], :dedup_ids::bytea[]) WITH ORDINALITY AS w (scope, dedup_id, nth)
JOIN dedup d ON d.scope = w.scope AND d.dedup_id = w.dedup_id
WHERE d.expires_at_ms > :now_ms;

-- name: find_request
-- The ids that a publish was given which has got no answer.
SELECT message_ids FROM requests WHERE token = :token;

-- name: note_change
-- Note that a change is made. No row comes back if it has been made, by an attempt that got no answer.
INSERT INTO requests VALUES (:token, '{{}}', :now_ms) ON CONFLICT DO NOTHING RETURNING at_ms;

-- part: known_head
-- Whether what the process knows is up to date, by the head of a log.
h.specs_version = :specs_version AND h.zones_version = (:zones_versions::bigint[])[h.log + 2]
AND h.segment_ms > :now_ms - :segment_length_ms

-- part: added_to_counts
-- Add the messages of a publish to the counters of their queue.
ON CONFLICT (queue, slot) DO UPDATE
SET live = queue_counts.live + excluded.live,
    live_bytes = queue_counts.live_bytes + excluded.live_bytes,
    enqueued_total = queue_counts.enqueued_total + excluded.enqueued_total,
    time_ms = greatest(queue_counts.time_ms, excluded.time_ms)

-- part: free_head
-- Lock the head of the first log that nobody is publishing into: "locked".
locked AS MATERIALIZED (
    SELECT h.log FROM unnest(:heads::bigint[]) AS w (log)
    CROSS JOIN LATERAL (
        SELECT h.log FROM log_heads h WHERE h.log = w.log AND {known_head} FOR UPDATE SKIP LOCKED
    ) AS h
    LIMIT 1
)

-- part: stored_messages
-- Store messages, each into its queues, once the heads of their logs are locked: "locked". Nothing
-- happens if one is missing there.
whole AS MATERIALIZED (
    SELECT min(log) AS log FROM locked HAVING count(*) = :wanted
), taken AS MATERIALIZED (
    -- The array depends on the row, so that no id is taken before all locks are had.
    SELECT w.log, ARRAY(SELECT nextval('message_ids') FROM generate_series(1, :count::bigint)
                        WHERE w.log IS NOT NULL) AS ids
    FROM whole w
), head AS (
    UPDATE log_heads h
    SET next_offset = greatest(h.next_offset, t.ids[:count::integer] + 1),
        published = h.published + (SELECT count(*) FROM unnest(:logs::bigint[]) AS m (log)
                                   WHERE coalesce(m.log, t.log) = h.log),
        duplicates = h.duplicates + CASE WHEN h.log = t.log THEN :duplicates::bigint ELSE 0 END,
        unrouted = h.unrouted + CASE WHEN h.log = t.log THEN :unrouted::bigint ELSE 0 END,
        time_ms = greatest(h.time_ms, :now_ms)
    FROM taken t, locked l WHERE h.log = l.log
), request AS (
    -- The ids of all messages of the publish, with those of duplicates, which were known before.
    INSERT INTO requests
    SELECT :token, CASE WHEN :duplicates::bigint = 0 THEN t.ids ELSE ARRAY(
               SELECT coalesce(a.known_id, t.ids[a.nth::integer])
               FROM unnest(:known_ids::bigint[], :nths::bigint[]) WITH ORDINALITY
                   AS a (known_id, nth, at)
               ORDER BY a.at) END, :now_ms
    FROM taken t
    RETURNING message_ids
), stored AS (
    INSERT INTO messages
    SELECT t.ids[m.nth::integer], m.refs, m.metadata, m.payload
    FROM taken t, unnest(:refs::bigint[], :metadata::bytea[], :payloads::bytea[])
        WITH ORDINALITY AS m (refs, metadata, payload, nth)
), logged AS (
    INSERT INTO log
    SELECT coalesce(m.log, t.log), t.ids[m.nth::integer], :now_ms, m.metadata
    FROM taken t, unnest(:logs::bigint[], :metadata::bytea[])
        WITH ORDINALITY AS m (log, metadata, nth)
), placed AS (
    INSERT INTO items
    SELECT i.queue, t.ids[i.message_id::integer], i.zone, i.rank, i.vesting_ms, NULL, i.attempts,
           i.attempts, 0, i.vesting_ms, i.expires_at_ms, i.size, i.vesting_ms > :now_ms, ''
    FROM taken t, {given_items}
), counted AS (
    -- In a row that belongs to a head which is locked: no other process waits for it.
    INSERT INTO queue_counts (queue, slot, live, live_bytes, enqueued_total, time_ms)
    SELECT n.queue, :slots + t.log, n.number, n.size, n.number, :now_ms
    FROM taken t, unnest(:count_queues::bigint[], :count_numbers::bigint[], :count_bytes::bigint[])
        AS n (queue, number, size)
    {added_to_counts}
)

-- part: stored_with_zones
-- The same, for messages that may have dedup ids, and zones that may lack a pointer.
-- A dedup id that another process has remembered since it was looked up would make message_id NULL,
-- which fails the statement.
-- Zones that may lack a pointer, or whose pointer may be late, are named; those of which this
-- process knows better are not. Nothing is written to Q_C if there is a pointer that is early
-- enough.
{stored_messages}, remembered AS (
    INSERT INTO dedup
    SELECT d.scope, d.dedup_id, t.ids[d.nth::integer], :dedup_expires_ms
    FROM taken t, unnest(:dedup_scopes::bytea[], :dedup_ids::bytea[], :dedup_nths::bigint[])
        AS d (scope, dedup_id, nth)
    ON CONFLICT (scope, dedup_id) DO UPDATE
    SET message_id = CASE WHEN dedup.expires_at_ms <= :now_ms THEN excluded.message_id END,
        expires_at_ms = excluded.expires_at_ms
), late AS MATERIALIZED (
    -- Zones that have no pointer, or one that would be late.
    SELECT z.queue, z.zone, coalesce(p.token, z.token) AS token, z.vesting_ms
    FROM taken t
    CROSS JOIN unnest(:zone_queues::bigint[], :zone_names::bytea[], :zone_tokens::bigint[],
                      :zone_vestings::bigint[]) AS z (queue, zone, token, vesting_ms)
    LEFT JOIN pointer_index p ON p.queue = z.queue AND p.zone = z.zone
    WHERE p.queue IS NULL OR p.vesting_ms > z.vesting_ms
      AND (z.vesting_ms <= :now_ms OR p.vesting_ms - z.vesting_ms > :threshold_ms)
    ORDER BY z.queue, z.zone
), pointed AS (
    INSERT INTO pointers SELECT queue, token, zone, vesting_ms, :turn, NULL FROM late
    -- Also a zone that another process has made since this statement began.
    ON CONFLICT (queue, token, zone) DO UPDATE
    SET vesting_ms = least(pointers.vesting_ms, excluded.vesting_ms), turn = excluded.turn,
        lease_id = :stamp
    RETURNING queue, token, zone, vesting_ms
), known AS (
    INSERT INTO pointer_index SELECT queue, zone, token, vesting_ms, NULL FROM pointed
    ON CONFLICT (queue, zone) DO UPDATE
    SET vesting_ms = least(pointer_index.vesting_ms, excluded.vesting_ms), empty_since_ms = NULL
)
SELECT message_ids FROM request

-- name: publish
-- plan: once
-- Store messages in one statement: the locks on heads are held for no longer than the server needs,
-- whatever becomes of the process that has sent it. No row comes back if what the process knows is
-- out of date.
WITH locked AS MATERIALIZED (
    SELECT h.log FROM log_heads h
    WHERE h.log = ANY (:heads::bigint[]) AND {known_head}
    ORDER BY h.log FOR UPDATE
), {stored_with_zones};

-- name: publish_free
-- plan: once
-- The same for messages that may go into any log, as those without a group: they go into the first one
-- that nobody is publishing into. No row comes back if there is none, either.
WITH {free_head}, {stored_with_zones};

-- name: publish_known
-- plan: once
-- The same for messages without dedup ids, all of which go into one log, and whose zones are known to
-- have pointers that have vested: as most have.
WITH {free_head}, {stored_messages}
SELECT message_ids FROM request;

-- name: publish_one
-- plan: once
-- The same for one message that goes into one queue.
WITH {free_head}, taken AS MATERIALIZED (
    SELECT log, nextval('message_ids') AS id FROM locked
), head AS (
    UPDATE log_heads h
    SET next_offset = greatest(h.next_offset, t.id + 1), published = h.published + 1,
        time_ms = greatest(h.time_ms, :now_ms)
    FROM taken t WHERE h.log = t.log
), request AS (
    INSERT INTO requests SELECT :token, ARRAY[id], :now_ms FROM taken
), stored AS (
    INSERT INTO messages SELECT id, 1, :metadata, :payload FROM taken
), logged AS (
    INSERT INTO log SELECT log, id, :now_ms, :metadata FROM taken
), placed AS (
    INSERT INTO items
    SELECT :queue, id, :zone, :rank, :vesting_ms, NULL, 0, 0, 0, :vesting_ms,
           :expires_at_ms::bigint, :size, :vesting_ms > :now_ms, ''
    FROM taken
), counted AS (
    INSERT INTO queue_counts (queue, slot, live, live_bytes, enqueued_total, time_ms)
    SELECT :queue, :slots + log, 1, :size, 1, :now_ms FROM taken
    {added_to_counts}
)
SELECT ARRAY[id] FROM taken;

-- name: roll_segment
-- Begin a new segment of the log at its end. The caller has locked all heads.
WITH heads AS (
    UPDATE log_heads SET segment_ms = :now_ms, next_offset = greatest(next_offset, {next_id})
)
INSERT INTO log_segments
SELECT coalesce((SELECT max(number) FROM log_segments), 0) + 1, {next_id}, :now_ms;

-- === Zones: Q_C and the pointer index

-- name: make_zones
-- Give zones a pointer that have none.
WITH new AS MATERIALIZED (
    SELECT queue, zone, token, vesting_ms
    FROM unnest(:queues::bigint[], :zones::bytea[], :tokens::bigint[], :vestings::bigint[])
        AS z (queue, zone, token, vesting_ms)
    WHERE NOT EXISTS (SELECT 1 FROM pointer_index p WHERE p.queue = z.queue AND p.zone = z.zone)
    ORDER BY queue, zone
), pointed AS (
    INSERT INTO pointers SELECT queue, token, zone, vesting_ms, :turn, NULL FROM new
    ON CONFLICT DO NOTHING
    RETURNING queue, token, zone, vesting_ms
)
INSERT INTO pointer_index SELECT queue, zone, token, vesting_ms, NULL FROM pointed
ON CONFLICT DO NOTHING;

-- name: lock_pointers
-- Lock the pointers of zones, before the items that a transaction is going to take out of them.
SELECT 1
FROM unnest(:queues::bigint[], :zones::bytea[]) AS z (queue, zone)
JOIN pointer_index p ON p.queue = z.queue AND p.zone = z.zone
JOIN pointers q ON q.queue = p.queue AND q.token = p.token AND q.zone = p.zone
ORDER BY q.queue, q.zone FOR UPDATE OF q;

-- name: lock_pointers_of
-- The same for all zones of a queue.
SELECT 1 FROM pointers WHERE queue = :queue ORDER BY queue, zone FOR UPDATE;

-- name: lock_pointers_of_items
-- The same for the zones that live messages of a queue are in.
SELECT 1
FROM pointer_index p
JOIN pointers q ON q.queue = p.queue AND q.token = p.token AND q.zone = p.zone
WHERE p.queue = :queue AND p.zone = ANY (ARRAY(
    SELECT zone FROM items WHERE queue = :queue AND message_id = ANY (:message_ids::bigint[])))
ORDER BY q.queue, q.zone FOR UPDATE OF q;

-- name: hold_zones
-- Keep zones from being collected until the commit; those that are there are counted.
SELECT count(*) FROM (
    SELECT 1
    FROM pointer_index p
    JOIN unnest(:queues::bigint[], :zones::bytea[]) AS z (queue, zone)
        ON p.queue = z.queue AND p.zone = z.zone
    ORDER BY p.queue, p.zone FOR KEY SHARE OF p
) AS held;

-- name: lower_zones
-- Let pointers vest earlier, if they would be late for items that have come into their zones.
WITH lower AS (
    SELECT z.*, false AS freed
    FROM unnest(:queues::bigint[], :zones::bytea[], :vestings::bigint[])
        AS z (queue, zone, vesting_ms)
), {lowered_pointers}
SELECT count(*) FROM lowered;

-- name: peek
-- plan: once
-- Look at pointers that have vested, token by token in the order given, locking nothing.
SELECT q.zone, q.token, q.vesting_ms, q.turn
FROM unnest(:tokens::bigint[]) WITH ORDINALITY AS t (token, nth)
CROSS JOIN LATERAL (
    SELECT zone, token, vesting_ms, turn FROM pointers
    WHERE queue::bigint = :queue AND token = t.token AND vesting_ms <= :now_ms
      AND (vesting_ms, turn) > (:after_ms, :after_turn)
    ORDER BY vesting_ms, turn LIMIT :count
) AS q
ORDER BY t.nth, q.vesting_ms, q.turn
LIMIT :count;

-- name: vested_queues
-- Which of some queues have a pointer that has vested: claims wait for them.
SELECT w.queue FROM unnest(:queues::bigint[]) AS w (queue)
WHERE EXISTS (
    SELECT 1 FROM pointers q
    WHERE q.queue::bigint = w.queue AND q.token = ANY (:tokens::integer[])
      AND q.vesting_ms <= :now_ms
);

-- part: won_zones
-- The first of the named zones that are free, up to a number, with their share of the room.
-- Free is a pointer that no process holds, or has changed since this statement began:
-- items are read as of its beginning, so the pointer must be of that moment too. "seen" reads
-- pointers as of then; a lock brings their latest version, for which alone the condition of "free"
-- is judged again. Whatever was changed before the statement began is no loss.
-- The plan is kept while tables grow: pointers are found by an array beside the join, which leaves
-- the planner no other index than that of the zone.
seen AS MATERIALIZED (
    SELECT q.zone, q.token, q.lease_id, c.nth
    FROM unnest(:zones::bytea[], :tokens::bigint[]) WITH ORDINALITY AS c (zone, token, nth)
    JOIN pointers q ON q.queue = :queue AND q.token = c.token AND q.zone = c.zone
    WHERE q.vesting_ms <= :now_ms
      AND q.token = ANY (:tokens::bigint[]) AND q.zone = ANY (:zones::bytea[])
), free AS MATERIALIZED (
    SELECT q.zone, q.token, s.nth
    FROM seen s
    JOIN pointers q ON q.queue = :queue AND q.token = s.token AND q.zone = s.zone
    WHERE q.lease_id IS NOT DISTINCT FROM s.lease_id
      AND q.token = ANY (ARRAY(SELECT token FROM seen))
      AND q.zone = ANY (ARRAY(SELECT zone FROM seen))
    ORDER BY s.nth LIMIT :width
    FOR UPDATE OF q SKIP LOCKED
), won AS MATERIALIZED (
    SELECT zone, token, nth,
           least(:quota_max, floor((:room - place + number) / number)::bigint) AS quota
    FROM (SELECT zone, token, nth, row_number() OVER (ORDER BY nth) AS place,
                 count(*) OVER () AS number FROM free) AS shared
)

-- part: counted_leased
-- Count the items that were leased.
counted AS (
    UPDATE queue_counts c
    SET in_flight = c.in_flight + n.number, claimed_total = c.claimed_total + n.number,
        time_ms = greatest(time_ms, :now_ms)
    FROM (SELECT count(*) AS number FROM leased) AS n
    WHERE c.queue = :queue AND c.slot = :slot AND n.number > 0
)

-- part: leased_items
-- The chosen items go to the wants in order, and are leased and counted.
given AS (
    SELECT c.nth, c.message_id, c.at, w.lease, w.deadline_ms, w.consumer, w.room_bytes,
           sum(c.size) OVER (PARTITION BY w.lease ORDER BY c.at) - c.size AS before_bytes
    FROM chosen c
    JOIN unnest(:leases::bytea[], :deadlines::bigint[], :consumers::bytea[], :lows::bigint[],
                :highs::bigint[], :room_bytes::bigint[])
        AS w (lease, deadline_ms, consumer, low, high, room_bytes)
        ON c.at > w.low AND c.at <= w.high
    -- As receipts lock them: an item that another process has leased meanwhile is locked before it is
    -- found to be so.
    ORDER BY c.message_id
), leased AS (
    UPDATE items i
    SET vesting_ms = g.deadline_ms, lease_id = g.lease, attempts = i.attempts + 1,
        claimed_at_ms = :now_ms, consumer = g.consumer, delayed = false, expires_at_ms = NULL
    FROM given g
    WHERE i.queue = :queue AND i.message_id = g.message_id AND i.lease_id IS NULL
      AND g.before_bytes < g.room_bytes
    RETURNING g.nth, i.zone, i.message_id, i.attempts, i.lease_id, i.vesting_ms, i.visible_at_ms,
              i.rank, g.at
), {counted_leased}

-- part: put_back
-- The pointers go back at the earliest vesting time of their zones.
-- A zone with no more visible items is raised in p at once, in Q_C only after a while (cool_ms): a
-- process that has read p before has committed its items by then. By :clock_ms, the time at which the
-- statement is sent: a claim may have waited for a connection since :now_ms.
put_back AS (
    UPDATE pointers q
    SET vesting_ms = CASE WHEN p.vesting_ms > :clock_ms THEN a.vesting_ms
                          ELSE least(a.vesting_ms, :clock_ms + :cool_ms) END,
        turn = :turn + a.nth, lease_id = :stamp
    FROM after a
    CROSS JOIN LATERAL (
        SELECT vesting_ms FROM pointer_index p WHERE p.queue = :queue AND p.zone = a.zone LIMIT 1
    ) AS p
    WHERE q.queue = :queue AND q.token = a.token AND q.zone = a.zone
      AND q.token = ANY (ARRAY(SELECT token FROM won))
      AND q.zone = ANY (ARRAY(SELECT zone FROM won))
    RETURNING q.zone
), known AS (
    UPDATE pointer_index p
    SET vesting_ms = a.vesting_ms,
        empty_since_ms = CASE WHEN a.vesting_ms = :never_ms
                              THEN coalesce(p.empty_since_ms, :now_ms) END
    FROM after a JOIN put_back b ON b.zone = a.zone
    WHERE p.queue = :queue AND p.zone = a.zone
      AND p.zone = ANY (ARRAY(SELECT zone FROM won))
      AND (p.vesting_ms > :now_ms OR a.vesting_ms > :now_ms) AND p.vesting_ms <> a.vesting_ms
)

-- part: delivered
-- The columns of the items that were leased.
t.message_id, t.attempts, t.lease_id, m.metadata, m.payload, t.visible_at_ms
FROM after a
LEFT JOIN leased t ON t.zone = a.zone
LEFT JOIN LATERAL (
    SELECT metadata, payload FROM messages m WHERE m.message_id = t.message_id LIMIT 1
) AS m ON true
ORDER BY t.at

-- part: first_items
-- Lock visible items of a zone z of a standard queue, up to its quota. Only the first lane is looked at,
-- and items that another process is at are passed by. A claim that was there a moment ago names the
-- lane, and the time from which on it has items: those before are gone, and to step over what they have
-- left in the index costs more than the rest, until it is vacuumed. A zone that has got items in an
-- earlier lane gives nothing then.
SELECT message_id, vesting_ms, size, lease_id IS NOT NULL AS expired FROM items i
WHERE i.queue = :queue AND i.zone = z.zone AND i.rank >= 0
  AND i.rank = coalesce(z.rank, (
        SELECT f.rank FROM items f WHERE f.queue = :queue AND f.zone = z.zone
        AND f.rank >= 0 ORDER BY f.rank LIMIT 1))
  AND (SELECT 1 FROM items f WHERE f.queue = :queue AND f.zone = z.zone
       AND f.rank >= 0 AND f.rank < z.rank LIMIT 1) IS NULL
  AND i.vesting_ms >= z.from_ms AND i.vesting_ms <= :now_ms
ORDER BY i.vesting_ms, i.message_id LIMIT z.quota FOR UPDATE SKIP LOCKED

-- part: taken_items
-- The items that were leased; how many of those picked had an expired lease; and, in rows without a
-- message, a few zones whose pointers have vested since the last look and are not among those known.
SELECT t.nth, (SELECT count(*) FROM picked WHERE expired), t.message_id, t.attempts, t.lease_id,
       m.metadata, m.payload, t.visible_at_ms, t.rank, t.at
FROM leased t
LEFT JOIN LATERAL (
    SELECT metadata, payload FROM messages m WHERE m.message_id = t.message_id LIMIT 1
) AS m ON true
UNION ALL
SELECT 0, n.token, NULL, NULL, n.zone, NULL, NULL, NULL, NULL, 0
FROM unnest(:tokens::bigint[]) AS w (token)
CROSS JOIN LATERAL (
    SELECT token, zone FROM pointers
    WHERE queue::bigint = :queue AND token = w.token
      AND vesting_ms >= :since_ms AND vesting_ms <= :now_ms AND zone <> ALL (:known::bytea[])
    ORDER BY vesting_ms, turn LIMIT :count
) AS n
ORDER BY at

-- name: take
-- plan: once
-- Lease visible items of zones of a standard queue that are known to have more of them than are
-- taken: so their pointers stay as they are.
WITH picked AS MATERIALIZED (
    SELECT z.zone, z.nth, i.*
    FROM unnest(:zones::bytea[], :quotas::bigint[], :ranks::bigint[], :froms::bigint[])
        WITH ORDINALITY AS z (zone, quota, rank, from_ms, nth)
    CROSS JOIN LATERAL ({first_items}) AS i
), chosen AS (
    SELECT *, row_number() OVER (ORDER BY nth, vesting_ms, message_id) AS at
    FROM picked WHERE NOT expired
), {leased_items}
{taken_items};

-- name: take_one
-- plan: once
-- The same for one claim and one zone, as those of a queue without groups.
WITH picked AS MATERIALIZED (
    SELECT i.*
    FROM (SELECT :zone::bytea, :quota::bigint, :rank::bigint, :from_ms::bigint)
        AS z (zone, quota, rank, from_ms)
    CROSS JOIN LATERAL ({first_items}) AS i
), given AS (
    SELECT message_id, row_number() OVER before AS at, sum(size) OVER before - size AS before_bytes
    FROM picked WHERE NOT expired WINDOW before AS (ORDER BY vesting_ms, message_id)
), leased AS (
    UPDATE items i
    SET vesting_ms = :deadline_ms, lease_id = :lease, attempts = i.attempts + 1,
        claimed_at_ms = :now_ms, consumer = :consumer, delayed = false, expires_at_ms = NULL
    FROM given g
    WHERE i.queue = :queue AND i.message_id = g.message_id AND i.lease_id IS NULL
      AND g.before_bytes < :room_bytes
    RETURNING 1 AS nth, i.message_id, i.attempts, i.lease_id, i.visible_at_ms, i.rank, g.at
), {counted_leased}
{taken_items};

-- name: visit
-- plan: once
-- Visit zones of a standard queue: the first of those named that are free, up to a number. Compare
-- and set on each pointer, share the room between them, lease what is visible, and put the pointer
-- back at the zone's earliest vesting time. Expired items are not taken: their attempt has to be
-- written down first.
WITH RECURSIVE {won_zones}, lanes (zone, rank) AS (
    SELECT w.zone, (SELECT i.rank FROM items i WHERE i.queue = :queue AND i.zone = w.zone
                    AND i.rank >= 0 ORDER BY i.rank LIMIT 1)
    FROM won w
    UNION ALL
    SELECT l.zone, (SELECT i.rank FROM items i WHERE i.queue = :queue AND i.zone = l.zone
                    AND i.rank >= 0 AND i.rank > l.rank ORDER BY i.rank LIMIT 1)
    FROM lanes l WHERE l.rank IS NOT NULL
), visible AS (
    SELECT w.zone, w.nth, w.quota, i.message_id, i.size, i.lease_id IS NOT NULL AS expired,
           row_number() OVER (PARTITION BY w.zone ORDER BY l.rank, i.vesting_ms, i.message_id)
               AS place
    FROM won w
    JOIN lanes l ON l.zone = w.zone AND l.rank IS NOT NULL
    CROSS JOIN LATERAL (
        SELECT message_id, vesting_ms, lease_id, size FROM items i
        WHERE i.queue = :queue AND i.zone = w.zone AND i.rank = l.rank AND i.rank >= 0
          AND i.vesting_ms <= :now_ms
        ORDER BY i.vesting_ms, i.message_id LIMIT w.quota + 1
    ) AS i
), chosen AS (
    SELECT *, row_number() OVER (ORDER BY nth, place) AS at
    FROM visible WHERE NOT expired AND place <= quota
), {leased_items}, later AS (
    SELECT zone, min(vesting_ms) AS vesting_ms FROM (
        SELECT w.zone, i.vesting_ms
        FROM won w
        JOIN lanes l ON l.zone = w.zone AND l.rank IS NOT NULL
        CROSS JOIN LATERAL (
            SELECT vesting_ms FROM items i
            WHERE i.queue = :queue AND i.zone = w.zone AND i.rank = l.rank AND i.rank >= 0
              AND i.vesting_ms > :now_ms
            ORDER BY i.vesting_ms LIMIT 1
        ) AS i
        UNION ALL
        SELECT zone, vesting_ms FROM leased
    ) AS every GROUP BY zone
), after AS (
    SELECT w.zone, w.token, w.nth,
           CASE WHEN (SELECT count(*) FROM visible v WHERE v.zone = w.zone)
                   > (SELECT count(*) FROM leased t WHERE t.zone = w.zone)
                THEN :now_ms ELSE coalesce(l.vesting_ms, :never_ms) END AS vesting_ms
    FROM won w LEFT JOIN later l ON l.zone = w.zone
), {put_back}
SELECT a.nth, a.vesting_ms, EXISTS (SELECT 1 FROM visible v WHERE v.zone = a.zone AND v.expired),
       {delivered};

-- name: visit_fifo
-- plan: once
-- Visit zones of a FIFO queue, as above: what is taken is the run of visible items that the zone
-- begins with, and nothing while anything of the zone is held.
WITH {won_zones}, held AS (
    SELECT w.zone, i.vesting_ms FROM won w
    CROSS JOIN LATERAL (
        SELECT vesting_ms FROM items i
        WHERE i.queue = :queue AND i.zone = w.zone AND i.rank < 0 AND i.lease_id IS NOT NULL
        ORDER BY vesting_ms LIMIT 1
    ) AS i
), run AS (
    SELECT w.zone, w.nth, i.message_id, i.vesting_ms, i.size, i.place, w.quota,
           bool_and(i.vesting_ms <= :now_ms) OVER (PARTITION BY w.zone ORDER BY i.message_id) AS up
    FROM won w
    CROSS JOIN LATERAL (
        SELECT message_id, vesting_ms, size, row_number() OVER (ORDER BY message_id) AS place
        FROM items i
        WHERE i.queue = :queue AND i.zone = w.zone AND i.rank < 0 AND i.lease_id IS NULL
        ORDER BY message_id LIMIT w.quota + 1
    ) AS i
    WHERE NOT EXISTS (SELECT 1 FROM held h WHERE h.zone = w.zone)
), chosen AS (
    SELECT *, row_number() OVER (ORDER BY nth, message_id) AS at FROM run WHERE up AND place <= quota
), {leased_items}, after AS (
    SELECT w.zone, w.token, w.nth, coalesce(
        (SELECT min(t.vesting_ms) FROM leased t WHERE t.zone = w.zone),
        (SELECT h.vesting_ms FROM held h WHERE h.zone = w.zone),
        (SELECT greatest(r.vesting_ms, :now_ms) FROM run r
         WHERE r.zone = w.zone ORDER BY r.message_id LIMIT 1),
        :never_ms) AS vesting_ms
    FROM won w
), {put_back}
SELECT a.nth, a.vesting_ms, EXISTS (SELECT 1 FROM held h WHERE h.zone = a.zone
                                     AND h.vesting_ms <= :now_ms),
       {delivered};

-- name: idle_zones
-- plan: once
-- Zones that have been empty for long enough to be collected.
SELECT queue, zone, token FROM pointer_index
WHERE empty_since_ms <= :before_ms ORDER BY empty_since_ms LIMIT :count;

-- name: lock_zones
-- The first step of a collection, after the heads: zones that another process visits, or holds to put
-- items in, are left out.
SELECT q.queue, q.zone
FROM unnest(:queues::bigint[], :zones::bytea[], :tokens::bigint[]) AS z (queue, zone, token)
JOIN pointers q ON q.queue = z.queue AND q.zone = z.zone AND q.token = z.token
JOIN pointer_index p ON p.queue = z.queue AND p.zone = z.zone
WHERE p.empty_since_ms <= :before_ms
FOR UPDATE OF q, p SKIP LOCKED;

-- part: without_items
-- Whether a zone of the pointer index is empty. Not EXISTS, which the planner may answer by reading
-- all items.
(SELECT 1 FROM items i WHERE i.queue = p.queue AND i.zone = p.zone AND i.rank >= 0 LIMIT 1) IS NULL
AND (SELECT 1 FROM items i WHERE i.queue = p.queue AND i.zone = p.zone AND i.rank < 0
     AND i.lease_id IS NULL LIMIT 1) IS NULL
AND (SELECT 1 FROM items i WHERE i.queue = p.queue AND i.zone = p.zone AND i.rank < 0
     AND i.lease_id IS NOT NULL LIMIT 1) IS NULL

-- name: collect_zones
-- The second, which sees all that was committed before the locks were had: zones without items go.
WITH gone AS (
    DELETE FROM pointer_index p
    USING unnest(:queues::bigint[], :zones::bytea[]) AS z (queue, zone)
    WHERE p.queue = z.queue AND p.zone = z.zone
      AND {without_items}
    RETURNING p.queue, p.zone, p.token
), dropped AS (
    DELETE FROM pointers q USING gone g
    WHERE q.queue = g.queue AND q.token = g.token AND q.zone = g.zone
)
SELECT queue, zone FROM gone;

-- name: revive_zones
-- The third: zones that have items after all are looked at, and no longer taken for empty.
WITH looked AS (
    UPDATE pointers q SET vesting_ms = least(q.vesting_ms, :now_ms), lease_id = :stamp
    FROM unnest(:queues::bigint[], :zones::bytea[]) AS z (queue, zone)
    JOIN pointer_index p ON p.queue = z.queue AND p.zone = z.zone
    WHERE q.queue = p.queue AND q.token = p.token AND q.zone = p.zone
)
UPDATE pointer_index p SET vesting_ms = least(p.vesting_ms, :now_ms), empty_since_ms = NULL
FROM unnest(:queues::bigint[], :zones::bytea[]) AS z (queue, zone)
WHERE p.queue = z.queue AND p.zone = z.zone;

-- name: bump_zones
-- Make every process forget its knowledge of zones, before it publishes into all logs or some.
UPDATE log_heads SET zones_version = zones_version + 1
WHERE :logs::integer[] IS NULL OR log = ANY (:logs::integer[]);

-- name: find_idle
-- A page of the zones, and which of them are empty without a mark.
SELECT p.queue, p.zone, p.empty_since_ms IS NULL AND {without_items}
FROM (SELECT queue, zone, empty_since_ms FROM pointer_index
      WHERE (queue, zone) > (:queue, :zone) ORDER BY queue, zone LIMIT :count) AS p
ORDER BY p.queue, p.zone;

-- name: mark_idle
-- Note that zones have nothing in them; the collection looks again.
UPDATE pointer_index p SET empty_since_ms = :now_ms
FROM unnest(:queues::bigint[], :zones::bytea[]) AS z (queue, zone)
WHERE p.queue = z.queue AND p.zone = z.zone AND p.empty_since_ms IS NULL;

-- name: find_orphans
-- Go through the items, a page at a time, for zones without a pointer. There are none; a net.
SELECT i.queue, i.message_id, i.zone, i.vesting_ms, p.queue IS NULL
FROM (SELECT queue, message_id, zone, vesting_ms FROM items
      WHERE (queue, message_id) > (:queue, :message_id)
      ORDER BY queue, message_id LIMIT :count) AS i
LEFT JOIN pointer_index p ON p.queue = i.queue AND p.zone = i.zone
ORDER BY i.queue, i.message_id;

-- === Receipts

-- part: of_receipts
-- Whether an item is held under the lease that a receipt of it names. Not a join, which the planner
-- may begin with the items: arrays leave it no other index than the primary key.
i.queue = ANY (:queues::bigint[]) AND i.message_id = ANY (:message_ids::bigint[])
AND coalesce(i.lease_id, '') || convert_to(i.message_id::text, 'UTF8') = ANY (:receipts::bytea[])

-- part: acked_items
-- The items of receipts that are in time leave the live ones.
gone AS (
    DELETE FROM items i WHERE {of_receipts} AND i.vesting_ms > :now_ms RETURNING i.*
)

-- part: kept_done
-- The rows of done messages, with their last attempt.
kept AS (
    INSERT INTO ended
    SELECT g.queue, false,
           (c.first + row_number() OVER (PARTITION BY g.queue ORDER BY g.message_id) - 1)
               * :slots + :slot,
           g.message_id, :now_ms, g.attempts, '', g.consumer, g.claimed_at_ms, g.lease_id
    FROM gone g JOIN counted c ON c.queue = g.queue
)

-- part: late_receipts
-- Receipts whose items are held, and whose deadline has come.
SELECT i.queue, i.message_id, i.lease_id, false, NULL::bytea, i.consumer
FROM items i WHERE {of_receipts} AND i.vesting_ms <= :now_ms

-- part: numbers_gone
-- How many live messages of each queue are gone, and the bytes of their payloads.
(SELECT queue, count(*) AS number, sum(size)::bigint AS size FROM gone GROUP BY queue ORDER BY queue)

-- part: counted_done
-- Counters, and the sequence numbers of done messages.
UPDATE queue_counts c
SET live = live - n.number, live_bytes = live_bytes - n.size,
    in_flight = in_flight - n.number, done = done + n.number,
    acked_total = acked_total + n.number, next_sequence = {next_sequences} + n.number,
    time_ms = greatest(time_ms, :now_ms)

-- name: ack
-- plan: once
-- Settle as done what is held under the leases that receipts of standard queues name, in one
-- statement. Tells which were held, and which of those in time.
WITH {acked_items}, counted AS (
    {counted_done}
    FROM {numbers_gone} AS n
    WHERE c.queue = n.queue AND c.slot = :slot
    RETURNING c.queue, c.next_sequence - n.number AS first
), {kept_done}
SELECT queue, message_id, lease_id, true, NULL::bytea, consumer FROM gone
UNION ALL {late_receipts};

-- name: ack_lease
-- plan: once
-- The same for messages of one queue that are held under one lease, as those of one claim are. Tells
-- those that were held, and in time. The planner finds no index in the conditions but the primary key.
WITH gone AS (
    DELETE FROM items i
    WHERE i.queue = :queue AND i.message_id = ANY (:message_ids::bigint[])
      AND coalesce(i.lease_id, '') = :lease AND i.vesting_ms > :now_ms
    RETURNING i.message_id, i.attempts, i.consumer, i.claimed_at_ms, i.size
), counted AS (
    {counted_done}
    FROM (SELECT count(*) AS number, sum(size)::bigint AS size FROM gone) AS n
    WHERE c.queue = :queue AND c.slot = :slot AND n.number > 0
    RETURNING c.next_sequence - n.number AS first
), kept AS (
    INSERT INTO ended
    SELECT :queue, false,
           (c.first + row_number() OVER (ORDER BY g.message_id) - 1) * :slots + :slot,
           g.message_id, :now_ms, g.attempts, '', g.consumer, g.claimed_at_ms, :lease
    FROM gone g, counted c
)
SELECT message_id, consumer FROM gone;

-- name: ack_fifo
-- plan: once
-- The same for receipts of any queues. Tells also which zones of FIFO queues are free of them.
WITH {acked_items}, lower AS (
    -- A zone of a FIFO queue may be free again.
    SELECT DISTINCT queue, zone, :now_ms AS vesting_ms, true AS freed FROM gone WHERE rank < 0
), {lowered_pointers}, counted AS (
    {counted_done}
    -- After the pointers, as every statement locks them.
    FROM (SELECT count(*) FROM lowered) AS before, {numbers_gone} AS n
    WHERE c.queue = n.queue AND c.slot = :slot
    RETURNING c.queue, c.next_sequence - n.number AS first
), {kept_done}
SELECT queue, message_id, lease_id, true, CASE WHEN rank < 0 THEN zone END, consumer FROM gone
UNION ALL {late_receipts};

-- name: ack_late
-- Settle as done what waits again in a standard queue, if nobody has claimed it since: its last attempt
-- is that of the receipt. Tells which, and whose attempts they were.
WITH gone AS (
    DELETE FROM items i
    USING attempts t, unnest(:message_ids::bigint[], :numbers::bigint[], :leases::bytea[])
        AS w (message_id, number, lease)
    WHERE i.queue = :queue AND i.message_id = w.message_id AND i.attempts = w.number
      AND i.lease_id IS NULL AND i.rank >= 0
      AND t.queue = :queue AND t.message_id = w.message_id AND t.number = w.number
      AND t.lease_id = w.lease
    RETURNING i.queue, i.message_id, i.attempts, i.size, t.consumer, t.claimed_at_ms, t.lease_id
), ended_otherwise AS (
    DELETE FROM attempts t USING gone g
    WHERE t.queue = g.queue AND t.message_id = g.message_id AND t.number = g.attempts
), counted AS (
    UPDATE queue_counts c
    SET live = live - n.number, live_bytes = live_bytes - n.size, done = done + n.number,
        acked_total = acked_total + n.number, next_sequence = {next_sequences} + n.number,
        time_ms = greatest(time_ms, :now_ms)
    FROM {numbers_gone} AS n
    WHERE c.queue = n.queue AND c.slot = :slot
    RETURNING c.queue, c.next_sequence - n.number AS first
), {kept_done}
SELECT queue, message_id, lease_id, true, NULL::bytea, consumer FROM gone;

-- name: find_ended
-- Which of some receipts were settled, and whether to fail: by a verb that has got no answer.
SELECT a.queue, a.message_id, a.lease_id,
       EXISTS (SELECT 1 FROM ended e WHERE e.queue = a.queue AND e.message_id = a.message_id
               AND e.failed)
FROM unnest(:queues::bigint[], :message_ids::bigint[], :leases::bytea[])
    AS w (queue, message_id, lease)
CROSS JOIN LATERAL (
    SELECT queue, message_id, lease_id, ending FROM attempts t
    WHERE t.queue = w.queue AND t.message_id = w.message_id
    UNION ALL
    SELECT queue, message_id, lease_id, 0 FROM ended e
    WHERE e.queue = w.queue AND e.message_id = w.message_id AND NOT e.failed
) AS a
WHERE a.lease_id = w.lease AND a.ending = :ending;

-- name: extend
-- plan: once
-- Move the deadline of what is held under the leases that receipts name. Tells which were held,
-- which of those in time, and the zones of those.
WITH moved AS (
    UPDATE items i SET vesting_ms = :deadline_ms WHERE {of_receipts} AND i.vesting_ms > :now_ms
    RETURNING i.queue, i.message_id, i.lease_id, i.zone, i.consumer
), lower AS (
    -- A deadline may be sooner than it was.
    SELECT DISTINCT queue, zone, :deadline_ms AS vesting_ms, false AS freed FROM moved
), {lowered_pointers}, counted AS (
    -- After the pointers, as every statement locks them.
    UPDATE queue_counts c SET time_ms = greatest(time_ms, :now_ms)
    FROM (SELECT count(*) FROM lowered) AS first,
         (SELECT DISTINCT queue FROM moved ORDER BY queue) AS n
    WHERE c.queue = n.queue AND c.slot = :slot
)
SELECT queue, message_id, lease_id, true, zone, consumer FROM moved UNION ALL {late_receipts};

-- name: held
-- plan: once
-- The messages held under a lease. It reads the index entries of all that is held in the queue.
SELECT message_id FROM items
WHERE queue = :queue AND lease_id = :lease AND lease_id IS NOT NULL ORDER BY message_id;

-- part: exhausted
-- Whether an item whose attempt has failed fails for good.
(i.attempts - i.forgiven >= q.max_attempts OR i.attempts >= :most_attempts)

-- part: waiting_again
-- The attempts of the items of "over" end, and the items wait again, from until_ms on; but for those
-- that fail. Attempts that were not seen (:unseen is 1) do not count, and are not written down.
back AS (
    UPDATE items i
    SET vesting_ms = o.until_ms, visible_at_ms = o.until_ms, lease_id = NULL,
        attempts = i.attempts - :unseen, delayed = o.until_ms > :now_ms,
        expires_at_ms = CASE WHEN o.unclaimed_retention_ms > 0
                             THEN o.until_ms + o.unclaimed_retention_ms END
    FROM over o
    WHERE i.queue = o.queue AND i.message_id = o.message_id AND NOT o.fails
    RETURNING i.queue, i.zone, i.rank, i.vesting_ms
), tried AS (
    INSERT INTO attempts
    SELECT queue, message_id, attempts, consumer, claimed_at_ms, :now_ms, :ending, :reason, lease_id
    FROM over WHERE NOT fails AND :unseen::bigint = 0
), lower AS (
    -- The zone of a FIFO queue is free of the item now, even if it is delayed itself. Not in the
    -- past: a zone takes its turn behind those that wait.
    SELECT queue, zone, min(CASE WHEN rank < 0 THEN :now_ms
                                 ELSE greatest(vesting_ms, :now_ms) END) AS vesting_ms,
           bool_or(rank < 0) AS freed
    FROM back GROUP BY queue, zone
), {lowered_pointers}, counted AS (
    UPDATE queue_counts c
    SET in_flight = in_flight - n.number,
        released_total = released_total + CASE WHEN :ending = 1 THEN n.number ELSE 0 END,
        lease_expired_total = lease_expired_total + CASE WHEN :ending = 2 THEN n.number ELSE 0 END,
        time_ms = greatest(time_ms, :now_ms)
    -- After the pointers, as every statement locks them.
    FROM (SELECT count(*) FROM lowered) AS before,
         (SELECT queue, count(*) AS number FROM back GROUP BY queue ORDER BY queue) AS n
    WHERE c.queue = n.queue AND c.slot = :slot
)

-- name: release
-- plan: once
-- Let items wait again that are held under the leases of receipts, in one statement. Tells of each
-- that was held whether it was in time, whether it is to fail (which is another statement), from when
-- on it waits, and its zone. The delay doubles with each failed attempt, from delays up to caps; a
-- random part of it, less than half, is taken away.
WITH over AS MATERIALIZED (
    SELECT i.*, q.unclaimed_retention_ms,
           :unseen::bigint = 0 AND {exhausted} AS fails,
           CASE WHEN :unseen::bigint = 1 THEN i.visible_at_ms
                ELSE :now_ms + d.full_ms
                     - floor(d.random * (d.full_ms::double precision
                                         / 2::double precision))::bigint END AS until_ms
    FROM items i
    JOIN queues q ON q.number = i.queue
    CROSS JOIN LATERAL (
        SELECT array_position(:own::bigint[], i.queue::bigint) AS at
    ) AS o
    CROSS JOIN LATERAL (
        SELECT least(
                (:caps::bigint[])[o.at]::double precision,
                (:delays::bigint[])[o.at]::double precision * power(
                    2::double precision,
                    least(greatest(i.attempts - i.forgiven, 1) - 1, 63)::double precision)
            )::bigint AS full_ms,
            (:randoms::double precision[])[1 + i.message_id % cardinality(:randoms)] AS random
    ) AS d
    WHERE {of_receipts} AND i.vesting_ms > :now_ms
    ORDER BY i.queue, i.message_id FOR UPDATE OF i
), {waiting_again}
SELECT queue, message_id, lease_id, true, zone, consumer, fails, until_ms FROM over
UNION ALL
SELECT late.*, false, 0 FROM ({late_receipts}) AS late;

-- name: expire
-- plan: once
-- Let items wait again whose leases are over: of some queues, the first ones. Tells which, which of
-- them are to fail, and their zones. Items that another process is at are passed by.
WITH over AS MATERIALIZED (
    SELECT i.*, q.unclaimed_retention_ms, {exhausted} AS fails, :now_ms AS until_ms
    FROM unnest(:queues::bigint[]) AS w (queue)
    JOIN queues q ON q.number = w.queue
    CROSS JOIN LATERAL (
        SELECT * FROM items i
        WHERE i.queue = w.queue AND i.lease_id IS NOT NULL AND i.vesting_ms <= :now_ms
        ORDER BY i.vesting_ms LIMIT :count FOR UPDATE SKIP LOCKED
    ) AS i
    LIMIT :count
), {waiting_again}
SELECT queue, message_id, lease_id, true, zone, consumer, fails, until_ms FROM over;

-- name: fail
-- plan: once
-- Let items fail that are held under leases and are out of attempts: from the live ones into the
-- failed ones. :late: whether their deadline has come. Tells which, and the zones of FIFO queues.
WITH gone AS (
    DELETE FROM items i USING queues q
    WHERE {of_receipts} AND q.number = i.queue
      AND (i.vesting_ms <= :now_ms) = :late::boolean AND {exhausted}
    RETURNING i.*, q.max_attempts
), lower AS (
    SELECT DISTINCT queue, zone, :now_ms AS vesting_ms, true AS freed FROM gone WHERE rank < 0
), {lowered_pointers}, counted AS (
    UPDATE queue_counts c
    SET live = live - n.number, live_bytes = live_bytes - n.size,
        in_flight = in_flight - n.number, failed = failed + n.number,
        failed_total = failed_total + n.number, next_sequence = {next_sequences} + n.number,
        released_total = released_total + CASE WHEN :ending = 1 THEN n.number ELSE 0 END,
        lease_expired_total = lease_expired_total + CASE WHEN :ending = 2 THEN n.number ELSE 0 END,
        time_ms = greatest(time_ms, :now_ms)
    FROM (SELECT count(*) FROM lowered) AS before, {numbers_gone} AS n
    WHERE c.queue = n.queue AND c.slot = :slot
    RETURNING c.queue, c.next_sequence - n.number AS first
), kept AS (
    INSERT INTO ended
    SELECT g.queue, true,
           (c.first + row_number() OVER (PARTITION BY g.queue ORDER BY g.message_id) - 1)
               * :slots + :slot,
           g.message_id, :now_ms, g.attempts,
           CASE WHEN :why::bytea <> '' THEN :why
                ELSE convert_to(format('released %s times', g.max_attempts), 'UTF8') END
    FROM gone g JOIN counted c ON c.queue = g.queue
), tried AS (
    INSERT INTO attempts
    SELECT queue, message_id, attempts, consumer, claimed_at_ms, :now_ms, :ending, :reason, lease_id
    FROM gone
)
SELECT queue, message_id, lease_id, true, CASE WHEN rank < 0 THEN zone END, consumer FROM gone;

-- name: oldest_waiting
-- The waiting messages of a queue with the lowest ids, and the bytes of their payloads.
SELECT message_id, size FROM items WHERE queue = :queue AND lease_id IS NULL
ORDER BY message_id LIMIT :count;

-- name: drop_items
-- Let waiting items of a queue fail, which is over a limit: from the live ones into the failed ones.
WITH picked AS (
    SELECT message_id FROM items
    WHERE queue = :queue AND message_id = ANY (:message_ids::bigint[]) AND lease_id IS NULL
    ORDER BY message_id FOR UPDATE
), gone AS (
    DELETE FROM items i USING picked p
    WHERE i.queue = :queue AND i.message_id = p.message_id
    RETURNING i.*
), counted AS (
    UPDATE queue_counts c
    SET live = live - n.number, live_bytes = live_bytes - n.size, failed = failed + n.number,
        failed_total = failed_total + n.number, next_sequence = {next_sequences} + n.number,
        time_ms = greatest(time_ms, :now_ms)
    FROM {numbers_gone} AS n
    WHERE c.queue = n.queue AND c.slot = :slot
    RETURNING c.queue, c.next_sequence - n.number AS first
), kept AS (
    INSERT INTO ended
    SELECT g.queue, true, (c.first + row_number() OVER (ORDER BY g.message_id) - 1) * :slots + :slot,
           g.message_id, :now_ms, g.attempts, :why
    FROM gone g JOIN counted c ON c.queue = g.queue
)
SELECT message_id, zone, size FROM gone;

-- === What is due. What is bounded by a count is picked first (MATERIALIZED): joined as a subquery it
-- may be picked again for every row, each time others than those that are locked already.

-- name: any_expired
-- plan: once
-- Whether a lease of some queues is over.
SELECT 1 FROM unnest(:queues::bigint[]) AS w (queue)
WHERE EXISTS (SELECT 1 FROM items i WHERE i.queue = w.queue AND i.lease_id IS NOT NULL
              AND i.vesting_ms <= :now_ms)
LIMIT 1;

-- name: come_due
-- Mark delays that are over: only the count, the waking of claims and the life-cycle log depend on it.
WITH d AS MATERIALIZED (
    SELECT i.queue, i.message_id FROM unnest(:queues::bigint[]) AS w (queue)
    CROSS JOIN LATERAL (
        SELECT queue, message_id FROM items i
        WHERE i.queue = w.queue AND i.delayed AND i.vesting_ms <= :now_ms
        ORDER BY i.vesting_ms LIMIT :count FOR UPDATE SKIP LOCKED
    ) AS i
    LIMIT :count
)
UPDATE items i SET delayed = false
FROM d
WHERE i.queue = d.queue AND i.message_id = d.message_id
RETURNING i.queue, i.message_id;

-- name: next_due
-- plan: once
-- When the next lease and delay of some queues, unclaimed retention and dedup window is over.
SELECT (SELECT min(i.vesting_ms) FROM unnest(:queues::bigint[]) AS w (queue)
        CROSS JOIN LATERAL (SELECT vesting_ms FROM items WHERE queue = w.queue
                            AND lease_id IS NOT NULL ORDER BY vesting_ms LIMIT 1) AS i),
       (SELECT min(i.vesting_ms) FROM unnest(:queues::bigint[]) AS w (queue)
        CROSS JOIN LATERAL (SELECT vesting_ms FROM items WHERE queue = w.queue
                            AND delayed ORDER BY vesting_ms LIMIT 1) AS i),
       (SELECT min(expires_at_ms) FROM items WHERE expires_at_ms IS NOT NULL),
       (SELECT min(expires_at_ms) FROM dedup);

-- name: next_retention
-- The sequences of the first done and failed message of each queue, which begin with the time.
SELECT w.queue,
       (SELECT sequence FROM ended e WHERE e.queue = w.queue AND NOT e.failed
        ORDER BY sequence LIMIT 1),
       (SELECT sequence FROM ended e WHERE e.queue = w.queue AND e.failed
        ORDER BY sequence LIMIT 1)
FROM unnest(:queues::bigint[]) AS w (queue);

-- name: forget_dedup
-- Forget dedup ids whose window is over.
WITH old AS MATERIALIZED (
    SELECT scope, dedup_id FROM dedup WHERE expires_at_ms <= :now_ms
    ORDER BY expires_at_ms LIMIT :count FOR UPDATE SKIP LOCKED
)
DELETE FROM dedup d
USING old
WHERE d.scope = old.scope AND d.dedup_id = old.dedup_id
RETURNING 1;

-- name: forget_requests
-- plan: once
-- Forget requests whose sender has long had its answer.
DELETE FROM requests WHERE token = ANY (ARRAY(
    SELECT token FROM requests WHERE at_ms <= :before_ms LIMIT :count FOR UPDATE SKIP LOCKED));

-- name: pick_unclaimed
-- Messages that have waited for too long.
SELECT queue, message_id FROM items WHERE expires_at_ms <= :now_ms AND lease_id IS NULL
ORDER BY expires_at_ms LIMIT :count;

-- name: reindex_unclaimed
-- Compute again when waiting messages of a queue are removed.
UPDATE items
SET expires_at_ms = CASE WHEN :retention_ms > 0 THEN visible_at_ms + :retention_ms END
WHERE queue = :queue AND message_id = ANY (ARRAY(
    SELECT message_id FROM items WHERE queue = :queue AND lease_id IS NULL
    ORDER BY message_id FOR UPDATE));

-- name: trim_ended
-- Remove done or failed messages whose sequence is below a bound.
DELETE FROM ended WHERE queue = :queue AND failed = :failed AND sequence = ANY (ARRAY(
    SELECT sequence FROM ended WHERE queue = :queue AND failed = :failed AND sequence < :before
    ORDER BY sequence LIMIT :count FOR UPDATE SKIP LOCKED))
RETURNING message_id;

-- name: forget_attempts
-- Forget what was tried with messages that leave a queue.
DELETE FROM attempts WHERE queue = :queue AND message_id = ANY (:message_ids::bigint[]);

-- part: named_times
-- How often each message is named.
(SELECT message_id, count(*) AS number FROM unnest(:message_ids::bigint[]) AS u (message_id)
 GROUP BY message_id)

-- name: let_go
-- Lock messages that are named once for each queue that has held them, and delete those that no other
-- queue holds; tell how many are left.
WITH l AS MATERIALIZED (
    SELECT m.message_id, m.refs > w.number AS stays
    FROM {named_times} AS w JOIN messages m ON m.message_id = w.message_id
    ORDER BY m.message_id FOR UPDATE OF m
), gone AS (
    DELETE FROM messages m USING l WHERE m.message_id = l.message_id AND NOT l.stays
)
SELECT count(*) FROM l WHERE stays;

-- name: lower_refs
-- Take back the references to those that are left.
UPDATE messages m SET refs = m.refs - w.number
FROM {named_times} AS w WHERE m.message_id = w.message_id;

-- name: refer
-- Count more queues that hold messages; those messages that are there are returned.
UPDATE messages m SET refs = m.refs + w.refs
FROM unnest(:message_ids::bigint[], :refs::bigint[]) AS w (message_id, refs)
WHERE m.message_id = w.message_id RETURNING m.message_id;

-- name: restore_messages
-- Store messages again that were gone.
INSERT INTO messages
SELECT message_id, 1, metadata, payload
FROM unnest(:message_ids::bigint[], :metadata::bytea[], :payloads::bytea[])
    AS m (message_id, metadata, payload);

-- === Looking, purging, moving

-- part: in_state
-- Whether an item is in a state, as the clock says: 0 available, 1 delayed, 2 in flight, 3 any,
-- 4 unclaimed for too long.
CASE :state::integer
    WHEN 0 THEN lease_id IS NULL AND vesting_ms <= :now_ms
    WHEN 1 THEN lease_id IS NULL AND vesting_ms > :now_ms
    WHEN 2 THEN lease_id IS NOT NULL AND vesting_ms > :now_ms
    WHEN 4 THEN lease_id IS NULL AND expires_at_ms <= :now_ms
    ELSE true END

-- part: first_attempt
-- When the attempt number 1 at the message of the row e began, if that is not in the row itself.
(SELECT a.claimed_at_ms FROM attempts a
 WHERE a.queue = e.queue AND a.message_id = e.message_id AND a.number = 1)

-- name: page_items
-- Live messages in a state, in the order of their ids. The metadata is looked up for each row: a join
-- might be done by reading all.
SELECT e.message_id, e.attempts, e.visible_at_ms, e.vesting_ms, e.lease_id IS NOT NULL, e.consumer,
       e.claimed_at_ms, e.forgiven,
       CASE WHEN e.attempts = 1 AND e.lease_id IS NOT NULL THEN e.claimed_at_ms
            WHEN e.attempts > 0 THEN {first_attempt} END,
       (SELECT m.metadata FROM messages m WHERE m.message_id = e.message_id)
FROM items e
WHERE e.queue = :queue AND e.message_id >= :begin AND e.message_id < :end AND {in_state}
ORDER BY e.message_id LIMIT :count;

-- part: ended_columns
-- Of a done or failed message. The row of a done one has its last attempt: the first of nearly all.
e.sequence, e.message_id, e.attempts, e.ended_at_ms, e.reason,
CASE WHEN e.attempts = 1 AND NOT e.failed THEN e.claimed_at_ms ELSE {first_attempt} END,
(SELECT m.metadata FROM messages m WHERE m.message_id = e.message_id)

-- name: page_ended
-- Done or failed messages, in the order of their sequence.
SELECT {ended_columns}
FROM ended e
WHERE e.queue = :queue AND e.failed = :failed AND e.sequence >= :begin AND e.sequence < :end
ORDER BY e.sequence LIMIT :count;

-- name: ended_message
-- A done or failed message, and which of both it is.
SELECT e.failed, {ended_columns}
FROM ended e WHERE e.queue = :queue AND e.message_id = :message_id;

-- name: {each}_of
-- each: metadata payload
-- plan: once
-- Read the {each} of messages.
SELECT message_id, {each} FROM messages WHERE message_id = ANY (:message_ids::bigint[]);

-- part: ended_attempts
-- Attempts that have ended: with the last ones of done messages.
(SELECT queue, message_id, number, claimed_at_ms, consumer, ended_at_ms, ending, reason FROM attempts
 UNION ALL
 SELECT queue, message_id, attempts, claimed_at_ms, consumer, ended_at_ms, 0, ''::bytea FROM ended
 WHERE NOT failed)

-- name: attempts
-- The attempts at a message; the one that is under way, if any, is the last.
SELECT number, consumer, claimed_at_ms, ended_at_ms, ending, reason FROM {ended_attempts} AS a
WHERE queue = :queue AND message_id = :message_id
UNION ALL
SELECT attempts, consumer, claimed_at_ms, NULL, 3, ''::bytea FROM items
WHERE queue = :queue AND message_id = :message_id AND lease_id IS NOT NULL AND vesting_ms > :now_ms
ORDER BY number;

-- name: count_delayed
-- How many messages of a queue are delayed.
SELECT count(*) FROM items WHERE queue = :queue AND delayed AND vesting_ms > :now_ms;

-- name: oldest
-- Since when the available message waits that waits for longest; of those that were published first.
SELECT min(visible_at_ms)
FROM (SELECT visible_at_ms FROM items
      WHERE queue = :queue AND lease_id IS NULL AND vesting_ms <= :now_ms
      ORDER BY message_id LIMIT 100) AS i;

-- name: oldest_claim
-- When the oldest claim of a message in flight was made; of those whose leases end first.
SELECT min(claimed_at_ms)
FROM (SELECT claimed_at_ms FROM items
      WHERE queue = :queue AND lease_id IS NOT NULL AND vesting_ms > :now_ms
      ORDER BY vesting_ms LIMIT 10000) AS i;

-- name: groups_ready
-- How many zones of a standard queue have something to claim.
SELECT count(*) FROM pointers q
WHERE q.queue::bigint = :queue AND q.vesting_ms <= :now_ms
  AND EXISTS (SELECT 1 FROM items i WHERE i.queue = :queue AND i.zone = q.zone AND i.rank >= 0
              AND i.vesting_ms <= :now_ms);

-- name: groups_ready_fifo
-- How many zones of a FIFO queue have something to claim.
SELECT count(*) FROM pointers q
WHERE q.queue::bigint = :queue AND q.vesting_ms <= :now_ms
  AND NOT EXISTS (SELECT 1 FROM items i WHERE i.queue = :queue AND i.zone = q.zone
                  AND i.rank < 0 AND i.lease_id IS NOT NULL AND i.vesting_ms > :now_ms)
  AND (SELECT vesting_ms FROM items i WHERE i.queue = :queue AND i.zone = q.zone
       AND i.rank < 0 AND i.lease_id IS NULL ORDER BY message_id LIMIT 1) <= :now_ms;

-- name: remove_items
-- Take items out of a queue: of some ids, in a state.
WITH picked AS (
    SELECT message_id FROM items
    WHERE queue = :queue AND message_id = ANY (:message_ids::bigint[]) AND {in_state}
    ORDER BY message_id FOR UPDATE
)
DELETE FROM items i USING picked p
WHERE i.queue = :queue AND i.message_id = p.message_id
RETURNING i.message_id, i.zone, i.lease_id IS NOT NULL, i.attempts, i.vesting_ms, i.size;

-- name: pick_items
-- The ids of items in a state, lowest first.
SELECT message_id FROM items
WHERE queue = :queue AND {in_state}
ORDER BY message_id LIMIT :count;

-- name: take_ended
-- Take done or failed messages out of a queue: those of some ids. The last attempt of a done one is
-- written to where the others are.
WITH gone AS (
    DELETE FROM ended e
    USING unnest(:message_ids::bigint[]) AS w (message_id)
    WHERE e.queue = :queue AND e.message_id = w.message_id AND e.failed = ANY (:states::boolean[])
    RETURNING e.*
), tried AS (
    INSERT INTO attempts
    SELECT queue, message_id, attempts, consumer, claimed_at_ms, ended_at_ms, 0, '', lease_id
    FROM gone WHERE NOT failed
)
SELECT message_id, attempts, failed FROM gone;

-- name: find_live
-- Which messages a queue has waiting or in flight.
SELECT message_id FROM items WHERE queue = :queue AND message_id = ANY (:message_ids::bigint[]);

-- name: find_present
-- Which messages a queue has, in whatever state.
SELECT message_id FROM items WHERE queue = :queue AND message_id = ANY (:message_ids::bigint[])
UNION
SELECT message_id FROM ended WHERE queue = :queue AND message_id = ANY (:message_ids::bigint[]);

-- name: move_attempts
-- Move attempts to another queue, after the attempts there.
UPDATE attempts a
SET queue = :to_queue, number = a.number + w.before
FROM unnest(:message_ids::bigint[], :befores::bigint[]) AS w (message_id, before)
WHERE a.queue = :queue AND a.message_id = w.message_id;

-- name: pending_dead_letters
-- Which of some queues have failed messages.
SELECT w.queue FROM unnest(:queues::bigint[]) AS w (queue)
WHERE EXISTS (SELECT 1 FROM ended e WHERE e.queue = w.queue AND e.failed);

-- === The metadata log

-- name: read_log
-- A page of a log.
SELECT message_id, metadata FROM log
WHERE log = :log AND message_id >= :begin AND message_id < :end
ORDER BY message_id LIMIT :count;

-- name: load_segments
-- Where and when the segments of the log begin.
SELECT number, start_offset, start_ms FROM log_segments ORDER BY number;

-- name: drop_segment
-- Forget a segment.
DELETE FROM log_segments WHERE number = :number RETURNING number;

-- name: load_cursors
-- How far the logs have been routed.
SELECT log, cursor FROM log_cursors ORDER BY log;

-- name: lock_cursor
-- Lock a log's cursor until the commit; begin one if there is none.
INSERT INTO log_cursors VALUES (:log, :cursor)
ON CONFLICT (log) DO UPDATE SET cursor = log_cursors.cursor RETURNING cursor;

-- name: move_cursor
-- Move a log's cursor, and count messages that no queue took.
UPDATE log_cursors SET cursor = :cursor, unrouted = unrouted + :unrouted WHERE log = :log;

-- name: trim_log
-- Remove what lies below the log, a bounded part at a time.
DELETE FROM log WHERE log = :log AND message_id = ANY (ARRAY(
    SELECT message_id FROM log WHERE log = :log AND message_id < :earliest
    ORDER BY message_id LIMIT :count FOR UPDATE SKIP LOCKED))
RETURNING 1;

-- name: drop_unheld
-- Remove messages that no queue holds and none can come to hold.
DELETE FROM messages WHERE message_id = ANY (ARRAY(
    SELECT message_id FROM messages WHERE refs = 0 AND message_id < :earliest
    ORDER BY message_id LIMIT :count FOR UPDATE SKIP LOCKED))
RETURNING 1;

-- name: offset_at
-- The first message that was published at a time or later.
SELECT min(first) FROM unnest(:logs::bigint[]) AS w (log)
CROSS JOIN LATERAL (
    SELECT message_id AS first FROM log l
    WHERE l.log = w.log AND l.message_id >= :earliest AND l.published_at_ms >= :time_ms
    ORDER BY l.message_id LIMIT 1
) AS each;

-- name: find_unheld
-- The sizes of those of some messages that no queue holds.
SELECT octet_length(payload) FROM messages
WHERE message_id = ANY (:message_ids::bigint[]) AND refs = 0;

-- name: drop_messages
-- The same, and remove them.
DELETE FROM messages WHERE message_id = ANY (:message_ids::bigint[]) AND refs = 0
RETURNING octet_length(payload);

-- === The audit. What finds gives a key and a text for each thing that is wrong.

-- name: count_rows
-- How much there is.
SELECT (SELECT count(*) FROM queues), (SELECT count(*) FROM items),
       (SELECT count(*) FROM ended WHERE NOT failed), (SELECT count(*) FROM ended WHERE failed),
       (SELECT count(*) FROM messages), (SELECT count(*) FROM pointer_index);

-- part: held_messages
-- The messages of all queues, in whatever state.
(SELECT queue, message_id FROM items UNION ALL SELECT queue, message_id FROM ended)

-- part: holders
-- How many queues hold each message.
(SELECT message_id, count(*) AS number FROM {held_messages} AS every GROUP BY message_id)

-- part: orphaned_attempts
-- Attempts at messages that the queue does not have.
FROM attempts a
WHERE NOT EXISTS (SELECT 1 FROM items e WHERE e.queue = a.queue AND e.message_id = a.message_id)
  AND NOT EXISTS (SELECT 1 FROM ended e WHERE e.queue = a.queue AND e.message_id = a.message_id)

-- part: counted_queues
-- Each queue with its counters, and with the numbers of its rows.
(SELECT q.name, q.number, c.*,
        (SELECT count(*) FROM items i WHERE i.queue = q.number) AS rows_live,
        (SELECT coalesce(sum(i.size), 0)::bigint FROM items i
         WHERE i.queue = q.number) AS rows_bytes,
        (SELECT count(*) FROM items i WHERE i.queue = q.number
         AND i.lease_id IS NOT NULL) AS rows_in_flight,
        (SELECT count(*) FROM ended e WHERE e.queue = q.number AND NOT e.failed) AS rows_done,
        (SELECT count(*) FROM ended e WHERE e.queue = q.number AND e.failed) AS rows_failed
 FROM queues q
 CROSS JOIN LATERAL (
     SELECT sum(live)::bigint AS live, sum(live_bytes)::bigint AS live_bytes,
            sum(in_flight)::bigint AS in_flight, sum(done)::bigint AS done,
            sum(failed)::bigint AS failed
     FROM queue_counts n WHERE n.queue = q.number
 ) AS c)

-- name: wrong_counts
-- Queues whose counters do not match their rows.
SELECT convert_to(name, 'UTF8'),
       name || format(
           ': live %s, %s in flight, %s done, %s failed, %s bytes; rows say %s, %s, %s, %s, %s',
           live, in_flight, done, failed, live_bytes,
           rows_live, rows_in_flight, rows_done, rows_failed, rows_bytes)
FROM {counted_queues} AS each
WHERE (live, live_bytes, in_flight, done, failed) IS DISTINCT FROM
      (rows_live, rows_bytes, rows_in_flight, rows_done, rows_failed);

-- name: mend_wrong_counts
-- One row of each queue makes up for the difference.
UPDATE queue_counts n
SET live = n.live + d.rows_live - d.live, live_bytes = n.live_bytes + d.rows_bytes - d.live_bytes,
    in_flight = n.in_flight + d.rows_in_flight - d.in_flight,
    done = n.done + d.rows_done - d.done, failed = n.failed + d.rows_failed - d.failed
FROM {counted_queues} AS d
WHERE n.queue = d.number AND n.slot = :slot;

-- name: zones_unpointed
-- Zones that have items and no pointer; their queues, and when they vest.
SELECT zone, format('queue %s, %s items', queue, count(*)), queue, min(vesting_ms)
FROM items i
WHERE NOT EXISTS (SELECT 1 FROM pointer_index p WHERE p.queue = i.queue AND p.zone = i.zone)
GROUP BY queue, zone;

-- name: pointers_apart
-- Pointers that are in Q_C alone, or in the pointer index alone.
SELECT coalesce(q.zone, p.zone), format('queue %s', coalesce(q.queue, p.queue))
FROM pointers q
FULL JOIN pointer_index p ON p.queue = q.queue AND p.zone = q.zone AND p.token = q.token
WHERE q.queue IS NULL OR p.queue IS NULL;

-- name: mend_pointers_apart
-- Remove what is in one of them alone. Zones with items get a pointer again.
WITH gone AS (
    DELETE FROM pointers q
    WHERE NOT EXISTS (SELECT 1 FROM pointer_index p
                      WHERE p.queue = q.queue AND p.zone = q.zone AND p.token = q.token)
)
DELETE FROM pointer_index p
WHERE NOT EXISTS (SELECT 1 FROM pointers q
                  WHERE p.queue = q.queue AND p.zone = q.zone AND p.token = q.token);

-- name: pointers_late
-- Pointers that vest later than the earliest item of their zone. One that is about to be looked at
-- again may, for so long; and p is brought into line by that look.
SELECT p.zone, format('queue %s: the item vests at %s, Q_C at %s, p at %s', p.queue, i.vesting_ms,
                      q.vesting_ms, p.vesting_ms)
FROM (
    -- Of a FIFO zone that is held, the held item; else its head.
    SELECT queue, zone, CASE WHEN rank >= 0 THEN min(vesting_ms)
                             WHEN bool_or(lease_id IS NOT NULL)
                             THEN min(vesting_ms) FILTER (WHERE lease_id IS NOT NULL)
                             ELSE (array_agg(vesting_ms ORDER BY message_id))[1] END AS vesting_ms
    FROM (SELECT queue, zone, least(rank, 0) AS rank, vesting_ms, lease_id, message_id FROM items)
        AS each
    GROUP BY queue, zone, rank
) AS i
JOIN pointer_index p ON p.queue = i.queue AND p.zone = i.zone
JOIN pointers q ON q.queue = p.queue AND q.token = p.token AND q.zone = p.zone
WHERE q.vesting_ms > greatest(i.vesting_ms + :threshold_ms, :now_ms + :cool_ms);

-- name: mend_pointers_late
-- Let every pointer vest now.
WITH now AS (
    UPDATE pointers SET vesting_ms = least(vesting_ms, :now_ms), lease_id = NULL
)
UPDATE pointer_index SET vesting_ms = least(vesting_ms, :now_ms), empty_since_ms = NULL;

-- name: wrong_refs
-- Messages whose references do not match the queues that hold them.
SELECT convert_to(m.message_id::text, 'UTF8'),
       format('message %s: %s, held by %s', m.message_id, m.refs, coalesce(h.number, 0))
FROM messages m
LEFT JOIN {holders} AS h ON h.message_id = m.message_id
WHERE m.refs <> coalesce(h.number, 0);

-- name: mend_wrong_refs
-- Count them again.
UPDATE messages m SET refs = h.number
FROM (
    SELECT m.message_id, coalesce(h.number, 0) AS number
    FROM messages m LEFT JOIN {holders} AS h ON h.message_id = m.message_id
) AS h
WHERE m.message_id = h.message_id AND m.refs <> h.number;

-- name: messages_missing
-- Messages that a queue holds and that are not there.
SELECT convert_to(e.message_id::text, 'UTF8'), format('queue %s, message %s', e.queue, e.message_id)
FROM {held_messages} AS e
WHERE NOT EXISTS (SELECT 1 FROM messages m WHERE m.message_id = e.message_id);

-- name: mend_messages_missing
-- Remove them: they can't be delivered.
WITH a AS (
    DELETE FROM items e
    WHERE NOT EXISTS (SELECT 1 FROM messages m WHERE m.message_id = e.message_id)
)
DELETE FROM ended e
WHERE NOT EXISTS (SELECT 1 FROM messages m WHERE m.message_id = e.message_id);

-- name: items_twice
-- Messages that a queue has more than once.
SELECT convert_to(message_id::text, 'UTF8'), format('queue %s, message %s', queue, message_id)
FROM {held_messages} AS e
GROUP BY queue, message_id HAVING count(*) > 1;

-- name: mend_items_twice
-- A done message stays done, a failed one stays failed.
WITH a AS (
    DELETE FROM items i
    WHERE EXISTS (SELECT 1 FROM ended e WHERE e.queue = i.queue AND e.message_id = i.message_id)
)
DELETE FROM ended f
WHERE failed AND EXISTS (SELECT 1 FROM ended d WHERE d.queue = f.queue
                         AND d.message_id = f.message_id AND NOT d.failed);

-- name: rows_of_no_queue
-- Rows that belong to no queue.
SELECT convert_to(queue::text, 'UTF8'), format('queue %s in ', queue) || place
FROM (SELECT DISTINCT queue, 'items' AS place FROM items
      UNION ALL SELECT DISTINCT queue, 'ended' FROM ended
      UNION ALL SELECT DISTINCT queue, 'attempts' FROM attempts
      UNION ALL SELECT DISTINCT queue, 'pointer_index' FROM pointer_index
      UNION ALL SELECT DISTINCT queue, 'queue_counts' FROM queue_counts) AS e
WHERE NOT EXISTS (SELECT 1 FROM queues q WHERE q.number = e.queue);

-- name: mend_rows_of_no_queue
-- They can't be reached.
WITH a AS (DELETE FROM items WHERE queue NOT IN (SELECT number FROM queues)),
     b AS (DELETE FROM ended WHERE queue NOT IN (SELECT number FROM queues)),
     c AS (DELETE FROM attempts WHERE queue NOT IN (SELECT number FROM queues)),
     d AS (DELETE FROM pointers WHERE queue NOT IN (SELECT number FROM queues)),
     e AS (DELETE FROM pointer_index WHERE queue NOT IN (SELECT number FROM queues))
DELETE FROM queue_counts WHERE queue NOT IN (SELECT number FROM queues);

-- name: attempts_orphaned
-- Attempts at messages that the queue does not have.
SELECT DISTINCT convert_to(a.message_id::text, 'UTF8'),
       format('queue %s, message %s', a.queue, a.message_id)
{orphaned_attempts};

-- name: mend_attempts_orphaned
-- Forget them.
DELETE {orphaned_attempts};

-- part: garbage
-- Messages that no queue holds, and that the log does not know.
FROM messages m
WHERE refs <= 0 AND NOT EXISTS (SELECT 1 FROM log l WHERE l.message_id = m.message_id)

-- name: messages_garbage
-- Find them.
SELECT convert_to(message_id::text, 'UTF8'), format('message %s', message_id) {garbage};

-- name: mend_messages_garbage
-- Remove them.
DELETE {garbage};

-- part: used_ids
-- The lowest id that no message has, and that no head of a log is beyond.
(SELECT greatest(
    (SELECT coalesce(max(message_id), 0) + 1 FROM log),
    (SELECT coalesce(max(message_id), 0) + 1 FROM messages),
    (SELECT max(next_offset) FROM log_heads WHERE log >= 0)) AS next_id)

-- name: log_beyond_end
-- Ids that were used, and would be given out again.
SELECT convert_to(u.next_id::text, 'UTF8'), format('offset %s', u.next_id - 1)
FROM {used_ids} AS u WHERE u.next_id > {next_id};

-- name: mend_log_beyond_end
-- Go on after them.
SELECT setval('message_ids', u.next_id, false)
FROM {used_ids} AS u WHERE u.next_id > {next_id};

-- name: items_marked_wrong
-- Items that are leased and delayed, of a lane that their queue has not, or tried less often than
-- they were forgiven.
SELECT convert_to(i.message_id::text, 'UTF8'), format('queue %s, message %s', i.queue, i.message_id)
FROM items i JOIN queues q ON q.number = i.queue
WHERE (i.lease_id IS NOT NULL AND (i.delayed OR i.expires_at_ms IS NOT NULL))
   OR (i.rank < 0) <> q.fifo OR i.forgiven > i.attempts OR i.attempts < 0;

-- name: mend_items_marked_wrong
-- Put the marks right.
UPDATE items i
SET delayed = i.delayed AND i.lease_id IS NULL,
    expires_at_ms = CASE WHEN i.lease_id IS NULL THEN i.expires_at_ms END,
    rank = CASE WHEN q.fifo THEN -1 ELSE greatest(i.rank, 0) END,
    attempts = greatest(i.attempts, 0), forgiven = least(i.forgiven, greatest(i.attempts, 0))
FROM queues q WHERE q.number = i.queue;

-- === Reading in bulk, from a pinned state. Pages go on after the last row of the one before.

-- name: lock_sequences
-- Wait for transactions that have taken sequence numbers of done or failed messages, and let none
-- take any until the commit. The highest number of each queue is what all its rows are raised to.
SELECT queue, max(next_sequence) FROM (
    SELECT queue, next_sequence FROM queue_counts WHERE slot < :slots ORDER BY queue, slot FOR UPDATE
) AS locked GROUP BY queue;

-- name: raise_sequences
-- Raise the rows of queues, which are locked, to give out numbers from the same one on.
UPDATE queue_counts c SET next_sequence = m.mark
FROM unnest(:queues::bigint[], :marks::bigint[]) AS m (queue, mark)
WHERE c.queue = m.queue AND c.slot < :slots AND c.next_sequence < m.mark;

-- name: read_sequences
-- Which sequence numbers have been given out.
SELECT queue, max(next_sequence) FROM queue_counts GROUP BY queue;

-- name: message_ends
-- The first and the last message of a range.
SELECT min(message_id), max(message_id) FROM messages
WHERE message_id >= :begin AND message_id < :end;

-- name: items_ends
-- The first and the last message of a queue's live ones.
SELECT min(message_id), max(message_id) FROM items WHERE queue = :queue;

-- name: attempts_ends
-- The first and the last message with an attempt that has ended.
SELECT least(a.first, e.first), greatest(a.last, e.last)
FROM (SELECT min(message_id) AS first, max(message_id) AS last FROM attempts
      WHERE queue = :queue AND message_id >= :low AND message_id < :high) AS a,
     (SELECT min(message_id) AS first, max(message_id) AS last FROM ended
      WHERE queue = :queue AND message_id >= :low AND message_id < :high) AS e;

-- name: ended_ends
-- The lowest and the highest sequence of a queue's done or failed messages.
SELECT min(sequence), max(sequence) FROM ended
WHERE queue = :queue AND failed = :failed AND sequence >= :low AND sequence < :high;

-- name: first_ended
-- The first done or failed message of a queue that ended at a time or later, and is kept: its
-- sequence is that of the time, or later.
SELECT sequence, ended_at_ms FROM ended
WHERE queue = :queue AND failed = :failed AND sequence >= :since
  AND ended_at_ms >= :since_ms
ORDER BY sequence LIMIT 1;

-- name: payload_sizes
-- How large payloads are, which need not be read for it.
SELECT message_id, octet_length(payload) FROM messages
WHERE message_id >= :begin AND message_id < :end
ORDER BY message_id LIMIT :count;

-- name: page_payloads
-- Payloads, up to a number of bytes and at least one: the others are not read for it.
SELECT message_id, payload FROM (
    SELECT message_id, payload, sum(octet_length(payload)) OVER (ORDER BY message_id) AS total
    FROM (SELECT message_id, payload FROM messages
          WHERE message_id >= :begin AND message_id < :end ORDER BY message_id LIMIT :count) AS m
) AS m
WHERE total <= :most_bytes OR total = octet_length(payload)
ORDER BY message_id;

-- name: page_unheld
-- Messages that no queue holds.
SELECT message_id FROM messages WHERE refs = 0 AND message_id > :after
ORDER BY message_id LIMIT :count;

-- name: page_attempts
-- Attempts that have ended.
SELECT message_id, number, claimed_at_ms, consumer, ended_at_ms, ending, reason FROM (
    (SELECT message_id, number, claimed_at_ms, consumer, ended_at_ms, ending, reason FROM attempts
     WHERE queue = :queue AND (message_id, number) > (:after, :after_number) AND message_id < :end
     ORDER BY message_id, number LIMIT :count)
    UNION ALL
    (SELECT message_id, attempts, claimed_at_ms, consumer, ended_at_ms, 0, ''::bytea FROM ended
     WHERE queue = :queue AND message_id >= :after AND message_id < :end
       AND (message_id, attempts) > (:after, :after_number) AND NOT failed
     ORDER BY message_id LIMIT :count)
) AS a
ORDER BY message_id, number LIMIT :count;

-- name: attempts_at
-- The attempts at messages that have ended.
SELECT message_id, number, claimed_at_ms, consumer, ended_at_ms, ending, reason
FROM {ended_attempts} AS a
WHERE queue = :queue AND message_id = ANY (:message_ids::bigint[]) ORDER BY message_id, number;

-- === Looking at logs, tokens and zones: `penstock cluster`. Reads only.

-- name: log_status
-- The head of each log, and how many messages were published into it.
SELECT log, next_offset, published FROM log_heads WHERE log >= 0 ORDER BY log;

-- name: head_waits
-- How many sessions wait for the head of each log: each of them has, or wants, a lock on the tuple.
-- dialect: postgresql
SELECT h.log, count(*)
FROM pg_locks l JOIN log_heads h ON h.ctid = format('(%s,%s)', l.page, l.tuple)::tid
WHERE l.locktype = 'tuple' AND l.relation = 'log_heads'::regclass AND h.log >= 0
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
GROUP BY h.log;

-- name: token_status
-- Each token that has pointers: how many, how many of them have vested, and how long ago the first.
SELECT token, count(*), count(*) FILTER (WHERE vesting_ms <= :now_ms),
       greatest(:now_ms - min(vesting_ms), 0)
FROM pointers GROUP BY token ORDER BY token;

-- name: count_empty_zones
-- Zones that nothing was seen in, which are collected if it stays so.
SELECT count(*) FROM pointer_index WHERE empty_since_ms IS NOT NULL;

-- name: page_tokens
-- Which token each zone has, from a zone on.
SELECT queue, zone, token FROM pointer_index
WHERE (queue, zone) > (:queue, :zone::bytea)
ORDER BY queue, zone LIMIT :count;

-- name: hold_instance
-- The ring that new zones get a token of, the epoch of the pipeline that may assign, and who routes;
-- they stay so until the commit.
SELECT ring_size, ring_high, epoch, routing FROM instance FOR SHARE;

-- === A copy of another store. Nobody else has this one open, so that nothing is locked.

-- name: load_store
-- Set the next id, the epoch and the totals of a store; make heads of logs that it lacks.
WITH ids AS MATERIALIZED (
    SELECT setval('message_ids', :end::bigint, false) AS next
), more AS (
    INSERT INTO log_heads (log, next_offset, specs_version, zones_version, filters_version,
                           segment_ms, published, duplicates, unrouted)
    SELECT each.log, CASE WHEN each.log < 0 THEN :never::bigint ELSE i.next END, 1, 1, 1, :segment_ms,
           CASE WHEN each.log = 0 THEN :published::bigint ELSE 0 END,
           CASE WHEN each.log = 0 THEN :duplicates::bigint ELSE 0 END,
           CASE WHEN each.log = 0 THEN :unrouted::bigint ELSE 0 END
    FROM ids i, generate_series(-1, :logs::bigint - 1) AS each (log)
    ON CONFLICT (log) DO UPDATE
    SET next_offset = excluded.next_offset, filters_version = 1, published = excluded.published,
        duplicates = excluded.duplicates, unrouted = excluded.unrouted
)
UPDATE instance SET epoch = :epoch;

-- name: load_totals
-- Set the totals of a queue.
UPDATE queue_counts
SET enqueued_total = :enqueued_total, claimed_total = :claimed_total, acked_total = :acked_total,
    released_total = :released_total, lease_expired_total = :lease_expired_total,
    failed_total = :failed_total, redriven_total = :redriven_total,
    removed_total = :removed_total, moved_in_total = :moved_in_total,
    moved_out_total = :moved_out_total
WHERE queue = :queue AND slot = 0;

-- name: load_position
-- Note how far the copy is.
INSERT INTO requests VALUES (:token, :numbers::bigint[], :at_ms)
ON CONFLICT (token) DO UPDATE SET message_ids = excluded.message_ids;

-- name: find_position
-- How far the copy is; requests of publishes have tokens of sixteen bytes.
SELECT token, message_ids, at_ms FROM requests WHERE octet_length(token) > 16;

-- name: end_load
-- Let brokers open the store.
WITH gone AS (DELETE FROM requests WHERE octet_length(token) > 16)
UPDATE instance SET routing = :routing;

-- name: load_segment
-- Begin a segment of the log.
WITH heads AS (UPDATE log_heads SET segment_ms = :start_ms)
INSERT INTO log_segments
SELECT coalesce((SELECT max(number) FROM log_segments), 0) + 1, :start_offset, :start_ms;

-- name: load_log
-- Write rows of the log.
INSERT INTO log
SELECT l.log, l.message_id, l.published_at_ms, l.metadata
FROM unnest(:logs::bigint[], :message_ids::bigint[], :times::bigint[], :metadata::bytea[])
    AS l (log, message_id, published_at_ms, metadata);

-- name: load_messages
-- Store messages for one queue more to hold.
INSERT INTO messages
SELECT m.message_id, 1, m.metadata, m.payload
FROM unnest(:message_ids::bigint[], :metadata::bytea[], :payloads::bytea[])
    AS m (message_id, metadata, payload)
ON CONFLICT (message_id) DO UPDATE SET refs = messages.refs + 1;

-- name: load_unheld
-- Store messages that no queue holds; the log has their metadata.
INSERT INTO messages
SELECT m.message_id, 0, l.metadata, m.payload
FROM unnest(:message_ids::bigint[], :payloads::bytea[]) AS m (message_id, payload)
JOIN log l ON l.log = ANY (:logs::integer[]) AND l.message_id = m.message_id;

-- name: load_forgiven
-- Set how many attempts are forgiven.
UPDATE items i SET forgiven = w.forgiven
FROM unnest(:message_ids::bigint[], :forgiven::bigint[]) AS w (message_id, forgiven)
WHERE i.queue = :queue AND i.message_id = w.message_id;

-- name: load_attempts
-- Write attempts that have ended.
INSERT INTO attempts
SELECT :queue, a.message_id, a.number, a.consumer, a.claimed_at_ms, a.ended_at_ms, a.ending,
       a.reason, ''
FROM unnest(:message_ids::bigint[], :numbers::bigint[], :claimed::bigint[], :consumers::bytea[],
            :ended::bigint[], :endings::bigint[], :reasons::bytea[])
    AS a (message_id, number, claimed_at_ms, consumer, ended_at_ms, ending, reason);

-- name: load_ended
-- Write done or failed messages, with the last attempt of a done one.
INSERT INTO ended
SELECT :queue, :failed, e.sequence, e.message_id, e.ended_at_ms, e.attempts, e.reason, e.consumer,
       e.claimed_at_ms, ''
FROM unnest(:sequences::bigint[], :message_ids::bigint[], :ended::bigint[], :attempts::bigint[],
            :reasons::bytea[], :consumers::bytea[], :claimed::bigint[])
    AS e (sequence, message_id, ended_at_ms, attempts, reason, consumer, claimed_at_ms);
