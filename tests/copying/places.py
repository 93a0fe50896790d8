"""A store with everything in it, and what every way of looking at a store shows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

import penstock
from penstock import Message, State

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from tests.sql.postgres import PostgresServer

    from penstock.broker.broker import Broker

KINDS = {
    "rocks-indexed": "rocksdb:{path}/{name}?design=indexed",
    "rocks-buckets": "rocksdb:{path}/{name}?design=buckets",
    "slate": "slatedb+file://{path}/{name}",
    "sql": "",
}
# Long enough that no lease and no delay is over while a test runs.
HOUR_MS = 3_600_000


class Places:
    """Makes URLs of stores that are not there."""

    def __init__(self, path: Path, request: pytest.FixtureRequest) -> None:
        self._path, self._request = path, request
        self._databases: list[str] = []

    def make(self, kind: str, name: str) -> str:
        if kind != "sql":
            return KINDS[kind].format(path=self._path, name=name)
        server: PostgresServer = self._request.getfixturevalue("postgres")
        self._databases.append(server.create())
        return server.url(self._databases[-1])

    def drop(self) -> None:
        for name in self._databases:
            self._request.getfixturevalue("postgres").drop(name)


def fill(broker: Broker, *, many: int = 0) -> None:
    """Bring messages into every state there is."""
    at_once: dict[str, Any] = {"max_attempts": 2, "backoff_base_ms": 0, "backoff_cap_ms": 0}
    broker.create_queue("orders", unclaimed_retention_ms=24 * HOUR_MS, description="all", **at_once)
    broker.create_queue("copies", filter="queue = 'orders' AND price > 10", bucket_exponent=4)
    broker.create_queue("lines", ordering="fifo", labels={"team": "a"})
    broker.create_queue("dead")
    broker.create_queue("risky", dead_letter="dead", **at_once)
    broker.create_queue("bad", **at_once)
    broker.create_queue("empty", delay_ms=500)
    for group in ("", "a", "b"):
        for priority in (0, 7):
            broker.publish(_messages("orders", 5, group=group, priority=priority))
            broker.publish(_messages("lines", 4, group=group))
    broker.publish(_messages("orders", 3, delay_ms=HOUR_MS))
    broker.publish(_messages("lines", 1, group="b", delay_ms=HOUR_MS))
    broker.publish(_messages("nobody", 3))
    broker.publish(_messages("risky", 4))
    broker.publish(_messages("bad", 6))
    route(broker)
    broker.ack([each.receipt for each in broker.claim("orders", limit=6, consumer="w1")])
    broker.update_queue("orders", bucket_exponent=3)
    broker.ack([each.receipt for each in broker.claim("orders", limit=4, consumer="w2")])
    broker.ack([each.receipt for each in broker.claim("lines", limit=2)])
    broker.ack([each.receipt for each in broker.claim("copies", limit=3)])
    for queue in ("bad", "risky"):
        for number in range(2):
            held = [each.receipt for each in broker.claim(queue, limit=9, consumer=f"bad {number}")]
            broker.release(held, delay_ms=0, reason=f"no, {number}")
    broker.sweep()
    failed = broker.browse("bad", state=State.FAILED)
    # Its attempts are forgiven.
    broker.redrive("bad", message_ids=[failed[0].message_id])
    broker.move("bad", "copies", state=State.FAILED, message_ids=[failed[1].message_id])
    # A backfill of this queue must pass over the messages that are there by a move.
    broker.create_queue("late", filter="queue = 'orders'")
    broker.move("orders", "late", state=State.AVAILABLE, limit=3)
    tried = broker.claim("orders", limit=2, lease_ms=HOUR_MS, consumer="busy")
    broker.release([tried[0].receipt], delay_ms=HOUR_MS, reason="later")
    broker.claim("lines", limit=1, lease_ms=HOUR_MS, consumer="busy too")
    broker.update_queue("copies", filter="queue = 'orders' AND price > 20")
    broker.publish(_messages("orders", 3, base=15))
    for _ in range(many // 1_000):
        broker.publish(_messages("orders", 1_000, group="many"))
    route(broker)
    # Whoever tails the log has not come to these.
    broker.publish(_messages("lines", 2, group="a"))
    broker.publish(_messages("nobody", 1))


def route(broker: Broker) -> None:
    if broker.info().routing == "pipeline":
        while penstock.route_once(broker):
            pass


def _messages(queue: str, count: int, *, base: int = 8, **fields: Any) -> list[Message]:
    return [
        Message(f"{queue} {n}".encode() * (n + 1), {"queue": queue, "price": base + n}, **fields)
        for n in range(count)
    ]


def show(broker: Broker, *, copied_at_ms: int | None = None) -> dict[str, Any]:
    """Return all that can be seen; of a source, as its copy of that time is to show it."""
    shown: dict[str, Any] = {"log": _log(broker)}
    for info in broker.queues():
        name = info.name
        stats = msgspec.structs.asdict(broker.stats(name))
        rows: list[Any] = []
        for state in State:
            cursor: str | None = None
            while True:
                page = broker.browse(name, state=state, limit=500, cursor=cursor)
                rows += [_row(broker, entry, copied_at_ms) for entry in page]
                cursor = page.next_cursor
                if cursor is None:
                    break
        if copied_at_ms is not None:
            stats["delayed"] += stats["in_flight"]
            stats["lease_expired_total"] += stats.pop("in_flight")
            stats["in_flight"] = 0
        for unlike in ("oldest_age_ms", "oldest_in_flight_ms", "groups_ready"):
            stats.pop(unlike)
        shown[name] = (info, stats, sorted(rows, key=lambda row: row[0].message_id))
    return shown


def _row(broker: Broker, entry: Any, copied_at_ms: int | None) -> tuple[Any, list[Any]]:
    attempts = list(broker.attempts(entry.queue, entry.message_id))
    if copied_at_ms is not None and entry.state is State.IN_FLIGHT:
        ended: dict[str, Any] = {"ended_at_ms": copied_at_ms, "reason": "copied"}
        ended["end"] = penstock.AttemptEnd.EXPIRED
        attempts[-1] = msgspec.structs.replace(attempts[-1], **ended)
        entry = msgspec.structs.replace(
            entry,
            state=State.DELAYED,
            visible_at_ms=entry.lease_deadline_ms,
            lease_deadline_ms=None,
            consumer=None,
        )
    return entry, attempts


def _log(broker: Broker) -> tuple[Any, ...]:
    stats = broker.log_stats()
    records = []
    for log in stats.cursors:
        at = stats.earliest
        while at < stats.end:
            page = broker.read_log(log, begin=at, limit=1_000)
            records += page.records
            if page.cursor.end == at:
                break
            at = page.cursor.end
    records.sort(key=lambda each: each.message_id)
    about = {"routing": stats.routing, "earliest": stats.earliest, "epoch": stats.epoch}
    if stats.routing == "pipeline":
        about["routed_up_to"] = stats.routed_up_to
    return about, records


def work_off(broker: Broker) -> dict[str, list[int]]:
    """Claim and ack all that can be claimed; return the ids by queue, in the order of claims."""
    found: dict[str, list[int]] = {}
    for info in broker.queues():
        while held := broker.claim(info.name, limit=100):
            found.setdefault(info.name, []).extend(each.message_id for each in held)
            assert all(broker.ack([each.receipt for each in held]))
    return found
