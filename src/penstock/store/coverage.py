"""Which offsets of the log a queue has been filled from, and by which filter.

A queue takes messages live from the offset of its creation on; a changed filter counts from the
offset of the change on; a backfill adds a stretch of the past. Together these stretches say of
any message whether the queue has had it, so that no backfill brings it in twice: neither from the
log nor, when the log has let go of it, from an archive.

They are kept for as long as the queue is, up to a bound. Beyond it the oldest ones go that the log
needs no longer, and the queue knows what it has had from ``known_from`` on alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.filters import parse
from penstock.limits import MAX_COVERAGE_STRETCHES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.filters import Filter, RowTuple


class Stretch(msgspec.Struct):
    """Offsets [begin, end) (None: to the end of the log and on) and the filter they passed."""

    begin: int
    end: int | None
    filter: str

    def covers(self, offset: int) -> bool:
        """Whether the offset lies in this stretch."""
        return self.begin <= offset and (self.end is None or offset < self.end)


class Coverage(msgspec.Struct):
    """The offsets that a queue was filled from, live and by backfills. ``draining``: not live.

    ``known_from`` is the offset that it is complete from. A record without it was written when
    stretches went with the log: whoever reads one can be sure of what the log keeps, and no more.
    """

    live: list[Stretch]
    backfilled: list[Stretch] = []
    draining: bool = False
    known_from: int | None = None

    def filter_at(self, offset: int) -> str | None:
        """Return the filter that is live at an offset."""
        for stretch in self.live:
            if stretch.covers(offset):
                return stretch.filter
        return None

    def change(self, offset: int, filter_text: str) -> None:
        """Make another filter live from an offset on."""
        self.close(offset)
        self.live.append(Stretch(offset, None, filter_text))

    def close(self, offset: int) -> None:
        """End the live filter at an offset."""
        self.live = [stretch for stretch in self.live if stretch.begin < offset]
        if self.live and (self.live[-1].end is None or self.live[-1].end > offset):
            self.live[-1].end = offset

    def bound(self, earliest: int) -> None:
        """Forget the oldest stretches if there are too many, but none that the log still needs."""
        over = len(self.live) + len(self.backfilled) - MAX_COVERAGE_STRETCHES
        if over <= 0:
            return
        ends = sorted(
            stretch.end
            for stretch in (*self.live, *self.backfilled)
            if stretch.end is not None and stretch.end <= earliest
        )[:over]
        if ends:
            # Those that end below the last one to go would be of no use without it.
            self.known_from = max(self.known_from or 0, ends[-1])
            self.live = [s for s in self.live if s.end is None or s.end > ends[-1]]
            self.backfilled = [s for s in self.backfilled if s.end is None or s.end > ends[-1]]

    def borders(self) -> Iterable[int]:
        """Return the offsets at which the live filter changes."""
        for stretch in self.live:
            yield stretch.begin
            if stretch.end is not None:
                yield stretch.end

    def skip(self, offset: int, filter_text: str) -> int:
        """Return the first offset from here on that no backfill by this filter has done."""
        moved = True
        while moved:
            moved = False
            for stretch in self.backfilled:
                if stretch.filter == filter_text and stretch.covers(offset):
                    assert stretch.end is not None
                    offset, moved = stretch.end, True
        return offset

    def missing(self, begin: int, end: int, filter_text: str) -> list[tuple[int, int]]:
        """Return the stretches of [begin, end) that this filter has not filled the queue from."""
        done = sorted(
            (stretch.begin, end if stretch.end is None else stretch.end)
            for stretch in (*self.live, *self.backfilled)
            if stretch.filter == filter_text
        )
        found = []
        for first, last in done:
            if begin < min(first, end):
                found.append((begin, min(first, end)))
            begin = max(begin, last)
        if begin < end:
            found.append((begin, end))
        return found

    def note(self, begin: int, end: int, filter_text: str) -> None:
        """Note a backfilled stretch, joined to those of the same filter that it meets."""
        rest = []
        for stretch in self.backfilled:
            assert stretch.end is not None
            if stretch.filter == filter_text and stretch.begin <= end and begin <= stretch.end:
                begin, end = min(begin, stretch.begin), max(end, stretch.end)
            else:
                rest.append(stretch)
        self.backfilled = [*rest, Stretch(begin, end, filter_text)]

    def had(self, row: RowTuple, offset: int, compiled: dict[str, Filter]) -> bool:
        """Whether a message has come into the queue before."""
        for stretch in (*self.live, *self.backfilled):
            if stretch.covers(offset):
                known = compiled.get(stretch.filter)
                if known is None:
                    known = compiled[stretch.filter] = parse(stretch.filter)
                if known.matches(row):
                    return True
        return False


class Throughout(dict[str, bool]):
    """Whether a queue wants all of a page that is matched to it, looked up once for each.

    A queue may have been deleted (and made again) since it was matched: it wants nothing that
    came before it.
    """

    def __init__(self, coverage_of: Callable[[str], Coverage | None], begin: int, end: int) -> None:
        super().__init__()
        self._coverage_of, self._begin, self._end = coverage_of, begin, end

    def __missing__(self, name: str) -> bool:
        coverage = self._coverage_of(name)
        self[name] = coverage is not None and any(
            stretch.begin <= self._begin and (stretch.end is None or self._end <= stretch.end)
            for stretch in coverage.live
        )
        return self[name]

    def at(self, name: str, offset: int) -> bool:
        """Whether a queue wants what is matched to it at one offset."""
        if self[name]:
            return True
        coverage = self._coverage_of(name)
        return coverage is not None and coverage.filter_at(offset) is not None
