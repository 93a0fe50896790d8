from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptRecord, InvalidInput
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

AVAILABLE_V1 = st.builds(rec.AvailableV1, U64, U64, U16, META)
IN_FLIGHT_V1 = st.builds(rec.InFlightV1, U64, U64, I64, I64, U16, META)
AVAILABLE = st.builds(rec.Available, U64, U64, U16, META, I64, U16, U8, TEXT)
IN_FLIGHT = st.builds(
    rec.InFlight,
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
DONE = st.builds(rec.Done, U64, U64, I64, U16, META)
FAILED_V1 = st.builds(rec.FailedV1, U64, U64, I64, U16, META)
FAILED = st.builds(rec.Failed, U64, U64, I64, U16, META, TEXT)
ATTEMPT_V1 = st.builds(rec.AttemptV1, I64, TEXT)
ATTEMPT = st.builds(rec.AttemptRecord, I64, TEXT, I64, U8, TEXT)
SPEC_V1 = st.builds(rec.QueueSpecV1, TEXT, U16, U32, st.integers(0, 4), TEXT)
SPEC = st.builds(
    rec.QueueSpecV2,
    TEXT,
    U16,
    st.integers(0, 4),
    TEXT,
    U8,
    U64,
    U64,
    U64,
    U64,
    U64,
    U64,
    U64,
    U64,
    U64,
    U32,
    TEXT,
    st.dictionaries(TEXT, TEXT, max_size=3).map(lambda labels: tuple(sorted(labels.items()))),
)

CLAIM = make_id(1, 23)
ID = "07 00 00 00 00 00 00 00"
CLAIM_HEX = "17 00 00 00 00 00 00 10"
HI = "02 00 00 00 68 69"
LEASE = bytes(range(16))
LEASE_HEX = "00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f"

SPEC_V1_HEX = "01 00 66 05 00 10 0e 00 00 03 02 00 c3 a9"
SPEC_V2_HEX = (
    # filter `f`, 5 attempts, 2 s (1,001 ms rounded up), exponent 3, description `é`
    "01 00 66 05 00 02 00 00 00 03 02 00 c3 a9"
    # fifo; lease, back-off base and cap, delay
    "01 30 75 00 00 00 00 00 00 e8 03 00 00 00 00 00 00"
    "e0 93 04 00 00 00 00 00 07 00 00 00 00 00 00 00"
    # retention of done, failed, unclaimed; created at, spec version, number
    "e9 03 00 00 00 00 00 00 01 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00"
    "03 00 00 00 00 00 00 00 04 00 00 00 00 00 00 00 05 00 00 00"
)
SPEC_V2 = rec.QueueSpecV2(
    filter="f",
    max_attempts=5,
    bucket_exponent=3,
    description="é",
    ordering=1,
    lease_ms=30_000,
    backoff_base_ms=1_000,
    backoff_cap_ms=300_000,
    delay_ms=7,
    done_retention_ms=1_001,
    failed_retention_ms=1,
    unclaimed_retention_ms=2,
    created_at_ms=3,
    spec_version=4,
    number=5,
)


# --- version 1, byte for byte ---------------------------------------------------------------


def test_active_v1() -> None:
    value = bytes.fromhex(f"01 00 {ID} {CLAIM_HEX} 00 00 {HI} 00 00")
    available = [rec.AvailableV1(7, CLAIM, 0, b"hi")]
    assert rec.encode_active_v1(available, []) == value
    assert rec.decode_active_v1(value) == (available, [])

    value = bytes.fromhex(
        f"00 00 01 00 {ID} {CLAIM_HEX} 01 00 00 00 00 00 00 00 ff ff ff ff ff ff ff ff 02 01 {HI}"
    )
    in_flight = [rec.InFlightV1(7, CLAIM, 1, -1, 258, b"hi")]
    assert rec.encode_active_v1([], in_flight) == value
    assert rec.decode_active_v1(value) == ([], in_flight)


def test_done_and_failed_v1() -> None:
    value = bytes.fromhex(f"01 00 {ID} {CLAIM_HEX} 09 00 00 00 00 00 00 00 02 00 {HI}")
    assert rec.encode_done_v1([rec.DoneV1(7, CLAIM, 9, 2, b"hi")]) == value
    assert rec.decode_done_v1(value) == [rec.DoneV1(7, CLAIM, 9, 2, b"hi")]
    assert rec.encode_failed_v1([rec.FailedV1(7, CLAIM, 9, 2, b"hi")]) == value
    assert rec.decode_failed_v1(value) == [rec.FailedV1(7, CLAIM, 9, 2, b"hi")]
    assert isinstance(rec.decode_failed_v1(value)[0], rec.FailedV1)


def test_attempts_v1() -> None:
    value = bytes.fromhex("02 00 01 00 00 00 00 00 00 00 01 00 77 02 00 00 00 00 00 00 00 00 00")
    attempts = [rec.AttemptV1(1, "w"), rec.AttemptV1(2, "")]
    assert rec.encode_attempts_v1(attempts) == value
    assert rec.decode_attempts_v1(value) == attempts


def test_queue_spec_v1() -> None:
    spec = rec.QueueSpecV1("f", 5, 3600, 3, "é")
    assert rec.encode_queue_spec_v1(spec) == bytes.fromhex(SPEC_V1_HEX)
    assert rec.decode_queue_spec_v1(bytes.fromhex(SPEC_V1_HEX)) == spec


# --- version 2, byte for byte ---------------------------------------------------------------


def test_active_v2() -> None:
    first = bytes.fromhex(f"{ID} {CLAIM_HEX} 01 00 {HI} 08 00 00 00 00 00 00 00 03 00 04 01 00 67")
    second = bytes.fromhex(
        f"{ID} {CLAIM_HEX} 01 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00 05 00 {HI}"
        f"ff ff ff ff ff ff ff ff 03 00 04 01 00 67 {LEASE_HEX}"
    )
    available = rec.Available(7, CLAIM, 1, b"hi", 8, 3, 4, "g")
    in_flight = rec.InFlight(7, CLAIM, 1, 2, 5, b"hi", -1, 3, 4, "g", LEASE)
    assert rec.encode_available(available) == first
    assert rec.encode_in_flight(in_flight) == second
    value = rec.pack_active([first, first], [second])
    assert value == bytes.fromhex("02 00") + first + first + bytes.fromhex("01 00") + second
    decoded = rec.decode_active(value)
    assert decoded == ([(available, first), (available, first)], [(in_flight, second)])
    assert isinstance(decoded[0][0][0], rec.Available)
    assert isinstance(decoded[1][0][0], rec.InFlight)
    assert rec.pack_active([], []) == bytes(4)


def test_done_v2_is_done_v1() -> None:
    value = bytes.fromhex(f"01 00 {ID} {CLAIM_HEX} 09 00 00 00 00 00 00 00 02 00 {HI}")
    assert rec.encode_done([rec.Done(7, CLAIM, 9, 2, b"hi")]) == value
    assert rec.decode_done(value) == [rec.Done(7, CLAIM, 9, 2, b"hi")]


def test_failed_v2() -> None:
    value = bytes.fromhex(
        f"01 00 {ID} {CLAIM_HEX} 09 00 00 00 00 00 00 00 02 00 {HI} 03 00 77 68 79"
    )
    assert rec.encode_failed([rec.Failed(7, CLAIM, 9, 2, b"hi", "why")]) == value
    assert rec.decode_failed(value) == [rec.Failed(7, CLAIM, 9, 2, b"hi", "why")]
    assert isinstance(rec.decode_failed(value)[0], rec.Failed)


def test_attempt_v2() -> None:
    value = bytes.fromhex(
        "01 00 00 00 00 00 00 00 01 00 77 02 00 00 00 00 00 00 00 03 03 00 77 68 79"
    )
    attempt = rec.AttemptRecord(1, "w", 2, 3, "why")
    assert rec.encode_attempt(attempt) == value
    assert rec.decode_attempt(value) == attempt


def test_queue_spec_v2() -> None:
    assert rec.encode_queue_spec(SPEC_V2) == bytes.fromhex(SPEC_V2_HEX)
    assert rec.decode_queue_spec(2, bytes.fromhex(SPEC_V2_HEX)) == SPEC_V2


@pytest.mark.parametrize(
    ("ms", "secs"), [(0, 0), (1, 1), (1_000, 1), (1_001, 2), (2**63, 2**32 - 1)]
)
def test_retention_in_seconds_is_derived(ms: int, secs: int) -> None:
    value = rec.encode_queue_spec(SPEC_V2._replace(done_retention_ms=ms))
    assert int.from_bytes(value[5:9], "little") == secs
    assert rec.decode_queue_spec(2, value).done_retention_ms == ms


def test_retentions_that_disagree_are_corrupt() -> None:
    value = bytearray.fromhex(SPEC_V2_HEX)
    value[5] = 3
    with pytest.raises(CorruptRecord, match="3 s and 1001 ms"):
        rec.decode_queue_spec(2, bytes(value))


SPEC_V2_TAIL_HEX = (
    "04 00 64 65 61 64"  # dead letter queue "dead"
    "02 00"  # two labels
    "01 00 61 02 00 00 00 c3 bc"  # a: ü
    "01 00 62 00 00 00 00"  # b: nothing
)


def test_a_spec_with_a_dead_letter_queue_and_labels() -> None:
    spec = SPEC_V2._replace(dead_letter="dead", labels=(("a", "ü"), ("b", "")))
    value = bytes.fromhex(SPEC_V2_HEX + SPEC_V2_TAIL_HEX)
    assert rec.encode_queue_spec(spec) == value
    assert rec.decode_queue_spec(2, value) == spec


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        ("00 00 00 00", "say nothing"),
        ("00 00 02 00 01 00 62 00 00 00 00 01 00 61 00 00 00 00", "not in order"),
        ("00 00 02 00 01 00 61 00 00 00 00 01 00 61 00 00 00 00", "not in order"),
        ("00 00 01 00 01 00 61 01 00 00 00 ff", "label 'a'"),
        ("04 00 64 65 61 64 00 00 00", "bytes"),
    ],
)
def test_tails_of_a_spec_that_are_corrupt(tail: str, why: str) -> None:
    with pytest.raises(CorruptRecord, match=why):
        rec.decode_queue_spec(2, bytes.fromhex(SPEC_V2_HEX + tail))


