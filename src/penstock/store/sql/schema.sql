-- Every table of the SQL store.
--
-- Times are milliseconds since the epoch, as the caller tells them; nothing here asks the server's
-- clock. Texts that users make (groups, reasons, consumers) are UTF-8 in bytea, because a text may
-- not hold NUL. Records that Penstock alone reads (spec, coverage, settings) are MessagePack.

-- Which version of this file has made the tables. One row.
CREATE TABLE schema_version (
    version         integer PRIMARY KEY
);
INSERT INTO schema_version VALUES (2);

-- Which store this is, and its settings. One row, seldom written.
CREATE TABLE instance (
    one             smallint PRIMARY KEY CHECK (one = 1),
    store_id        bigint NOT NULL,
    created_at_ms   bigint NOT NULL,
    routing         text NOT NULL,
    -- New zones get a token below ring_size; those that are there have one below ring_high.
    ring_size       integer NOT NULL,
    ring_high       integer NOT NULL,
    next_queue      integer NOT NULL,
    epoch           bigint NOT NULL,
    log_settings    bytea NOT NULL,
    filter_changes  bytea NOT NULL
);

-- Message ids, which are offsets in the log. A publish takes them while it holds the heads of its
-- logs, so that the ids of one log are in the order of commits.
CREATE SEQUENCE message_ids CACHE 1;

-- The head of each log, which a publish locks until it commits: publishes into one log commit one
-- after the other, publishes into different logs side by side. Every message of the log below
-- next_offset is committed, and none comes there later; what all logs have reached is the end of the
-- log. A change of queues (specs_version) locks all heads, a collection of zones (zones_version)
-- those of the zones' logs, so that a publish finds out, before it writes, that its knowledge is out
-- of date. specs_version, filters_version and segment_ms are the same in all rows.
-- Row -1 belongs to no log, and is the first that is locked by those who look at all heads: they
-- wait for each other there. Its next_offset is beyond all others.
CREATE TABLE log_heads (
    log             integer PRIMARY KEY,
    next_offset     bigint NOT NULL,
    specs_version   bigint NOT NULL,
    zones_version   bigint NOT NULL,
    filters_version bigint NOT NULL,
    segment_ms      bigint NOT NULL,
    time_ms         bigint NOT NULL DEFAULT 0,
    published       bigint NOT NULL DEFAULT 0,
    duplicates      bigint NOT NULL DEFAULT 0,
    unrouted        bigint NOT NULL DEFAULT 0
);

-- A publish whose commit got no answer is sent again under the same token: it can't be there twice.
-- So is a change of queues or of settings, and a step of a purge, move or redrive: it has no ids.
-- While the store is the target of a copy, a row with a longer token says how far that is.
CREATE TABLE requests (
    token           bytea PRIMARY KEY,
    message_ids     bigint[] NOT NULL,
    at_ms           bigint NOT NULL
);
CREATE INDEX requests_by_time ON requests (at_ms);

-- The metadata log: a message is in the log that its group hashes to, or without a group in any; its
-- id is its offset.
CREATE TABLE log (
    log             integer NOT NULL,
    message_id      bigint NOT NULL,
    published_at_ms bigint NOT NULL,
    metadata        bytea NOT NULL,
    PRIMARY KEY (log, message_id)
);
CREATE TABLE log_segments (
    number          bigint PRIMARY KEY,
    start_offset    bigint NOT NULL,
    start_ms        bigint NOT NULL
);
-- unrouted: messages that a tailer has assigned to no queue. log_heads counts those of publishes: a
-- tailer need not lock any.
CREATE TABLE log_cursors (
    log             integer PRIMARY KEY,
    cursor          bigint NOT NULL,
    unrouted        bigint NOT NULL DEFAULT 0
);

-- A message, once for all queues; refs counts the queues that hold it, in whatever state.
CREATE TABLE messages (
    message_id      bigint PRIMARY KEY,
    refs            integer NOT NULL,
    metadata        bytea NOT NULL,
    payload         bytea NOT NULL
);
CREATE INDEX messages_unheld ON messages (message_id) WHERE refs = 0;

CREATE TABLE dedup (
    scope           bytea NOT NULL,
    dedup_id        bytea NOT NULL,
    message_id      bigint NOT NULL,
    expires_at_ms   bigint NOT NULL,
    PRIMARY KEY (scope, dedup_id)
);
CREATE INDEX dedup_by_time ON dedup (expires_at_ms);

-- max_attempts, unclaimed_retention_ms and fifo repeat what the spec says, for statements.
CREATE TABLE queues (
    number                  integer PRIMARY KEY,
    name                    text NOT NULL UNIQUE,
    spec                    bytea NOT NULL,
    coverage                bytea NOT NULL,
    fifo                    boolean NOT NULL,
    max_attempts            integer NOT NULL,
    unclaimed_retention_ms  bigint NOT NULL
);

-- Depths, payload bytes of live messages and totals of each queue, in rows whose sums count, so that
-- processes do not wait for each other: a process adds to one of the slots 0 to 15, a publish to slot
-- 16 + log of a head that it holds. A row of ended has the number next_sequence * 16 + slot.
CREATE TABLE queue_counts (
    queue               integer NOT NULL,
    slot                smallint NOT NULL,
    live                bigint NOT NULL DEFAULT 0,
    live_bytes          bigint NOT NULL DEFAULT 0,
    in_flight           bigint NOT NULL DEFAULT 0,
    done                bigint NOT NULL DEFAULT 0,
    failed              bigint NOT NULL DEFAULT 0,
    enqueued_total      bigint NOT NULL DEFAULT 0,
    claimed_total       bigint NOT NULL DEFAULT 0,
    acked_total         bigint NOT NULL DEFAULT 0,
    released_total      bigint NOT NULL DEFAULT 0,
    lease_expired_total bigint NOT NULL DEFAULT 0,
    failed_total        bigint NOT NULL DEFAULT 0,
    redriven_total      bigint NOT NULL DEFAULT 0,
    removed_total       bigint NOT NULL DEFAULT 0,
    moved_in_total      bigint NOT NULL DEFAULT 0,
    moved_out_total     bigint NOT NULL DEFAULT 0,
    next_sequence       bigint NOT NULL DEFAULT 0,
    time_ms             bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (queue, slot)
);

