"""What runs in a child process: one handler, one message at a time.

The parent claims, extends and settles; a child gets a delivery through a pipe and answers with a
verdict. It leaves signals to the parent, and ends when the parent does: a handler that nobody
waits for any more must not go on beside the one that gets its message next.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from functools import partial
from multiprocessing import connection, parent_process
from typing import TYPE_CHECKING, Final, cast

from penstock.errors import InvalidInput
from penstock.worker.handling import handle, handle_async, is_async, resolve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from multiprocessing.connection import Connection
    from types import FrameType

    from penstock.model import Delivery
    from penstock.worker.handling import Handler
    from penstock.worker.outcome import Verdict

__all__ = ["READY", "serve"]

READY: Final = "ready"


def serve(pipe: Connection, handler: Handler | str, middleware: Sequence[object]) -> None:
    """Answer deliveries until the pipe ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not SIG_IGN, which programs that a handler starts would inherit.
        signal.signal(number, _leave_to_parent)
    # What a handler starts must not keep the pipe open when this process has died.
    os.set_inheritable(pipe.fileno(), False)  # noqa: FBT003 - no name for it
    threading.Thread(target=_end_with_parent, name="penstock-parent", daemon=True).start()
    try:
        function = resolve(handler)
    except InvalidInput as error:
        pipe.send(str(error))
        return
    with contextlib.ExitStack() as stack:
        run = partial(handle, function, middleware)
        if is_async(function):
            runner = stack.enter_context(asyncio.Runner())
            run = partial(_run_async, runner, function, middleware)
        # An end of the pipe is how a child is told to go.
        with contextlib.suppress(EOFError, OSError):
            pipe.send(READY)
            while True:
                pipe.send(run(pipe.recv()))


def _leave_to_parent(number: int, frame: FrameType | None) -> None:
    """Do nothing about a signal."""


def _run_async(
    runner: asyncio.Runner, handler: Handler, middleware: Sequence[object], delivery: Delivery
) -> Verdict:
    awaited = cast("Callable[[Delivery], Awaitable[object]]", handler)
    return runner.run(handle_async(awaited, middleware, delivery))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
