"""The options of the ``penstock`` data source: their names and their values.

Names are those that Spark users know from Kafka where there is one, and case does not matter. A
name that is not known is an error: a misspelt ``startingOffset`` must not read everything.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql.types import StructField, StructType

from penstock import limits
from penstock.errors import InvalidInput, did_you_mean
from penstock.flight.client import locate
from penstock.flight.tables import TABLES as SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LOCATION_VARIABLE: Final = "PENSTOCK_FLIGHT"

TABLES: Final = tuple(SCHEMAS)
"""The tables of a batch read; ``log`` can also be read as a stream."""

ROUTING_TABLES: Final = ("matches", "stretches")
"""The tables that only a stream of the route job reads."""

ARCHIVED: Final = ("done", "failed", "attempts")
"""The tables that an archive has too."""

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
    snapshot: str | None = None
    stretches: tuple[tuple[int, int, int], ...] | None = None
    epoch: int | None = None


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ValueError
    return names


def _number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not low <= int(text) <= high:
            raise ValueError
        return int(text)

    return parse


def _place(text: str) -> Place:
    if text in {"earliest", "latest"}:
        return text
    return msgspec.json.decode(text, type=dict[int, int], strict=False)


def _end(text: str) -> Place:
    if text == "earliest":
        raise ValueError
    return _place(text)


def _time_ms(text: str) -> int:
    if text.isdigit():
        return int(text)
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError
    return int(time.timestamp() * 1000)


_stretches: Final = msgspec.json.Decoder(tuple[tuple[int, int, int], ...]).decode
_parts: Final = _number(1, limits.MAX_PARTITIONS)
# The options of a read: the field, how its text is parsed, and what the text may be.
_PARSED: Final[dict[str, tuple[str, Callable[[str], Any], str]]] = {
    "payload": ("payload", _boolean, "true or false"),
    "includeArchive": ("include_archive", str, "a directory"),
    "snapshot": ("snapshot", str, "the name of a snapshot"),
    "queue": ("queues", _names, "a list of names with commas"),
    "filter": ("filter", str, "a filter"),
    "columns": ("columns", _names, "a list of names with commas"),
    "partitions": ("partitions", _parts, f"a number from 1 to {limits.MAX_PARTITIONS}"),
    "minPartitions": ("partitions", _parts, f"a number from 1 to {limits.MAX_PARTITIONS}"),
    "startingOffsets": (
        "starting",
        _place,
        "'earliest', 'latest' or JSON like {\"0\": 5} (log to offset; -2 is earliest, -1 latest)",
    ),
    "endingOffsets": ("ending", _end, "'latest' or JSON like {\"0\": 5}"),
    "startingTimestamp": (
        "starting_ms",
        _time_ms,
        "milliseconds since the epoch, or a time with its zone like 2026-01-31T12:00:00Z",
    ),
    "maxOffsetsPerTrigger": (
        "max_offsets",
        _number(1, limits.MAX_OFFSET),
        f"a number from 1 to {limits.MAX_OFFSET}",
    ),
    "failOnDataLoss": ("fail_on_data_loss", _boolean, "true or false"),
    "stretches": ("stretches", _stretches, "JSON like [[0, 5, 900]] (log, begin, end)"),
    "epoch": ("epoch", _number(0, limits.MAX_OFFSET), f"a number from 0 to {limits.MAX_OFFSET}"),
}
_PLACE: Final = {"server", "location", "token", "ca", "table"}
_READ: Final = _PLACE | {name.lower() for name in _PARSED}
_WRITE: Final = _PLACE | {"epoch", "checkpointlocation"}
# Spark itself puts these beside the user's.
_OF_SPARK: Final = {"path", "checkpointlocation", "queryname"}
_LOG_ONLY: Final = {
    *("startingoffsets", "endingoffsets", "startingtimestamp", "maxoffsetspertrigger"),
    *("failondataloss", "stretches"),
}


def read_options(given: Mapping[str, str], *, streaming: bool | None = None) -> Options:
    """Check the options of a read; ``streaming`` is None where that is not known yet."""
    options = _lowered(given, _READ)
    table = options.get("table")
    known = TABLES if streaming is False else (*TABLES, *ROUTING_TABLES)
    if table is None:
        raise InvalidInput(
            f"option 'table' is missing: one of {', '.join(TABLES)}. (A table that CREATE TABLE "
            "made without it only takes messages; one that was made with columns of its own "
            "does not know its options)"
        )
    if table not in known:
        raise InvalidInput(f"no table {table!r:.100}; there are {', '.join(TABLES)}")
    if streaming and table not in {"log", *ROUTING_TABLES}:
        raise InvalidInput(f"table {table!r} can't be read as a stream; 'log' can")
    if table not in {"log", *ROUTING_TABLES}:
        _refuse(options, _LOG_ONLY, f"are for the table 'log', not {table!r}")
    if table not in ARCHIVED:
        _refuse(options, {"includearchive"}, f"are for {', '.join(ARCHIVED)}, not {table!r}")
    if streaming:
        _refuse(
            options,
            {"endingoffsets", "stretches", "snapshot"},
            "are for batch reads, not for a stream",
        )
    elif streaming is False:
        _refuse(options, {"maxoffsetspertrigger"}, "are for streams, not for a batch read")
    if "snapshot" in options and "includearchive" in options:
        raise InvalidInput("an archive goes with the present, not with a snapshot: includeArchive")
    if "startingtimestamp" in options and "startingoffsets" in options:
        raise InvalidInput("startingOffsets and startingTimestamp exclude each other")
    return _parsed(options, table)


def write_options(given: Mapping[str, str]) -> Options:
    """Check the options of a write: ``messages`` are published, ``assignments`` are routed."""
    options = _lowered(given, _WRITE)
    table = options.get("table", "messages")
    if table not in {"messages", "assignments"}:
        raise InvalidInput(f"table {table!r:.100} can't be written; 'messages' can be published")
    return _parsed(options, table)


def _parsed(options: Mapping[str, str], table: str) -> Options:
    fields = {}
    for name, (field, parse, says) in _PARSED.items():
        text = options.get(name.lower())
        if text is not None:
            try:
                fields[field] = parse(text)
            except (KeyError, ValueError, msgspec.MsgspecError):
                raise InvalidInput(f"{name} is {says}, not {text!r:.100}") from None
    location = options.get("server") or options.get("location")
    if location != options.get("location", location):
        raise InvalidInput("options 'server' and 'location' name two brokers: give one of them")
    location = location or os.environ.get(LOCATION_VARIABLE)
    if not location:
        raise InvalidInput(
            "where is the broker? Give option('server', 'grpc://127.0.0.1:8815') or set "
            f"{LOCATION_VARIABLE}"
        )
    # The key goes along to the executors, whose environment may be another.
    located = locate(location, token=options.get("token"), ca=options.get("ca"))
    return Options(location=located, table=table, **fields)


def _lowered(given: Mapping[str, str], known: set[str]) -> dict[str, str]:
    options = {name.lower(): value for name, value in given.items()}
    if "provider" in options:
        options = _of_statement(options)
    if "store" in options:
        raise InvalidInput(
            "there is no option 'store': Spark reads and writes every store through its server. "
            f"Start one (penstock serve --store {options['store']:.200}) and give its Flight "
            "address as 'server'. To read a bucket without a server, and without Spark, use "
            "penstock.open_reader"
        )
    unknown = sorted(set(options) - known - _OF_SPARK)
    if unknown:
        raise InvalidInput(
            f"unknown option {unknown[0]!r:.100}; {did_you_mean(unknown[0], known - {'epoch'})}"
        )
    return options


# --- tables of Spark's catalog --------------------------------------------------------------------

# Options that Spark itself adds to a table that CREATE TABLE makes.
_OF_TABLE: Final = {"provider", "owner", "comment", "collation", "external", "is_managed_location"}
_METADATA: Final = "penstock"


def _of_statement(given: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a CREATE TABLE; Spark gives each a second time, with a prefix."""
    return {
        name: value
        for name, value in given.items()
        if name not in _OF_TABLE and not name.startswith("option.")
    }


