"""Django's and Celery's settings; whatever differs between machines comes from the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import django
from django.core.exceptions import ImproperlyConfigured

BASE_DIR = Path(__file__).resolve().parent

DEBUG = os.environ.get("DJANGO_DEBUG", "1") not in {"0", "false", "no"}
_DEVELOPMENT_KEY = "for-development-only-and-refused-everywhere-else"
SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY", _DEVELOPMENT_KEY)
if not DEBUG and SECRET_KEY == _DEVELOPMENT_KEY:
    raise ImproperlyConfigured("Set DJANGO_SECRET_KEY: the built-in key is for DJANGO_DEBUG=1.")
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]"]

_CONTRIB = ("admin", "auth", "contenttypes", "messages", "sessions", "staticfiles")
INSTALLED_APPS = [
    *(f"django.contrib.{name}" for name in _CONTRIB),
    "rest_framework",
    "celery_idempotent.django",
    "testproject.webhooks",
    "testproject.payments",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "testproject.urls"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    },
]
STATIC_URL = "/static/"
LOGIN_URL = "/login/"
LOGIN_REDIRECT_URL = "/pay/"
LOGOUT_REDIRECT_URL = "/"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Web server and workers write to one SQLite file: a process that finds it locked waits, and takes the
# write lock at BEGIN, since a transaction that began as a reader cannot wait for it later.
# The journal mode is set in a migration: Django 4.2 has no setting for it.
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
if os.environ.get("DATABASE_NAME"):
    DATABASES["default"] = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": os.environ["DATABASE_NAME"],
    }

# Django's default hides errors from the console when DEBUG is off, and has no address to mail them to.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "loggers": {"django": {"handlers": ["console"], "level": "INFO", "propagate": False}},
}

REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")
CELERY_BROKER_URL = REDIS_URL
CELERY_RESULT_BACKEND = REDIS_URL
CELERY_IDEMPOTENCY_STORE = os.environ.get("IDEMPOTENCY_STORE", REDIS_URL)
CELERY_TIMEZONE = TIME_ZONE
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
# With late acks, what a worker has fetched and not begun is redelivered as well: fetch little.
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
# GitHub waits ten seconds for an answer: give up before, answer 503, be asked again.
CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, Any] = {"socket_connect_timeout": 2}
CELERY_TASK_PUBLISH_RETRY_POLICY = {"max_retries": 1, "interval_start": 0}

# Without a secret, signatures are not checked.
GITHUB_WEBHOOK_SECRET = os.environ.get("GITHUB_WEBHOOK_SECRET", "")
# With the records in the database, a delivery's entry and its record are committed together.
WEBHOOKS_ATOMIC = CELERY_IDEMPOTENCY_STORE.startswith(("django://", "hybrid+"))
# GitHub cuts payloads at 25 MB; the events that this receiver is for stay far below 2.
WEBHOOK_MAX_BYTES = 2 * 1024 * 1024
DATA_UPLOAD_MAX_MEMORY_SIZE = WEBHOOK_MAX_BYTES

# In the database, a payment and its record are committed together.
PAYMENTS_ATOMIC = WEBHOOKS_ATOMIC
# The passwords are the users' names; HTTP Basic would pay for a slow hash with every request.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
BANK_SECONDS = float(os.environ.get("BANK_SECONDS", "1.5"))
BANK_MOOD_FILE = os.environ.get("BANK_MOOD_FILE", str(BASE_DIR / "bank_mood"))

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "rest_framework.authentication.BasicAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "EXCEPTION_HANDLER": "testproject.payments.api.problems",
}
