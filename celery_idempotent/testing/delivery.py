"""Delivers messages here and now, as the child process of a worker does; without worker or broker."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery import Celery, states
from celery.app.trace import build_tracer
from celery.canvas import Signature
from celery.signals import before_task_publish
from kombu.serialization import dumps, loads

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyTask, Sig


@dataclass(frozen=True, slots=True)
class Message:
    """A published message: the task's name, the headers, and the body after its way through the serializer."""

    task: str
    headers: dict[str, Any]
    args: Sequence[object]
    kwargs: Mapping[str, object]
    embed: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a delivery ended.

    ``state`` is Celery's: ``SUCCESS``, ``FAILURE``, ``RETRY`` (the message was published again, with a countdown),
    ``REJECTED`` or ``IGNORED``. ``value`` is the result, or the exception. ``published`` has the messages that the
    delivery published: callbacks, the republished message itself. They reach no broker.
    """

    state: str
    value: Any
    published: tuple[Message, ...] = ()


_capturing = threading.RLock()


@contextmanager
def _capture(app: Celery) -> Iterator[list[Message]]:
    """Take every message that the app publishes in the block; none reaches a broker, and none is run eagerly."""
    found: list[Message] = []
    amqp: Any = app.amqp

    def take(_: object, name: str, message: Any, **options: Any) -> None:
        headers = {**message.headers, **(options.get("headers") or {})}
        before_task_publish.send(
            sender=name, headers=headers, body=message.body, properties=message.properties
        )
        kind, coding, body = dumps(
            message.body, options.get("serializer") or app.conf.task_serializer
        )
        args, kwargs, embed = loads(body, kind, coding, accept=[kind])
        found.append(Message(name, headers, args, kwargs, embed))

    with _capturing:
        sender, eager = amqp.send_task_message, app.conf.task_always_eager
        amqp.send_task_message, app.conf.task_always_eager = take, False
        try:
            yield found
        finally:
            amqp.send_task_message, app.conf.task_always_eager = sender, eager


def message_of(
    call: AnyTask | Sig, args: Sequence[object], kwargs: Mapping[str, object]
) -> Message:
    """Return the message that a call of the task publishes, also where the app runs tasks eagerly."""
    task = task_of(call)
    with _capture(task.app) as found:
        # Without a result, the backend is not asked to listen for one.
        call.apply_async(tuple(args), dict(kwargs), ignore_result=True)
    if not found:
        raise AssertionError(f"a call of {task.name} published no message: its key is taken")
    found[-1].headers["ignore_result"] = task.ignore_result
    return found[-1]


def task_of(call: AnyTask | Sig) -> AnyTask:
    """Return the task that is called: a signature has one."""
    return call.type if isinstance(call, Signature) else call


def _trace(
    task: AnyTask, message: Message, redelivered: bool, published: list[Message]
) -> Delivery:
    request = {
        **message.headers,
        **message.embed,
        "args": message.args,
        "kwargs": message.kwargs,
        "properties": {"correlation_id": message.headers["id"]},
        "delivery_info": {"redelivered": redelivered},
        "hostname": "test@localhost",
        "is_eager": False,
    }
    tracer = build_tracer(task.name, task, app=task.app)
    value, info, *_ = tracer(message.headers["id"], [*message.args], {**message.kwargs}, request)
    state, value = (states.SUCCESS, value) if info is None else (info.state, info.retval)
    return Delivery(state, value, tuple(published))


def deliver(task: AnyTask | Sig, *args: object, **kwargs: object) -> Delivery:
    """Call the task and deliver the message once.

    A signature brings options of the call: ``deliver(charge.s(1999).set(idempotency_key="order-17"))``.
    """
    return deliver_message(task_of(task), message_of(task, args, kwargs))


def deliver_message(task: AnyTask, message: Message, *, redelivered: bool = False) -> Delivery:
    """Deliver a message that a delivery published: a retry, a republished message."""
    with _capture(task.app) as published:
        return _trace(task, message, redelivered, published)


def deliver_twice(
    task: AnyTask | Sig, *args: object, **kwargs: object
) -> tuple[Delivery, Delivery]:
    """Call the task once and deliver the message twice, as a broker does when the acknowledgement is lost."""
    message, called = message_of(task, args, kwargs), task_of(task)
    return deliver_message(called, message), deliver_message(called, message, redelivered=True)


def deliver_at_once(task: AnyTask | Sig, n: int, *args: object, **kwargs: object) -> list[Delivery]:
    """Call the task ``n`` times and deliver the messages at the same time, each in a thread.

    One of them, at random, runs; by default the state of the others is ``RETRY``. ``published`` of the last delivery
    has the messages of all.
    """
    messages = [message_of(task, args, kwargs) for _ in range(n)]
    ready = threading.Barrier(n)
    with _capture(task_of(task).app) as published, ThreadPoolExecutor(n) as pool:

        def go(message: Message) -> Delivery:
            ready.wait(timeout=30)
            try:
                return _trace(task_of(task), message, False, published)
            finally:
                # Those of this thread: a test database with an open session cannot be dropped.
                database = sys.modules.get("django.db")
                if database is not None and sys.modules["django.conf"].settings.configured:
                    database.connections.close_all()

        return list(pool.map(go, messages))
