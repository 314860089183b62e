"""The view that tells load balancers whether all is well."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.test import RequestFactory

from celery_idempotent.celery.story import OUTBOX_MS
from celery_idempotent.stores import Store, open_store

Ask = Callable[..., Any]


@pytest.fixture
def ask(database: None) -> Ask:
    from celery_idempotent.django.health import health

    def ask(method: str = "get") -> Any:
        answer = health(getattr(RequestFactory(), method)("/health/idempotency/"))
        return answer, json.loads(answer.content or "{}")

    return ask


def test_all_is_well_once_a_sweep_has_ended(store: Store, serve: Any, ask: Ask) -> None:
    serve(store, idempotency_sweep_interval=30)
    answer, found = ask()
    assert (answer.status_code, found["store"]["well"]) == (503, True)
    assert found["sweep"] == {"well": False, "ago_s": None}

    store.note_sweep()
    answer, found = ask()
    assert (answer.status_code, found["well"], found["sweep"]["well"]) == (200, True, True)
    assert "no-store" in answer["Cache-Control"]
    assert [ask(method)[0].status_code for method in ("head", "options")] == [200, 405]


def test_a_message_that_waits_for_over_a_minute_is_trouble(serve: Any, ask: Ask) -> None:
    from celery_idempotent.django.models import OutboxMessage

    store = open_store("django://default")
    serve(store, idempotency_sweep_interval=None)
    assert ask()[0].status_code == 200
    now = store.now_ms()
    ages = {"created_ms": now - OUTBOX_MS - 1000, "due_ms": now}
    OutboxMessage.objects.create(app="a", task="t", task_id="i", payload=b"", **ages)
    answer, found = ask()
    assert (answer.status_code, found["outbox"]["well"]) == (503, False)
    assert found["outbox"]["oldest_s"] >= OUTBOX_MS // 1000
    OutboxMessage.objects.all().delete()


def test_a_store_that_does_not_answer_is_told_and_nothing_else(serve: Any, ask: Ask) -> None:
    serve("redis://:secret@127.0.0.1:1/0")
    answer, found = ask()
    assert answer.status_code == 503
    assert found == {"well": False, "store": {"well": False, "problem": "down"}}