@pytest.mark.parametrize("version", [0, 3])
def test_unknown_version_of_a_spec(version: int) -> None:
    with pytest.raises(CorruptRecord, match=f"version {version}"):
        rec.decode_queue_spec(version, bytes.fromhex(SPEC_V2_HEX))


@pytest.mark.parametrize("version", [1, 2])
def test_exponent_above_4_is_corrupt(version: int) -> None:
    value = bytearray.fromhex(SPEC_V1_HEX if version == 1 else SPEC_V2_HEX)
    value[9] = 5
    with pytest.raises(CorruptRecord, match="exponent 5"):
        rec.decode_queue_spec(version, bytes(value))


# --- from version 1 to 2 --------------------------------------------------------------------


def test_upgraded_active() -> None:
    old = rec.encode_active_v1(
        [rec.AvailableV1(7, CLAIM, 1, b"hi")], [rec.InFlightV1(8, CLAIM, 1, 2, 3, b"")]
    )
    available, in_flight = rec.decode_active(rec.upgrade_active_v1(old))
    assert [entry for entry, _ in available] == [rec.Available(7, CLAIM, 1, b"hi", 0, 0, 0, "")]
    assert [entry for entry, _ in in_flight] == [
        rec.InFlight(8, CLAIM, 1, 2, 3, b"", 0, 0, 0, "", bytes(16))
    ]


