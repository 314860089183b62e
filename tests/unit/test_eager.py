"""Eager runs behave as Celery's do, although Celery is careless with their ids."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, chain

from celery_idempotent import IdempotentTask, InProgress


@pytest.fixture
def app() -> Celery:
    app = Celery("eager", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(idempotency_store="memory://", task_always_eager=True)
    return app


def test_all_steps_of_a_chain_run_although_celery_gives_them_one_id(app: Celery) -> None:
    @app.task(base=IdempotentTask, shared=False)
    def add(a: int, b: int) -> int:
        return a + b

    steps = chain(add.s(1, 1), add.s(2), add.s(3))
    steps.freeze()
    assert steps.apply().get() == 7
    assert steps.apply_async(task_id="x").get() == 7


@pytest.mark.parametrize("key", [None, "name"])
def test_a_task_may_replace_itself(app: Celery, key: str | None) -> None:
    @app.task(base=IdempotentTask, bind=True, shared=False, idempotency_key=key)
    def countdown(self: Any, name: str, n: int) -> Any:
        return self.replace(countdown.s(name, n - 1)) if n else "end"

    assert countdown.apply(args=("a", 3)).get() == "end"


@pytest.mark.parametrize("throw", [True, False])
def test_a_retry_is_run(app: Celery, throw: bool) -> None:
    @app.task(base=IdempotentTask, bind=True, shared=False, idempotency_key="name")
    def persistent(self: Any, name: str) -> Any:
        if self.request.retries < 2:
            return self.retry(countdown=0, throw=throw)
        return self.request.retries

    assert persistent.apply(("a",)).get() == persistent.apply(("a",)).get() == 2


def test_a_call_of_itself_with_its_own_key_is_a_conflict_at_once(app: Celery) -> None:
    @app.task(base=IdempotentTask, shared=False, idempotency_key="name")
    def nested(name: str) -> None:
        nested.apply((name,), throw=True)

    with pytest.raises(InProgress, match=r"nested key a is held by"):
        nested.apply(("a",), throw=True)
