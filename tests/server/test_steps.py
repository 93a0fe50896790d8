"""Coroutines that are run without a task: results, errors and cancellation."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, ParamSpec

import pytest

from penstock.server.http import Steps, begin

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def begun(coroutine: Coroutine[Any, Any, Any]) -> tuple[Steps[Any], asyncio.Future[Any]]:
    """Begin a coroutine that waits; return a future that has its end."""
    steps = begin(coroutine)
    assert isinstance(steps, Steps)
    ended = asyncio.get_running_loop().create_future()
    steps.on_end = lambda result, error: ended.set_result((result, error))
    return steps, ended


async def sum_of(*futures: asyncio.Future[int]) -> int:
    return sum([await future for future in futures])


@in_loop
async def test_a_coroutine_that_waits_for_nothing_is_done_at_once() -> None:
    assert begin(sum_of()) == 0


@in_loop
async def test_an_error_before_the_first_wait_is_raised() -> None:
    async def fail() -> None:
        raise LookupError("x")

    with pytest.raises(LookupError):
        begin(fail())


@in_loop
async def test_a_coroutine_goes_on_with_each_future() -> None:
    futures = [asyncio.get_running_loop().create_future() for _ in range(3)]
    _, ended = begun(sum_of(*futures))
    for number, future in enumerate(futures):
        assert not ended.done()
        future.set_result(number)
        await asyncio.sleep(0)
    assert await ended == (3, None)


@in_loop
async def test_the_error_of_a_future_is_that_of_the_coroutine() -> None:
    future = asyncio.get_running_loop().create_future()
    _, ended = begun(sum_of(future))
    future.set_exception(LookupError("x"))
    result, error = await ended
    assert result is None
    assert isinstance(error, LookupError)


@pytest.mark.parametrize("done", [False, True])
@in_loop
async def test_cancelling_reaches_the_coroutine_also_in_the_turn_of_its_future(done: bool) -> None:
    future = asyncio.get_running_loop().create_future()
    steps, ended = begun(sum_of(future))
    if done:
        future.set_result(1)
    steps.cancel()
    assert future.cancelled() is not done
    result, error = await ended
    assert result is None
    assert isinstance(error, asyncio.CancelledError)


@in_loop
async def test_a_coroutine_may_wait_again_while_it_is_cancelled() -> None:
    loop = asyncio.get_running_loop()
    first: asyncio.Future[str] = loop.create_future()
    last: asyncio.Future[str] = loop.create_future()

    async def clean_up() -> str:
        try:
            return await first
        except asyncio.CancelledError:
            return await last

    steps, ended = begun(clean_up())
    steps.cancel()
    await asyncio.sleep(0)
    last.set_result("cleaned")
    assert await ended == ("cleaned", None)


@in_loop
async def test_a_coroutine_may_let_others_go_first() -> None:
    async def pause() -> str:
        await asyncio.sleep(0)
        return "gone on"

    _, ended = begun(pause())
    assert not ended.done()
    assert await ended == ("gone on", None)


@pytest.mark.parametrize("later", [False, True])
@in_loop
async def test_a_coroutine_that_waits_for_no_future_fails(later: bool) -> None:
    class Wrong:
        def __await__(self) -> Any:
            yield 5

    async def wait() -> None:
        if later:
            await asyncio.sleep(0)
        await Wrong()

    _, ended = begun(wait())
    result, error = await ended
    assert result is None
    assert isinstance(error, RuntimeError)
    assert "waits for 5, which is no future" in str(error)
