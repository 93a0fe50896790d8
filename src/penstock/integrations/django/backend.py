"""A backend for Django's Tasks framework.

::

    enqueue ──▶ record in Django's database ──on commit──▶ message in Penstock
                   ▲  arguments, outcome                      │ claim
                   └──────────── penstock_worker ◀────────────┘

Penstock decides when a task runs, and whether again. Its history has no room for arguments and
return values: they are in a table of Django's database, :class:`TaskRecord` in ``models``.

The Tasks framework is that of Django 6, or that of the package django-tasks before it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import traceback
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import django
from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as CheckWarning
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections, router, transaction
from django.utils import timezone
from django.utils.crypto import get_random_string

import penstock
from penstock.integrations import is_server, open_broker
from penstock.urls import parse_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.integrations.django.models import TaskRecord
    from penstock.model import Delivery

log = logging.getLogger(__name__)

_NAME, _JSON = "django.tasks", "django.utils.json"
if not find_spec(_NAME):
    _NAME, _JSON = "django_tasks", "django_tasks.utils"
    if not find_spec(_NAME):
        raise ImproperlyConfigured(
            "tasks need Django 6, or django-tasks before it: pip install django-tasks"
        )
# Both have modules and names alike, as far as they are used here.
tasks: Any = import_module(_NAME)
signals: Any = import_module(f"{_NAME}.signals")
normalize_json: Any = import_module(_JSON).normalize_json
BaseTaskBackend: Any = import_module(f"{_NAME}.backends.base").BaseTaskBackend
Status: Any = tasks.TaskResultStatus

OPTIONS: Final = {"url", "token", "patience_ms", "prefix", "queue", "keep_days"}
# Django's lowest priority is -100, Penstock's is 0.
LOWEST_PRIORITY: Final = 100
# A record without a message is published by a worker when it is so old: the process that made it
# has published it by then, or never will.
LATE: Final = timedelta(seconds=60)
LATE_BATCH: Final = 1_000
CHECK_PATIENCE_MS: Final = 1_000

# Django has a backend for every thread; they share brokers, by process, URL and token.
_brokers: dict[tuple[int, str, str], penstock.Broker] = {}
_prepared: set[tuple[int, str, str]] = set()
_guard = threading.Lock()


class WorkerLost(Exception):
    """The worker of a task gave no more sign of life, and the task has no attempt left."""


class PenstockBackend(BaseTaskBackend):  # type: ignore[misc] # Django has no types
    """Publishes tasks to Penstock and keeps their records in Django's database."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        """Take the settings; nothing is opened before the first task."""
        super().__init__(alias, params)
        # Django's tasks are not tried again unless the settings say so.
        self.queue_settings = {"max_attempts": 1, **self.options.get("queue", {})}

    # --- Penstock ----------------------------------------------------------------------------

    @property
    def broker(self) -> penstock.Broker:
        """Penstock, opened when it is first used in a process."""
        url, token = self.options.get("url"), self.options.get("token", "")
        if not url:
            raise ImproperlyConfigured(f"TASKS[{self.alias!r}] needs OPTIONS with a 'url'")
        key = (os.getpid(), url, token)
        with _guard:
            if key not in _brokers:
                patience_ms = self.options.get("patience_ms", 10_000)
                _brokers[key] = open_broker(url, token=token, patience_ms=patience_ms)
                atexit.register(_brokers[key].close)
            return _brokers[key]

    def queue(self, queue_name: str) -> str:
        """Return the name in Penstock of a queue of Django's tasks."""
        return f"{self.options.get('prefix', '')}{queue_name}"

    def prepare(self, queue_name: str, *, update: bool = False) -> str:
        """Create a queue that is not there; ``update`` the settings of one that is."""
        queue, broker = self.queue(queue_name), self.broker
        key = (os.getpid(), self.options["url"], queue)
        if update or key not in _prepared:
            try:
                spec = broker.queue(queue)
            except penstock.QueueNotFound:
                spec = broker.create_queue(queue, **self.queue_settings)
            wanted = self.queue_settings.items()
            changes = {name: value for name, value in wanted if getattr(spec, name) != value}
            if update and changes:
                broker.update_queue(queue, **changes)
            _prepared.add(key)
        return queue

    # --- tasks ---------------------------------------------------------------------------------

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Record a task; its message is published when the transaction commits."""
        self.validate_task(task)
        record = records().model(
            id=get_random_string(32),
            backend=self.alias,
            queue_name=task.queue_name,
            task=task.module_path,
            priority=task.priority,
            run_after=task.run_after,
            args=args,
            kwargs=kwargs,
            status=Status.READY,
            enqueued_at=timezone.now(),
        )
        result = record.result()  # which has checked the arguments
        record.args, record.kwargs = result.args, result.kwargs
        using = records().db
        record.save(using=using, force_insert=True)
        transaction.on_commit(partial(self._publish, record), using=using)
        return result

    def _message(self, record: TaskRecord) -> penstock.Message:
        due_ms = int(record.run_after.timestamp() * 1000) if record.run_after else 0
        return penstock.Message(
            record.id.encode(),
            {"queue": self.queue(record.queue_name), "task": record.task},
            priority=record.priority + LOWEST_PRIORITY,
            delay_ms=max(0, due_ms - penstock.SystemClock().now_ms()),
            dedup_id=record.id,
        )

    def _publish(self, record: TaskRecord) -> None:
        try:
            self.prepare(record.queue_name)
            [record.message_id] = self.broker.publish([self._message(record)])
        except penstock.StorageFailed as error:
            # The caller's transaction is done: the task is not to be lost, and not to fail it.
            log.warning("task %s is left for a worker to publish: %s", record.id, error)
            return
        records().filter(id=record.id).update(message_id=record.message_id)
        signals.task_enqueued.send(type(self), task_result=record.result())

    def publish_late(self) -> int:
        """Publish recorded tasks that were not published after their commit; return how many."""
        mine = records().filter(backend=self.alias, message_id=None, finished_at=None)
        late = list(mine.filter(enqueued_at__lt=timezone.now() - LATE)[:LATE_BATCH])
        for record in late:
            self._publish(record)
        return len(late)

    def prune(self) -> int:
        """Delete records of tasks that finished more than ``keep_days`` ago; return how many."""
        before = timezone.now() - timedelta(days=self.options.get("keep_days", 14))
        mine = records().filter(backend=self.alias, finished_at__lt=before)
        deleted: int = mine.delete()[0]
        return deleted

    # --- results -------------------------------------------------------------------------------

    def get_result(self, result_id: str) -> Any:
        """Return the result of a task, finished or not."""
        record = records().filter(id=result_id, backend=self.alias).first()
        if record is None:
            raise tasks.exceptions.TaskResultDoesNotExist(result_id)
        if record.finished_at is None and record.message_id is not None:
            self._look_for_worker(record)
        return record.result()

    def _look_for_worker(self, record: TaskRecord) -> None:
        """Ask Penstock whether a task without an end is worked on; a dead worker records none."""
        queue = self.queue(record.queue_name)
        attempts = self.broker.attempts(queue, record.message_id)
        ended = {penstock.AttemptEnd.RELEASED, penstock.AttemptEnd.EXPIRED}
        if not attempts or attempts[-1].end not in ended:
            return
        # A worker records the end of an attempt before it tells Penstock.
        record.refresh_from_db()
        if record.finished_at is not None:
            return
        last, record.status = attempts[-1], Status.READY
        if last.number >= self.broker.queue(queue).max_attempts:
            zone = UTC if settings.USE_TZ else None
            record.finished_at = datetime.fromtimestamp((last.ended_at_ms or 0) / 1000, zone)
            record.status = Status.FAILED
            reason = last.reason or f"the lease of {last.consumer} ended"
            record.add_error(WorkerLost, f"attempt {last.number}: {reason}")
            record.save(update_fields=["status", "finished_at", "errors"])

    # --- checks --------------------------------------------------------------------------------

    def check(self, **_: Any) -> Iterator[CheckMessage]:
        """Say what is wrong with the settings, and whether the server answers."""
        where = f"TASKS[{self.alias!r}]"
        if not apps.is_installed("penstock.integrations.django"):
            hint = "Add 'penstock.integrations.django' to INSTALLED_APPS."
            yield Error(f"{where}: the app of the backend is missing.", hint, id="penstock.E001")
        if unknown := sorted(set(self.options) - OPTIONS):
            hint = f"There are {', '.join(sorted(OPTIONS))}."
            yield Error(f"{where}: no option {unknown[0]!r}.", hint, id="penstock.E002")
        if not self.options.get("url"):
            hint = "OPTIONS: {'url': 'penstock://HOST:8814'}"
            yield Error(f"{where}: the URL of Penstock is missing.", hint, id="penstock.E003")
            return
        try:
            with penstock.open("memory:", background=False) as trial:
                for name in self.queues:
                    trial.create_queue(self.queue(name), **self.queue_settings)
            self._check_url(self.options["url"])
        except (penstock.InvalidInput, TypeError) as error:
            yield Error(f"{where}: {error}", id="penstock.E004")
        except penstock.PenstockError as error:
            hint = "Tasks that are enqueued meanwhile are published later, by a worker."
            yield CheckWarning(f"{where}: {error}", hint, id="penstock.W001")

    def _check_url(self, url: str) -> None:
        """Reach a server; a store is not opened, since it has one owner."""
        if is_server(url):
            token = self.options.get("token", "")
            open_broker(url, token=token, patience_ms=CHECK_PATIENCE_MS).close()
        elif not url.startswith(("postgresql:", "cockroachdb:")):
            parse_url(url)


def records() -> Any:
    """Return the records, from the database that takes writes: a replica may be behind.

    Their model can't be imported before Django's apps are ready.
    """
    model = apps.get_model("penstock", "TaskRecord")
    return model.objects.using(router.db_for_write(model))


# --- running a task -------------------------------------------------------------------------------


def run_task(delivery: Delivery, *, worker_id: str) -> None:
    """Run a task, unless its record says that it has succeeded; raise what it raises."""
    if not apps.ready:  # a child process of a worker
        django.setup()
    close_old_connections()
    try:
        record = records().filter(id=delivery.payload.decode()).first()
        if record is None:
            raise LookupError("the task's record was deleted")
        if record.status == Status.SUCCESSFUL:
            # The worker ended between the record and the ack.
            log.info("task %s has succeeded before: it is not run again", record.id)
            return
        _begin(record, delivery, worker_id)
        try:
            record.return_value = _call(record)
        except BaseException as error:
            record.add_error(type(error), "".join(traceback.format_exception(error)))
            backend = tasks.task_backends[record.backend]
            last = delivery.attempts >= backend.queue_settings["max_attempts"]
            _end(record, Status.FAILED if last else Status.READY)
            raise
        _end(record, Status.SUCCESSFUL)
    finally:
        close_old_connections()


def _begin(record: TaskRecord, delivery: Delivery, worker_id: str) -> None:
    record.status, record.finished_at = Status.RUNNING, None
    record.message_id = delivery.message_id
    record.last_attempted_at = timezone.now()
    record.started_at = record.started_at or record.last_attempted_at
    record.worker_ids.append(worker_id)
    record.save()


def _call(record: TaskRecord) -> Any:
    result = record.result()
    signals.task_started.send(PenstockBackend, task_result=result)
    context = [tasks.TaskContext(task_result=result)] if result.task.takes_context else []
    return normalize_json(result.task.call(*context, *record.args, **record.kwargs))


def _end(record: TaskRecord, status: Any) -> None:
    """Record how an attempt has ended. Within an error's handler: Django logs that error."""
    close_old_connections()  # one may have been lost while the task ran
    record.status = status
    if status != Status.READY:
        record.finished_at = timezone.now()
    record.save()
    with contextlib.suppress(ImportError):  # the error may be that there is no such task
        result = record.result()
        if result.is_finished:
            signals.task_finished.send(PenstockBackend, task_result=result)
