"""How long a message may stay with a worker that does not run it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue, binding

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import republish
from celery_idempotent.celery.delivery import Delivery


def task(visibility_timeout: int | None = None, **options: Any) -> Any:
    app = Celery("republish", broker="redis://", set_as_current=False)
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
