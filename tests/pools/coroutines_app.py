"""An app for the pool of celery-aio-pool: plain functions, and coroutines that a base runs on the pool's own loop."""

from __future__ import annotations

import asyncio
import os
import uuid
from pathlib import Path
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask
from tests.support.ledger import LEDGER_VARIABLE, Ledger


class Coroutine(IdempotentTask):
    """A base that runs the coroutine of its task: the claim is around it, whoever runs it."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from celery_aio_pool.pool import AsyncIOPool  # type: ignore[import-untyped]

        pool: Any = AsyncIOPool.singleton
        running = asyncio.run_coroutine_threadsafe(super().__call__(*args, **kwargs), pool.loop)
        return running.result()


def make_app(url: str) -> Any:
    app = Celery("coroutines", broker=url, backend=url, set_as_current=False)
    app.conf.update(broker_connection_retry_on_startup=True, idempotency_lease=2)

    @app.task(name="plain", base=IdempotentTask, bind=True, shared=False, idempotency_key="key")
    def plain(self: Any, key: str) -> list[Any]:
        Ledger.from_env().append("effect", key, self.request.id)
        return [self.idempotency.key, self.idempotency.token > 0, uuid.uuid4().hex]

    @app.task(name="awaited", base=Coroutine, shared=False, idempotency_key="key")
    async def awaited(key: str, gate: str = "") -> str:
        Ledger.from_env().append("start", key)
        while gate and not Path(gate).exists():
            await asyncio.sleep(0.02)
        Ledger.from_env().append("effect", key)
        return uuid.uuid4().hex

    return app


app = make_app(os.environ["POOL_REDIS_URL"]) if LEDGER_VARIABLE in os.environ else None
