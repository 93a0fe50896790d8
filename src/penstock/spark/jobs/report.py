"""Report: throughput, waiting, attempts, failures and lag, per queue and per group.

Executors read one snapshot, in parts by queue and time, count where they read, and keep the merged
figures; the tables of a report are small queries over those. The report can be saved as one HTML
page with plots as inline SVG; the page loads nothing from anywhere.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from penstock import limits
from penstock.flight.client import FlightStore
from penstock.flight.tables import make_schema
from penstock.spark.delta import Archive
from penstock.spark.jobs.figures import CELLS, READS, SHARES, TIMES, WAITING, count, merged, step_of
from penstock.spark.reader import TableReader, spark_schema
from penstock.spark.sessions import located, parallelism, pinned, snapshot, translated
from penstock.spark.source import FEEDS, Options

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.datasource import InputPartition

    Row: TypeAlias = Mapping[str, Any]
    Part: TypeAlias = tuple[str, TableReader, InputPartition]

SLOWEST: Final = 20
# So many rows are sorted by one task, without a shuffle, and the driver reads them at once.
_FEW: Final = 10_000


def report(
    spark: SparkSession,
    location: str,
    *,
    queues: Sequence[str] | None = None,
    archive: str | Path | None = None,
    token: str | None = None,
    ca: str | Path | None = None,
    retry_for: str | None = None,
) -> dict[str, DataFrame]:
    """Return statistics of the store's history, as DataFrames by name.

    ``queues``: a row for each queue. ``groups``: for each group of a queue. ``reasons``: why
    attempts did not succeed. ``attempts``: how many messages took how many. ``slowest``: groups
    by the time to done. ``starving``: groups whose oldest message has waited longest. ``timeline``:
    done and failed by time. ``routing``: how far the logs are routed. Times are in milliseconds,
    of messages whose history is kept; ``archive``, the place of an archive, adds what that has.
    All tables are of one snapshot. Executors keep their rows, in memory or on disk, for as long as
    the DataFrames live. ``retry_for`` is how long to wait for a broker that is away: ``"5m"``.

    >>> report(spark, "grpc://127.0.0.1:8815")["slowest"].show()          # doctest: +SKIP
    """
    client = FlightStore(located(location, token=token, ca=ca, retry_for=retry_for))
    client.queues(queues)
    with snapshot(client.location, spark=spark) as then, translated():
        count = min(max(2, parallelism(spark)), limits.MAX_PARTITIONS)
        tasks = _tasks(client.location, then.options["snapshot"], queues, archive, count)
        numbers = spark.range(0, count, 1, count)
        counted = numbers.mapInArrow(partial(_count, tasks), from_arrow_schema(CELLS))
        found = pinned(merged(counted))
    ends = found.agg(F.count("kind"), F.min("first_ended_us"), F.max("last_ended_us"))
    rows, first_us, last_us = (each or 0 for each in ends.collect()[0])
    step = step_of(last_us // 1_000_000 - first_us // 1_000_000)
    kept = found.coalesce(1) if rows <= _FEW else found
    frames = _frames(kept, int(then.at.timestamp() * 1000), step)
    routing = _routing(client)
    # With a schema: Spark Connect guesses none of a table without rows.
    frames["routing"] = spark.createDataFrame(routing, from_arrow_schema(routing.schema))
    return frames


def save_report(frames: Mapping[str, DataFrame], directory: str | Path) -> Path:
    """Write each DataFrame as Parquet, and one HTML page with plots; return the page's path.

    Files of an earlier report are replaced. Rows come from the executors a piece at a time, and no
    more of them are kept here than the page shows.
    """
    place = Path(directory).absolute()
    place.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[Row]] = {}
    counts: dict[str, int] = {}
    for name, frame in frames.items():
        file = place / f"{name}.parquet"
        table = frame.limit(_FEW + 1).toArrow()
        if len(table) <= _FEW:
            pq.write_table(table, file)
            rows[name], counts[name] = table.to_pylist(), len(table)
            continue
        most = sys.maxsize if name == "queues" else _ROWS  # The plots show the highest of all.
        busiest = [row["queue"] for row in _busiest(rows["queues"])] if name == "timeline" else None
        rows[name], counts[name] = _streamed(frame, file, most, busiest)
    written = place / "report.html"
    written.write_text(page(rows, counts), encoding="utf-8")
    return written


# --- in tasks -------------------------------------------------------------------------------------


def _tasks(
    location: str,
    name: str,
    queues: Sequence[str] | None,
    archive: str | Path | None,
    count: int,
) -> list[list[Part]]:
    """Give each of so many tasks its part of each table of a snapshot, and of an archive."""
    chosen = None if queues is None else tuple(queues)
    place = None if archive is None else Archive.at(archive)
    tasks: list[list[Part]] = [[] for _ in range(count)]
    for table, (columns, where) in READS.items():
        more: dict[str, Any] = {"where": where}
        if place is not None and table in FEEDS:
            more = {"include_archive": place.place, "storage": place.storage}
        options = Options(
            location=location,
            table=table,
            queues=chosen,
            columns=columns,
            partitions=count,
            snapshot=name,
            **more,
        )
        reader = TableReader(options, spark_schema(options))
        for number, part in enumerate(reader.partitions()):
            tasks[number % count].append((table, reader, part))
    return tasks


def _count(
    tasks: Sequence[Sequence[Part]], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for number in (number for batch in batches for number in batch.column(0).to_pylist()):
        for table, reader, part in tasks[number]:
            yield from count(table, reader.read(part))


def _packed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pack each batch into one value, in the format of Arrow's streams."""
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        packed = pa.array([sink.getvalue().to_pybytes()], pa.binary())
        yield pa.record_batch([packed], names=["rows"])


