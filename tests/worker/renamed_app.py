"""An app before a team renames its task, as it is renamed without a thought, and with the transition of the docs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask
from tests.support.apps import configure, environment, wait_at, wanted
from tests.support.ledger import Ledger

__all__ = ["VERSIONS", "environment", "make_app"]

_BEFORE = {"idempotency_namespace_before": "shop.charge"}

#: The tasks of each version, with what it says of them beside the key.
VERSIONS: dict[str, dict[str, dict[str, Any]]] = {
    "before": {"shop.charge": {}},
    "renamed": {"shop.pay": {}},
    "transition": {
        "shop.pay": _BEFORE,
        "shop.charge": {"idempotency_namespace": "shop.pay", **_BEFORE},
    },
}


def make_app(settings: Mapping[str, Any], *, version: str = "before") -> Celery:
    """Return one version of the app."""
    app = Celery("renamed", set_as_current=False)
    configure(app, settings)
    task = partial(app.task, base=IdempotentTask, bind=True, shared=False)
    for name, options in VERSIONS[version].items():
        task(name=name, idempotency_key="order", **options)(pay)
    return app


def pay(self: Any, order: str, gate: str = "") -> str:
    """Pay, and wait at the gate."""
    ledger = Ledger.from_env()
    ledger.append("start", order, self.request.id)
    wait_at(gate)
    time.sleep(0.05)
    ledger.append("end", order, self.request.id)
    return f"{order} paid by {self.request.id}"


app: Celery | None = None

if _wanted := wanted():
    app = make_app(_wanted["settings"], version=_wanted["version"])
