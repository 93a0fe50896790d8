"""Every bound of Penstock, in one place. ``docs/limits.md`` lists them for users."""

from __future__ import annotations

from typing import Final

# --- messages -------------------------------------------------------------------------------
MAX_PAYLOAD_BYTES: Final = 16 * 1024 * 1024
MAX_ATTRIBUTES: Final = 256
MAX_ATTRIBUTE_NAME_BYTES: Final = 256
MAX_ATTRIBUTES_BYTES: Final = 64 * 1024
MAX_GROUP_BYTES: Final = 256
MAX_DEDUP_ID_BYTES: Final = 256
MAX_PRIORITY: Final = 255

# --- queues ---------------------------------------------------------------------------------
MAX_QUEUE_NAME_CHARS: Final = 80
MAX_DESCRIPTION_BYTES: Final = 4096
MAX_ATTEMPTS: Final = 65_535
# Array counts in the bucket records are u16, so 10^4 is the largest bucket that can be encoded.
MAX_BUCKET_EXPONENT: Final = 4
MAX_LABELS: Final = 64
MAX_LABEL_NAME_BYTES: Final = 256
MAX_LABELS_BYTES: Final = 64 * 1024

# --- verbs ----------------------------------------------------------------------------------
MAX_PUBLISH_MESSAGES: Final = 10_000
MAX_PUBLISH_BYTES: Final = 256 * 1024 * 1024
MAX_CLAIM_LIMIT: Final = 10_000
# A claim ends with the message that brings it there; so do claims that are made together.
MAX_CLAIM_BYTES: Final = 64 * 1024 * 1024
MAX_JOINT_CLAIM_BYTES: Final = 256 * 1024 * 1024
MAX_PAGE_BYTES: Final = 64 * 1024 * 1024
MAX_RECEIPTS: Final = 10_000
MAX_BROWSE_LIMIT: Final = 10_000
MAX_PLACES: Final = 50
MAX_STATS_LIMIT: Final = 1_000
MAX_CURSOR_BYTES: Final = 2_048
MAX_CONSUMER_BYTES: Final = 256
# Longer reasons are cut, not refused: an error text must never stop its release.
MAX_REASON_BYTES: Final = 4096

# --- the metadata log -------------------------------------------------------------------------
MAX_LOGS: Final = 256
MAX_LOG_LIMIT: Final = 100_000
MAX_OFFSET: Final = (1 << 63) - 1
# The offsets that a queue was filled from: kept with the queue, and written with every change.
MAX_COVERAGE_STRETCHES: Final = 256

# --- time -----------------------------------------------------------------------------------
MAX_LEASE_MS: Final = 365 * 86_400_000
MAX_WAIT_MS: Final = 86_400_000
# Delays and retention are "without limit": bounded only so that a time key can't overflow.
MAX_DURATION_MS: Final = 1_000 * 365 * 86_400_000
MAX_DEDUP_WINDOW_MS: Final = 7 * 86_400_000

# --- filters --------------------------------------------------------------------------------
MAX_FILTER_CHARS: Final = 16_384
MAX_FILTER_DEPTH: Final = 64
MAX_FILTER_NODES: Final = 4_096
MAX_FILTER_IN_ITEMS: Final = 1_000
MAX_FILTER_LITERAL_CHARS: Final = 1_024

