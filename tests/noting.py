"""What clients of a store note for the auditor, straight to a file: it outlives a kill."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from penstock import SystemClock
from penstock.testing.auditor import Kind, Note

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock import Broker, Delivery, Message, Outcome

ENDS = {"done": Kind.ACKED, "retrying": Kind.RELEASED, "failed": Kind.FAILED}


class MachineClock(SystemClock):
    """The machine's own clock: a broker does not set it by a database's, so that notes agree."""


CLOCK = MachineClock()


def notes_of(path: Path) -> list[Note]:
    """Read notes; a kill may have cut the last line of a process short."""
    notes = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            notes.append(msgspec.json.decode(line, type=Note))
        except msgspec.DecodeError:
            continue
    return notes


class Notebook:
    """The notes about one queue; processes may share the file."""

    def __init__(self, path: str, queue: str) -> None:
        self._file = os.open(f"{path}.{queue}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def write(self, kind: Kind, began_at_ms: int = 0, **fields: Any) -> None:
        note = Note(kind=kind, at_ms=CLOCK.now_ms(), began_at_ms=began_at_ms, **fields)
        os.write(self._file, msgspec.json.encode(note) + b"\n")


class Noting:
    """A broker, for one queue, which notes every call."""

    def __init__(self, broker: Broker, book: Notebook) -> None:
        self._broker = broker
        self._write = book.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def publish(self, messages: Sequence[Message]) -> None:
        for each in messages:
            self._write(Kind.PUBLISHING, body=each.payload.decode(), group=each.group)
        began = CLOCK.now_ms()
        for each, message_id in zip(messages, self._broker.publish(messages), strict=True):
            self._write(
                Kind.PUBLISHED,
                began,
                body=each.payload.decode(),
                message_id=message_id,
                group=each.group,
            )

    def claim(self, queue: str, **options: Any) -> list[Delivery]:
        began = CLOCK.now_ms()
        deliveries = self._broker.claim(queue, **options)
        for d in deliveries:
            self._write(
                Kind.DELIVERED,
                began,
                body=d.payload.decode(),
                message_id=d.message_id,
                receipt=d.receipt,
                deadline_ms=d.lease_deadline_ms,
                attempts=d.attempts,
                group=d.group,
            )
        return deliveries

    def extend(self, receipts: Sequence[str], *, lease_ms: int) -> list[Outcome]:
        for receipt in receipts:
            self._write(Kind.EXTENDING, receipt=receipt)
        outcomes = self._broker.extend(receipts, lease_ms=lease_ms)
        for outcome in outcomes:
            if outcome:
                deadline_ms = outcome.lease_deadline_ms
                self._write(Kind.EXTENDED, receipt=outcome.receipt, deadline_ms=deadline_ms)
        return outcomes

    def ack(self, receipts: Sequence[str]) -> list[Outcome]:
        return self._settle(receipts, "ack")

    def release(self, receipts: Sequence[str], **options: Any) -> list[Outcome]:
        return self._settle(receipts, "release", **options)

    def _settle(self, receipts: Sequence[str], verb: str, **options: Any) -> list[Outcome]:
        for receipt in receipts:
            self._write(Kind.SETTLING, receipt=receipt, unseen=options.get("unseen", False))
        began = CLOCK.now_ms()
        outcomes: list[Outcome] = getattr(self._broker, verb)(receipts, **options)
        for outcome in outcomes:
            self._write(
                ENDS.get(outcome.status.value, Kind.REFUSED), began, receipt=outcome.receipt
            )
        return outcomes
