"""The audit of payloads: each is there while anybody needs it, is counted, and goes with the last.

Everything that names a message is walked together in the order of ids: payloads, reference
counts, what queues hold, what the log notes as unrouted, what has not been assigned yet. So an
audit needs no more memory for this than one integer for each copy of a message.
"""

from __future__ import annotations

from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from penstock.store.check_report import Kind, all_of, outside
from penstock.store.codec.opendata import payload_key, payload_prefix

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Collection, Iterator, Mapping

    from penstock.store.check_report import Findings
    from penstock.store.kv.check.log import LogAudit

__all__ = ["check_payloads"]

_REFERENCES: Final = b"\x02\x0d"
_CURSOR: Final = b"\x02\x12"
# Payloads are up to 16 MiB.
_PAGE: Final = 64

_PAYLOAD, _COUNT, _HELD, _UNROUTED, _PENDING = range(5)
_Row = tuple[int, int, int]


class _Message:
    """What is known about one message."""

    def __init__(self, message_id: int, rows: Iterator[_Row]) -> None:
        self.id = message_id
        self.has_payload = self.is_unrouted = False
        self.count: int | None = None
        self.holders = 0
        self.log: int | None = None
        for _, what, value in rows:
            if what == _PAYLOAD:
                self.has_payload = True
            elif what == _COUNT:
                self.count = value
            elif what == _HELD:
                self.holders += 1
            elif what == _UNROUTED:
                self.is_unrouted = True
            else:
                self.log = value

    @property
    def is_assigned(self) -> bool:
        """Whether a message has been routed, for all that is known."""
        return bool(self.holders) or self.count is not None


