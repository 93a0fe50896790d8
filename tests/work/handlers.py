"""Handlers that tests run in child processes and by name."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import Retry

if TYPE_CHECKING:
    from collections.abc import Iterator

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


_LEAKED: list[bytes] = []


def leaks(delivery: Delivery) -> None:
    """Keep 50 MB of memory for each message."""
    _LEAKED.append(bytes([len(_LEAKED) + 1]) * 50_000_000)


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


def line(delivery: Delivery, word: str) -> None:
    """Write to a file that all processes of a test share what a handler does."""
    place = Path(str(delivery.attributes["place"]))
    told = f"{word} {delivery.queue} {delivery.group} {delivery.payload.decode()} {os.getpid()}\n"
    with (place / "lines").open("a") as file:
        file.write(told)


def writes_down(delivery: Delivery) -> None:
    """Write down its beginning and its end; nothing ends before the test says so."""
    line(delivery, "begin")
    while not (Path(str(delivery.attributes["place"])) / "go").exists():
        threading.Event().wait(0.01)
    line(delivery, "end")


async def writes_down_async(delivery: Delivery) -> None:
    line(delivery, "begin")
    while not (Path(str(delivery.attributes["place"])) / "go").exists():
        await asyncio.sleep(0.01)
    line(delivery, "end")


class Noting:
    """Middleware that can be sent to a child: it writes a file for each of its calls."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def before(self, delivery: Delivery) -> None:
        (self.place / f"before-{os.getpid()}").touch()


def generates(delivery: Delivery) -> Iterator[int]:
    yield 1


def leaves_somebody_behind(delivery: Delivery) -> None:
    """Die at the first attempt, and leave a process that has all that this one had open."""
    if delivery.attempts == 1:
        pid = os.fork()
        if pid == 0:
            threading.Event().wait(600)
            os._exit(0)
        (Path(str(delivery.attributes["place"])) / "left-behind").write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)


def ends_what_it_started(delivery: Delivery) -> None:
    """Fail if a program that it starts can't be ended by the usual signals."""
    for name in ("TERM", "INT"):
        code = subprocess.call(["/bin/sh", "-c", f"kill -{name} $$; exit 3"])
        if code != -getattr(signal, f"SIG{name}"):
            raise ValueError(f"SIG{name} did nothing")
