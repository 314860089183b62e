"""An app on the memory of this process; it has its own tasks and Celery's, and none that other tests share."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.signals import before_task_publish

from celery_idempotent.celery import republish
from celery_idempotent.stores.memory import MemoryStore
from tests.support.telling import Heard, listening

Published = list[SimpleNamespace]

#: As it is before a test of another folder, in the same process, shortens the countdowns of its workers.
_LONGEST = dict(republish._LONGEST)


@pytest.fixture(autouse=True)
def _no_shared_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = importlib.import_module("celery._state")
    own = {each for each in state._on_app_finalizers if each.__module__ == "celery.app.builtins"}
    monkeypatch.setattr(state, "_on_app_finalizers", own)
    monkeypatch.setattr(republish, "_LONGEST", dict(_LONGEST))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def app(store: MemoryStore) -> Iterator[Celery]:
    app = Celery("unit", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.idempotency_store = store
    yield app
    app.close()


@pytest.fixture
def runs() -> list[Any]:
    """For tasks to note their runs."""
    return []


@pytest.fixture
def heard() -> Iterator[Heard]:
    """What is told of outcomes meanwhile."""
    with listening() as heard:
        yield heard


@pytest.fixture
def published() -> Iterator[Published]:
    """Every message that was published, as it went out."""
    seen: Published = []

    def note(sender: str, headers: Any, body: Any, properties: Any, **_: Any) -> None:
        about = {"task": sender, "headers": dict(headers), "stamp": headers.get("idempotency")}
        about |= {name: headers[name] for name in ("id", "retries")}
        about |= dict(zip(("args", "kwargs", "embed"), body, strict=True))
        at = datetime.now(timezone.utc)
        seen.append(SimpleNamespace(**about, properties=dict(properties), at=at))

    before_task_publish.connect(note, weak=False)
    yield seen
    before_task_publish.disconnect(note)
