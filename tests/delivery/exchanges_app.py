"""An app whose exchanges give a message to several queues: a fanout exchange, and a topic exchange bound twice."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from celery import Celery
from kombu import Exchange, Queue
from kombu.common import Broadcast

from celery_idempotent import IdempotentTask
from tests.support.apps import configure, wanted
from tests.support.ledger import Ledger


def make_app(settings: Mapping[str, Any]) -> Celery:
    app = Celery("exchanges", set_as_current=False)
    configure(app, settings)
    name = settings["task_default_queue"]
    topic = Exchange(f"{name}.topic", "topic")
    app.conf.task_queues = [
        Broadcast(f"{name}.all"),
        Queue(f"{name}.a", topic, "order.#"),
        Queue(f"{name}.b", topic, "*.paid"),
    ]
    app.task(name="work", base=IdempotentTask, bind=True, shared=False)(work)
    app.task(name="keyed", base=IdempotentTask, bind=True, shared=False, idempotency_key="key")(
        work
    )
    return app


def work(self: Any, key: str, seconds: float) -> None:
    """Take so many seconds."""
    ledger = Ledger.from_env()
    ledger.append("start", key, self.request.id)
    time.sleep(seconds)
    ledger.append("end", key, self.request.id)


app: Celery | None = None

if _wanted := wanted():
    app = make_app(_wanted["settings"])
