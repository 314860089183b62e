"""What docs/running.md says to set is taken."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_idempotent.stores import open_store
from tests.support.pages import load


@pytest.mark.parametrize("title", ["rabbitmq", "sentinel", "cluster", "tls"])
def test_the_settings_of_the_brokers_page_are_taken(title: str) -> None:
    app = Celery(set_as_current=False)
    load(app, "running", title, {})
    open_store(app.conf.idempotency_store).close()
    app.close()
