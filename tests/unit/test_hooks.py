"""What the library adds to messages, and to whose; what it tells Celery's hooks and signals."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, Task, chain, chord
from celery.canvas import Signature
from celery.signals import task_postrun, task_success

from celery_idempotent import IdempotentTask
from celery_idempotent.keys.stamp import RUN, read_stamp
from celery_idempotent.testing.delivery import deliver_message, message_of
from tests.support.programs import run


def step() -> None: ...


@pytest.fixture
def app(app: Celery) -> Celery:
    for name, base in {"ours": IdempotentTask, "theirs": Task}.items():
        app.task(name=name, base=base, shared=False)(step)
    return app


def marks(sig: Any) -> Any:
    options = sig["options"]
    return read_stamp(options.get("headers") or {}, options["task_id"]).get(RUN)


@pytest.mark.parametrize("head", ["ours", "theirs"])
def test_the_last_step_of_a_chain_is_marked_if_its_first_is_ours(app, published, head):
    result = chain(app.signature(head), app.signature("elsewhere")).apply_async()
    step = published[0].embed["chain"][0]
    assert type(step) is Signature
    assert marks(step) == (result.parent.id if head == "ours" else None)
    assert head == "ours" or "headers" not in step["options"]


def test_so_is_the_body_of_a_chord_at_the_end(app, published):
    app.conf.result_backend = "cache+memory://"
    ours = app.signature("ours")
    chain(ours, chord([ours, ours], app.signature("theirs"), app=app)).apply_async()
    assert type(published[0].embed["chain"][0]) is chord
    assert marks(published[0].embed["chain"][0]["kwargs"]["body"])


def test_a_key_that_is_given_all_the_same_goes_nowhere_then(app, published):
    app.conf.idempotency_mode = "off"
    app.tasks["ours"].apply_async(idempotency_key="k", idempotency_scope="s")
    (message,) = published
    assert not [n for n in message.headers | message.properties if "idempotency" in n]


_SNAPSHOT = """
from celery import Celery, Task, canvas, chain, chord, group, signals
from celery.canvas import Signature
from celery.signals import before_task_publish
import json, re, sys

def world():
    kinds = [canvas.group, canvas._chain, canvas._chord]
    methods = [vars(kind).get(name) for kind in kinds for name in ("apply_async", "apply")]
    methods += [Celery.send_task, Celery.close, Task.apply_async, Task.__call__]
    connected = {
        name: len(signal.receivers or ())
        for name, signal in vars(signals).items() if hasattr(signal, "receivers")
    }
    return methods, connected

def messages():
    app = Celery("plain", broker="memory://", backend="cache+memory://", set_as_current=False)
    for name in ("one", "other"):
        @app.task(name=name, shared=False)
        def step(*args): ...
    found, ids = [], {}
    def receive(body, headers, properties, **_):
        text = json.dumps([body, headers, properties], sort_keys=True, default=repr)
        found.append(re.sub("[0-9a-f-]{36}", lambda each: ids.setdefault(each[0], str(len(ids))), text))
    before_task_publish.connect(receive, weak=False)
    one, other = map(app.signature, ("one", "other"))
    one.apply_async(headers={"idempotency_key": "mine"}, link=other)
    chain(one, other).apply_async(idempotency_key="mine")
    chain(one, chord([one, one], other, app=app)).apply_async()
    group([one, other], app=app).apply_async(headers={"idempotency_scope": "mine"})
    app.send_task("elsewhere", idempotency_key="mine")
    before_task_publish.disconnect(receive)
    return found

import celery.app.amqp, celery.worker.request, celery.contrib.django.task
before, plain = world(), messages()
assert len(plain) == 6
"""

_PROGRAM = (
    _SNAPSHOT
    + """
import pkgutil, importlib, celery_idempotent.celery
celery_idempotent.IdempotentTask
for each in pkgutil.iter_modules(celery_idempotent.celery.__path__, "celery_idempotent.celery."):
    importlib.import_module(each.name)
import celery_idempotent.checks, celery_idempotent.request, celery_idempotent.testing
assert world() == before, "imports patch and connect nothing"
assert messages() == plain
app = Celery("ours", broker="memory://", set_as_current=False)
app.conf.idempotency_store = "memory://"
@app.task(base=celery_idempotent.IdempotentTask, shared=False)
def ours(): ...
assert world() == before, "declaring a task connects nothing: it is bound when it is first used"
ours.name
after = world()
assert after[0] == before[0], "nothing is patched"
assert after[1] != before[1]
@app.task(base=celery_idempotent.IdempotentTask, shared=False)
def more(): ...
more.name
assert world() == after, "once"
assert messages() == plain
"""
)


def test_only_an_app_with_idempotent_tasks_is_touched():
    run("-c", _PROGRAM)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_hooks_and_receivers_of_a_duplicate_can_tell_it_from_a_run(app, eager, fails):
    told: dict[str, list[Any]] = {}

    def tell(name: str, task: Any) -> None:
        told.setdefault(name, []).append(task.request.get("idempotency_replayed"))

    def hook(name: str) -> Any:
        return lambda self, *_: tell(name, self)

    names = ("before_start", "on_success", "on_failure", "after_return")
    base = type("Hooked", (IdempotentTask,), {name: hook(name) for name in names})

    @app.task(base=base, idempotency_key="n", idempotency_permanent_errors=KeyError, shared=False)
    def hooked(n: int) -> int:
        return {False: n}[fails]

    receivers = {
        signal: lambda sender, signal=signal, **_: tell(signal.name, sender)
        for signal in (task_postrun, task_success)
    }
    for signal, receiver in receivers.items():
        signal.connect(receiver)
    for _ in range(2):
        if eager:
            hooked.apply((1,))
        else:
            deliver_message(hooked, message_of(hooked, (1,), {}))
    for signal, receiver in receivers.items():
        signal.disconnect(receiver)
    assert told.pop("before_start") == [None, None]
    ended = {"on_failure"} if fails else {"on_success", "task_success"}
    assert told == {name: [False, True] for name in {"after_return", "task_postrun"} | ended}
