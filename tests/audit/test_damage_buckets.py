"""Damage to the bucket design: buckets, what is in them, summaries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.store.codec import buckets as codec
from penstock.store.codec import opendata
from penstock.store.codec.buckets import decode_summary, encode_head, pack_summary
from penstock.store.codec.opendata import payload_key
from penstock.store.codec.records import decode_lease
from penstock.store.kv.check import Kind
from penstock.store.kv.queues import decode_counts, encode_counts

if TYPE_CHECKING:
    from collections.abc import Callable

JUNK = b"\xffjunk"


def counters(name: str) -> tuple[Kind, str, bytes]:
    return Kind.COUNTER, "queues", b"\x02\x0b" + name.encode()


def buckets(hand: Any, name: str) -> list[tuple[bytes, bytes]]:
    rows: list[tuple[bytes, bytes]] = hand.rows("buckets", opendata.ACTIVE.prefix(name.encode()))
    return rows


def read(value: bytes) -> tuple[list[codec.Available], list[codec.InFlight]]:
    available, in_flight = codec.decode_active(value)
    return [entry for entry, _ in available], [entry for entry, _ in in_flight]


def write(
    hand: Any, key: bytes, available: list[codec.Available], in_flight: list[codec.InFlight]
) -> None:
    encoded = [codec.encode_available(entry) for entry in available]
    flying = [codec.encode_in_flight(entry) for entry in in_flight]
    hand.put("buckets", key, codec.pack_active(encoded, flying))


def summary_of(key: bytes) -> bytes:
    queue, bucket_id = opendata.ACTIVE.parse(key)
    return opendata.SUMMARY.key(queue, bucket_id)


def bucket_of(hand: Any, name: str, message_id: int) -> bytes:
    for key, value in buckets(hand, name):
        available, in_flight = read(value)
        if message_id in [*(e.message_id for e in available), *(e.message_id for e in in_flight)]:
            return key
    raise AssertionError(message_id)


# --- buckets --------------------------------------------------------------------------------


def bucket_is_junk(hand: Any) -> set[Any]:
    key = bucket_of(hand, "fifo", hand.ids["fifo"][0])
    assert len(buckets(hand, "fifo")) == 1
    hand.put("buckets", key, JUNK)
    return {
        (Kind.UNDECODABLE, "buckets", key),
        (Kind.ORPHAN_ENTRY, "buckets", summary_of(key)),
        (Kind.NOT_HELD, "leases", hand.leases_of("fifo")[0]),
        counters("fifo"),
    }


def bucket_is_gone(hand: Any) -> set[Any]:
    key = bucket_of(hand, "fifo", hand.ids["fifo"][0])
    hand.delete("buckets", key)
    ids = [*hand.ids["fifo"], *hand.ids["delayed fifo"]]
    return {
        (Kind.ORPHAN_ENTRY, "buckets", summary_of(key)),
        (Kind.NOT_HELD, "leases", hand.leases_of("fifo")[0]),
        counters("fifo"),
        *((Kind.GARBAGE, "payloads", payload_key(message_id)) for message_id in ids),
    }


def empty_bucket(hand: Any) -> set[Any]:
    key = opendata.ACTIVE.key(b"plain", opendata.make_id(1, 90))
    write(hand, key, [], [])
    return {(Kind.EMPTY, "buckets", key)}


def bucket_of_a_claim(hand: Any) -> set[Any]:
    key = opendata.ACTIVE.key(b"plain", opendata.make_id(1, 91))
    write(hand, key, [], [])
    return {(Kind.STRANGER, "buckets", key)}


def records_of_no_queue(hand: Any) -> set[Any]:
    keys = [opendata.ACTIVE.key(b"ghost", 0), opendata.SUMMARY.key(b"ghost", 0)]
    for key in keys:
        hand.put("buckets", key, b"?")
    return {(Kind.STRANGER, "buckets", key) for key in keys}


# --- entries ----------------------------------------------------------------------------------


def entry_in_another_bucket(hand: Any) -> set[Any]:
    (first, value), (second, other), *_ = buckets(hand, "plain")
    available, in_flight = read(value)
    moved = available.pop()
    write(hand, first, available, in_flight)
    there, flying = read(other)
    write(hand, second, [*there, moved], flying)
    return {(Kind.WRONG_KEY, "buckets", second), (Kind.WRONG_FIELD, "buckets", summary_of(first))}


def in_flight_in_another_bucket(hand: Any) -> set[Any]:
    key, value = buckets(hand, "fifo")[0]
    available, in_flight = read(value)
    moved = in_flight.pop()
    write(hand, key, available, in_flight)
    elsewhere = opendata.ACTIVE.key(b"fifo", opendata.make_id(1, 50))
    write(hand, elsewhere, [], [moved])
    return {
        (Kind.WRONG_KEY, "buckets", elsewhere),
        (Kind.WRONG_FIELD, "buckets", summary_of(key)),
    }


def claim_of_no_bucket(hand: Any) -> set[Any]:
    key, value = buckets(hand, "fifo")[0]
    available, in_flight = read(value)
    (lease,) = hand.leases_of("fifo")
    in_flight[0] = in_flight[0]._replace(claim_id=15 << 60)
    write(hand, key, available, in_flight)
    return {
        (Kind.WRONG_KEY, "buckets", key),
        (Kind.WRONG_FIELD, "buckets", summary_of(key)),
        (Kind.NOT_HELD, "leases", lease),
        counters("fifo"),
    }


def one_claim_for_two(hand: Any) -> set[Any]:
    key, value = buckets(hand, "fifo")[0]
    available, in_flight = read(value)
    available[1] = available[1]._replace(claim_id=available[0].claim_id)
    write(hand, key, available, in_flight)
    return {(Kind.WRONG_KEY, "buckets", key), (Kind.WRONG_FIELD, "buckets", summary_of(key))}


def one_claim_for_waiting_and_in_flight(hand: Any) -> set[Any]:
    key, value = buckets(hand, "fifo")[0]
    available, in_flight = read(value)
    flying = in_flight[0]
    copy = available[0]._replace(message_id=flying.message_id, claim_id=flying.claim_id)
    write(hand, key, [*available, copy], in_flight)
    return {(Kind.TWICE, "buckets", key)}


def waits_twice(hand: Any) -> set[Any]:
    key, value = buckets(hand, "fifo")[0]
    available, in_flight = read(value)
    claim_id = opendata.make_id(1, opendata.split_id(available[-1].claim_id)[1] + 1)
    write(hand, key, [*available, available[0]._replace(claim_id=claim_id)], in_flight)
    return {
        (Kind.TWICE, "buckets", key),
        (Kind.WRONG_FIELD, "buckets", summary_of(key)),
        (Kind.COUNTER, "queues", b"\x02\x0bfifo"),
    }


def priority_is_wrong(hand: Any) -> set[Any]:
    key = bucket_of(hand, "plain", hand.ids["plain in flight"][0])
    available, in_flight = read(hand.get("buckets", key))
    in_flight[0] = in_flight[0]._replace(priority=200, group="elsewhere")
    write(hand, key, available, in_flight)
    return {(Kind.WRONG_FIELD, "buckets", key)}


def metadata_is_junk(hand: Any) -> set[Any]:
    key, value = buckets(hand, "fifo")[0]
    available, in_flight = read(value)
    available[0] = available[0]._replace(metadata=JUNK)
    write(hand, key, available, in_flight)
    return {
        (Kind.UNDECODABLE, "buckets", key),
        (Kind.WRONG_FIELD, "buckets", summary_of(key)),
        counters("fifo"),
    }


def claims_fall_back(hand: Any) -> set[Any]:
    key = b"\x02\x0bfifo"
    counts = decode_counts(hand.get("queues", key))
    assert counts.next_claim
    counts.next_claim = 0
    hand.put("queues", key, encode_counts(counts))
    return {(Kind.COUNTER, "queues", key)}


def lease_forgets_a_message(hand: Any) -> set[Any]:
    (lease,) = hand.leases_of("fifo")
    ids = decode_lease(hand.get("leases", lease)).ids
    key, value = buckets(hand, "fifo")[0]
    available, in_flight = read(value)
    kept = [entry for entry in in_flight if entry.claim_id.to_bytes(8, "big") != ids[0]]
    landed = [
        entry._replace(lease=b"L" * 16)
        for entry in in_flight
        if entry.claim_id.to_bytes(8, "big") == ids[0]
    ]
    write(hand, key, available, [*kept, *landed])
    return {(Kind.STRAY, "buckets", key), (Kind.NOT_HELD, "leases", lease)}


# --- summaries --------------------------------------------------------------------------------


def summary_is_gone(hand: Any) -> set[Any]:
    key = summary_of(buckets(hand, "plain")[0][0])
    hand.delete("buckets", key)
    return {(Kind.MISSING_ENTRY, "buckets", key)}


def summary_is_junk(hand: Any) -> set[Any]:
    key = summary_of(buckets(hand, "plain")[0][0])
    hand.put("buckets", key, JUNK)
    return {(Kind.WRONG_FIELD, "buckets", key)}


def summary_has_another_head(hand: Any) -> set[Any]:
    key = summary_of(buckets(hand, "plain")[0][0])
    summary = decode_summary(hand.get("buckets", key))
    wrong = pack_summary(
        ready=summary.ready,
        in_flight=summary.in_flight,
        oldest=summary.oldest,
        late=summary.late,
        due=summary.due,
        heads_encoded=[encode_head("nobody", 0, 0, 1)],
        held_encoded=[],
    )
    hand.put("buckets", key, wrong)
    return {(Kind.WRONG_FIELD, "buckets", key)}


def summary_of_nobody(hand: Any) -> set[Any]:
    value = hand.get("buckets", summary_of(buckets(hand, "plain")[0][0]))
    key = opendata.SUMMARY.key(b"plain", opendata.make_id(1, 90))
    hand.put("buckets", key, value)
    return {(Kind.ORPHAN_ENTRY, "buckets", key)}


def available_too_early(hand: Any) -> set[Any]:
    key = summary_of(bucket_of(hand, "fifo", hand.ids["delayed fifo"][0]))
    summary = decode_summary(hand.get("buckets", key))
    assert summary.delayed == 1
    wrong = pack_summary(
        ready=summary.ready + 1,
        in_flight=summary.in_flight,
        oldest=summary.oldest,
        late=(),
        due=None,
        heads_encoded=[encode_head(*head) for head in summary.heads],
        held_encoded=[],
    )
    hand.put("buckets", key, wrong)
    return {(Kind.WRONG_FIELD, "buckets", key)}


DAMAGES = [
    bucket_is_junk, bucket_is_gone, empty_bucket, bucket_of_a_claim, records_of_no_queue,
    entry_in_another_bucket, in_flight_in_another_bucket, claim_of_no_bucket, one_claim_for_two,
    one_claim_for_waiting_and_in_flight, waits_twice, priority_is_wrong, metadata_is_junk,
    claims_fall_back, lease_forgets_a_message, summary_is_gone, summary_is_junk,
    summary_has_another_head, summary_of_nobody, available_too_early,
]  # fmt: skip


def name_of(damage: Callable[[Any], set[Any]]) -> str:
    return damage.__name__


@pytest.mark.parametrize("routing", ["inline", "pipeline"])
@pytest.mark.parametrize("damage", DAMAGES, ids=name_of)
def test_memory(make_hand: Any, examine: Any, routing: str, damage: Any) -> None:
    examine(make_hand("memory", "buckets", routing), damage)


@pytest.mark.parametrize("damage", DAMAGES[::3], ids=name_of)
def test_rocksdb(make_hand: Any, examine: Any, damage: Any) -> None:
    examine(make_hand("rocksdb", "buckets", "inline"), damage)