class _Payloads:
    def __init__(
        self, findings: Findings, log: LogAudit, cursors: Mapping[int, int | None]
    ) -> None:
        self._findings = findings
        self._log = log
        self._cursors = cursors
        self.highest = 0
        # By log, the message after which its cursor has to be.
        self._assigned: dict[int, int] = {}
        self._unlisted: list[int] = []
        self._lost: set[int] = set()
        self._lost_pending: set[int] = set()

    def _rows(self, held: array[int]) -> Iterator[_Row]:
        table = self._findings.table("payloads")
        payloads = (
            (int.from_bytes(key[2:], "big"), _PAYLOAD, 0)
            for key, _ in all_of(table, payload_prefix(), page=_PAGE)
        )
        counts = (
            (int.from_bytes(key[2:], "big"), _COUNT, int.from_bytes(value, "big"))
            for key, value in all_of(table, _REFERENCES)
        )
        log = self._log
        return merge(
            payloads,
            counts,
            ((message_id, _HELD, 0) for message_id in sorted(held)),
            ((message_id, _UNROUTED, 0) for message_id in sorted(log.unrouted)),
            sorted(
                (message_id, _PENDING, number)
                for number, ids in log.pending.items()
                for message_id in ids
            ),
        )

    def walk(self, held: array[int]) -> None:
        """Check every message that anything names."""
        for message_id, rows in groupby(self._rows(held), key=itemgetter(0)):
            message = _Message(message_id, rows)
            self.highest = max(self.highest, message_id)
            if message.has_payload:
                self._findings.count("payloads")
            if message.log is not None and self._cursor_of(message) is None:
                # The log's cursor is lost: what was assigned, or is gone, tells where it was.
                if message.is_assigned or not message.has_payload:
                    self._assigned[message.log] = message_id
                if not message.is_assigned:
                    continue
            elif message.log is not None:
                if message.is_assigned:
                    self._assigned[message.log] = message_id
                else:
                    self._check_pending(message)
                    continue
            self._check(message)

    def _cursor_of(self, message: _Message) -> int | None:
        assert message.log is not None
        cursor = self._cursors.get(message.log, 0)
        return None if cursor is None or cursor > self._findings.core.log.end else cursor

    def _check_pending(self, message: _Message) -> None:
        if not message.has_payload:
            text = f"message {message.id} has not been assigned yet and has no payload"
            key = payload_key(message.id)
            self._findings.violate(Kind.PAYLOAD_MISSING, "payloads", key, text)
            self._lost_pending.add(message.id)

    def _check(self, message: _Message) -> None:
        findings, id_ = self._findings, message.id
        key, count_key = payload_key(id_), _REFERENCES + id_.to_bytes(8, "big")
        if message.holders and not message.has_payload:
            text = f"message {id_} is held by {message.holders} queues and has no payload"
            findings.violate(Kind.PAYLOAD_MISSING, "payloads", key, text)
            self._lost.add(id_)
            findings.delete("payloads", count_key)
        elif not message.has_payload:
            if message.count is not None:
                text = f"a reference count of message {id_}, which is gone"
                findings.violate(Kind.REFERENCES, "payloads", count_key, text)
                findings.delete("payloads", count_key)
        elif message.holders:
            self._check_count(message, count_key)
        elif message.count == 0 and (message.is_unrouted or id_ >= self._log.earliest):
            if not message.is_unrouted:
                text = f"message {id_} is in no queue, and the log does not know"
                findings.violate(Kind.REFERENCES, "payloads", count_key, text)
                self._unlisted.append(id_)
        elif findings.aside_unknown or id_ in findings.aside_ids:
            text = f"no queue holds message {id_}, but a record in the quarantine may have"
            findings.note(Kind.GARBAGE, "payloads", key, text)
        else:
            findings.violate(Kind.GARBAGE, "payloads", key, f"no queue holds message {id_}")
            findings.delete("payloads", key, count_key)

    def _check_count(self, message: _Message, count_key: bytes) -> None:
        right = None if message.holders == 1 else message.holders
        if message.count == right:
            return
        says = "one" if message.count is None else message.count
        text = f"{message.holders} queues hold message {message.id}, its count says {says}"
        self._findings.violate(Kind.REFERENCES, "payloads", count_key, text)
        if right is None:
            self._findings.delete("payloads", count_key)
        else:
            self._findings.put("payloads", count_key, right.to_bytes(4, "big"))

    def check_cursors(self) -> None:
        """Check that cursors are in the log, and above everything that has been assigned."""
        findings, end = self._findings, self._findings.core.log.end
        for log, cursor in self._cursors.items():
            lost = cursor is None or cursor > end
            if lost:
                text = f"log {log} has been assigned up to {cursor}, and ends at {end}"
                findings.violate(Kind.CURSOR, "default", _cursor_key(log), text)
                if log not in self._assigned:
                    findings.delete("default", _cursor_key(log))
        for log, message_id in self._assigned.items():
            cursor = self._cursors.get(log, 0)
            if cursor is not None and cursor <= end:
                text = f"log {log} has been assigned up to {cursor}, but {message_id} has been too"
                findings.violate(Kind.CURSOR, "default", _cursor_key(log), text)
            findings.put("default", _cursor_key(log), (message_id + 1).to_bytes(8, "big"))

    def mend(self, expel: Callable[[Collection[int], str], None]) -> None:
        """Repair what takes more than a record of this table."""
        if not self._findings.repair:
            return
        why = "the payload is missing"
        if self._lost:
            expel(self._lost, why)
        if self._lost_pending:
            self._log.expel(self._lost_pending, why)
        self._log.note_unrouted(self._unlisted)

    def strangers(self) -> None:
        """Check for keys that are none of ours."""
        findings = self._findings
        table = findings.table("payloads")
        for key, value in outside(table, [payload_prefix(), _REFERENCES]):
            text = "a key that nothing uses"
            findings.reject(Kind.STRANGER, "payloads", key, value, text)


def check_payloads(
    findings: Findings,
    held: array[int],
    log: LogAudit,
    cursors: Mapping[int, int | None],
    expel: Callable[[Collection[int], str], None],
) -> int:
    """Check payloads, reference counts and cursors; give the highest id in use.

    ``held`` has the ids of the messages of every queue; ``expel`` takes messages out of them.
    """
    payloads = _Payloads(findings, log, cursors)
    payloads.strangers()
    payloads.walk(held)
    payloads.check_cursors()
    payloads.mend(expel)
    return max(payloads.highest, log.highest)


def _cursor_key(log: int) -> bytes:
    return _CURSOR + log.to_bytes(4, "big")
