"""An error from the end of a transaction is retried as ``autoretry_for`` retries one of the body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_idempotent.celery import running
from celery_idempotent.celery.task import IdempotentTask
from celery_idempotent.protocol import atomic, runner
from celery_idempotent.records import State
from tests.unit.test_atomic import Colliding, Collision, Database, DatabaseError

TRIES = atomic.MAX_REPEATS + 1


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_FIRST_REPEAT", 0.0)


@pytest.fixture
def database() -> Database:
    return Database()


@pytest.fixture
def make(database: Database) -> Callable[..., Any]:
    """A function that makes an atomic task which writes one row, whose commit collides so many times."""

    def make(times: int = 0, **options: Any) -> Any:
        app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
        app.conf.idempotency_store = database
        Colliding(database, "commit", times)

        @app.task(
            base=IdempotentTask,
            name="shop.charge",
            shared=False,
            bind=True,
            idempotency_key="order",
            idempotency_atomic=True,
            **options,
        )
        def charge(self: Any, order: int) -> int:
            database.write()
            return int(self.request.retries)

        return charge

    return make


def test_a_task_that_wants_it_is_retried_with_its_key_free(make, database):
    result = make(TRIES, autoretry_for=(DatabaseError,)).apply((1,))
    assert (result.state, result.result) == ("SUCCESS", 1)
    assert database.effect
    assert [stored.record.state for stored in database.records.values()] == [State.COMPLETED] * 2


def test_so_many_times_as_it_says(make, database):
    result = make(99, autoretry_for=(DatabaseError,), max_retries=2).apply((1,))
    assert (result.state, type(result.result)) == ("FAILURE", Collision)
    assert database.at_commit.times == 99 - 3 * TRIES
    assert database.records == {}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"autoretry_for": (KeyError,)},
        {"autoretry_for": (DatabaseError,), "dont_autoretry_for": (Collision,)},
    ],
)
def test_one_that_does_not_fails_as_celery_would(make, database, options):
    result = make(TRIES, **options).apply((1,))
    assert (result.state, type(result.result)) == ("FAILURE", Collision)
    assert database.records == {}


def test_what_is_no_collision_is_retried_by_celery_and_not_at_once(make, database):
    task = make(autoretry_for=(DatabaseError,))
    failures = [DatabaseError("a constraint")]

    def fail() -> None:
        if failures:
            raise failures.pop()

    database.at_commit = fail
    result = task.apply((1,))
    assert (result.state, result.result) == ("SUCCESS", 1)


def test_our_own_errors_are_no_errors_of_the_body(make, database):
    """A task that ended its transaction itself would double its effect."""
    from celery_idempotent.errors import StoreMisconfigured

    task = make(autoretry_for=(Exception,))
    database.at_settle = StoreMisconfigured("the task committed")
    result = task.apply((1,))
    assert (result.state, result.result) == ("FAILURE", database.at_settle)


def test_a_published_retry_finds_its_key_free_and_has_the_backoff(make, database, monkeypatch):
    """In a worker: what Celery's own wrapper asks for is what is sent."""
    task = make(TRIES, autoretry_for=(DatabaseError,), retry_backoff=7, retry_jitter=False)
    sent: list[dict[str, Any]] = []

    def send(name: str, args: Any, kwargs: Any, **options: Any) -> None:
        assert (name, tuple(args)) == ("shop.charge", (1,))
        assert database.records == {}
        sent.append(options)

    monkeypatch.setattr(task.app, "send_task", send)
    task.push_request(
        id="t1", args=(1,), kwargs={}, called_directly=False, is_eager=False, delivery_info={}
    )
    try:
        with pytest.raises(Exception) as caught:
            task(1)
    finally:
        task.pop_request()
    assert type(caught.value).__name__ == "Retry"
    assert [(options["retries"], options["countdown"]) for options in sent] == [(1, 7)]


def test_the_task_itself_is_left_as_it_was(make):
    task = make(autoretry_for=(DatabaseError,), retry_kwargs={"max_retries": 0})
    task = task._get_current_object()
    task.push_request(id="t1", args=(1,), kwargs={}, called_directly=False, is_eager=True)
    before = dict(vars(task))
    error = Collision()
    assert running.late_outcome(task, error) is error
    task.pop_request()
    assert vars(task) == before
