"""SlateDB's binding: the location of a database, the library's errors, calls, and batches.

Endpoint, region and credentials of S3 come from the usual variables of the environment
(``AWS_ENDPOINT_URL``, ``AWS_REGION``, ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
``AWS_SESSION_TOKEN``, ``AWS_ALLOW_HTTP``, roles), which the library reads itself.

The binding offers coroutines that need an event loop for one thing only: to be woken when the
library has got further. :func:`call` is that much of a loop. The library's work happens on the
thread that calls and on the library's own; only the main thread's calls change to another one.
"""

from __future__ import annotations

import ctypes
import re
import threading
from _thread import start_new_thread
from asyncio import events
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn, TypeVar
from urllib.parse import unquote

from slatedb.uniffi import (
    CloseReason,
    Error,
    ObjectStore,
    ObjectStoreBuilder,
    ObjectStoreType,
    WriteBatch,
)
from slatedb.uniffi import slatedb as binding

from penstock.engines import damage_text, enter_library
from penstock.engines.places import BUCKET_NAME, endpoint_of
from penstock.errors import InvalidUrl, StorageFailed, StoreDamaged, StoreFenced
from penstock.waiter import Inbox

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Coroutine,
        Generator,
        Iterable,
        Mapping,
        Sequence,
    )

T = TypeVar("T")

# Words of the library for a location that holds no database yet.
NO_DATABASE: Final = "failed to find latest transactional object"
# SlateDB's own folders: a directory without any of them holds something else.
_FOLDERS: Final = frozenset({"manifest", "wal", "compacted", "compactions", "gc"})


class SlateLocation(NamedTuple):
    """A directory, or a bucket with a prefix."""

    kind: Literal["file", "s3"]
    root: str
    path: str

    def __str__(self) -> str:
        if self.kind == "file":
            return f"slatedb+file://{self.root}"
        return f"slatedb+s3://{self.root}/{self.path}"

    def store(self) -> ObjectStore:
        """Return the library's handle; make the directory if it is not there."""
        enter_library("SlateDB")
        if self.kind == "file":
            try:
                Path(self.root).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageFailed(f"can't make the directory {self.root}: {error}") from error
            builder = ObjectStoreBuilder.from_env(ObjectStoreType.LOCAL)
            builder.with_config("local_path", self.root)
        else:
            builder = ObjectStoreBuilder.from_env(ObjectStoreType.S3)
            builder.with_config("bucket", self.root)
        try:
            return builder.build()
        except Error as error:
            raise InvalidUrl(f"{self}: {_words(error)}") from error

    def holds_something_else(self) -> bool:
        """Whether this is a directory of other files; of a bucket that can't be told."""
        root = Path(self.root)
        if self.kind == "s3" or not root.exists():
            return False
        names = {each.name for each in root.iterdir()} if root.is_dir() else {""}
        return bool(names) and not names & _FOLDERS


def parse_location(scheme: str, rest: str, environment: Mapping[str, str]) -> SlateLocation:
    """Read the part behind the colon of a ``slatedb+file:`` or ``slatedb+s3:`` URL."""
    authority, _, path = rest[2:].partition("/")
    if scheme == "slatedb+file":
        root = "/" + unquote(path).strip("/")
        if not rest.startswith("///") or root == "/" or {".", ".."} & set(root.split("/")):
            named = unquote(rest).lstrip("/")
            hint = f"slatedb+file://{Path(named).resolve()}" if named else "slatedb+file:///DIR"
            raise InvalidUrl(
                f"slatedb+file:{rest:.200} names no absolute directory: {hint:.300} would be one"
            )
        return SlateLocation("file", root, "")
    bucket, prefix = authority, unquote(path).strip("/")
    if not rest.startswith("//") or not re.fullmatch(BUCKET_NAME, bucket):
        raise InvalidUrl(
            f"slatedb+s3://BUCKET/PREFIX needs the name of a bucket, got {bucket!r:.100}"
        )
    if any(part in {"", ".", ".."} for part in prefix.split("/")) and prefix:
        raise InvalidUrl(f"the prefix {prefix!r:.200} has an empty part, or one of dots")
    endpoint_of(environment)
    return SlateLocation("s3", bucket, prefix)


# --- errors ---------------------------------------------------------------------------------------


def _words(error: BaseException) -> str:
    return str(getattr(error, "message", error))


def fence_error(location: SlateLocation) -> StoreFenced:
    """Make the error of a broker whose store another broker has taken over."""
    return StoreFenced(
        f"another broker has opened {location} and owns it now; this one can do no more: close it"
    )


def translate(error: BaseException, location: SlateLocation) -> NoReturn:
    """Raise our error for the library's."""
    if isinstance(error, Error.Closed) and error.reason is CloseReason.FENCED:
        raise fence_error(location) from error
    if isinstance(error, Error.Data):
        raise StoreDamaged(damage_text(f"{location}: {_words(error)}")) from error
    raise StorageFailed(f"{location}: SlateDB failed: {_words(error)}") from error


