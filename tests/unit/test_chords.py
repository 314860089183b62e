"""Which errors of sending are worth another try, and the result backend that is asked meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from amqp.exceptions import MessageNacked, NotFound
from celery import Celery
from celery.backends.base import KeyValueStoreBackend
from kombu.exceptions import EncodeError, OperationalError

from celery_idempotent import InvalidKey, StoreUnavailable
from celery_idempotent.celery.chords import is_permanent, retryable


def raised(error: Exception, module: str = "tests") -> Exception:
    """Return the exception as code of this module raises it."""
    scope: dict[str, Any] = {"__name__": module}
    exec("def fail(error):\n    raise error", scope)
    with pytest.raises(type(error)) as found:
        scope["fail"](error)
    return found.value


@pytest.mark.parametrize(
    "error", [EncodeError("x"), InvalidKey("x"), TypeError("x"), KeyError("x"), AttributeError("x")]
)
def test_what_a_signature_or_a_value_causes_is_permanent(error):
    assert is_permanent(raised(error))


@pytest.mark.parametrize(
    "error",
    [
        OperationalError("x"),
        ConnectionResetError("x"),
        NotFound("x"),
        MessageNacked("x"),
        StoreUnavailable("x"),
        RuntimeError("x"),
    ],
)
def test_what_a_broker_or_a_store_says_is_not(error):
    assert not is_permanent(raised(error))


@pytest.mark.parametrize("module", ["kombu.transport.redis", "amqp.channel", "redis.client"])
def test_nor_is_what_a_client_stumbles_over_whose_connection_breaks(module):
    """As kombu does: ``'NoneType' object has no attribute 'client'``, of a channel that was closed meanwhile."""
    error = raised(AttributeError("'NoneType' object has no attribute 'client'"), module)
    assert not is_permanent(error)
    assert is_permanent(raised(EncodeError("x"), module))


def test_without_an_error_nothing_is_permanent():
    assert not is_permanent(None)


def test_a_backend_connects_once_however_many_tasks_send_something():
    """As those of MongoDB and Cassandra do: when they are first used."""
    connections: list[object] = []

    class LazyBackend(KeyValueStoreBackend):
        _connection: Any = None

        def set(self, key: Any, value: Any) -> None:
            if self._connection is None:
                self._connection = object()
                connections.append(self._connection)

        def get(self, key: Any) -> None: ...

    app = Celery("lazy", set_as_current=False)
    backend = LazyBackend(app)
    for task_id in ("a", "b"):
        retryable(backend).mark_as_done(task_id, 42)
    assert len(connections) == 1
    app.close()
