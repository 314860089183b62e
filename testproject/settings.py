"""Django's and Celery's settings; whatever differs between machines comes from the environment.

==========================  ====================================================================
``DJANGO_DEBUG``            ``1`` (default) or ``0``
``DJANGO_SECRET_KEY``       required with ``DJANGO_DEBUG=0``
``DJANGO_ALLOWED_HOSTS``    with commas between; ``localhost`` by default
``DATABASE_PATH``           the SQLite file; ``db.sqlite3`` beside this file by default
``REDIS_URL``               broker, result backend, store; by default ``redis://127.0.0.1:6379/0``
``GITHUB_WEBHOOK_SECRET``   the secret of the webhook; without it, signatures are not checked
==========================  ====================================================================
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import django
from django.core.exceptions import ImproperlyConfigured

BASE_DIR = Path(__file__).resolve().parent

# --- Django -----------------------------------------------------------------------------------

DEBUG = os.environ.get("DJANGO_DEBUG", "1") not in {"0", "false", "no"}
_DEVELOPMENT_KEY = "for-development-only-and-refused-everywhere-else"
SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY", _DEVELOPMENT_KEY)
if not DEBUG and SECRET_KEY == _DEVELOPMENT_KEY:
    raise ImproperlyConfigured("Set DJANGO_SECRET_KEY: the built-in key is for DJANGO_DEBUG=1.")
_HOSTS = os.environ.get("DJANGO_ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]")
ALLOWED_HOSTS = [host for host in _HOSTS.split(",") if host]

INSTALLED_APPS = ["testproject.webhooks"]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "testproject.urls"
TEMPLATES = [
    {"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True},
]
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Web server and workers write to one SQLite file: whoever finds it locked waits, and takes the
# write lock at BEGIN, since a transaction that began as a reader cannot wait for it later.
# The journal mode is set in testproject.webhooks.apps: Django 4.2 has no setting for it.
_SQLITE_OPTIONS: dict[str, Any] = {"timeout": 20}
if django.VERSION >= (5, 1):
    _SQLITE_OPTIONS["transaction_mode"] = "IMMEDIATE"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("DATABASE_PATH", str(BASE_DIR / "db.sqlite3")),
        "OPTIONS": _SQLITE_OPTIONS,
    }
}

# Django's default keeps errors from the console when DEBUG is off, and mails them to nobody.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "loggers": {"django": {"handlers": ["console"], "level": "INFO", "propagate": False}},
}

# --- Celery -----------------------------------------------------------------------------------

REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")
CELERY_BROKER_URL = REDIS_URL
CELERY_RESULT_BACKEND = REDIS_URL
CELERY_IDEMPOTENCY_STORE = REDIS_URL
CELERY_TIMEZONE = TIME_ZONE
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
# With late acks, what a worker has fetched and not begun is redelivered as well: fetch little.
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
# GitHub waits ten seconds for an answer: give up before, answer 503, be asked again.
CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, Any] = {"socket_connect_timeout": 2}
CELERY_TASK_PUBLISH_RETRY_POLICY = {
    "max_retries": 1,
    "interval_start": 0,
    "interval_step": 0.2,
    "interval_max": 0.2,
}

# --- The webhook ------------------------------------------------------------------------------

GITHUB_WEBHOOK_SECRET = os.environ.get("GITHUB_WEBHOOK_SECRET", "")
# GitHub cuts payloads at 25 MB; the events that this receiver is for stay far below 2.
WEBHOOK_MAX_BYTES = 2 * 1024 * 1024
DATA_UPLOAD_MAX_MEMORY_SIZE = WEBHOOK_MAX_BYTES
