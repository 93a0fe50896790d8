"""Django's tasks in Penstock: a backend of the Tasks framework, its records and its worker."""

from __future__ import annotations

from penstock.integrations.django.backend import PenstockBackend, WorkerLost

__all__ = ["PenstockBackend", "WorkerLost"]
