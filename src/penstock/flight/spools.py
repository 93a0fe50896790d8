"""Messages that a writer has sent ahead, on the server's disk, until it says that all are good.

The tasks of a write of Spark know nothing of each other: a task that has published can't take its
messages back when another finds a bad row. So tasks send their rows into a spool, in parts, and
the driver publishes the parts when all tasks are through. The server checks a part as it checks a
publish, before it takes it. A spool is a file without a name: it goes with the process, and a
server that was restarted tells the writer that the spool is not here.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from penstock import limits
from penstock.errors import DiskFull, InvalidInput, NotAllowed
from penstock.flight.protocol import Published
from penstock.server.shares import Shares
from penstock.validation import check_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.clock import Clock


class _Part(msgspec.Struct):
    """Where a part is in the file, and what came of it when it was published."""

    begin: int
    size: int
    published: Published | None = None


class _Spool:
    """The parts of one write, in one file. Its lock is held while the file is used.

    ``holder`` has the shares that it takes: the owner, or a host where there are no keys.
    """

    def __init__(self, owner: str, holder: str, file: IO[bytes]) -> None:
        self.owner: Final = owner
        self.holder: Final = holder
        self.file: Final = file
        self.lock: Final = threading.Lock()
        self.parts: Final[dict[str, _Part]] = {}
        # Of all parts that were sent, replaced ones included.
        self.sent = 0
        self.bytes = 0
        self.used_at_ms = 0


class Spools:
    """The spools of a server. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._spools: dict[str, _Spool] = {}
        self._places = Shares("spools", limits.MAX_SPOOLS)
        self._parts = Shares("parts of spools", limits.MAX_SPOOLED_PARTS)
        hint = "Write less at a time, or publish without a spool (in Spark: onBadRow 'skip')"
        self._bytes = Shares("bytes of spools", limits.MAX_SPOOLED_BYTES, hint=hint)

    def add(self, name: str, part: str, owner: str, holder: str, batch: pa.RecordBatch) -> None:
        """Keep a part of a spool, which is made if it is not there; it replaces one of its name."""
        check_text(name, "spool", limits.MAX_STAGE_NAME_BYTES)
        check_text(part, "part", limits.MAX_STAGE_NAME_BYTES)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        content = sink.getvalue()
        self.expire()
        with self._using(name, owner, make_for=holder) as spool:
            begin = spool.bytes
            self._take_room(spool, part, content.size)
            try:
                _write(spool.file, begin, content)
            except OSError as error:
                raise DiskFull(f"a spool can't be written: {error.strerror}") from None
            spool.parts[part] = _Part(begin, content.size)

    def publish(
        self, name: str, part: str, owner: str, publish: Callable[[pa.RecordBatch], Published]
    ) -> Published:
        """Publish a part; if that was done before, return the counts of that time."""
        with self._using(name, owner) as spool:
            known = spool.parts.get(part)
            if known is None:
                raise _not_here(f"part {part!r:.100} of spool {name!r:.100}")
            if known.published is None:
                content = os.pread(spool.file.fileno(), known.size, known.begin)
                with pa.ipc.open_stream(content) as reader:
                    known.published = publish(reader.read_next_batch())
            return known.published

    def drop(self, name: str, owner: str) -> bool:
        """Forget a spool with all its parts; return whether there was one."""
        with self._lock:
            spool = self._spools.get(name)
            if spool is None:
                return False
            _check_owner(spool, owner)
            del self._spools[name]
        self._close(spool)
        return True

    def expire(self) -> None:
        """Forget spools that nobody has used for a while."""
        before_ms = self._clock.now_ms() - limits.MAX_STAGE_IDLE_MS
        with self._lock:
            idle = [n for n, spool in self._spools.items() if spool.used_at_ms <= before_ms]
            gone = [self._spools.pop(name) for name in idle]
        for spool in gone:
            self._close(spool)

    def close(self) -> None:
        """Forget all spools."""
        with self._lock:
            gone, self._spools = list(self._spools.values()), {}
        for spool in gone:
            self._close(spool)

    def _close(self, spool: _Spool) -> None:
        with spool.lock:
            spool.file.close()
        self._places.give(spool.holder)
        self._parts.give(spool.holder, spool.sent)
        self._bytes.give(spool.holder, spool.bytes)

    @contextmanager
    def _using(self, name: str, owner: str, *, make_for: str | None = None) -> Iterator[_Spool]:
        """Hold a spool of this key; one that is not there is made for the holder of a share."""
        with self._lock:
            spool = self._spools.get(name)
            if spool is None and make_for is not None:
                self._places.take(make_for)
                try:
                    # Without a name: the file is gone when the process is, however it ends.
                    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - _close() closes it
                except OSError as error:
                    self._places.give(make_for)
                    raise DiskFull(f"a spool can't be made: {error.strerror}") from None
                spool = self._spools[name] = _Spool(owner, make_for, file)
            if spool is None:
                raise _not_here(f"spool {name!r:.100}")
            _check_owner(spool, owner)
            spool.used_at_ms = self._clock.now_ms()
        with spool.lock:
            if spool.file.closed:
                raise _not_here(f"spool {name!r:.100}")
            yield spool
            spool.used_at_ms = self._clock.now_ms()

    def _take_room(self, spool: _Spool, part: str, size: int) -> None:
        """Take room for a part, which the spool keeps until it is closed."""
        if shutil.disk_usage(tempfile.gettempdir()).free - size < limits.MIN_FREE_BYTES:
            raise DiskFull(
                f"no space left to keep part {part!r:.100} in {tempfile.gettempdir()} of the "
                "server; TMPDIR names another directory"
            )
        self._parts.take(spool.holder)
        spool.sent += 1
        self._bytes.take(spool.holder, size)
        spool.bytes += size


def _write(file: IO[bytes], begin: int, content: pa.Buffer) -> None:
    view = memoryview(content)
    while view:
        done = os.pwrite(file.fileno(), view, begin)
        view, begin = view[done:], begin + done


def _check_owner(spool: _Spool, owner: str) -> None:
    if spool.owner != owner:
        raise NotAllowed(f"key {owner!r} did not make this spool")


def _not_here(label: str) -> InvalidInput:
    return InvalidInput(f"{label} is not here (server restarted?): write again")
