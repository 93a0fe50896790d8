"""The auditor sees each kind of wrong, and nothing in a history that can be explained."""

from __future__ import annotations

import pytest

from penstock.testing.auditor import Kind, Note, audit


def receipt(lease: str, key: int) -> str:
    return f"{lease}-{key:016x}"


def publish(number: int, at_ms: int, group: str = "") -> list[Note]:
    body = f"body {number}"
    return [
        Note(kind=Kind.PUBLISHING, at_ms=at_ms, body=body, group=group),
        Note(kind=Kind.PUBLISHED, at_ms=at_ms + 1, body=body, message_id=number, group=group),
    ]


def deliver(number: int, at_ms: int, lease: str, attempts: int = 1, deadline: int = 1000) -> Note:
    return Note(
        kind=Kind.DELIVERED,
        at_ms=at_ms,
        began_at_ms=at_ms - 1,
        body=f"body {number}",
        message_id=number,
        receipt=receipt(lease, number),
        attempts=attempts,
        deadline_ms=deadline,
    )


def settle(number: int, at_ms: int, lease: str, kind: Kind | None) -> list[Note]:
    notes = [Note(kind=Kind.SETTLING, at_ms=at_ms, receipt=receipt(lease, number))]
    if kind is not None:
        notes.append(Note(kind=kind, at_ms=at_ms + 1, receipt=receipt(lease, number)))
    return notes


GOOD = [
    *publish(1, 0),
    *publish(2, 5),
    deliver(1, 10, "a"),
    *settle(1, 20, "a", Kind.RELEASED),
    deliver(1, 30, "b", attempts=2),
    *settle(1, 40, "b", Kind.ACKED),
]


def kinds(notes: list[Note], **end: object) -> list[str]:
    return [finding.what for finding in audit(notes, **end)]  # type: ignore[arg-type]


def test_a_good_history() -> None:
    assert kinds(GOOD, in_queue=[(2, "body 2")]) == []


def test_lost() -> None:
    (finding,) = audit(GOOD)
    assert (finding.what, finding.message_id) == ("lost", 2)
    assert [note.kind for note in finding.witness] == [Kind.PUBLISHED]
    assert "lost: message 2" in str(finding)


def test_a_begun_ack_may_have_happened() -> None:
    notes = [*publish(1, 0), deliver(1, 5, "a"), *settle(1, 10, "a", None)]
    assert kinds(notes) == []
    assert kinds(notes, in_queue=[(1, "body 1")]) == []


def test_a_begun_publish_may_have_happened() -> None:
    begun = publish(1, 0)[:1]
    assert kinds(begun) == []
    assert kinds([*begun, deliver(1, 5, "a")], in_queue=[(1, "body 1")]) == []


def test_unexpected() -> None:
    assert kinds([deliver(1, 5, "a")], in_queue=[(1, "body 1")]) == ["unexpected", "unexpected"]
    assert kinds(settle(1, 5, "a", None)) == ["unexpected"]


def test_wrong_body() -> None:
    bad = Note(
        kind=Kind.DELIVERED, at_ms=5, body="x", message_id=1, receipt=receipt("a", 1), attempts=1
    )
    assert kinds([*publish(1, 0), bad], settled=[1]) == ["wrong body"]


def test_two_leases() -> None:
    notes = [*publish(1, 0), deliver(1, 5, "a"), deliver(1, 500, "b", attempts=2)]
    assert kinds(notes, settled=[1]) == ["two leases"]
    late = [*publish(1, 0), deliver(1, 5, "a"), deliver(1, 1000, "b", attempts=2)]
    assert kinds(late, settled=[1]) == []


def test_a_message_that_is_given_back_unseen_may_repeat_its_attempt() -> None:
    give_back = Note(kind=Kind.SETTLING, at_ms=7, receipt=receipt("a", 1), unseen=True)
    twice = [*publish(1, 0), deliver(1, 5, "a"), deliver(1, 9, "b")]
    assert kinds(twice, settled=[1]) == ["attempts"]
    assert kinds([*twice, give_back], settled=[1]) == []


def test_two_leases_after_an_extend() -> None:
    extend = [
        Note(kind=Kind.EXTENDING, at_ms=100, receipt=receipt("a", 1)),
        Note(kind=Kind.EXTENDED, at_ms=101, receipt=receipt("a", 1), deadline_ms=5000),
    ]
    notes = [*publish(1, 0), deliver(1, 5, "a"), *extend, deliver(1, 1500, "b", attempts=2)]
    assert kinds(notes, settled=[1]) == ["two leases"]
    del notes[4]
    assert kinds(notes, settled=[1]) == []


@pytest.mark.parametrize("attempts", [3, 4])
def test_came_back(attempts: int) -> None:
    notes = [*GOOD, deliver(1, 2000, "c", attempts=attempts)]
    assert kinds(notes, settled=[2]) == ["came back"]
    assert kinds(GOOD, in_queue=[(1, "body 1"), (2, "body 2")]) == ["came back"]


def test_a_late_note_of_an_early_delivery_is_no_coming_back() -> None:
    late = deliver(1, 5000, "a", attempts=1, deadline=2)
    notes = [*publish(1, 0), deliver(1, 10, "b", attempts=2), *settle(1, 20, "b", Kind.ACKED), late]
    assert "came back" not in kinds(notes)


def test_attempts_shrink_or_stand() -> None:
    notes = [*publish(1, 0), deliver(1, 5, "a", 2, deadline=6), deliver(1, 50, "b", 1)]
    assert kinds(notes, settled=[1]) == ["attempts"]
    notes = [*publish(1, 0), deliver(1, 5, "a", 1, deadline=6), deliver(1, 50, "b", 1)]
    assert kinds(notes, settled=[1]) == ["attempts"]


def test_order_of_a_fifo_group() -> None:
    notes = [*publish(1, 0, "g"), *publish(2, 5, "g"), *publish(3, 7, "h")]
    early = [*notes, deliver(2, 10, "a"), deliver(3, 10, "b")]
    assert kinds(early, settled=[2, 3], in_queue=[(1, "body 1")], fifo=True) == ["order"]
    together = [*notes, deliver(1, 10, "a"), deliver(2, 10, "a")]
    assert kinds(together, settled=[1, 2, 3], fifo=True) == []
    after = [*notes, deliver(1, 8, "a"), *settle(1, 9, "a", Kind.ACKED), deliver(2, 20, "b")]
    assert kinds(after, settled=[1, 2, 3], fifo=True) == []
    retried = [*notes, deliver(1, 8, "a"), *settle(1, 9, "a", Kind.RELEASED), deliver(2, 20, "b")]
    assert kinds(retried, settled=[2, 3], in_queue=[(1, "body 1")], fifo=True) == ["order"]
