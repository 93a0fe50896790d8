"""The figures of a report: executors count where they read history, Spark merges what they counted.

::

    parts of six tables ─▶ tasks: read, count in Arrow ─▶ shuffle ─▶ sums, percentiles

A task counts a chunk of rows at a time and hands on *cells*: sums of each queue and of each group,
and how many messages took which time. Spark brings the cells of a queue, or of a group,
together. Nothing here grows with the messages of a queue but the number of tasks and chunks: a
time above :data:`EXACT_MS` is cut to eleven binary digits, so that a queue has few different ones.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

from penstock.flight.tables import make_schema
from penstock.spark.delta import shaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql import Column, DataFrame

# Columns that came over Flight may lie at any address: Arrow copies those, and does not warn.
os.environ.setdefault("ACERO_ALIGNMENT_HANDLING", "reallocate")

SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
TIMES: Final = ("first_claim", "done")
EXACT_MS: Final = 1 << 11
"""Times from here on are rounded down, by less than a thousandth."""
SECONDS: Final = (1, 5, 15, 60, 300, 900, 3_600, 21_600, 86_400)
"""Steps of the time line, each a multiple of those before it."""
SLOTS: Final = 120
"""The most steps of a time line."""

WAITING: Final = ("available", "delayed", "in_flight")
_MESSAGE: Final = ("queue", "group", "attempts", "published_at", "first_claimed_at")
READS: Final[dict[str, tuple[tuple[str, ...], str | None]]] = {
    "done": ((*_MESSAGE, "done_at"), None),
    "attempts": (
        ("queue", "message_id", "outcome", "reason"),
        "outcome IN ('released', 'expired')",
    ),
    "failed": ((*_MESSAGE, "failed_at"), None),
    # Messages that wait, and were never claimed, have no figures.
    "active": (_MESSAGE, "attempts > 0"),
    "groups": (
        ("queue", "group", *WAITING, "oldest_published_at"),
        None,
    ),
    "queues": (("name", *WAITING, "draining"), None),
}
"""Of each table that figures are made of: its columns, and the condition on its rows."""

_ADDED: Final = ("messages", "done", "failed", "spent", "unknown", *WAITING, "draining")
_LOWEST: Final = ("first_ended_us", "oldest_us")
_HIGHEST: Final = ("last_ended_us", "attempts_max")
_KEYS: Final = ("queue", "kind", "name", "reason", "number")
CELLS: Final = make_schema(
    "queue string, kind string, name string?, reason string?, number long?, what string?, at long?"
    + "".join(f", {name} long?" for name in (*_ADDED, *_LOWEST, *_HIGHEST))
)
"""The columns of cells. ``kind`` says what the sums are of: a ``queue``, a ``group`` (``name``),
messages in a state (``name``) after so many (``number``) ``attempts``, those that ended in the
``second`` ``number`` or soon after, or attempts with an outcome (``name``) and a ``reason``. With
``what`` a cell says how many (``messages``) took the time ``at`` to the first claim or to done, or
how many attempts the message ``at`` had.
"""
# A task holds as many rows; with names of groups they are some ten megabytes.
_CHUNK_ROWS: Final = 1 << 18
# So many tasks share the messages of one reason.
_SHARES_OF_REASON: Final = 64


# --- in tasks -------------------------------------------------------------------------------------


def count(table: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Count the rows of a part of a table, a chunk at a time."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows >= _CHUNK_ROWS:
            yield from cells(table, pa.Table.from_batches(held).combine_chunks()).to_batches()
            held, rows = [], 0
    if held:
        yield from cells(table, pa.Table.from_batches(held).combine_chunks()).to_batches()


def cells(table: str, rows: pa.Table) -> pa.Table:
    """Return the cells of some rows of a table."""
    made = _COUNTERS[table](rows) if table in _COUNTERS else _of_messages(table, rows)
    return pa.concat_tables(
        shaped(part.rename_columns(_named(part)), CELLS, kind=kind) for kind, part in made
    )


def _named(part: pa.Table) -> list[str]:
    return ["name" if name == "group" else name for name in part.column_names]


_Parts = list[tuple[str, pa.Table]]


def _of_messages(table: str, rows: pa.Table) -> _Parts:
    """Count messages that are done, have failed, or were claimed and go on."""
    nothing = pa.nulls(rows.num_rows, pa.int64())
    is_done, is_over = (pa.repeat(table == "done", rows.num_rows), table != "active")
    ended = rows.column(f"{table}_at").cast(pa.int64()) if is_over else nothing
    published = rows.column("published_at").cast(pa.int64())
    claimed = rows.column("first_claimed_at").cast(pa.int64())
    attempts = rows.column("attempts").cast(pa.int64())
    messages = pa.table(
        {
            "queue": rows.column("queue"),
            "group": rows.column("group"),
            "number": attempts,
            "ended_us": ended,
            "done": is_done.cast(pa.int64()),
            "failed": pa.repeat(int(table == "failed"), rows.num_rows),
            "spent": attempts if is_over else nothing,
            # A message that failed before anybody claimed it had no first claim.
            "unknown": pc.and_(claimed.is_null(), pc.greater(attempts, 0)).cast(pa.int64()),
            "first_claim": _cut(pc.divide(pc.subtract(claimed, published), 1000)),
            "done_ms": _cut(pc.divide(pc.subtract(ended, published), 1000)),
        }
    )
    made: _Parts = [("queue", _summed(messages, ["queue"]))]
    made.append(("group", _summed(messages, ["queue", "group"])))
    for what in TIMES if table == "done" else TIMES[:1]:
        column = "done_ms" if what == "done" else what
        known = messages.filter(messages.column(column).is_valid())
        by_group = _counted(known, ["queue", "group", column])
        by_queue = _grouped(by_group, ["queue", column], [("messages", "sum", "messages")])
        for kind, some in (("group", by_group), ("queue", by_queue)):
            named = some.rename_columns(
                ["at" if name == column else name for name in some.column_names]
            )
            made.append((kind, named.append_column("what", pa.repeat(what, len(named)))))
    if is_over and rows.num_rows:
        by_attempts = _counted(messages, ["queue", "number"])
        state = pa.repeat(table, len(by_attempts))
        made.append(("attempts", by_attempts.append_column("name", state)))
        made.append(("second", _by_second(messages)))
    return made


def _cut(times: pa.ChunkedArray) -> pa.Array:
    """Keep eleven binary digits of each time."""
    values = times.fill_null(0).to_numpy()
    digits = np.frexp(values.astype(np.float64))[1]
    dropped = np.maximum(digits - 11, 0).astype(np.int64)
    return pa.array(values >> dropped << dropped, mask=times.is_null().to_numpy())


def step_of(width: int) -> int:
    """Return the step of a time line that is so many seconds long."""
    return next((each for each in SECONDS if width / each <= SLOTS), SECONDS[-1])


def _by_second(messages: pa.Table) -> pa.Table:
    """Count messages by the time that they ended.

    The step is that of these rows alone: that of all rows is a multiple of it.
    """
    seconds = pc.divide(messages.column("ended_us"), 1_000_000)
    bounds = pc.min_max(seconds).as_py()
    step = step_of(bounds["max"] - bounds["min"])
    slots = pc.multiply(pc.divide(seconds, step), step)
    rows = messages.select(["queue", "done", "failed"]).append_column("number", slots)
    wanted = [("done", "sum", "done"), ("failed", "sum", "failed")]
    return _grouped(rows, ["queue", "number"], wanted)


def _summed(messages: pa.Table, keys: Sequence[str]) -> pa.Table:
    wanted = [(name, "sum", name) for name in ("done", "failed", "spent", "unknown")]
    wanted += [("ended_us", "min", "first_ended_us"), ("ended_us", "max", "last_ended_us")]
    return _grouped(messages, keys, [*wanted, ("number", "max", "attempts_max")])


def _counted(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    return _grouped(rows, keys, [(keys[-1], "count", "messages")])


def _grouped(rows: pa.Table, keys: Sequence[str], wanted: Sequence[tuple[str, ...]]) -> pa.Table:
    """Aggregate rows by keys: of each aggregate the column, the function and its name."""
    pairs: Any = [each[:2] for each in wanted]
    made = rows.group_by(list(keys), use_threads=False).aggregate(pairs)
    made = made.select([*keys, *(f"{name}_{how}" for name, how, _ in wanted)])
    return made.rename_columns([*keys, *(each[2] for each in wanted)])


def _of_attempts(rows: pa.Table) -> _Parts:
    """Count the attempts that did not succeed, of each message for itself."""
    failing = pc.is_in(rows.column("outcome"), pa.array(["released", "expired"]))
    keys = ["queue", "outcome", "reason", "message_id"]
    made = _counted(rows.filter(failing), keys)
    made = made.rename_columns(["queue", "name", "reason", "at", "messages"])
    return [("reason", made.append_column("what", pa.repeat("message", len(made))))]


def _of_groups(rows: pa.Table) -> _Parts:
    since = rows.column("oldest_published_at").cast(pa.int64())
    rows = rows.drop_columns("oldest_published_at").append_column("oldest_us", since)
    oldest = _grouped(rows, ["queue"], [("oldest_us", "min", "oldest_us")])
    return [("group", rows), ("queue", oldest)]


def _of_queues(rows: pa.Table) -> _Parts:
    return [("queue", rows.rename_columns(["queue", *rows.column_names[1:]]))]


_COUNTERS: Final = {"attempts": _of_attempts, "groups": _of_groups, "queues": _of_queues}


# --- in Spark -------------------------------------------------------------------------------------


def merged(counted: DataFrame) -> DataFrame:
    """Bring cells together: a row of figures for each queue, group and so on.

    Messages of one reason are shared out by ``part``: there may be many.
    """
    share = F.when(F.col("what") == "message", F.pmod("at", F.lit(_SHARES_OF_REASON)))
    keys = [*_KEYS, "part"]
    # All that follows is within the rows that this brings together.
    spread = counted.withColumn("part", F.coalesce(share, F.lit(0)))
    spread = spread.repartition("queue", "kind", "name", "part")
    sums = [F.sum(name).alias(name) for name in _ADDED]
    sums += [F.min(name).alias(name) for name in _LOWEST]
    sums += [F.max(name).alias(name) for name in _HIGHEST]
    once = spread.groupBy(*keys, "what", "at").agg(*sums)
    own = Window.partitionBy(*keys, "what")
    upto = own.orderBy("at").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    ranked = once.withColumn("upto", F.sum("messages").over(upto))
    ranked = ranked.withColumn("all", F.sum("messages").over(own))

    def time(what: str, share: float) -> Column:
        """Return the lowest time that a share of the messages did not exceed."""
        enough = F.col("upto") >= F.ceil(F.col("all") * share)
        return F.min(F.when((F.col("what") == what) & enough, F.col("at")))

    shares = [
        time(what, share).alias(f"{what}_{name}_ms")
        for what in TIMES
        for name, share in SHARES.items()
    ]
    different = F.count(F.when(F.col("what") == "message", 1)).alias("different")
    return ranked.groupBy(*keys).agg(*sums, *shares, different)
