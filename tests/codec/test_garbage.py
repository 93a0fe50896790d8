"""Every decoder, given bytes that nobody wrote: CorruptRecord, or a record that is those bytes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptRecord
from penstock.model import QueueSpec
from penstock.store.codec import buckets as bkt
from penstock.store.codec import opendata as od
from penstock.store.codec import records as rec
from penstock.store.codec import records as stored

if TYPE_CHECKING:
    from collections.abc import Callable


class Case(NamedTuple):
    """A decoder, a record for it, and the way back from what it gives to bytes."""

    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    sample: bytes
    open_ended: bool = False  # the last field runs to the end: a cut or longer one is another


CLAIM = od.make_id(2, 345)
SPEC = QueueSpec(name="q", filter="a = 'ü'", description="d", dead_letter="dëad", labels={"a": "ü"})
AVAILABLE = bkt.Available(1, CLAIM, 2, b"meta", 3, 4, 5, "gröup")
IN_FLIGHT = bkt.InFlight(1, CLAIM, 2, 3, 4, b"meta", 5, 6, 7, "gröup", bytes(range(16)))


def pack_decoded(active: tuple[list[Any], list[Any]]) -> bytes:
    """Encode from the fields, not from the bytes that came along."""
    return bkt.pack_active(
        [bkt.encode_available(entry) for entry, _ in active[0]],
        [bkt.encode_in_flight(entry) for entry, _ in active[1]],
    )


def encode_item(item: Any) -> bytes:
    """Encode a StoredItem with its lease, or without if it has none."""
    record = stored.encode_stored_item(*item[:5])
    return record if item[5] == stored.NO_LEASE else stored.with_lease(record, item[5])


VALUES = {
    "active": Case(
        bkt.decode_active,
        pack_decoded,
        bkt.pack_active(
            [bkt.encode_available(AVAILABLE)] * 2, [bkt.encode_in_flight(IN_FLIGHT)] * 2
        ),
    ),
    "done": Case(
        partial(rec.decode_ended, failed=False),
        partial(rec.encode_ended, failed=False),
        rec.encode_ended([rec.Ended(1, CLAIM, 2, 3, b"meta")] * 2, failed=False),
    ),
    "failed": Case(
        partial(rec.decode_ended, failed=True),
        partial(rec.encode_ended, failed=True),
        rec.encode_ended([rec.Ended(1, CLAIM, 2, 3, b"meta", "wäs")] * 2, failed=True),
    ),
    "done, first claims": Case(
        partial(rec.decode_ended, failed=False),
        partial(rec.encode_ended, failed=False),
        rec.encode_ended(
            [rec.Ended(1, CLAIM, 2_000, 3, b"meta", "", at) for at in (5, 5, None)], failed=False
        ),
    ),
    "failed, first claims": Case(
        partial(rec.decode_ended, failed=True),
        partial(rec.encode_ended, failed=True),
        rec.encode_ended([rec.Ended(1, CLAIM, 2, 3, b"meta", "wäs", 1)] * 2, failed=True),
    ),
    "attempt": Case(
        rec.decode_attempt,
        rec.encode_attempt,
        rec.encode_attempt(rec.AttemptRecord(1, "wörker", 2, 3, "wäs")),
    ),
    "queue spec": Case(
        rec.decode_queue_spec,
        lambda decoded: rec.encode_queue_spec(*decoded),
        rec.encode_queue_spec(SPEC, 11),
    ),
    "seq block": Case(
        od.decode_seq_block,
        lambda block: od.encode_seq_block(*block),
        od.encode_seq_block(4096, 4096),
    ),
    "segment meta": Case(
        od.decode_segment_meta,
        lambda meta: od.encode_segment_meta(*meta),
        od.encode_segment_meta(1, 2),
    ),
    "metadata batch": Case(
        od.decode_metadata_batch,
        od.encode_metadata_batch,
        od.encode_metadata_batch([(1, b"meta"), (2, b"data")]),
    ),
    "stored item": Case(
        stored.decode_stored_item,
        encode_item,
        stored.encode_stored_item(b"hello", b"lane", 1, 2, 3),
        open_ended=True,
    ),
    "stored item in flight": Case(
        stored.decode_stored_item,
        encode_item,
        encode_item((b"hello", b"lane", 1, 2, 3, b"L" * 16)),
        open_ended=True,
    ),
    "lease": Case(
        stored.decode_lease,
        lambda lease: stored.encode_lease(*lease),
        stored.encode_lease([b"AAAAAAAA", b"BBBBBBBB"], 1500, b"index key", 7, 9, "wörker"),
    ),
}

KEYS = {
    "active": Case(
        od.ACTIVE.parse,
        lambda fields: od.ACTIVE.key(*fields),
        od.ACTIVE.key(b"a\0b", CLAIM),
    ),
    "done": Case(
        od.DONE.parse,
        lambda fields: od.DONE.key(*fields),
        od.DONE.key(b"a\1b", CLAIM, 1),
    ),
    "failed": Case(
        od.FAILED.parse,
        lambda fields: od.FAILED.key(*fields),
        od.FAILED.key(b"a\0", CLAIM, 2),
    ),
    "attempts": Case(
        od.ATTEMPTS.parse,
        lambda fields: od.ATTEMPTS.key(*fields),
        od.ATTEMPTS.key(b"\1\1", 7, 2),
    ),
    "log entry": Case(
        od.parse_entry_key,
        lambda fields: od.entry_key(*fields),
        od.entry_key(1, b"k\0", 5_000),
    ),
    "log segment": Case(od.parse_segment_meta_key, od.segment_meta_key, od.segment_meta_key(7)),
    "log listing": Case(
        od.parse_listing_key,
        lambda fields: od.listing_key(*fields),
        od.listing_key(1, b"k"),
        open_ended=True,
    ),
}
CASES = {
    f"{kind} {name}": case
    for kind, cases in (("value", VALUES), ("key", KEYS))
    for name, case in cases.items()
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
EXACT = {name: case for name, case in CASES.items() if not case.open_ended}
EVERY_EXACT = pytest.mark.parametrize("case", EXACT.values(), ids=EXACT.keys())


def check(case: Case, buf: bytes) -> None:
    try:
        decoded = case.decode(buf)
    except CorruptRecord:
        return
    assert case.encode(decoded) == buf


@st.composite
def mutations(draw: st.DrawFn, sample: bytes) -> bytes:
    """Change, cut out or put in bytes at up to three places."""
    buf = sample
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(buf)))
        cut = draw(st.integers(0, 3))
        put = draw(st.binary(max_size=3))
        buf = buf[:at] + put + buf[at + cut :]
    return buf


@EVERY
@given(data=st.data())
def test_mutations(case: Case, data: st.DataObject) -> None:
    check(case, data.draw(mutations(case.sample)))


@EVERY
@given(buf=st.binary(max_size=120))
def test_random_bytes(case: Case, buf: bytes) -> None:
    check(case, buf)


@EVERY
def test_every_byte_set_to_every_extreme(case: Case) -> None:
    for at in range(len(case.sample)):
        for value in (0, 1, 0x7F, 0x80, 0xFF):
            buf = bytearray(case.sample)
            buf[at] = value
            check(case, bytes(buf))


@EVERY
def test_the_sample_itself_decodes(case: Case) -> None:
    assert case.encode(case.decode(case.sample)) == case.sample


@EVERY_EXACT
def test_every_truncation_is_corrupt(case: Case) -> None:
    for size in range(len(case.sample)):
        with pytest.raises(CorruptRecord, match=r"^[\w ,]+: ."):  # which record, and why
            case.decode(case.sample[:size])


@EVERY_EXACT
@pytest.mark.parametrize("extra", [b"\0", b"\0" * 8, b"\xff"])
def test_trailing_bytes_are_corrupt(case: Case, extra: bytes) -> None:
    with pytest.raises(CorruptRecord):
        case.decode(case.sample + extra)


@pytest.mark.parametrize("name", ["active", "done", "failed", "metadata batch"])
@pytest.mark.parametrize("count", [0, 1, 3, 0xFFFF])
def test_counts_that_the_data_does_not_bear_out(name: str, count: int) -> None:
    case = VALUES[name]
    with pytest.raises(CorruptRecord):
        case.decode(count.to_bytes(2, "little") + case.sample[2:])
