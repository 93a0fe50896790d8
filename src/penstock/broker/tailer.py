"""Routing of the log without Spark: once, or by a tailer that goes on until it is stopped.

Both need a store whose routing is ``pipeline``, and only the verbs that a client has as well:
``log_stats``, ``read_log``, ``assign`` and ``take_epoch``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

from penstock import limits
from penstock.errors import (
    BrokerClosed,
    InvalidInput,
    PenstockError,
    StorageFailed,
    StoreDamaged,
    StoreFenced,
)
from penstock.filters import Matcher, parse
from penstock.model import AssignStatus
from penstock.store.filling import match_page
from penstock.store.policy import check_pipeline
from penstock.validation import check_count
from penstock.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.model import Assigned, Cursor, LogPage, LogStats

__all__ = ["Tailer", "match_page", "route_once"]

log = logging.getLogger(__name__)

# Pauses while the store does not answer: the first one, and the longest.
_FIRST_PAUSE_MS: Final = 100
_LONGEST_PAUSE_MS: Final = 5_000


class RoutedLog(Protocol):
    """The verbs of a broker or a client that routing needs."""

    def log_stats(self) -> LogStats:
        """Describe the metadata log."""

    def read_log(self, log: int = ..., *, limit: int = ...) -> LogPage:
        """Read a page of a log from its cursor on."""

    def assign(
        self,
        log: int,
        cursor: Cursor,
        assignments: Mapping[int, Sequence[str]],
        *,
        epoch: int | None = ...,
    ) -> Assigned:
        """Put the messages of a page into queues."""

    def take_epoch(self) -> int:
        """Fence every pipeline that took an epoch before."""


def _check_alone(stats: LogStats, epoch: int | None) -> None:
    """Refuse to go on with a log that somebody else routes by now."""
    check_pipeline(stats.routing)
    if epoch not in {None, stats.epoch}:
        raise InvalidInput(
            "another tailer or pipeline has taken over, or the routing was switched meanwhile: the "
            f"epoch is {stats.epoch}, this one has {epoch}. Only the one that was started last "
            "routes; everything that this one had routed stays as it is"
        )


class Tailer:
    """Routes a store until it is stopped, as the only one that does.

    ``broker`` is a broker or a client. A tailer puts messages into their queues page by page, up
    to ``limit`` messages at a time, and looks for new ones every ``poll_ms``. After each look it
    calls ``progress`` with the stats of the log.
    """

    def __init__(
        self,
        broker: RoutedLog,
        *,
        limit: int = 2_000,
        poll_ms: int = 50,
        progress: Callable[[LogStats], None] | None = None,
    ) -> None:
        """Make a tailer; :meth:`run` starts it."""
        self._broker = broker
        self._limit = check_count(limit, "limit", 1, limits.MAX_LOG_LIMIT)
        self._poll_ms = check_count(poll_ms, "poll_ms", 1)
        self._progress = progress
        # The filters of the last page, compiled.
        self._matcher: Matcher[str] = Matcher()
        self._matched_by: Mapping[str, str] = {}
        self._is_stopped = False
        # A handler of signals may put into it at any moment, also in the middle of a wait.
        self._stops = Waiter()

    def run(self) -> int:
        """Route until :meth:`stop`; return how many messages were read.

        It fences every tailer and pipeline that was started before. Raises InvalidInput if a later
        one has fenced this one, or if the store routes inline. While the store or the server does
        not answer, it tries again: no message is routed twice.
        """
        epoch: int | None = None
        read = pause_ms = 0
        while not self._is_stopped:
            try:
                stats = self._broker.log_stats()
                _check_alone(stats, epoch)
                if epoch is None:
                    epoch = self._broker.take_epoch()
                    log.info("routing from offset %d on, as epoch %d", stats.routed_up_to, epoch)
                count = self.route(stats, epoch)
            except PenstockError as error:
                if not self._may_pass(error):
                    raise
                pause_ms = min(_LONGEST_PAUSE_MS, max(_FIRST_PAUSE_MS, 2 * pause_ms))
                log.warning("the store does not answer, trying again: %s", error)
                self._pause(pause_ms)
                continue
            pause_ms = 0
            read += count
            if self._progress is not None:
                self._progress(stats)
            if not count:
                self._pause(self._poll_ms)
        return read

    def route(self, stats: LogStats, epoch: int | None = None) -> int:
        """Route what the logs held when they had these stats; return how many messages were read.

        Messages that came in after ``stats`` are for the next call, or this one might never end.
        """
        left = dict.fromkeys(stats.cursors, self._limit)
        logs = [number for number, cursor in stats.cursors.items() if cursor < stats.end]
        moved = True
        while logs and moved:
            moved, held_up = False, []
            for number in logs:
                while left[number] > 0:
                    page = self._broker.read_log(number, limit=left[number])
                    if page.cursor.begin >= stats.end:
                        break
                    if page.cursor.begin >= page.cursor.end:
                        # The number of logs changes here: the others are to come so far first.
                        held_up.append(number)
                        break
                    self._assign(page, epoch)
                    moved = True
                    left[number] -= len(page.records)
            logs = held_up
        return sum(self._limit - each for each in left.values())

    def _assign(self, page: LogPage, epoch: int | None) -> None:
        if page.filters != self._matched_by:
            self._matched_by = page.filters
            self._matcher = Matcher({name: parse(text) for name, text in page.filters.items()})
        found = match_page(page, self._matcher)
        done = self._broker.assign(page.log, page.cursor, found, epoch=epoch)
        if done.status is AssignStatus.FENCED:
            _check_alone(self._broker.log_stats(), epoch)

    def stop(self) -> None:
        """Let :meth:`run` return after the step that it is at; from any thread or handler."""
        self._is_stopped = True
        self._stops.wake()

    def _pause(self, pause_ms: int) -> None:
        self._stops.wait(pause_ms / 1000)

    def _may_pass(self, error: PenstockError) -> bool:
        """Whether the same call may succeed later."""
        if isinstance(error, BrokerClosed):
            # A server that is stopping says so too, and the next one may be on its way.
            return not getattr(self._broker, "closed", True)
        return isinstance(error, StorageFailed) and not isinstance(
            error, StoreDamaged | StoreFenced
        )


def route_once(broker: RoutedLog, *, limit: int = 10_000) -> int:
    """Route what the logs hold, up to about ``limit`` messages of each; return how many were read.

    Safe to call at any time, from any number of threads at once: what was routed before is not
    routed again.
    """
    tailer = Tailer(broker, limit=limit)
    stats = broker.log_stats()
    check_pipeline(stats.routing)
    return tailer.route(stats)
