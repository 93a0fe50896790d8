"""The report as one HTML page, with plots as inline SVG: nothing is loaded from anywhere."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["page"]

_WIDTH: Final = 760
_LABEL: Final = 170
_BAR: Final = 16
_HEIGHT: Final = 180
_ROWS: Final = 50
_COLOURS: Final = ("#2f6f9f", "#d08a2e", "#a23b3b", "#4f8a4f", "#7a5c99", "#5f6b73")
_TITLES: Final = {
    "queues": "Queues",
    "slowest": "Slowest groups (time to done)",
    "starving": "Groups that have waited longest",
    "reasons": "Why attempts did not succeed",
    "attempts": "Attempts by message",
    "routing": "Routing",
    "groups": "Groups",
}
_STYLE: Final = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; color: #222; }
h2 { margin-top: 2em; font-size: 17px; } table { border-collapse: collapse; font-size: 13px; }
th, td { border-bottom: 1px solid #ddd; padding: 3px 9px; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } svg text { font-size: 11px; }
div.wide { overflow-x: auto; } p.none { color: #777; }
"""


def page(frames: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the whole page, from the rows of each DataFrame of a report."""
    queues = frames.get("queues", [])
    plots = [
        ("Messages by queue", _bars(queues, "queue", ("done", "failed", "available"))),
        (
            "Time from publish to first claim, ms",
            _bars(queues, "queue", tuple(f"first_claim_{p}_ms" for p in ("p50", "p90", "p99"))),
        ),
        (
            "Time from publish to done, ms",
            _bars(queues, "queue", tuple(f"done_{p}_ms" for p in ("p50", "p90", "p99"))),
        ),
        ("Done by time", _lines(frames.get("timeline", []))),
    ]
    body = [f"<h2>{escape(title)}</h2>{plot}" for title, plot in plots]
    for name, title in _TITLES.items():
        if name in frames:
            body.append(f"<h2>{escape(title)}</h2>{_table(frames[name])}")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Penstock report'
        f"</title><style>{_STYLE}</style></head><body><h1>Penstock report</h1>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _none() -> str:
    return '<p class="none">nothing to show</p>'


def _svg(height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg>'
    )


def _legend(names: Sequence[str], y: int) -> str:
    return "".join(
        f'<rect x="{_LABEL + 150 * at}" y="{y - 9}" width="10" height="10" '
        f'fill="{_COLOURS[at % len(_COLOURS)]}"/>'
        f'<text x="{_LABEL + 150 * at + 14}" y="{y}">{escape(name[:22])}</text>'
        for at, name in enumerate(names[:4])
    )


def _bars(rows: Sequence[Mapping[str, Any]], label: str, names: Sequence[str]) -> str:
    """Draw a group of bars for each row, with the value written behind each."""
    rows = rows[:_ROWS]
    most = max((row[name] or 0 for row in rows for name in names), default=0)
    if not most:
        return _none()
    room = _WIDTH - _LABEL - 90
    parts, y = [_legend(names, 14)], 26
    for row in rows:
        middle = y + _BAR * len(names) // 2 + 4
        text = escape(str(row[label])[:26])
        parts.append(f'<text x="{_LABEL - 8}" y="{middle}" text-anchor="end">{text}</text>')
        for at, name in enumerate(names):
            value = row[name]
            wide = max(1, round((value or 0) / most * room))
            parts.append(
                f'<rect x="{_LABEL}" y="{y + 2}" width="{wide}" height="{_BAR - 4}" '
                f'fill="{_COLOURS[at]}"/><text x="{_LABEL + wide + 5}" y="{y + _BAR - 4}">'
                f"{'–' if value is None else f'{value:,}'}</text>"
            )
            y += _BAR
        y += 8
    return _svg(y, parts)


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw done messages by time, a line for each of the busiest queues."""
    by_queue: dict[str, dict[datetime, int]] = defaultdict(dict)
    for row in rows:
        by_queue[row["queue"]][row["at"]] = row["done"]
    if not by_queue:
        return _none()
    times = [row["at"] for row in rows]
    low, step = min(times), rows[0]["seconds"]
    slots = int((max(times) - low).total_seconds() // step) + 1
    most = max((count for counts in by_queue.values() for count in counts.values()), default=0) or 1
    busiest = sorted(by_queue, key=lambda queue: -sum(by_queue[queue].values()))[:4]
    room, base = _WIDTH - _LABEL - 90, _HEIGHT + 26
    parts = [_legend(busiest, 14)]
    for at, queue in enumerate(busiest):
        counts = [0] * slots
        for moment, count in by_queue[queue].items():
            counts[int((moment - low).total_seconds() // step)] = count
        points = " ".join(
            f"{_LABEL + room * slot / max(1, slots - 1):.1f},{base - _HEIGHT * count / most:.1f}"
            for slot, count in enumerate(counts)
        )
        parts.append(
            f'<polyline fill="none" stroke="{_COLOURS[at]}" stroke-width="2" points="{points}"/>'
        )
    parts += [
        f'<line x1="{_LABEL}" y1="{base}" x2="{_LABEL + room}" y2="{base}" stroke="#999"/>',
        f'<text x="{_LABEL - 8}" y="36" text-anchor="end">{most:,} per {step} s</text>',
        f'<text x="{_LABEL}" y="{base + 16}">{_shown(low)}</text>',
        f'<text x="{_LABEL + room}" y="{base + 16}" text-anchor="end">{_shown(max(times))}</text>',
    ]
    return _svg(base + 24, parts)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return _none()
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(_cell(value) for value in row.values()) + "</tr>" for row in rows[:_ROWS]
    )
    more = f"<p>and {len(rows) - _ROWS:,} more, in the Parquet file</p>" * (len(rows) > _ROWS)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>{more}'


def _cell(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="n">{value:,}</td>'
    return f"<td>{escape(_shown(value))}</td>"


def _shown(value: object) -> str:
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
    return "" if value is None else str(value)
