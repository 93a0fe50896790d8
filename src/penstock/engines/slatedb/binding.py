"""Calls of SlateDB's asynchronous binding from threads, and batches filled in bulk.

The binding offers coroutines that need an event loop for one thing only: to be woken when the
library has got further. :func:`call` is that much of a loop. The library's work happens on the
caller's thread and on the library's own; no call changes to another Python thread, which would
cost more than most calls do.
"""

from __future__ import annotations

import ctypes
from asyncio import events
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from slatedb.uniffi import WriteBatch
from slatedb.uniffi import slatedb as binding

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence

T = TypeVar("T")


class CallTimeout(Exception):
    """The library has not answered in time."""


class _Step:
    """The future that a coroutine of the binding awaits: the library's next step."""

    __slots__ = ("_code", "_done", "_woken")

    def __init__(self, woken: SimpleQueue[_Step]) -> None:
        self._woken = woken
        self._code = 0
        self._done = False

    def cancelled(self) -> bool:
        return False

    def set_result(self, code: int) -> None:
        self._code, self._done = code, True
        self._woken.put(self)

    def __await__(self) -> Generator[_Step, None, int]:
        if not self._done:
            yield self
        return self._code


class _Loop:
    """The part of an event loop that the binding asks for."""

    def __init__(self) -> None:
        self.woken: SimpleQueue[_Step] = SimpleQueue()

    def create_future(self) -> _Step:
        return _Step(self.woken)

    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: object) -> None:
        callback(*arguments)


def call(coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Run one of the binding's coroutines to its end on this thread."""
    return call_all([coroutine], timeout_s)[0]


def call_all(coroutines: Sequence[Coroutine[Any, Any, T]], timeout_s: float) -> list[T]:
    """Run several at the same time; the first error ends them all.

    ``timeout_s`` is how long the library may be silent.
    """
    loop = _Loop()
    results: list[Any] = [None] * len(coroutines)
    # By the step that it waits for: a coroutine and its position.
    waiting: dict[_Step, tuple[int, Coroutine[Any, Any, T]]] = {}

    def advance(at: int, coroutine: Coroutine[Any, Any, T]) -> None:
        try:
            waiting[coroutine.send(None)] = at, coroutine
        except StopIteration as end:
            results[at] = end.value

    outer = events._get_running_loop()  # noqa: SLF001 - made for those who write loops
    events._set_running_loop(loop)  # type: ignore[arg-type]  # noqa: SLF001
    try:
        for at, coroutine in enumerate(coroutines):
            advance(at, coroutine)
        while waiting:
            # No coroutine waits for a step that was done before it was awaited.
            woken = waiting.pop(loop.woken.get(timeout=timeout_s), None)
            if woken is not None:
                advance(*woken)
    except Empty:
        raise CallTimeout(f"no answer for {timeout_s:g} s") from None
    finally:
        for coroutine in coroutines:
            coroutine.close()
        events._set_running_loop(outer)  # noqa: SLF001
    return results


# --- batches --------------------------------------------------------------------------------------


class _Bytes(ctypes.Structure):
    _fields_ = (("len", ctypes.c_int32), ("data", ctypes.c_char_p))


class _Filler:
    """Puts rows into a batch by the library's C functions.

    The binding's own methods do the same at four times the cost: most of a commit is this.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(binding._UniffiLib._name)  # noqa: SLF001
        prefix = "uniffi_slatedb_uniffi_fn_"
        buffer, status = binding._UniffiRustBuffer, binding._UniffiRustCallStatus  # noqa: SLF001
        outcome = ctypes.POINTER(status)
        handle = ctypes.c_uint64

        def function(name: str, result: Any, *arguments: Any) -> Any:
            found = library[name]
            found.argtypes, found.restype = (*arguments, outcome), result
            return found

        self._status = status.default
        self._clone = function(f"{prefix}clone_writebatch", handle, handle)
        self._buffer = function("ffi_slatedb_uniffi_rustbuffer_from_bytes", buffer, _Bytes)
        self._put = function(f"{prefix}method_writebatch_put", None, handle, buffer, buffer)
        self._delete = function(f"{prefix}method_writebatch_delete", None, handle, buffer)

    def fill(self, batch: WriteBatch, rows: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Put rows; None for a value deletes."""
        status = self._status()
        outcome = ctypes.byref(status)
        handle, clone, buffer = batch._handle, self._clone, self._buffer  # noqa: SLF001
        for key, value in rows:
            size = len(key)
            key_buffer = buffer(_Bytes(size + 4, size.to_bytes(4, "big") + key), outcome)
            if value is None:
                self._delete(clone(handle, outcome), key_buffer, outcome)
            else:
                size = len(value)
                value_buffer = buffer(_Bytes(size + 4, size.to_bytes(4, "big") + value), outcome)
                self._put(clone(handle, outcome), key_buffer, value_buffer, outcome)
            if status.code:
                raise RuntimeError(f"SlateDB refused a row (code {status.code})")


try:
    FILLER: _Filler | None = _Filler()
except AttributeError:
    # Another version of the binding: its own methods do.
    FILLER = None


def filled(
    rows: Iterable[tuple[bytes, bytes | None]], filler: _Filler | None = FILLER
) -> WriteBatch:
    """Make a batch of rows; None for a value deletes."""
    batch = WriteBatch()
    if filler is not None:
        filler.fill(batch, rows)
        return batch
    for key, value in rows:
        if value is None:
            batch.delete(key)
        else:
            batch.put(key, value)
    return batch
