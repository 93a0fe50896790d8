"""A claim ends: ack, release, extend, and leases that expire. The database judges every receipt.

A receipt is good while its item is held under its lease and the deadline is ahead. Each item has
its own deadline, so that a lease need not be split when a part of it is extended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from penstock.errors import InvalidReceipt
from penstock.limits import MAX_ATTEMPTS
from penstock.model import Outcome, OutcomeStatus
from penstock.store import policy
from penstock.store.codec.claimed import (
    lease_token,
    parse_lease_token,
    parse_receipts,
    queue_numbers,
)
from penstock.store.life import life, log_step
from penstock.store.sql.database import columns
from penstock.store.sql.session import EACH_MS, SLOTS, SqlOverflow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.store.sql.connection import Row
    from penstock.store.sql.session import SqlQueue
    from penstock.store.sql.zones import Zone

# As the table attempts has it; the last is that of an attempt under way.
ACKED, RELEASED, EXPIRED = 0, 1, 2
ENDINGS: Final = ("acked", "released", "expired", "running")
# Expired items that one transaction ends.
EXPIRE_CHUNK: Final = 1_000
# Why a message has failed whose last lease is over.
LEASE_EXPIRED: Final = "lease expired"

# Queue, message, lease.
_Key = tuple[int, int, bytes]


class SqlSettle(SqlOverflow):
    """The verbs that take receipts."""

    def ack(self, receipts: Sequence[str], *, queue_name: str | None, now_ms: int) -> list[Outcome]:
        """Settle messages as done."""
        keys = self.keys_of(receipts, queue_name)
        doubts = self.database.doubts
        # In a FIFO queue other items of the zone may be next.
        is_standard = all(self._is_standard(number) for number in {key[0] for key in keys})
        judged = self._ack_lease(keys, now_ms) if is_standard else {}
        others = keys if not judged else [key for key in keys if key not in judged]
        verb = "ack" if is_standard else "ack_fifo"
        own = {"slots": SLOTS, "each_ms": EACH_MS}
        judged |= self._settle(verb, others, OutcomeStatus.DONE, now_ms, now_ms, **own)
        if self.database.doubts > doubts:
            judged |= {key: OutcomeStatus.DONE for key, _ in self._settled_before(keys, ACKED)}
        for number in {key[0] for key, status in judged.items() if status is OutcomeStatus.DONE}:
            queue = self.numbered(number)
            if queue is not None:
                if queue.fifo:
                    self.wake(queue)
                if queue.spec.done_retention_ms:
                    self.due_for_retention(now_ms + queue.spec.done_retention_ms)
        return self.outcomes_of(receipts, keys, judged)

    def _ack_lease(self, keys: Sequence[_Key], now_ms: int) -> dict[_Key, OutcomeStatus]:
        """Settle as done what is held in time, if all receipts are of one lease."""
        if len({(number, lease) for number, _, lease in keys}) != 1:
            return {}
        number, _, lease = keys[0]
        rows = self.run_alone(
            "ack_lease",
            now_ms,
            queue=number,
            lease=lease,
            message_ids=[message_id for _, message_id, _ in keys],
            slots=SLOTS,
            each_ms=EACH_MS,
        )
        if life.level:
            held = [(number, message_id, lease, True, None, who) for message_id, who in rows]
            self.log_settled("ack", held)
        return {(number, message_id, lease): OutcomeStatus.DONE for message_id, _ in rows}

    def extend(
        self, receipts: Sequence[str] | str, *, lease_ms: int, queue_name: str | None, now_ms: int
    ) -> list[Outcome]:
        """Move the deadline of receipts, or of everything that is still held under a lease token.

        The rest of a lease keeps its own deadline.
        """
        if isinstance(receipts, str):
            receipts = list(self.held(receipts).values())
        keys = self.keys_of(receipts, queue_name)
        until_ms = now_ms + lease_ms
        judged = self._settle(
            "extend", keys, OutcomeStatus.EXTENDED, until_ms, now_ms, deadline_ms=until_ms
        )
        if keys:
            self.due(until_ms)
        return self.outcomes_of(receipts, keys, judged, until_ms)

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

        with self.zones.recheck_if_slow(zones):
            rows = self.run_alone(statement, now_ms, **_columns(keys), **parameters)
            zones |= {(row[0], row[4]): zone_ms for row in rows if row[4] is not None}
        if life.level:
            self.log_settled(statement.partition("_")[0], [row for row in rows if row[3]])
        return {
            (queue, message_id, lease): status if good else OutcomeStatus.EXPIRED
            for queue, message_id, lease, good, *_ in rows
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
        keys = self.keys_of(receipts, queue_name)
        doubts = self.database.doubts
        judged: dict[_Key, OutcomeStatus] = {}
        if keys:
            rows = self._release(keys, delay_ms, reason, random, now_ms, unseen=unseen)
            for row in rows:
                status = OutcomeStatus.RETRYING if row[3] else OutcomeStatus.EXPIRED
                judged[key_of(row)] = status
            failed = self._fail(rows, RELEASED, reason, reason, now_ms)
            for row in rows:
                if row[6]:
                    # Else its lease has ended in another way meanwhile.
                    judged.pop(key_of(row))
            judged |= {key_of(row): OutcomeStatus.FAILED for row in failed}
            if life.level:
                told = [row for row in rows if row[3] and not row[6]] + failed
                self.log_settled("release", told, "unseen" if unseen else reason)
                self.log_settled("fail", failed, reason)
        if self.database.doubts > doubts:
            for each, over in self._settled_before(keys, RELEASED):
                judged[each] = OutcomeStatus.FAILED if over else OutcomeStatus.RETRYING
        return self.outcomes_of(receipts, keys, judged)

    def _release(
        self,
        keys: Sequence[_Key],
        delay_ms: int | None,
        reason: str,
        random: Callable[[], float],
        now_ms: int,
        *,
        unseen: bool,
    ) -> list[Row]:
        own = []
        for number in {key[0] for key in keys}:
            queue = self.numbered(number)
            if delay_ms is not None or queue is None:
                # It doubles from itself up to itself.
                own.append((number, delay_ms or 0, delay_ms or 0))
            else:
                own.append((number, queue.spec.backoff_base_ms, queue.spec.backoff_cap_ms))
        return self._end_attempts(
            "release",
            RELEASED,
            reason,
            now_ms,
            **_columns(keys),
            **columns(own, "own", "delays", "caps"),
            randoms=[random() for _ in keys] if delay_ms is None else [0.0],
            unseen=int(unseen),
        )

    def expire(self, now_ms: int, budget: int, queue: SqlQueue | None = None) -> tuple[int, int]:
        """End leases whose deadline has come; return how many, and how many messages failed."""
        leases = failures = 0
        queues = list(self.by_number) if queue is None else [queue.number]
        more = bool(self.database.ask("any_expired", queues=queues, now_ms=now_ms))
        while more and budget > 0:
            count = min(EXPIRE_CHUNK, budget)
            own = {"queues": queues, "count": count, "unseen": 0}
            rows = self._end_attempts("expire", EXPIRED, "", now_ms, **own)
            failed = self._fail(rows, EXPIRED, "", LEASE_EXPIRED, now_ms)
            failures += len(failed)
            # Of those that were to fail, another process may have been faster.
            ended = [row for row in rows if not row[6]] + failed
            leases += len({row[2] for row in ended})
            if life.level:
                self.log_settled("expire", ended)
                self.log_settled("fail", failed, LEASE_EXPIRED)
            budget -= len(rows)
            more = len(rows) == EXPIRE_CHUNK
        return leases, failures

    # --- the end of attempts ---------------------------------------------------------------

    def run_alone(self, statement: str, now_ms: int, **parameters: Any) -> list[Row]:
        """Run a statement that changes items, and may lower pointers, by itself."""
        lowers = "stamp" in self.database.parameters(statement)

        def work() -> list[Row]:
            own: dict[str, Any] = {}
            if lowers:
                # Of each attempt its own.
                own = {"turn": self.take_turns(1), "stamp": self.stamp(), "threshold_ms": 0}
            return self.database.run(statement, **parameters, **own, slot=self.slot, now_ms=now_ms)

        rows = self.database.do(work, again=True)
        self.progress.commits += 1
        return rows

    def _end_attempts(
        self, statement: str, ending: int, reason: str, now_ms: int, **parameters: Any
    ) -> list[Row]:
        """Let items wait again whose attempts end; return them, and those that are to fail."""
        zones: dict[Zone, int] = {}
        with self.zones.recheck_if_slow(zones):
            rows = self.run_alone(
                statement,
                now_ms,
                ending=ending,
                reason=reason.encode(),
                most_attempts=MAX_ATTEMPTS,
                **parameters,
            )
            for number, _, _, in_time, zone, _, fails, until_ms in rows:
                queue = self.numbered(number)
                if queue is None or not in_time or fails:
                    continue
                self.wake(queue)
                self.due(until_ms)
                if queue.spec.unclaimed_retention_ms:
                    self.due(until_ms + queue.spec.unclaimed_retention_ms)
                zone_ms = now_ms if queue.fifo else max(until_ms, now_ms)
                key = (number, zone)
                zones[key] = min(zone_ms, zones.get(key, zone_ms))
        return rows

    def _fail(
        self, ended: Sequence[Row], ending: int, reason: str, why: str, now_ms: int
    ) -> list[Row]:
        """Let those items fail that are out of attempts; return which did."""
        keys = [key_of(row) for row in ended if row[6]]
        if not keys:
            return []
        zones: dict[Zone, int] = {}
        with self.zones.recheck_if_slow(zones):
            rows = self.run_alone(
                "fail",
                now_ms,
                **_columns(keys),
                slots=SLOTS,
                each_ms=EACH_MS,
                most_attempts=MAX_ATTEMPTS,
                late=ending == EXPIRED,
                ending=ending,
                reason=reason.encode(),
                why=why.encode(),
            )
            zones |= {(row[0], row[4]): now_ms for row in rows if row[4] is not None}
        for number in {row[0] for row in rows}:
            queue = self.numbered(number)
            if queue is not None:
                self._note_failed(queue, sum(row[0] == number for row in rows), now_ms)
        return rows

    def log_settled(self, event: str, rows: Sequence[Row], reason: str = "") -> None:
        """Write a record of the life-cycle log for each lease."""
        leases: dict[tuple[int, bytes], list[Row]] = {}
        for row in rows:
            leases.setdefault((row[0], row[2]), []).append(row)
        for (number, lease), held in leases.items():
            queue = self.numbered(number)
            if queue is not None:
                log_step(
                    event,
                    queue.name,
                    [row[1] for row in held],
                    lease_token(self.store_id, number, lease),
                    bytes(held[0][5]).decode(),
                    policy.fail_reason(queue.spec, reason) if event == "fail" else reason,
                )

    def _is_standard(self, number: int) -> bool:
        queue = self.by_number.get(number)
        return queue is not None and not queue.fifo

    # --- receipts --------------------------------------------------------------------------

    def _settled_before(self, keys: Sequence[_Key], ending: int) -> list[tuple[_Key, bool]]:
        """Return the receipts that a lost attempt of this verb had settled; whether they failed."""
        own = columns(keys, "queues", "message_ids", "leases")
        rows = self.database.ask("find_ended", **own, ending=ending)
        return [((queue, message_id, lease), over) for queue, message_id, lease, over in rows]

    def keys_of(self, receipts: Sequence[str], queue_name: str | None) -> list[_Key]:
        """Read receipts, of one queue if it is named."""
        keys = [
            (token.queue, message_id, token.family + b"\0\0")
            for token, message_id in zip(*parse_receipts(self.store_id, receipts), strict=True)
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

    def outcomes_of(
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
        with self.memory:
            self.stale_receipts += sum(not outcome.ok for outcome in outcomes)
        return outcomes


def key_of(row: Row) -> _Key:
    """Return the receipt of a row that a statement has returned: queue, message, lease, ..."""
    return cast("_Key", row[:3])


def _columns(keys: Sequence[_Key]) -> dict[str, list[Any]]:
    """Return the receipts as statements take them."""
    return {
        "queues": list({number for number, _, _ in keys}),
        "message_ids": list({message_id for _, message_id, _ in keys}),
        "receipts": [lease + b"%d" % message_id for _, message_id, lease in set(keys)],
    }
