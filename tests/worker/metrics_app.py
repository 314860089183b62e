"""An app whose workers serve metrics."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import worker_ready
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector

from celery_idempotent import metrics
from tests.support.apps import configure, wanted
from tests.worker.app import make_app


def _make() -> Celery:
    found: dict[str, Any] | None = wanted()
    if found is None:
        return Celery("a test's own process")
    app = make_app(found["settings"])
    metrics.install()
    worker_ready.connect(_serve, weak=False)
    return app


def _serve(**_: object) -> None:
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    registry.register(metrics.StoreCollector(app))
    start_http_server(int(os.environ["METRICS_PORT"]), registry=registry)


app = _make()
configure(app, {})
