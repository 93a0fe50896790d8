"""Publish, claim and settle over several databases that are one store."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from penstock.errors import InvalidReceipt, PenstockError, QueueNotFound, StorageFailed
from penstock.filters import Matcher, parse
from penstock.limits import MAX_CLAIM_BYTES
from penstock.store.contract import FiltersChanged
from penstock.store.receipts import parse_lease_token, parse_receipts
from penstock.store.sql.joining import shares
from penstock.store.sql.tokens import cluster_of_group, cluster_of_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.model import Delivery, Message, Outcome
    from penstock.store.plans import Want
    from penstock.store.sql.agreeing import Agreement
    from penstock.store.sql.members import Member
    from penstock.store.sql.store import SqlStore

__all__ = ["Spreading"]

log = logging.getLogger(__name__)

# Parts of a publish that find queues to have changed, one after the other, before it is an error.
_TRIES: Final = 100


class Spreading:
    """The verbs that go to the database of a group or of a receipt."""

    def __init__(
        self,
        members: Sequence[Member],
        agreement: Agreement,
        live_filters: Callable[[], dict[str, str]],
    ) -> None:
        self._members = members
        self._agreement = agreement
        self._live_filters = live_filters
        self._truth = members[0]
        self._store_id = self._truth.core.identity.store_id
        # Queue -> the database that its next claim begins with.
        self._turns: dict[int, int] = {}

    def welcome(self, now_ms: int) -> None:
        """Bring databases up to date that were away."""
        for member in self._members:
            if not member.returned:
                continue
            try:
                with member.use() as store:
                    store.core.reload()
                if member is not self._truth and self._truth.up:
                    self._agreement.settle(member, now_ms)
            except StorageFailed:
                if member.up and self._truth.up:
                    raise
                continue
            member.returned = False
            for queue in member.core.queues.values():
                # Claims that wait have not looked there.
                member.core.wake(queue)

    # --- publish -----------------------------------------------------------------------------

    def publish(
        self,
        messages: Sequence[Message],
        routes: Sequence[Sequence[str]] | None,
        *,
        dedup_window_ms: int,
        now_ms: int,
    ) -> list[int]:
        """Store messages, those of each database together; return their ids.

        If one of several databases fails, StorageFailed says what is stored.
        """
        assert routes is not None, "several databases route inline"
        self.welcome(now_ms)
        parts: dict[int, list[int]] = {}
        for nth, message in enumerate(messages):
            parts.setdefault(cluster_of_group(message.group, len(self._members)), []).append(nth)
        for number in parts:
            self._members[number].check()
        ids = [0] * len(messages)
        stored = 0
        for number, nths in sorted(parts.items()):
            member = self._members[number]
            part = [messages[nth] for nth in nths]
            own = [routes[nth] for nth in nths]
            try:
                found = self._publish(
                    member, part, own, dedup_window_ms, now_ms, again=bool(stored)
                )
            except FiltersChanged:
                raise
            except PenstockError as error:
                if not stored:
                    raise
                raise StorageFailed(
                    f"{stored} of {len(messages)} messages are stored, but those that belong to "
                    f"{member.name} may not be: {error}. What has a dedup id can be published again"
                ) from error
            for nth, message_id in zip(nths, found, strict=True):
                ids[nth] = message_id
            stored += len(nths)
        return ids

    def _publish(
        self,
        member: Member,
        messages: Sequence[Message],
        routes: Sequence[Sequence[str]],
        dedup_window_ms: int,
        now_ms: int,
        *,
        again: bool,
    ) -> list[int]:
        """Publish to one database; ``again``: route anew if queues have changed.

        Who has stored nothing yet leaves that to the broker.
        """
        for _ in range(_TRIES):
            try:
                with member.use() as store:
                    return store.publish(
                        messages, routes, dedup_window_ms=dedup_window_ms, now_ms=now_ms
                    )
            except FiltersChanged:
                missing = any(name not in member.core.queues for names in routes for name in names)
                if missing and member is not self._truth:
                    self._agreement.settle(member, now_ms)
                if not again:
                    raise
                live = self._live_filters()
                matcher = Matcher({name: parse(text) for name, text in sorted(live.items())})
                routes = matcher.match(
                    [(m.attributes, m.group, m.priority, now_ms, len(m.payload)) for m in messages]
                )
        raise PenstockError("queues are being changed faster than messages can be published")

    # --- claim -------------------------------------------------------------------------------

    def claim(self, queue_name: str, wants: Sequence[Want], now_ms: int) -> list[list[Delivery]]:
        """Take messages for several claims at once, each under one lease, whatever they are from.

        A batch is shared between the databases by the groups that have something to give.
        """
        self.welcome(now_ms)
        queue = self._truth.queue(queue_name)
        turn = self._turns.get(queue.number)
        if turn is None:
            turn = int(self._truth.core.random() * len(self._members))
        order = [
            self._members[(turn + at) % len(self._members)] for at in range(len(self._members))
        ]
        baskets = _Baskets(wants)
        claim = _Claim(self._agreement, queue_name, baskets, now_ms)
        zones = dict.fromkeys(order, 1)
        if baskets.room > 1:
            zones = {member: claim.ready_zones(member) for member in order}
            ready = [member for member in order if zones[member]]
            for member, quota in zip(
                ready, shares(baskets.room, [zones[each] for each in ready]), strict=True
            ):
                if quota and claim.take(member, quota) < quota:
                    zones[member] = 0
        for member in order:
            # One that seemed to have nothing is asked if nothing was found at all: it looks closer.
            if baskets.room and (zones[member] or not baskets.any):
                claim.take(member, baskets.room)
        if not all(baskets.deliveries):
            # Whoever waits, waits for all of them, also for those that were not asked.
            for member in order:
                member.store.watch(queue_name, now_ms)
        # Behind the first that gave something, so that one behind those without has no turn more.
        self._turns[queue.number] = (claim.gave[0].number if claim.gave else turn) + 1
        if claim.error is not None and not baskets.any and len(claim.failed) == len(order):
            raise claim.error
        return baskets.deliveries

    # --- receipts ----------------------------------------------------------------------------

    def ack(self, receipts: Sequence[str], *, queue_name: str | None, now_ms: int) -> list[Outcome]:
        """Settle messages as done."""
        return self._settle(
            receipts, queue_name, lambda store, own: store.ack(own, queue_name=None, now_ms=now_ms)
        )

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
        """Give messages back to be tried again, or to fail."""
        return self._settle(
            receipts,
            queue_name,
            lambda store, own: store.release(
                own, delay_ms=delay_ms, reason=reason, random=random, queue_name=None,
                now_ms=now_ms, unseen=unseen,
            ),
        )  # fmt: skip

    def extend(
        self, receipts: Sequence[str], *, lease_ms: int, queue_name: str | None, now_ms: int
    ) -> list[Outcome]:
        """Move the deadline of receipts."""
        return self._settle(
            receipts,
            queue_name,
            lambda store, own: store.extend(
                own, lease_ms=lease_ms, queue_name=None, now_ms=now_ms
            ),
        )  # fmt: skip

    def extend_lease(
        self, token: str, *, lease_ms: int, queue_name: str | None, now_ms: int
    ) -> list[Outcome]:
        """Move the deadline of everything held under a lease, but for what is away."""
        receipts = list(self.held(token).values())
        return self.extend(receipts, lease_ms=lease_ms, queue_name=queue_name, now_ms=now_ms)

    def held(self, token: str) -> dict[int, str]:
        """Return the receipts of what is held under a lease, by message id."""
        parse_lease_token(self._store_id, token)
        found: dict[int, str] = {}
        for member in self._members:
            try:
                with member.use() as store:
                    found |= store.held(token)
            except StorageFailed:
                if member.up:
                    raise
        if not any(member.up for member in self._members):
            self._truth.check()
        return found

    def _settle(
        self,
        receipts: Sequence[str],
        queue_name: str | None,
        settle: Callable[[SqlStore, list[str]], list[Outcome]],
    ) -> list[Outcome]:
        """Take receipts to their databases; nothing is done if one of these is known to be away."""
        parsed = parse_receipts(self._store_id, receipts)
        if queue_name is not None:
            number = self._truth.queue(queue_name).number
            if any(token.queue != number for token, _ in parsed):
                raise InvalidReceipt(f"a receipt is of another queue than {queue_name!r}")
        parts: dict[int, list[int]] = {}
        for nth, (_, message_id) in enumerate(parsed):
            cluster = cluster_of_id(message_id)
            # One that no database can have given out is stale in any of them.
            parts.setdefault(cluster if cluster < len(self._members) else 0, []).append(nth)
        for cluster in parts:
            self._members[cluster].check()
        outcomes: dict[int, Outcome] = {}
        for cluster, nths in sorted(parts.items()):
            with self._members[cluster].use() as store:
                judged = settle(store, [receipts[nth] for nth in nths])
            outcomes.update(zip(nths, judged, strict=True))
        return [outcomes[nth] for nth in range(len(receipts))]


class _Baskets:
    """What claims that are served together have got so far."""

    def __init__(self, wants: Sequence[Want]) -> None:
        self._wants = wants
        self._bytes = [0] * len(wants)
        self.deliveries: list[list[Delivery]] = [[] for _ in wants]

    def _left(self, nth: int) -> int:
        full = self._bytes[nth] >= MAX_CLAIM_BYTES
        return 0 if full else self._wants[nth].limit - len(self.deliveries[nth])

    @property
    def room(self) -> int:
        """How many more messages they get."""
        return sum(map(self._left, range(len(self._wants))))

    @property
    def any(self) -> bool:
        """Whether there is anything in them."""
        return any(self.deliveries)

    def wants(self, quota: int) -> dict[int, Want]:
        """Return what is wanted still, up to so many messages, in order."""
        found = {}
        for nth, want in enumerate(self._wants):
            limit = min(quota, self._left(nth))
            if limit:
                quota -= limit
                most_bytes = MAX_CLAIM_BYTES - self._bytes[nth]
                found[nth] = want._replace(limit=limit, most_bytes=most_bytes)
        return found

    def put(self, nth: int, deliveries: Sequence[Delivery]) -> None:
        """Add to one of them."""
        self.deliveries[nth] += deliveries
        self._bytes[nth] += sum(len(delivery.payload) for delivery in deliveries)


class _Claim:
    """Claims of one queue, while they go from database to database."""

    def __init__(
        self, agreement: Agreement, queue_name: str, baskets: _Baskets, now_ms: int
    ) -> None:
        self._agreement = agreement
        self._queue_name = queue_name
        self._baskets = baskets
        self._now_ms = now_ms
        # Those that gave something, in order; those that did not answer.
        self.gave: list[Member] = []
        self.failed: set[Member] = set()
        self.error: StorageFailed | None = None

    def ready_zones(self, member: Member) -> int:
        """Return how many groups of a database seem to have something."""
        return self._ask(member, lambda store: store.ready_zones(self._queue_name, self._now_ms))

    def take(self, member: Member, quota: int) -> int:
        """Take up to so many messages from a database; say how many it gave."""

        def claim(store: SqlStore) -> int:
            wants = self._baskets.wants(quota)
            answers = store.claim(self._queue_name, list(wants.values()), self._now_ms)
            for nth, answer in zip(wants, answers, strict=True):
                self._baskets.put(nth, answer)
            if any(answers):
                self.gave.append(member)
            return sum(map(len, answers))

        return self._ask(member, claim)

    def _ask(self, member: Member, ask: Callable[[SqlStore], int]) -> int:
        """Ask a database; one that is away, or whose answer is lost, gives nothing."""
        if member in self.failed:
            return 0
        try:
            try:
                with member.use() as store:
                    return ask(store)
            except QueueNotFound:
                # It has gone everywhere, or has not come here yet, or has been drained here.
                if member.number == 0:
                    raise
                self._agreement.settle(member, self._now_ms)
                if self._queue_name not in member.core.queues:
                    return 0
                with member.use() as store:
                    return ask(store)
        except StorageFailed as error:
            self.failed.add(member)
            self.error = error
            if member.up:
                log.warning("%s of the store gave nothing to claim: %s", member.name, error)
            return 0
