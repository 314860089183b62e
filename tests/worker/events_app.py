"""An app whose workers send events of outcomes."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_idempotent import worker_events
from tests.support.apps import configure, wanted
from tests.worker.app import make_app

__all__ = ["app"]


def _make() -> Celery:
    found: dict[str, Any] | None = wanted()
    if found is None:
        return Celery("a test's own process")
    app = make_app(found["settings"])
    worker_events.install(app)
    return app


app = _make()
configure(app, {})
