"""Between what the log keeps of a message and what its readers are given."""

from __future__ import annotations

from penstock.errors import CorruptRecord
from penstock.model import LogRecord
from penstock.store.codec.metadata import Metadata, decode_metadata

__all__ = ["decodes", "metadata_of", "record_of"]


def decodes(encoded: bytes) -> bool:
    """Whether metadata can be read."""
    try:
        decode_metadata(encoded)
    except CorruptRecord:
        return False
    return True


def record_of(message_id: int, metadata: Metadata) -> LogRecord:
    """Return a message of the log as its readers are given it."""
    return LogRecord(
        message_id,
        metadata.attributes,
        metadata.group,
        metadata.priority,
        metadata.published_at_ms,
        metadata.size,
        metadata.delay_ms,
    )


def metadata_of(record: LogRecord) -> Metadata:
    """Return what is to be kept of a message that a reader of the log was given."""
    return Metadata(
        record.published_at_ms,
        record.group,
        record.priority,
        record.size,
        record.delay_ms,
        record.attributes,
    )
