"""The figures of one queue in a report, computed of its history in Arrow: few rows of many."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.flight.tables import make_schema
from penstock.spark.delta import shaped

if TYPE_CHECKING:
    from collections.abc import Sequence

# Columns that came over Flight may lie at any address: Arrow copies those, and does not warn.
os.environ.setdefault("ACERO_ALIGNMENT_HANDLING", "reallocate")

SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_TIMES: Final = ("first_claim", "done")
_PERCENTILES: Final = [f"{what}_{name}_ms" for what in _TIMES for name in SHARES]
FIGURES: Final = make_schema(
    "queue string, kind string, group string?, state string?, reason string?, attempts int?, "
    "second long?, messages long?, done long?, failed long?, "
    "first_ended_us long?, last_ended_us long?, "
    "attempts_mean double?, attempts_max int?, "
    + ", ".join(f"{name} long?" for name in _PERCENTILES)
)
"""The columns of the figures; ``kind`` is ``queue``, ``group``, ``attempts``, ``second`` or
``reason``, of which ``state`` is the outcome of the attempts.
"""


def figures(
    queue: str, *, done: pa.Table, failed: pa.Table, active: pa.Table, attempts: pa.Table
) -> pa.Table:
    """Return the figures of a queue: of all of it, by group, by attempts, and by second.

    ``active`` has the messages that were claimed and go on, ``attempts`` all claims.
    """
    claims = attempts.group_by("message_id").aggregate([("claimed_at", "min")])
    messages = pa.concat_tables(
        [
            _with_state(done, "done", done.column("done_at")),
            _with_state(failed, "failed", failed.column("failed_at")),
            _with_state(active, "active", pa.nulls(active.num_rows, pa.int64())),
        ]
    ).join(claims, "message_id")
    state, ended = messages.column("state"), messages.column("ended_us")
    published = messages.column("published_us")
    is_done = pc.equal(state, "done")
    messages = pa.table(
        {
            "group": messages.column("group"),
            "state": state,
            "attempts": messages.column("attempts"),
            "second": pc.divide(ended, 1_000_000),
            "ended_us": ended,
            "done": is_done.cast(pa.int64()),
            "failed": pc.equal(state, "failed").cast(pa.int64()),
            "spent": pc.if_else(ended.is_valid(), messages.column("attempts"), None),
            "first_claim_ms": _ms(messages.column("claimed_at_min").cast(pa.int64()), published),
            "done_ms": pc.if_else(is_done, _ms(ended, published), None),
        }
    )
    over = messages.filter(messages.column("ended_us").is_valid())
    parts = {
        "queue": _summed(messages, []),
        "group": _summed(messages, ["group"]),
        "attempts": _counted(over, ["state", "attempts"]),
        "second": _counted(over, ["second"]),
        "reason": _reasons(attempts),
    }
    return pa.concat_tables(
        shaped(part, FIGURES, queue=queue, kind=kind) for kind, part in parts.items()
    )


def figures_of_rows(rows: pa.Table) -> pa.Table:
    """Return the figures of a queue, all rows of which are here; column ``table`` says whose."""
    kinds = rows.column("table")
    names = ("done", "failed", "active", "attempts")
    tables = {name: rows.filter(pc.equal(kinds, name)) for name in names}
    return figures(rows.column("queue")[0].as_py(), **tables)


def _with_state(messages: pa.Table, state: str, ended_at: pa.ChunkedArray) -> pa.Table:
    return pa.table(
        {
            "message_id": messages.column("message_id"),
            "group": messages.column("group"),
            "attempts": messages.column("attempts"),
            "published_us": messages.column("published_at").cast(pa.int64()),
            "state": pa.repeat(state, messages.num_rows),
            "ended_us": ended_at.cast(pa.int64()),
        }
    )


def _ms(later: pa.ChunkedArray, earlier: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.divide(pc.subtract(later, earlier), 1000)


def _summed(messages: pa.Table, keys: list[str]) -> pa.Table:
    """Return sums, bounds and percentiles of each group, or of all messages."""
    wanted: list[Any] = [
        ("done", "sum", "done"),
        ("failed", "sum", "failed"),
        ("ended_us", "min", "first_ended_us"),
        ("ended_us", "max", "last_ended_us"),
        ("spent", "mean", "attempts_mean"),
        ("attempts", "max", "attempts_max"),
    ]
    made = messages.group_by(keys, use_threads=False).aggregate([each[:2] for each in wanted])
    made = made.select([*keys, *(f"{name}_{how}" for name, how, _ in wanted)])
    made = made.rename_columns([*keys, *(name for *_, name in wanted)])
    groups = made.column("group") if keys else pa.chunked_array([pa.array([""])])
    own = messages.column("group") if keys else pa.repeat("", messages.num_rows)
    places = pc.index_in(own, groups.combine_chunks()).to_numpy(zero_copy_only=False)
    for what in _TIMES:
        found = _percentiles(places, messages.column(f"{what}_ms"), len(groups))
        for name, values in zip(SHARES, found, strict=True):
            made = made.append_column(f"{what}_{name}_ms", values)
    return made


def _percentiles(places: Any, times: pa.ChunkedArray, count: int) -> list[pa.Array]:
    """Return for each share, of each group, the lowest time that it did not exceed."""
    there = times.is_valid().to_numpy()
    places, values = places[there], times.drop_null().to_numpy()
    values = values[np.lexsort((values, places))]
    sizes = np.bincount(places, minlength=count)
    ends = np.cumsum(sizes)
    found = []
    for share in SHARES.values():
        at = ends - sizes + np.maximum(np.ceil(sizes * share).astype(np.int64) - 1, 0)
        chosen = values[np.minimum(at, max(len(values) - 1, 0))] if len(values) else ends * 0
        found.append(pa.array(chosen, pa.int64(), mask=sizes == 0))
    return found


def _counted(over: pa.Table, keys: Sequence[str]) -> pa.Table:
    wanted: list[Any] = [("done", "sum"), ("failed", "sum"), ("done", "count")]
    made = over.group_by(list(keys), use_threads=False).aggregate(wanted)
    return made.rename_columns([*keys, "done", "failed", "messages"])


def _reasons(attempts: pa.Table) -> pa.Table:
    """Count the attempts that did not succeed by their reason, and the messages that had them."""
    failing = pc.is_in(attempts.column("outcome"), pa.array(["released", "expired"]))
    keys = ["outcome", "reason"]
    wanted: list[Any] = [("message_id", "count"), ("message_id", "count_distinct")]
    made = attempts.filter(failing).group_by(keys, use_threads=False).aggregate(wanted)
    return made.rename_columns(["state", "reason", "attempts", "messages"])
