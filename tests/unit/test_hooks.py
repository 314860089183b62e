"""What the library adds to messages, and to whose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task, chain, chord
from celery.signals import before_task_publish

from celery_idempotent import IdempotentTask
from celery_idempotent.hooks import RUN, said_of


def step() -> None: ...


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("hooks", broker="memory://", set_as_current=False)
    app.conf.idempotency_store = "memory://"
    for name, base in {"ours": IdempotentTask, "theirs": Task}.items():
        app.task(name=name, base=base, shared=False)(step)
    yield app
    app.close()


@pytest.fixture
def published() -> Iterator[list[Any]]:
    """The chains of what is published."""
    found: list[Any] = []

    def receive(body: Any, **_: Any) -> None:
        found.append(body[2]["chain"])

    before_task_publish.connect(receive)
    yield found
    before_task_publish.disconnect(receive)


def marks(sig: Any) -> Any:
    options = sig["options"]
    return said_of(options.get("headers") or {}, options["task_id"]).get(RUN)


@pytest.mark.parametrize("head", ["ours", "theirs"])
def test_the_last_step_of_a_chain_is_marked_if_it_is_ours(app, published, head):
    first = app.signature(head)
    result = chain(first, app.signature("ours")).apply_async()
    assert marks(published[0][0]) == result.parent.id


@pytest.mark.parametrize("head", ["ours", "theirs"])
def test_a_step_of_celerys_own_class_is_left_alone(app, published, head):
    chain(app.signature(head), app.signature("theirs")).apply_async()
    assert "headers" not in published[0][0]["options"]


def test_so_is_the_body_of_a_chord_at_the_end(app, published):
    app.conf.result_backend = "cache+memory://"
    for name, marked in {"ours": True, "theirs": False}.items():
        last = chord([app.signature("ours"), app.signature("ours")], app.signature(name), app=app)
        chain(app.signature("ours"), last).apply_async()
        assert bool(marks(published[-1][0]["kwargs"]["body"])) is marked


def test_a_step_that_is_not_known_here_is_marked(app, published):
    """It may be ours where it runs."""
    result = chain(app.signature("ours"), app.signature("elsewhere")).apply_async()
    assert marks(published[0][0]) == result.parent.id
