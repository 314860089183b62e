"""A shop of FastAPI's, its task and its sweep: ``python -m tests.http.shop PORT_FILE|sweep``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

from celery import Celery
from celery.signals import before_task_publish
from fastapi import Body, FastAPI, Header, Response

from celery_idempotent import IdempotentTask, get_store
from celery_idempotent.celery import sweep
from celery_idempotent.http import aenqueue, atask_status
from tests.http import servers

__all__ = ["api", "app"]

app = Celery("shop", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
api = FastAPI()


@app.task(base=IdempotentTask, name="shop.charge")
def charge(order_id: str) -> dict[str, str]:
    with Path("charges.txt").open("a") as charges:
        charges.write(f"{order_id}\n")
    return {"receipt": order_id}


@before_task_publish.connect
def doomed(**_: Any) -> None:
    """Take this process down between the reservation and the publishing, where a test wants that."""
    if Path("doom").exists():
        os.kill(os.getpid(), signal.SIGKILL)


@api.post("/charges")
async def create(
    authorization: Annotated[str, Header()],
    order_id: Annotated[str, Body(embed=True)],
    idempotency_key: Annotated[str, Header()],
) -> Response:
    where = "/charges/status?key={key}"
    answer = await aenqueue(
        charge, (order_id,), key=idempotency_key, scope=authorization, status_url=where
    )
    return Response(*answer)


@api.get("/charges/status")
async def look(authorization: Annotated[str, Header()], key: str) -> Response:
    return Response(*await atask_status(charge, key, scope=authorization))


def let_a_minute_pass() -> None:
    """Let reservations of now count as lost."""
    from celery_idempotent.stores.redis.store import RedisStore
    from tests.stores.shifted import Shift

    store = get_store(app)
    assert isinstance(store, RedisStore)
    Shift(store)(61_000)


if __name__ == "__main__":
    app.set_default()
    if "LATER" in os.environ:
        let_a_minute_pass()
    if sys.argv[1] == "sweep":
        sys.stdout.write(f"{sweep.sweep(app)['requeued']}\n")
    else:
        servers.uvicorn(lambda: api)
