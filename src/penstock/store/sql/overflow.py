"""Queues with limits: room for messages, and the fall of the oldest from a queue that is full.

The counters of a queue are in many rows, and no verb locks all of them: publishes under way
at one moment do not see each other, and may together pass a limit. A process that drops messages
locks the queue first, so that two of them do not drop twice as many.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.store import room
from penstock.store.sql.database import columns
from penstock.store.sql.session import EACH_MS, SLOTS, SqlSession

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.store.sql.session import SqlQueue

# Messages that one transaction drops.
DROP_MESSAGES: Final = 1_000


class Load(NamedTuple):
    """The messages of a queue that wait or are in flight, and the bytes of their payloads."""

    live: int = 0
    live_bytes: int = 0


class SqlOverflow(SqlSession):
    """The checks of limits, and the dropping of messages."""

    def _loads(self, queues: Iterable[SqlQueue]) -> dict[int, Load]:
        numbers = [queue.number for queue in queues]
        if not numbers:
            return {}
        rows = self.database.ask("sum_load", queues=numbers)
        return {number: Load(live, size) for number, live, size in rows}

    def check_room(self, added: dict[SqlQueue, int], added_bytes: dict[SqlQueue, int]) -> None:
        """Refuse messages if one of the queues that they come into has no room for them."""
        limited = [queue for queue in added if queue.name in self.limited]
        loads = self._loads(limited)
        for queue in limited:
            load = loads.get(queue.number, Load())
            room.check_room(queue.spec, *load, added[queue], added_bytes[queue])

    def drop_excess(
        self, now_ms: int, budget: int, queues: Iterable[SqlQueue] | None = None
    ) -> int:
        """Let the oldest waiting messages of queues fail that are over a limit; return how many."""
        if not self.limited:
            return 0
        if queues is None:
            queues = [self.by_name[name] for name in self.limited if name in self.by_name]
        dropping = {queue.number: queue for queue in queues if room.drops_oldest(queue.spec)}
        dropped = 0
        for number, load in self._loads(dropping.values()).items():
            queue = dropping[number]
            while dropped < budget and room.is_over(queue.spec, *load):
                some = min(DROP_MESSAGES, budget - dropped)
                count, load = self.change(partial(self._drop, queue, some, now_ms))  # noqa: PLW2901
                dropped += count
                if not count:
                    # The messages left are in flight.
                    break
        return dropped

    def _drop(self, queue: SqlQueue, limit: int, now_ms: int) -> tuple[int, Load]:
        """Drop the oldest messages of a queue, up to a limit; return how many, and what is left."""
        database, spec = self.database, queue.spec
        own = {"queue": queue.number}
        if not database.run("lock_queue", number=queue.number):
            return 0, Load()
        load = self._loads([queue]).get(queue.number, Load())
        count = min(limit, room.guess_excess(spec, *load))
        rows = database.run("oldest_waiting", **own, count=count)
        ids = [row[0] for row in rows]
        ids = ids[: room.count_excess(spec, *load, [row[1] for row in rows])]
        if not ids:
            return 0, load
        if queue.fifo:
            # Before the items, as every transaction locks them.
            zones = [
                (queue.number, row[0]) for row in database.run("zones_of", **own, message_ids=ids)
            ]
            database.run("lock_pointers", **columns(zones, "queues", "zones"))
        gone = database.run(
            "drop_items",
            **own,
            message_ids=ids,
            why=room.drop_reason(spec).encode(),
            slots=SLOTS,
            slot=self.slot,
            each_ms=EACH_MS,
            now_ms=now_ms,
        )
        if queue.fifo:
            self.zones.lower({(queue.number, row[1]): now_ms for row in gone}, now_ms)
        self._note_failed(queue, len(gone), now_ms)
        return len(gone), Load(load.live - len(gone), load.live_bytes - sum(r[2] for r in gone))

    def _note_failed(self, queue: SqlQueue, count: int, now_ms: int) -> None:
        """Note that messages of a queue have failed: claims, retention, dead letters."""
        self.wake(queue, count)
        if queue.spec.failed_retention_ms:
            self.due_for_retention(now_ms + queue.spec.failed_retention_ms)
        if queue.spec.dead_letter:
            self.due(now_ms)
