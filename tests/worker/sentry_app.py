"""An app that reports to Sentry: what would be sent there is noted in the ledger instead."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask
from tests.support.apps import wait_at
from tests.support.ledger import LEDGER_VARIABLE, Ledger


class Refused(Exception):
    """A permanent error."""


def make_app(url: str) -> Any:
    app = Celery("sentry", broker=url, backend=url, set_as_current=False)
    app.conf.update(broker_connection_retry_on_startup=True, idempotency_conflict_backoff_max=0.2)

    @app.task(
        name="refusing",
        base=IdempotentTask,
        shared=False,
        idempotency_key="key",
        idempotency_permanent_errors=(Refused,),
    )
    def refusing(key: str) -> None:
        raise Refused(key)

    @app.task(name="report", base=IdempotentTask, bind=True, shared=False, idempotency_key="key")
    def report(self: Any, key: str, gate: str) -> str:
        Ledger.from_env().append("start", key, self.request.id)
        wait_at(gate)
        return key

    return app


def observe() -> None:
    """Have Sentry's own integration write to the ledger."""
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration
    from sentry_sdk.transport import Transport

    class Noting(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            for item in envelope.items:
                found = item.payload.json
                if item.type == "event":
                    error = found["exception"]["values"][-1]
                    Ledger.from_env().append("event", f"{error['type']} {error['value']}")
                if item.type == "check_in":
                    Ledger.from_env().append("check-in", found["status"])

    sentry_sdk.init(
        dsn="http://key@localhost/1",
        transport=Noting,
        integrations=[CeleryIntegration(monitor_beat_tasks=True)],
    )


app = None
if LEDGER_VARIABLE in os.environ:
    observe()
    app = make_app(os.environ["SENTRY_REDIS_URL"])
