"""An app whose tasks have no key of their own: their task ids guard them."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask
from tests.support.ledger import LEDGER_VARIABLE, Ledger


def make_app(url: str) -> Celery:
    app = Celery("chains", broker=url, backend=url, set_as_current=False)
    app.conf.broker_connection_retry_on_startup = True

    @app.task(name="add", base=IdempotentTask, bind=True, shared=False, max_retries=1)
    def add(self: Any, a: int, b: int, retry: bool = False) -> int:
        if retry and not self.request.retries:
            raise self.retry(countdown=0)
        Ledger.from_env().append("add", f"{a}+{b}", self.request.id)
        return a + b

    @app.task(name="total", base=IdempotentTask, bind=True, shared=False)
    def total(self: Any, numbers: list[int]) -> int:
        Ledger.from_env().append("total", sum(numbers), self.request.id)
        return sum(numbers)

    return app


app = make_app(os.environ["CHAIN_REDIS_URL"]) if LEDGER_VARIABLE in os.environ else None
