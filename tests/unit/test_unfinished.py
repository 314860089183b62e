"""Coroutines and generators as bodies: nothing is settled that has not run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotencyError, IdempotentTask, InvalidOption


async def coroutine(key: str) -> str:
    return key


def generator(key: str) -> Iterator[str]:
    yield key


async def async_generator(key: str) -> Any:
    yield key


def define(app: Celery, body: Any, **options: Any) -> Any:
    options = {"name": "t", "base": IdempotentTask, "shared": False, "lazy": False, **options}
    return app._task_from_fun(body, idempotency_key="key", **options)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "body",
    [coroutine, partial(coroutine), partial(partial(coroutine)), generator, async_generator],
    ids=["coroutine", "partial", "partial-of-partial", "generator", "async-generator"],
)
def test_a_body_that_returns_before_it_has_run_is_refused_where_it_is_defined(
    app: Celery, body: Any
) -> None:
    task = type("Charge", (IdempotentTask,), {"name": "t", "run": staticmethod(body)})
    with pytest.raises(
        InvalidOption, match=r"^Task t is a coroutine or generator function.*asyncio\.run"
    ):
        app.register_task(task())


def test_switched_off_it_is_not_refused(app: Celery) -> None:
    assert define(app, coroutine, idempotency_mode="off").idempotency_policy.mode == "off"


def test_observed_it_is_not_refused_but_told(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    task = define(app, coroutine, idempotency_mode="observe")
    assert "would have been refused: Task t is a coroutine or generator function" in caplog.text
    found = task.apply(("k",)).result
    assert asyncio.run(found) == "k"


class Running(IdempotentTask):
    """A base that runs coroutines, derived from ours."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return asyncio.run(super().__call__(*args, **kwargs))


class RunningItself(IdempotentTask):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return asyncio.run(self.run(*args, **kwargs))


@pytest.mark.parametrize("base", [Running, RunningItself])
def test_what_a_base_runs_is_guarded_until_its_end(app: Celery, base: Any) -> None:
    runs: list[str] = []

    async def body(key: str) -> str:
        await asyncio.sleep(0)
        runs.append(key)
        if len(runs) == 1:
            raise RuntimeError("the first time")
        return f"receipt {len(runs)}"

    task = define(app, body, base=base)
    assert isinstance(task.apply(("k",)).result, RuntimeError)
    assert task.idempotency_record("k") is None  # a failure gives the key back
    assert [task.apply(("k",)).get() for _ in range(3)] == ["receipt 2"] * 3
    assert runs == ["k", "k"]


@pytest.mark.parametrize("body", [coroutine, generator])
def test_what_hides_behind_a_decorator_fails_and_settles_nothing(app: Celery, body: Any) -> None:
    def wrapper(key: str) -> Any:
        return body(key)

    task = define(app, wrapper)
    error = task.apply(("k",)).result
    assert isinstance(error, IdempotencyError)
    assert "that was not run" in str(error)
    assert task.idempotency_record("k") is None
