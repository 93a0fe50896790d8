"""Damage to what both designs share, one record at a time: it is found, and repaired."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock.store.check_report import AuditReport
from penstock.store.codec import buckets, opendata, records
from penstock.store.codec.opendata import encode_seq_block, payload_key, terminated
from penstock.store.codec.records import decode_lease, encode_lease
from penstock.store.kv.check import Kind
from penstock.store.kv.queues import Counts, QueueTable

if TYPE_CHECKING:
    from collections.abc import Callable

JUNK = b"\xffjunk"
NUMBERS = b"\x02\x0cqueue"
FAILED_INDEX = b"\x02\x0a" + terminated(b"shared")


def counters(name: str) -> tuple[Kind, str, bytes]:
    return Kind.COUNTER, "queues", b"\x02\x0b" + name.encode()


def alter_counts(hand: Any, name: str, **changes: int) -> bytes:
    queue = hand.queue(name)
    counts = msgspec.structs.replace(queue.counts, **changes)
    assert isinstance(counts, Counts)
    batch = hand.engine.batch()
    QueueTable(hand.engine.table("queues")).put_counts(batch, type(queue)(queue.spec, 1, counts))
    hand.engine.commit(batch)
    return b"\x02\x0b" + name.encode()


def attempts_of(hand: Any, name: str, message_ids: list[int]) -> set[Any]:
    rows = [
        key
        for message_id in message_ids
        for key, _ in hand.rows("history", opendata.ATTEMPTS.key(name.encode(), message_id, 0)[:-2])
    ]
    assert rows
    return {(Kind.ORPHAN_ATTEMPT, "history", key) for key in rows}


# --- the store and its queues ------------------------------------------------------------


def identity_is_junk(hand: Any) -> set[Any]:
    hand.put("default", b"meta", JUNK)
    return {(Kind.WRONG_FIELD, "default", b"meta")}


def totals_are_junk(hand: Any) -> set[Any]:
    hand.put("default", b"\x02\x0e", JUNK)
    return {(Kind.WRONG_FIELD, "default", b"\x02\x0e")}


def totals_are_gone(hand: Any) -> set[Any]:
    hand.delete("default", b"\x02\x0e")
    return {(Kind.MISSING_ENTRY, "default", b"\x02\x0e")}


def unknown_system_key(hand: Any) -> set[Any]:
    hand.put("default", b"\x05what", b"?")
    return {(Kind.STRANGER, "default", b"\x05what")}


def queue_numbers_fall_back(hand: Any) -> set[Any]:
    hand.put("default", NUMBERS, encode_seq_block(1, 1))
    return {(Kind.SEQUENCE, "default", NUMBERS)}


def queue_numbers_are_junk(hand: Any) -> set[Any]:
    hand.put("default", NUMBERS, JUNK)
    return {(Kind.UNDECODABLE, "default", NUMBERS)}


def spec_is_junk(hand: Any) -> set[Any]:
    hand.put("queues", b"\x02\x06plain", JUNK)
    return {(Kind.SPEC, "queues", b"\x02\x06plain")}


def spec_is_gone(hand: Any) -> set[Any]:
    hand.delete("queues", b"\x02\x06fifo")
    return {(Kind.SPEC, "queues", b"\x02\x06fifo")}


def spec_of_nobody(hand: Any) -> set[Any]:
    hand.put("queues", b"\x02\x06ghost", JUNK)
    return {(Kind.STRANGER, "queues", b"\x02\x06ghost")}


def coverage_is_gone(hand: Any) -> set[Any]:
    hand.delete("queues", b"\x02\x13plain")
    return {(Kind.COVERAGE, "queues", b"\x02\x13plain")}


def coverage_is_closed(hand: Any) -> set[Any]:
    coverage = msgspec.msgpack.decode(hand.get("queues", b"\x02\x13plain"))
    coverage["live"][-1]["end"] = 3
    hand.put("queues", b"\x02\x13plain", msgspec.msgpack.encode(coverage))
    return {(Kind.COVERAGE, "queues", b"\x02\x13plain")}


def counters_are_junk(hand: Any) -> set[Any]:
    hand.put("queues", b"\x02\x0bplain", JUNK)
    return {(Kind.UNDECODABLE, "queues", b"\x02\x0bplain")}


def depths_are_wrong(hand: Any) -> set[Any]:
    counts = hand.queue("plain").counts
    alter_counts(hand, "plain", available=counts.available + 3, failed=7, done=0)
    return {counters("plain")}


def totals_do_not_add_up(hand: Any) -> set[Any]:
    alter_counts(hand, "plain", enqueued_total=1_000)
    return {counters("plain")}


def sequences_fall_back(hand: Any) -> set[Any]:
    return {(Kind.COUNTER, "queues", alter_counts(hand, "plain", next_done=0))}


# --- leases --------------------------------------------------------------------------------


def in_flight_keys(hand: Any, name: str, lease: bytes) -> list[bytes]:
    queue = hand.queue(name)
    ids = decode_lease(hand.get("leases", lease)).ids
    if hand.design == "indexed":
        return [hand.number(name) + id8 for id8 in ids]
    buckets = {opendata.bucket_of(int.from_bytes(id8, "big")) for id8 in ids}
    return [opendata.ACTIVE.key(queue.id, bucket) for bucket in buckets]


def strays(hand: Any, name: str, lease: bytes) -> set[Any]:
    table = "in_progress" if hand.design == "indexed" else "buckets"
    return {(Kind.STRAY, table, key) for key in in_flight_keys(hand, name, lease)}


def lease_is_gone(hand: Any) -> set[Any]:
    lease = hand.leases_of("plain")[0]
    expected = strays(hand, "plain", lease)
    index_key = decode_lease(hand.get("leases", lease)).index_key
    hand.delete("leases", lease)
    return expected | {(Kind.ORPHAN_ENTRY, "lease_expiry", index_key)}


def lease_of_fifo_is_junk(hand: Any) -> set[Any]:
    (lease,) = hand.leases_of("fifo")
    expected = strays(hand, "fifo", lease)
    index_key = decode_lease(hand.get("leases", lease)).index_key
    hand.put("leases", lease, JUNK)
    return expected | {
        (Kind.ORPHAN_ENTRY, "lease_expiry", index_key),
        (Kind.UNDECODABLE, "leases", lease),
    }


def expiry_entry_is_gone(hand: Any) -> set[Any]:
    index_key = decode_lease(hand.get("leases", hand.leases_of("fifo")[0])).index_key
    hand.delete("lease_expiry", index_key)
    return {(Kind.MISSING_ENTRY, "lease_expiry", index_key)}


def expiry_entry_names_another(hand: Any) -> set[Any]:
    index_key = decode_lease(hand.get("leases", hand.leases_of("fifo")[0])).index_key
    hand.put("lease_expiry", index_key, bytes(16))
    return {(Kind.WRONG_FIELD, "lease_expiry", index_key)}


def expiry_entry_of_nobody(hand: Any) -> set[Any]:
    key = (5).to_bytes(8, "big") + b"L" * 16
    hand.put("lease_expiry", key, b"L" * 16)
    return {(Kind.ORPHAN_ENTRY, "lease_expiry", key)}


def lease_names_another_expiry(hand: Any) -> set[Any]:
    (lease,) = hand.leases_of("fifo")
    record = decode_lease(hand.get("leases", lease))
    hand.put("leases", lease, encode_lease(*record._replace(index_key=b"?" * 24)))
    return {(Kind.WRONG_FIELD, "leases", lease)}


def lease_lists_too_much(hand: Any) -> set[Any]:
    (lease,) = hand.leases_of("fifo")
    record = decode_lease(hand.get("leases", lease))
    ids = [*record.ids, (99).to_bytes(8, "big")]
    hand.put("leases", lease, encode_lease(*record._replace(ids=ids)))
    return {(Kind.NOT_HELD, "leases", lease)}


def empty_lease(hand: Any) -> set[Any]:
    name, index_key = b"L" * 16, (9 << 40).to_bytes(8, "big") + b"L" * 16
    number = hand.queue("plain").number
    hand.put("leases", name, encode_lease([], 9 << 40, index_key, 0, number, ""))
    hand.put("lease_expiry", index_key, name)
    return {(Kind.EMPTY, "leases", name)}


def lease_of_no_queue(hand: Any) -> set[Any]:
    name, index_key = b"L" * 16, (9 << 40).to_bytes(8, "big") + b"L" * 16
    hand.put("leases", name, encode_lease([bytes(8)], 9 << 40, index_key, 0, 77, ""))
    hand.put("lease_expiry", index_key, name)
    return {(Kind.STRANGER, "leases", name)}


# --- history ---------------------------------------------------------------------------------


def done_part(hand: Any) -> tuple[bytes, bytes]:
    ((key, value),) = hand.rows("history", opendata.DONE.prefix(b"plain"))
    return key, value


def second_part(hand: Any, entries: list[Any]) -> bytes:
    """Add a part of done messages behind the first, of two messages."""
    key: bytes = opendata.DONE.key(b"plain", opendata.make_id(1, 0), 2)
    hand.put("history", key, records.encode_ended(entries, failed=False))
    return key


def done_part_is_junk(hand: Any) -> set[Any]:
    key, _ = done_part(hand)
    hand.put("history", key, JUNK)
    ids = hand.ids["done"]
    both = {
        (Kind.REFERENCES, "payloads", b"\x02\x0d" + message_id.to_bytes(8, "big"))
        for message_id in set(ids) & set(hand.ids["both"])
    }
    gone = attempts_of(hand, "plain", ids)
    return {(Kind.UNDECODABLE, "history", key), counters("plain")} | gone | both


def done_metadata_is_junk(hand: Any) -> set[Any]:
    key, value = done_part(hand)
    first, second = records.decode_ended(value, failed=False)
    entries = [first, second._replace(metadata=JUNK)]
    hand.put("history", key, records.encode_ended(entries, failed=False))
    gone = attempts_of(hand, "plain", [second.message_id])
    expected = {(Kind.UNDECODABLE, "history", key), counters("plain")} | gone
    if second.message_id in hand.ids["both"]:
        reference = b"\x02\x0d" + second.message_id.to_bytes(8, "big")
        expected |= {(Kind.REFERENCES, "payloads", reference)}
    return expected


def done_twice(hand: Any) -> set[Any]:
    _, value = done_part(hand)
    key = second_part(hand, [records.decode_ended(value, failed=False)[1]])
    return {(Kind.TWICE, "history", key), counters("plain")}


def empty_part(hand: Any) -> set[Any]:
    return {(Kind.EMPTY, "history", second_part(hand, []))}


def part_in_the_wrong_bucket(hand: Any) -> set[Any]:
    key, value = done_part(hand)
    hand.delete("history", key)
    wrong = opendata.DONE.key(b"plain", opendata.make_id(1, 10), 0)
    hand.put("history", wrong, value)
    return {(Kind.WRONG_KEY, "history", wrong)}


def part_in_a_bucket_of_no_size(hand: Any) -> set[Any]:
    key = opendata.DONE.key(b"plain", 15 << 60, 7)
    hand.put("history", key, records.encode_ended([], failed=False))
    return {(Kind.UNDECODABLE, "history", key)}


def waiting_and_done(hand: Any) -> set[Any]:
    message_id = hand.ids["retried"][0]
    _, value = done_part(hand)
    entry = records.decode_ended(value, failed=False)[0]._replace(message_id=message_id)
    second_part(hand, [entry])
    return {(Kind.TWICE, *place_of(hand, "plain", message_id, in_flight=False)), counters("plain")}


def in_flight_and_done(hand: Any) -> set[Any]:
    message_id = hand.ids["plain in flight"][-1]
    _, value = done_part(hand)
    second_part(
        hand, [records.decode_ended(value, failed=False)[0]._replace(message_id=message_id)]
    )
    holding = [
        lease
        for lease in hand.leases_of("plain")
        if key_of(hand, "plain", message_id) in decode_lease(hand.get("leases", lease)).ids
    ]
    return {
        (Kind.TWICE, *place_of(hand, "plain", message_id, in_flight=True)),
        (Kind.NOT_HELD, "leases", holding[0]),
        counters("plain"),
    }


def key_of(hand: Any, name: str, message_id: int) -> bytes:
    """Give the key of a live message within its queue."""
    if hand.design == "indexed":
        return message_id.to_bytes(8, "big")
    for _, value in hand.rows("buckets", opendata.ACTIVE.prefix(name.encode())):
        available, in_flight = buckets.decode_active(value)
        for entry, _ in (*available, *in_flight):
            if entry[0] == message_id:
                return entry[1].to_bytes(8, "big")  # type: ignore[union-attr]
    raise AssertionError(message_id)


def place_of(hand: Any, name: str, message_id: int, *, in_flight: bool) -> tuple[str, bytes]:
    key = key_of(hand, name, message_id)
    if hand.design == "indexed":
        return "in_progress" if in_flight else "available", hand.number(name) + key
    bucket = opendata.bucket_of(int.from_bytes(key, "big"))
    return "buckets", opendata.ACTIVE.key(name.encode(), bucket)


def failed_and_live(hand: Any) -> set[Any]:
    ((key, value),) = hand.rows("history", opendata.FAILED.prefix(b"shared"))
    (entry,) = records.decode_ended(value, failed=True)
    live = hand.ids["shared"][-1]
    hand.put(
        "history", key, records.encode_ended([entry, entry._replace(message_id=live)], failed=True)
    )
    index = FAILED_INDEX + live.to_bytes(8, "big")
    hand.put("history", index, key)
    return {
        (Kind.TWICE, "history", key),
        (Kind.ORPHAN_ENTRY, "history", index),
        (Kind.COUNTER, "queues", b"\x02\x0bshared"),
    }


def failed_index_is_gone(hand: Any) -> set[Any]:
    ((key, _),) = hand.rows("history", FAILED_INDEX)
    hand.delete("history", key)
    return {(Kind.MISSING_ENTRY, "history", key)}


def failed_index_names_another_part(hand: Any) -> set[Any]:
    ((key, _),) = hand.rows("history", FAILED_INDEX)
    hand.put("history", key, b"?")
    return {(Kind.WRONG_FIELD, "history", key)}


def failed_index_of_nobody(hand: Any) -> set[Any]:
    ((_, part),) = hand.rows("history", FAILED_INDEX)
    key = FAILED_INDEX + (99).to_bytes(8, "big")
    hand.put("history", key, part)
    return {(Kind.ORPHAN_ENTRY, "history", key)}


def attempt_of_nobody(hand: Any) -> set[Any]:
    _, value = hand.rows("history", opendata.ATTEMPTS.prefix(b"plain"))[0]
    key = opendata.ATTEMPTS.key(b"plain", 99, 1)
    hand.put("history", key, value)
    return {(Kind.ORPHAN_ATTEMPT, "history", key)}


def attempt_that_was_not_made(hand: Any) -> set[Any]:
    key, value = hand.rows("history", opendata.ATTEMPTS.prefix(b"plain"))[0]
    later = key[:-2] + b"\x00\x09"
    hand.put("history", later, value)
    return {(Kind.ORPHAN_ATTEMPT, "history", later)}


def attempt_is_junk(hand: Any) -> set[Any]:
    key, _ = hand.rows("history", opendata.ATTEMPTS.prefix(b"plain"))[0]
    hand.put("history", key, JUNK)
    return {(Kind.UNDECODABLE, "history", key)}


def history_of_no_queue(hand: Any) -> set[Any]:
    _, value = done_part(hand)
    done = opendata.DONE.key(b"ghost", 0, 0)
    attempt = opendata.ATTEMPTS.key(b"ghost", 1, 1)
    hand.put("history", done, value)
    hand.put("history", attempt, b"")
    return {(Kind.STRANGER, "history", done), (Kind.STRANGER, "history", attempt)}


# --- retention of what nobody claims -------------------------------------------------------------


def unclaimed_row(hand: Any) -> tuple[bytes, bytes]:
    """Give a row all of whose messages wait, so that the repair writes the same."""
    row: tuple[bytes, bytes] = hand.rows("unclaimed")[-1]
    return row


def unclaimed_row_is_gone(hand: Any) -> set[Any]:
    key, _ = unclaimed_row(hand)
    hand.delete("unclaimed", key)
    return {(Kind.MISSING_ENTRY, "unclaimed", key)}


def unclaimed_row_is_junk(hand: Any) -> set[Any]:
    key, value = unclaimed_row(hand)
    hand.delete("unclaimed", key)
    hand.put("unclaimed", key[:-1], value)
    return {(Kind.MISSING_ENTRY, "unclaimed", key), (Kind.UNDECODABLE, "unclaimed", key[:-1])}


def unclaimed_row_of_no_queue(hand: Any) -> set[Any]:
    hand.put("unclaimed", b"\x00\x00\x00\x63" + bytes(20), bytes(8))
    return {(Kind.STRANGER, "unclaimed", b"\x00\x00\x00\x63" + bytes(20))}


# --- payloads ------------------------------------------------------------------------------------


def reference_key(message_id: int) -> bytes:
    return b"\x02\x0d" + message_id.to_bytes(8, "big")


def payload_is_gone(hand: Any) -> set[Any]:
    ids = [hand.ids["retried"][0], hand.ids["done"][0], hand.ids["failed"][0], hand.ids["fifo"][1]]
    for message_id in ids:
        hand.delete("payloads", payload_key(message_id))
    return {(Kind.PAYLOAD_MISSING, "payloads", payload_key(message_id)) for message_id in ids}


def count_is_gone(hand: Any) -> set[Any]:
    key = reference_key(hand.ids["both"][0])
    hand.delete("payloads", key)
    return {(Kind.REFERENCES, "payloads", key)}


def count_is_wrong(hand: Any) -> set[Any]:
    key = reference_key(hand.ids["both"][1])
    hand.put("payloads", key, (9).to_bytes(4, "big"))
    return {(Kind.REFERENCES, "payloads", key)}


def count_of_one(hand: Any) -> set[Any]:
    key = reference_key(hand.ids["plain"][0])
    hand.put("payloads", key, (2).to_bytes(4, "big"))
    return {(Kind.REFERENCES, "payloads", key)}


def count_of_nobody(hand: Any) -> set[Any]:
    key = reference_key(4_000)
    hand.put("payloads", key, (2).to_bytes(4, "big"))
    return {(Kind.REFERENCES, "payloads", key)}


def payload_of_nobody(hand: Any) -> set[Any]:
    hand.put("payloads", payload_key(4_000), b"?")
    return {(Kind.GARBAGE, "payloads", payload_key(4_000))}


def unrouted_row_is_gone(hand: Any) -> set[Any]:
    rows = [key for key, _ in hand.rows("log", b"\x02\x11")]
    for key in rows:
        hand.delete("log", key)
    keys = map(reference_key, hand.ids["unrouted"])
    return {(Kind.REFERENCES, "payloads", key) for key in keys}


def unknown_payload_key(hand: Any) -> set[Any]:
    hand.put("payloads", b"\x07", b"?")
    return {(Kind.STRANGER, "payloads", b"\x07")}


# --- the log -------------------------------------------------------------------------------------


def entry_of(hand: Any, message_id: int) -> tuple[bytes, bytes]:
    for key, value in hand.rows("log", b"\x03\x01\x00\x00\x00\x01\x10"):
        if message_id in [row[0] for row in opendata.decode_metadata_batch(value)]:
            return key, value
    raise AssertionError(message_id)


def log_settings_are_junk(hand: Any) -> set[Any]:
    hand.put("log", b"\x02\x10", JUNK)
    return {(Kind.WRONG_FIELD, "log", b"\x02\x10")}


def unknown_log_key(hand: Any) -> set[Any]:
    hand.put("log", b"\x02\x77", b"?")
    return {(Kind.STRANGER, "log", b"\x02\x77")}


def message_ids_fall_back(hand: Any) -> set[Any]:
    hand.put("log", opendata.SEQ_BLOCK_KEY, encode_seq_block(1, 10))
    return {(Kind.SEQUENCE, "log", opendata.SEQ_BLOCK_KEY)}


def message_ids_are_junk(hand: Any) -> set[Any]:
    hand.put("log", opendata.SEQ_BLOCK_KEY, JUNK)
    return {(Kind.UNDECODABLE, "log", opendata.SEQ_BLOCK_KEY)}


def segment_is_not_described(hand: Any) -> set[Any]:
    hand.delete("log", opendata.segment_meta_key(1))
    return {(Kind.MISSING_ENTRY, "log", opendata.segment_meta_key(1))}


def segment_starts_elsewhere(hand: Any) -> set[Any]:
    key = opendata.segment_meta_key(1)
    start, start_ms = opendata.decode_segment_meta(hand.get("log", key))
    hand.put("log", key, opendata.encode_segment_meta(start + 2, start_ms))
    return {(Kind.WRONG_FIELD, "log", key)}


def segment_goes_back_in_time(hand: Any) -> set[Any]:
    key = opendata.segment_meta_key(2)
    hand.put("log", key, opendata.encode_segment_meta(4_000, 5))
    return {(Kind.WRONG_FIELD, "log", key)}


def segment_description_is_junk(hand: Any) -> set[Any]:
    key = opendata.segment_meta_key(1)
    hand.put("log", key, JUNK)
    return {(Kind.UNDECODABLE, "log", key), (Kind.MISSING_ENTRY, "log", key)}


def listing_is_gone(hand: Any) -> set[Any]:
    key, _ = hand.rows("log", opendata.listing_key(1, b""))[0]
    hand.delete("log", key)
    return {(Kind.MISSING_ENTRY, "log", key)}


def entry_is_junk(hand: Any) -> set[Any]:
    key, _ = entry_of(hand, hand.ids["plain"][0])
    hand.put("log", key, JUNK)
    return {(Kind.UNDECODABLE, "log", key)}


def entry_without_messages(hand: Any) -> set[Any]:
    key, _ = entry_of(hand, hand.ids["plain"][0])
    empty = key[:-1] + bytes([key[-1] + 1])
    hand.put("log", empty, opendata.encode_metadata_batch([]))
    return {(Kind.UNDECODABLE, "log", empty)}


def entry_metadata_is_junk(hand: Any) -> set[Any]:
    key, value = entry_of(hand, hand.ids["plain"][0])
    rows = opendata.decode_metadata_batch(value)
    hand.put("log", key, opendata.encode_metadata_batch([(rows[0][0], JUNK), *rows[1:]]))
    return {(Kind.UNDECODABLE, "log", key)}


def entry_under_another_offset(hand: Any) -> set[Any]:
    key, value = entry_of(hand, hand.ids["plain"][0])
    segment, log_key, relative = opendata.parse_entry_key(key)
    wrong = opendata.entry_key(segment, log_key, relative + 1)
    hand.delete("log", key)
    hand.put("log", wrong, value)
    return {(Kind.WRONG_KEY, "log", wrong)}


def entry_comes_again(hand: Any) -> set[Any]:
    key, value = entry_of(hand, hand.ids["plain"][0])
    segment, log_key, relative = opendata.parse_entry_key(key)
    again = opendata.entry_key(segment, log_key, relative + 1)
    hand.put("log", again, value)
    return {(Kind.ORDER, "log", again)}


def unrouted_row_is_junk(hand: Any) -> set[Any]:
    expected = unrouted_row_is_gone(hand)
    key = b"\x02\x11\x00\x00\x00\x01" + bytes(8)
    hand.put("log", key, b"?")
    return expected | {(Kind.UNDECODABLE, "log", key)}


def unrouted_row_of_no_segment(hand: Any) -> set[Any]:
    key = b"\x02\x11\x00\x00\x00\x63" + (7).to_bytes(8, "big")
    hand.put("log", key, key[6:])
    return {(Kind.STRANGER, "log", key)}


# --- dedup ---------------------------------------------------------------------------------------


def dedup_rows(hand: Any, kind: bytes) -> list[tuple[bytes, bytes]]:
    rows: list[tuple[bytes, bytes]] = hand.rows("dedup", kind)
    assert len(rows) == 2
    return rows


def dedup_row_is_gone(hand: Any) -> set[Any]:
    (key, _), _ = dedup_rows(hand, b"\x00")
    (row, _), _ = dedup_rows(hand, b"\x01")
    hand.delete("dedup", row)
    return {(Kind.MISSING_ENTRY, "dedup", key)}


def dedup_row_is_junk(hand: Any) -> set[Any]:
    (key, _), _ = dedup_rows(hand, b"\x00")
    (row, _), _ = dedup_rows(hand, b"\x01")
    hand.put("dedup", row, JUNK)
    return {(Kind.MISSING_ENTRY, "dedup", key), (Kind.UNDECODABLE, "dedup", row)}


def dedup_id_is_junk(hand: Any) -> set[Any]:
    (key, _), _ = dedup_rows(hand, b"\x00")
    hand.put("dedup", key, JUNK)
    return {(Kind.UNDECODABLE, "dedup", key)}


def unknown_dedup_key(hand: Any) -> set[Any]:
    hand.put("dedup", b"\x07", b"?")
    return {(Kind.STRANGER, "dedup", b"\x07")}


# --- pipelines -----------------------------------------------------------------------------------


def cursor_key(log: int) -> bytes:
    return b"\x02\x12" + log.to_bytes(4, "big")


def cursor_falls_back(hand: Any) -> set[Any]:
    hand.put("default", cursor_key(0), (2).to_bytes(8, "big"))
    hand.put("default", cursor_key(1), (2).to_bytes(8, "big"))
    return {(Kind.CURSOR, "default", cursor_key(log)) for log in (0, 1)}


def cursor_is_ahead(hand: Any) -> set[Any]:
    hand.put("default", cursor_key(0), (1 << 40).to_bytes(8, "big"))
    hand.put("default", cursor_key(1), JUNK)
    return {(Kind.CURSOR, "default", cursor_key(log)) for log in (0, 1)}


def cursor_of_no_log(hand: Any) -> set[Any]:
    hand.put("default", cursor_key(9), bytes(8))
    return {(Kind.UNDECODABLE, "default", cursor_key(9))}


def unassigned_payload_is_gone(hand: Any) -> set[Any]:
    message_id = hand.ids["late"][0]
    hand.delete("payloads", payload_key(message_id))
    return {(Kind.PAYLOAD_MISSING, "payloads", payload_key(message_id))}


def epoch_is_junk(hand: Any) -> set[Any]:
    hand.put("default", b"\x02\x14", JUNK)
    return {(Kind.UNDECODABLE, "default", b"\x02\x14")}


SHARED = [
    identity_is_junk, totals_are_junk, totals_are_gone, unknown_system_key,
    queue_numbers_fall_back, queue_numbers_are_junk, spec_is_junk, spec_is_gone, spec_of_nobody,
    coverage_is_gone, coverage_is_closed, counters_are_junk, depths_are_wrong,
    totals_do_not_add_up, sequences_fall_back, lease_is_gone, lease_of_fifo_is_junk,
    expiry_entry_is_gone, expiry_entry_names_another, expiry_entry_of_nobody,
    lease_names_another_expiry, lease_lists_too_much, empty_lease, lease_of_no_queue,
    done_part_is_junk, done_metadata_is_junk, done_twice, empty_part, part_in_the_wrong_bucket,
    part_in_a_bucket_of_no_size, waiting_and_done, in_flight_and_done, failed_and_live,
    failed_index_is_gone, failed_index_names_another_part, failed_index_of_nobody,
    attempt_of_nobody,
    attempt_that_was_not_made, attempt_is_junk, history_of_no_queue, unclaimed_row_is_gone,
    unclaimed_row_is_junk, unclaimed_row_of_no_queue, payload_is_gone, count_is_gone,
    count_is_wrong, count_of_one, count_of_nobody, payload_of_nobody, unrouted_row_is_gone,
    unknown_payload_key, log_settings_are_junk, unknown_log_key, message_ids_fall_back,
    message_ids_are_junk, segment_is_not_described, segment_starts_elsewhere,
    segment_goes_back_in_time, segment_description_is_junk, listing_is_gone, entry_is_junk,
    entry_without_messages, entry_metadata_is_junk, entry_under_another_offset,
    entry_comes_again, unrouted_row_is_junk, unrouted_row_of_no_segment, dedup_row_is_gone,
    dedup_row_is_junk, dedup_id_is_junk, unknown_dedup_key, epoch_is_junk,
]  # fmt: skip
PIPELINE = [cursor_falls_back, cursor_is_ahead, cursor_of_no_log, unassigned_payload_is_gone]


def name_of(damage: Callable[[Any], set[Any]]) -> str:
    return damage.__name__


@pytest.mark.parametrize("design", ["indexed", "buckets"])
@pytest.mark.parametrize("damage", SHARED, ids=name_of)
def test_inline(make_hand: Any, examine: Any, design: str, damage: Any) -> None:
    examine(make_hand("memory", design, "inline"), damage)


@pytest.mark.parametrize("design", ["indexed", "buckets"])
@pytest.mark.parametrize("damage", [*SHARED, *PIPELINE], ids=name_of)
def test_pipeline(make_hand: Any, examine: Any, design: str, damage: Any) -> None:
    examine(make_hand("memory", design, "pipeline"), damage)


@pytest.mark.parametrize("design", ["indexed", "buckets"])
@pytest.mark.parametrize("damage", SHARED[::6], ids=name_of)
def test_rocksdb(make_hand: Any, examine: Any, design: str, damage: Any) -> None:
    examine(make_hand("rocksdb", design, "inline"), damage)


def test_every_kind_is_tested() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    # Only the SQL store has this one: tests/sql/test_audit.py.
    kinds = [kind.name for kind in Kind if kind is not Kind.EARLY]
    assert [name for name in kinds if f"Kind.{name}" not in text] == []


def test_the_report_is_whole() -> None:
    report = AuditReport(checked={}, found={}, violations=[], notes=[], left=0, rounds=1)
    assert report.ok
    assert report.clean
