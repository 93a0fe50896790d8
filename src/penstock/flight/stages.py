"""Stages: assignments that executors have matched, until the driver commits them.

A stage is all assignments of a stretch of one log, or all messages of a stretch that a backfill
puts into one queue. It lives in memory: after a restart the caller is told that it is not here,
and stages again. A committed stage gives its rows back and keeps its place until others have
followed, so that committing it again is answered (stale), not refused.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from penstock import limits
from penstock.errors import InvalidInput
from penstock.flight.protocol import Committed, FillStage, StageCommand
from penstock.model import AssignStatus, Cursor
from penstock.validation import check_count, check_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.flight.protocol import CommitFill

KEPT_COMMITTED: Final = 200
"""How many committed stages keep their places: as many as may be committed again."""


class Stage:
    """A staged stretch: rows as Arrow arrays, which are small and need no unpacking until used."""

    def __init__(
        self, command: StageCommand | FillStage, batches: Sequence[pa.RecordBatch]
    ) -> None:
        check_text(command.stage, "stage", limits.MAX_STAGE_NAME_BYTES)
        check_count(command.begin, "begin", 0, limits.MAX_OFFSET)
        check_count(command.end, "end", command.begin, limits.MAX_OFFSET)
        self.command = command
        self.committed = False
        self.filter: str | None = None
        # Names repeat: once each, they take next to nothing.
        self._batches = [
            batch.set_column(1, "queue", batch.column("queue").dictionary_encode())
            if isinstance(command, StageCommand)
            else batch
            for batch in batches
        ]
        self.rows = sum(batch.num_rows for batch in batches)
        self.bytes: int = sum(batch.nbytes for batch in self._batches)
        self.used_at_ms = 0

    def clear(self) -> None:
        """Note that it was committed, and give the rows back."""
        self.committed = True
        self._batches, self.bytes = [], 0

    def offsets(self) -> list[int]:
        """Return the offset of every row."""
        return [each for batch in self._batches for each in _ints(batch.column("offset"))]

    def assignments(self, from_offset: int, into: dict[int, Sequence[str]]) -> None:
        """Add the assignments from an offset on."""
        for batch in self._batches:
            queues = batch.column("queue")
            names = queues.dictionary.to_pylist()
            offsets, indices = _ints(batch.column("offset")), _ints(queues.indices)
            # Most messages go to one queue, and share its name with all others that do.
            alone = [(name,) for name in names]
            found = dict(zip(offsets, map(alone.__getitem__, indices), strict=True))
            once = len(found) == len(offsets) and min(found, default=0) >= from_offset
            if once and into.keys().isdisjoint(found):
                into.update(found)
                continue
            for offset, index in zip(offsets, indices, strict=True):
                if offset >= from_offset:
                    known = into.get(offset, ())
                    if isinstance(known, list):
                        known.append(names[index])
                    else:
                        into[offset] = [*known, names[index]]


def _ints(column: pa.Array) -> list[int]:
    """Return whole numbers without nulls, many times as fast as pyarrow does."""
    values = column.buffers()[1]
    if not len(column):
        return []
    view = memoryview(values).cast("q" if column.type == pa.int64() else "i")
    return view[column.offset : column.offset + len(column)].tolist()


class Stages:
    """The stages of a server. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._staged: dict[str, Stage] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._staged)

    def add(self, stage: Stage) -> None:
        """Keep a stage; one of the same name is replaced."""
        name = stage.command.stage
        with self._lock:
            self._expire()
            done = [key for key, each in self._staged.items() if each.committed]
            for key in done[: max(0, len(done) - KEPT_COMMITTED)]:
                del self._staged[key]
            others = [each for key, each in self._staged.items() if key != name]
            if len(others) >= limits.MAX_STAGES:
                raise InvalidInput(f"{len(others)} stages wait to be committed, which is too many")
            total = sum(each.bytes for each in others) + stage.bytes
            if total > limits.MAX_STAGED_BYTES:
                raise InvalidInput(
                    f"{total} bytes would be staged; at most {limits.MAX_STAGED_BYTES}: commit or "
                    "drop stages first, or route less at a time"
                )
            stage.used_at_ms = self._clock.now_ms()
            self._staged[name] = stage

    def room(self) -> int:
        """Return how many bytes may still be staged."""
        with self._lock:
            return limits.MAX_STAGED_BYTES - sum(each.bytes for each in self._staged.values())

    def get(self, names: Sequence[str]) -> list[Stage]:
        """Return stages by name."""
        with self._lock:
            found = []
            for name in names:
                stage = self._staged.get(name)
                if stage is None:
                    raise InvalidInput(
                        f"stage {name!r:.100} is not here (server restarted?): stage it again"
                    )
                stage.used_at_ms = self._clock.now_ms()
                found.append(stage)
            return found

    def drop(self, names: Sequence[str]) -> int:
        """Forget stages; return how many there were."""
        with self._lock:
            return sum(self._staged.pop(name, None) is not None for name in names)

    def expire(self) -> None:
        """Forget stages that nobody has used for a while."""
        with self._lock:
            self._expire()

    def _expire(self) -> None:
        before_ms = self._clock.now_ms() - limits.MAX_STAGE_IDLE_MS
        for name in [n for n, stage in self._staged.items() if stage.used_at_ms <= before_ms]:
            del self._staged[name]


