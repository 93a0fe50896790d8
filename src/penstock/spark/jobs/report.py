"""Report: throughput, waiting, attempts, failures and lag, per queue and per group.

The report is DataFrames, and can be saved as one HTML page with plots as inline SVG; the page loads
nothing from anywhere.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import reduce
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.flight.client import FlightStore
from penstock.flight.protocol import ReadCommand, SnapshotTicket
from penstock.flight.tables import TIME, make_schema, schema_of
from penstock.spark.jobs.figures import FIGURES, SHARES, figures, figures_of_rows
from penstock.spark.sessions import snapshot, translated
from penstock.spark.source import FEEDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    Row = Mapping[str, Any]

SLOWEST: Final = 20
_WAITING: Final = ("available", "delayed", "in_flight")
_SECONDS: Final = (1, 5, 15, 60, 300, 900, 3_600, 21_600, 86_400)
_SLOTS: Final = 120


def report(
    spark: SparkSession,
    location: str,
    *,
    queues: Sequence[str] | None = None,
    archive: str | Path | None = None,
    token: str | None = None,
    ca: str | Path | None = None,
) -> dict[str, DataFrame]:
    """Return statistics of the store's history, as DataFrames by name.

    ``queues``: a row for each queue. ``groups``: for each group of a queue. ``reasons``: why
    attempts did not succeed. ``attempts``: how many messages took how many. ``slowest``: groups
    by the time to done. ``starving``: groups whose oldest message has waited longest. ``timeline``:
    done and failed by time. ``routing``: how far the logs are routed. Times are in milliseconds,
    of messages whose history is kept; ``archive``, the place of an archive, adds what that has.
    All tables are read from one snapshot.

    >>> report(spark, "grpc://127.0.0.1:8815")["slowest"].show()          # doctest: +SKIP
    """
    client = FlightStore(location, token=token, ca=ca)
    known = client.queues(queues)
    with snapshot(client.location, spark=spark) as then:
        read = _Reader(client, then.options["snapshot"], queues)
        if archive is None:
            found = _figures(read, sorted(known))
        else:

            def table(name: str, **options: Any) -> DataFrame:
                if name in FEEDS:
                    options["includeArchive"] = str(archive)
                return then.table(name, queues=queues, **options)

            with translated():
                found = _shuffled(table).toArrow()
        waiting, depths = read("groups"), read("queues", ("name", *_WAITING, "draining"))
    frames = _frames(found, waiting, depths, int(then.at.timestamp() * 1000))
    frames["routing"] = _routing(client)
    # With a schema: Spark Connect guesses none of a table without rows.
    return {
        name: spark.createDataFrame(frame, from_arrow_schema(frame.schema))
        for name, frame in frames.items()
    }


def save_report(frames: Mapping[str, DataFrame], directory: str | Path) -> Path:
    """Write each DataFrame as Parquet, and one HTML page with plots; return the page's path.

    Files of an earlier report are replaced.
    """
    place = Path(directory).absolute()
    place.mkdir(parents=True, exist_ok=True)
    rows = {}
    for name, frame in frames.items():
        table = frame.toArrow()
        pq.write_table(table, place / f"{name}.parquet")
        rows[name] = table.to_pylist()
    written = place / "report.html"
    written.write_text(page(rows), encoding="utf-8")
    return written


# --- messages -------------------------------------------------------------------------------------


# Of each table that figures are made of: the columns that are read of it.
_MESSAGE: Final = ("message_id", "group", "attempts", "published_at")
_READS: Final = {
    "attempts": ("message_id", "claimed_at", "outcome", "reason"),
    "active": _MESSAGE,
    "done": (*_MESSAGE, "done_at"),
    "failed": (*_MESSAGE, "failed_at"),
}


class _Reader(NamedTuple):
    """Reads tables of a snapshot through Flight."""

    client: FlightStore
    snapshot: str
    # A key that may not read all queues names those that it wants.
    queues: Sequence[str] | None

    def __call__(
        self, table: str, columns: Sequence[str] | None = None, queue: str | None = None
    ) -> pa.Table:
        """Read the chosen columns of a table, of one queue or of all."""
        # Messages that wait, and were never claimed, have no figures.
        where = "attempts > 0" if table == "active" else None
        command = ReadCommand(table, queue=self.queues, columns=columns, where=where)
        ticket = SnapshotTicket(self.snapshot, 0, command, None if queue is None else [queue])
        return pa.Table.from_batches(self.client.read(ticket), schema_of(table, columns=columns))


def _figures(read: _Reader, queues: Sequence[str]) -> pa.Table:
    """Read the history of each queue from a snapshot, and return the figures of all of them.

    Spark would read as many rows, and shuffle them twice. Two queues are in memory at a time.
    """

    def of_queue(queue: str) -> pa.Table:
        return figures(queue, **{name: read(name, of, queue) for name, of in _READS.items()})

    with ThreadPoolExecutor(2) as threads:
        return pa.concat_tables([FIGURES.empty_table(), *threads.map(of_queue, queues)])


def _shuffled(table: Callable[..., DataFrame]) -> DataFrame:
    """Return the same figures of tables with an archive: Spark brings the rows of a queue together.

    Those of one queue are in memory of one executor.
    """
    parts = [
        table(name, columns=("queue", *columns)).withColumn("table", F.lit(name))
        for name, columns in _READS.items()
    ]
    rows = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), parts)
    rows = rows.where("`table` <> 'active' OR attempts > 0")
    return rows.groupBy("queue").applyInArrow(figures_of_rows, from_arrow_schema(FIGURES))


# --- tables of the report -------------------------------------------------------------------------


def _frames(
    found: pa.Table, waiting: pa.Table, depths: pa.Table, at_ms: int
) -> dict[str, pa.Table]:
    """Make the tables of a report, of figures, of groups that wait, and of queues' depths."""
    since = pc.divide(waiting.column("oldest_published_at").cast(pa.int64()), 1000)
    wait = pc.max_element_wise(pc.subtract(at_ms, since), 0, skip_nulls=False)
    waiting = waiting.drop_columns("oldest_published_at").append_column("oldest_wait_ms", wait)
    oldest = waiting.group_by("queue").aggregate([("oldest_wait_ms", "max")])
    oldest = oldest.rename_columns({"oldest_wait_ms_max": "oldest_wait_ms"})
    queues = _of(found, "queue").join(
        depths.rename_columns({"name": "queue"}), "queue", join_type="full outer"
    )
    queues = _with_zeros(queues.join(oldest, "queue"))
    groups = _of(found, "queue", "group").join(waiting, ["queue", "group"], join_type="full outer")
    groups = _with_zeros(groups)
    failing = _of_kind(found, "reason")
    reasons = pa.table(
        {
            "queue": failing.column("queue"),
            "outcome": failing.column("state"),
            "reason": failing.column("reason"),
            "attempts": failing.column("attempts").cast(pa.int64()),
            "messages": failing.column("messages"),
        }
    )
    attempts = _of_kind(found, "attempts").select(["queue", "state", "attempts", "messages"])
    starving = ["queue", "group", *_WAITING, "done", "oldest_wait_ms"]
    return {
        "queues": _sorted(queues, "queue"),
        "groups": _sorted(groups, "queue", "group"),
        "reasons": _sorted(reasons, "-attempts", "queue", "reason"),
        "attempts": _sorted(attempts, "queue", "state", "attempts"),
        "slowest": _highest(groups, "done_p99_ms"),
        "starving": _highest(groups, "oldest_wait_ms").select(starving),
        "timeline": _timeline(_of_kind(found, "second")),
    }


