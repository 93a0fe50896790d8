"""Messages go out to workers: claim."""

from __future__ import annotations

from itertools import chain, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from penstock import limits
from penstock.engines import get_each
from penstock.errors import CorruptRecord, StoreDamaged
from penstock.model import LeaseRequest
from penstock.store.codec.claimed import ClaimedMessages, lease_token
from penstock.store.codec.metadata import decode_heads, decode_metadata
from penstock.store.codec.opendata import PAYLOAD
from penstock.store.kv.maintain import MaintainVerbs
from penstock.store.kv.state import verb
from penstock.store.life import life, log_step
from penstock.store.live import group_of, uncount_attempt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engines import Batch
    from penstock.store.codec.metadata import Head, Metadata
    from penstock.store.kv.queues import Queue
    from penstock.store.live import Item

# How much due work one claim does before it takes its messages.
CATCH_UP_BUDGET: Final = 1_000
# How many unreadable messages one claim passes over to find readable ones.
UNREAD_BUDGET: Final = 1_000
_metadata_of: Final = attrgetter("metadata")
_rows_of: Final = attrgetter("rows")


class _Claim(msgspec.Struct):
    """One of the claims that are served together, under a lease of its own."""

    want: LeaseRequest
    lease: bytes
    answer: ClaimedMessages
    keys: list[bytes] = []
    size: int = 0
    full: bool = False


