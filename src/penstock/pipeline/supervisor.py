"""Parts that are kept running: each by its schedule, and again if it fails.

::

    starting ─▶ running ─▶ waiting for its next time ─▶ running …
                   └─ fails ─▶ failed: again after 1 s, 2 s, 4 s … 5 min, the others go on
                   └─ another pipeline has taken over ─▶ the supervisor ends with that

The parts of a lane are run by one thread, one at a time, the one whose time came first. Times of
a schedule are times of the clock, so that a restart changes none; those that pass while a part
runs, or while nothing does, are left out.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock import limits
from penstock.histogram import Histogram
from penstock.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.clock import Clock

log = logging.getLogger("penstock.pipeline")

# Exit codes of a supervisor that ends by itself.
FAILED, TAKEN_OVER = 1, 4
_BOUNDS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0, 3_600.0)


class Superseded(Exception):
    """Another pipeline has taken over: this one must not start again."""


class Ending(NamedTuple):
    """Why a supervisor ends by itself, and the exit code of its process."""

    code: int
    why: str


class PartStatus(msgspec.Struct, kw_only=True):
    """How a part is. Times are milliseconds since the epoch."""

    part: str
    state: str = "starting"
    runs: int = 0
    failures: int = 0
    restarts: int = 0
    rows: int = 0
    last_success_at: int | None = None
    last_error: str = ""
    last_error_at: int | None = None
    next_at: int | None = None


class Schedule(NamedTuple):
    """When a part is run: again at once, some time after its end, or at times of the clock."""

    every_ms: int = 0
    # Milliseconds since midnight; None: counted from the end of the last run.
    at_ms: int | None = None

    def next(self, now_ms: int) -> int:
        """Return when the run is due that follows one that has just ended."""
        if self.at_ms is None:
            return now_ms + self.every_ms
        return now_ms + self.every_ms - (now_ms - self.at_ms) % self.every_ms


_AT_ONCE: Final = Schedule()


class Part:
    """One part: what is run, when, and how it is."""

    def __init__(
        self, name: str, run: Callable[[Part], int], schedule: Schedule = _AT_ONCE
    ) -> None:
        """``run`` returns how many rows it has worked on; one that goes on tells :meth:`worked`."""
        self.run = run
        self.schedule = schedule
        self.status = PartStatus(part=name)
        self.seconds = Histogram.over(_BOUNDS)
        self.stopping = threading.Event()
        # Failures since the last success, and when the last run that succeeded had begun.
        self.tries = 0
        self.began_ms = 0
        self.succeeded_from_ms: int | None = None

    @property
    def name(self) -> str:
        """The name of the part, which is that of its section."""
        return self.status.part

    def worked(self, now_ms: int, *, runs: int = 1, rows: int = 0) -> None:
        """Note that it works: a run that ended, or a micro-batch of one that goes on."""
        if self.tries:
            log.info("%s works again, after %d failures", self.name, self.tries)
        self.tries = 0
        self.status.runs += runs
        self.status.rows += rows
        self.status.last_success_at = now_ms

    @property
    def ready(self) -> bool:
        """Whether it does what it is there for: a part of the clock has only to wait for it."""
        scheduled = self.schedule.at_ms is not None
        return not self.tries and (scheduled or self.status.last_success_at is not None)


def pause_ms(tries: int) -> int:
    """Return how long a part waits that has failed so many times in a row."""
    longest: int = limits.PIPELINE_MAX_PAUSE_MS
    return min(longest, limits.PIPELINE_MIN_PAUSE_MS << min(tries - 1, 20))


class Supervisor:
    """Runs the parts of lanes until it is stopped, or until ``ended`` is called with the reason."""

    def __init__(
        self,
        lanes: Sequence[Sequence[Part]],
        clock: Clock,
        *,
        ended: Callable[[Ending], None],
        lost: Callable[[], str] = lambda: "",
        text_of: Callable[[BaseException], str] = str,
    ) -> None:
        """``lost`` says why no part can go on, if so; ``text_of`` tells an error in one line."""
        self.parts = [part for lane in lanes for part in lane]
        self._clock = clock
        self._ended, self._lost, self._text_of = ended, lost, text_of
        self._stopping = threading.Event()
        self._wakers = [Waiter() for _ in lanes]
        self._threads = [
            threading.Thread(
                target=self._drive, args=(lane, waker), name=f"penstock-{lane[0].name}", daemon=True
            )
            for lane, waker in zip(lanes, self._wakers, strict=True)
        ]

    def start(self) -> None:
        """Begin with every part."""
        now_ms = self._clock.now_ms()
        for part in self.parts:
            part.began_ms = now_ms
            timed = part.schedule.at_ms is not None
            part.status.next_at = part.schedule.next(now_ms) if timed else now_ms
        for thread in self._threads:
            thread.start()

    def hurry(self) -> None:
        """Start parts that have failed at once: what they failed for may be over."""
        for part in self.parts:
            if part.status.state == "failed":
                part.status.next_at = self._clock.now_ms()
        for waker in self._wakers:
            waker.wake()

    def stop(self) -> None:
        """Tell every part to end; those that run see ``stopping``."""
        self._stopping.set()
        for part in self.parts:
            part.stopping.set()
        for waker in self._wakers:
            waker.wake()

    def join(self, seconds: float) -> bool:
        """Wait for the threads; return whether all have ended within the time."""
        until = self._clock.seconds() + seconds
        for thread in self._threads:
            with suppress(RuntimeError):
                thread.join(max(0.0, until - self._clock.seconds()))
        return not any(thread.is_alive() for thread in self._threads)

    # --- a lane --------------------------------------------------------------------------------

    def _drive(self, lane: Sequence[Part], waker: Waiter) -> None:
        while not self._stopping.is_set():
            part = min(lane, key=lambda each: each.status.next_at or 0)
            early_ms = (part.status.next_at or 0) - self._clock.now_ms()
            if early_ms > 0:
                # A clock that is set while this waits is seen within a minute.
                self._clock.wait(waker, min(early_ms, 60_000))
                continue
            self._run(part)
        for part in lane:
            part.status.state, part.status.next_at = "stopped", None

    def _run(self, part: Part) -> None:
        status, clock = part.status, self._clock
        if part.tries:
            status.restarts += 1
        began, part.began_ms = clock.seconds(), clock.now_ms()
        runs = status.runs
        status.state, status.next_at = "running", None
        try:
            rows = part.run(part)
        except Superseded as error:
            status.state = "failed"
            self._note(part, str(error))
            self._end(Ending(TAKEN_OVER, f"{part.name}: {error}"))
        except Exception as error:
            if not self._stopping.is_set():
                self._failed(part, self._text_of(error))
        else:
            if not self._stopping.is_set():
                part.seconds.add(clock.seconds() - began)
                # One that goes on has counted for itself.
                part.worked(clock.now_ms(), runs=int(status.runs == runs), rows=rows)
                part.succeeded_from_ms = part.began_ms
                status.state, status.next_at = "waiting", part.schedule.next(clock.now_ms())

    def _failed(self, part: Part, text: str) -> None:
        part.tries += 1
        part.status.failures += 1
        self._note(part, text)
        part.status.state = "failed"
        why = self._lost()
        if why:
            self._end(Ending(FAILED, f"{why}; {part.name} said: {text}"))
            return
        wait_ms = pause_ms(part.tries)
        part.status.next_at = self._clock.now_ms() + wait_ms
        log.warning("%s failed, it is started again in %g s: %s", part.name, wait_ms / 1000, text)

    def _note(self, part: Part, text: str) -> None:
        part.status.last_error = " ".join(text.split())[: limits.PIPELINE_LINE_CHARS]
        part.status.last_error_at = self._clock.now_ms()

    def _end(self, ending: Ending) -> None:
        """End for good; the first reason counts."""
        if not self._stopping.is_set():
            self.stop()
            self._ended(ending)


def unready(parts: Iterable[Part]) -> list[str]:
    """Say of each part that does not do what it is there for why it does not."""
    return [
        f"{part.name}: {part.status.last_error or 'it has not worked yet'}"
        for part in parts
        if not part.ready
    ]
