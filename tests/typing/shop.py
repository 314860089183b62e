"""A user's program, as a type checker reads it (``make types``); it runs in ``test_shop.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import Celery, chain, group, shared_task

from celery_idempotent import EarlierCall, IdempotentTask
from celery_idempotent.http import aenqueue, task_status

#: With the class mypy knows what every task is; with its name, "celery_idempotent:IdempotentTask", this line says it.
app: Celery[IdempotentTask] = Celery(
    "typed shop", task_cls="celery_idempotent:IdempotentTask", set_as_current=False
)
other = Celery("another shop", task_cls=IdempotentTask, set_as_current=False)
app.conf.update(task_always_eager=True, idempotency_store="memory://")


@app.task(shared=False)
def charge(order_id: str, amount: int = 1) -> str:
    return f"{order_id}: {amount}"


@app.task(idempotency_key="order_id", bind=True, shared=False)
def ship(self: IdempotentTask, order_id: str) -> str:
    return self.idempotency.key


@other.task(shared=False)
def elsewhere(order_id: str) -> str:
    return order_id


@app.task(base=IdempotentTask, shared=False)
def based(order_id: str) -> str:
    return order_id


if TYPE_CHECKING:  # they would be tasks of every app of the process, those of other tests as well

    @app.task
    def bare(order_id: str) -> str:
        return order_id

    @shared_task(base=IdempotentTask)
    def shared(order_id: str) -> str:
        return order_id

    for each in (bare, shared, elsewhere):
        each.apply_async(("a",), idempotency_key="k")
        each.s("a").set(idempotency_key="k", idempotency_scope="tenant")


def calls() -> list[Any]:
    """Call in every way that takes a key."""
    for task in (charge, ship, based):
        task.apply_async(("a",), idempotency_key="k", idempotency_scope="tenant", countdown=1)
        task.apply(("a",), idempotency_key="k")
        task.s("a").set(idempotency_key="k", countdown=1).apply_async()
        task.si("a").set(idempotency_key="k").set(idempotency_scope="tenant").delay()
        task.signature(("a",), idempotency_key="k").apply_async(idempotency_key="l")
        task.s("a").clone().apply(idempotency_key="m")
    # The stubs of Celery list what a canvas takes: options of others go in as a dictionary.
    batch: dict[str, Any] = {"idempotency_key": "batch-7"}
    group([charge.s("a"), ship.s("b")]).apply_async(**batch)
    batch = {"idempotency_key": "batch-8"}
    chain(charge.s("c"), ship.si("d")).apply_async(**batch)
    body, status, headers = task_status(charge, "k", scope="tenant")
    assert (body[:1], status, headers["Content-Type"]) == (b"{", 200, "application/json")
    record = charge.idempotency_record("k", scope="tenant")
    assert record is not None
    sent = ship.delay("z")
    known: tuple[bool | None, EarlierCall | None] = (sent.duplicate, sent.earlier)
    assert known == (None, None)
    return [record.identity.key, sent.get(), elsewhere.name]


async def route(key: str | None) -> tuple[bytes, int, dict[str, str]]:
    """Answer as a framework wants it."""
    answer = await aenqueue(charge, ("r",), key=key, scope="tenant", countdown=1)
    answer.headers["X-Status"] = str(answer.status)
    return answer