# --- the Flight server ------------------------------------------------------------------------
MAX_VIEWS: Final = 64
MAX_VIEW_IDLE_MS: Final = 600_000
# When there is no room for another, a snapshot that has waited so long for its reader may go.
MIN_VIEW_IDLE_MS: Final = 10_000
# ... and one whose reader has taken nothing for so long.
MAX_READ_STALL_MS: Final = 60_000
# Batches that readers have not taken yet, and how long one waits for others before it is made: not
# as long as a client waits for it.
MAX_UNREAD_BYTES: Final = 256 * 1024 * 1024
MAX_UNREAD_WAIT_MS: Final = 15_000
MAX_PARTITIONS: Final = 1_024
MAX_SNAPSHOT_READS: Final = 256
SNAPSHOT_GUESS_MS: Final = 2_000
MAX_SNAPSHOT_WAIT_MS: Final = 30_000
MAX_REMEMBERED_FRAMES: Final = 1_000
MAX_STAGES: Final = 10_000
MAX_STAGED_BYTES: Final = 256 * 1024 * 1024
MAX_STAGE_IDLE_MS: Final = 3_600_000
MAX_STAGE_NAME_BYTES: Final = 256
# Messages that wait on the server's disk until all rows of their write are known to be good.
MAX_SPOOLS: Final = 64
MAX_SPOOLED_PARTS: Final = 100_000
MAX_SPOOLED_BYTES: Final = 16 * 1024 * 1024 * 1024
MAX_COLLECT_CHUNK: Final = 200
# One publish of a Flight stream: what commits together.
MAX_PUT_CHUNK_MESSAGES: Final = 10_000
MAX_PUT_CHUNK_BYTES: Final = 64 * 1024 * 1024
# One fill: what a client sends before any of it is stored, and how many may do so at a time.
MAX_RESTORE_MESSAGES: Final = 10_000
MAX_RESTORE_BYTES: Final = 64 * 1024 * 1024
MAX_RESTORES: Final = 4

# --- waiting for a Flight server ----------------------------------------------------------------
# How long calls that may be repeated are repeated while nobody answers.
MAX_UNREACHABLE_MS: Final = 10_000
MAX_AWAY_MS: Final = 300_000
MAX_CALL_MS: Final = 10_000
MAX_WORK_CALL_MS: Final = 60_000
MAX_BULK_CALL_MS: Final = 600_000
MAX_READ_IDLE_MS: Final = 20_000

# --- keys and operations ----------------------------------------------------------------------
MAX_TOKEN_CHARS: Final = 512
# Lines about different clients that were turned away which are logged in a minute; the same line is
# logged once in that time.
MAX_REFUSAL_LINES: Final = 100
# Lines of the log that wait to be written.
MAX_LOG_BYTES: Final = 4 * 1024 * 1024
# Connections of the listener for operations, which are no part of the others.
MAX_OPS_CONNECTIONS: Final = 64
# Addresses of servers in one URL.
MAX_ADDRESSES: Final = 16
# Queues that have series of their own at /metrics; the rest are summed.
MAX_METRIC_QUEUES: Final = 200

# --- connections of a server --------------------------------------------------------------------
# All of them, whatever they speak; fewer where the process may not have as many files open.
MAX_CONNECTIONS: Final = 20_000
# Files that a store may keep open, the part of those of the process that this may be, and how many
# are kept back for everything else.
MAX_STORE_FILES: Final = 512
STORE_FILES_SHARE: Final = 4
SPARE_FILES: Final = 64
# Bytes that connections have sent and nobody is done with: with a key, and without one.
MAX_BUFFERED_BYTES: Final = 512 * 1024 * 1024
MAX_STRANGERS_BYTES: Final = 64 * 1024 * 1024
MAX_ALL_WAITING_CLAIMS: Final = 100_000
# Requests of one connection that are begun before the others have their turn, and the time for it.
MAX_TURN_ANSWERS: Final = 256
MAX_TURN_MS: Final = 5

# --- HTTP -------------------------------------------------------------------------------------
HTTP_MAX_REQUEST_LINE_BYTES: Final = 16 * 1024
HTTP_MAX_HEADERS_BYTES: Final = 32 * 1024
HTTP_MAX_HEADERS: Final = 100
# A message of 1 MiB takes up to three times as much in a form or with escapes in JSON.
HTTP_MAX_BODY_BYTES: Final = 8 * 1024 * 1024
# Bytes behind a request that is being answered before the connection is read no further.
HTTP_MAX_AHEAD_BYTES: Final = 64 * 1024
HTTP_WRITE_HIGH_WATER_BYTES: Final = 256 * 1024
HTTP_FIRST_BYTE_MS: Final = 30_000
HTTP_REQUEST_MS: Final = 60_000
HTTP_IDLE_MS: Final = 120_000
# How long a client may take to make room for the rest of its answer.
HTTP_STALLED_WRITE_MS: Final = 60_000
# Requests of a client that has closed its side are answered if they take no longer than this.
HTTP_HALF_CLOSED_MS: Final = 500

