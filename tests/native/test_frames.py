"""Frames and their contents: whole, byte by byte, with rubbish before, inside and after."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import errors, limits
from penstock.errors import InvalidFilter, InvalidInput, PenstockError
from penstock.model import Message, Value
from penstock.packing import pack_messages
from penstock.wire import native as wire
from penstock.wire.frames import FrameReader
from penstock.wire.native import error_of, failure_of

if TYPE_CHECKING:
    from collections.abc import Sequence

encoder = wire.Encoder()


def read_all(reader: FrameReader, pieces: Sequence[bytes]) -> list[bytes]:
    frames = []
    for piece in pieces:
        reader.feed(piece)
        while (frame := reader.take()) is not None:
            frames.append(bytes(frame))
    return frames


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@given(bodies=st.lists(st.binary(min_size=1, max_size=40)), cuts=st.lists(st.integers(0, 300)))
def test_pieces_do_not_matter(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(framed, bodies))
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[a:b] for a, b in pairwise(places)]
    assert read_all(FrameReader(), pieces) == bodies
    assert read_all(FrameReader(), [bytes([each]) for each in stream]) == bodies


@given(body=st.binary(min_size=1, max_size=40), rest=st.binary(max_size=3))
def test_what_comes_after_is_left(body: bytes, rest: bytes) -> None:
    reader = FrameReader()
    assert read_all(reader, [framed(body) + rest]) == [body]
    assert reader.pending == len(rest)


@pytest.mark.parametrize("size", [0, 101, (1 << 32) - 1])
def test_a_length_that_is_not_allowed_is_refused_at_once(size: int) -> None:
    reader = FrameReader(100)
    reader.feed(size.to_bytes(4, "big")[:3])
    assert reader.take() is None
    reader.feed(size.to_bytes(4, "big")[3:])
    with pytest.raises(InvalidInput, match="allowed are 1 to 100"):
        reader.take()


def test_frames_taken_stay_as_they_are() -> None:
    reader = FrameReader()
    reader.feed(framed(b"one") + framed(b"two")[:3])
    first = reader.take()
    reader.feed(framed(b"two")[3:])
    second = reader.take()
    assert first is not None
    assert second is not None
    assert (bytes(first), bytes(second)) == (b"one", b"two")


VALUES: dict[str, Value] = {"n": 1, "s": "x", "f": 0.5, "b": True, "none": None}
REQUESTS: list[wire.Request] = [
    wire.Publish(1, pack_messages([Message(b"\x00", VALUES)])),
    wire.Claim((1 << 63) - 1, "q", 10, 5, 6, "me"),
    wire.Ack(2, ["a", "b"], "q"),
    wire.Release(3, ["a"], 7, "why", None),
    wire.Extend(4, "lease", 5),
    wire.Extend(4, ["a"], 5),
    wire.CreateQueue(5, "q", {"labels": {"a": "b"}}),
    wire.Redrive(6, "q", [1, 2], None),
    wire.Ping(7),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_requests_round_trip(request_: wire.Request) -> None:
    frame = encoder.frame(request_)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert wire.read_request(frame[4:]) == request_


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_trailing_data_is_no_request(request_: wire.Request) -> None:
    with pytest.raises(InvalidInput, match="not a request"):
        wire.read_request(encoder.frame(request_)[4:] + b"\x00")


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_cut_requests_are_no_requests(request_: wire.Request) -> None:
    body = encoder.frame(request_)[4:]
    for end in range(len(body)):
        with pytest.raises(InvalidInput):
            wire.read_request(body[:end])


@given(garbage=st.binary(max_size=60))
def test_garbage_is_refused_or_answered(garbage: bytes) -> None:
    for read in (wire.read_request, wire.read_hello):
        with contextlib.suppress(InvalidInput):
            read(garbage)
    with contextlib.suppress(*wire.UNREADABLE):
        wire.decode_answer(garbage)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(kind=st.integers(0, 40), request_id=st.integers(0, 99), rest=st.lists(values, max_size=7))
def test_any_request_with_an_id_is_read_or_answered(
    kind: int, request_id: int, rest: list[Any]
) -> None:
    answer = wire.read_request(msgspec.msgpack.encode([kind, request_id, *rest]))
    assert answer.id == request_id
    if isinstance(answer, wire.Failure):
        assert answer.name == "InvalidInput"
        assert answer.message
    else:
        assert 1 <= kind <= 29


def test_more_fields_than_a_request_has_are_refused() -> None:
    answer = wire.read_request(msgspec.msgpack.encode([25, 1, "more"]))
    assert isinstance(answer, wire.Failure)


def test_depth_is_bounded() -> None:
    deep = b"\x93\x0c\x01\xa1q"[:1] + b"\x0c\x01" + b"\xa1q" + b"\x81\xa1a" + b"\x91" * 100_000
    with pytest.raises(InvalidInput):
        wire.read_request(b"\x94" + deep[1:])


def test_an_array_that_claims_to_be_long_takes_no_memory() -> None:
    with pytest.raises(InvalidInput):
        wire.read_request(b"\x93\x03\x01\xdd\xff\xff\xff\xff")


def test_long_answers_come_in_parts() -> None:
    value = [b"x" * 700_000, b"y" * 700_000, b"z" * 700_000]
    frames = encoder.result(9, value)
    assert len(frames) == 3
    assert all(len(frame) <= limits.MAX_ANSWER_PART_BYTES + 32 for frame in frames)
    parts = [wire.decode_answer(frame[4:]) for frame in frames]
    assert all(isinstance(part, wire.Part) and part.id == 9 for part in parts)
    data = b"".join(part.data for part in parts if isinstance(part, wire.Part))
    assert msgspec.msgpack.decode(data) == value
    assert [part.last for part in parts if isinstance(part, wire.Part)] == [False, False, True]


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_come_back_as_themselves(name: str) -> None:
    error = getattr(errors, name)("what was wrong")
    failure = failure_of(3, error)
    back = error_of(failure)
    assert type(back) is type(error)
    assert str(back) == "what was wrong"


def test_a_filter_error_keeps_its_place() -> None:
    failure = failure_of(1, InvalidFilter("no", line=2, column=5, fragment="x ="))
    back = error_of(failure)
    assert isinstance(back, InvalidFilter)
    assert (back.line, back.column, back.fragment) == (2, 5, "x =")


def test_unknown_errors_are_the_base() -> None:
    assert type(error_of(wire.Failure(1, "FromTheFuture", "x"))) is PenstockError
    failure = failure_of(1, KeyError("a secret"))
    assert failure.name == "PenstockError"
    assert "secret" not in failure.message


class OwnError(errors.InvalidQueue):
    """An error of nobody's tree."""


def test_a_class_that_nobody_knows_is_sent_as_its_nearest() -> None:
    assert failure_of(1, OwnError("x")).name == "InvalidQueue"