def commit(broker: Broker, stages: Sequence[Stage], epoch: int | None) -> list[Committed]:
    """Assign stages, those of one log as one page."""
    pages: dict[int, list[tuple[Stage, StageCommand]]] = {}
    for stage in stages:
        command = stage.command
        if not isinstance(command, StageCommand):
            raise InvalidInput(f"stage {command.stage!r} is one of a backfill: use commit_fill")
        pages.setdefault(command.log, []).append((stage, command))
    # All are checked before the first is assigned: a gap in one log leaves all as they were.
    for log, page in sorted(pages.items()):
        page.sort(key=lambda each: (each[1].begin, each[1].end))
        at = page[0][1].begin
        for _, command in page:
            if command.begin > at:
                raise InvalidInput(f"the stages of log {log} leave a gap: [{at}, {command.begin})")
            at = max(at, command.end)
    return [_assign(broker, log, page, epoch) for log, page in sorted(pages.items())]


def _assign(
    broker: Broker, log: int, page: Sequence[tuple[Stage, StageCommand]], epoch: int | None
) -> Committed:
    commands = [command for _, command in page]
    # The oldest version decides: any change since then may concern one of the stages.
    version = _lowest(command.filters_version for command in commands)
    cursor = Cursor(commands[0].begin, max(command.end for command in commands), version)
    lowest = _lowest([epoch, *(command.epoch for command in commands)])
    answer = broker.assign(log, cursor, _assignments(page), epoch=lowest)
    if answer.status in {AssignStatus.APPLIED, AssignStatus.TRIMMED, AssignStatus.STALE}:
        for stage, _ in page:
            stage.clear()
    return Committed(log, answer.status.value, answer.cursor, answer.placed)


def _lowest(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _assignments(page: Sequence[tuple[Stage, StageCommand]]) -> dict[int, Sequence[str]]:
    assignments: dict[int, Sequence[str]] = {}
    at = 0
    for stage, command in page:
        # Offsets that an earlier stage covers are its own: the same task may have run twice.
        stage.assignments(at, assignments)
        at = max(at, command.end)
    return assignments


def fill_offsets(stages: Sequence[Stage], command: CommitFill) -> list[int]:
    """Return the messages that stages of a backfill hold, which must cover its whole stretch."""
    offsets: set[int] = set()
    at = command.begin
    for stage in sorted(stages, key=lambda each: each.command.begin):
        if not isinstance(stage.command, FillStage) or stage.command.queue != command.queue:
            raise InvalidInput(
                f"stage {stage.command.stage!r} is not one of a backfill of {command.queue!r:.100}"
            )
        if stage.committed:
            raise InvalidInput(
                f"stage {stage.command.stage!r} was committed before, its rows are gone"
            )
        if stage.command.begin > at:
            break
        at = max(at, stage.command.end)
        offsets.update(stage.offsets())
    if at < command.end:
        raise InvalidInput(
            f"the stages leave a gap at offset {at} of [{command.begin}, {command.end})"
        )
    return sorted(each for each in offsets if command.begin <= each < command.end)
