"""An app whose workers serve metrics."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import worker_process_init
from prometheus_client import Gauge

from celery_idempotent import metrics
from tests.delivery.app import make_app
from tests.support.apps import configure, wanted

children = Gauge("children", "Processes of the pool that live.", multiprocess_mode="livesum")


def _make() -> Celery:
    found: dict[str, Any] | None = wanted()
    if found is None:
        return Celery("a test's own process")
    app = make_app(found["settings"])
    metrics.serve(app, int(os.environ["METRICS_PORT"]), addr="127.0.0.1")
    worker_process_init.connect(lambda **_: children.set(1), weak=False)
    return app


app = _make()
configure(app, {})
