"""``manage.py penstock_worker``: a :class:`penstock.Worker` that runs Django's tasks."""

from __future__ import annotations

import logging
import os
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from django.core.management.base import BaseCommand, CommandError
from django.db import close_old_connections

import penstock
from penstock.integrations.django.backend import PenstockBackend, run_task, tasks

if TYPE_CHECKING:
    from argparse import ArgumentParser

log = logging.getLogger(__name__)

# How often a worker looks for records to publish late or to delete.
TEND_S: Final = 60


class Command(BaseCommand):  # type: ignore[misc] # Django has no types
    """Works until SIGTERM or SIGINT; a second one does not wait for tasks that run."""

    help = "Run Django's tasks from queues of Penstock."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        add = parser.add_argument
        add("--backend", default="default", help="the backend's name in TASKS")
        add("--queue", action="append", dest="queues", help="a queue; default: all in QUEUES")
        add("--concurrency", type=int, default=4, help="tasks that run at a time")
        add("--processes", action="store_true", help="run tasks in processes, not in threads")
        add("--time-limit-ms", type=int, help="how long a task may take")
        add("--drain-ms", type=int, default=30_000, help="how long a stop waits for tasks")

    def handle(self, **options: Any) -> None:
        """Work until it is stopped."""
        backend = tasks.task_backends[options["backend"]]
        if not isinstance(backend, PenstockBackend):
            raise CommandError(f"TASKS[{options['backend']!r}] is no PenstockBackend")
        queues = options["queues"] or sorted(backend.queues)
        if not queues:
            raise CommandError("QUEUES is empty, which allows any queue: name some with --queue")
        worker_id = f"{socket.gethostname()}-{os.getpid()}"
        ended = threading.Event()
        tending = threading.Thread(target=_tend, args=(backend, ended), daemon=True)
        try:
            worker = penstock.Worker(
                backend.broker,
                [backend.prepare(name, update=True) for name in queues],
                partial(run_task, worker_id=worker_id),
                concurrency=options["concurrency"],
                mode="processes" if options["processes"] else "threads",
                time_limit_ms=options["time_limit_ms"],
                drain_ms=options["drain_ms"],
                consumer=worker_id,
                # A task that may be tried once must not be claimed before a slot is free: if the
                # worker were killed, it would fail without having run.
                prefetch=0,
            )
            tending.start()
            self.stdout.write(f"{worker_id} works on {', '.join(queues)}")
            worker.run()
        except penstock.PenstockError as error:
            raise CommandError(str(error)) from error
        finally:
            ended.set()


def _tend(backend: PenstockBackend, ended: threading.Event) -> None:
    """Publish tasks that were left over, and delete old records, now and then."""
    while True:
        try:
            close_old_connections()
            backend.publish_late()
            backend.prune()
        except Exception:  # the thread must outlive every error
            log.exception("records of tasks could not be looked after")
        finally:
            close_old_connections()
        if ended.wait(TEND_S):
            return