def _streamed(
    frame: DataFrame, file: Path, most: int, queues: Collection[str] | None
) -> tuple[list[Row], int]:
    """Write a DataFrame to a file; return its first rows, or those of queues, and their number."""
    schema = to_arrow_schema(frame.schema, timezone="UTC")
    kept: list[Row] = []
    total = 0
    with pq.ParquetWriter(file, schema) as writer:
        for packed in frame.mapInArrow(_packed, "rows binary").toLocalIterator():
            table = pa.ipc.open_stream(packed[0]).read_all().cast(schema)
            writer.write_table(table)
            total += len(table)
            if queues is None:
                kept += table.slice(0, most - len(kept)).to_pylist()
            else:
                named = pc.is_in(table.column("queue"), pa.array(queues, pa.string()))
                kept += table.filter(named).to_pylist()
    return kept, total


# --- tables of the report -------------------------------------------------------------------------


def _frames(found: DataFrame, at_ms: int, step: int) -> dict[str, DataFrame]:
    """Make the tables of a report of merged figures."""

    def of(kind: str) -> DataFrame:
        return found.where(F.col("kind") == kind)

    def highest(column: str) -> DataFrame:
        known = groups.where(F.col(column).isNotNull())
        return known.orderBy(F.desc(column), "queue", "group").limit(SLOWEST)

    draining = (F.col("draining") > 0).alias("draining")
    queues = of("queue").select("queue", *_sums(), draining, *_last(at_ms))
    groups = of("group").select("queue", F.col("name").alias("group"), *_sums(), *_last(at_ms))
    by_reason = of("reason").groupBy("queue", F.col("name").alias("outcome"), "reason")
    tried, messages = F.sum("messages").alias("attempts"), F.sum("different").alias("messages")
    number = F.col("number").cast("int").alias("attempts")
    attempts = of("attempts").select("queue", F.col("name").alias("state"), number, "messages")
    slot = F.timestamp_seconds(F.col("number") - F.pmod("number", F.lit(step))).alias("at")
    ended = (F.sum(name).alias(name) for name in ("done", "failed"))
    timeline = of("second").groupBy("queue", slot).agg(*ended, F.lit(step).alias("seconds"))
    starving = ("queue", "group", *WAITING, "done", "oldest_wait_ms")
    return {
        "queues": queues.orderBy("queue"),
        "groups": groups.orderBy("queue", "group"),
        "reasons": by_reason.agg(tried, messages).orderBy(F.desc("attempts"), "queue", "reason"),
        "attempts": attempts.orderBy("queue", "state", "attempts"),
        "slowest": highest("done_p99_ms"),
        "starving": highest("oldest_wait_ms").select(*starving),
        "timeline": timeline.orderBy("queue", "at"),
    }