-- A message that waits in a queue or is in flight. Vesting time is the lease: an item is visible
-- iff vesting_ms <= now, whatever lease_id says; claiming it writes the deadline and a lease.
-- rank: 255 - priority, -1 in a FIFO queue. visible_at_ms: since when it waits, or will.
-- expires_at_ms: when an unclaimed one is removed. delayed: no sweep has marked yet that it came due.
CREATE TABLE items (
    queue           integer NOT NULL,
    message_id      bigint NOT NULL,
    zone            bytea NOT NULL,
    rank            smallint NOT NULL,
    vesting_ms      bigint NOT NULL,
    lease_id        bytea,
    attempts        integer NOT NULL,
    forgiven        integer NOT NULL,
    claimed_at_ms   bigint NOT NULL,
    visible_at_ms   bigint NOT NULL,
    expires_at_ms   bigint,
    size            integer NOT NULL,
    delayed         boolean NOT NULL,
    consumer        bytea NOT NULL,
    PRIMARY KEY (queue, message_id)
);
-- For claims of a standard queue: each lane by itself, the visible items first.
CREATE INDEX items_lanes ON items (queue, zone, rank, vesting_ms, message_id) WHERE rank >= 0;
-- For claims of a FIFO queue: the items of a zone that wait, and those that are held.
CREATE INDEX items_order ON items (queue, zone, message_id) WHERE rank < 0 AND lease_id IS NULL;
CREATE INDEX items_holders ON items (queue, zone, vesting_ms)
    WHERE rank < 0 AND lease_id IS NOT NULL;
-- For leases that are over, and for all that is held under one lease.
CREATE INDEX items_deadlines ON items (queue, vesting_ms, lease_id) WHERE lease_id IS NOT NULL;
CREATE INDEX items_delayed ON items (queue, vesting_ms) WHERE delayed;
CREATE INDEX items_unclaimed ON items (expires_at_ms) WHERE expires_at_ms IS NOT NULL;

-- Q_C, the queue of zones: one pointer for each zone that has items, or had some of late. It is
-- never later than the zone's earliest item (but see the threshold of a publish). Every write brings
-- a new lease_id, by which a claim that has looked finds out that another process was faster.
CREATE TABLE pointers (
    queue           integer NOT NULL,
    token           integer NOT NULL,
    zone            bytea NOT NULL,
    vesting_ms      bigint NOT NULL,
    turn            bigint NOT NULL,
    lease_id        bytea,
    PRIMARY KEY (queue, token, zone)
);
-- It begins with an expression, so that a statement which looks for zones can't be planned by it:
-- without statistics the planner takes it for as good as the primary key.
CREATE INDEX pointers_vesting ON pointers ((queue::bigint), token, vesting_ms, turn);

-- p, the pointer index: which zones have a pointer, under which token, and when it vests, so that
-- an enqueue need not look at Q_C. empty_since_ms: since when nothing was seen in the zone.
CREATE TABLE pointer_index (
    queue           integer NOT NULL,
    zone            bytea NOT NULL,
    token           integer NOT NULL,
    vesting_ms      bigint NOT NULL,
    empty_since_ms  bigint,
    PRIMARY KEY (queue, zone)
);
CREATE INDEX pointer_index_empty ON pointer_index (empty_since_ms)
    WHERE empty_since_ms IS NOT NULL;
-- Which tokens are in use. A ring of one has none of it to keep.
CREATE INDEX pointer_index_tokens ON pointer_index (token) WHERE token > 0;

-- A message that is done or has failed; reason: why it failed. A sequence begins with the time
-- (next_sequence of queue_counts is never below the time * 65536), so that the order of sequences is
-- that of time, as far as clocks agree. consumer, claimed_at_ms, lease_id: the last attempt of a done
-- message, which attempts does not have.
CREATE TABLE ended (
    queue           integer NOT NULL,
    failed          boolean NOT NULL,
    sequence        bigint NOT NULL,
    message_id      bigint NOT NULL,
    ended_at_ms     bigint NOT NULL,
    attempts        integer NOT NULL,
    reason          bytea NOT NULL,
    consumer        bytea NOT NULL DEFAULT '',
    claimed_at_ms   bigint NOT NULL DEFAULT 0,
    lease_id        bytea NOT NULL DEFAULT '',
    PRIMARY KEY (queue, failed, sequence)
);
CREATE INDEX ended_by_message ON ended (queue, message_id);

-- Attempts that have ended, but for the last one of a done message, which its row of ended tells.
-- ending: 0 acked, 1 released, 2 expired. lease_id: under which it was held, so that an ack that
-- got no answer can be told from a stale one.
CREATE TABLE attempts (
    queue           integer NOT NULL,
    message_id      bigint NOT NULL,
    number          integer NOT NULL,
    consumer        bytea NOT NULL,
    claimed_at_ms   bigint NOT NULL,
    ended_at_ms     bigint NOT NULL,
    ending          smallint NOT NULL,
    reason          bytea NOT NULL,
    lease_id        bytea NOT NULL,
    PRIMARY KEY (queue, message_id, number)
);
