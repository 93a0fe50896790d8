"""Runs a handler inside its middleware, and says what came of it.

``before`` hooks run in the order of the list, ``after`` and ``on_error`` in the reverse of it. A
hook that raises fails the message like a handler that does, except for ``on_error``: there it is
only logged. The same function serves threads and child processes; the other is for asyncio.
A result that has yet to be run, such as a coroutine that nobody awaits, is a failure: an ack would
say that it had run.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.errors import InvalidInput
from penstock.worker.outcome import ACKED, Settled, Verdict, verdict_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.model import Delivery

__all__ = ["Handler", "check_middleware", "handle", "handle_async", "is_async", "resolve"]

log = logging.getLogger("penstock.worker")

Handler: TypeAlias = Callable[["Delivery"], object]
"""A function of a delivery, or a coroutine function."""


def resolve(handler: Handler | str) -> Handler:
    """Find a handler that is named MODULE:FUNCTION, and check that it can be one."""
    if isinstance(handler, str):
        found = _named(handler)
    elif callable(handler):
        found = handler
    else:
        raise InvalidInput(f"a handler is a function, not {type(handler).__name__}")
    called = getattr(found, "__call__", None)  # noqa: B004 - an object may define it so
    for each in (found, called):
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise InvalidInput("a function with yield is no handler: nobody would run it")
    return found


def _named(handler: str) -> Handler:
    module_name, colon, path = handler.partition(":")
    if not (module_name and colon and path):
        raise InvalidInput(f"{handler!r:.200} does not name a handler: MODULE:FUNCTION")
    found: Any = _module(module_name)
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            raise InvalidInput(f"module {module_name!r} has no {path!r:.200}")
    if not callable(found):
        raise InvalidInput(f"{handler!r:.200} is no function, but {type(found).__name__}")
    named: Handler = found
    return named


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise InvalidInput(f"there is no module {error.name!r:.200}") from None
        raise InvalidInput(_unfit(name, error)) from error
    except Exception as error:
        raise InvalidInput(_unfit(name, error)) from error


def _unfit(name: str, error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {error}"
    return f"module {name!r:.200} can't be imported: {text} ({last.filename}, line {last.lineno})"


def is_async(handler: Callable[..., object] | None) -> bool:
    """Whether a handler or a hook is to be awaited."""
    called = getattr(handler, "__call__", None)  # noqa: B004 - an object may define it async
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(called)


def check_middleware(handler: Handler, middleware: Sequence[object]) -> None:
    """Refuse hooks that would have to be awaited where nobody awaits."""
    if is_async(handler):
        return
    for each in middleware:
        for name in ("before", "after", "on_error"):
            hook = None
            # One that can't be had fails its message, as if it had raised.
            with contextlib.suppress(Exception):
                hook = getattr(each, name, None)
            if is_async(hook):
                raise InvalidInput(
                    f"{name} of {type(each).__name__} is async, and the handler is not"
                )


def handle(handler: Handler, middleware: Sequence[object], delivery: Delivery) -> Verdict:
    """Run a plain function for one message."""
    try:
        for hook in _hooks(middleware, "before"):
            _done(hook(delivery), "before")
        result = _settled(handler, delivery)
        for hook in _hooks(reversed(middleware), "after"):
            _done(hook(delivery, None if result is Settled else result), "after")
    except BaseException as error:
        for each in reversed(middleware):
            try:
                for hook in _hooks([each], "on_error"):
                    _done(hook(delivery, error), "on_error")
            except BaseException:
                log.exception("on_error failed")
        return verdict_of(error)
    return verdict_of(Settled()) if result is Settled else ACKED


def _settled(handler: Handler, delivery: Delivery) -> object:
    """Call a handler; what it settled by itself is no error."""
    try:
        return _done(handler(delivery), "the handler")
    except Settled:
        return Settled


def _done(result: object, who: str) -> object:
    """Return a result, unless it is something that has yet to be run."""
    if inspect.isasyncgen(result):
        # It has not begun, and so there is nothing to close.
        pass
    elif inspect.isawaitable(result) or inspect.isgenerator(result):
        close = getattr(result, "close", None)
        if close is not None:
            close()
    else:
        return result
    kind = type(result).__name__
    raise TypeError(f"{who} returned a {kind}, which nobody runs: make it async def, or run it")


async def handle_async(
    handler: Callable[[Delivery], Awaitable[object]],
    middleware: Sequence[object],
    delivery: Delivery,
) -> Verdict:
    """Run a coroutine function for one message; hooks may be coroutine functions too."""
    result: object
    try:
        for hook in _hooks(middleware, "before"):
            await _maybe(hook(delivery), "before")
        try:
            result = _done(await handler(delivery), "the handler")
        except Settled:
            result = Settled
        for hook in _hooks(reversed(middleware), "after"):
            await _maybe(hook(delivery, None if result is Settled else result), "after")
    except BaseException as error:
        for each in reversed(middleware):
            try:
                for hook in _hooks([each], "on_error"):
                    await _maybe(hook(delivery, error), "on_error")
            except asyncio.CancelledError:
                raise
            except BaseException:
                log.exception("on_error failed")
        return verdict_of(error)
    return verdict_of(Settled()) if result is Settled else ACKED


async def _maybe(value: object, who: str) -> None:
    _done(await value if inspect.isawaitable(value) else value, who)


def _hooks(middleware: Any, name: str) -> Iterator[Callable[..., object]]:
    for each in middleware:
        hook = getattr(each, name, None)
        if hook is not None:
            yield hook