# --- SQS ----------------------------------------------------------------------------------------
SQS_MAX_FORM_FIELDS: Final = 1_000
SQS_MAX_MESSAGE_BYTES: Final = 1024 * 1024
SQS_MIN_MESSAGE_SIZE_BYTES: Final = 1_024
SQS_MAX_BATCH: Final = 10
SQS_MAX_MESSAGE_ATTRIBUTES: Final = 10
SQS_MAX_TRACE_CHARS: Final = 1_024
SQS_MAX_TAGS: Final = 50
SQS_MAX_DELAY_S: Final = 900
SQS_MAX_VISIBILITY_S: Final = 43_200
SQS_MAX_WAIT_S: Final = 20
SQS_MAX_RETENTION_S: Final = 1_209_600
SQS_MAX_RECEIVE_COUNT: Final = 1_000
SQS_MAX_LISTED: Final = 1_000
SQS_PURGE_INTERVAL_MS: Final = 60_000
SQS_RECEIVE_ATTEMPT_MS: Final = 300_000
SQS_MAX_RECEIVE_ATTEMPTS: Final = 10_000
SQS_MAX_RECEIVE_ATTEMPT_BYTES: Final = 64 * 1024 * 1024
SQS_MAX_MOVE_TASKS: Final = 1_000
SQS_MAX_MOVES_PER_SECOND: Final = 500
# How long a request may take, beside the wait of a long poll: together less than the minute for
# which SDKs wait for an answer.
SQS_MAX_ANSWER_MS: Final = 20_000

# --- the native protocol ------------------------------------------------------------------------
# A frame holds one whole request; answers that are longer come in parts.
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
MAX_HELLO_BYTES: Final = 8 * 1024
# Of a frame that holds neither payloads nor ids: values that are read take a multiple of its bytes.
MAX_PLAIN_FRAME_BYTES: Final = 1024 * 1024
MAX_ANSWER_PART_BYTES: Final = 1024 * 1024
# One connection: requests and bytes at work before it is read no further, and claims that wait.
MAX_REQUESTS_AT_WORK: Final = 1_024
MAX_BYTES_AT_WORK: Final = 8 * 1024 * 1024
MAX_WAITING_CLAIMS: Final = 10_000
MAX_UNSENT_BYTES: Final = 1024 * 1024
# Consumers of one connection, and the credit that one of them may have at a time.
MAX_CONSUMERS: Final = 1_000
MAX_CREDIT: Final = 10_000
MAX_CREDIT_BYTES: Final = 64 * 1024 * 1024
# All connections: bytes of requests that are at work.
MAX_ALL_BYTES_AT_WORK: Final = 256 * 1024 * 1024
# Silence: before the greeting, inside a frame, of a reader that takes nothing, of a connection.
MAX_GREETING_MS: Final = 10_000
MAX_STALL_MS: Final = 30_000
MAX_IDLE_MS: Final = 300_000
# How long a request may take to be answered whose client has not said how long it waits.
MAX_ANSWER_MS: Final = 60_000
# A client sends a publish again for so long: well within the time that dedup ids are remembered.
MAX_REPEAT_MS: Final = 240_000

# --- Queueber's clients -----------------------------------------------------------------------
MAX_QUEUEBER_CONNECTIONS: Final = 1_000