def translate_open(error: BaseException, location: SlateLocation) -> NoReturn:
    """Raise our error for the library's when it could not open a database."""
    words = _words(error)
    if "NoSuchBucket" in words:
        raise InvalidUrl(f"{location}: there is no bucket {location.root}") from error
    if "403 Forbidden" in words or "401 Unauthorized" in words:
        reason = re.search(r"<Code>(\w+)</Code>", words)
        raise StorageFailed(
            f"{location}: the object store refuses these credentials"
            f" ({reason.group(1) if reason else 'forbidden'}): see AWS_ACCESS_KEY_ID,"
            " AWS_SECRET_ACCESS_KEY and AWS_REGION"
        ) from error
    if isinstance(error, Error.Unavailable):
        raise StorageFailed(f"{location}: the object store does not answer: {words}") from error
    translate(error, location)


# --- calls ----------------------------------------------------------------------------------------


class CallTimeout(Exception):
    """The library has not answered in time."""


class _Step:
    """The future that a coroutine of the binding awaits: the library's next step."""

    __slots__ = ("_code", "_done", "_woken")

    def __init__(self, woken: Inbox[_Step]) -> None:
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
        self.woken: Inbox[_Step] = Inbox()

    def create_future(self) -> _Step:
        return _Step(self.woken)

    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: object) -> None:
        callback(*arguments)


def call(coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Run one of the binding's coroutines to its end."""
    return call_all([coroutine], timeout_s)[0]


def call_all(coroutines: Sequence[Coroutine[Any, Any, T]], timeout_s: float) -> list[T]:
    """Run several at the same time; the first error ends them all.

    ``timeout_s`` is how long the library may be silent. Those of the main thread are run by another
    one: a signal handler that raises in the binding's own code would make it free memory twice.
    Such an exception comes out here, and the calls go on.
    """
    if threading.current_thread() is not threading.main_thread():
        return _run_all(coroutines, timeout_s)
    enter_library("SlateDB")
    answer: SimpleQueue[tuple[list[T], BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            answer.put((_run_all(coroutines, timeout_s), None))
        except BaseException as error:
            answer.put(([], error))

    with _beginning:
        if not _callers:
            _callers.append(start_new_thread(_run_calls, ()))
    _calls.put(run)
    results, error = answer.get()
    if error is not None:
        raise error
    return results


# The calls of the main thread, in order, and the thread that makes them.
_calls: Final[SimpleQueue[Callable[[], None]]] = SimpleQueue()
_callers: Final[list[int]] = []
_beginning: Final = threading.Lock()


def _run_calls() -> None:
    while True:
        _calls.get()()


def _run_all(coroutines: Sequence[Coroutine[Any, Any, T]], timeout_s: float) -> list[T]:
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
    try:
        events._set_running_loop(loop)  # type: ignore[arg-type]  # noqa: SLF001
        for at, coroutine in enumerate(coroutines):
            advance(at, coroutine)
        while waiting:
            # No coroutine waits for a step that was done before it was awaited.
            woken = waiting.pop(loop.woken.take(timeout_s), None)
            if woken is not None:
                advance(*woken)
    except Empty:
        raise CallTimeout(f"no answer for {timeout_s:g} s") from None
    finally:
        try:
            for coroutine in coroutines:
                coroutine.close()
        finally:
            events._set_running_loop(outer)  # noqa: SLF001
    return results


# --- batches --------------------------------------------------------------------------------------


class _Bytes(ctypes.Structure):
    _fields_ = (("len", ctypes.c_int32), ("data", ctypes.c_char_p))


_LIBRARY: Final = ctypes.CDLL(binding._UniffiLib._name)  # noqa: SLF001
_Buffer: Final = binding._UniffiRustBuffer  # noqa: SLF001
_Status: Final = binding._UniffiRustCallStatus  # noqa: SLF001


def _function(name: str, result: Any, *arguments: Any) -> Any:
    found = _LIBRARY[name]
    found.argtypes, found.restype = (*arguments, ctypes.POINTER(_Status)), result
    return found


_METHOD: Final = "uniffi_slatedb_uniffi_fn_method_writebatch"
_HANDLE: Final = ctypes.c_uint64
_clone: Final = _function("uniffi_slatedb_uniffi_fn_clone_writebatch", _HANDLE, _HANDLE)
_buffer: Final = _function("ffi_slatedb_uniffi_rustbuffer_from_bytes", _Buffer, _Bytes)
_put: Final = _function(f"{_METHOD}_put", None, _HANDLE, _Buffer, _Buffer)
_delete: Final = _function(f"{_METHOD}_delete", None, _HANDLE, _Buffer)


def make_batch(rows: Iterable[tuple[bytes, bytes | None]]) -> WriteBatch:
    """Make a batch of rows; None for a value deletes.

    By the library's C functions: the binding's own methods do the same at ten times the cost, and
    most of a commit is this.
    """
    batch = WriteBatch()
    handle = batch._handle  # noqa: SLF001
    status = _Status.default()
    outcome = ctypes.byref(status)
    for key, value in rows:
        size = len(key)
        key_buffer = _buffer(_Bytes(size + 4, size.to_bytes(4, "big") + key), outcome)
        if value is None:
            _delete(_clone(handle, outcome), key_buffer, outcome)
        else:
            size = len(value)
            value_buffer = _buffer(_Bytes(size + 4, size.to_bytes(4, "big") + value), outcome)
            _put(_clone(handle, outcome), key_buffer, value_buffer, outcome)
        if status.code:
            raise RuntimeError(f"SlateDB refused a row (code {status.code})")
    return batch
