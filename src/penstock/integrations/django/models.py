"""The record of a task in Django's database: its arguments, its attempts and its outcome."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.utils.module_loading import import_string

from penstock.integrations.django.backend import Status, tasks

# Fields that a result has under the same name.
SHARED = (
    *("id", "backend", "args", "kwargs", "worker_ids"),
    *("enqueued_at", "started_at", "last_attempted_at", "finished_at"),
)


class TaskRecord(models.Model):  # type: ignore[misc] # Django has no types
    """One task. ``message_id`` is that of its message in Penstock; None: not published yet."""

    id = models.CharField(primary_key=True, max_length=64)
    backend = models.CharField(max_length=255)
    queue_name = models.CharField(max_length=80)
    message_id = models.BigIntegerField(null=True, db_index=True)
    task = models.CharField(max_length=500)
    priority = models.SmallIntegerField()
    run_after = models.DateTimeField(null=True)
    args = models.JSONField()
    kwargs = models.JSONField()
    status = models.CharField(max_length=16)
    enqueued_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True)
    last_attempted_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True, db_index=True)
    worker_ids = models.JSONField(default=list)
    errors = models.JSONField(default=list)
    return_value = models.JSONField(null=True)

    def __str__(self) -> str:
        return f"{self.task} {self.id}: {self.status}"

    def add_error(self, kind: type[BaseException], trace: str) -> None:
        """Keep the error of an attempt."""
        path = f"{kind.__module__}.{kind.__qualname__}"
        self.errors.append({"exception_class_path": path, "traceback": trace})

    def result(self) -> Any:
        """Return the record as the ``TaskResult`` that Django's users know."""
        task = import_string(self.task)
        if not isinstance(task, tasks.base.Task):
            raise TypeError(f"{self.task} is no task: decorate the function with @task")
        names = ("priority", "queue_name", "run_after", "backend")
        task = task.using(**{name: getattr(self, name) for name in names})
        result = tasks.TaskResult(
            task=task,
            status=Status(self.status),
            errors=[tasks.base.TaskError(**each) for each in self.errors],
            **{name: getattr(self, name) for name in SHARED},
        )
        # As Django's own backends do: the constructor does not take it.
        object.__setattr__(result, "_return_value", self.return_value)
        return result
