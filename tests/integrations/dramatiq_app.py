"""Actors whose messages are in Penstock. The tests say where it is."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import dramatiq

from penstock.integrations.dramatiq import PenstockBroker

broker = PenstockBroker(os.environ["ACTORS_URL"], prefix="app-", lease_ms=1_000)
dramatiq.set_broker(broker)


@dramatiq.actor
def note(path: str, text: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{text}\n")


@dramatiq.actor(max_retries=2, min_backoff=1, max_backoff=2)
def fail(path: str) -> None:
    note(path, "tried")
    raise ZeroDivisionError("on purpose")


@dramatiq.actor(max_retries=0, time_limit=100)
def stay() -> None:
    while True:
        threading.Event().wait(0.01)