class ClaimVerbs(MaintainVerbs):
    """``claim``."""

    @verb
    def claim(
        self, queue_name: str, wants: Sequence[LeaseRequest], now_ms: int
    ) -> list[ClaimedMessages]:
        """Take messages for several claims in one scan and one commit, each under its own lease.

        They are served in order: the last ones may get nothing. A claim passes over unreadable
        messages. It answers "nothing" only after it has read everything that there may be, and
        raises instead as long as unreadable messages wait.
        """
        unseen = None
        if self.is_due(now_ms):
            try:
                self.catch_up(now_ms, CATCH_UP_BUDGET)
            except StoreDamaged as error:
                # Some messages whose lease or delay is over may not have come back.
                unseen = error
        queue, active = self.by_name.get(queue_name) or self.queue(queue_name), self.active
        if unseen is not None and not (queue.counts.in_flight or queue.counts.delayed):
            unseen = None
        if active.damage or active.passed:
            unseen = unseen or active.unseen(queue)
        if not active.ready_groups(queue):
            if unseen is not None:
                raise unseen.anew()
            return [ClaimedMessages() for _ in wants]
        answers, unread = self._serve(queue, wants, now_ms)
        passed = 0
        while unread and passed < UNREAD_BUDGET and not any(map(_rows_of, answers)):
            # Messages behind the unreadable ones may be readable.
            passed += len(unread)
            unseen = unread[0]
            answers, unread = self._serve(queue, wants, now_ms)
        if active.damage or active.passed:
            unseen = unseen or active.unseen(queue)
        if unseen is not None:
            if not any(map(_rows_of, answers)):
                raise unseen.anew()
            # Claims that wait are to be told as well.
            self.wake(queue)
        return answers

    def _serve(
        self, queue: Queue, wants: Sequence[LeaseRequest], now_ms: int
    ) -> tuple[list[ClaimedMessages], list[StoreDamaged]]:
        """Take messages; return them, and why some messages were passed over."""
        batch = self.begin()
        claims, answers = [], []
        for want in wants:
            # The last two bytes number the splits of a lease.
            lease = want.lease[:14] + b"\0\0"
            token = lease_token(self.identity.store_id, queue.number, lease)
            answer = ClaimedMessages(queue.name, token, now_ms + want.lease_ms)
            claims.append(_Claim(want, lease, answer))
            answers.append(answer)
        if queue.fifo:
            # A group of a FIFO queue is in one lease at a time, so claims can't share a scan.
            broken = [item for it in claims for item in self._take(batch, queue, (it,), now_ms)]
        else:
            broken = self._take(batch, queue, claims, now_ms)
        taken = 0
        for claim in claims:
            if claim.keys:
                taken += len(claim.keys)
                deadline_ms, consumer = claim.answer.deadline_ms, claim.want.consumer
                self.leases.put(
                    batch, claim.lease, claim.keys, deadline_ms, now_ms, queue.number, consumer
                )
        queue.counts.claimed_total += taken
        if taken or len(batch) or self.has_aside:
            self.commit(batch, (queue,), now_ms)
        if broken:
            self.log_removed(queue, broken, "broken")
        if life.level:
            for claim in claims:
                ids = [row[0] for row in claim.answer.rows]
                log_step("claim", queue.name, ids, claim.answer.token, claim.want.consumer)
        return answers, self.take_unread(queue) if self.active.unread else []

    def _take(
        self, batch: Batch, queue: Queue, claims: Sequence[_Claim], now_ms: int
    ) -> list[Item]:
        """Take until the claims have what they want, or all that they may, or there is no more.

        Return the messages that were removed, because they can't be delivered.
        """
        active = self.active
        broken: list[Item] = []
        while True:
            room = 0
            grants = []
            for claim in claims:
                if not claim.full:
                    wanted = claim.want.limit - len(claim.keys)
                    room += wanted
                    grants.append(repeat((claim.lease, claim.answer.deadline_ms), wanted))
            if not room:
                return broken
            taken = active.take(batch, queue, room, chain.from_iterable(grants), now_ms)
            if not taken:
                return broken
            # For the sizes: who gets the messages decodes the rest.
            found = decode_heads(list(map(_metadata_of, taken)))
            kept = self._within_bounds(batch, queue, taken, found, claims, now_ms)
            broken += self._deliver(batch, queue, kept, claims, now_ms)
            # A message that was put back stands before what this batch has taken: the batch can't
            # take from there.
            if len(kept) < len(taken) or active.unread:
                return broken

    def _within_bounds(
        self,
        batch: Batch,
        queue: Queue,
        taken: Sequence[Item],
        found: Sequence[Head | Metadata | None],
        claims: Sequence[_Claim],
        now_ms: int,
    ) -> Sequence[tuple[Item, Head | Metadata | None]]:
        """Put back what is too much for one answer, before any payload is read; give the rest."""
        sizes = [0 if metadata is None else metadata.size for metadata in found]
        together = 0
        for claim in claims:
            together += claim.size
        pairs = list(zip(taken, found, strict=True))
        if together + sum(sizes) < limits.MAX_CLAIM_BYTES:
            return pairs
        by_lease = {claim.lease: claim for claim in claims}
        kept, excess = [], []
        for pair, size in zip(pairs, sizes, strict=True):
            claim = by_lease[pair[0].lease]
            if claim.full or together >= limits.MAX_JOINT_CLAIM_BYTES:
                claim.full = True
                excess.append(pair[0])
            else:
                kept.append(pair)
                together += size
                claim.size += size
                claim.full = claim.size >= limits.MAX_CLAIM_BYTES
        if excess:
            self._untake(batch, queue, excess, now_ms)
            # Other claims that wait are to look again.
            self.wake(queue)
        return kept

    def _untake(self, batch: Batch, queue: Queue, items: Sequence[Item], now_ms: int) -> None:
        """Put messages back as if they had not been taken."""
        for item in items:
            uncount_attempt(item)
        self.active.put_back(batch, queue, items, now_ms)

    def _deliver(
        self,
        batch: Batch,
        queue: Queue,
        items: Sequence[tuple[Item, Head | Metadata | None]],
        claims: Sequence[_Claim],
        now_ms: int,
    ) -> list[Item]:
        """Read payloads and give messages to the claims.

        Messages without a payload are removed and returned. Those whose payload can't be read are
        put back, to be passed over from now on.
        """
        payload_keys = [PAYLOAD + item.message_id.to_bytes(8, "big") for item, _ in items]
        payloads = get_each(self.payloads.table, payload_keys)
        turns = iter(claims)
        claim: _Claim | None = None
        broken: list[Item] = []
        unread: dict[int, StoreDamaged] = {}
        back: list[Item] = []
        groups: set[bytes] = set()
        for (item, metadata), payload in zip(items, payloads, strict=True):
            if isinstance(payload, StoreDamaged):
                unread[item.key] = payload.anew()
                back.append(item)
                groups.add(group_of(item.lane))
                continue
            if groups and queue.fifo and group_of(item.lane) in groups:
                # It waits for the one before it.
                back.append(item)
                continue
            # Items come in the order of the grants.
            while claim is None or claim.lease != item.lease:
                claim = next(turns)
            if metadata is None or payload is None:
                self._set_aside(queue, item, payload)
                broken.append(item)
                continue
            row = (item.message_id, item.key, item.attempts, item.metadata, payload)
            if not claim.keys:
                claim.answer.waited_ms = max(0, now_ms - item.visible_at_ms)
            claim.answer.rows.append(row)
            claim.keys.append(item.key.to_bytes(8, "big"))
        if unread:
            self._untake(batch, queue, back, now_ms)
            self.active.pass_over(queue, unread)
        if broken:
            self.active.settle(batch, queue, broken)
            self.forget(batch, queue, broken)
        return broken

    def _set_aside(self, queue: Queue, item: Item, payload: object) -> None:
        """Keep a copy of what this queue had; other queues may hold a good one."""
        why = "the payload is missing"
        try:
            decode_metadata(item.metadata)
        except CorruptRecord as error:
            why = why if payload is None else str(error)
        key = queue.id + b"\0" + item.message_id.to_bytes(8, "big")
        self.quarantine("messages", key, item.metadata, why, remove=False)
