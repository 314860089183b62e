"""A pytest plugin: each test begins without records. ``pytest_plugins = ["celery_idempotent.testing.plugin"]``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from celery import current_app

from celery_idempotent.settings import real_app
from celery_idempotent.testing.isolation import isolated_records

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.stores.base import Store

__all__ = ["idempotency_app", "idempotency_records"]


@pytest.fixture
def idempotency_app() -> Celery:
    """The app whose records are isolated: the current one. Define a fixture of this name to choose another."""
    return real_app(current_app)


@pytest.fixture(autouse=True)
def idempotency_records(idempotency_app: Celery) -> Iterator[Store]:
    """The store of the test, empty at its start: see :func:`~celery_idempotent.testing.isolated_records`."""
    with isolated_records(idempotency_app) as store:
        yield store
