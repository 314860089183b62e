"""Which errors of sending are worth another try."""

from __future__ import annotations

from typing import Any

import pytest
from amqp.exceptions import MessageNacked, NotFound
from kombu.exceptions import EncodeError, OperationalError

from celery_idempotent import InvalidKey, StoreUnavailable
from celery_idempotent.celery.callbacks import is_transient


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
def test_errors_of_a_signature_or_a_value_are_permanent(error):
    assert not is_transient(raised(error))


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
def test_errors_of_a_broker_or_a_store_are_transient(error):
    assert is_transient(raised(error))


@pytest.mark.parametrize("module", ["kombu.transport.redis", "amqp.channel", "redis.client"])
def test_errors_of_a_client_whose_connection_breaks_are_transient(module):
    """As kombu does: ``'NoneType' object has no attribute 'client'``, of a channel that was closed meanwhile."""
    error = raised(AttributeError("'NoneType' object has no attribute 'client'"), module)
    assert is_transient(error)
    assert not is_transient(raised(EncodeError("x"), module))
