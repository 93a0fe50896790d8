"""Move a Queueber database into a queue, each item once, however often the move is interrupted.

Items are taken in the order of their ids. Every batch is one ``publish``, which stores all of
its messages or none, and one of them is the import's own: a small record of how far it has come,
in a queue that the import keeps for itself. So the record and the messages can't differ, whatever
stops the process and for however long.

The state of an item afterwards (``now`` is when its batch is published):

==============================================  ==============================================
in Queueber                                     in Penstock
==============================================  ==============================================
available, visible by now                       available
available, visible later                        delayed until then
in progress, under a lease that is live         delayed until that lease would have expired
in progress, lease expired or gone              available
both                                            one message, visible at the later of the two
==============================================  ==============================================
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock import limits
from penstock.clock import SystemClock
from penstock.errors import CorruptRecord, ImportFailed, InvalidMessage
from penstock.filters import Row, default_filter, parse
from penstock.importers.queueber_source import (
    AVAILABLE,
    IN_PROGRESS,
    LEASE_EXPIRY,
    LEASES,
    Source,
    parse_timed_key,
)
from penstock.model import Message, State
from penstock.validation import check_count, check_messages, check_queue_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from os import PathLike

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.filters import Filter
    from penstock.importers.queueber_source import Found, StoredItem

ID_ATTRIBUTE: Final = "queueber.id"
# On the import's own records: filters that take everything can leave them out by it.
IMPORT_ATTRIBUTE: Final = "penstock.import"
MAX_PROBLEMS: Final = 20
# Payloads of one batch: large ones must not add up to more than memory holds comfortably.
BATCH_BYTES: Final = 32 << 20
# How many records of progress may pile up before all but the last are settled.
TRIM_EVERY: Final = 64
# Names that have one value in all messages of an import: a look at one message decides for all.
_CONSTANT: Final = frozenset({"queue", "group", "priority", IMPORT_ATTRIBUTE})


_KINDS: Final = ("available", "delayed", "leased", "lease_ended")


class Problem(msgspec.Struct, frozen=True):
    """Something in the source that could not be used."""

    key: str
    reason: str


class ImportReport(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of all runs of an import; those from ``corrupt_leases`` on are of the last run.

    ``skipped`` items could not be read or are not allowed; ``problems`` lists the first few
    records that were wrong.
    """

    source: str
    queue: str
    available: int = 0
    delayed: int = 0
    leased: int = 0
    lease_ended: int = 0
    skipped: int = 0
    in_both: int = 0
    in_two_families: int = 0
    corrupt_leases: int = 0
    foreign_keys: int = 0
    imported_before: int = 0
    problems: tuple[Problem, ...] = ()

    @property
    def imported(self) -> int:
        """How many messages the import has published, in all its runs."""
        return self.available + self.delayed + self.leased + self.lease_ended


class _Saved(msgspec.Struct, frozen=True):
    """The progress of an import: the payload of the import's own message."""

    number: int
    cursor: bytes
    records: int
    counts: dict[str, int]
    problems: list[Problem]


class _Step(NamedTuple):
    """The message to publish for an item, or None, and the counts and problems of the item."""

    id: bytes
    records: int
    message: Message | None
    counted: tuple[str, ...]
    problems: list[Problem]


def progress_queue(source_identity: str, queue: str) -> str:
    """Return the name of the queue in which an import keeps its progress."""
    digest = sha256(f"{source_identity}\0{queue}".encode()).hexdigest()
    return f"queueber-import-{digest[:16]}"


def import_queueber(
    path: str | PathLike[str],
    broker: Broker,
    queue: str,
    *,
    batch: int = 500,
    progress: Callable[[int, int], None] | None = None,
    restart: bool = False,
    clock: Clock | None = None,
) -> ImportReport:
    """Publish every item of the Queueber database at ``path`` to ``queue``, once.

    An import that was interrupted goes on where it was; one that was finished takes the items that
    have come since. ``restart`` forgets the import's progress. ``progress`` is called with the
    records done and the records there are, after each batch is durable; an exception from it ends
    the run.
    Raises ImportFailed, before anything is written, if there is no such database or if the queue
    would not take the messages.
    """
    check_count(batch, "batch", 1, limits.MAX_PUBLISH_MESSAGES - 1)
    check_queue_name(queue)
    with Source(Path(path)) as source:
        run = _Import(source, broker, queue, clock or SystemClock())
        run.prepare(restart=restart)
        run.run(batch, progress)
        return run.report()


