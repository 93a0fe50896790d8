from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptRecord, InvalidInput
from penstock.model import Ordering, QueueSpec
from penstock.store.codec import buckets as bkt
from penstock.store.codec import records as rec
from penstock.store.codec.opendata import make_id

if TYPE_CHECKING:
    from collections.abc import Callable

U8 = st.integers(0, 2**8 - 1)
U16 = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
META = st.binary(max_size=12)
TEXT = st.text(max_size=8)

AVAILABLE = st.builds(bkt.Available, U64, U64, U16, META, I64, U16, U8, TEXT)
IN_FLIGHT = st.builds(
    bkt.InFlight,
    U64,
    U64,
    I64,
    I64,
    U16,
    META,
    I64,
    U16,
    U8,
    TEXT,
    st.binary(min_size=16, max_size=16),
)
# Few of them, so that some elements have theirs in common.
CLAIMED = st.none() | st.integers(0, 2) | st.integers(0, 2**62)
TIME = st.integers(0, 2**62)
DONE = st.builds(rec.Ended, U64, U64, TIME, U16, META, st.just(""), CLAIMED, st.just(b""))
FAILED = st.builds(rec.Ended, U64, U64, TIME, U16, META, TEXT, CLAIMED, st.just(b""))
ATTEMPT = st.builds(rec.AttemptRecord, I64, TEXT, I64, U8, TEXT)
I64_OR_MORE = st.integers(-(2**63), 2**64 - 1)
SPEC = st.builds(
    QueueSpec,
    name=TEXT,
    filter=TEXT,
    ordering=st.sampled_from(Ordering),
    lease_ms=I64_OR_MORE,
    max_attempts=U16,
    delay_ms=U64,
    bucket_exponent=st.integers(0, 4),
    description=TEXT,
    dead_letter=TEXT,
    labels=st.dictionaries(TEXT, TEXT, max_size=3),
    created_at_ms=U64,
    version=U64,
)

CLAIM = make_id(1, 23)
ID = "07 00 00 00 00 00 00 00"
CLAIM_HEX = "17 00 00 00 00 00 00 10"
HI = "02 00 00 00 68 69"
LEASE = bytes(range(16))
LEASE_HEX = "00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f"

# --- byte for byte ------------------------------------------------------------------------


def test_active() -> None:
    first = bytes.fromhex(f"{ID} {CLAIM_HEX} 01 00 {HI} 08 00 00 00 00 00 00 00 03 00 04 01 00 67")
    second = bytes.fromhex(
        f"{ID} {CLAIM_HEX} 01 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00 05 00 {HI}"
        f"ff ff ff ff ff ff ff ff 03 00 04 01 00 67 {LEASE_HEX}"
    )
    available = bkt.Available(7, CLAIM, 1, b"hi", 8, 3, 4, "g")
    in_flight = bkt.InFlight(7, CLAIM, 1, 2, 5, b"hi", -1, 3, 4, "g", LEASE)
    assert bkt.encode_available(available) == first
    assert bkt.encode_in_flight(in_flight) == second
    value = bkt.pack_active([first, first], [second])
    assert value == bytes.fromhex("02 00") + first + first + bytes.fromhex("01 00") + second
    decoded = bkt.decode_active(value)
    assert decoded == ([(available, first), (available, first)], [(in_flight, second)])
    assert isinstance(decoded[0][0][0], bkt.Available)
    assert isinstance(decoded[1][0][0], bkt.InFlight)
    assert bkt.pack_active([], []) == bytes(4)


DONE_HEX = f"{ID} {CLAIM_HEX} 09 00 00 00 00 00 00 00 02 00 {HI}"


def test_done() -> None:
    # As format 2 had all of them, and as those are of which no first claim is known.
    value = bytes.fromhex(f"01 00 {DONE_HEX}")
    assert rec.encode_ended([rec.Ended(7, CLAIM, 9, 2, b"hi")], failed=False) == value
    assert rec.decode_ended(value, failed=False) == [rec.Ended(7, CLAIM, 9, 2, b"hi")]


def test_failed() -> None:
    value = bytes.fromhex(f"01 00 {DONE_HEX} 03 00 77 68 79")
    assert rec.encode_ended([rec.Ended(7, CLAIM, 9, 2, b"hi", "why")], failed=True) == value
    assert rec.decode_ended(value, failed=True) == [rec.Ended(7, CLAIM, 9, 2, b"hi", "why")]
    assert isinstance(rec.decode_ended(value, failed=True)[0], rec.Ended)


