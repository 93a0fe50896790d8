"""The options of the ``penstock`` data source: what they are called and what they may say.

Names are those that Spark users know from Kafka where there is one, and case does not matter. A
name that is not known is an error: a misspelt ``startingOffset`` must not read everything.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING, Final

import msgspec

from penstock import limits
from penstock.errors import InvalidInput
from penstock.flight.protocol import locate

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "LOCATION_VARIABLE",
    "TABLES",
    "Options",
    "Place",
    "read_options",
    "write_options",
]

LOCATION_VARIABLE: Final = "PENSTOCK_FLIGHT"

TABLES: Final = (
    "log",
    "messages",
    "active",
    "done",
    "failed",
    "attempts",
    "queues",
    "groups",
    "stats",
)
"""What can be read in a batch; ``log`` also as a stream."""

ROUTING_TABLES: Final = ("matches", "stretches")
"""What only a stream of the route job reads."""

_READ: Final = {
    "location",
    "token",
    "ca",
    "table",
    "payload",
    "includearchive",
    "queue",
    "filter",
    "columns",
    "partitions",
    "minpartitions",
    "startingoffsets",
    "endingoffsets",
    "startingtimestamp",
    "maxoffsetspertrigger",
    "failondataloss",
    "stretches",
    "epoch",
}
ARCHIVED: Final = ("done", "failed", "attempts")
"""What an archive holds too."""

_LOG_ONLY: Final = {
    "startingoffsets",
    "endingoffsets",
    "startingtimestamp",
    "maxoffsetspertrigger",
    "failondataloss",
    "stretches",
}
_WRITE: Final = {"location", "token", "ca", "table", "epoch", "checkpointlocation"}
# Spark itself puts these beside the user's.
_OF_SPARK: Final = {"path", "checkpointlocation", "queryname"}

DEFAULT_PARTITIONS: Final = 4

Place = str | dict[int, int]
"""``earliest``, ``latest``, or the offset to begin (or end) at for each log."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options that were checked."""

    location: str
    table: str
    payload: bool = False
    queues: tuple[str, ...] | None = None
    filter: str | None = None
    columns: tuple[str, ...] | None = None
    partitions: int = DEFAULT_PARTITIONS
    starting: Place | None = None
    ending: Place = "latest"
    starting_ms: int | None = None
    max_offsets: int | None = None
    fail_on_data_loss: bool = True
    include_archive: str | None = None
    stretches: tuple[tuple[int, int, int], ...] | None = None
    epoch: int | None = None


def read_options(given: Mapping[str, str], *, streaming: bool | None = None) -> Options:
    """Check the options of a read; ``streaming`` is None where that is not known yet."""
    options = _lowered(given, _READ)
    table = options.get("table")
    known = TABLES if streaming is False else (*TABLES, *ROUTING_TABLES)
    if table is None:
        raise InvalidInput(f"option 'table' is missing: one of {', '.join(TABLES)}")
    if table not in known:
        raise InvalidInput(f"no table {table!r:.100}; there are {', '.join(known)}")
    if streaming and table not in {"log", *ROUTING_TABLES}:
        raise InvalidInput(f"table {table!r} can't be read as a stream; 'log' can")
    if table not in {"log", *ROUTING_TABLES}:
        _refuse(options, _LOG_ONLY, f"are for the table 'log', not {table!r}")
    if table not in ARCHIVED:
        _refuse(options, {"includearchive"}, f"are for {', '.join(ARCHIVED)}, not {table!r}")
    if streaming:
        _refuse(options, {"endingoffsets", "stretches"}, "are for batch reads, not for a stream")
    elif streaming is False:
        _refuse(options, {"maxoffsetspertrigger"}, "are for streams, not for a batch read")
    if "startingtimestamp" in options and "startingoffsets" in options:
        raise InvalidInput("startingOffsets and startingTimestamp exclude each other")
    return Options(
        location=_location(options),
        table=table,
        payload=_boolean(options, "payload", default=False),
        queues=_names(options, "queue"),
        filter=options.get("filter"),
        columns=_names(options, "columns"),
        partitions=_partitions(options),
        starting=_place(options, "startingOffsets"),
        ending=_place(options, "endingOffsets") or "latest",
        starting_ms=_time_ms(options, "startingTimestamp"),
        max_offsets=_count(options, "maxOffsetsPerTrigger", 1, limits.MAX_OFFSET),
        fail_on_data_loss=_boolean(options, "failOnDataLoss", default=True),
        include_archive=options.get("includearchive"),
        stretches=_stretches(options),
        epoch=_count(options, "epoch", 0, limits.MAX_OFFSET),
    )


