"""Metadata that a client has packed is checked when it is read; what is wrong changes nothing."""

from __future__ import annotations

import math
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.native.serving import Raw, Served, encoder

from penstock import limits
from penstock.errors import InvalidMessage
from penstock.model import Message
from penstock.packing import (
    MAX_REMEMBERED,
    REMEMBERED_ATTRIBUTES,
    REMEMBERED_BYTES,
    Envelope,
    _remembered,
    pack_messages,
    read_envelope,
    unpack_messages,
)
from penstock.wire import native as wire

if TYPE_CHECKING:
    from collections.abc import Callable

pack: Callable[[Any], bytes] = msgspec.msgpack.encode
GOOD = pack(["", 0, 0, {"queue": "q"}])


def with_attributes(**attributes: Any) -> bytes:
    return pack(["", 0, 0, {"queue": "q", **attributes}])


NESTED = b"\x91" * 5_000 + b"\x90"
TWICE = b"\x94\xa0\x00\x00\x82" + 2 * (pack("queue") + pack("q"))
HOSTILE = {
    "empty": b"",
    "cut": GOOD[:-1],
    "trailing": GOOD + b"\x00",
    "no array": pack({"group": ""}),
    "too short": pack(["", 0, 0]),
    "too long": pack(["", 0, 0, {}, 1]),
    "group of a wrong type": pack([1, 0, 0, {}]),
    "group that is too long": pack(["g" * (limits.MAX_GROUP_BYTES + 1), 0, 0, {}]),
    "group that is no UTF-8": b"\x94\xa1\xff\x00\x00\x80",
    "priority below": pack(["", -1, 0, {}]),
    "priority above": pack(["", limits.MAX_PRIORITY + 1, 0, {}]),
    "priority of a wrong type": pack(["", 1.0, 0, {}]),
    "delay below": pack(["", 0, -1, {}]),
    "delay above": pack(["", 0, limits.MAX_DURATION_MS + 1, {}]),
    "no attributes": pack(["", 0, 0, None]),
    "attribute twice": TWICE,
    "NaN": with_attributes(n=math.nan),
    "infinite": with_attributes(n=-math.inf),
    "more than 64 bits": with_attributes(n=1 << 63),
    "a list": with_attributes(n=[1]),
    "a map": with_attributes(n={"a": 1}),
    "binary": with_attributes(n=b"x"),
    "a time": b"\x94\xa0\x00\x00\x81\xa1t\xd6\xff\x00\x00\x00\x01",
    "a name that is no text": b"\x94\xa0\x00\x00\x81\x01\x01",
    "a name that is empty": pack(["", 0, 0, {"": 1}]),
    "a name that is too long": with_attributes(**{"n" * 257: 1}),
    "too many": with_attributes(**{f"n{n}": n for n in range(limits.MAX_ATTRIBUTES)}),
    "too large": with_attributes(n="x" * limits.MAX_ATTRIBUTES_BYTES),
    "deeply nested": NESTED,
    "a deeply nested value": b"\x94\xa0\x00\x00\x81\xa1n" + NESTED,
    "an integer that is too wide": b"\x94\xa0\xcc\x00\x00\x80",
    "an integer that is signed": b"\x94\xa0\x00\x00\x81\xa1n\xd1\x01\x00",
    "a float of 32 bits": b"\x94\xa0\x00\x00\x81\xa1n\xca" + struct.pack(">f", 0.5),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_is_refused_and_changes_nothing(served: Served, name: str) -> None:
    with Raw(served) as raw:
        raw.read()
        # One that is wrong refuses the whole request, whatever is around it.
        messages = [(b"1", GOOD), (b"2", HOSTILE[name]), (b"3", GOOD)]
        failure = raw.ask([1, 7, messages])
        assert isinstance(failure, wire.Failure), failure
        assert (failure.id, failure.name) == (7, "InvalidMessage")
        assert failure.message
        assert served.broker.store_stats().published_total == 0
        # The connection goes on.
        assert isinstance(raw.ask([1, 8, [(b"4", GOOD)]]), wire.Result)
    assert [each.payload for each in served.broker.browse("q")] == [b"4"]


@pytest.mark.parametrize(
    "message",
    [
        {"payload": b"", "attributes": {}},
        ("text", GOOD),
        (b"",),
        (b"", GOOD, "id", 1),
        (b"", {"queue": "q"}),
        (b"", [1, [2]]),
        (b"", "text"),
        (b"", None),
        (b"", GOOD, ""),
        (b"", GOOD, 1),
        (b"", GOOD, "é" * (limits.MAX_DEDUP_ID_BYTES // 2 + 1)),
    ],
)
def test_a_message_that_is_none_is_refused(served: Served, message: Any) -> None:
    with Raw(served) as raw:
        raw.read()
        failure = raw.ask([1, 7, [(b"", GOOD), message]])
        assert isinstance(failure, wire.Failure), failure
        assert failure.name in {"InvalidInput", "InvalidMessage"}
        assert served.broker.store_stats().published_total == 0


def test_too_many_messages_are_refused(served: Served) -> None:
    with Raw(served) as raw:
        raw.read()
        many = [(b"", GOOD)] * (limits.MAX_PUBLISH_MESSAGES + 1)
        failure = raw.ask([1, 7, many])
        assert isinstance(failure, wire.Failure)
        assert str(limits.MAX_PUBLISH_MESSAGES) in failure.message
    assert served.broker.store_stats().published_total == 0


def test_what_was_refused_once_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(InvalidMessage, match="twice"):
            read_envelope(Envelope, TWICE)


def test_remembered_envelopes_are_bounded() -> None:
    long = with_attributes(n="x" * REMEMBERED_BYTES)
    assert read_envelope(Envelope, long).attributes["n"] == "x" * REMEMBERED_BYTES
    assert long not in _remembered
    many = with_attributes(**{f"n{n}": None for n in range(REMEMBERED_ATTRIBUTES)})
    assert len(read_envelope(Envelope, many).attributes) == REMEMBERED_ATTRIBUTES + 1
    assert many not in _remembered
    for n in range(MAX_REMEMBERED + 10):
        assert read_envelope(Envelope, with_attributes(n=n)).attributes["n"] == n
    assert len(_remembered) <= MAX_REMEMBERED


def test_a_message_that_its_caller_changes_later_does_not_change_others() -> None:
    attributes: dict[str, Any] = {"queue": "q", "only here": 1}
    (first,) = pack_messages([Message(b"", attributes)])
    attributes["n"] = 2
    (again,) = pack_messages([Message(b"", {"queue": "q", "only here": 1})])
    assert first.envelope.attributes == again.envelope.attributes == {"queue": "q", "only here": 1}
    assert unpack_messages([first])[0].attributes == first.envelope.attributes
    assert encoder.frame(wire.Publish(1, [first])) == encoder.frame(wire.Publish(1, [again]))


MILLIONS = b"\xdd" + (4 << 20).to_bytes(4, "big") + b"\x80" * (4 << 20)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x93\x01\x07\x91\x92\xc4\x00" + MILLIONS,
        b"\x93\x01\x07" + MILLIONS.replace(b"\x80", b"\x92\xc4\x00\xc4\x00"),
        b"\x94\x0c\x07\xa1q\x81\xa1a" + MILLIONS,
        b"\xdc\x10\x00\x0c\x07\xa1q\x81\xa1a" + MILLIONS + b"\xc0" * 4_092,
        b"\x93\x03\x07" + MILLIONS.replace(b"\x80", b"\xa1x"),
    ],
    ids=["envelope", "messages", "settings", "settings of a longer array", "receipts"],
)
def test_a_frame_of_millions_of_values_is_refused_before_they_are_made(
    served: Served, frame: bytes
) -> None:
    tracemalloc.start()
    try:
        failure = wire.read_request(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(failure, wire.Failure)
    assert failure.id == 7
    assert peak < 4 << 20
    with Raw(served) as raw:
        raw.read()
        raw.send(len(frame).to_bytes(4, "big") + frame)
        assert raw.read() == failure
        # The connection goes on; messages of any size are taken.
        assert isinstance(raw.ask([1, 8, [(bytes(2 << 20), GOOD, None)] * 2]), wire.Result)
