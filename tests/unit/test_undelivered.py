"""Which errors of sending are worth another try, and when a part of a chord may be returned again."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from amqp.exceptions import MessageNacked, NotFound
from celery import Celery
from celery.app.task import Context
from kombu.exceptions import EncodeError, OperationalError
from kombu.serialization import dumps

from celery_idempotent import IdempotentTask, InvalidKey, StoreUnavailable
from celery_idempotent.celery.callbacks import chord_is_claimed, is_transient


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


def part(**options: Any) -> Any:
    """Return a task."""
    app = Celery("chords", set_as_current=False, **options)
    app.conf.idempotency_store = "memory://"

    @app.task(base=IdempotentTask, shared=False)
    def run() -> None: ...

    return run


@pytest.mark.parametrize(
    ("claim", "claimed"), [(None, False), (b"a process", True), (b"done", False)]
)
def test_a_chord_is_claimed_until_it_is_done(claim, claimed):
    """Set by hand here; Celery's own claim, on Redis: ``tests/delivery/test_histories.py``."""
    task, group = part(backend="cache+memory://"), f"claimed: {claim}"
    if claim:
        task.backend.set(task.backend.get_key_for_group(group, ".c"), claim)
    assert chord_is_claimed(task, Context(group=group)) is claimed
    assert not chord_is_claimed(part(), Context(group=group)), "without a result backend"


def test_a_chord_whose_backend_does_not_answer_may_be_claimed(monkeypatch):
    task = part(backend="cache+memory://")
    monkeypatch.setattr(task.backend, "get", lambda _key: 1 / 0)
    assert chord_is_claimed(task, Context(group="g"))
