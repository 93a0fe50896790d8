"""Runs the task of one message and records its outcome. A worker calls it, in any process."""

from __future__ import annotations

import contextlib
import logging
import traceback
from typing import TYPE_CHECKING, Any

import django
from django.apps import apps
from django.db import close_old_connections
from django.utils import timezone

from penstock.integrations.django.api import Status, normalize_json, signals, tasks
from penstock.integrations.django.backend import PenstockBackend, records

if TYPE_CHECKING:
    from penstock.integrations.django.models import TaskRecord
    from penstock.model import Delivery

log = logging.getLogger(__name__)


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
