"""How the console writes numbers, times and lines: the filters of its templates."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

NOTHING: Final = "–"
SPARK_WIDTH, SPARK_HEIGHT = 120, 28
_STEPS: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))


def number(value: float | None) -> str:
    """Write a count in full, with commas."""
    return NOTHING if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Write a number per second: three digits are enough."""
    if value is None:
        return NOTHING
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.1 else "< 0.1"


def duration(ms: float | None) -> str:
    """Write a time span in its largest unit, and the next one below it."""
    if ms is None:
        return NOTHING
    if ms < 1_000:
        return f"{ms:.0f} ms"
    for index, (unit_ms, name) in enumerate(_STEPS):
        if ms >= unit_ms:
            count, rest = divmod(int(ms), unit_ms)
            below = _STEPS[index + 1 : index + 2]
            small = rest // below[0][0] if below else 0
            return f"{count} {name} {small} {below[0][1]}" if small else f"{count} {name}"
    return NOTHING


def size(count: float | None) -> str:
    """Write a number of bytes."""
    if count is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def moment(time_ms: int | None) -> str:
    """Write a time of the clock, in UTC."""
    if time_ms is None:
        return NOTHING
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def spark(values: Sequence[float]) -> str:
    """Return the points of an area below values, for a spark line; NaN: none is known."""
    known = [(at, value) for at, value in enumerate(values) if not math.isnan(value)]
    if len(known) < 2:
        return ""
    top = max(1.0, *(value for _, value in known))
    step = SPARK_WIDTH / max(1, len(values) - 1)
    pairs = [
        (at * step, SPARK_HEIGHT - 2 - (SPARK_HEIGHT - 4) * value / top) for at, value in known
    ]
    # The area is closed outside of the drawing, where nobody sees its border.
    right, below = SPARK_WIDTH + 2, SPARK_HEIGHT + 2
    pairs = [(pairs[0][0] - 2, below), *pairs, (right, pairs[-1][1]), (right, below)]
    return " ".join(f"{x:.0f},{y:.1f}" for x, y in pairs)


def json(value: object) -> str:
    """Write a value of an attribute as JSON does: a text in quotes, and no value as null."""
    return msgspec.json.encode(value).decode()


def attributes(values: Mapping[str, object]) -> str:
    """Write the first attributes of a message in a line."""
    pairs = [f"{name}={str(value)[:60]}" for name, value in islice(values.items(), 8)]
    return "  ".join(pairs)


FILTERS: Final[dict[str, Callable[..., str]]] = {
    each.__name__: each for each in (number, rate, duration, size, moment, spark, json, attributes)
}
