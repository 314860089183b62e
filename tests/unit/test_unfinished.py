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


BODIES = [coroutine, generator, async_generator]


@pytest.mark.parametrize("body", [*BODIES, partial(partial(coroutine))])
def test_a_body_that_returns_before_it_has_run_is_refused_where_it_is_defined(
    app: Celery, body: Any
) -> None:
    task = type("Charge", (IdempotentTask,), {"name": "t", "run": staticmethod(body)})
    with pytest.raises(InvalidOption, match=r"^Task t is a coroutine or gen.*asyncio\.run"):
        app.register_task(task())


@pytest.mark.parametrize("body", BODIES)
def test_what_hides_behind_a_decorator_fails_and_settles_nothing(app: Celery, body: Any) -> None:
    def wrapper(key: str) -> Any:
        return body(key)

    task = define(app, wrapper)
    error = task.apply(("k",)).result
    assert isinstance(error, IdempotencyError)
    assert "of which nothing was run" in str(error)
    assert task.idempotency_record("k") is None


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_observed_or_switched_off_it_is_as_with_celery(
    app: Celery, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = define(app, coroutine, idempotency_mode=mode).apply(("k",)).result
    assert asyncio.run(found) == "k"
    assert ("would have been refused: Task t is a coroutine" in caplog.text) is (mode == "observe")


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
