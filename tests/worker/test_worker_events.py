"""Events of a real worker: told to whoever listens, under names that change nothing of what Celery's State says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from celery.events.state import State

from tests.support.apps import close_app, environment
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for
from tests.worker.app import make_app

pytestmark = [pytest.mark.worker, pytest.mark.redis]


def test_a_worker_that_sends_task_events_sends_outcomes_and_flower_s_state_is_as_before(
    private_redis: EmbeddedRedis, start_worker: Callable[..., Any]
) -> None:
    url = private_redis.url()
    settings = {"broker_url": url, "result_backend": url, "worker_send_task_events": True}
    app = make_app(settings)
    state: Any = State()
    seen: list[dict[str, Any]] = []
    ready = threading.Event()
    receivers: list[Any] = []

    def note(event: dict[str, Any]) -> None:
        seen.append(event)
        state.event(dict(event))

    def listen() -> None:
        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(connection, handlers={"*": note})
            receiver.on_consume_ready = lambda *_, **__: ready.set()
            receivers.append(receiver)
            for _ in receiver.itercapture(limit=None, timeout=None, wakeup=False):
                pass

    def types(task_id: str) -> list[str]:
        return [event["type"] for event in seen if event.get("uuid") == task_id]

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    start_worker("tests.worker.events_app", concurrency=2, env=environment(settings), fresh=True)
    assert ready.wait(20)
    first, second = (app.tasks["keyed"].delay("k") for _ in range(2))
    assert first.get(timeout=20) == second.get(timeout=20)
    ended = {first.id: "idempotency-settled", second.id: "idempotency-replayed"}
    if "idempotency-replayed" in types(first.id):
        ended = {second.id: "idempotency-settled", first.id: "idempotency-replayed"}
    for task_id, outcome in ended.items():
        wanted = {outcome, "task-succeeded"}
        wait_for(partial(lambda each, all_of: all_of <= set(types(each)), task_id, wanted), 20)
        assert state.tasks[task_id].state == "SUCCESS"
    replayed = next(each for each in seen if each["type"] == "idempotency-replayed")
    assert (replayed["task"], replayed["outcome"]) == ("keyed", "replayed")
    assert replayed["seconds"] >= 0
    assert "k" not in replayed.values()
    receivers[0].should_stop = True
    thread.join(20)
    close_app(app)
