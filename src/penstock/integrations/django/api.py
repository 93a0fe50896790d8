"""The Tasks framework: that of Django 6, or that of the package django-tasks before it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

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


def load_task(path: str) -> Any:
    """Import a task by the path of its function."""
    found = import_string(path)
    if not isinstance(found, tasks.base.Task):
        raise TypeError(f"{path} is no task: decorate the function with @task")
    return found
