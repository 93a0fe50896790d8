"""The base of every suite: one broker, one clock, a few short helpers."""

from __future__ import annotations

import reprlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock.broker.requests import Change, Joint
from penstock.clock import Clock, ManualClock
from penstock.model import Message, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from penstock.broker.broker import Broker
    from penstock.model import Delivery, Entry, Outcome, Value

__all__ = ["HOUR_MS", "YEAR_MS", "Suite", "message", "receipts_of"]

HOUR_MS = 3_600_000
YEAR_MS = 365 * 24 * HOUR_MS


def message(payload: bytes = b"", *, queue: str = "q", **fields: Any) -> Message:
    """Make a message for a queue without a filter of its own."""
    attributes: dict[str, Value] = {"queue": queue, **fields.pop("attributes", {})}
    return Message(payload, attributes, **fields)


def receipts_of(deliveries: Iterable[Delivery]) -> list[str]:
    """Return the receipts of deliveries."""
    return [delivery.receipt for delivery in deliveries]


class Suite:
    """The seam for a store, and helpers."""

    clock: ManualClock
    broker: Broker
    place: Path

    def open(self, clock: Clock, **options: Any) -> Broker:
        """Open a new, empty store with the options of :func:`penstock.open`."""
        raise NotImplementedError

    def reopen(self) -> Broker:
        """Close the broker that ``open`` gave and open the same store with the same options."""
        raise NotImplementedError

    def payload_kept(self, message_id: int) -> bool | None:  # noqa: ARG002 - for overriding
        """Whether the store still has a payload; None if there is no way to tell."""
        return None

    @pytest.fixture(autouse=True)
    def _around(self, tmp_path: Path) -> Iterator[None]:
        self.place = tmp_path
        self.clock = ManualClock()
        yield
        if "broker" in self.__dict__:
            self.broker.close()

    # --- beginning -----------------------------------------------------------------------

    def start(self, *, queue: str | None = "q", **settings: Any) -> Broker:
        """Open a broker on the manual clock, with one queue of these settings."""
        self.broker = self.open(self.clock, background=False)
        if queue is not None:
            self.broker.create_queue(queue, **settings)
        return self.broker

    def again(self) -> Broker:
        """Close and open again."""
        self.broker = self.reopen()
        return self.broker

    # --- short words ---------------------------------------------------------------------

    def put(self, *payloads: bytes, queue: str = "q", **fields: Any) -> list[int]:
        """Publish messages that share their fields."""
        return self.broker.publish([message(p, queue=queue, **fields) for p in payloads])

    def take(self, limit: int = 1, *, queue: str = "q", **options: Any) -> list[Delivery]:
        """Claim without waiting."""
        return self.broker.claim(queue, limit=limit, **options)

    def take_one(self, **options: Any) -> Delivery:
        """Claim exactly one message that must be there."""
        (delivery,) = self.take(**options)
        return delivery

    def taken(self, limit: int = 1, *, queue: str = "q") -> list[bytes]:
        """Claim and return the payloads."""
        return [delivery.payload for delivery in self.take(limit, queue=queue)]

    def fail_one(self, reason: str = "") -> Delivery:
        """Claim one message and release it; the queue allows a single attempt."""
        delivery = self.take_one()
        (outcome,) = self.broker.release([delivery.receipt], reason=reason)
        assert outcome.status == "failed"
        return delivery

    def ack_late(self, *given: tuple[str, int], queue: str = "q") -> list[Outcome]:
        """Settle by receipts, each with the attempt that it was given for, what waits again."""
        attempts = [attempt for _, attempt in given]
        work = self.broker.acking_late([receipt for receipt, _ in given], attempts, queue)
        change = Change(work)
        self.broker.begin(Joint(changes=[change]))
        if change.error is not None:
            raise change.error
        outcomes: list[Outcome] = change.answer
        return outcomes

    def depth(self, queue: str = "q") -> tuple[int, int, int, int, int]:
        """Return available, delayed, in flight, done, failed."""
        stats = self.broker.stats(queue)
        return stats.available, stats.delayed, stats.in_flight, stats.done, stats.failed

    def next_due_ms(self) -> int | None:
        """Sweep and return when the next thing is due.

        None if that is an hour off or more: a store may have upkeep of its own that rarely.
        """
        due_ms = self.broker.sweep().next_due_ms
        if due_ms is None or due_ms >= self.clock.now_ms() + HOUR_MS // 2:
            return None
        return due_ms

    def everything(self, state: State | str, *, queue: str = "q", limit: int = 1000) -> list[Entry]:
        """Browse a state to its end."""
        entries: list[Entry] = []
        cursor: str | None = None
        while True:
            page = self.broker.browse(queue, state=state, limit=limit, cursor=cursor)
            assert len(page) <= limit
            entries += page
            cursor = page.next_cursor
            if cursor is None:
                return entries

    def payloads(self, state: State | str, *, queue: str = "q") -> list[bytes | None]:
        """Return the payloads in a state, sorted by message id."""
        entries = sorted(self.everything(state, queue=queue), key=lambda e: e.message_id)
        return [entry.payload for entry in entries]

    def snapshot(self) -> dict[str, Any]:
        """Return all that can be seen of a store from outside."""
        seen: dict[str, Any] = {}
        for spec in self.broker.queues():
            seen[spec.name] = spec
            seen[f"{spec.name} stats"] = self.broker.stats(spec.name)
            for state in State:
                entries = self.everything(state, queue=spec.name)
                seen[f"{spec.name} {state.value}"] = entries
                for entry in entries:
                    tries = self.broker.attempts(spec.name, entry.message_id)
                    seen[f"{spec.name} attempts of {entry.message_id}"] = tries
        # Refused receipts are counted: that is the one thing a refusal may change.
        totals = msgspec.structs.asdict(self.broker.store_stats())
        seen["store"] = {k: v for k, v in totals.items() if k != "stale_receipts_total"}
        return seen

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Check that nothing that can be seen has changed inside."""
        before = self.snapshot()
        yield
        assert self.snapshot() == before

    @contextmanager
    def refused(self, error: type[Exception], case: object = "") -> Iterator[None]:
        """Check that a call raises exactly this error and changes nothing.

        A failure names the ``case``, where a test tries many on one store.
        """
        try:
            with self.unchanged():
                with pytest.raises(error) as caught:
                    yield
                assert type(caught.value) is error
                assert str(caught.value)
        except BaseException as failure:
            failure.add_note(f"the case: {reprlib.repr(case)}")
            raise