def test_first_claims() -> None:
    # Two were first claimed 4 ms before the first one ended, one nobody knows when, one 3 ms after.
    runs = "02 09  01 00  01 06"
    value = bytes.fromhex(f"04 80 {runs} {DONE_HEX * 4}")
    entries = [rec.Ended(7, CLAIM, 9, 2, b"hi", "", at_ms) for at_ms in (5, 5, None, 12)]
    assert rec.encode_ended(entries, failed=False) == value
    assert rec.decode_ended(value, failed=False) == entries
    failed = bytes.fromhex(f"01 80 01 10 1d {DONE_HEX} 03 00 77 68 79")
    (entry,) = rec.decode_ended(failed, failed=True)
    assert entry == rec.Ended(7, CLAIM, 9, 2, b"hi", "why", -5)
    assert rec.encode_ended([entry], failed=True) == failed


@pytest.mark.parametrize(
    "runs",
    [
        "01 00",  # known of none
        "01 03 01 03",  # two runs of one, where one of two would do
        "00 03 02 05",  # an empty run
        "03 03",  # more than there are
        "01 03",  # fewer
        "02 10 03",  # a number in more bytes than it needs
    ],
)
def test_first_claims_have_one_spelling(runs: str) -> None:
    count = 1 if runs == "01 00" else 2
    value = bytes.fromhex(f"{count:02x} 80 {runs} {DONE_HEX * count}")
    with pytest.raises(CorruptRecord, match="done: "):
        rec.decode_ended(value, failed=False)


def test_attempt() -> None:
    value = bytes.fromhex(
        "01 00 00 00 00 00 00 00 01 00 77 02 00 00 00 00 00 00 00 03 03 00 77 68 79"
    )
    attempt = rec.AttemptRecord(1, "w", 2, 3, "why")
    assert rec.encode_attempt(attempt) == value
    assert rec.decode_attempt(value) == attempt


SPEC_1 = QueueSpec(
    name="q",
    filter="f",
    ordering=Ordering.FIFO,
    description="é",
    created_at_ms=3,
    version=4,
    labels={"b": "", "a": "ü"},
)
SPEC_1_HEX = (
    "01 92 05 de 00 11"  # version, [number 5, map of 17
    "a4 6e 61 6d 65 a1 71"  # name: q
    "a6 66 69 6c 74 65 72 a1 66"  # filter: f
    "a8 6f 72 64 65 72 69 6e 67 a4 66 69 66 6f"  # ordering: fifo
    "a8 6c 65 61 73 65 5f 6d 73 cd 75 30"  # lease_ms
    "ac 6d 61 78 5f 61 74 74 65 6d 70 74 73 05"  # max_attempts
    "af 62 61 63 6b 6f 66 66 5f 62 61 73 65 5f 6d 73 cd 03 e8"  # backoff_base_ms
    "ae 62 61 63 6b 6f 66 66 5f 63 61 70 5f 6d 73 ce 00 04 93 e0"  # backoff_cap_ms
    "a8 64 65 6c 61 79 5f 6d 73 00"  # delay_ms
    "b1 64 6f 6e 65 5f 72 65 74 65 6e 74 69 6f 6e 5f 6d 73 ce 05 26 5c 00"  # done_retention_ms
    "b3 66 61 69 6c 65 64 5f 72 65 74 65 6e 74 69 6f 6e 5f 6d 73 ce 48 19 08 00"  # failed
    "b6 75 6e 63 6c 61 69 6d 65 64 5f 72 65 74 65 6e 74 69 6f 6e 5f 6d 73 00"  # unclaimed
    "af 62 75 63 6b 65 74 5f 65 78 70 6f 6e 65 6e 74 02"  # bucket_exponent
    "ab 64 65 73 63 72 69 70 74 69 6f 6e a2 c3 a9"  # description: é
    "ab 64 65 61 64 5f 6c 65 74 74 65 72 a0"  # dead_letter
    "a6 6c 61 62 65 6c 73 82 a1 61 a2 c3 bc a1 62 a0"  # labels, in the order of their names
    "ad 63 72 65 61 74 65 64 5f 61 74 5f 6d 73 03"  # created_at_ms
    "a7 76 65 72 73 69 6f 6e 04"  # version
)


