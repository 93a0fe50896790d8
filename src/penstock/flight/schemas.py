"""The schemas of all tables, in one place; and what of a table somebody asks for.

Times are UTC, in microseconds, as Spark has them. A column that can't be null says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.filters import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.filters import Filter

__all__ = [
    "ATTRIBUTES",
    "FILTERED",
    "RANGED",
    "TABLES",
    "TIME",
    "WITH_PAYLOAD",
    "Selection",
    "schema_of",
    "select",
]

TIME: Final = pa.timestamp("us", tz="UTC")
ATTRIBUTES: Final = pa.map_(pa.string(), pa.string())
PAYLOAD: Final = pa.field("payload", pa.binary())
# The log's record as it is stored (codec/metadata.py), for who names this column: it costs the
# broker no decoding. Records that do not decode are not left out.
METADATA: Final = pa.field("metadata", pa.binary(), nullable=False)


def _must(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


_QUEUE: Final = _must("queue", pa.string())
_MESSAGE: Final = _must("message_id", pa.int64())
_PUBLISHED: Final = _must("published_at", TIME)
_GROUP: Final = _must("group", pa.string())
_PRIORITY: Final = _must("priority", pa.int32())
_SIZE: Final = _must("size", pa.int64())
_ATTEMPTS: Final = _must("attempts", pa.int32())
_ATTRIBUTES: Final = (_must("attributes", ATTRIBUTES), _must("attributes_json", pa.string()))
_DELAY: Final = _must("delay_ms", pa.int64())
_ABOUT: Final = (_PUBLISHED, _GROUP, _PRIORITY, _SIZE, *_ATTRIBUTES)
_ENDED: Final = (_PUBLISHED, _GROUP, _PRIORITY, _SIZE, _DELAY, *_ATTRIBUTES)
_DEPTHS: Final = ("available", "delayed", "in_flight")

TABLES: Final[dict[str, pa.Schema]] = {
    "log": pa.schema(
        [
            _must("log", pa.int32()),
            _must("offset", pa.int64()),
            _PUBLISHED,
            _GROUP,
            _PRIORITY,
            _SIZE,
            _DELAY,
            *_ATTRIBUTES,
        ]
    ),
    "messages": pa.schema(
        [
            _MESSAGE,
            # The log may have let go of a message before its last queue does.
            *(field if field is _SIZE else pa.field(field.name, field.type) for field in _ABOUT),
        ]
    ),
    "active": pa.schema(
        [
            _QUEUE,
            _MESSAGE,
            _must("state", pa.string()),
            _GROUP,
            _PRIORITY,
            _ATTEMPTS,
            _PUBLISHED,
            _must("visible_at", TIME),
            pa.field("lease_deadline", TIME),
            pa.field("consumer", pa.string()),
            _SIZE,
            _DELAY,
            *_ATTRIBUTES,
        ]
    ),
    "done": pa.schema(
        [
            _QUEUE,
            _MESSAGE,
            _must("sequence", pa.int64()),
            _must("done_at", TIME),
            _ATTEMPTS,
            *_ENDED,
        ]
    ),
    "failed": pa.schema(
        [
            _QUEUE,
            _MESSAGE,
            _must("sequence", pa.int64()),
            _must("failed_at", TIME),
            _ATTEMPTS,
            _must("reason", pa.string()),
            *_ENDED,
        ]
    ),
    "attempts": pa.schema(
        [
            _QUEUE,
            _MESSAGE,
            _must("attempt", pa.int32()),
            _must("consumer", pa.string()),
            _must("claimed_at", TIME),
            pa.field("ended_at", TIME),
            _must("outcome", pa.string()),
            _must("reason", pa.string()),
        ]
    ),
    "queues": pa.schema(
        [
            _must("name", pa.string()),
            _must("filter", pa.string()),
            _must("ordering", pa.string()),
            _must("lease_ms", pa.int64()),
            _must("max_attempts", pa.int32()),
            _must("backoff_base_ms", pa.int64()),
            _must("backoff_cap_ms", pa.int64()),
            _must("delay_ms", pa.int64()),
            _must("done_retention_ms", pa.int64()),
            _must("failed_retention_ms", pa.int64()),
            _must("unclaimed_retention_ms", pa.int64()),
            _must("bucket_exponent", pa.int32()),
            _must("description", pa.string()),
            _must("dead_letter", pa.string()),
            _must("labels", pa.map_(pa.string(), pa.string())),
            _must("created_at_ms", pa.int64()),
            _must("version", pa.int64()),
            *(_must(name, pa.int64()) for name in (*_DEPTHS, "done", "failed")),
            _must("draining", pa.bool_()),
        ]
    ),
    "groups": pa.schema(
        [
            _QUEUE,
            _GROUP,
            *(_must(name, pa.int64()) for name in _DEPTHS),
            pa.field("oldest_published_at", TIME),
        ]
    ),
    "stats": pa.schema(
        [
            pa.field("queue", pa.string()),
            _must("metric", pa.string()),
            pa.field("value", pa.int64()),
        ]
    ),
}
WITH_PAYLOAD: Final = frozenset({"log", "messages", "active", "done", "failed"})
# What a filter can be asked of, and what begin and end count.
FILTERED: Final = WITH_PAYLOAD
RANGED: Final = {
    "log": "offsets",
    "messages": "message ids",
    "done": "sequence numbers",
    "failed": "sequence numbers",
}


class Selection(NamedTuple):
    """A table, the columns that are wanted, and the filter that rows must satisfy."""

    table: str
    schema: pa.Schema
    filter: Filter | None

    def wants(self, *columns: str) -> bool:
        """Whether any of the columns is asked for."""
        return any(column in self.schema.names for column in columns)


def schema_of(
    table: str, *, payload: bool = False, columns: Sequence[str] | None = None
) -> pa.Schema:
    """Return the schema of a table; ``columns`` chooses and orders, the payload among them."""
    schema = TABLES.get(table)
    if schema is None:
        raise InvalidInput(f"no table {table!r:.100}; there are {', '.join(TABLES)}")
    if table in WITH_PAYLOAD:
        whole = schema.append(PAYLOAD)
    elif payload:
        raise InvalidInput(f"table {table} has no payloads")
    else:
        whole = schema
    if columns is None:
        return whole if payload else schema
    if table == "log":
        whole = whole.append(METADATA)
    if not columns or len(set(columns)) < len(columns):
        raise InvalidInput("columns must name at least one column, and each once")
    for name in columns:
        if name not in whole.names:
            raise InvalidInput(
                f"table {table} has no column {name!r:.100}; it has {', '.join(whole.names)}"
            )
    return pa.schema([whole.field(name) for name in columns])


def select(
    table: str,
    *,
    payload: bool = False,
    columns: Sequence[str] | None = None,
    filter_text: str | None = None,
) -> Selection:
    """Check what is asked for."""
    schema = schema_of(table, payload=payload, columns=columns)
    if filter_text is not None and table not in FILTERED:
        raise InvalidInput(f"table {table} has no attributes to filter by")
    return Selection(table, schema, None if filter_text is None else parse(filter_text))
