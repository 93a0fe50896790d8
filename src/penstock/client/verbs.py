"""The verbs as methods: declared once, for the client that waits and the one that awaits.

A :class:`Verb` is a descriptor around a function of :mod:`penstock.client.calls`. On a
:class:`Waiting` shell it is a method that returns the result, on an :class:`Awaiting` one a method
that returns a coroutine of it, with the same parameters either way; type checkers see both.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from penstock.client import calls

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from penstock.client.calls import Call, Plan

__all__ = ["Awaiting", "Verb", "Verbs", "Waiting"]

P = ParamSpec("P")
R = TypeVar("R")


class Waiting:
    """A shell whose verbs return when the answer is there."""

    def _run(self, verb: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


class Awaiting:
    """A shell whose verbs are awaited."""

    def _run(self, verb: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


class Verb(Generic[P, R]):
    """A verb, bound to whichever shell it is taken from."""

    def __init__(self, verb: Callable[P, Call[R]] | Callable[P, Plan[R]]) -> None:
        self.__wrapped__ = verb
        self.__doc__ = verb.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.__name__ = name

    @overload
    def __get__(self, shell: None, owner: type) -> Verb[P, R]: ...
    @overload
    def __get__(self, shell: Waiting, owner: type) -> Callable[P, R]: ...
    @overload
    def __get__(self, shell: Awaiting, owner: type) -> Callable[P, Coroutine[Any, Any, R]]: ...
    def __get__(self, shell: Waiting | Awaiting | None, owner: type) -> Any:
        if shell is None:
            return self
        return partial(shell._run, self.__wrapped__)  # noqa: SLF001 - the seam of the two shells

    def __call__(self, shell: Waiting | Awaiting, /, *args: P.args, **options: P.kwargs) -> Any:
        """Run the verb on a shell, as an unbound method would."""
        return shell._run(self.__wrapped__, *args, **options)  # noqa: SLF001


class Verbs:
    """The verbs of :class:`penstock.Broker` that a server can be asked for."""

    publish = Verb(calls.publish)
    send = Verb(calls.send)
    claim = Verb(calls.claim)
    ack = Verb(calls.ack)
    release = Verb(calls.release)
    extend = Verb(calls.extend)
    browse = Verb(calls.browse)
    attempts = Verb(calls.attempts)
    stats = Verb(calls.stats)
    store_stats = Verb(calls.store_stats)
    redrive = Verb(calls.redrive)
    purge = Verb(calls.purge)
    move = Verb(calls.move)
    create_queue = Verb(calls.create_queue)
    update_queue = Verb(calls.update_queue)
    delete_queue = Verb(calls.delete_queue)
    queues = Verb(calls.queues)
    queue = Verb(calls.queue)
    read_log = Verb(calls.read_log)
    assign = Verb(calls.assign)
    take_epoch = Verb(calls.take_epoch)
    backfill = Verb(calls.backfill)
    configure_log = Verb(calls.configure_log)
    log_stats = Verb(calls.log_stats)
    info = Verb(calls.info)
    ping = Verb(calls.ping)