def test_upgraded_history() -> None:
    done = rec.encode_done_v1([rec.DoneV1(7, CLAIM, 9, 2, b"hi")])
    assert rec.upgrade_done_v1(done) == done
    with pytest.raises(CorruptRecord):
        rec.upgrade_done_v1(done + b"\0")
    failed = rec.encode_failed_v1([rec.FailedV1(7, CLAIM, 9, 2, b"hi")])
    assert rec.decode_failed(rec.upgrade_failed_v1(failed)) == [
        rec.Failed(7, CLAIM, 9, 2, b"hi", "")
    ]
    attempts = rec.encode_attempts_v1([rec.AttemptV1(1, "v"), rec.AttemptV1(2, "w")])
    assert [rec.decode_attempt(value) for value in rec.upgrade_attempts_v1(attempts)] == [
        rec.AttemptRecord(1, "v", 0, 0, ""),
        rec.AttemptRecord(2, "w", 0, 0, ""),
    ]


def test_upgraded_queue_spec() -> None:
    upgraded = rec.QueueSpecV2(
        filter="f",
        max_attempts=5,
        bucket_exponent=3,
        description="é",
        ordering=0,
        lease_ms=30_000,
        backoff_base_ms=1_000,
        backoff_cap_ms=300_000,
        delay_ms=0,
        done_retention_ms=3_600_000,
        failed_retention_ms=0,
        unclaimed_retention_ms=0,
        created_at_ms=0,
        spec_version=1,
        number=0,
    )
    old = bytes.fromhex(SPEC_V1_HEX)
    assert rec.decode_queue_spec(1, old) == upgraded
    assert rec.decode_queue_spec(2, rec.upgrade_queue_spec_v1(old)) == upgraded


