"""An app as it was before a deploy that changes its keys and its namespaces, and as it is after it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask
from tests.support.apps import configure, environment, wanted
from tests.support.ledger import Ledger

__all__ = ["TASKS", "environment", "make_app"]

#: What each version says about each task.
TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "finer": (
        {"idempotency_key": "order"},
        {"idempotency_key": ("order", "kind"), "idempotency_key_before": "order"},
    ),
    "moved": (
        {"idempotency_key": "order"},
        {
            "idempotency_key": "order",
            "idempotency_namespace": "payments",
            "idempotency_namespace_before": "moved",
        },
    ),
    "scoped": (
        {"idempotency_key": "order"},
        {
            "idempotency_key": "order",
            "idempotency_scope": "kind",
            "idempotency_scope_before": None,
        },
    ),
    "keyed": ({}, {"idempotency_key": "order", "idempotency_key_before": None}),
}


def make_app(settings: Mapping[str, Any], *, version: int = 1) -> Celery:
    """Return one version of the app."""
    app = Celery("versions", set_as_current=False)
    configure(app, settings)
    task = partial(app.task, base=IdempotentTask, bind=True, shared=False)
    for name, options in TASKS.items():
        task(name=name, **options[version - 1])(pay)
    return app


def pay(self: Any, order: str, kind: str = "sale", seconds: float = 0.0) -> str:
    """Take a moment, and pay."""
    ledger = Ledger.from_env()
    ledger.append("start", order, self.request.id)
    time.sleep(seconds)
    ledger.append("end", order, self.request.id)
    return f"{order} paid by {self.request.id}"


app: Celery | None = None

if _wanted := wanted():
    app = make_app(_wanted["settings"], version=_wanted["version"])
