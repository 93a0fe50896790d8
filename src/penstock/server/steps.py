"""A coroutine that is run from one future to the next, without a task.

A task begins in the next turn of the loop, is registered by a weak reference, and copies a context:
more work than most of a short request's own. A coroutine that is run here begins at once, and must
not ask for the current task, as :func:`asyncio.timeout` does.
"""

from __future__ import annotations

from asyncio import CancelledError, get_running_loop
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class Steps(Generic[T]):
    """A coroutine that waits for a future; ``on_end`` gets its result, or the error."""

    __slots__ = ("_coroutine", "_error", "_future", "on_end")

    def __init__(self, coroutine: Coroutine[Any, Any, T], waited_for: Any) -> None:
        """``waited_for``: what the coroutine waits for first."""
        self._coroutine = coroutine
        # Raised in the coroutine by its next step.
        self._error: BaseException | None = None
        self.on_end: Callable[[T | None, BaseException | None], None] = lambda *_: None
        self._wait(waited_for)

    def cancel(self) -> None:
        """Cancel the future that the coroutine waits for; if it is done, raise in its place."""
        if not self._future.cancel():
            self._error = CancelledError()

    def _wait(self, waited_for: Any) -> None:
        # A future says so once, as it does to a task.
        if getattr(waited_for, "_asyncio_future_blocking", False):
            waited_for._asyncio_future_blocking = False  # noqa: SLF001
        else:
            if waited_for is not None:
                text = f"a coroutine waits for {waited_for!r:.100}, which is no future"
                self._error = RuntimeError(text)
            # For nothing: asyncio.sleep(0) lets others go first.
            waited_for = get_running_loop().create_future()
            waited_for.set_result(None)
        self._future: Future[Any] = waited_for
        waited_for.add_done_callback(self._go_on)

    def _go_on(self, _: Future[Any]) -> None:
        try:
            if self._error is not None:
                error, self._error = self._error, None
                waited_for = self._coroutine.throw(error)
            else:
                waited_for = self._coroutine.send(None)
        except StopIteration as end:
            self.on_end(end.value, None)
        except BaseException as error:
            self.on_end(None, error)
        else:
            self._wait(waited_for)


def begin(coroutine: Coroutine[Any, Any, T]) -> T | Steps[T]:
    """Run a coroutine until it waits for a future; return its result if it need not wait."""
    try:
        waited_for = coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    return Steps(coroutine, waited_for)