def test_queue_spec() -> None:
    assert rec.encode_queue_spec(SPEC_1, 5).hex(" ") == bytes.fromhex(SPEC_1_HEX).hex(" ")
    assert rec.decode_queue_spec(bytes.fromhex(SPEC_1_HEX)) == (SPEC_1, 5)


def test_labels_in_another_order_are_the_same_bytes() -> None:
    other = msgspec.structs.replace(SPEC_1, labels={"a": "ü", "b": ""})
    assert rec.encode_queue_spec(other, 5) == rec.encode_queue_spec(SPEC_1, 5)


def test_labels_out_of_order_are_corrupt() -> None:
    record = b"\x01" + msgspec.msgpack.encode((5, SPEC_1))
    with pytest.raises(CorruptRecord, match="laid out"):
        rec.decode_queue_spec(record)


@pytest.mark.parametrize("version", [b"", b"\0", b"\2"])
def test_unknown_version_of_a_spec(version: bytes) -> None:
    with pytest.raises(CorruptRecord, match="version"):
        rec.decode_queue_spec(version + bytes.fromhex(SPEC_1_HEX)[1:] if version else b"")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"bucket_exponent": 5}, "exponent 5"),
        ({"bucket_exponent": -1}, "exponent -1"),
        ({"filter": 7}, "filter"),
        ({"ordering": "any"}, "ordering"),
        ({"lease_ms": 1.5}, "lease_ms"),
        ({"added": 1}, "laid out"),
    ],
)
def test_specs_that_are_corrupt(changed: dict[str, object], why: str) -> None:
    fields = {**msgspec.to_builtins(SPEC_1), **changed}
    with pytest.raises(CorruptRecord, match=why):
        rec.decode_queue_spec(b"\x01" + msgspec.msgpack.encode((5, fields)))


@pytest.mark.parametrize("number", [-1, 2**32])
def test_numbers_of_queues_have_32_bits(number: int) -> None:
    with pytest.raises(CorruptRecord, match="queue spec: "):
        rec.decode_queue_spec(b"\x01" + msgspec.msgpack.encode((number, SPEC_1)))


# --- round trips and bounds -----------------------------------------------------------------


@given(st.lists(AVAILABLE, max_size=4), st.lists(IN_FLIGHT, max_size=4))
def test_active_round_trip(available: list[bkt.Available], in_flight: list[bkt.InFlight]) -> None:
    first = [bkt.encode_available(entry) for entry in available]
    second = [bkt.encode_in_flight(entry) for entry in in_flight]
    decoded = bkt.decode_active(bkt.pack_active(first, second))
    assert decoded == (
        list(zip(available, first, strict=True)),
        list(zip(in_flight, second, strict=True)),
    )


@given(
    st.lists(DONE, max_size=4),
    st.lists(FAILED, max_size=4),
    ATTEMPT,
)
def test_history_round_trip(
    done: list[rec.Ended],
    failed: list[rec.Ended],
    attempt: rec.AttemptRecord,
) -> None:
    assert rec.decode_ended(rec.encode_ended(done, failed=False), failed=False) == done
    assert rec.decode_ended(rec.encode_ended(failed, failed=True), failed=True) == failed
    assert rec.decode_attempt(rec.encode_attempt(attempt)) == attempt


@given(SPEC, U32)
def test_queue_spec_round_trip(spec: QueueSpec, number: int) -> None:
    assert rec.decode_queue_spec(rec.encode_queue_spec(spec, number)) == (spec, number)


def test_an_array_holds_65535() -> None:
    too_long: list[Callable[[], bytes]] = [
        lambda: bkt.pack_active([b""] * 65_536, []),
        lambda: bkt.pack_active([], [b""] * 65_536),
    ]
    for encode in too_long:
        with pytest.raises(InvalidInput, match="65535"):
            encode()


@pytest.mark.parametrize("claimed_ms", [None, 0])
def test_a_part_of_history_holds_32767(claimed_ms: int | None) -> None:
    done = rec.Ended(0, 0, 0, 0, b"", "", claimed_ms)
    value = rec.encode_ended([done] * 32_767, failed=False)
    assert len(rec.decode_ended(value, failed=False)) == 32_767
    for failed in (True, False):
        with pytest.raises(InvalidInput, match="32767"):
            rec.encode_ended([done] * 32_768, failed=failed)