# --- the disk of a store ------------------------------------------------------------------------
# New messages leave the lesser of the two free, unless min_free_bytes says otherwise.
MIN_FREE_BYTES: Final = 64 * 1024 * 1024
MIN_FREE_PERCENT: Final = 2
# Bounds of write_buffer_mb and block_cache_mb of a URL, and what both are without.
MIN_STORE_MEMORY_MB: Final = 8
MAX_STORE_MEMORY_MB: Final = 65_536
STORE_MEMORY_MB: Final = 64

# --- object storage ---------------------------------------------------------------------------
# How long the object store may give no answer before the verb that waits for it fails.
MAX_OBJECT_STORE_SILENCE_MS: Final = 60_000
MAX_FLUSH_MS: Final = 10_000
# Rows written or read of late, kept so that they need not be read from the engine.
READ_CACHE_BYTES: Final = 64 * 1024 * 1024
# How long a reader that is not the writer keeps to one moment.
MAX_READER_SNAPSHOT_MS: Final = 30 * 60_000
# An owner that has nothing else to write gives a sign of life this often; who takes less than the
# second for its end would take a store from an owner that is only a little late.
HEARTBEAT_MS: Final = 2_000
MIN_STANDBY_AFTER_MS: Final = 3_000

# --- backups ------------------------------------------------------------------------------------
# How long a backup and a prune may take: a prune of a place waits for backups that are younger, and
# a backup for prunes.
MAX_BACKUP_MS: Final = 24 * 3_600_000
MAX_PRUNE_MS: Final = 3_600_000

# --- workers ------------------------------------------------------------------------------------
MAX_CONCURRENCY: Final = 10_000
# Handlers' ends that the store has not confirmed; with more of them a worker claims nothing.
MAX_UNSETTLED: Final = 1_000

# --- the pipeline's process ---------------------------------------------------------------------
# How long a part waits that has failed once, and at the most.
PIPELINE_MIN_PAUSE_MS: Final = 1_000
PIPELINE_MAX_PAUSE_MS: Final = 300_000
# How long a stop waits for the parts, and after that for Spark.
PIPELINE_STOP_MS: Final = 20_000
# An error of a part, in one line.
PIPELINE_LINE_CHARS: Final = 500

# --- SQL databases ------------------------------------------------------------------------------
MAX_RING_SIZE: Final = 4_096
# How long one attempt to connect may take, and how often a transaction is tried again: in all,
# with the pauses, about ten seconds.
MAX_DATABASE_CONNECT_MS: Final = 10_000
MAX_DATABASE_REPEATS: Final = 20
# Snapshots that a server keeps for readers at one time: each is a connection, and a database has
# about a hundred for all that use it.
MAX_DATABASE_VIEWS: Final = 32

# --- the console --------------------------------------------------------------------------------
CONSOLE_MAX_FORM_BYTES: Final = 512 * 1024
CONSOLE_MAX_FORM_FIELDS: Final = 2_000
# How long a page waits for the store.
CONSOLE_MAX_ANSWER_MS: Final = 20_000
CONSOLE_MAX_SESSIONS: Final = 1_000
# A session ends when its visitor asks for nothing for so long, and in any case after the second.
CONSOLE_SESSION_IDLE_MS: Final = 3_600_000
CONSOLE_SESSION_MS: Final = 12 * 3_600_000
# Logins whose key is checked at a time, and pages that are shown live.
CONSOLE_MAX_STREAMS: Final = 100
# Queues of a page, and queues whose last hour is remembered: 60 numbers each.
CONSOLE_PAGE_QUEUES: Final = 100
CONSOLE_MAX_HISTORIES: Final = 10_000
# Messages that one page looks at, the newest messages that a filter is tried on, and the bytes of a
# payload that it shows.
CONSOLE_MAX_SCAN: Final = 10_000
CONSOLE_LOG_SAMPLE: Final = 1_000
CONSOLE_PREVIEW_BYTES: Final = 64 * 1024
CONSOLE_PREVIEW_DEPTH: Final = 64
