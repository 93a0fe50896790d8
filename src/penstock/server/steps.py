"""A coroutine that is run from one future to the next, without a task.

A task begins in the next turn of the loop, is registered by a weak reference, and copies a context:
more work than most of a short request's own. A coroutine that is run here begins at once, and must
not ask for the current task, as :func:`asyncio.timeout` does.
"""

from __future__ import annotations

from asyncio import CancelledError
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class Steps(Generic[T]):
    """A coroutine that waits for a future; ``on_end`` gets its result, or the error."""

    __slots__ = ("_cancelled", "_coroutine", "_future", "on_end")

    def __init__(self, coroutine: Coroutine[Any, Any, T], future: Future[Any]) -> None:
        self._coroutine = coroutine
        self._cancelled = False
        self.on_end: Callable[[T | None, BaseException | None], None] = lambda *_: None
        self._wait(future)

    def cancel(self) -> None:
        """Cancel the future that the coroutine waits for; if it is done, raise in its place."""
        if not self._future.cancel():
            self._cancelled = True

    def _wait(self, future: Future[Any]) -> None:
        # As a task does, which tells by it that the coroutine did not yield a future by mistake.
        future._asyncio_future_blocking = False  # noqa: SLF001
        self._future = future
        future.add_done_callback(self._go_on)

    def _go_on(self, _: Future[Any]) -> None:
        try:
            if self._cancelled:
                self._cancelled = False
                future = self._coroutine.throw(CancelledError())
            else:
                future = self._coroutine.send(None)
        except StopIteration as end:
            self.on_end(end.value, None)
        except BaseException as error:
            self.on_end(None, error)
        else:
            self._wait(future)


def begin(coroutine: Coroutine[Any, Any, T]) -> T | Steps[T]:
    """Run a coroutine until it waits for a future; return its result if it need not wait."""
    try:
        future = coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    return Steps(coroutine, future)