def write_options(given: Mapping[str, str]) -> Options:
    """Check the options of a write: ``messages`` are published, ``assignments`` are routed."""
    options = _lowered(given, _WRITE)
    table = options.get("table", "messages")
    if table not in {"messages", "assignments"}:
        raise InvalidInput(f"table {table!r:.100} can't be written; 'messages' can be published")
    return Options(
        location=_location(options),
        table=table,
        epoch=_count(options, "epoch", 0, limits.MAX_OFFSET),
    )


def _lowered(given: Mapping[str, str], known: set[str]) -> dict[str, str]:
    options = {name.lower(): value for name, value in given.items()}
    if "store" in options:
        raise InvalidInput(
            "there is no option 'store': Spark reads and writes every store through its server. "
            f"Start one (penstock serve --store {options['store']:.200}) and give its Flight "
            "address as 'location'. To read a bucket without a server, and without Spark, use "
            "penstock.open_reader"
        )
    unknown = sorted(set(options) - known - _OF_SPARK)
    if unknown:
        raise InvalidInput(
            f"unknown option {unknown[0]!r}; there are {', '.join(sorted(known - {'epoch'}))}"
        )
    return options


def _refuse(options: Mapping[str, str], names: set[str], why: str) -> None:
    wrong = sorted(names & set(options))
    if wrong:
        raise InvalidInput(f"options {', '.join(wrong)} {why}")


def _location(options: Mapping[str, str]) -> str:
    location = options.get("location") or os.environ.get(LOCATION_VARIABLE)
    if not location:
        raise InvalidInput(
            "where is the broker? Give option('location', 'grpc://127.0.0.1:8815') or set "
            f"{LOCATION_VARIABLE}"
        )
    # The key goes along to the executors, whose environment may be another.
    return locate(location, token=options.get("token"), ca=options.get("ca"))


def _boolean(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = options.get(name.lower())
    if text is None:
        return default
    if text.lower() not in {"true", "false"}:
        raise InvalidInput(f"{name} is true or false, not {text!r:.100}")
    return text.lower() == "true"


def _names(options: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    text = options.get(name)
    if text is None:
        return None
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise InvalidInput(f"{name} is a list of names with commas, not {text!r:.100}")
    return names


def _count(options: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    text = options.get(name.lower())
    if text is None:
        return None
    try:
        count = int(text)
    except ValueError:
        count = low - 1
    if not low <= count <= high:
        raise InvalidInput(f"{name} is a number from {low} to {high}, not {text!r:.100}")
    return count


def _partitions(options: Mapping[str, str]) -> int:
    count = _count(options, "minPartitions", 1, limits.MAX_PARTITIONS)
    return count or _count(options, "partitions", 1, limits.MAX_PARTITIONS) or DEFAULT_PARTITIONS


def _place(options: Mapping[str, str], name: str) -> Place | None:
    text = options.get(name.lower())
    if text is None or text in {"earliest", "latest"}:
        if text == "earliest" and name == "endingOffsets":
            raise InvalidInput("endingOffsets is 'latest' or JSON like {\"0\": 5}")
        return text
    try:
        return msgspec.json.decode(text, type=dict[int, int], strict=False)
    except msgspec.MsgspecError:
        raise InvalidInput(
            f"{name} is 'earliest', 'latest' or JSON like {{\"0\": 5}} (log to offset; -2 is "
            f"earliest, -1 latest), not {text!r:.100}"
        ) from None


def _time_ms(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name.lower())
    if text is None:
        return None
    if text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise InvalidInput(
            f"{name} is milliseconds since the epoch, or a time with its zone like "
            f"2026-01-31T12:00:00Z, not {text!r:.100}"
        )
    return int(moment.timestamp() * 1000)


def _stretches(options: Mapping[str, str]) -> tuple[tuple[int, int, int], ...] | None:
    text = options.get("stretches")
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=tuple[tuple[int, int, int], ...])
    except msgspec.MsgspecError:
        raise InvalidInput(
            f"stretches is JSON like [[0, 5, 900]] (log, begin, end), not {text!r:.100}"
        ) from None
