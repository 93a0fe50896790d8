"""Holds what processes have noted of a queue against what the store has of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import State
from penstock.testing.auditor import audit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock import Broker, Entry
    from penstock.testing.auditor import Note

WAITING = (State.AVAILABLE, State.DELAYED, State.IN_FLIGHT)
OVER = (State.DONE, State.FAILED)


def entries(broker: Broker, queue: str, *states: State) -> Iterator[Entry]:
    """Browse all of a queue's messages in some states."""
    for state in states:
        cursor: str | None = None
        while True:
            page = broker.browse(queue, state=state, limit=1_000, cursor=cursor)
            yield from page
            cursor = page.next_cursor
            if cursor is None:
                break


def judge_queue(
    broker: Broker, queue: str, notes: Sequence[Note], *, fifo: bool = False
) -> tuple[list[Entry], list[Entry]]:
    """Have the auditor judge; return what waits or is in flight, and what is over."""
    waiting = list(entries(broker, queue, *WAITING))
    over = list(entries(broker, queue, *OVER))
    findings = audit(
        notes,
        in_queue=[(each.message_id, (each.payload or b"").decode()) for each in waiting],
        settled=[each.message_id for each in over],
        fifo=fifo,
    )
    assert not findings, f"{len(findings)} findings, the first:\n{findings[0]}"
    return waiting, over
