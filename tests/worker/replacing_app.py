"""An app of orders whose work is replaced; exceptions pickle with their whole chain, as ``tblib`` has it."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from tblib import pickling_support  # type: ignore[import-untyped]

from celery_idempotent import IdempotentTask
from tests.support.ledger import LEDGER_VARIABLE, Ledger


def make_app(url: str) -> Any:
    app = Celery(
        "replacing", broker=url, backend=url, task_cls=IdempotentTask, set_as_current=False
    )
    app.conf.broker_connection_retry_on_startup = True

    @app.task(name="pay", shared=False)
    def pay(order: int) -> int:
        Ledger.from_env().append("paid", str(order))
        return order

    @app.task(name="order", bind=True, shared=False)
    def order(self: Any, number: int) -> Any:
        return self.replace(pay.si(number))

    @app.task(name="refund", shared=False)
    def refund(failed: str) -> None:
        Ledger.from_env().append("refunded", failed)

    return app


if LEDGER_VARIABLE in os.environ:
    app = make_app(os.environ["REPLACING_REDIS_URL"])
    pickling_support.install()
