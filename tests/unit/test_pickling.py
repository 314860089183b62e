"""Exceptions that leave a task pickle with their whole chain: a worker with ``tblib`` sends all of it."""

from __future__ import annotations

import io
import pickle
from types import TracebackType
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry
from kombu.exceptions import OperationalError
from tblib import pickling_support  # type: ignore[import-untyped]

from celery_idempotent import (
    IdempotentTask,
    InProgress,
    StoreUnavailable,
)
from celery_idempotent.protocol import shield
from celery_idempotent.records import Identity
from tests.support.records import claim_key

IDENTITY = Identity(namespace="body", key="k")


class Pickler(pickle.Pickler):
    """Pickles as in a process that called ``tblib.pickling_support.install()``."""

    def reducer_override(self, found: Any) -> Any:
        if isinstance(found, BaseException):
            return pickling_support.pickle_exception(found)
        if isinstance(found, TracebackType):
            return pickling_support.pickle_traceback(found)
        return NotImplemented


class Unpicklable(Exception):
    """Holds what cannot be sent, as clients' errors hold their connections."""

    def __init__(self) -> None:
        super().__init__()
        self.connection = lambda: None


def raised_by(app: Celery, body: Any, kind: type[BaseException], **options: Any) -> BaseException:
    """Return what a delivery of a task with this body raises, after it was pickled."""

    def run(self: Any, key: str) -> object:
        return body(self)

    app.conf.task_publish_retry = False
    options["idempotency_key"] = "key"
    task = app.task(name="body", base=IdempotentTask, bind=True, shared=False, **options)(run)
    task.push_request(
        id="message", called_directly=False, is_eager=False, delivery_info={}, args=("k",)
    )
    try:
        with pytest.raises(kind) as found:
            task("k")
    finally:
        task.pop_request()
    pickled = io.BytesIO()
    Pickler(pickled).dump(found.value)
    loaded: BaseException = pickle.loads(pickled.getvalue())
    return loaded


def test_a_store_that_fails(app, store, monkeypatch):
    def claim(*_: object) -> None:
        raise StoreUnavailable("gone") from Unpicklable()

    monkeypatch.setattr(store, "claim", claim)
    monkeypatch.setattr("celery_idempotent.protocol.run.CLAIM_SECONDS", 0.01)
    assert raised_by(app, lambda _: None, Ignore)


@pytest.mark.parametrize(
    ("policy", "kind"), [("retry", Retry), ("raise", InProgress), ("ignore", Ignore)]
)
def test_a_conflict(app, store, policy, kind):
    claim_key(store, IDENTITY)
    assert raised_by(app, lambda _: None, kind, idempotency_on_conflict=policy)


def test_a_copy_that_a_broker_does_not_take(app, store, monkeypatch):
    class Gone(OperationalError):
        def __init__(self, *_: object) -> None:
            super().__init__("gone")
            self.connection = lambda: None

    def send(*_: object, **__: object) -> None:
        raise Gone

    claim_key(store, IDENTITY)
    monkeypatch.setattr(shield.time, "sleep", lambda _: None)
    monkeypatch.setattr(app, "send_task", send)
    monkeypatch.setattr(app.amqp, "send_task_message", send)
    assert raised_by(app, lambda _: None, Reject)
