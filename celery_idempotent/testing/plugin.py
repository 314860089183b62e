"""A pytest plugin: each test begins without records. ``pytest_plugins = ["celery_idempotent.testing.plugin"]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from celery import current_app

from celery_idempotent.testing.isolation import isolated_records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.stores.base import Store


@pytest.fixture
def idempotency_app() -> AnyCelery:
    """The app whose records are isolated: the current one. Define a fixture of this name to choose another."""
    return current_app


@pytest.fixture(autouse=True)
def idempotency_records(idempotency_app: AnyCelery) -> Iterator[Store]:
    """The store of the test, empty at its start: see :func:`~celery_idempotent.testing.isolated_records`."""
    with isolated_records(idempotency_app) as store:
        yield store