def _of_kind(found: pa.Table, kind: str) -> pa.Table:
    return found.filter(pc.equal(found.column("kind"), kind))


def _of(found: pa.Table, *keys: str) -> pa.Table:
    """Return the figures of queues, or of groups."""
    own = _of_kind(found, keys[-1])
    columns = {name: own.column(name) for name in (*keys, "done", "failed")}
    for name in ("first_ended", "last_ended"):
        columns[f"{name}_at"] = own.column(f"{name}_us").cast(TIME)
    columns["attempts_mean"] = _rounded(own.column("attempts_mean"), 3)
    columns["attempts_max"] = own.column("attempts_max")
    for name in (f"{what}_{share}_ms" for what in ("first_claim", "done") for share in SHARES):
        columns[name] = own.column(name)
    took = pc.subtract(own.column("last_ended_us"), own.column("first_ended_us"))
    seconds = pc.max_element_wise(pc.divide(took.cast(pa.float64()), 1e6), 1.0)
    columns["done_per_second"] = _rounded(pc.divide(own.column("done"), seconds), 2)
    return pa.table(columns)


def _rounded(values: pa.ChunkedArray, digits: int) -> pa.ChunkedArray:
    return pc.round(values, digits, round_mode="half_towards_infinity")


def _with_zeros(rows: pa.Table) -> pa.Table:
    """Say 0 for groups and queues in which nothing has been claimed yet."""
    for name in ("done", "failed", "attempts_max", "done_per_second"):
        filled = pc.fill_null(rows.column(name), 0)
        rows = rows.set_column(rows.column_names.index(name), name, filled)
    return rows


