"""The connections that the outbox publishes by: a broker that can confirm what it took is asked to."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kombu import Producer, pools
from kombu.exceptions import OperationalError

if TYPE_CHECKING:
    from celery import Celery

#: How long a broker may take to confirm a message; after that it is sent again, under the same task id.
CONFIRM_SECONDS = 10

_pools: Any = pools
_TIMES = "confirm_timeout" in inspect.signature(Producer.publish).parameters


class _Confirmed(Producer):
    """Waits for the confirmation, but not for ever."""

    def publish(self, *args: Any, **options: Any) -> Any:
        """Publish, and return when the broker has the message."""
        if _TIMES and options.get("confirm_timeout") is None:
            options["confirm_timeout"] = CONFIRM_SECONDS
        return super().publish(*args, **options)


class _Producers(_pools.PoolGroup):  # type: ignore[misc]  # kombu is not typed
    """Pools of such producers, which a forked child does not share with its parent."""

    def create(self, connection: object, limit: int) -> object:
        """Make the pool for one broker."""
        return _pools.ProducerPool(_pools.connections[connection], limit=limit, Producer=_Confirmed)


_producers = _pools.register_group(_Producers(limit=_pools.use_global_limit))


@contextmanager
def confirming(app: Celery) -> Iterator[object]:
    """Give a producer that waits until the broker has what it publishes; ``None`` where Celery's own one does.

    RabbitMQ takes messages without an answer: what was written to the socket when it died is gone, without an error.
    """
    connection = app.connection_for_write()
    options = connection.transport_options or {}
    if connection.transport.driver_type != "amqp" or options.get("confirm_publish"):
        yield None
        return
    connection.transport_options = {**options, "confirm_publish": True}
    # After an exception, which may have struck in the middle of a frame, kombu replaces the connection.
    with _producers[connection].acquire(block=True) as producer:
        yield producer


def is_unreachable(app: Celery, error: Exception | None) -> bool:
    """Was it the way to the broker that failed, and not something about this message?"""
    if error is None:
        return False
    connection = app.connection_for_write()
    cause = error.__cause__ or error
    if isinstance(cause, connection.channel_errors):
        return False
    return isinstance(cause, (OperationalError, OSError, *connection.connection_errors))