def table_metadata(given: Mapping[str, str]) -> dict[str, str] | None:
    """Return the options that a table of the catalog remembers; None if no CREATE TABLE gave them.

    Spark gives the options of CREATE TABLE to the data source once, when the table is made, and
    none to its reads and writes: those find them with the first column of the table.
    """
    lowered = {name.lower(): value for name, value in given.items()}
    if "provider" not in lowered:
        return None
    options = _of_statement(lowered)
    if "token" in options:
        raise InvalidInput(
            "a token has no place in a catalog, which everybody may read: start Spark with "
            "PENSTOCK_TOKEN, or use CREATE TEMPORARY VIEW"
        )
    return options


def remembered(given: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """Return the options of a read or write, with those that the table's first column has."""
    known = schema.fields[0].metadata.get(_METADATA, "{}") if schema.fields else "{}"
    return {**msgspec.json.decode(known, type=dict[str, str]), **given}


def with_memory(schema: StructType, options: Mapping[str, str]) -> StructType:
    """Return a schema whose first column remembers options."""
    first, *others = schema.fields
    metadata = {**first.metadata, _METADATA: msgspec.json.encode(options).decode()}
    named = StructField(first.name, first.dataType, first.nullable, metadata)
    return StructType([named, *others])


def _refuse(options: Mapping[str, str], names: set[str], why: str) -> None:
    wrong = sorted(names & set(options))
    if wrong:
        raise InvalidInput(f"options {', '.join(wrong)} {why}")