class _Import:
    """One run of an import."""

    def __init__(self, source: Source, broker: Broker, queue: str, clock: Clock) -> None:
        self._source = source
        self._broker = broker
        self._queue = queue
        self._clock = clock
        self._progress_queue = progress_queue(source.identity, queue)
        self._saved = _Saved(0, b"", 0, {}, [])
        self._seen: Counter[str] = Counter()
        self._seen_problems: list[Problem] = []
        self._lease_ends: dict[bytes, int] = {}
        self._imported_before = 0
        self._kept = 0

    # --- before anything is written ----------------------------------------------------------

    def prepare(self, *, restart: bool) -> None:
        """Look at both sides, and make the queues that are missing."""
        specs = {spec.name: spec for spec in self._broker.queues()}
        log = self._broker.log_stats()
        if self._progress_queue in specs and log.routed_up_to < log.end:
            raise ImportFailed(
                "messages of this store's log are not routed yet, among them perhaps the last "
                "record of this import's progress: run the routing pipeline, then import again"
            )
        if self._progress_queue in specs and not restart:
            self._saved = self._find_saved()
            self._imported_before = sum(self._saved.counts.get(kind, 0) for kind in _KINDS)
            if self._imported_before and self._queue not in specs:
                raise ImportFailed(
                    f"queue {self._queue!r} is gone since {self._imported_before} messages were "
                    "imported into it; restart the import to have them again"
                )
        self._survey()
        known = specs.get(self._queue)
        self._filter = parse(known.filter if known else default_filter(self._queue))
        self._check_routes({name: parse(spec.filter) for name, spec in specs.items()})
        if restart and self._progress_queue in specs:
            self._broker.delete_queue(self._progress_queue)
        if known is None:
            self._broker.create_queue(self._queue)
        self._broker.create_queue(
            self._progress_queue,
            description=f"how far the import of a Queueber database into {self._queue} has come",
            max_attempts=limits.MAX_ATTEMPTS,
            done_retention_ms=1,
        )

    def _find_saved(self) -> _Saved:
        latest = self._saved
        for state in State:
            cursor = None
            while True:
                page = self._broker.browse(
                    self._progress_queue, state=state, limit=1_000, cursor=cursor
                )
                for entry in page:
                    saved = _decode_saved(self._progress_queue, entry.payload)
                    latest = max(latest, saved, key=lambda each: each.number)
                if state is not State.DONE:
                    self._kept += len(page)
                cursor = page.next_cursor
                if cursor is None:
                    break
        return latest

    def _check_routes(self, filters: dict[str, Filter]) -> None:
        row = self._row(self._record(self._saved))
        for name, compiled in {**filters, self._queue: self._filter}.items():
            if name != self._progress_queue and compiled.matches(row):
                raise ImportFailed(
                    f"queue {name!r} would also get the import's records of its progress; add "
                    f'AND "{IMPORT_ATTRIBUTE}" IS NULL to its filter'
                )
        if self._filter.names <= _CONSTANT:
            self._check_taken(Message(b"", self._attributes(b"")))
            return
        for step in map(self._decide, self._source.items(self._saved.cursor)):
            if step.message is not None:
                self._check_taken(step.message)

    def _check_taken(self, message: Message) -> None:
        if not self._filter.matches(self._row(message)):
            raise ImportFailed(
                f"queue {self._queue!r} takes messages where {self._filter.text}; an imported "
                f"one with {message.attributes} and {len(message.payload)} bytes does not match"
            )

    def _row(self, message: Message) -> Row:
        now_ms = self._clock.now_ms()
        return Row(message.attributes, size=len(message.payload), published_at_ms=now_ms)

    def _survey(self) -> None:
        """Note the leases that are live, and the keys that are none of Queueber's."""
        for family, key in self._source.foreign_keys():
            self._seen["foreign_keys"] += 1
            self._note(key, f"in no namespace of family {family}")
        now_ms = self._clock.now_ms()
        ends: dict[bytes, int] = {}
        for _, key in self._source.keys(LEASE_EXPIRY):
            with suppress(CorruptRecord):
                ends_secs, id_ = parse_timed_key(LEASE_EXPIRY, key)
                ends[id_] = max(ends_secs, ends.get(id_, 0))
        for family, key in self._source.keys(LEASES):
            try:
                ids, ends_secs = self._source.decode_lease(self._source.newest(LEASES, key) or b"")
            except CorruptRecord as error:
                self._seen["corrupt_leases"] += 1
                self._note(key, f"lease in family {family}: {error}")
                continue
            ends_secs = ends_secs or ends.get(key.removeprefix(LEASES), 0)
            if ends_secs * 1000 > now_ms:
                for item in ids:
                    self._lease_ends[item] = max(ends_secs, self._lease_ends.get(item, 0))

    def _note(self, key: bytes, reason: str) -> None:
        if len(self._seen_problems) < MAX_PROBLEMS:
            self._seen_problems.append(_problem(key, reason))

    # --- items -------------------------------------------------------------------------------

    def _decide(self, records: list[Found]) -> _Step:
        """Decide about an item."""
        counted: list[str] = []
        problems: list[Problem] = []
        stored: dict[bytes, StoredItem] = {}
        # The old family comes last, and counts only where the namespace's own has nothing.
        for record in sorted(records, key=lambda each: each.old_family):
            if record.namespace in stored:
                counted.append("in_two_families")
                continue
            try:
                stored[record.namespace] = self._source.decode_item(record)
            except CorruptRecord as error:
                problems.append(_problem(record.key, str(error)))
        id_, message = records[0].id, None
        if stored:
            kind, message = self._message(id_, stored.get(AVAILABLE), stored.get(IN_PROGRESS))
            try:
                check_messages([message])
                counted += [kind, *(["in_both"] if len(stored) > 1 else [])]
            except InvalidMessage as error:
                problems.append(_problem(records[0].key, str(error)))
                message = None
        if message is None:
            counted = ["skipped"]
        return _Step(id_, len(records), message, tuple(counted), problems)

    def _message(
        self, id_: bytes, waiting: StoredItem | None, held: StoredItem | None
    ) -> tuple[str, Message]:
        now_ms, visible_at_ms = self._clock.now_ms(), 0
        if waiting is not None:
            visible_at_ms = (waiting.visible_at_secs or 0) * 1000
        kind = "delayed" if visible_at_ms > now_ms else "available"
        if held is not None:
            ends_ms = self._lease_ends.get(id_, 0) * 1000
            visible_at_ms = max(visible_at_ms, ends_ms)
            if ends_ms > now_ms:
                kind = "leased"
            elif waiting is None:
                kind = "lease_ended"
        found = held or waiting
        assert found is not None
        delay_ms = min(max(0, visible_at_ms - now_ms), limits.MAX_DURATION_MS)
        return kind, Message(found.contents, self._attributes(id_), delay_ms=delay_ms)

    def _attributes(self, id_: bytes) -> dict[str, str]:
        return {"queue": self._queue, ID_ATTRIBUTE: id_.hex()}

    # --- batches -----------------------------------------------------------------------------

    def run(self, batch: int, progress: Callable[[int, int], None] | None) -> None:
        """Publish every item after the cursor, batch by batch."""
        total = self._source.count_items()
        for steps in self._batches(batch):
            self._publish(steps)
            if progress is not None:
                progress(self._saved.records, max(total, self._saved.records))
        self._trim()

    def _batches(self, batch: int) -> Iterator[list[_Step]]:
        pending: list[_Step] = []
        size = 0
        for step in map(self._decide, self._source.items(self._saved.cursor)):
            pending.append(step)
            size += len(step.message.payload) if step.message else 0
            if len(pending) >= batch or size >= BATCH_BYTES:
                yield pending
                pending, size = [], 0
        if pending:
            yield pending

    def _publish(self, steps: list[_Step]) -> None:
        messages = [step.message for step in steps if step.message is not None]
        for message in messages:
            self._check_taken(message)
        counts = Counter(self._saved.counts)
        problems = list(self._saved.problems)
        for step in steps:
            counts.update(step.counted)
            problems.extend(step.problems)
        saved = _Saved(
            self._saved.number + 1,
            steps[-1].id,
            self._saved.records + sum(step.records for step in steps),
            dict(counts),
            problems[:MAX_PROBLEMS],
        )
        self._broker.publish([*messages, self._record(saved)])
        self._saved = saved
        self._kept += 1
        if self._kept >= TRIM_EVERY:
            self._trim()

    def _record(self, saved: _Saved) -> Message:
        return Message(
            msgspec.json.encode(saved),
            {"queue": self._progress_queue, IMPORT_ATTRIBUTE: "queueber"},
        )

    def _trim(self) -> None:
        """Settle all records of progress but the last."""
        while self._kept > 1:
            deliveries = self._broker.claim(self._progress_queue, limit=min(self._kept - 1, 1_000))
            if not deliveries:
                return
            old = [
                delivery.receipt
                for delivery in deliveries
                if _decode_saved(delivery.queue, delivery.payload).number < self._saved.number
            ]
            self._broker.ack(old)
            self._kept -= len(old)
            if len(old) < len(deliveries):
                # The last one is not to be settled: it goes back as its lease ends.
                return

    def report(self) -> ImportReport:
        """Return the counts of all runs."""
        known = ImportReport.__struct_fields__
        counts = {**self._saved.counts, **self._seen}
        return ImportReport(
            source=str(self._source.path),
            queue=self._queue,
            imported_before=self._imported_before,
            problems=tuple([*self._saved.problems, *self._seen_problems][:MAX_PROBLEMS]),
            **{name: count for name, count in counts.items() if name in known},
        )


def _problem(key: bytes, reason: str) -> Problem:
    # Keys begin with words and go on with bytes: show the one as text, the other as hex.
    namespace, slash, rest = key[:200].partition(b"/")
    return Problem(
        f"{namespace.decode('ascii', 'backslashreplace')}{slash.decode()}{rest.hex()}", reason
    )


def _decode_saved(queue: str, payload: bytes | None) -> _Saved:
    try:
        return msgspec.json.decode(payload or b"", type=_Saved)
    except msgspec.DecodeError as error:
        raise ImportFailed(
            f"queue {queue!r} is to hold how far this import has come, but has a message that "
            f"does not say so ({error}); delete the queue to import everything again"
        ) from error
