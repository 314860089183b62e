"""Finds the queue that a delivery came from, so that its copies go to that queue alone.

An exchange may give one message to several queues: a fanout exchange (kombu's ``Broadcast``) to all, a topic exchange
to those whose binding matches. A copy that goes through the exchange again would come out of each of them::

    queue a ─ worker A: runs                               queue a ─ worker A: runs
    queue b ─ worker B: Held ─ exchange ─┬─ queue a …      queue b ─ worker B: Held ─ queue b
                                         └─ queue b …
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kombu import Exchange, Queue

from celery_idempotent.celery.typed import Options
from celery_idempotent.keys.stamp import as_mapping

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.task import Context

#: In the properties of a request: its queue, and whether its exchange gives each message to all queues. The worker's
#: main process notes them: ``-Q``, ``celery control add_consumer`` and the name of a Broadcast queue are its own.
_QUEUE, _BROADCAST = "idempotency_queue", "idempotency_broadcast"

#: Celery's delayed delivery in RabbitMQ: the routing key has the delay in binary before it.
_DELAYED_EXCHANGE = "celery_delayed_"
_DELAY = re.compile(r"(?:[01]\.){28}")


def origin(app: Celery, delivery_info: Mapping[str, object]) -> Options:
    """Return the properties that say where a delivery came from; none for the default exchange."""
    exchange, key = str(delivery_info.get("exchange") or ""), str(delivery_info.get("routing_key"))
    if not exchange:
        return {}
    if exchange.startswith(_DELAYED_EXCHANGE):
        exchange, key = "", _DELAY.sub("", key)
    for name, bound, pattern in _bindings(app.amqp.queues.consume_from):
        if exchange in ("", bound.name) and _matches(bound.type, pattern, key):
            return {_QUEUE: name, _BROADCAST: bound.type == "fanout"}
    return {}


def _bindings(queues: Mapping[str, Any]) -> Iterator[tuple[str, Exchange, str]]:
    for name, queue in list(queues.items()):
        for each in queue.bindings or (queue,):
            if each.exchange is not None:
                yield name, each.exchange, each.routing_key or ""


def _matches(kind: str, pattern: str, key: str) -> bool:
    """Would an exchange of this kind give a message with this routing key to the binding?"""
    if kind == "direct":
        return pattern == key
    if kind != "topic":
        return True
    words = {"*": r"[^.]*", "#": ".*"}
    regex = r"\.".join(words.get(word, re.escape(word)) for word in pattern.split("."))
    # "#" also stands for no word at all.
    regex = regex.replace(r".*\.", r"(?:.*\.)?").replace(r"\..*", r"(?:\..*)?")
    return re.fullmatch(regex, key) is not None


def is_broadcast(request: Context) -> bool:
    """Does the exchange of this delivery give each message to all of its queues?"""
    return bool(as_mapping(request.properties).get(_BROADCAST))


def way_back(app: Celery, request: Context) -> Options:
    """Return the options that publish a copy to the queue of this delivery; none if that is not known."""
    info = as_mapping(request.delivery_info)
    name = as_mapping(request.properties).get(_QUEUE)
    if name is None and info.get("exchange") == "":
        name = info.get("routing_key")
    if not name:
        return {}
    only = Queue(str(name), Exchange(type="direct"), routing_key=str(name), no_declare=True)
    # Explicit, because those of task_routes would come before those of the queue.
    options: Options = {"queue": only, "exchange": "", "routing_key": only.name}
    if name in app.amqp.queues:
        options["declare"] = [app.amqp.queues[str(name)]]
    return options
