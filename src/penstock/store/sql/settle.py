"""A claim ends: ack, release, extend, and leases that expire. The database judges every receipt.

A receipt is good while its item is held under its lease and the deadline is ahead. Each item has
its own deadline, so that a lease need not be split when a part of it is extended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.errors import InvalidReceipt
from penstock.limits import MAX_ATTEMPTS
from penstock.model import Outcome, OutcomeStatus
from penstock.store.policy import backoff_ms, fail_reason, is_exhausted
from penstock.store.receipts import parse_lease_token, parse_receipts, queue_numbers
from penstock.store.sql.database import columns
from penstock.store.sql.session import SLOTS, SqlSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.store.sql.session import SqlQueue
    from penstock.store.sql.zones import Zone

# As the table attempts has it; the last is that of an attempt under way.
ACKED, RELEASED, EXPIRED = 0, 1, 2
ENDINGS: Final = ("acked", "released", "expired", "running")
# Expired items that one transaction ends.
EXPIRE_CHUNK: Final = 1_000

# Queue, message, lease.
_Key = tuple[int, int, bytes]


class _Ended(NamedTuple):
    """An item whose attempt ends; ``vesting_ms``: from when on it waits again, None: it fails."""

    queue: SqlQueue
    message_id: int
    zone: bytes
    vesting_ms: int | None


class SqlSettle(SqlSession):
    """The verbs that take receipts."""

    def ack(self, receipts: Sequence[str], *, queue_name: str | None, now_ms: int) -> list[Outcome]:
        """Settle messages as done."""
        keys = self._keys(receipts, queue_name)
        doubts = self.database.doubts
        # In a FIFO queue other items of the zone may be next.
        judged = self._settle("ack", keys, OutcomeStatus.DONE, now_ms, now_ms, slots=SLOTS)
        if self.database.doubts > doubts:
            judged |= {key: OutcomeStatus.DONE for key, _ in self._settled_before(keys, ACKED)}
        for number in {key[0] for key, status in judged.items() if status is OutcomeStatus.DONE}:
            queue = self.numbered(number)
            if queue is not None:
                if queue.fifo:
                    self.wake(queue)
                if queue.spec.done_retention_ms:
                    self.due_for_retention(now_ms + queue.spec.done_retention_ms)
        return self._outcomes(receipts, keys, judged)

    def extend(
        self, receipts: Sequence[str] | str, *, lease_ms: int, queue_name: str | None, now_ms: int
    ) -> list[Outcome]:
        """Move the deadline of receipts, or of everything that is still held under a lease token.

        The rest of a lease keeps its own deadline.
        """
        if isinstance(receipts, str):
            receipts = list(self.held(receipts).values())
        keys = self._keys(receipts, queue_name)
        until_ms = now_ms + lease_ms
        judged = self._settle(
            "extend", keys, OutcomeStatus.EXTENDED, until_ms, now_ms, deadline_ms=until_ms
        )
        if keys:
            self.due(until_ms)
        return self._outcomes(receipts, keys, judged, until_ms)

    def _settle(
        self,
        statement: str,
        keys: Sequence[_Key],
        status: OutcomeStatus,
        zone_ms: int,
        now_ms: int,
        **parameters: int,
    ) -> dict[_Key, OutcomeStatus]:
        """Run a statement for receipts; return the status of each that was held.

        ``zone_ms``: when the zones that the statement names must be looked at.
        """
        if not keys:
            return {}
        zones: dict[Zone, int] = {}

        def work() -> list[tuple[Any, ...]]:
            return self.database.run(
                statement,
                **_columns(keys),
                **parameters,
                # Of each attempt its own.
                slot=self.slot,
                turn=self.take_turns(1),
                stamp=self.stamp(),
                now_ms=now_ms,
                threshold_ms=0,
            )

        with self.zones.recheck_if_slow(zones):
            rows = self.database.do(work, again=True)
            zones |= {(row[0], row[4]): zone_ms for row in rows if row[4] is not None}
        self.progress.commits += 1
        return {
            (queue, message_id, lease): status if good else OutcomeStatus.EXPIRED
            for queue, message_id, lease, good, _ in rows
        }

    def held(self, token: str) -> dict[int, str]:
        """Return the receipts of the messages held under a lease, by message id."""
        parsed = parse_lease_token(self.store_id, token)
        rows = self.database.ask("held", queue=parsed.queue, lease=parsed.family + b"\0\0")
        return {message_id: f"{token}-{message_id:016x}" for (message_id,) in rows}

    def queues_of(self, receipts: Sequence[str] | str) -> set[str]:
        """Name the queues of receipts, or of a lease token; deleted queues are left out."""
        found = map(self.numbered, queue_numbers(self.store_id, receipts))
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
        keys = self._keys(receipts, queue_name)
        judged: dict[_Key, OutcomeStatus] = {}
        doubts = self.database.doubts

        def work() -> None:
            judged.clear()
            ended = []
            for row in self.database.run("lock_held", **_columns(keys)):
                number, message_id, lease, vesting_ms, attempts, forgiven, zone, since_ms = row
                queue = self.numbered(number)
                key = (number, message_id, lease)
                if vesting_ms <= now_ms or queue is None:
                    judged[key] = OutcomeStatus.EXPIRED
                    continue
                judged[key] = OutcomeStatus.RETRYING
                until_ms: int | None
                if unseen:
                    until_ms = since_ms
                elif is_exhausted(queue.spec, attempts, forgiven):
                    until_ms = None
                    judged[key] = OutcomeStatus.FAILED
                elif delay_ms is None:
                    until_ms = now_ms + backoff_ms(queue.spec, attempts - forgiven, random)
                else:
                    until_ms = now_ms + delay_ms
                ended.append(_Ended(queue, message_id, zone, until_ms))
            self._end(ended, RELEASED, reason, now_ms, unseen=unseen)

        if keys:
            self.change(work, again=True)
        if self.database.doubts > doubts:
            for key, failed in self._settled_before(keys, RELEASED):
                judged[key] = OutcomeStatus.FAILED if failed else OutcomeStatus.RETRYING
        return self._outcomes(receipts, keys, judged)

    def expire(self, now_ms: int, budget: int, queue: SqlQueue | None = None) -> tuple[int, int]:
        """End leases whose deadline has come; return how many, and how many messages failed."""
        leases = failures = 0
        only = None if queue is None else queue.number
        more = bool(self.database.ask("any_expired", now_ms=now_ms))

        def work() -> list[tuple[Any, ...]]:
            count = min(EXPIRE_CHUNK, budget)
            own = {"queue": only, "count": count, "most_attempts": MAX_ATTEMPTS}
            rows = self.database.run("lock_expired", now_ms=now_ms, **own)
            ended = [
                _Ended(of, message_id, zone, None if is_over else now_ms)
                for number, message_id, _, zone, is_over in rows
                if (of := self.numbered(number)) is not None
            ]
            self._end(ended, EXPIRED, "lease expired", now_ms)
            return rows

        while more and budget > 0:
            rows = self.change(work)
            leases += len({row[2] for row in rows})
            failures += sum(row[4] for row in rows)
            budget -= len(rows)
            more = len(rows) == EXPIRE_CHUNK
        return leases, failures

    # --- the end of attempts ---------------------------------------------------------------

    def _end(
        self,
        ended: Sequence[_Ended],
        ending: int,
        reason: str,
        now_ms: int,
        *,
        unseen: bool = False,
    ) -> None:
        """End the attempts at items: write them down, then let the items wait again or fail.

        ``unseen``: the attempt did not count, and is not written down. Pointers are written before
        counters, as everywhere.
        """
        rows = [(each.queue.number, each.message_id, each.vesting_ms) for each in ended]
        if rows and not unseen:
            self.database.run(
                "end_attempts",
                **columns(rows, "queues", "message_ids"),
                ending=ending,
                reason=(reason if ending == RELEASED else "").encode(),
                now_ms=now_ms,
            )
        back = [row for row in rows if row[2] is not None]
        if back:
            self.database.run(
                "give_back",
                **columns(back, "queues", "message_ids", "vestings"),
                taken_back=int(unseen),
                now_ms=now_ms,
            )
        zones: dict[Zone, int] = {}
        by_queue: dict[SqlQueue, list[_Ended]] = {}
        for each in ended:
            queue, vesting_ms = each.queue, each.vesting_ms
            by_queue.setdefault(queue, []).append(each)
            if vesting_ms is not None:
                self.due(vesting_ms)
                if queue.spec.unclaimed_retention_ms:
                    self.due(vesting_ms + queue.spec.unclaimed_retention_ms)
            elif not queue.fifo:
                continue
            # The zone of a FIFO queue is free of the item now, even if it is delayed itself. Not in
            # the past: a zone takes its turn behind those that wait.
            zone_ms = now_ms if queue.fifo or vesting_ms is None else max(vesting_ms, now_ms)
            key = (queue.number, each.zone)
            zones[key] = min(zone_ms, zones.get(key, zone_ms))
        self.zones.lower(zones, now_ms)
        for queue, items in sorted(by_queue.items(), key=lambda own: own[0].number):
            self._count_ended(queue, items, ending, reason, now_ms)

    def _count_ended(
        self, queue: SqlQueue, items: Sequence[_Ended], ending: int, reason: str, now_ms: int
    ) -> None:
        """Count ended attempts of a queue, and let the items fail that are out of attempts."""
        failed = sorted(each.message_id for each in items if each.vesting_ms is None)
        first = self.add_counts(
            queue.number,
            now_ms,
            live=-len(failed),
            in_flight=-len(items),
            failed=len(failed),
            failed_total=len(failed),
            released=len(items) if ending == RELEASED else 0,
            lease_expired=len(items) if ending == EXPIRED else 0,
            sequences=len(failed),
        )
        self.wake(queue, len(items))
        if not failed:
            return
        self.database.run(
            "fail",
            queue=queue.number,
            message_ids=failed,
            first=first,
            slot=self.slot,
            slots=SLOTS,
            reason=fail_reason(queue.spec, reason).encode(),
            now_ms=now_ms,
        )
        if queue.spec.failed_retention_ms:
            self.due_for_retention(now_ms + queue.spec.failed_retention_ms)
        if queue.spec.dead_letter:
            self.due(now_ms)

    # --- receipts --------------------------------------------------------------------------

    def _settled_before(self, keys: Sequence[_Key], ending: int) -> list[tuple[_Key, bool]]:
        """Return the receipts that a lost attempt of this verb had settled; whether they failed."""
        rows = self.database.run("find_ended", **_columns(keys), ending=ending)
        return [((queue, message_id, lease), over) for queue, message_id, lease, over in rows]

    def _keys(self, receipts: Sequence[str], queue_name: str | None) -> list[_Key]:
        keys = [
            (token.queue, message_id, token.family + b"\0\0")
            for token, message_id in parse_receipts(self.store_id, receipts)
        ]
        if queue_name is not None:
            own = self.queue(queue_name).number
            if any(number != own for number, _, _ in keys):
                raise InvalidReceipt(f"a receipt is of another queue than {queue_name!r}")
        # Numbers that no table can hold are no message's.
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
        judged: dict[_Key, OutcomeStatus],
        deadline_ms: int | None = None,
    ) -> list[Outcome]:
        """Return an outcome for each receipt; of one that is named twice the second is stale."""
        outcomes = []
        for receipt, key in zip(receipts, keys, strict=True):
            status = judged.get(key, OutcomeStatus.STALE)
            extended = status is OutcomeStatus.EXTENDED
            outcomes.append(Outcome(receipt, status, deadline_ms if extended else None))
            if status is not OutcomeStatus.EXPIRED:
                judged.pop(key, None)
        self.stale_receipts += sum(not outcome.ok for outcome in outcomes)
        return outcomes


def _columns(keys: Sequence[_Key]) -> dict[str, list[Any]]:
    return columns(dict.fromkeys(keys), "queues", "message_ids", "leases")
