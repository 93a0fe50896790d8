"""Messages routed a second, while the queues grow in number and the matches do not.

Run ``python benchmarks/routing.py``. Messages come in batches of 1,000, and each of them matches
exactly one queue, whatever their number. Two sorts of filters:

- **default**: ``queue = 'q7'``, what a queue gets when it is made without a filter;
- **mixed**: ``kind = 'k7' AND price > 10``, and a seventh of them with IN, OR, LIKE or a field.

"match/s" is the matcher alone on messages made a moment ago; "route/s" starts from attributes in
MessagePack, the way the metadata log holds them; "naive/s" evaluates every filter on every
message. Each is the best of several rounds on one core. What the matcher still pays for more
queues is the processor's: a bare dict of 10,000 strings answers more slowly than one of 10.
"""

from __future__ import annotations

import argparse
import gc
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from penstock.filters import Filter, Matcher, RowTuple, Value, default_filter, parse

if TYPE_CHECKING:
    from collections.abc import Callable

QUEUES = (10, 100, 1_000, 10_000)
BATCH = 1_000
NAIVE_EVALUATIONS = 100_000
NAIVE_ROUNDS = 3

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(dict[str, str | int | float | bool | None]).decode


def mixed_filter(number: int) -> str:
    kind = f"kind = 'k{number}'"
    match number % 28:
        case 3:
            return f"{kind} AND price BETWEEN 10 AND 90 AND title LIKE 'The %'"
        case 10:
            return f"kind IN ('k{number}', 'other{number}') AND priority < 9"
        case 17:
            return f"{kind} OR code = {number}"
        case 24:
            return f"price > 10 AND tenant = 't1' AND {kind}"
        case _:
            return f"{kind} AND price > 10"


def make_rows(queues: int, start: int, count: int) -> list[RowTuple]:
    """Return messages with five attributes, for queues all over the range."""
    rows: list[RowTuple] = []
    for number in range(start, start + count):
        # A step that shares no factor with the counts visits all queues in no order.
        queue = number * 7919 % queues
        attributes: dict[str, Value] = {
            "queue": f"q{queue}",
            "kind": f"k{queue}",
            "price": 20,
            "tenant": "t1",
            "title": "The Wind in the Willows",
        }
        rows.append((attributes, "", 0, 1_700_000_000_000 + number, 512))
    return rows


def naive(filters: dict[int, Filter], rows: list[RowTuple]) -> list[list[int]]:
    return [[key for key, one in filters.items() if one.matches(row)] for row in rows]


class Subject:
    """A set of filters under measurement."""

    def __init__(self, queues: int, make: Callable[[int], str]) -> None:
        self.queues = queues
        self.filters = {number: parse(make(number)) for number in range(queues)}
        start = perf_counter()
        self.matcher = Matcher(self.filters)
        self.build_s = perf_counter() - start
        self.match_s = float("inf")
        self.route_s = float("inf")
        self.naive_s = float("inf")
        self.sample = make_rows(queues, 0, max(5, NAIVE_EVALUATIONS // queues))
        expected = naive(self.filters, self.sample)
        assert self.matcher.match(self.sample) == expected
        assert all(len(keys) == 1 for keys in expected)

    def round(self, batches: int) -> None:
        """Time the matching, with and without the decoding before it."""
        gc.collect()
        match_s = route_s = 0.0
        for number in range(batches):
            rows = make_rows(self.queues, number * BATCH, BATCH)
            start = perf_counter()
            self.matcher.match(rows)
            match_s += perf_counter() - start
            log = [(encode(row[0]), *row[1:]) for row in rows]
            del rows
            start = perf_counter()
            self.matcher.match([(decode(entry[0]), *entry[1:]) for entry in log])
            route_s += perf_counter() - start
        self.match_s = min(self.match_s, match_s / (batches * BATCH))
        self.route_s = min(self.route_s, route_s / (batches * BATCH))

    def naive_round(self) -> None:
        """Time the evaluation of every filter."""
        start = perf_counter()
        naive(self.filters, self.sample)
        self.naive_s = min(self.naive_s, (perf_counter() - start) / len(self.sample))


def default_of(number: int) -> str:
    return default_filter(f"q{number}")


def main() -> None:
    options = argparse.ArgumentParser(description="Messages routed a second, by queues.")
    options.add_argument("--batches", type=int, default=20)
    options.add_argument("--rounds", type=int, default=15)
    chosen = options.parse_args()
    print("filters   queues     match/s     route/s     naive/s  build ms")
    for name, make in (("default", default_of), ("mixed", mixed_filter)):
        subjects = [Subject(queues, make) for queues in QUEUES]
        # Rounds in turn, so that a busy moment of the machine falls on all alike.
        for number in range(chosen.rounds):
            for subject in subjects:
                subject.round(chosen.batches)
                if number < NAIVE_ROUNDS:
                    subject.naive_round()
        for subject in subjects:
            rates = [1 / s for s in (subject.match_s, subject.route_s, subject.naive_s)]
            shown = " ".join(f"{rate:>11,.0f}" for rate in rates)
            print(f"{name:8} {subject.queues:>7,} {shown} {subject.build_s * 1000:>9.1f}")
        few, many = subjects[0], subjects[-1]
        print(
            f"{name:8} {many.queues:,} queues cost {many.match_s / few.match_s:.2f}× what"
            f" {few.queues} cost to match, {many.route_s / few.route_s:.2f}× to route\n"
        )


if __name__ == "__main__":
    main()
