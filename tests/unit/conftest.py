"""An app of a unit test has its own tasks and Celery's, and none that other tests of the process share."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from celery_idempotent.celery import republish

#: As it is before a test of another folder, in the same process, shortens the countdowns of its workers.
_LONGEST = dict(republish._LONGEST)


@pytest.fixture(autouse=True)
def _no_shared_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = importlib.import_module("celery._state")
    own = {each for each in state._on_app_finalizers if each.__module__ == "celery.app.builtins"}
    monkeypatch.setattr(state, "_on_app_finalizers", own)
    monkeypatch.setattr(republish, "_LONGEST", dict(_LONGEST))
