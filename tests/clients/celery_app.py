"""A Celery application whose broker is the server under test; workers of it are processes.

What the tasks did is told by lines in files of ``TASKS_PLACE``: each line is one whole run.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from celery import Celery

if TYPE_CHECKING:
    from collections.abc import Callable

PLACE = Path(os.environ["TASKS_PLACE"])
PREFIX = os.environ["TASKS_PREFIX"]
_KEY = quote(os.environ["AWS_ACCESS_KEY_ID"], safe="")
_SECRET = quote(os.environ["AWS_SECRET_ACCESS_KEY"], safe="")
_HOST = os.environ["TASKS_SERVER"]

app = Celery("tasks", broker=f"sqs://{_KEY}:{_SECRET}@{_HOST}//", backend=f"file://{PLACE}/results")
app.conf.update(
    broker_transport_options={
        "region": "us-east-1",
        "is_secure": False,
        "queue_name_prefix": PREFIX,
        "visibility_timeout": int(os.environ.get("TASKS_VISIBILITY_S", "60")),
        "polling_interval": 0.1,
        "wait_time_seconds": 2,
    },
    broker_connection_retry_on_startup=True,
    task_default_queue="tasks",
    worker_prefetch_multiplier=int(os.environ.get("TASKS_PREFETCH", "4")),
    worker_enable_remote_control=False,
    worker_send_task_events=False,
)


def task(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a task of the application."""
    return cast("Callable[[Callable[..., Any]], Callable[..., Any]]", app.task(**options))


def note(name: str, text: str) -> None:
    """Add a line to a file, whole, whoever else does the same."""
    with (PLACE / name).open("a") as file:
        file.write(f"{text}\n")


@task()
def add(left: int, right: int) -> int:
    """Return a sum."""
    return left + right


@task()
def describe(what: str, *, details: dict[str, Any]) -> list[Any]:
    """Return what came."""
    return [what, details]


@task(bind=True, max_retries=5)
def stubborn(self: Any, name: str, failures: int) -> int:
    """Fail a few times, then return at which retry it went well."""
    retries: int = self.request.retries
    note(name, str(retries))
    if retries < failures:
        raise self.retry(countdown=1, exc=RuntimeError("not yet"))
    return retries


@task()
def when() -> float:
    """Return the time of the run."""
    return time.time()  # noqa: TID251 - compared with the time of another process


@task()
def broken() -> None:
    """Fail."""
    raise ValueError("broken on purpose")


@task(acks_late=True, reject_on_worker_lost=True)
def slow(number: int, seconds: float) -> int:
    """Note that it began, take its time, and note that it is done."""
    note("began", f"{number} {os.getpid()}")
    # Stands for work; the second time it is quicker, so that nobody waits for it again.
    time.sleep(0.01 if "TASKS_HURRY" in os.environ else seconds)  # noqa: TID251
    note("done", f"{number} {os.getpid()}")
    return number
