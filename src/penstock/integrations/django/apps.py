"""The Django app, which has the records of tasks and the command that works on them."""

from __future__ import annotations

from django.apps import AppConfig


class PenstockConfig(AppConfig):  # type: ignore[misc] # Django has no types
    """Named ``penstock``, since ``django`` would say nothing in a list of apps."""

    name = "penstock.integrations.django"
    label = "penstock"
    verbose_name = "Penstock"
