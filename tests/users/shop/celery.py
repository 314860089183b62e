"""The Celery app of a user's project."""

from __future__ import annotations

from celery import Celery

app = Celery("shop", broker="memory://")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["tests.users.shop"])
