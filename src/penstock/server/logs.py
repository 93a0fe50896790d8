"""The log of a long-running process on standard error, and its few lines on standard output.

::

    any thread ──▶ lines that wait, or are lost for want of room ──▶ a thread ──▶ descriptor

So a pipe that nobody reads and a disk that is full hold up nobody, and don't decide how the process
ends. A child of fork() has no such thread and writes its lines at once. The access log of requests
is in :mod:`penstock.server.metrics`.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import sys
import threading
from collections import deque
from datetime import UTC, datetime
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

from penstock import limits
from penstock.store.life import fields_text, life

if TYPE_CHECKING:
    from collections.abc import Callable

# How long the end of the process waits for a descriptor that takes nothing.
_DRAIN_SECONDS: Final = 1.0
# The most lines of one write.
_BATCH: Final = 100
_AUDIT: Final = "penstock.audit"


class Lines:
    """Lines on their way to a descriptor, from any thread; ``lost`` counts those that were lost.

    ``note`` makes the line that says how many were lost before it, once there is room again.
    """

    def __init__(self, descriptor: int, note: Callable[[int], str]) -> None:
        self.lost = 0
        self._descriptor = descriptor
        self._note = note
        # Of a lock that a signal handler may take again.
        self._changed = threading.Condition(threading.RLock())
        # Lines that are not written yet, the ones that are being written among them.
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._writer = threading.Thread(target=self._run, name="penstock-lines", daemon=True)
        self._writer.start()
        atexit.register(self.drain)

    def put(self, line: str, *, reserved: bool = False) -> bool:
        """Say a line; False if it is lost. Half of the room is reserved for lines that say so."""
        data = f"{line}\n".encode("utf-8", "backslashreplace")
        if not self._writer.is_alive():
            # In a fork: what waits is its parent's to write, and the lock may be held for ever.
            return not self._write([data])
        with self._changed:
            if self._bytes + len(data) > limits.MAX_LOG_BYTES // (1 if reserved else 2):
                self.lost += 1
                return False
            self._waiting.append(data)
            self._bytes += len(data)
            self._changed.notify_all()
        return True

    def drain(self) -> None:
        """Wait until all lines are written, but not for long."""
        if self._writer.is_alive():
            with self._changed:
                self._changed.wait_for(lambda: not self._waiting, _DRAIN_SECONDS)

    def _run(self) -> None:
        told = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                batch, lost = list(islice(self._waiting, _BATCH)), self.lost
            failed = self._write(batch)
            if lost > told and not failed:
                self._write([f"{self._note(lost - told)}\n".encode()])
                told = lost
            with self._changed:
                self.lost += failed
                for line in batch:
                    self._waiting.popleft()
                    self._bytes -= len(line)
                self._changed.notify_all()

    def _write(self, batch: list[bytes]) -> int:
        """Write lines; return how many could not be written whole."""
        left = memoryview(b"".join(batch))
        try:
            while left:
                try:
                    left = left[os.write(self._descriptor, left) :]
                except BlockingIOError:
                    # A process that shares it has set it so.
                    select.select([], [self._descriptor], [])
        except OSError:
            ends = len(left)
            for count, line in enumerate(reversed(batch), 1):
                ends -= len(line)
                if ends <= 0:
                    return count
        return 0


_outputs: Final[dict[int, Lines]] = {}


def descriptor_of(stream: IO[str]) -> int | None:
    """Return the descriptor behind a stream; None: what a test has put in its place."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def say(line: str) -> None:
    """Say something on standard output, as a process does that runs on if that can't be said."""
    descriptor = descriptor_of(sys.stdout)
    if descriptor is None:
        sys.stdout.write(f"{line}\n")
        return
    if descriptor not in _outputs:
        _outputs[descriptor] = Lines(descriptor, lambda lost: f"{lost} lines were lost")
    _outputs[descriptor].put(line)


def drain() -> None:
    """Wait, but not for long, for what was said and logged: the process ends at once."""
    for lines in list(_outputs.values()):
        lines.drain()
    for handler in logging.getLogger().handlers:
        handler.flush()


# --- the log: lines of text, or one JSON object each ----------------------------------------------


class LogLines(logging.Handler):
    """Puts the log on a descriptor; a record that is lost has the attribute ``lost``."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.lines = Lines(descriptor, self._note)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or lose it."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        reserved = record.levelno >= logging.WARNING or record.name == _AUDIT
        if not self.lines.put(line, reserved=reserved):
            record.lost = True

    def flush(self) -> None:
        """Wait for the lines, but not for long."""
        self.lines.drain()

    def _note(self, lost: int) -> str:
        text = f"{lost} lines of the log were lost: they could not be written in time"
        return self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None))


def lost_lines() -> int:
    """Return how many lines of this process's log were lost."""
    found = (each for each in logging.getLogger().handlers if isinstance(each, LogLines))
    return sum(each.lines.lost for each in found)


class JsonLines(logging.Formatter):
    """A record as a JSON object; ``fields`` of the record are put beside the rest."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one line."""
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class TextLines(logging.Formatter):
    """A record as a line for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one line, and a traceback below it if there is one."""
        parts = [_time(record), record.levelname.lower(), record.name, record.getMessage()]
        # A record of the life-cycle log has its fields in its message.
        if record.name != life.name and hasattr(record, "fields"):
            parts.append(fields_text(record.fields))
        if record.exc_info:
            parts.append(f"\n{self.formatException(record.exc_info)}")
        return " ".join(parts)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure_logs(level: str, form: str, *, steps: bool = False) -> None:
    """Log everything of this process to standard error, from a level on; with ``steps``, lives."""
    descriptor = descriptor_of(sys.stderr)
    handler = logging.StreamHandler() if descriptor is None else LogLines(descriptor)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if steps:
        life.setLevel(logging.INFO)
    # At debug asyncio would log every read.
    logging.getLogger("asyncio").setLevel(max(logging.INFO, logging.getLogger().level))
