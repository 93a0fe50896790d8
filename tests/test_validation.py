"""What may come in: every bound from both sides, and every wrong type."""

from __future__ import annotations

import re
from collections import ChainMap
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import limits
from penstock.errors import InvalidInput, InvalidMessage, InvalidQueue
from penstock.model import Cursor, Message, Ordering, QueueSpec, State
from penstock.validation import (
    check_assignments,
    check_count,
    check_ids,
    check_messages,
    check_queue_name,
    check_receipts,
    check_spec,
    check_state,
    check_text,
    cut_text,
)

HUGE = 10**5_000


def message(**fields: Any) -> Message:
    return Message(**{"payload": b"", **fields})


# --- messages -------------------------------------------------------------------------------------

GOOD: list[dict[str, Any]] = [
    {},
    {"payload": b"x" * limits.MAX_PAYLOAD_BYTES},
    {"attributes": {"s": "", "i": -(2**63), "j": 2**63 - 1, "f": 1e308, "b": True, "n": None}},
    {"attributes": MappingProxyType({"a": 1})},
    {"attributes": ChainMap({"a": 1}, {"b": 2})},
    {"attributes": {f"a{n}": n for n in range(limits.MAX_ATTRIBUTES)}},
    {"attributes": {"n" * limits.MAX_ATTRIBUTE_NAME_BYTES: 1}},
    {"attributes": {"ä" * (limits.MAX_ATTRIBUTE_NAME_BYTES // 2): 1}},
    {"attributes": {"a": "x" * (limits.MAX_ATTRIBUTES_BYTES - 1)}},
    {"group": "g" * limits.MAX_GROUP_BYTES},
    {"group": "\0"},
    {"priority": limits.MAX_PRIORITY},
    {"delay_ms": limits.MAX_DURATION_MS},
    {"dedup_id": "d" * limits.MAX_DEDUP_ID_BYTES},
]


@pytest.mark.parametrize("fields", GOOD, ids=[repr(fields)[:40] for fields in GOOD])
def test_what_is_within_the_bounds_passes(fields: dict[str, Any]) -> None:
    made = message(**fields)
    assert check_messages([made]) == [made]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"payload": "text"}, "payload must be bytes, not str"),
    ({"payload": bytearray(b"x")}, "payload must be bytes, not bytearray"),
    ({"payload": b"x" * (limits.MAX_PAYLOAD_BYTES + 1)}, f"at most {limits.MAX_PAYLOAD_BYTES}"),
    ({"attributes": [("a", 1)]}, "attributes must be a mapping, not list"),
    ({"attributes": {"a": {"nested": 1}}}, "'a' is a dict; attributes are flat"),
    ({"attributes": {"a": b"bytes"}}, "'a' is a bytes; attributes are flat"),
    ({"attributes": {"a": [1]}}, "attributes are flat"),
    ({"attributes": {"a": float("nan")}}, "'a' is nan: numbers must be finite"),
    ({"attributes": {"a": float("-inf")}}, "'a' is -inf: numbers must be finite"),
    ({"attributes": {"a": 2**63}}, "integers have 64 bits"),
    ({"attributes": {"a": -(2**63) - 1}}, "integers have 64 bits"),
    ({"attributes": {"a": HUGE}}, "a number of 16610 bits: integers have 64 bits"),
    ({"attributes": {"a": "\ud800"}}, "'a' is not valid Unicode"),
    ({"attributes": {"\ud800": 1}}, "not valid Unicode"),
    ({"attributes": {"": 1}}, "must be a non-empty string"),
    ({"attributes": {7: 1}}, "name 7 must be a non-empty string"),
    ({"attributes": {f"a{n}": n for n in range(limits.MAX_ATTRIBUTES + 1)}}, "at most 256"),
    ({"attributes": {"n" * (limits.MAX_ATTRIBUTE_NAME_BYTES + 1): 1}}, "has 257 bytes"),
    ({"attributes": {"ä" * 129: 1}}, "has 258 bytes"),
    ({"attributes": {"a": "x" * limits.MAX_ATTRIBUTES_BYTES}}, "attributes take 65537 bytes"),
    ({"attributes": {"a": "ä" * (limits.MAX_ATTRIBUTES_BYTES // 2)}}, "take 65537 bytes"),
    ({"group": None}, "group must be text, not NoneType"),
    ({"group": 0}, "group must be text, not int"),
    ({"group": "g" * (limits.MAX_GROUP_BYTES + 1)}, "group has 257 bytes; at most 256"),
    ({"group": "\udfff"}, "group is not valid Unicode"),
    ({"priority": -1}, "priority is -1; allowed are 0 to 255"),
    ({"priority": limits.MAX_PRIORITY + 1}, "priority is 256"),
    ({"priority": True}, "priority must be a whole number, not bool"),
    ({"priority": False}, "priority must be a whole number, not bool"),
    ({"priority": 0.0}, "priority must be a whole number, not float"),
    ({"priority": HUGE}, "priority is a number of 16610 bits"),
    ({"delay_ms": -1}, "delay_ms is -1"),
    ({"delay_ms": limits.MAX_DURATION_MS + 1}, "delay_ms is 31536000000001"),
    ({"delay_ms": "1s"}, "delay_ms must be a whole number, not str"),
    ({"dedup_id": ""}, "dedup_id is empty"),
    ({"dedup_id": 7}, "dedup_id must be text, not int"),
    ({"dedup_id": "d" * (limits.MAX_DEDUP_ID_BYTES + 1)}, "dedup_id has 257 bytes"),
]


@pytest.mark.parametrize(("fields", "says"), BAD, ids=[says for _, says in BAD])
def test_what_is_not_is_refused_with_its_place(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        check_messages([message(), message(**fields)])
    assert says in str(caught.value)
    assert str(caught.value).startswith("message 1: ")
    assert len(str(caught.value)) < 300


def test_only_messages_are_published() -> None:
    stranger: Any = b"payload"
    with pytest.raises(InvalidMessage, match=r"message 0: expected a penstock.Message, got bytes"):
        check_messages([stranger])


def test_a_publish_is_bounded_in_number_and_in_bytes() -> None:
    most = [message()] * limits.MAX_PUBLISH_MESSAGES
    assert check_messages(iter(most)) == most
    with pytest.raises(InvalidInput, match="10001 messages in one publish; at most 10000"):
        check_messages([*most, message()])
    large = message(payload=bytes(limits.MAX_PAYLOAD_BYTES))
    full = [large] * (limits.MAX_PUBLISH_BYTES // limits.MAX_PAYLOAD_BYTES)
    assert check_messages(full) == full
    with pytest.raises(InvalidInput, match="268435457 bytes of payload in one publish"):
        check_messages([*full, message(payload=b"x")])


Scalars = st.one_of(
    st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.binary(max_size=3)
)


@given(
    fields=st.fixed_dictionaries(
        {},
        optional={
            "attributes": st.dictionaries(st.one_of(st.text(max_size=4), st.none()), Scalars),
            "group": Scalars,
            "priority": Scalars,
            "delay_ms": Scalars,
            "dedup_id": Scalars,
        },
    )
)
def test_whatever_passes_can_be_stored(fields: dict[str, Any]) -> None:
    made = message(**fields)
    try:
        check_messages([made])
    except InvalidMessage:
        return
    made.group.encode()
    (made.dedup_id or "").encode()
    assert 0 <= made.priority <= 255
    assert made.delay_ms >= 0
    packed = msgspec.msgpack.encode(made.attributes)
    assert msgspec.msgpack.decode(packed) == made.attributes


# --- queues ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["-a", "_", "0", "A.b_c-9", "x" * limits.MAX_QUEUE_NAME_CHARS])
def test_names_that_a_queue_may_have(name: str) -> None:
    assert check_queue_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        ".a",
        "a b",
        "a/b",
        "a\n",
        "ä",
        "٣",
        "x" * 81,
        None,
        7,
        b"a",
        "x" * 10**6,
    ],
    ids=lambda name: repr(name)[:20],
)
def test_names_that_it_may_not_have(name: object) -> None:
    with pytest.raises(InvalidQueue, match="1 to 80 of A-Z a-z 0-9") as caught:
        check_queue_name(name)
    assert len(str(caught.value)) < 300


DURATIONS = [
    "backoff_base_ms",
    "backoff_cap_ms",
    "delay_ms",
    "done_retention_ms",
    "failed_retention_ms",
    "unclaimed_retention_ms",
]


def spec(**settings: Any) -> QueueSpec:
    return QueueSpec(**{"name": "q", "filter": "a = 1", **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ordering": Ordering.FIFO},
        {"lease_ms": 1},
        {"lease_ms": limits.MAX_LEASE_MS},
        {"max_attempts": 1},
        {"max_attempts": limits.MAX_ATTEMPTS},
        {"bucket_exponent": 0},
        {"bucket_exponent": limits.MAX_BUCKET_EXPONENT},
        {"description": "d" * limits.MAX_DESCRIPTION_BYTES},
        {"dead_letter": "other"},
        {"labels": {"n": "ü", "m": ""}},
        {"labels": {f"{n}": "" for n in range(limits.MAX_LABELS)}},
        {"labels": {"n" * limits.MAX_LABEL_NAME_BYTES: ""}},
        {"labels": {"n": "v" * (limits.MAX_LABELS_BYTES - 1)}},
        *({name: value} for name in DURATIONS for value in (0, limits.MAX_DURATION_MS)),
    ],
)
def test_settings_within_their_bounds(settings: dict[str, Any]) -> None:
    assert check_spec(spec(**settings)) == spec(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "no name"},
        {"ordering": "fifo"},
        {"lease_ms": 0},
        {"lease_ms": limits.MAX_LEASE_MS + 1},
        {"lease_ms": 1.0},
        {"max_attempts": 0},
        {"max_attempts": limits.MAX_ATTEMPTS + 1},
        {"bucket_exponent": -1},
        {"bucket_exponent": limits.MAX_BUCKET_EXPONENT + 1},
        {"description": "d" * (limits.MAX_DESCRIPTION_BYTES + 1)},
        {"description": None},
        {"labels": None},
        {"labels": [("n", "v")]},
        {"labels": {"n": None}},
        {"labels": {1: "v"}},
        {"labels": {"": "v"}},
        {"labels": {"n": "\ud800"}},
        {"labels": {f"{n}": "" for n in range(limits.MAX_LABELS + 1)}},
        {"labels": {"n" * (limits.MAX_LABEL_NAME_BYTES + 1): ""}},
        {"labels": {"n": "v" * limits.MAX_LABELS_BYTES}},
        *({name: value} for name in DURATIONS for value in (-1, limits.MAX_DURATION_MS + 1, True)),
    ],
)
def test_settings_beyond_them(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(InvalidQueue, match=name.removesuffix("_ms").removesuffix("s")):
        check_spec(spec(**settings))


@pytest.mark.parametrize("dead_letter", ["q", "no name", None, 1])
def test_dead_letter_queues_that_can_not_be(dead_letter: Any) -> None:
    with pytest.raises(InvalidQueue, match=r"own dead letter queue|queue name"):
        check_spec(spec(dead_letter=dead_letter))


# --- the rest -------------------------------------------------------------------------------------


def test_receipts_come_as_a_batch_of_bounded_size() -> None:
    most = ["r"] * limits.MAX_RECEIPTS
    assert check_receipts(iter(most)) == most
    with pytest.raises(InvalidInput, match="10001 receipts in one call; at most 10000"):
        check_receipts([*most, "r"])
    with pytest.raises(InvalidInput, match="not one string"):
        check_receipts("ps1-...")


def test_states_go_by_their_names() -> None:
    assert [check_state(state.value) for state in State] == list(State)
    assert check_state(State.DONE) is State.DONE
    with pytest.raises(InvalidInput, match="there are available, delayed, in_flight, done, failed"):
        check_state("dead")


def test_counts_and_durations_are_whole_numbers_in_a_range() -> None:
    assert check_count(3, "n", 3, 5) == 3
    assert check_count(5, "n", 3, 5) == 5
    for wrong in (2, 6, 4.0, "4", None, True):
        with pytest.raises(InvalidInput, match=r"^n "):
            check_count(wrong, "n", 3, 5)
    assert check_count(0, "d") == 0
    with pytest.raises(InvalidInput, match="d is 0; allowed are 1 to"):
        check_count(0, "d", low=1)


def test_texts_are_measured_in_bytes() -> None:
    assert check_text("äöü", "t", 6) == "äöü"
    with pytest.raises(InvalidInput, match="t has 6 bytes; at most 5"):
        check_text("äöü", "t", 5)
    with pytest.raises(InvalidQueue):
        check_text(b"x", "t", 5, InvalidQueue)


@given(text=st.text(alphabet=st.characters(), max_size=20), max_bytes=st.integers(0, 40))
def test_a_text_is_cut_to_fit_and_stays_text(text: str, max_bytes: int) -> None:
    cut = cut_text(text, max_bytes)
    assert len(cut.encode()) <= max_bytes
    whole = text.encode(errors="replace").decode()
    assert whole.startswith(cut)
    # No more is lost than the character that did not fit.
    assert cut == whole or len(cut.encode()) > max_bytes - 4


def test_an_error_is_as_good_a_reason_as_a_text() -> None:
    assert cut_text(ValueError("broken"), 100) == "broken"
    assert cut_text(None, 100) == "None"


def test_message_ids_are_unsigned_numbers_of_64_bits() -> None:
    assert check_ids((0, 2**64 - 1)) == [0, 2**64 - 1]
    wrong: list[Any] = [-1, 2**64, True, "7", 7.0]
    for each in wrong:
        with pytest.raises(InvalidInput, match="message id"):
            check_ids([1, each])


def test_what_a_tailer_hands_back() -> None:
    page = Cursor(0, limits.MAX_OFFSET)
    check_assignments(page, {7: ["q"], 8: ("a", "b"), 9: []})
    wrong: list[tuple[Any, Any, str]] = [
        ((0, 9), {}, "cursor must be a page's cursor, not tuple"),
        (Cursor(-1, 9), {}, "cursor.begin is -1"),
        (Cursor(0, limits.MAX_OFFSET + 1), {}, "cursor.end is"),
        (page, [(7, ["q"])], "assignments must map"),
        (page, {"7": ["q"]}, "message id must be a whole number, not str"),
        (page, {7: "q"}, "message 7: a list of queue names is expected"),
        (page, {7: [b"q"]}, "message 7: a list of queue names"),
        (page, {7: None}, "message 7: a list of queue names"),
    ]
    for cursor, assignments, says in wrong:
        with pytest.raises(InvalidInput, match=re.escape(says)):
            check_assignments(cursor, assignments)
