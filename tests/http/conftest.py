"""One running site for all tests of the HTTP side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from celery import Celery
from django.test import RequestFactory, override_settings

from tests.http.sites import Site, open_site
from tests.sql.databases import ready
from tests.support.servers import embedded_redis


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with embedded_redis() as redis, open_site(tmp_path_factory.mktemp("site"), redis) as site:
        yield site


@pytest.fixture
def site(running: Site) -> Iterator[Site]:
    """The site, in its usual mood."""
    running.mood(None)
    yield running
    running.mood(None)


@pytest.fixture(scope="module")
def django(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Django, set up in this process; its views work with the ``app`` of the module, if there is one."""
    app = getattr(request.module, "app", None)
    is_given = isinstance(app, Celery)
    settings = override_settings(CELERY_IDEMPOTENT_APP=app) if is_given else nullcontext()
    with ready(tmp_path_factory.mktemp("django")), settings:
        yield


@pytest.fixture
def factory() -> Any:
    return RequestFactory()
