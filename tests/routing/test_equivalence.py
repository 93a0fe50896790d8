"""Inline, pipeline and a store that is switched between them give the queues of the filters."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.soaking import examples

import penstock
from penstock import Broker, ManualClock, Message, Ordering, State, route_once
from penstock.filters import Filter, Row, parse

if TYPE_CHECKING:
    from pathlib import Path

DESIGNS = ["indexed", "buckets"]
FILTERS = [
    "TRUE",
    "FALSE",
    "a = 1",
    "a <> 1",
    "NOT (a = 1)",
    "a IN (1, 2) OR b = 'x'",
    "a = 1 AND b = 'x'",
    "b LIKE 'x%'",
    "b IS NULL",
    "a BETWEEN 0 AND 1",
    "\"group\" = 'g1'",
    "priority > 0 AND size < 2",
    "a + 1 > 2",
    "c",
    "a = 2 AND NOT c",
]
NAMES = [f"q{number}" for number in range(5)]

messages = st.builds(
    Message,
    payload=st.sampled_from([b"", b"1", b"22"]),
    attributes=st.fixed_dictionaries(
        {},
        optional={
            "a": st.sampled_from([0, 1, 2, 1.0, "1", True, None]),
            "b": st.sampled_from(["x", "xy", "y", 1, None]),
            "c": st.booleans(),
        },
    ),
    group=st.sampled_from(["", "g1", "g2", "g3"]),
    priority=st.integers(0, 2),
)
filters = st.sampled_from(FILTERS)
names = st.sampled_from(NAMES)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.lists(messages, max_size=6)),
        st.tuples(st.just("publish"), st.lists(messages, min_size=1, max_size=3)),
        st.tuples(st.just("create"), names, filters, st.sampled_from(list(Ordering))),
        st.tuples(st.just("update"), names, filters),
        st.tuples(st.just("delete"), names),
        st.tuples(st.just("drain"), names),
        st.tuples(st.just("route"), st.integers(1, 7)),
        st.tuples(st.just("logs"), st.integers(1, 4)),
        st.tuples(st.just("switch")),
        st.tuples(st.just("advance"), st.integers(0, 2_000_000)),
    ),
    max_size=40,
)


class Naive:
    """What every queue should hold: each filter asked about each message, as it comes."""

    def __init__(self) -> None:
        self.live: dict[str, Filter] = {}
        self.held: dict[str, list[int]] = {}
        self.draining: set[str] = set()

    def create(self, name: str, text: str) -> None:
        self.live[name] = parse(text)
        self.held[name] = []

    def publish(self, batch: list[Message], ids: list[int], now_ms: int) -> None:
        for message, message_id in zip(batch, ids, strict=True):
            row = Row(
                message.attributes, message.group, message.priority, now_ms, len(message.payload)
            )
            for name, compiled in self.live.items():
                if compiled.evaluate(row) is True:
                    self.held[name].append(message_id)

    def queues(self) -> dict[str, list[int]]:
        """Return what is left once everything is routed: a drained queue that is empty is gone."""
        return {name: ids for name, ids in self.held.items() if ids or name not in self.draining}


class Trio:
    """Three stores that see the same traffic, and what they should hold.

    One routes inline, one by a pipeline, and the third is switched from one to the other.
    """

    def __init__(self, *urls: str) -> None:
        self.clock = ManualClock()
        self.inline, self.pipeline, self.switched = self.all = [
            penstock.open(url, clock=self.clock, background=False) for url in urls
        ]
        self.pipeline.configure_log(routing="pipeline")
        self.naive = Naive()

    def apply(self, operation: tuple[Any, ...]) -> None:
        kind, *arguments = operation
        getattr(self, kind)(*arguments)

    def each(self, verb: str, *arguments: Any, **options: Any) -> list[Any]:
        return [getattr(broker, verb)(*arguments, **options) for broker in self.all]

    def publish(self, batch: list[Message]) -> None:
        one, *others = self.each("publish", batch)
        assert others == [one, one]
        self.naive.publish(batch, one, self.clock.now_ms())

    def create(self, name: str, text: str, ordering: Ordering) -> None:
        if name not in self.naive.held:
            self.each("create_queue", name, filter=text, ordering=ordering)
            self.naive.create(name, text)

    def update(self, name: str, text: str) -> None:
        if name in self.naive.live:
            self.each("update_queue", name, filter=text)
            self.naive.live[name] = parse(text)

    def delete(self, name: str) -> None:
        if name in self.naive.live:
            self.each("delete_queue", name)
            del self.naive.live[name], self.naive.held[name]

    def drain(self, name: str) -> None:
        if name in self.naive.live:
            self.each("delete_queue", name, drain=True)
            del self.naive.live[name]
            self.naive.draining.add(name)

    def route(self, limit: int) -> None:
        route_once(self.pipeline, limit=limit)
        if self.switched.info().routing == "pipeline":
            route_once(self.switched, limit=limit)

    def switch(self) -> None:
        now = self.switched.info().routing
        self.switched.configure_log(routing="inline" if now == "pipeline" else "pipeline")

    def logs(self, count: int) -> None:
        self.each("configure_log", logs=count)

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)
        self.each("sweep")

    def check(self) -> None:
        for broker in (self.pipeline, self.switched):
            stats = broker.log_stats()
            while max(stats.routed_up_to, stats.earliest) < stats.end:
                route_once(broker)
                stats = broker.log_stats()
        self.each("sweep")
        expected = self.naive.queues()
        for broker in self.all:
            assert {spec.name: held(broker, spec.name) for spec in broker.queues()} == expected
        for name in expected:
            assert entries(self.inline, name) == entries(self.pipeline, name)
            assert entries(self.inline, name) == entries(self.switched, name)
        totals = self.each("store_stats")
        assert len({stats.published_total for stats in totals}) == 1
        for spec in self.inline.queues():
            if spec.ordering is Ordering.FIFO:
                for broker in self.all:
                    in_order(broker, spec.name)

    def close(self) -> None:
        for broker in self.all:
            broker.close()


def entries(broker: Broker, queue: str) -> list[Any]:
    found = []
    for state in State:
        page = broker.browse(queue, state=state, limit=1_000)
        assert page.next_cursor is None
        found += [(e.message_id, e.payload, e.attributes, e.group, e.priority) for e in page]
    return sorted(found, key=lambda entry: entry[0])


def held(broker: Broker, queue: str) -> list[int]:
    return [entry[0] for entry in entries(broker, queue)]


def in_order(broker: Broker, queue: str) -> None:
    seen: dict[str, list[int]] = defaultdict(list)
    while deliveries := broker.claim(queue, limit=5):
        for delivery in deliveries:
            seen[delivery.group].append(delivery.message_id)
        broker.ack([delivery.receipt for delivery in deliveries])
    for ids in seen.values():
        assert ids == sorted(ids)


@pytest.mark.parametrize("design", DESIGNS)
@given(traffic=operations)
@examples(25)
def test_every_way_gives_the_queues_of_naive_evaluation(
    design: str, traffic: list[tuple[Any, ...]]
) -> None:
    trio = Trio(*[f"memory:?design={design}"] * 3)
    for operation in traffic:
        trio.apply(operation)
    trio.check()
    trio.close()


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_on_disk_as_well(design: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @given(traffic=operations)
    @examples(10)
    def run(traffic: list[tuple[Any, ...]]) -> None:
        place: Path = tmp_path_factory.mktemp("trio")
        trio = Trio(*(f"rocksdb:{place}/{number}?design={design}" for number in range(3)))
        try:
            for operation in traffic:
                trio.apply(operation)
            trio.check()
        finally:
            trio.close()

    run()


# --- filters that change from a position on ---------------------------------------------------


@pytest.mark.parametrize("design", DESIGNS)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(messages, min_size=1, max_size=5),
            filters,
            st.floats(0, 1),
            st.integers(0, 4),
        ),
        min_size=1,
        max_size=10,
    )
)
@examples(25)
def test_a_filter_counts_from_the_position_it_is_given(
    design: str, steps: list[tuple[list[Message], str, float, int]]
) -> None:
    clock = ManualClock()
    with penstock.open(
        f"memory:?design={design}", routing="pipeline", clock=clock, background=False
    ) as broker:
        broker.create_queue("q", filter="a = 1")
        published: list[tuple[int, Message]] = []
        changes = [(0, parse("a = 1"))]
        for batch, text, where, limit in steps:
            published += zip(broker.publish(batch), batch, strict=True)
            stats = broker.log_stats()
            lowest = max(stats.routed_up_to, stats.earliest)
            offset = lowest + round(where * (stats.end - lowest))
            broker.update_queue("q", filter=text, from_offset=offset)
            changes = [change for change in changes if change[0] < offset]
            changes.append((offset, parse(text)))
            if limit:
                route_once(broker, limit=limit)
        route_once(broker)
        expected = []
        for message_id, message in published:
            (*_, live) = (compiled for offset, compiled in changes if offset <= message_id)
            size = len(message.payload)
            row = Row(message.attributes, message.group, message.priority, clock.now_ms(), size)
            if live.matches(row):
                expected.append(message_id)
        assert held(broker, "q") == expected


@pytest.mark.parametrize("design", DESIGNS)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(messages, max_size=4),
            st.none() | filters,
            st.none() | st.tuples(st.integers(0, 30), st.none() | st.integers(0, 30)),
            st.booleans(),
        ),
        max_size=12,
    )
)
@examples(25)
def test_backfills_bring_everything_once(design: str, steps: list[Any]) -> None:
    clock = ManualClock()
    with penstock.open(f"memory:?design={design}", clock=clock, background=False) as broker:
        broker.create_queue("keeps", filter="TRUE")
        broker.create_queue("q", filter="a = 1")
        live = parse("a = 1")
        published: list[tuple[int, Row]] = []
        expected: set[int] = set()
        acked: list[int] = []
        for batch, text, fill, ack in steps:
            for message_id, message in zip(broker.publish(batch), batch, strict=True):
                size = len(message.payload)
                row = Row(message.attributes, message.group, message.priority, clock.now_ms(), size)
                published.append((message_id, row))
                if live.matches(row):
                    expected.add(message_id)
            if text is not None:
                broker.update_queue("q", filter=text)
                live = parse(text)
            if fill is not None:
                begin, end = fill
                wanted = {
                    message_id
                    for message_id, row in published
                    if live.matches(row)
                    and begin <= message_id
                    and (end is None or message_id < end)
                }
                assert broker.backfill("q", from_=begin, to=end).added == len(wanted - expected)
                expected |= wanted
            if ack:
                deliveries = broker.claim("q", limit=3)
                acked += [delivery.message_id for delivery in deliveries]
                broker.ack([delivery.receipt for delivery in deliveries])
        assert held(broker, "q") == sorted(expected)
        assert len(set(acked)) == len(acked)
        stats = broker.stats("q")
        assert stats.enqueued_total == len(expected)
        assert stats.available + stats.done == len(expected)
