"""Runs a handler inside its middleware and decides how its message is settled. No thread, no store.

::

    the handler                     the message
    returns                         is acked
    raises Retry(delay_ms=...)      is released, and tried again after that delay
    raises Settled                  is left alone: the handler has settled it by itself
    raises anything else            is released, and tried again after the queue's back-off

The store decides whether a released message is out of attempts and fails. ``before`` hooks run in
the order of the list, ``after`` and ``on_error`` in reverse. A hook that raises fails the message
like a handler that does, except for ``on_error``: its errors are only logged. A coroutine or a
generator as the result is a failure: nobody would run it, and an ack would say that it had run.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
import traceback
from collections.abc import Callable
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgspec

from penstock import limits
from penstock.errors import InvalidInput
from penstock.validation import check_count, check_optional, cut_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.model import Delivery

log = logging.getLogger("penstock.worker")

Handler: TypeAlias = Callable[["Delivery"], object]
"""A function of a delivery, or a coroutine function."""


class Retry(Exception):
    """Raise it in a handler to have its message tried again.

    ``delay_ms`` takes the place of the queue's back-off; ``reason`` is kept in the history.
    """

    # For subclasses that do not call this class's constructor.
    reason: str = ""
    delay_ms: int | None = None

    def __init__(self, reason: str = "", *, delay_ms: int | None = None) -> None:
        """Check the delay here: the store would refuse the same ones later."""
        super().__init__(reason)
        self.reason = reason
        self.delay_ms = None if delay_ms is None else check_count(delay_ms, "delay_ms")


class Settled(Exception):
    """Raise it in a handler that has acked or released its message by itself."""


class Action(StrEnum):
    """The ways to settle a message."""

    ACK = "ack"
    RELEASE = "release"
    GIVE_BACK = "give_back"
    """Release, as if it had not been claimed: no handler has seen it."""
    LEAVE = "leave"


class Settlement(msgspec.Struct, frozen=True, gc=False):
    """How to settle a message, and what the log says about it.

    ``failed``: the handler did not succeed. ``place`` is where it raised, ``trace`` its traceback.
    """

    action: Action
    delay_ms: int | None = None
    reason: str = ""
    failed: bool = False
    place: str = ""
    trace: str = ""


ACK: Final = Settlement(Action.ACK)
LEAVE: Final = Settlement(Action.LEAVE)
CUT_OFF: Final = Settlement(Action.RELEASE, reason="cut off: the worker was stopped", failed=True)


def over_limit(time_limit_ms: int) -> Settlement:
    """Release the message of a handler that took longer than its time limit."""
    reason = f"over the time limit of {time_limit_ms} ms"
    return Settlement(Action.RELEASE, reason=reason, failed=True)


def settlement_of(error: BaseException) -> Settlement:
    """Settle a message by the error that its handler raised."""
    if isinstance(error, Settled):
        return LEAVE
    place = trace = ""
    delay_ms = None
    try:
        if isinstance(error, Retry):
            place, reason, delay_ms = "Retry", error.reason or "retry", error.delay_ms
            check_optional(delay_ms, "delay_ms")
        else:
            reason = "".join(traceback.format_exception_only(error)).strip()
            if frames := traceback.extract_tb(error.__traceback__):
                place = f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}"
            trace = "".join(traceback.format_exception(error))
        reason = cut_text(reason, limits.MAX_REASON_BYTES)
    except BaseException as failure:
        # An error whose own text can't be made still needs an answer.
        reason = f"{type(error).__name__}, which can't be read: {type(failure).__name__}"
        return Settlement(Action.RELEASE, reason=reason[:200], failed=True)
    return Settlement(Action.RELEASE, delay_ms, reason, failed=True, place=place, trace=trace)


# --- finding a handler ----------------------------------------------------------------------------


def resolve(handler: Handler | str) -> Handler:
    """Find a handler that is named MODULE:FUNCTION, and check that it can be one."""
    found: Any = _import(handler) if isinstance(handler, str) else handler
    if not callable(found):
        said = "a handler is a function, not"
        if isinstance(handler, str):
            said = f"{handler!r:.200} is no function, but"
        raise InvalidInput(f"{said} {type(found).__name__}")
    for each in (found, getattr(found, "__call__", None)):  # noqa: B004 - an object may define it so
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise InvalidInput("a function with yield is no handler: nobody would run it")
    return cast("Handler", found)


def _import(handler: str) -> Any:
    module_name, _, path = handler.partition(":")
    if not (module_name and path):
        raise InvalidInput(f"{handler!r:.200} does not name a handler: MODULE:FUNCTION")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise InvalidInput(
                f"there is no module {missing!r:.200} where Python looks: run in its directory, "
                "or set PYTHONPATH"
            ) from None
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise InvalidInput(
            f"module {module_name!r:.200} can't be imported: {type(error).__name__}: {error} "
            f"({last.filename}, line {last.lineno})"
        ) from error
    try:
        return attrgetter(path)(module)
    except AttributeError:
        raise InvalidInput(f"module {module_name!r} has no {path!r:.200}") from None


def is_async(handler: Callable[..., object] | None) -> bool:
    """Whether a handler or a hook is to be awaited."""
    called = getattr(handler, "__call__", None)  # noqa: B004 - an object may define it async
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(called)


def check_middleware(handler: Handler, middleware: Sequence[object]) -> None:
    """Refuse async hooks around a plain handler: nobody would await them."""
    if is_async(handler):
        return
    for each in middleware:
        for name in ("before", "after", "on_error"):
            hook = None
            # A hook that can't be read fails its message, as if it had raised.
            with contextlib.suppress(Exception):
                hook = getattr(each, name, None)
            if is_async(hook):
                raise InvalidInput(
                    f"{name} of {type(each).__name__} is async, and the handler is not"
                )


# --- running a handler ----------------------------------------------------------------------------


def handle(handler: Handler, middleware: Sequence[object], delivery: Delivery) -> Settlement:
    """Run a plain function for one message."""
    # The coroutine awaits nothing that could suspend it: it ends at its first step, with no loop.
    try:
        handle_async(handler, middleware, delivery, awaits=False).send(None)
    except StopIteration as end:
        settlement: Settlement = end.value
        return settlement
    raise AssertionError("a plain handler was suspended")


async def handle_async(
    handler: Handler, middleware: Sequence[object], delivery: Delivery, *, awaits: bool = True
) -> Settlement:
    """Run a coroutine function for one message; hooks may be coroutine functions too."""
    result: object = None
    settlement = ACK
    try:
        for hook in _hooks(middleware, "before"):
            await _finished(hook(delivery), "before", awaits=awaits)
        try:
            result = handler(delivery)
            if result is not None:
                result = await _finished(result, "the handler", awaits=awaits)
        except Settled:
            settlement = LEAVE
        for hook in _hooks(reversed(middleware), "after"):
            await _finished(hook(delivery, result), "after", awaits=awaits)
    except BaseException as error:
        for each in reversed(middleware):
            try:
                for hook in _hooks([each], "on_error"):
                    await _finished(hook(delivery, error), "on_error", awaits=awaits)
            except BaseException as failure:
                if awaits and isinstance(failure, asyncio.CancelledError):
                    raise
                log.exception("on_error failed")
        return settlement_of(error)
    return settlement


async def _finished(result: object, who: str, *, awaits: bool) -> object:
    """Return a result; refuse a coroutine or a generator, which has yet to be run."""
    if awaits and inspect.isawaitable(result):
        result = await result
    if inspect.isawaitable(result) or inspect.isgenerator(result):
        close = getattr(result, "close", None)
        if close is not None:
            close()
    elif not inspect.isasyncgen(result):  # one that has not begun has nothing to close
        return result
    kind = type(result).__name__
    raise TypeError(f"{who} returned a {kind}, which nobody runs: make it async def, or run it")


def _hooks(middleware: Any, name: str) -> Iterator[Callable[..., object]]:
    for each in middleware:
        hook = getattr(each, name, None)
        if hook is not None:
            yield hook
