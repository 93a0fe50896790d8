"""A claim ends: ack, release, extend, expiry. Every receipt is judged by the database.

A receipt is good while the item that it names is held under its lease and the deadline is ahead.
Each item has its own deadline, so that a lease need not be split when some of it is extended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.errors import InvalidReceipt
from penstock.limits import MAX_ATTEMPTS
from penstock.model import Outcome, OutcomeStatus
from penstock.store.policy import backoff_ms
from penstock.store.receipts import parse_lease_token, parse_receipts, queue_numbers
from penstock.store.sql.database import Lost
from penstock.store.sql.session import SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import TracebackType

    from penstock.store.sql.session import Core

__all__ = ["ENDINGS", "Settling"]

# As attempts have it: acked, released, expired.
ACKED, RELEASED, EXPIRED = 0, 1, 2
ENDINGS: Final = ("acked", "released", "expired")

# Queue, message, lease.
_Key = tuple[int, int, bytes]


class Settling:
    """The verbs that take receipts."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def ack(self, receipts: Sequence[str], *, queue_name: str | None, now_ms: int) -> list[Outcome]:
        """Settle messages as done."""
        core = self._core
        keys = self._keys(receipts, queue_name)
        wanted = list(dict.fromkeys(keys))
        repeated = _Repeated()
        freed: dict[tuple[int, bytes], int] = {}

        def work() -> list[tuple[Any, ...]]:
            with repeated:
                return core.database.run(
                    "ack",
                    **_columns(wanted),
                    slot=core.slot,
                    slots=SLOTS,
                    turn=core.take_turns(1),
                    stamp=core.stamp(),
                    now_ms=now_ms,
                )

        with core.zones.sure(freed):
            rows = core.database.do(work, again=True) if wanted else []
            # In a FIFO queue others of the zone may be next.
            freed |= {(row[0], row[4]): now_ms for row in rows if row[4] is not None}
        judged = {(queue, message_id, lease): good for queue, message_id, lease, good, _ in rows}
        if repeated.lost:
            judged |= {key: True for key, _ in self._ended(wanted, ACKED)}
        if rows:
            core.progress.commits += 1
        for number in {key[0] for key, good in judged.items() if good}:
            queue = core.numbered(number)
            if queue is not None:
                if queue.fifo:
                    core.wake(queue)
                if queue.spec.done_retention_ms:
                    core.due_for_retention(now_ms + queue.spec.done_retention_ms)
        return self._outcomes(receipts, keys, judged, OutcomeStatus.DONE)

    def extend(
        self, receipts: Sequence[str] | str, *, lease_ms: int, queue_name: str | None, now_ms: int
    ) -> list[Outcome]:
        """Move the deadline of receipts, or of everything that is still held under a lease token.

        The rest of a lease keeps its own deadline.
        """
        core = self._core
        if isinstance(receipts, str):
            receipts = list(self.held(receipts).values())
        keys = self._keys(receipts, queue_name)
        wanted = list(dict.fromkeys(keys))
        deadline_ms = now_ms + lease_ms
        rows = []
        sooner: dict[tuple[int, bytes], int] = {}
        if wanted:
            with core.zones.sure(sooner):
                rows = core.database.do(
                    lambda: core.database.run(
                        "extend",
                        **_columns(wanted),
                        deadline_ms=deadline_ms,
                        slot=core.slot,
                        turn=core.take_turns(1),
                        stamp=core.stamp(),
                        now_ms=now_ms,
                    ),
                    again=True,
                )
                sooner |= {(row[0], row[4]): deadline_ms for row in rows if row[4] is not None}
            core.progress.commits += 1
            core.due(deadline_ms)
        judged = {(queue, message_id, lease): good for queue, message_id, lease, good, _ in rows}
        return self._outcomes(
            receipts, keys, judged, OutcomeStatus.EXTENDED, deadline_ms=deadline_ms
        )

    def held(self, token: str) -> dict[int, str]:
        """Return the receipts of what is held under a lease, by message id."""
        core = self._core
        parsed = parse_lease_token(core.identity.store_id, token)
        rows = core.database.do(
            lambda: core.database.run("held", queue=parsed.queue, lease=parsed.family + b"\0\0"),
            again=True,
        )
        return {message_id: f"{token}-{message_id:016x}" for (message_id,) in rows}

    def queues_of(self, receipts: Sequence[str] | str) -> set[str]:
        """Name the queues of receipts, or of a lease token; those that are gone are left out."""
        core = self._core
        found = map(core.numbered, queue_numbers(core.identity.store_id, receipts))
        return {queue.name for queue in found if queue is not None}

    def release(
        self,
        receipts: Sequence[str],
        *,
        delay_ms: int | None,
        reason: str,
        random: Callable[[], float],
        queue_name: str | None,
        now_ms: int,
        unseen: bool = False,
    ) -> list[Outcome]:
        """Give messages back, to be tried again after a delay or (out of attempts) to fail."""
        core = self._core
        keys = self._keys(receipts, queue_name)
        wanted = list(dict.fromkeys(keys))
        judged: dict[_Key, bool] = {}
        failed: set[_Key] = set()
        repeated = _Repeated()

        def work() -> None:
            judged.clear()
            failed.clear()
            back: list[tuple[int, int, bytes, int]] = []
            over: list[tuple[int, bytes]] = []
            ended: dict[int, int] = {}
            for row in core.database.run("lock_held", **_columns(wanted)):
                number, message_id, lease, vesting_ms, attempts, forgiven, zone, since_ms = row
                queue = core.numbered(number)
                key = (number, message_id, lease)
                judged[key] = vesting_ms > now_ms and queue is not None
                if queue is None or not judged[key]:
                    continue
                ended[number] = ended.get(number, 0) + 1
                if unseen:
                    back.append((number, message_id, zone, since_ms))
                    continue
                wait_ms = delay_ms
                if wait_ms is None:
                    wait_ms = backoff_ms(queue.spec, attempts - forgiven, random)
                if _is_over(queue.spec.max_attempts, attempts, forgiven):
                    failed.add(key)
                    over.append((number, zone))
                else:
                    back.append((number, message_id, zone, now_ms + wait_ms))
            if not unseen:
                good = [key[:2] for key, good in judged.items() if good]
                self.end(good, RELEASED, reason, now_ms)
            self.give_back(back, over, now_ms, unseen=unseen)
            for number, count in sorted(ended.items()):
                ids = sorted(key[1] for key in failed if key[0] == number)
                self.fail(number, ids, reason, now_ms, released=count, ended=count)

        if wanted:
            core.change(work, again=True, noting=repeated)
        if repeated.lost:
            for key, has_failed in self._ended(wanted, RELEASED):
                judged[key] = True
                if has_failed:
                    failed.add(key)
        return self._outcomes(receipts, keys, judged, OutcomeStatus.RETRYING, failed=failed)

    # --- parts -----------------------------------------------------------------------------

    def _ended(self, keys: Sequence[_Key], ending: int) -> list[tuple[_Key, bool]]:
        """Find out which receipts a verb that has got no answer had settled; whether to fail."""
        rows = self._core.database.run("find_ended", **_columns(keys), ending=ending)
        return [((queue, message_id, lease), over) for queue, message_id, lease, over in rows]

    def end(self, items: Sequence[tuple[int, int]], ending: int, reason: str, now_ms: int) -> None:
        """Write attempts down that end, before their items are changed."""
        if items:
            self._core.database.run(
                "end_attempts",
                queues=[queue for queue, _ in items],
                message_ids=[message_id for _, message_id in items],
                ending=ending,
                reason=reason.encode(),
                now_ms=now_ms,
            )

    def give_back(
        self,
        items: Sequence[tuple[int, int, bytes, int]],
        over: Sequence[tuple[int, bytes]],
        now_ms: int,
        *,
        unseen: bool = False,
    ) -> None:
        """Let items (queue, message, zone, from when on) wait again.

        ``unseen``: their last attempt was none. ``over``: the zones of those that are going to
        fail. All pointers are written here: counters are locked after them.
        """
        core = self._core
        if items:
            core.database.run(
                "give_back",
                queues=[each[0] for each in items],
                message_ids=[each[1] for each in items],
                vestings=[each[3] for each in items],
                taken_back=int(unseen),
                now_ms=now_ms,
            )
        zones: dict[tuple[int, bytes], int] = {}
        for number, zone in over:
            queue = core.numbered(number)
            if queue is not None and queue.fifo:
                zones[number, zone] = now_ms
        for number, _, zone, vesting_ms in items:
            key = (number, zone)
            # Not in the past: a zone takes its turn behind those that wait.
            zone_ms = max(vesting_ms, now_ms)
            zones[key] = min(zone_ms, zones.get(key, zone_ms))
            queue = core.numbered(number)
            if queue is not None:
                core.wake(queue)
                if queue.fifo:
                    # The zone is free of it now, even if it is delayed itself.
                    zones[key] = now_ms
                if queue.spec.unclaimed_retention_ms:
                    core.due(vesting_ms + queue.spec.unclaimed_retention_ms)
            core.due(vesting_ms)
        core.zones.lower(zones, now_ms)

    def fail(
        self,
        number: int,
        message_ids: Sequence[int],
        reason: str,
        now_ms: int,
        *,
        ended: int,
        released: int = 0,
        lease_expired: int = 0,
    ) -> None:
        """Let items fail, and count what has become of all ``ended`` ones of a queue.

        :meth:`give_back` was told of their zones.
        """
        core = self._core
        queue = core.numbered(number)
        count = len(message_ids)
        first = core.add_counts(
            number,
            now_ms,
            live=-count,
            in_flight=-ended,
            failed=count,
            failed_total=count,
            released=released,
            lease_expired=lease_expired,
            sequences=count,
        )
        if queue is not None:
            core.wake(queue)
        if not count:
            return
        allowed = queue.spec.max_attempts if queue else 0
        core.database.run(
            "fail",
            queue=number,
            message_ids=list(message_ids),
            first=first,
            slot=core.slot,
            slots=SLOTS,
            reason=(reason or f"released {allowed} times").encode(),
            now_ms=now_ms,
        )
        if queue is not None and queue.spec.failed_retention_ms:
            core.due_for_retention(now_ms + queue.spec.failed_retention_ms)
        if queue is not None and queue.spec.dead_letter:
            core.due(now_ms)

    # --- judging ---------------------------------------------------------------------------

    def _keys(self, receipts: Sequence[str], queue_name: str | None) -> list[_Key]:
        core = self._core
        keys = [
            (token.queue, message_id, token.family + b"\0\0")
            for token, message_id in parse_receipts(core.identity.store_id, receipts)
        ]
        if queue_name is not None:
            own = core.queue(queue_name).number
            if any(number != own for number, _, _ in keys):
                raise InvalidReceipt(f"a receipt is of another queue than {queue_name!r}")
        # What no table can hold is nobody's.
        return [
            (number, message_id, lease)
            if number < 1 << 31 and message_id < 1 << 63
            else (-1, 0, lease)
            for number, message_id, lease in keys
        ]

    def _outcomes(
        self,
        receipts: Sequence[str],
        keys: Sequence[_Key],
        judged: dict[_Key, bool],
        status: OutcomeStatus,
        *,
        deadline_ms: int | None = None,
        failed: Collection[_Key] = (),
    ) -> list[Outcome]:
        outcomes = []
        seen: set[_Key] = set()
        for receipt, key in zip(receipts, keys, strict=True):
            good = judged.get(key)
            if good is None or key in seen:
                outcomes.append(Outcome(receipt, OutcomeStatus.STALE))
            elif not good:
                outcomes.append(Outcome(receipt, OutcomeStatus.EXPIRED))
            elif key in failed:
                outcomes.append(Outcome(receipt, OutcomeStatus.FAILED))
            else:
                outcomes.append(Outcome(receipt, status, deadline_ms))
            if good:
                seen.add(key)
        self._core.stale_receipts += sum(not outcome.ok for outcome in outcomes)
        return outcomes


class _Repeated:
    """Notes whether a connection was lost, so that what was asked for may have been done twice."""

    def __init__(self) -> None:
        self.lost = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lost = self.lost or (isinstance(error, Lost) and error.unknown)


def _is_over(allowed: int, attempts: int, forgiven: int) -> bool:
    return attempts - forgiven >= allowed or attempts >= MAX_ATTEMPTS


def _columns(keys: Sequence[_Key]) -> dict[str, list[Any]]:
    return {
        "queues": [key[0] for key in keys],
        "message_ids": [key[1] for key in keys],
        "leases": [key[2] for key in keys],
    }
