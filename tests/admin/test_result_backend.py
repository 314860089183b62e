"""A result backend that hangs costs a page some seconds, and the web server nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from celery_idempotent.stores import Store
from tests.admin.pages import address, text
from tests.support.admin import claim
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from django.test import Client

Serve = Callable[..., Any]


def asking() -> int:
    """How many questions have no answer yet."""
    return sum(thread.name == "idempotency-result" for thread in threading.enumerate())


@pytest.fixture
def backend(
    memory: Store, serve: Serve, private_redis: EmbeddedRedis
) -> Iterator[tuple[Any, EmbeddedRedis]]:
    """An app whose results are in a Redis of the test's own, and one of them."""
    claim(memory, "a", task_id="task-1")
    app = serve(memory, result_backend=private_redis.url())
    app.backend.store_result("task-1", {"paid": "in full"}, "SUCCESS")
    yield app, private_redis
    private_redis.thaw()
    wait_for(lambda: asking() == 0, what="the end of the questions")
    app.backend.client.close()


def test_a_frozen_result_backend_costs_a_page_some_seconds(
    backend: tuple[Any, EmbeddedRedis], operator: Client
) -> None:
    from celery_idempotent.django.admin.results import BACKEND_TIMEOUT

    app, server = backend
    url = address("a", "result")
    assert "in full" in text(operator.get(url))
    wait_for(lambda: asking() == 0, what="the end of the question")
    server.freeze()
    started = time.monotonic()
    page = operator.get(url)
    took = time.monotonic() - started
    assert page.status_code == 200
    assert f"The result backend does not answer within {BACKEND_TIMEOUT:g} seconds." in text(page)
    assert took >= BACKEND_TIMEOUT
    # Celery itself gives it two minutes.
    assert took < 30 < app.conf.redis_socket_timeout
    server.thaw()
    wait_for(lambda: asking() == 0, what="the end of the question")
    assert "in full" in text(operator.get(url))


def test_however_many_ask_few_threads_wait(
    backend: tuple[Any, EmbeddedRedis], operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from celery_idempotent.django.admin import results

    monkeypatch.setattr(results, "BACKEND_TIMEOUT", 0.2)
    app, server = backend
    server.freeze()

    def ask(_: int) -> str:
        return results.result_of(app, "task-1", may_see=True).trouble

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(24)))
    assert all("does not answer within" in answer for answer in answers)
    assert 0 < asking() <= 4
