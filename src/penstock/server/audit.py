"""The audit log: who changed queues or the store, by which verb, and what that did to how many.

Whatever the protocol, such a change is a verb of the broker. A listener calls it on the broker that
:meth:`AuditLog.watch` gives for the sender of the request, which writes a record when the verb
ends, also if it fails. A record is a line of JSON::

    {"time": "2026-01-31T12:00:00.000Z", "verb": "purge", "queue": "orders", "protocol": "native",
     "key": "ops", "address": "10.0.0.7:51234", "arguments": {"states": ["available"]},
     "outcome": "ok", "count": 1200, "ms": 35}
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, wraps
from itertools import islice
from os.path import samestat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

import msgspec

from penstock import limits
from penstock.broker.broker import Broker
from penstock.errors import InvalidInput
from penstock.model import Collected
from penstock.server.shares import holder_of
from penstock.store.life import fields_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.clock import Clock

T = TypeVar("T")

log = logging.getLogger(__name__)
audit = logging.getLogger("penstock.audit")

# The path that stands for the server's own log.
LOG: Final = "log"
# Verbs of the broker that are recorded.
VERBS: Final = frozenset(
    {
        *("create_queue", "update_queue", "delete_queue", "purge", "redrive", "move", "trim"),
        *("collect", "configure_log"),
    }
)
# The most values of a list in a record, such as message ids; "message_ids_count" has the number of
# all. Filters and labels of a queue are whole.
MOST_VALUES: Final = 20


class Actor(NamedTuple):
    """The sender of a request: the protocol, the id of its key, and its address."""

    protocol: str
    key: str
    address: str

    @property
    def holder(self) -> str:
        """The holder of the shares that its requests take."""
        return holder_of(self.key, self.address)


class AuditLog:
    """Writes records to a file, or to the server's log; from any thread.

    A file that was moved away is made again, so that it can be rotated at any time. A record that
    can't be written goes to the server's log, as an error, and is counted in ``lost``.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        """Open the file, or refuse a path that can't be written."""
        self.lost = 0
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._file = -1
        self._torn = False
        try:
            self._reopen()
        except OSError as error:
            raise InvalidInput(
                f"the audit log {path} can't be written: {error.strerror}; audit.path names a file "
                f"in a directory that is there, or is '{LOG}' for the server's log"
            ) from None

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def watch(self, broker: Broker, actor: Actor) -> Broker:
        """Return the broker for one request: verbs that change queues are recorded."""
        return cast("Broker", _WatchedBroker(self, broker, actor))

    def run(
        self, actor: Actor, verb: str, arguments: Mapping[str, Any], work: Callable[[], T]
    ) -> T:
        """Run a verb and write its record, also if it fails."""
        began_ms = self._clock.now_ms()
        try:
            result = work()
        except BaseException as error:
            self.record(actor, verb, arguments, began_ms=began_ms, error=error)
            raise
        self.record(actor, verb, arguments, began_ms=began_ms, count=_count_of(result))
        return result

    def record(
        self,
        actor: Actor,
        verb: str,
        arguments: Mapping[str, Any],
        *,
        began_ms: int,
        count: int | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Write the record of a verb that has ended, or failed with an error."""
        now_ms = self._clock.now_ms()
        told = _plain(arguments)
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(now_ms / 1_000, UTC).isoformat(timespec="milliseconds"),
            "verb": verb,
            "queue": told.pop("queue", ""),
            **actor._asdict(),
            "arguments": told,
            "outcome": "ok" if error is None else type(error).__name__,
        }
        fields["time"] = fields["time"].replace("+00:00", "Z")
        if error is not None:
            fields["message"] = _cut(str(error))
        if count is not None:
            fields["count"] = count
        fields["ms"] = now_ms - began_ms
        if self._path == LOG:
            given = audit.name, logging.INFO, "", 0, "%s %s", (verb, fields_text(fields)), None
            record = audit.makeRecord(*given, extra={"fields": fields})
            if audit.isEnabledFor(logging.INFO):
                audit.handle(record)
            self.lost += getattr(record, "lost", 0)
            return
        line = msgspec.json.encode(fields) + b"\n"
        try:
            with self._lock:
                self._reopen()
                # A record that was written in part must not spoil this one too.
                whole = b"\n" * self._torn + line
                self._torn = os.write(self._file, whole) != len(whole)
                if self._torn:
                    raise OSError(0, "only a part of it was written")  # noqa: TRY301
        except OSError as failure:
            self.lost += 1
            log.error(  # noqa: TRY400
                "the audit log %s can't be written (%s), the record is: %s",
                self._path,
                failure.strerror,
                line.decode().rstrip(),
            )

    def _reopen(self) -> None:
        """Open the file if it is not open, or is no longer the one of its name."""
        if self._path == LOG:
            return
        with suppress(FileNotFoundError):
            if self._file >= 0 and samestat(os.fstat(self._file), Path(self._path).stat()):
                return
        fresh = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._torn = fresh, False


def audited(
    log_: AuditLog | None, actor: Actor, work: Callable[[Broker], T]
) -> Callable[[Broker], T]:
    """Return work for the broker whose verbs are recorded, if there is an audit log."""
    return work if log_ is None else lambda broker: work(log_.watch(broker, actor))


class _WatchedBroker:
    """A broker in the hands of one actor."""

    def __init__(self, log_: AuditLog, broker: Broker, actor: Actor) -> None:
        self._log, self._broker, self._actor = log_, broker, actor

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._broker, name)
        if name not in VERBS:
            return verb

        @wraps(verb)
        def run(*given: Any, **named: Any) -> Any:
            arguments = _named(name, given, named)
            return self._log.run(self._actor, name, arguments, lambda: verb(*given, **named))

        return run


@cache
def _signature(verb: str) -> inspect.Signature:
    return inspect.signature(getattr(Broker, verb))


def _named(verb: str, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names; without those that were left out."""
    try:
        found = _signature(verb).bind_partial(None, *given, **named).arguments
    except TypeError:
        # The verb says itself what is wrong with them.
        return dict(named)
    found.pop("self", None)
    more = {**found.pop("settings", {}), **found.pop("changes", {})}
    if "name" in found:
        found["queue"] = found.pop("name")
    return {**more, **found}


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as JSON has them: few values, no long texts, no functions."""
    plain: dict[str, Any] = {}
    for name, value in arguments.items():
        if value is None or callable(value):
            continue
        found = msgspec.to_builtins(value, enc_hook=str)
        plain[name] = _cut(found)
        if isinstance(found, list) and (name == "message_ids" or len(found) > MOST_VALUES):
            plain[f"{name}_count"] = len(found)
    return plain


def _cut(value: Any) -> Any:
    """Leave out what would make a record long: clients send what they like."""
    if isinstance(value, str) and len(value) > limits.MAX_FILTER_CHARS:
        return f"{value[: limits.MAX_FILTER_CHARS]}..."
    if isinstance(value, list):
        return [_cut(each) for each in value[:MOST_VALUES]]
    if isinstance(value, dict):
        return {_cut(name): _cut(each) for name, each in islice(value.items(), limits.MAX_LABELS)}
    return value


def _count_of(result: Any) -> int | None:
    if isinstance(result, Collected):
        return result.freed_messages
    return result if isinstance(result, int) else None
