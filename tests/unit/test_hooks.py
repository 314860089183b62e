"""What the library adds to messages, and to whose."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task, chain, chord, group
from celery.signals import before_task_publish

from celery_idempotent import IdempotentTask
from celery_idempotent.identity.stamp import RUN, read_stamp


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
    return read_stamp(options.get("headers") or {}, options["task_id"]).get(RUN)


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


_ID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def messages_of(base: type, **settings: Any) -> list[str]:
    """Everything that an app publishes, with its ids counted through."""
    app = Celery("off", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(idempotency_store="memory://", **settings)
    for name in ("one", "other"):
        app.task(name=name, base=base, shared=False)(step)
    found: list[str] = []
    ids: dict[str, str] = {}

    def receive(body: Any, headers: Any, properties: Any, **_: Any) -> None:
        text = json.dumps([body, headers, properties], sort_keys=True, default=repr)
        found.append(_ID.sub(lambda each: ids.setdefault(each[0], str(len(ids))), text))

    before_task_publish.connect(receive)
    try:
        one, other, unknown = map(app.signature, ("one", "other", "unknown"))
        one.apply_async(countdown=0, headers={"mine": "1"}, link=other, link_error=other)
        for canvas in (
            chain(one, other),
            chain(one, other, unknown),
            chain(one, chord([one, one], other, app=app)),
            group([one, other], app=app),
            chord([one, one], unknown, app=app),
        ):
            canvas.apply_async()
        app.send_task("unknown", ("argument",))
    finally:
        before_task_publish.disconnect(receive)
        app.close()
    return found


def test_messages_of_an_app_without_tasks_of_ours_are_celerys(app):
    """Though another app of the process has some."""
    assert app.tasks["ours"].idempotency_definition()
    messages = messages_of(Task)
    assert len(messages) > 8
    assert not [each for each in messages if "idempotency" in each]


def test_so_are_those_of_an_app_that_is_switched_off():
    assert messages_of(IdempotentTask, idempotency_mode="off") == messages_of(Task)
    assert messages_of(IdempotentTask) != messages_of(Task)


def test_a_key_that_is_given_all_the_same_goes_nowhere_then(app):
    found: list[Any] = []

    def receive(headers: Any, properties: Any, **_: Any) -> None:
        found.append({**headers, **properties})

    app.conf.idempotency_mode = "off"
    before_task_publish.connect(receive)
    app.tasks["ours"].apply_async(idempotency_key="k", idempotency_scope="s")
    before_task_publish.disconnect(receive)
    assert not [name for name in found[0] if "idempotency" in name]
