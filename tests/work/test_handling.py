"""What handlers and middleware may do wrong without a message being lost or acked for it."""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.work.helping import fill, reasons, wait_until

import penstock
from penstock import Delivery, InvalidInput, Retry, Worker
from penstock.worker.outcome import Action, handle, handle_async, settlement_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from penstock import Broker


@pytest.fixture
def broker() -> Iterator[Broker]:
    with penstock.open("memory:") as made:
        made.create_queue("q", backoff_base_ms=1, backoff_cap_ms=1, max_attempts=50)
        yield made


def delivery() -> Delivery:
    return Delivery(1, "q", b"x", {}, "", 0, 1, 1_000, "receipt", 0)


async def charge(_: Delivery) -> None:
    await asyncio.sleep(0)


def generates(_: Delivery) -> Iterator[int]:
    yield 1


async def generates_async(_: Delivery) -> AsyncIterator[int]:
    yield 1


class Async:
    """Middleware that has to be awaited."""

    async def before(self, delivery: Delivery) -> None: ...


class AsyncAfter:
    async def after(self, delivery: Delivery, result: object) -> None: ...


class Hooks:
    """Middleware of functions."""

    def __init__(self, **hooks: Callable[..., object]) -> None:
        vars(self).update(hooks)


class Broken:
    """Middleware that can't even be asked for a hook."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def __getattr__(self, name: str) -> Any:
        if name == self.hook:
            raise RuntimeError(f"no {name}")
        raise AttributeError(name)


# --- results that nobody runs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (charge, "coroutine"),
        (generates, "generator"),
        (generates_async, "async_generator"),
    ],
)
def test_a_plain_function_that_returns_what_nobody_runs_has_failed(
    handler: Callable[[Delivery], object], kind: str
) -> None:
    errors: list[BaseException] = []
    hooks = Hooks(on_error=lambda _, error: errors.append(error))
    settlement = handle(handler, [hooks], delivery())
    assert (settlement.action, settlement.failed) == (Action.RELEASE, True)
    assert f"returned a {kind}" in settlement.reason
    assert "async def" in settlement.reason
    assert len(errors) == 1


@pytest.mark.parametrize("made", [charge, generates, generates_async])
def test_a_coroutine_that_returns_what_nobody_runs_has_failed(
    made: Callable[[Delivery], object],
) -> None:
    async def handler(given: Delivery) -> object:
        return made(given)

    settlement = asyncio.run(handle_async(handler, [], delivery()))
    assert (settlement.action, settlement.failed) == (Action.RELEASE, True)


@pytest.mark.parametrize("around", [Async(), AsyncAfter()])
def test_an_async_hook_beside_a_plain_function(broker: Broker, around: object) -> None:
    settlement = handle(lambda _: None, [around], delivery())
    assert (settlement.action, settlement.failed) == (Action.RELEASE, True)
    with pytest.raises(InvalidInput, match="is async, and the handler is not"):
        Worker(broker, "q", lambda _: None, middleware=[around])
    Worker(broker, "q", charge, middleware=[around])


def test_a_hook_that_generates_is_refused_on_a_loop_too() -> None:
    settlement = asyncio.run(handle_async(charge, [Hooks(before=generates)], delivery()))
    assert "returned a generator" in settlement.reason


@pytest.mark.parametrize(
    "handler",
    [generates, generates_async, functools.partial(generates), "tests.work.handlers:generates"],
)
def test_a_generator_function_is_no_handler(broker: Broker, handler: Any) -> None:
    with pytest.raises(InvalidInput, match="yield"):
        Worker(broker, "q", handler)


def test_what_only_looks_plain_is_not_acked(broker: Broker) -> None:
    ran: list[int] = []

    def decorated(function: Callable[[Delivery], Any]) -> Callable[[Delivery], Any]:
        def inner(given: Delivery) -> Any:
            return function(given) if given.attempts == 1 else ran.append(given.attempts)

        return inner

    (message_id,) = fill(broker, "q", 1)
    with Worker(broker, "q", decorated(charge), wait_ms=20) as worker:
        wait_until(lambda: worker.stats().processed == 1)
    assert ran == [2]
    assert "returned a coroutine" in reasons(broker, "q", message_id)[0]


# --- errors about errors --------------------------------------------------------------------------


class Unmade(Retry):
    """A kind of Retry that does not call its base."""

    def __init__(self) -> None:
        pass


class Later(Retry):
    def __init__(self, delay_ms: object) -> None:
        self.delay_ms = delay_ms  # type: ignore[assignment]


class Nameless(Exception):
    """An error of which nothing can be said."""

    def __str__(self) -> str:
        raise SystemExit(7)


def test_whatever_is_raised_has_a_verdict() -> None:
    settlement = settlement_of(Unmade())
    assert (settlement.action, settlement.delay_ms, settlement.reason) == (
        Action.RELEASE,
        None,
        "retry",
    )
    assert settlement_of(Later(5)).delay_ms == 5
    for wrong in (Later("soon"), Later(-1), Nameless()):
        settlement = settlement_of(wrong)
        assert (settlement.action, settlement.delay_ms, settlement.failed) == (
            Action.RELEASE,
            None,
            True,
        )
        assert type(wrong).__name__ in settlement.reason


def exits(*_: object) -> None:
    sys.exit(3)


@pytest.mark.parametrize(
    "around", [Hooks(on_error=exits), Broken("on_error"), Broken("before"), Broken("after")]
)
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_middleware_that_raises_what_it_should_not(
    broker: Broker, kind: str, around: object
) -> None:
    """Every message ends: were one to end its thread, those after it would stay where they are."""

    def fails(given: Delivery) -> None:
        if given.payload != b"2":
            raise ValueError("first")

    async def fails_async(given: Delivery) -> None:
        fails(given)

    broker.create_queue("twice", max_attempts=2, backoff_base_ms=1, backoff_cap_ms=1)
    fill(broker, "twice", 3)
    handler = fails if kind == "plain" else fails_async
    with Worker(broker, "twice", handler, middleware=[around], concurrency=1, wait_ms=20) as worker:
        wait_until(lambda: worker.stats().exhausted + worker.stats().processed == 3)


def test_a_task_of_a_handler_that_exits_does_not_end_the_loop(broker: Broker) -> None:
    async def exits_beside() -> None:
        sys.exit(3)

    async def handler(given: Delivery) -> None:
        if given.attempts == 1 and given.payload == b"0":
            await asyncio.create_task(exits_beside())

    ids = fill(broker, "q", 3)
    with Worker(broker, "q", handler, concurrency=1, wait_ms=20) as worker:
        wait_until(lambda: worker.stats().processed == 3)
    assert reasons(broker, "q", ids[0]) == ["SystemExit: 3", ""]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_pool_that_ends_by_itself_ends_the_worker(
    broker: Broker, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(broker, "q", 2)
    handler = (lambda _: None) if kind == "plain" else charge
    worker = Worker(broker, "q", handler, concurrency=1, wait_ms=20)

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("penstock.worker.state.WorkerState.take", broken)
    worker.start()
    with pytest.raises(ZeroDivisionError, match="a defect"):
        wait_until(lambda: worker.join(100))
    # What it held is not left to the end of its lease.
    assert broker.stats("q").in_flight == 0
