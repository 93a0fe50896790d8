"""Calling SlateDB's asynchronous binding from threads, and filling its batches in bulk.

The binding offers coroutines that want an event loop for one thing only: to be told when the
library has got further. :func:`call` is that much of a loop. The library's work happens on the
caller's thread and on the library's own; nothing is handed to another Python thread, which would
cost more than most calls do.
"""

from __future__ import annotations

import ctypes
import threading
from asyncio import events
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar

from slatedb.uniffi import WriteBatch
from slatedb.uniffi import slatedb as binding

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence

__all__ = ["CallTimeout", "call", "call_all", "filled"]

T = TypeVar("T")


class CallTimeout(Exception):
    """The library has not answered in time."""


class _Step:
    """What a coroutine waits for: the library's word that it has got further."""

    __slots__ = ("_code", "_done", "_lock", "_woken", "coroutine")

    def __init__(self, woken: SimpleQueue[_Step]) -> None:
        self._woken = woken
        self._code = 0
        self._done = False
        self._lock = threading.Lock()
        self.coroutine: Coroutine[Any, Any, Any] | None = None

    def cancelled(self) -> bool:
        return False

    def set_result(self, code: int) -> None:
        with self._lock:
            self._code, self._done = code, True
            parked = self.coroutine is not None
        if parked:
            self._woken.put(self)

    def park(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Have the coroutine gone on with when the word comes, or now if it has come."""
        with self._lock:
            self.coroutine = coroutine
            done = self._done
        if done:
            self._woken.put(self)

    def __await__(self) -> Generator[_Step, None, int]:
        if not self._done:
            yield self
        return self._code


class _Loop:
    """As much of an event loop as the binding asks for."""

    def __init__(self) -> None:
        self.woken: SimpleQueue[_Step] = SimpleQueue()

    def create_future(self) -> _Step:
        return _Step(self.woken)

    def call_soon_threadsafe(self, told: Callable[..., object], *arguments: object) -> None:
        told(*arguments)


def call(coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Run one of the binding's coroutines to its end on this thread."""
    return call_all([coroutine], timeout_s)[0]


def call_all(coroutines: Sequence[Coroutine[Any, Any, T]], timeout_s: float) -> list[T]:
    """Run several at the same time; the first error ends them all.

    ``timeout_s`` is how long the library may be silent.
    """
    loop = _Loop()
    results: list[Any] = [None] * len(coroutines)
    places = {id(coroutine): at for at, coroutine in enumerate(coroutines)}
    outer = events._get_running_loop()  # noqa: SLF001 - made for those who write loops
    events._set_running_loop(loop)  # type: ignore[arg-type]  # noqa: SLF001
    try:
        left = 0
        for at, coroutine in enumerate(coroutines):
            left += _go_on(coroutine, results, at)
        while left:
            coroutine_ = loop.woken.get(timeout=timeout_s).coroutine
            assert coroutine_ is not None
            left -= not _go_on(coroutine_, results, places[id(coroutine_)])
    except Empty:
        raise CallTimeout(f"no answer for {timeout_s:g} s") from None
    finally:
        for coroutine in coroutines:
            coroutine.close()
        events._set_running_loop(outer)  # noqa: SLF001
    return results


def _go_on(coroutine: Coroutine[Any, Any, Any], results: list[Any], at: int) -> bool:
    """Go on with a coroutine; whether it has to wait again."""
    try:
        step: _Step = coroutine.send(None)
    except StopIteration as end:
        results[at] = end.value
        return False
    step.park(coroutine)
    return True


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
        told = ctypes.POINTER(status)
        self._status = status.default
        self._clone = library[prefix + "clone_writebatch"]
        self._clone.argtypes, self._clone.restype = (ctypes.c_uint64, told), ctypes.c_uint64
        self._buffer = library["ffi_slatedb_uniffi_rustbuffer_from_bytes"]
        self._buffer.argtypes, self._buffer.restype = (_Bytes, told), buffer
        self._put = library[prefix + "method_writebatch_put"]
        self._put.argtypes = (ctypes.c_uint64, buffer, buffer, told)
        self._put.restype = None
        self._delete = library[prefix + "method_writebatch_delete"]
        self._delete.argtypes, self._delete.restype = (ctypes.c_uint64, buffer, told), None

    def fill(self, batch: WriteBatch, rows: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Put rows; None for a value deletes."""
        status = self._status()
        told = ctypes.byref(status)
        handle, clone, buffer = batch._handle, self._clone, self._buffer  # noqa: SLF001
        for key, value in rows:
            size = len(key)
            key_buffer = buffer(_Bytes(size + 4, size.to_bytes(4, "big") + key), told)
            if value is None:
                self._delete(clone(handle, told), key_buffer, told)
            else:
                size = len(value)
                value_buffer = buffer(_Bytes(size + 4, size.to_bytes(4, "big") + value), told)
                self._put(clone(handle, told), key_buffer, value_buffer, told)
            if status.code:
                raise RuntimeError(f"SlateDB refused a row (code {status.code})")


def _make_filler() -> _Filler | None:
    try:
        return _Filler()
    except AttributeError:
        # Another version of the binding: its own methods do.
        return None


FILLER: Final = _make_filler()


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