def _sorted(rows: pa.Table, *columns: str) -> pa.Table:
    """Sort by columns; by those with a minus the highest first."""
    return rows.sort_by(
        [(name.lstrip("-"), "descending" if name[0] == "-" else "ascending") for name in columns]
    )


def _highest(groups: pa.Table, column: str) -> pa.Table:
    known = groups.filter(groups.column(column).is_valid())
    return _sorted(known, f"-{column}", "queue", "group").slice(0, SLOWEST)


def _timeline(by_second: pa.Table) -> pa.Table:
    bounds = pc.min_max(by_second.column("second")).as_py()
    width = (bounds["max"] or 0) - (bounds["min"] or 0)
    step = next((each for each in _SECONDS if width / each <= _SLOTS), _SECONDS[-1])
    slot = pc.multiply(pc.divide(by_second.column("second"), step), step * 1_000_000)
    rows = by_second.append_column("at", slot.cast(TIME)).group_by(["queue", "at"])
    rows = rows.aggregate([("done", "sum"), ("failed", "sum")])
    rows = rows.rename_columns({"done_sum": "done", "failed_sum": "failed"})
    rows = rows.append_column("seconds", pa.repeat(pa.scalar(step, pa.int32()), len(rows)))
    return _sorted(rows.select(["queue", "at", "done", "failed", "seconds"]), "queue", "at")


def _routing(client: FlightStore) -> pa.Table:
    log = client.log_stats()
    # A store that routes inline has no use for cursors.
    piped = log.routing == "pipeline"
    rows = [
        {"log": number, "cursor": at, "end": log.end, "lag": max(0, log.end - at) if piped else 0}
        for number, at in log.cursors.items()
    ]
    return pa.Table.from_pylist(rows, make_schema("log int, cursor long, end long, lag long"))


# --- the page -------------------------------------------------------------------------------------

