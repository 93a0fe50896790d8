"""A Celery application whose broker is the server under test; workers of it are processes.

Tasks tell what they did by lines in files of a directory: each line is one whole run.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from celery import Celery
from celery.exceptions import Reject

import penstock.integrations.kombu  # noqa: F401 - makes penstock:// known to kombu

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = "shop-"


def make_app(url: str, place: Path, **settings: Any) -> Celery:
    """Make the application: its producers and its workers have the same."""
    app = Celery("kombu_app", broker=url, backend=f"file://{place}/results")
    app.conf.update(
        broker_transport_options={
            "queue_name_prefix": PREFIX,
            "visibility_timeout": float(os.environ.get("TASKS_VISIBILITY_S", "60")),
        },
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=int(os.environ.get("TASKS_PREFETCH", "4")),
        **settings,
    )

    def task(name: str, **options: Any) -> Callable[[Callable[..., Any]], None]:
        # Not shared: a test makes several applications, with the same tasks.
        decorator = app.task(name=name, shared=False, **options)
        return cast("Callable[[Callable[..., Any]], None]", decorator)

    def note(name: str, text: object) -> None:
        with (place / name).open("a") as file:
            file.write(f"{text}\n")

    @task("add")
    def add(left: int, right: int) -> int:
        return left + right

    @task("order")
    def order(text: str) -> None:
        note("order", text)

    @task("stubborn", bind=True, max_retries=5)
    def stubborn(self: Any, failures: int) -> int:
        retries: int = self.request.retries
        note("stubborn", retries)
        if retries < failures:
            raise self.retry(countdown=0.1, exc=RuntimeError("not yet"))
        return retries

    @task("refuse", bind=True, acks_late=True)
    def refuse(self: Any) -> None:
        redelivered = self.request.delivery_info["redelivered"]
        note("refuse", redelivered)
        raise Reject("refused", requeue=not redelivered)

    @task("broken")
    def broken() -> None:
        raise ValueError("broken on purpose")

    @task("hold", acks_late=True, reject_on_worker_lost=True)
    def hold(number: int) -> int:
        note("began", f"{number} {os.getpid()}")
        while not (place / "let-go").exists():
            threading.Event().wait(0.02)
        note("done", number)
        return number

    return app


if "TASKS_URL" in os.environ:
    app = make_app(os.environ["TASKS_URL"], Path(os.environ["TASKS_PLACE"]))
