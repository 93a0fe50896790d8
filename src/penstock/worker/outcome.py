"""What a handler's end means for its message. Pure: no thread, no store.

::

    the handler                     the message
    returns                         is acked
    raises Retry(delay_ms=...)      is released, and tried again after that delay
    raises Settled                  is left alone: the handler has settled it by itself
    raises anything else            is released, and tried again after the queue's back-off

A released message that is out of attempts fails; that is for the store to see.
"""

from __future__ import annotations

import traceback
from enum import StrEnum

import msgspec

from penstock import limits
from penstock.validation import check_duration, cut_text

__all__ = ["ACKED", "Act", "Retry", "Settled", "Verdict", "over_limit", "released", "verdict_of"]


class Retry(Exception):
    """Raise it in a handler to have its message tried again.

    ``delay_ms`` takes the place of the queue's back-off; ``reason`` is kept in the history.
    """

    # For subclasses that do not call this class's constructor.
    reason: str = ""
    delay_ms: int | None = None

    def __init__(self, reason: str = "", *, delay_ms: int | None = None) -> None:
        """Note what the handler wants; a delay that the store would refuse is refused here."""
        super().__init__(reason)
        self.reason = reason
        self.delay_ms = None if delay_ms is None else check_duration(delay_ms, "delay_ms")


class Settled(Exception):
    """Raise it in a handler that has acked or released its message by itself."""


class Act(StrEnum):
    """What is to be done with a message."""

    ACK = "ack"
    RELEASE = "release"
    GIVE_BACK = "give_back"
    """Release, as if it had not been claimed: no handler has seen it."""
    LEAVE = "leave"


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """What is to be done with a message, and what the log is to say of it.

    ``failed``: the handler did not succeed. ``place`` is where it raised, ``trace`` how it got
    there.
    """

    act: Act
    delay_ms: int | None = None
    reason: str = ""
    failed: bool = False
    place: str = ""
    trace: str = ""


ACKED = Verdict(Act.ACK)


def released(reason: str, *, delay_ms: int | None = None, failed: bool = False) -> Verdict:
    """Give a message back for a reason that is not the handler's."""
    return Verdict(Act.RELEASE, delay_ms, reason, failed)


def over_limit(time_limit_ms: int) -> Verdict:
    """Judge a handler that took longer than it may."""
    return released(f"over the time limit of {time_limit_ms} ms", failed=True)


def verdict_of(error: BaseException) -> Verdict:
    """Judge a handler by what it raised, whatever that is."""
    try:
        return _judged(error)
    except BaseException as failure:
        # Of an error that can't be looked at: who asks is to have an answer all the same.
        text = f"{type(error).__name__}, which can't be read: {type(failure).__name__}"
        return released(_cut(text), failed=True)


def _judged(error: BaseException) -> Verdict:
    if isinstance(error, Settled):
        return Verdict(Act.LEAVE)
    if isinstance(error, Retry):
        reason = _cut(error.reason or "retry")
        delay_ms = error.delay_ms
        if delay_ms is not None:
            check_duration(delay_ms, "delay_ms")
        return Verdict(Act.RELEASE, delay_ms, reason, failed=True, place="Retry")
    reason = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    trace = "".join(traceback.format_exception(error))
    return Verdict(Act.RELEASE, None, _cut(reason), failed=True, place=place, trace=trace)


def _cut(reason: str) -> str:
    return cut_text(reason, limits.MAX_REASON_BYTES)
