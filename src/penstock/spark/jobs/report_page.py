"""The report as one HTML page, with plots as inline SVG: nothing is loaded from anywhere."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from html import escape
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Row = Mapping[str, Any]

__all__ = ["page"]

_WIDTH: Final = 1040
_LABEL: Final = 210
_ROOM: Final = _WIDTH - _LABEL - 90
_BAR: Final = 15
_HEIGHT: Final = 200
_NAME_CHARS: Final = 28
_LEGEND_CHARS: Final = 17
# What a plot shows at the most, what a table shows unfolded, and what it shows at all.
_PLOTTED: Final = 12
_UNFOLDED: Final = 25
_ROWS: Final = 500
_LINES: Final = 5

_BLUE, _AMBER, _RED, _GREEN, _VIOLET = "#2563a8", "#b36b00", "#b3261e", "#2e7d4f", "#6a4c93"
_COLOURS: Final = (_BLUE, _AMBER, _GREEN, _VIOLET, _RED)
_SHARES: Final = (("p50", "median", _BLUE), ("p90", "90 %", _AMBER), ("p99", "99 %", _RED))
_STYLE: Final = """
:root { color-scheme: light; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; padding: 0 1.5em;
  max-width: 1280px; color: #1f2328; background: #fff; }
h1 { margin-bottom: 0; } h2 { margin: 2.2em 0 .4em; font-size: 17px; }
p { margin: .3em 0; } p.note { color: #57606a; max-width: 70em; }
dl { display: flex; flex-wrap: wrap; gap: 12px; margin: 1.4em 0 0; }
dl div { border: 1px solid #d0d7de; border-radius: 6px; padding: 8px 16px; min-width: 110px; }
dt { color: #57606a; font-size: 12px; }
dd { margin: 0; font-size: 21px; font-variant-numeric: tabular-nums; }
div.wide { overflow-x: auto; } svg { max-width: 100%; height: auto; } svg text { font-size: 12px; }
table { border-collapse: collapse; font-size: 13px; }
th, td { border-bottom: 1px solid #d8dee4; padding: 4px 8px; text-align: left;
  white-space: nowrap; }
th { color: #57606a; font-weight: 600; } th.over { text-align: center; }
th.n, td.n { text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { position: sticky; left: 0; background: #fff; }
td.text { white-space: normal; min-width: 22em; overflow-wrap: anywhere; }
td.bad { color: #b3261e; font-weight: 600; }
summary { cursor: pointer; color: #2563a8; padding: 4px 0; }
"""


class _Column(NamedTuple):
    """How a column of a DataFrame is shown; columns with the same ``over`` stand under one head."""

    name: str
    head: str
    show: Callable[[Any], str]
    over: str = ""
    kind: str = "n"


def page(frames: Mapping[str, Sequence[Row]]) -> str:
    """Return the whole page, from the rows of each DataFrame of a report."""
    body = [_summary(frames), *_plots(frames)]
    for name, (title, note, columns) in _TABLES.items():
        if name in frames:
            body.append(_section(title, note, _table(frames[name], columns, f"{name}.parquet")))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Penstock report</title><style>{_STYLE}</style></head><body>"
        "<h1>Penstock report</h1>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _section(title: str, note: str, content: str) -> str:
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<h2>{escape(title)}</h2>{said}{content}"


def _summary(frames: Mapping[str, Sequence[Row]]) -> str:
    queues = frames.get("queues", [])

    def total(*names: str) -> str:
        return f"{sum(row.get(name) or 0 for row in queues for name in names):,}"

    figures = {
        "queues": f"{len(queues):,}",
        "done": total("done"),
        "failed": total("failed"),
        "waiting": total("available", "delayed"),
        "in flight": total("in_flight"),
        "to be routed": f"{max((row['lag'] for row in frames.get('routing', [])), default=0):,}",
    }
    tiles = "".join(
        f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures.items()
    )
    firsts = [row["first_ended_at"] for row in queues if row.get("first_ended_at")]
    lasts = [row["last_ended_at"] for row in queues if row.get("last_ended_at")]
    span = "no message has ended yet"
    if firsts:
        span = f"messages that ended from {_moment(min(firsts))} to {_moment(max(lasts))} UTC"
    return f'<p class="note">{span}</p><dl>{tiles}</dl>'


# --- plots ----------------------------------------------------------------------------------------


def _plots(frames: Mapping[str, Sequence[Row]]) -> list[str]:
    queues = frames.get("queues", [])
    depths = [
        {**row, "waiting": (row.get("available") or 0) + (row.get("delayed") or 0)}
        for row in queues
    ]
    counts = (("done", "done", _GREEN), ("failed", "failed", _RED), ("waiting", "waiting", _AMBER))
    plots = [_section("Messages by queue", "", _bars(depths, counts, _number))]
    for what, title in (
        ("first_claim", "Time from publish to first claim"),
        ("done", "Time from publish to done"),
    ):
        bars = [(f"{what}_{share}_ms", head, colour) for share, head, colour in _SHARES]
        plots.append(_section(title, "", _bars(queues, bars, _duration)))
    plots.append(_section("Done by time", "", _lines(frames.get("timeline", []))))
    return plots


def _none(what: str = "nothing to show") -> str:
    return f'<p class="note">{what}</p>'


def _svg(height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'fill="#1f2328">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(names: Sequence[tuple[str, str]]) -> str:
    parts, x = [], _LABEL
    for name, colour in names:
        shown = _cut(name, _LEGEND_CHARS)
        parts.append(f'<rect x="{x}" y="4" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(x + 16, 14, shown))
        x += 40 + 7 * len(shown)
    return "".join(parts)


def _bars(
    rows: Sequence[Row], bars: Sequence[tuple[str, str, str]], show: Callable[[Any], str]
) -> str:
    """Draw a few bars for each queue, the longest first, with the value behind each."""
    names = [name for name, _, _ in bars]

    def longest(row: Row) -> float:
        return max(float(row[name] or 0) for name in names)

    drawn = [row for row in rows if longest(row)]
    if not drawn:
        return _none("nothing to show yet: no queue has such messages")
    more = _none(f"the {_PLOTTED} highest of {len(rows):,} queues") * (len(drawn) > _PLOTTED)
    drawn = sorted(drawn, key=longest, reverse=True)[:_PLOTTED]
    most = longest(drawn[0])
    parts, y = [_legend([(head, colour) for _, head, colour in bars])], 26
    for row in drawn:
        middle = y + _BAR * len(bars) // 2 + 4
        label = str(row["queue"])
        parts.append(
            f"<g><title>{escape(label)}</title>{_text(_LABEL - 10, middle, _cut(label), 'end')}</g>"
        )
        for name, _, colour in bars:
            value = row[name]
            wide = round((value or 0) / most * _ROOM, 1)
            parts.append(
                f'<rect x="{_LABEL}" y="{y + 2}" width="{max(wide, 1)}" height="{_BAR - 3}" '
                f'fill="{colour}"/>{_text(_LABEL + wide + 7, y + _BAR - 2, show(value))}'
            )
            y += _BAR
        y += 9
    return _svg(y, parts) + more


def _lines(rows: Sequence[Row]) -> str:
    """Draw done messages by time, a line for each of the busiest queues."""
    by_queue: dict[str, dict[datetime, int]] = defaultdict(dict)
    for row in rows:
        by_queue[row["queue"]][row["at"]] = row["done"]
    if not by_queue:
        return _none("nothing to show yet: no message has ended")
    times = [row["at"] for row in rows]
    low, step = min(times), rows[0]["seconds"]
    slots = int((max(times) - low).total_seconds() // step) + 1
    most = _round_up(max(count for counts in by_queue.values() for count in counts.values()))
    busiest = sorted(by_queue, key=lambda queue: -sum(by_queue[queue].values()))[:_LINES]
    base = _HEIGHT + 34
    parts = [_legend(list(zip(busiest, _COLOURS, strict=False)))]
    for quarter in range(5):
        y = base - _HEIGHT * quarter / 4
        parts.append(
            f'<line x1="{_LABEL}" y1="{y}" x2="{_LABEL + _ROOM}" y2="{y}" stroke="#d8dee4"/>'
            + _text(_LABEL - 10, y + 4, f"{most * quarter / 4:,.10g}", "end")
        )
    ticks = max(1, min(4, slots - 1))
    for part in range(ticks + 1):
        x = _LABEL + _ROOM * part / ticks
        at = low + timedelta(seconds=step * (slots - 1) * part / ticks)
        parts.append(_text(x, base + 18, _moment(at)[5:], "middle"))
    for queue, colour in zip(busiest, _COLOURS, strict=False):
        counts = [0] * slots
        for moment, count in by_queue[queue].items():
            counts[int((moment - low).total_seconds() // step)] = count
        # A single interval would be a line without length.
        spots = [(slot, count) for slot, count in enumerate(counts)] * (2 if slots == 1 else 1)
        points = " ".join(
            f"{_LABEL + _ROOM * (at if slots == 1 else slot / (slots - 1)):.1f},"
            f"{base - _HEIGHT * count / most:.1f}"
            for at, (slot, count) in enumerate(spots)
        )
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>'
        )
    shown = "" if len(by_queue) <= _LINES else f"; the {_LINES} busiest of {len(by_queue):,} queues"
    return _svg(base + 26, parts) + _none(f"messages for every {_seconds(step)}, UTC{shown}")


def _round_up(value: int) -> int:
    """Return the next figure that an axis of four parts is well labelled with."""
    scale = 4
    while True:
        for tenths in (10, 15, 20, 25, 30, 40, 50, 60, 80):
            if value <= scale * tenths // 10:
                return scale * tenths // 10
        scale *= 10


# --- tables ---------------------------------------------------------------------------------------


def _table(rows: Sequence[Row], columns: Sequence[_Column], file: str) -> str:
    if not rows:
        return _none()
    known = [column for column in columns if column.name in rows[0]]
    body = "".join(
        "<tr>" + "".join(_cell(column, row[column.name]) for column in known) + "</tr>"
        for row in rows[:_ROWS]
    )
    made = f'<div class="wide"><table>{_heads(known)}{body}</table></div>'
    if len(rows) > _ROWS:
        made += _none(f"and {len(rows) - _ROWS:,} more, in {file}")
    if len(rows) > _UNFOLDED:
        made = f"<details><summary>show {len(rows):,} rows</summary>{made}</details>"
    return made


def _heads(columns: Sequence[_Column]) -> str:
    over, at = "", 0
    while at < len(columns):
        same = at + 1
        while columns[at].over and same < len(columns) and columns[same].over == columns[at].over:
            same += 1
        over += f'<th class="over" colspan="{same - at}">{escape(columns[at].over)}</th>'
        at = same
    heads = "".join(f'<th class="{each.kind}">{escape(each.head)}</th>' for each in columns)
    first = f"<tr>{over}</tr>" if any(column.over for column in columns) else ""
    return f"<thead>{first}<tr>{heads}</tr></thead>"


def _cell(column: _Column, value: object) -> str:
    marked = " bad" if column.name in {"failed", "lag"} and value else ""
    return f'<td class="{column.kind}{marked}">{escape(column.show(value))}</td>'


def _word(value: object) -> str:
    return "–" if value is None else str(value)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,}"


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


def _seconds(step: int) -> str:
    return "second" if step == 1 else _duration(step * 1_000)


def _moment(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def _cut(text: str, most: int = _NAME_CHARS) -> str:
    """Shorten a name in its middle: what tells names apart is mostly at their ends."""
    half = most // 2
    return text if len(text) <= most else f"{text[: most - half - 1]}…{text[-half:]}"


_QUEUE: Final = _Column("queue", "queue", _word, kind="t")
_GROUP: Final = _Column("group", "group", lambda value: value or "(none)", kind="t")
_DEPTHS: Final = tuple(
    _Column(name, name.replace("_", " "), _number, "now")
    for name in ("available", "delayed", "in_flight")
)
_OLDEST: Final = _Column("oldest_wait_ms", "oldest waits", _duration, "now")
_FIGURES: Final = (
    _Column("done", "done", _number, "messages"),
    _Column("failed", "failed", _number, "messages"),
    _Column("done_per_second", "done per s", _number, "messages"),
    *_DEPTHS,
    _OLDEST,
    *(
        _Column(f"{what}_{share}_ms", head, _duration, over)
        for what, over in (("first_claim", "publish to first claim"), ("done", "publish to done"))
        for share, head, _ in _SHARES
    ),
    _Column("attempts_mean", "mean", _number, "attempts"),
    _Column("attempts_max", "most", _number, "attempts"),
)
_COUNTS: Final = (
    _Column("attempts", "attempts", _number),
    _Column("messages", "messages", _number),
)
_TABLES: Final[Mapping[str, tuple[str, str, Sequence[_Column]]]] = {
    "queues": ("Queues", "", (_QUEUE, *_FIGURES)),
    "slowest": (
        "Slowest groups",
        "By the time from publish to done that 99 % of a group's messages kept within.",
        (_QUEUE, _GROUP, *_FIGURES),
    ),
    "starving": (
        "Groups that have waited longest",
        "By the age of the oldest message that waits.",
        (_QUEUE, _GROUP, _OLDEST, *_DEPTHS, _Column("done", "done", _number)),
    ),
    "reasons": (
        "Why attempts did not succeed",
        "",
        (_QUEUE, _Column("outcome", "outcome", _word, kind="t"), *_COUNTS,
         _Column("reason", "reason", _word, kind="text")),
    ),
    "attempts": (
        "Attempts that messages took",
        "",
        (_QUEUE, _Column("state", "state", _word, kind="t"), *_COUNTS),
    ),
    "routing": (
        "Routing",
        "",
        (_Column("log", "log", _word), _Column("cursor", "routed up to offset", _number),
         _Column("end", "log ends at", _number), _Column("lag", "to be routed", _number)),
    ),
    "groups": ("Groups", "", (_QUEUE, _GROUP, *_FIGURES)),
}  # fmt: skip
