"""An app whose workers serve metrics."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_idempotent import metrics
from tests.support.apps import configure, wanted
from tests.worker.app import make_app


def _make() -> Celery:
    found: dict[str, Any] | None = wanted()
    if found is None:
        return Celery("a test's own process")
    app = make_app(found["settings"])
    metrics.install(app, port=int(os.environ["METRICS_PORT"]))
    return app


app = _make()
configure(app, {})