def _sums() -> Iterator[Column]:
    """Give the figures of a queue or of a group."""
    done = F.coalesce("done", F.lit(0))
    yield done.alias("done")
    yield F.coalesce("failed", F.lit(0)).alias("failed")
    for name in ("first_ended", "last_ended"):
        yield F.timestamp_micros(f"{name}_us").alias(f"{name}_at")
    yield F.round(F.try_divide("spent", F.col("done") + F.col("failed")), 3).alias("attempts_mean")
    # Nothing may have been claimed yet.
    yield F.coalesce(F.col("attempts_max").cast("int"), F.lit(0)).alias("attempts_max")
    yield from (F.col(f"{what}_{share}_ms") for what in TIMES for share in SHARES)
    took = (F.col("last_ended_us") - F.col("first_ended_us")) / 1e6
    yield F.round(done / F.greatest(took, F.lit(1.0)), 2).alias("done_per_second")
    yield from map(F.col, WAITING)


def _last(at_ms: int) -> Iterator[Column]:
    """Give the last columns of a queue or of a group: those that are mostly empty."""
    waited = F.lit(at_ms) - F.expr("oldest_us div 1000")
    waited = F.when(F.col("oldest_us").isNotNull(), F.greatest(waited, F.lit(0)))
    yield waited.alias("oldest_wait_ms")
    yield F.coalesce("unknown", F.lit(0)).alias("first_claim_unknown")


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
td.t { text-align: left; overflow-wrap: anywhere; } td.n { white-space: nowrap; }
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


def page(frames: Mapping[str, Sequence[Row]], counts: Mapping[str, int] | None = None) -> str:
    """Return the whole page, from rows of each DataFrame of a report, and how many it has."""
    queues = [
        {**row, "waiting": (row.get("available") or 0) + (row.get("delayed") or 0)}
        for row in frames.get("queues", ())
    ]
    body = [_summary(queues, frames.get("routing", ()))]
    body += [f"<h2>{title}</h2>{_bars(queues, names)}" for title, names in _BARS.items()]
    ended = sum(row.get("first_ended_at") is not None for row in queues)
    body.append(f"<h2>Done by time</h2>{_lines(frames.get('timeline', ()), ended)}")
    for name, title in _TABLES.items():
        if name in frames:
            rows = frames[name]
            shown = _table(rows, (counts or {}).get(name, len(rows)), f"{name}.parquet")
            body.append(f"<h2>{title}</h2>{shown}")
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
    unknown = sum(row.get("first_claim_unknown") or 0 for row in queues)
    told = (
        f"the first claim of {unknown:,} messages is not known: an earlier version of Penstock did"
    )
    told += " not keep it. They are not in the times to the first claim"
    return f"{_note(span)}<dl>{tiles}</dl>{_note(told) * bool(unknown)}"


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


def _busiest(queues: Sequence[Row]) -> list[Row]:
    return sorted(queues, key=lambda row: -row["done"])[: len(_COLOURS)]


def _lines(rows: Sequence[Row], queues: int) -> str:
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
    more = queues > len(busiest)
    shown = f"; the {len(busiest)} busiest of {queues:,} queues" if more else ""
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


def _table(rows: Sequence[Row], count: int, file: str) -> str:
    """Show the first rows of so many, without columns that are empty in all of them."""
    if not rows:
        return _note("nothing to show")
    names = [name for name in rows[0] if any(row[name] is not None for row in rows[:_ROWS])]
    heads = "".join(f"<th>{_head(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(_cell(name, row[name]) for name in names) + "</tr>" for row in rows[:_ROWS]
    )
    made = f'<div class="wide"><table><tr>{heads}</tr>{body}</table></div>'
    if count > _ROWS:
        made += _note(f"and {count - _ROWS:,} more, in {file}")
    if count > _UNFOLDED:
        made = f"<details><summary>show {count:,} rows</summary>{made}</details>"
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
