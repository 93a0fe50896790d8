"""Commands, tickets, actions and answers of the Flight protocol, as JSON; ``docs/flight.md``.

Unknown fields and wrong types are refused, so that a misspelt option is an error and not a
default. An error travels twice: as text that begins with the name of its class, for people and
foreign clients, and as JSON beside it, from which :func:`revive` makes the exception again.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pyarrow as pa

from penstock import errors
from penstock.errors import InvalidInput, PenstockError
from penstock.flight.schemas import TIME

__all__ = [
    "PROTOCOL",
    "RESTORED",
    "BackfillCommand",
    "CollectCommand",
    "CommitFill",
    "CommitStages",
    "DropStages",
    "FillStage",
    "FilterCommand",
    "LogTicket",
    "Nothing",
    "PublishCommand",
    "ReadCommand",
    "RedriveCommand",
    "RestoreCommand",
    "RoutePlanCommand",
    "SnapshotTicket",
    "StageCommand",
    "TrimCommand",
    "decode",
    "describe",
    "encode",
    "revive",
]

PROTOCOL: Final = 1
# gRPC bounds headers to 8 KiB, and the text travels twice.
MAX_ERROR_CHARS: Final = 1_000
# What a restore brings of each message; the payload may be null.
RESTORED: Final = pa.schema(
    [
        ("offset", pa.int64()),
        ("published_at", TIME),
        ("group", pa.string()),
        ("priority", pa.int32()),
        ("size", pa.int64()),
        ("delay_ms", pa.int64()),
        ("attributes_json", pa.string()),
        ("payload", pa.binary()),
    ]
)
encode: Final = msgspec.json.Encoder().encode


class _Command(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class ReadCommand(_Command):
    """GetFlightInfo: which rows and columns of which table, in how many parts."""

    table: str
    queue: str | list[str] | None = None
    payload: bool = False
    columns: list[str] | None = None
    filter: str | None = None
    partitions: int = 1
    begin: int | None = None
    end: int | None = None
    logs: list[int] | None = None


class SnapshotTicket(_Command, tag_field="table", tag="snapshot"):
    """DoGet: a part of a snapshot that GetFlightInfo has taken; of these queues, if it says so."""

    snapshot: str
    part: int
    queues: list[str] | None = None


class LogTicket(_Command, tag_field="table", tag="log"):
    """DoGet: a stretch of a log, from a client that knows the offsets."""

    log: int
    begin: int
    end: int
    payload: bool = False
    columns: list[str] | None = None
    filter: str | None = None


class PublishCommand(_Command, tag_field="op", tag="publish"):
    """DoPut: rows to publish."""


class StageCommand(_Command, tag_field="op", tag="stage"):
    """DoPut: all assignments of a stretch of a log."""

    stage: str
    log: int
    begin: int
    end: int
    filters_version: int | None = None
    epoch: int | None = None


class FillStage(_Command, tag_field="op", tag="fill_stage"):
    """DoPut: all messages of a stretch that a backfill puts into a queue."""

    stage: str
    queue: str
    begin: int
    end: int


class RestoreCommand(_Command, tag_field="op", tag="restore"):
    """DoPut: archived messages of a stretch below the log that a backfill puts into a queue."""

    queue: str
    begin: int
    end: int
    filter: str | None = None


class Nothing(_Command):
    """An action without options."""


class RoutePlanCommand(_Command):
    """Action route_plan."""

    max_offsets: int | None = None


class FilterCommand(_Command):
    """Action filters."""

    offset: int


class CommitStages(_Command):
    """Action commit_stages."""

    stages: list[str]
    epoch: int | None = None


class DropStages(_Command):
    """Action drop_stages."""

    stages: list[str]


class CommitFill(_Command):
    """Action commit_fill. ``filter`` is what was matched by, as backfill_plan gave it."""

    stages: list[str]
    queue: str
    begin: int
    end: int
    filter: str | None = None


class BackfillCommand(_Command, rename={"from_": "from"}):
    """Action backfill_plan."""

    queue: str
    from_: int | str | None = None
    from_time_ms: int | None = None
    to: int | None = None
    archived: bool = False


class RedriveCommand(_Command):
    """Action redrive."""

    queue: str
    message_ids: list[int] | None = None
    where: str | None = None


class TrimCommand(_Command):
    """Action trim."""

    queue: str
    state: str
    before: int
    created_at_ms: int | None = None


class CollectCommand(_Command):
    """Action collect."""

    message_ids: list[int]
    dry_run: bool = True


def decode(body: bytes, kind: Any, what: str) -> Any:
    """Read JSON that a client has sent; an empty body is an empty object."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{what}: {error}") from None


class _Error(msgspec.Struct):
    error: str
    message: str


def describe(error: PenstockError) -> tuple[str, bytes]:
    """Give an error as text and as JSON."""
    name, text = type(error).__name__, str(error)
    if len(text) > MAX_ERROR_CHARS:
        text = text[:MAX_ERROR_CHARS] + "…"
    return f"{name}: {text}", encode(_Error(name, text))


def revive(extra: bytes | None) -> PenstockError | None:
    """Make an exception again from its JSON; None if it is not one of ours."""
    try:
        found = msgspec.json.decode(extra or b"", type=_Error)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    kind: Any = getattr(errors, found.error, None)
    if not isinstance(kind, type) or not issubclass(kind, PenstockError):
        kind = PenstockError
    error: PenstockError = kind(found.message)
    return error