# --- round trips and bounds -----------------------------------------------------------------


@given(st.lists(AVAILABLE_V1, max_size=4), st.lists(IN_FLIGHT_V1, max_size=4))
def test_active_v1_round_trip(
    available: list[rec.AvailableV1], in_flight: list[rec.InFlightV1]
) -> None:
    value = rec.encode_active_v1(available, in_flight)
    assert rec.decode_active_v1(value) == (available, in_flight)


@given(st.lists(AVAILABLE, max_size=4), st.lists(IN_FLIGHT, max_size=4))
def test_active_round_trip(available: list[rec.Available], in_flight: list[rec.InFlight]) -> None:
    first = [rec.encode_available(entry) for entry in available]
    second = [rec.encode_in_flight(entry) for entry in in_flight]
    decoded = rec.decode_active(rec.pack_active(first, second))
    assert decoded == (
        list(zip(available, first, strict=True)),
        list(zip(in_flight, second, strict=True)),
    )


@given(
    st.lists(DONE, max_size=4),
    st.lists(FAILED_V1, max_size=4),
    st.lists(FAILED, max_size=4),
    st.lists(ATTEMPT_V1, max_size=4),
    ATTEMPT,
)
def test_history_round_trip(
    done: list[rec.Done],
    failed_v1: list[rec.FailedV1],
    failed: list[rec.Failed],
    attempts: list[rec.AttemptV1],
    attempt: rec.AttemptRecord,
) -> None:
    assert rec.decode_done(rec.encode_done(done)) == done
    assert rec.decode_failed_v1(rec.encode_failed_v1(failed_v1)) == failed_v1
    assert rec.decode_failed(rec.encode_failed(failed)) == failed
    assert rec.decode_attempts_v1(rec.encode_attempts_v1(attempts)) == attempts
    assert rec.decode_attempt(rec.encode_attempt(attempt)) == attempt


@given(SPEC_V1, SPEC)
def test_queue_spec_round_trip(old: rec.QueueSpecV1, spec: rec.QueueSpecV2) -> None:
    assert rec.decode_queue_spec_v1(rec.encode_queue_spec_v1(old)) == old
    assert rec.decode_queue_spec(2, rec.encode_queue_spec(spec)) == spec


def test_an_array_holds_65535() -> None:
    done = rec.Done(0, 0, 0, 0, b"")
    assert rec.encode_done([done] * 65_535)[:2] == b"\xff\xff"
    too_long: list[Callable[[], bytes]] = [
        lambda: rec.encode_done([done] * 65_536),
        lambda: rec.encode_failed([rec.Failed(0, 0, 0, 0, b"", "")] * 65_536),
        lambda: rec.pack_active([b""] * 65_536, []),
        lambda: rec.pack_active([], [b""] * 65_536),
        lambda: rec.encode_attempts_v1([rec.AttemptV1(0, "")] * 65_536),
    ]
    for encode in too_long:
        with pytest.raises(InvalidInput, match="65535"):
            encode()
