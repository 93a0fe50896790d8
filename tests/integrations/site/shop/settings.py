"""A site whose tasks are in Penstock. The tests say where it is and where the database is."""

from __future__ import annotations

import json
import os

import django

# Tasks are a part of Django since version 6.
FRAMEWORK = [] if django.VERSION >= (6,) else ["django_tasks"]
SECRET_KEY = "tests"
USE_TZ = True
INSTALLED_APPS = [*FRAMEWORK, "penstock.integrations.django"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["SHOP_DATABASE"],
        "OPTIONS": {"timeout": 60},
    }
}
TASKS = {
    "default": {
        "BACKEND": "penstock.integrations.django.PenstockBackend",
        "QUEUES": ["default", "mail"],
        "OPTIONS": {"url": os.environ["SHOP_URL"], **json.loads(os.environ["SHOP_OPTIONS"])},
    }
}
LOGGING = {
    "version": 1,
    # Other tests of this process look at what is logged.
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"], "level": "INFO"},
}
