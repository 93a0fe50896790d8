"""Runs a handler inside its middleware, and says what came of it.

``before`` hooks run in the order of the list, ``after`` and ``on_error`` in the reverse of it. A
hook that raises fails the message like a handler that does, except for ``on_error``: there it is
only logged. The same function serves threads and child processes; the other is for asyncio.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.errors import InvalidInput
from penstock.work.verdicts import ACKED, Settled, Verdict, verdict_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.model import Delivery

__all__ = ["Handler", "handle", "handle_async", "is_async", "resolve"]

log = logging.getLogger("penstock.work")

Handler: TypeAlias = Callable[["Delivery"], object]
"""A function of a delivery, or a coroutine function."""


def resolve(handler: Handler | str) -> Handler:
    """Find a handler that is named MODULE:FUNCTION."""
    if not isinstance(handler, str):
        if not callable(handler):
            raise InvalidInput(f"a handler is a function, not {type(handler).__name__}")
        return handler
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


def is_async(handler: Handler) -> bool:
    """Whether a handler is to be awaited."""
    called = getattr(handler, "__call__", None)  # noqa: B004 - an object may define it async
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(called)


def handle(handler: Handler, middleware: Sequence[object], delivery: Delivery) -> Verdict:
    """Run a plain function for one message."""
    try:
        for hook in _hooks(middleware, "before"):
            hook(delivery)
        result = _settled(handler, delivery)
        for hook in _hooks(reversed(middleware), "after"):
            hook(delivery, None if result is Settled else result)
    except BaseException as error:
        for hook in _hooks(reversed(middleware), "on_error"):
            try:
                hook(delivery, error)
            except Exception:
                log.exception("on_error failed")
        return verdict_of(error)
    return verdict_of(Settled()) if result is Settled else ACKED


def _settled(handler: Handler, delivery: Delivery) -> object:
    """Call a handler; what it settled by itself is no error."""
    try:
        return handler(delivery)
    except Settled:
        return Settled


async def handle_async(
    handler: Callable[[Delivery], Awaitable[object]],
    middleware: Sequence[object],
    delivery: Delivery,
) -> Verdict:
    """Run a coroutine function for one message; hooks may be coroutine functions too."""
    result: object
    try:
        for hook in _hooks(middleware, "before"):
            await _maybe(hook(delivery))
        try:
            result = await handler(delivery)
        except Settled:
            result = Settled
        for hook in _hooks(reversed(middleware), "after"):
            await _maybe(hook(delivery, None if result is Settled else result))
    except BaseException as error:
        for hook in _hooks(reversed(middleware), "on_error"):
            try:
                await _maybe(hook(delivery, error))
            except Exception:
                log.exception("on_error failed")
        return verdict_of(error)
    return verdict_of(Settled()) if result is Settled else ACKED


async def _maybe(value: object) -> None:
    if inspect.isawaitable(value):
        await value


def _hooks(middleware: Any, name: str) -> Iterator[Callable[..., object]]:
    for each in middleware:
        hook = getattr(each, name, None)
        if hook is not None:
            yield hook
