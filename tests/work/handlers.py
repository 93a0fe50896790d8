"""Handlers that tests run in child processes and by name."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import Retry

if TYPE_CHECKING:
    from penstock import Delivery

NOT_CALLABLE = 7


def nothing(delivery: Delivery) -> None:
    pass


async def nothing_async(delivery: Delivery) -> None:
    await asyncio.sleep(0)


def mixed(delivery: Delivery) -> None:
    """Fail, ask for another try, or die, at the first attempt; succeed at the second."""
    if delivery.attempts == 1 and delivery.payload == b"fail":
        raise ValueError("not today")
    if delivery.attempts == 1 and delivery.payload == b"retry":
        raise Retry("later", delay_ms=0)
    if delivery.attempts == 1 and delivery.payload == b"die":
        os.kill(os.getpid(), signal.SIGKILL)


def stuck_once(delivery: Delivery) -> None:
    if delivery.attempts == 1:
        threading.Event().wait()


async def stuck_once_async(delivery: Delivery) -> None:
    if delivery.attempts == 1:
        await asyncio.Event().wait()


def dies_often(delivery: Delivery) -> None:
    """Die or fail by the message's id and attempt, so that nothing is left to chance."""
    turn = (delivery.message_id // 7 + delivery.attempts) % 10
    if turn == 0 and parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    if turn in {1, 2}:
        raise ValueError("one of those turns")


def waits_for_file(delivery: Delivery) -> None:
    """Say that it has begun, then wait until the test makes a file."""
    place = Path(str(delivery.attributes["place"]))
    (place / f"began-{delivery.payload.decode()}").touch()
    while not (place / "go").exists():
        threading.Event().wait(0.01)


class Noting:
    """Middleware that can be sent to a child: it writes a file for each of its calls."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def before(self, delivery: Delivery) -> None:
        (self.place / f"before-{os.getpid()}").touch()
