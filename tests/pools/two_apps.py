"""Two apps with different settings, whose tasks have the same names and call each other's.

A worker takes one of them: ``-A tests.pools.two_apps:shop``. (Two workers in one process would need more than this:
Celery's pool of threads runs every task with the app that was made current last.)
"""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask, current_claim, signals
from tests.pools.app import wait_at
from tests.support.ledger import Ledger

#: By app, the URL of its database, as JSON.
URLS_VARIABLE = "CELERY_IDEMPOTENT_TEST_URLS"

SETTINGS: dict[str, dict[str, Any]] = {
    "shop": {"idempotency_lease": 30, "idempotency_on_conflict": "raise"},
    "bank": {
        "idempotency_lease": 300,
        "idempotency_on_conflict": "ignore",
        "idempotency_serializer": "pickle",
        "result_accept_content": ["json", "pickle"],
    },
}


def make_apps(urls: dict[str, str]) -> dict[str, Celery]:
    """Return both apps: each has broker, results and records in a database of its own."""
    apps: dict[str, Celery] = {}
    for name, url in urls.items():
        apps[name] = Celery(name, broker=url, backend=url, set_as_current=False)
        apps[name].conf.update(
            task_default_queue=name,
            broker_connection_retry_on_startup=True,
            idempotency_sweep_interval=None,
            **SETTINGS[name],
        )
        _define(name, apps)
    return apps


def _define(name: str, apps: dict[str, Celery]) -> None:
    app = apps[name]

    @app.task(name="work", base=IdempotentTask, shared=False, bind=True, idempotency_key="key")
    def work(self: Any, key: str) -> list[str]:
        assert self.app is app
        Ledger.from_env().append(f"effect {name}", key)
        return [name, key, self.request.id]

    @app.task(name="hold", base=IdempotentTask, shared=False, idempotency_key="key")
    def hold(key: str) -> str:
        wait_at(key)
        return name

    @app.task(name="relay", base=IdempotentTask, shared=False, bind=True, idempotency_key="key")
    def relay(self: Any, key: str) -> dict[str, Any]:
        """Call the other app: by a message, and here and now; and our own here and now."""
        other = apps["bank" if name == "shop" else "shop"]
        sent = other.tasks["work"].apply_async((f"{key} sent",))
        there = other.tasks["work"].apply((f"{key} eager",)).result
        here = app.tasks["work"].apply((f"{key} eager",)).result
        claim = current_claim()
        assert claim is self.idempotency
        assert claim is not None
        return {"sent": sent.id, "there": there, "here": here, "claim": claim.record.task_id}


def _tell(sender: Any, event: signals.Event, **_: Any) -> None:
    assert event.identity is not None
    Ledger.from_env().append(f"told {sender.app.main}", event.identity.key)


if URLS_VARIABLE in os.environ:
    _apps = make_apps(json.loads(os.environ[URLS_VARIABLE]))
    shop, bank = _apps["shop"], _apps["bank"]
    for _each in (signals.claimed, signals.settled):
        _each.connect(_tell, weak=False)
