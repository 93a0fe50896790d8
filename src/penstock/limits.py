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

# --- verbs ----------------------------------------------------------------------------------
MAX_PUBLISH_MESSAGES: Final = 10_000
MAX_PUBLISH_BYTES: Final = 256 * 1024 * 1024
MAX_CLAIM_LIMIT: Final = 10_000
MAX_RECEIPTS: Final = 10_000
MAX_BROWSE_LIMIT: Final = 10_000
MAX_CURSOR_BYTES: Final = 2_048
MAX_CONSUMER_BYTES: Final = 256
# Longer reasons are cut, not refused: an error text must never stop its release.
MAX_REASON_BYTES: Final = 4096

# --- the metadata log -------------------------------------------------------------------------
MAX_LOGS: Final = 256
MAX_LOG_LIMIT: Final = 100_000
MAX_OFFSET: Final = (1 << 63) - 1

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
MAX_PARTITIONS: Final = 1_024
MAX_STAGES: Final = 10_000
MAX_STAGED_BYTES: Final = 256 * 1024 * 1024
MAX_STAGE_IDLE_MS: Final = 3_600_000
MAX_STAGE_NAME_BYTES: Final = 256
MAX_COLLECT_CHUNK: Final = 200
# One publish of a Flight stream: what commits together.
MAX_PUT_CHUNK_MESSAGES: Final = 10_000
MAX_PUT_CHUNK_BYTES: Final = 64 * 1024 * 1024
