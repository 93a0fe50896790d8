"""The tasks of the site."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

from django.db import connection

try:
    from django.tasks import TaskContext, task
except ModuleNotFoundError:
    from django_tasks import TaskContext, task


@task
def add(first: int, second: int) -> int:
    return first + second


@task(queue_name="mail", priority=10)
def greet(name: str, **more: Any) -> dict[str, Any]:
    return {"hello": name, **more}


@task
async def sleepily() -> str:
    await asyncio.sleep(0.001)
    return "awake"


@task
def fail(path: str) -> None:
    note(path)
    raise ZeroDivisionError("on purpose")


@task(takes_context=True)
def attempt(context: TaskContext, path: str, wait: int) -> list[Any]:
    """Note the attempt; the first ``wait`` attempts go on until the process is killed."""
    note(path)
    if context.attempt <= wait:
        threading.Event().wait(60)
    return [context.attempt, len(set(context.task_result.worker_ids))]


@task
def finish_when_told(begun: str, told: str) -> str:
    note(begun)
    while not Path(told).exists():
        threading.Event().wait(0.01)
    return "finished"


@task
def die() -> None:
    os._exit(9)


@task
def connect() -> int:
    """Leave a connection to the database open, and unusable."""
    connection.ensure_connection()
    connection.errors_occurred = True
    connection.connection.close()
    return os.getpid()


def note(path: str) -> None:
    with Path(path).open("a") as file:
        file.write("begun\n")
