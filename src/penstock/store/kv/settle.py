"""A claim ends: ack, release, extend, expiry. Every receipt is judged here.

A receipt names a message and the lease it was given under. It is good while the message is in
flight under that lease (or a split of it) and the lease's deadline is ahead; the clock decides,
whether or not a sweep has been by. A receipt that is not good changes nothing.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from penstock.engines import get_each
from penstock.errors import InvalidReceipt, StoreDamaged
from penstock.model import AttemptEnd, Outcome, OutcomeStatus, State
from penstock.store import policy
from penstock.store.codec.claimed import (
    FAMILY_BYTES,
    lease_token,
    parse_lease_token,
    parse_receipts,
    queue_numbers,
)
from penstock.store.codec.records import LeaseRecord, decode_lease
from penstock.store.kv.queues import Queue
from penstock.store.kv.state import Core, verb
from penstock.store.life import life, log_step
from penstock.store.live import Item, uncount_attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from penstock.engines import Batch
    from penstock.store.codec.claimed import LeaseToken


class Holding(msgspec.Struct, gc=False):
    """Messages that are in flight under one live lease, of one queue."""

    queue: Queue
    name: bytes
    lease: LeaseRecord
    items: list[Item]


_EXPIRED: Final = "lease expired"
# A receipt's message, or the reason why the receipt is refused.
Answer: TypeAlias = Item | OutcomeStatus

_queue_of: Final = attrgetter("queue")


class SettleVerbs(Core):
    """The verbs that take receipts, and the end of messages whose lease ends."""

    # --- verbs -----------------------------------------------------------------------------

    @verb
    def ack(self, receipts: Sequence[str], *, queue_name: str | None, now_ms: int) -> list[Outcome]:
        """Settle messages as done."""
        holdings, answers = self._judge(receipts, queue_name, now_ms)
        if holdings:
            batch = self.begin()
            by_queue: dict[Queue, list[tuple[list[Item], int | None]]] = {}
            for holding in holdings:
                held = by_queue.setdefault(holding.queue, [])
                held.append((holding.items, holding.lease.claimed_at_ms))
            # Messages of many leases of a queue end as one stretch of its history.
            for queue, held in by_queue.items():
                items = (
                    held[0][0] if len(held) == 1 else [item for some, _ in held for item in some]
                )
                self.active.settle(batch, queue, items)
                self.history.add(batch, queue, State.DONE, held, "", now_ms)
                if queue.spec.done_retention_ms:
                    due_ms = now_ms + queue.spec.done_retention_ms
                    self.retention.lower((queue.number, "done"), due_ms)
                if queue.fifo:
                    self.wake(queue)
            for holding in holdings:
                self._end(batch, holding, AttemptEnd.ACKED, "", now_ms)
            self.commit(batch, by_queue, now_ms)
            if life.level:
                self._log_step("ack", holdings)
        return outcomes_of(receipts, answers, OutcomeStatus.DONE)

    @verb
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
        holdings, answers = self._judge(receipts, queue_name, now_ms)
        failures: list[Holding] = []
        if holdings:
            batch = self.begin()
            for holding in holdings:
                holding.queue.counts.released_total += len(holding.items)
                if unseen:
                    self._leave_lease(batch, holding)
                    for item in holding.items:
                        uncount_attempt(item)
                    self._put_back(batch, holding.queue, holding.items, now_ms)
                    continue
                self._end(batch, holding, AttemptEnd.RELEASED, reason, now_ms)
                spec = holding.queue.spec
                for item in holding.items:
                    wait_ms = delay_ms
                    if wait_ms is None:
                        wait_ms = policy.backoff_ms(spec, item.attempts - item.forgiven, random)
                    item.visible_at_ms = now_ms + wait_ms
                failures += self._retry_or_fail(batch, holding, reason, now_ms)
            self.commit(batch, {h.queue: None for h in holdings}, now_ms)
            if life.level:
                self._log_step("release", holdings, "unseen" if unseen else reason)
                self._log_step("fail", failures, reason)
        failed = {id(item) for holding in failures for item in holding.items}
        return outcomes_of(receipts, answers, OutcomeStatus.RETRYING, failed=failed)

    @verb
    def extend(
        self, receipts: Sequence[str] | str, *, lease_ms: int, queue_name: str | None, now_ms: int
    ) -> list[Outcome]:
        """Move the deadline of receipts, or of everything that is still held under a lease token.

        The rest of a lease keeps its own deadline.
        """
        if isinstance(receipts, str):
            lease = parse_lease_token(self.identity.store_id, receipts).lease
            receipts = [
                f"{receipts}-{key.hex()}"
                for _, record in self.leases.splits(lease)
                for key in decode_lease(record).ids
            ]
        holdings, answers = self._judge(receipts, queue_name, now_ms)
        deadline_ms = now_ms + lease_ms
        if holdings:
            batch = self.begin()
            splits: dict[bytes, int] = {}
            for holding in holdings:
                self._move_deadline(batch, holding, deadline_ms, splits)
            self.commit(batch, {h.queue: None for h in holdings}, now_ms)
            if life.level:
                self._log_step("extend", holdings)
        return outcomes_of(receipts, answers, OutcomeStatus.EXTENDED, deadline_ms=deadline_ms)

    @verb
    def held(self, token: str) -> dict[int, str]:
        """Return the receipts of what is held under a lease, by message id."""
        lease = parse_lease_token(self.identity.store_id, token).lease
        return {
            item.message_id: f"{token}-{item.key:016x}"
            for name, record in self.leases.splits(lease)
            for holding in self._held_by(name, self.leases.decode(name, record, self.quarantine))
            for item in holding.items
        }

    @verb
    def queues_of(self, receipts: Sequence[str] | str) -> set[str]:
        """Name the queues of receipts, or of a lease token; those that are gone are left out."""
        numbers = queue_numbers(self.identity.store_id, receipts)
        return {self.by_number[number].name for number in numbers if number in self.by_number}

    def expire(self, now_ms: int, limit: int) -> tuple[int, int, StoreDamaged | None]:
        """End leases whose deadline has come: how many, messages that fail, and why not all."""
        due, damage = self.leases.due(now_ms, limit)
        found: list[tuple[bytes, bytes, list[Holding]]] = []
        names = [name for _, name in due]
        for (index_key, name), record in zip(due, get_each(self.leases.table, names), strict=True):
            try:
                if isinstance(record, StoreDamaged):
                    raise record
                holdings = self._held_by(name, self.leases.decode(name, record, self.quarantine))
                for holding in holdings:
                    # Raises if its messages can't come back, because what waits there is not known.
                    self.active.ready_groups(holding.queue)
                found.append((index_key, name, holdings))
            except StoreDamaged as error:
                # This lease stays as it is; the others end.
                damage = error
        if not found:
            return 0, 0, damage
        batch = self.begin()
        touched: dict[Queue, None] = {}
        failures: list[Holding] = []
        for index_key, name, holdings in found:
            self.leases.delete(batch, name, index_key)
            for holding in holdings:
                for item in holding.items:
                    item.visible_at_ms = now_ms
                self._end(batch, holding, AttemptEnd.EXPIRED, "", now_ms)
                failures += self._retry_or_fail(batch, holding, _EXPIRED, now_ms)
                holding.queue.counts.lease_expired_total += len(holding.items)
                touched[holding.queue] = None
        self.commit(batch, touched, now_ms)
        if life.level:
            for _, _, holdings in found:
                self._log_step("expire", holdings)
            self._log_step("fail", failures, _EXPIRED)
        return len(found), sum(len(each.items) for each in failures), damage

    def _held_by(self, name: bytes, lease: LeaseRecord | None) -> list[Holding]:
        """Find the messages that are in flight under a lease."""
        if lease is None:
            return self._strays(name)
        queue = self.by_number.get(lease.queue)
        if queue is None:
            return []
        keys = [int.from_bytes(key, "big") for key in lease.ids]
        found = self.active.find(queue, keys)
        items = [item for item in found if item is not None and item.lease == name]
        return [Holding(queue, name, lease, items)]

    def _strays(self, name: bytes) -> list[Holding]:
        """Find the messages of a lease whose record was lost, by looking at all in flight."""
        holdings = []
        for queue in self.by_name.values():
            pages = self.live_pages(queue, State.IN_FLIGHT)
            items = [item for page in pages for item in page if item.lease == name]
            if items:
                keys = [item.key.to_bytes(8, "big") for item in items]
                lease = LeaseRecord(keys, 0, b"", 0, queue.number, "")
                holdings.append(Holding(queue, name, lease, items))
        return holdings

    def abandon(self, batch: Batch, items: Sequence[Item]) -> None:
        """Take messages that are removed in flight out of their leases."""
        by_lease: dict[bytes, set[bytes]] = {}
        for item in items:
            by_lease.setdefault(item.lease, set()).add(item.key.to_bytes(8, "big"))
        for name, lease in self.leases.read(by_lease, self.quarantine).items():
            self.leases.let_go(batch, name, lease, by_lease[name])

    # --- parts -----------------------------------------------------------------------------

    def _end(
        self, batch: Batch, holding: Holding, end: AttemptEnd, reason: str, now_ms: int
    ) -> None:
        """Record the attempts that end, and take their messages out of the lease."""
        queue, lease, items = holding.queue, holding.lease, holding.items
        self.history.add_attempts(
            batch, queue, items, lease.claimed_at_ms, lease.consumer, end, reason, now_ms
        )
        # A sweep has deleted an expired lease with its expiry entry.
        if end is not AttemptEnd.EXPIRED:
            self._leave_lease(batch, holding)

    def _leave_lease(self, batch: Batch, holding: Holding) -> None:
        """Take messages out of their lease."""
        leases, lease = self.leases, holding.lease
        if len(holding.items) == len(lease.ids):
            leases.delete(batch, holding.name, lease.index_key)
        else:
            gone = {item.key.to_bytes(8, "big") for item in holding.items}
            leases.let_go(batch, holding.name, lease, gone)

    def _put_back(self, batch: Batch, queue: Queue, items: list[Item], now_ms: int) -> None:
        self.active.put_back(batch, queue, items, now_ms)
        self.note_unclaimed(batch, queue, items)
        self.wake(queue)

    def _retry_or_fail(
        self, batch: Batch, holding: Holding, reason: str, now_ms: int
    ) -> list[Holding]:
        """Put messages back that have attempts left; fail the others, and return those."""
        queue = holding.queue
        failed: list[Item] = []
        retried: list[Item] = []
        for item in holding.items:
            over = policy.is_exhausted(queue.spec, item.attempts, item.forgiven)
            (failed if over else retried).append(item)
        if retried:
            self._put_back(batch, queue, retried, now_ms)
        if failed:
            self.active.settle(batch, queue, failed)
            why, claimed_at_ms = policy.fail_reason(queue.spec, reason), holding.lease.claimed_at_ms
            self.fail(batch, queue, failed, why, now_ms, claimed_at_ms)
            return [Holding(queue, holding.name, holding.lease, failed)]
        return []

    def _log_step(self, event: str, holdings: Sequence[Holding], reason: str = "") -> None:
        """Write a record of the life-cycle log for each holding, under its whole lease's token."""
        for holding in holdings:
            queue, family = holding.queue, holding.name[:FAMILY_BYTES] + b"\0\0"
            log_step(
                event,
                queue.name,
                [item.message_id for item in holding.items],
                lease_token(self.identity.store_id, queue.number, family),
                holding.lease.consumer,
                policy.fail_reason(queue.spec, reason) if event == "fail" else reason,
            )

    def _move_deadline(
        self, batch: Batch, holding: Holding, deadline_ms: int, splits: dict[bytes, int]
    ) -> None:
        """Give the messages of a holding a new deadline, in a split of their own if they must."""
        lease = holding.lease
        keys = [item.key.to_bytes(8, "big") for item in holding.items]
        target = holding.name
        if len(keys) < len(lease.ids):
            target = self.leases.next_split(target, splits)
            self.active.relabel(batch, holding.queue, holding.items, target)
        self.leases.let_go(batch, holding.name, lease, set(keys))
        self.leases.put(
            batch,
            target,
            keys,
            deadline_ms,
            lease.claimed_at_ms,
            holding.queue.number,
            lease.consumer,
        )

    # --- judging ---------------------------------------------------------------------------

    def _judge(
        self, receipts: Sequence[str], queue_name: str | None, now_ms: int
    ) -> tuple[list[Holding], list[Answer]]:
        """Find out which receipts are good: messages by lease, and an answer to each receipt."""
        tokens, keys = parse_receipts(self.identity.store_id, receipts)
        numbers = set(map(_queue_of, tokens))
        if queue_name is not None and numbers - {self.queue(queue_name).number}:
            raise InvalidReceipt(f"a receipt is of another queue than {queue_name!r}")
        items = self._in_flight(tokens, keys, numbers)
        names = {item.lease for item in items if item is not None}
        leases = self.leases.read(names, self.quarantine)
        holdings: dict[bytes, Holding] = {}
        answers: list[Answer] = [OutcomeStatus.STALE] * len(receipts)
        seen: set[tuple[int, int]] = set()
        token: LeaseToken | None = None
        name = b""
        lease: LeaseRecord | None = None
        for place, item in enumerate(items):
            if item is None:
                continue
            # Receipts that follow one another are mostly of one lease.
            if item.lease is not name or tokens[place] is not token:
                token, name = tokens[place], item.lease
                is_its = name[:FAMILY_BYTES] == token.family
                lease = leases.get(name)
            if not is_its or (token.queue, item.key) in seen:
                continue
            if lease is None or lease.expiry_ms <= now_ms:
                answers[place] = OutcomeStatus.EXPIRED
                continue
            seen.add((token.queue, item.key))
            holding = holdings.get(name)
            if holding is None:
                holding = holdings[name] = Holding(self.by_number[token.queue], name, lease, [])
            holding.items.append(item)
            answers[place] = item
        self.stale_receipts += len(receipts) - len(seen)
        if not holdings:
            self.settle_quarantine(now_ms)
        return list(holdings.values()), answers

    def _in_flight(
        self, tokens: Sequence[LeaseToken], keys: Sequence[int], numbers: set[int]
    ) -> list[Item | None]:
        """Look up the messages of receipts, which are of the queues with these numbers."""
        found: list[Item | None] = [None] * len(keys)
        for number in numbers:
            queue = self.by_number.get(number)
            if queue is not None and len(numbers) == 1:
                return self.active.find(queue, keys)
            if queue is not None:
                places = [place for place, token in enumerate(tokens) if token.queue == number]
                items = self.active.find(queue, [keys[place] for place in places])
                for place, item in zip(places, items, strict=True):
                    found[place] = item
        return found


def outcomes_of(
    receipts: Sequence[str],
    answers: Sequence[Answer],
    status: OutcomeStatus,
    *,
    deadline_ms: int | None = None,
    failed: Collection[int] = (),
) -> list[Outcome]:
    """Answer each receipt; ``failed`` holds the identities of items that are out of attempts."""
    if set(map(type, answers)) == {Item} and not failed:
        return [Outcome(receipt, status, deadline_ms) for receipt in receipts]
    outcomes = []
    for receipt, answer in zip(receipts, answers, strict=True):
        if isinstance(answer, OutcomeStatus):
            outcomes.append(Outcome(receipt, answer))
        elif failed and id(answer) in failed:
            outcomes.append(Outcome(receipt, OutcomeStatus.FAILED))
        else:
            outcomes.append(Outcome(receipt, status, deadline_ms))
    return outcomes
