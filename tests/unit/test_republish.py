"""Messages that are sent again: how long they may stay, where they go, after which errors, and parts of a chord."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from amqp.exceptions import MessageNacked, NotFound
from celery import Celery
from celery.app.task import Context
from kombu import Exchange, Queue, binding
from kombu.exceptions import EncodeError, OperationalError
from kombu.serialization import dumps

from celery_idempotent import IdempotentTask, InvalidKey, StoreUnavailable
from celery_idempotent.celery import republish
from celery_idempotent.celery.callbacks import chord_is_claimed, is_transient
from celery_idempotent.celery.delivery import Delivery


def task(visibility_timeout: int | None = None, *, backend: Any = None, **options: Any) -> Any:
    app = Celery("republish", broker="redis://", backend=backend, set_as_current=False)
    app.conf.idempotency_store = "memory://"
    if visibility_timeout:
        app.conf.broker_transport_options = {"visibility_timeout": visibility_timeout}
    options = {"idempotency_on_conflict": "wait", **options}
    app.task(base=IdempotentTask, shared=False, name="nothing", **options)(nothing)
    return app.tasks["nothing"]


def nothing() -> None:
    """Do nothing."""


def longest_wait_ms(task: Any, *, eager: bool = False) -> int | None:
    run = object.__new__(Delivery)
    run.task, run.request = task, SimpleNamespace(is_eager=eager)
    return run.longest_wait_ms()


@pytest.mark.parametrize(("timeout", "longest"), [(None, 900_000), (20, 5_000), (1, 250)])
def test_a_wait_is_over_long_before_the_broker_takes_the_message_for_lost(timeout, longest):
    assert longest_wait_ms(task(timeout)) == longest


def test_a_message_that_is_acknowledged_already_is_never_taken_for_lost():
    assert longest_wait_ms(task(20, acks_late=False)) is None


def test_nothing_waits_in_the_process_that_it_waits_for():
    assert longest_wait_ms(task(20), eager=True) == 0


@pytest.mark.parametrize(
    ("exchange", "key", "queue"),
    [
        ("orders", "order", "all"),
        ("orders", "order.new.paid", "all"),
        ("orders", "b.paid", "paid"),
        ("orders", "paid", None),
        ("orders", "a.b.paid", None),
        ("celery_delayed_27", "0." * 25 + "1.0.1.order.x", "all"),
        ("direct", "k", "straight"),
        ("direct", "other", None),
        ("headers", "whatever", "heads"),
        ("elsewhere", "order.new", None),
    ],
)
def test_the_queue_of_a_delivery_is_found_by_its_routing_key(exchange, key, queue):
    app = task().app
    topic = Exchange("orders", "topic")
    app.conf.task_queues = [
        Queue("all", topic, "order.#"),
        Queue("paid", [binding(topic, "*.paid"), binding(Exchange("direct"), "none")]),
        Queue("straight", Exchange("direct"), "k"),
        Queue("heads", Exchange("headers", "headers")),
    ]
    found = republish.origin(app, {"exchange": exchange, "routing_key": key})
    assert found.get("idempotency_queue") == queue
    assert not found.get("idempotency_broadcast")


def raised(error: Exception, module: str = "tests") -> Exception:
    """Return the exception as code of this module raises it."""
    scope: dict[str, Any] = {"__name__": module}
    exec("def fail(error):\n    raise error", scope)
    with pytest.raises(type(error)) as found:
        scope["fail"](error)
    return found.value


def wrapped(error: Exception) -> Exception:
    """Return what kombu makes of an error of the code of a value."""
    with pytest.raises(EncodeError) as found:
        dumps(Mock(__json__=Mock(side_effect=error)), serializer="json")
    return found.value


@pytest.mark.parametrize(
    ("transient", "error"),
    [
        (True, wrapped(ConnectionResetError())),
        (False, wrapped(RecursionError())),
        *((False, kind("x")) for kind in (EncodeError, InvalidKey, TypeError, AttributeError)),
        *((True, kind("x")) for kind in (OperationalError, ConnectionResetError, NotFound)),
        *((True, kind("x")) for kind in (MessageNacked, StoreUnavailable, RuntimeError)),
    ],
    ids=repr,
)
def test_errors_of_a_broker_or_a_store_are_transient_others_are_not(transient, error):
    assert is_transient(raised(error)) is transient


@pytest.mark.parametrize("module", ["kombu.transport.redis", "amqp.channel", "redis.client"])
def test_errors_of_a_client_whose_connection_breaks_are_transient(module):
    """As kombu does: ``'NoneType' object has no attribute 'client'``, of a channel that was closed meanwhile."""
    error = raised(AttributeError("'NoneType' object has no attribute 'client'"), module)
    assert is_transient(error)
    assert not is_transient(raised(EncodeError("x"), module))


@pytest.mark.parametrize(
    ("claim", "claimed"), [(None, False), (b"a process", True), (b"done", False)]
)
def test_a_chord_is_claimed_until_it_is_done(claim, claimed):
    """Set by hand here; Celery's own claim, on Redis: ``tests/delivery/test_histories.py``."""
    part, group = task(backend="cache+memory://"), f"claimed: {claim}"
    if claim:
        part.backend.set(part.backend.get_key_for_group(group, ".c"), claim)
    assert chord_is_claimed(part, Context(group=group)) is claimed
    assert not chord_is_claimed(task(), Context(group=group)), "without a result backend"


def test_a_chord_whose_backend_does_not_answer_may_be_claimed(monkeypatch):
    part = task(backend="cache+memory://")
    monkeypatch.setattr(part.backend, "get", lambda _key: 1 / 0)
    assert chord_is_claimed(part, Context(group="g"))
