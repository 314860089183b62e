"""Bases with a ``__call__`` of their own, in any order: the claim comes before them, and ``run`` is as with Celery."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Task
from celery.app import trace

from celery_idempotent import IdempotentTask, State


class Rollback(Exception):
    """The transaction around the run cannot be committed."""


@contextmanager
def transaction(world: SimpleNamespace) -> Iterator[None]:
    """Keep the effects of the block, unless it fails or its commit does."""
    world.calls += 1
    before = list(world.effects)
    try:
        yield
        if world.trouble:
            raise world.trouble.pop()
    except BaseException:
        world.effects[:] = before
        raise


class Mixin:
    app: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with transaction(self.app.world):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class TransactionalTask(Mixin, Task):  # type: ignore[type-arg]
    abstract = True


def subclass(base: Any) -> Any:
    """``class Transactional(app.Task)``, written before the app's class was changed."""

    class Transactional(base):  # type: ignore[misc]
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with transaction(self.app.world):
                return super().__call__(*args, **kwargs)

    return Transactional


def mixin_first(base: Any) -> Any:
    return type("MixinFirst", (Mixin, base), {"abstract": True})


def mixin_last(base: Any) -> Any:
    return type("MixinLast", (base, TransactionalTask), {"abstract": True})


def without_super(base: Any) -> Any:
    class Direct(base):  # type: ignore[misc]
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with transaction(self.app.world):
                return self.run(*args, **kwargs)

    return Direct


ORDERS = [subclass, mixin_first, mixin_last, without_super]


@pytest.fixture
def app(app: Any) -> Iterator[Any]:
    app.world = SimpleNamespace(calls=0, effects=[], trouble=[])
    trace._install_stack_protection()  # type: ignore[attr-defined]  # as in a worker
    yield app
    trace.reset_worker_optimizations(app)


@pytest.fixture(params=ORDERS, ids=lambda order: order.__name__)
def order(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def task(app: Any, order: Callable[[Any], Any]) -> Any:
    @app.task(
        name="t",
        base=order(IdempotentTask),
        bind=True,
        shared=False,
        idempotency_key="key",
        max_retries=1,
    )
    def task(self: Any, key: str, how: str = "") -> Any:
        app.world.effects.append(key)
        if how == "retries" and not self.request.retries:
            raise self.retry(countdown=0)
        if how == "calls itself":
            return [self.request.id, self(key)]
        return self.request.id

    return task


def deliver(task: Any, *args: Any, task_id: str = "message", retries: int = 0) -> Any:
    """Run a message as a worker's child does; return its result."""
    request = {"id": task_id, "args": args, "kwargs": {}, "retries": retries}
    request |= {"delivery_info": {}, "is_eager": False}
    outcome = trace.build_tracer(task.name, task, app=task.app)(task_id, list(args), {}, request)
    return outcome.info.retval if outcome.info else outcome.retval


@pytest.mark.parametrize("error", [Rollback, SystemExit])
def test_a_wrapper_that_rolls_back_leaves_no_completed_record(
    app: Any, task: Any, error: type[BaseException]
) -> None:
    app.world.trouble.append(error())
    with pytest.raises(SystemExit) if error is SystemExit else nullcontext():
        assert isinstance(deliver(task, "k"), Rollback)
    assert (app.world.effects, task.idempotency_record("k")) == ([], None)
    assert deliver(task, "k", task_id="again") == "again"
    assert app.world.effects == ["k"]
    assert task.idempotency_record("k").state is State.COMPLETED


def test_a_retry_goes_out_and_runs(app: Any, task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(app, "send_task", lambda *_, **options: sent.append(options))
    deliver(task, "k", "retries")
    assert [(each["task_id"], each["retries"]) for each in sent] == [("message", 1)]
    assert app.world.effects == []
    assert deliver(task, "k", "retries", retries=1) == "message"
    assert app.world.effects == ["k"]


def test_a_task_that_calls_itself_runs_twice_under_one_claim(app: Any, task: Any) -> None:
    assert deliver(task, "k", "calls itself")[0] == "message"
    assert app.world.effects == ["k", "k"]
    assert app.world.calls == 2  # as with Celery


def test_switched_off_it_is_what_celery_makes_of_it(app: Any, order: Any) -> None:
    @app.task(
        name="off", base=order(IdempotentTask), bind=True, shared=False, idempotency_mode="off"
    )
    def off(self: Any, key: str) -> Any:
        app.world.effects.append(key)
        return self.request.id

    for _ in range(2):
        assert deliver(off, "k") == "message"
    assert (app.world.calls, app.world.effects) == (2, ["k", "k"])


def test_a_pool_that_keeps_one_request_for_all_deliveries_runs_each_under_a_claim(
    app: Any,
) -> None:
    """celery-aio-pool writes each message into the request that a task has outside of a run, and runs that."""
    seen: list[Any] = []

    @app.task(name="kept", base=IdempotentTask, bind=True, shared=False, idempotency_key="key")
    def task(self: Any, key: str) -> None:
        seen.append((self.request.id, self.idempotency.key, self.idempotency.token > 0))

    for number, key in enumerate(["a", "b", "a"]):
        task.request.update(id=f"m{number}", called_directly=False, args=(key,), kwargs={})
        assert task.request_stack.top is None
        task(key)
    assert seen == [("m0", "a", True), ("m1", "b", True)]