_WIDTH, _LABEL, _HEIGHT, _BAR = 1040, 210, 200, 15
_ROOM: Final = _WIDTH - _LABEL - 90
# The most queues of a plot, rows of a table that is not folded, and rows of a table.
_PLOTTED, _UNFOLDED, _ROWS = 12, 25, 500
_COLOURS: Final = ("#2563a8", "#b36b00", "#2e7d4f", "#6a4c93", "#b3261e")
_STYLE: Final = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1280px; }
h2 { margin: 2.2em 0 .4em; font-size: 17px; } p, dt, th { color: #57606a; }
dl { display: flex; flex-wrap: wrap; gap: 12px; } dd { margin: 0; font-size: 21px; }
dl div { border: 1px solid #d0d7de; border-radius: 6px; padding: 8px 16px; min-width: 110px; }
div.wide { overflow-x: auto; } svg text { font-size: 12px; }
table { border-collapse: collapse; font-size: 13px; }
th, td { border-bottom: 1px solid #d8dee4; padding: 4px 8px; text-align: right; }
td.t { text-align: left; overflow-wrap: anywhere; }
"""
_WORDS: Final = {"p50": "median", "p90": "90 %", "p99": "99 %", "lag": "to be routed"}
_BARS: Final = {
    "Messages by queue": {name: name for name in ("done", "failed", "waiting")},
    "Time from publish to first claim": {
        f"first_claim_{share}_ms": _WORDS[share] for share in ("p50", "p90", "p99")
    },
    "Time from publish to done": {
        f"done_{share}_ms": _WORDS[share] for share in ("p50", "p90", "p99")
    },
}
_TABLES: Final = {
    "queues": "Queues",
    "slowest": "Slowest groups, by the 99 % of the time from publish to done",
    "starving": "Groups that have waited longest, by their oldest message",
    "reasons": "Why attempts did not succeed",
    "attempts": "Attempts that messages took",
    "routing": "Routing",
    "groups": "Groups",
}


def page(frames: Mapping[str, Sequence[Row]]) -> str:
    """Return the whole page, from the rows of each DataFrame of a report."""
    queues = [
        {**row, "waiting": (row.get("available") or 0) + (row.get("delayed") or 0)}
        for row in frames.get("queues", ())
    ]
    body = [_summary(queues, frames.get("routing", ()))]
    body += [f"<h2>{title}</h2>{_bars(queues, names)}" for title, names in _BARS.items()]
    body.append(f"<h2>Done by time</h2>{_lines(frames.get('timeline', ()))}")
    for name, title in _TABLES.items():
        if name in frames:
            body.append(f"<h2>{title}</h2>{_table(frames[name], f'{name}.parquet')}")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Penstock report</title><style>{_STYLE}</style></head><body>"
        "<h1>Penstock report</h1>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _note(text: str) -> str:
    return f"<p>{text}</p>"


def _summary(queues: Sequence[Row], routing: Sequence[Row]) -> str:
    figures = {"queues": len(queues)}
    for name in ("done", "failed", "waiting", "in_flight"):
        figures[name.replace("_", " ")] = sum(row.get(name) or 0 for row in queues)
    figures["to be routed"] = max((row["lag"] for row in routing), default=0)
    tiles = "".join(f"<div><dt>{name}</dt><dd>{n:,}</dd></div>" for name, n in figures.items())
    firsts = [row["first_ended_at"] for row in queues if row.get("first_ended_at")]
    lasts = [row["last_ended_at"] for row in queues if row.get("last_ended_at")]
    span = "no message has ended yet"
    if firsts:
        span = f"messages that ended from {_time(min(firsts))} to {_time(max(lasts))} UTC"
    return f"{_note(span)}<dl>{tiles}</dl>"


# --- plots ----------------------------------------------------------------------------------------


def _svg(height: int, legend: Sequence[str], parts: Sequence[str]) -> str:
    keys, x = "", _LABEL
    for name, colour in zip(legend, _COLOURS, strict=False):
        shown = _cut(name, 17)
        keys += f'<rect x="{x}" y="4" width="11" height="11" fill="{colour}"/>'
        keys += _text(x + 16, 14, shown)
        x += 40 + 7 * len(shown)
    size = f'width="{_WIDTH}" height="{height}"'
    return f'<svg {size} role="img" fill="#1f2328">{keys}{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'


def _bars(rows: Sequence[Row], names: Mapping[str, str]) -> str:
    """Draw a bar of each name for each queue, the longest first, with the value behind each."""

    def longest(row: Row) -> float:
        return max(float(row[name] or 0) for name in names)

    drawn = sorted(filter(longest, rows), key=longest, reverse=True)
    if not drawn:
        return _note("nothing to show yet: no queue has such messages")
    more = _note(f"the {_PLOTTED} highest of {len(rows):,} queues") * (len(drawn) > _PLOTTED)
    parts, y = [], 26
    for row in drawn[:_PLOTTED]:
        label = _text(_LABEL - 10, y + _BAR * len(names) // 2 + 4, _cut(row["queue"]), "end")
        parts.append(f"<g><title>{escape(row['queue'])}</title>{label}</g>")
        for name, colour in zip(names, _COLOURS, strict=False):
            wide = round((row[name] or 0) / longest(drawn[0]) * _ROOM, 1)
            parts.append(
                f'<rect x="{_LABEL}" y="{y + 2}" width="{max(wide, 1)}" height="{_BAR - 3}" '
                f'fill="{colour}"/>{_text(_LABEL + wide + 7, y + _BAR - 2, _show(name, row[name]))}'
            )
            y += _BAR
        y += 9
    return _svg(y, list(names.values()), parts) + more


def _lines(rows: Sequence[Row]) -> str:
    """Draw done messages by time, a line for each of the busiest queues."""
    if not rows:
        return _note("nothing to show yet: no message has ended")
    by_queue: dict[str, dict[datetime, int]] = defaultdict(dict)
    for row in rows:
        by_queue[row["queue"]][row["at"]] = row["done"]
    times = [row["at"] for row in rows]
    low, step = min(times), timedelta(seconds=rows[0]["seconds"])
    # At least one step: a single interval would be a line without length.
    steps = max(1, (max(times) - low) // step)
    most = _round_up(max(row["done"] for row in rows))
    busiest = sorted(by_queue, key=lambda queue: -sum(by_queue[queue].values()))[: len(_COLOURS)]
    base = _HEIGHT + 34
    parts = []
    for quarter in range(5):
        x, y = _LABEL + _ROOM * quarter / 4, base - _HEIGHT * quarter / 4
        parts.append(
            f'<line x1="{_LABEL}" y1="{y}" x2="{_LABEL + _ROOM}" y2="{y}" stroke="#d8dee4"/>'
            + _text(_LABEL - 10, y + 4, f"{most * quarter / 4:,.10g}", "end")
            + _text(x, base + 18, _time(low + step * steps * quarter / 4)[5:], "middle")
        )
    for queue, colour in zip(busiest, _COLOURS, strict=False):
        points = " ".join(
            f"{_LABEL + _ROOM * slot / steps:.1f},"
            f"{base - _HEIGHT * by_queue[queue].get(low + step * slot, 0) / most:.1f}"
            for slot in range(steps + 1)
        )
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>'
        )
    more = len(by_queue) > len(busiest)
    shown = f"; the {len(busiest)} busiest of {len(by_queue):,} queues" if more else ""
    note = _note(f"messages for every {_duration(step.total_seconds() * 1_000)}, UTC{shown}")
    return _svg(base + 26, busiest, parts) + note


def _round_up(value: int) -> int:
    """Return the next figure that an axis of four parts is well labelled with."""
    scale = 4
    while True:
        for tenths in (10, 15, 20, 25, 30, 40, 50, 60, 80):
            if value <= scale * tenths // 10:
                return scale * tenths // 10
        scale *= 10


# --- tables ---------------------------------------------------------------------------------------


def _table(rows: Sequence[Row], file: str) -> str:
    if not rows:
        return _note("nothing to show")
    heads = "".join(f"<th>{_head(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(_cell(name, value) for name, value in row.items()) + "</tr>"
        for row in rows[:_ROWS]
    )
    made = f'<div class="wide"><table><tr>{heads}</tr>{body}</table></div>'
    if len(rows) > _ROWS:
        made += _note(f"and {len(rows) - _ROWS:,} more, in {file}")
    if len(rows) > _UNFOLDED:
        made = f"<details><summary>show {len(rows):,} rows</summary>{made}</details>"
    return made


def _head(name: str) -> str:
    words = name.removesuffix("_ms").split("_")
    return " ".join(_WORDS.get(word, word) for word in words)


def _cell(name: str, value: Any) -> str:
    kind = "t" if isinstance(value, str) else "n"
    return f'<td class="{kind}">{escape(_show(name, value))}</td>'


def _show(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, datetime):
        return _time(value)
    if name.endswith("_ms"):
        return _duration(value)
    if isinstance(value, str):
        return value or "(none)"
    return str(value) if isinstance(value, bool) else f"{value:,}"


def _duration(ms: float | None) -> str:
    """Return a time with the unit that suits it."""
    if ms is None:
        return "–"
    if ms < 1_000:
        return f"{ms:,.0f} ms"
    for most, unit, size in ((100, "s", 1_000), (100, "min", 60_000), (48, "h", 3_600_000)):
        if ms < most * size:
            return f"{ms / size:.1f} {unit}"
    return f"{ms / 86_400_000:,.1f} d"


def _time(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def _cut(text: str, most: int = 28) -> str:
    """Shorten a name in its middle: names mostly differ at their ends."""
    half = most // 2
    return text if len(text) <= most else f"{text[: most - half - 1]}…{text[-half:]}"
