"""The test project's admin over stores of the test's own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from django.conf import settings
from django.db import connections
from django.test import Client, override_settings
from django.test.utils import setup_databases, teardown_databases

from celery_idempotent.stores import Store, open_store
from celery_idempotent.stores.memory import MemoryStore
from tests.sql import databases
from tests.support.admin import PERMISSIONS, make_app, make_user


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Django set up with the test project's settings, and its tables made; as tests/django does."""
    directory = tmp_path_factory.mktemp("admin")
    with databases.ready(directory):
        # In a file: the heartbeat's thread writes counters, and connections to one database in memory, which share its
        # cache, do not wait for each other ("database table is locked").
        test = connections["default"].settings_dict["TEST"]
        with pytest.MonkeyPatch.context() as name:  # another module's has a name of its own
            name.setitem(test, "NAME", str(directory / "test.sqlite3"))
            made = setup_databases(verbosity=0, interactive=False, aliases={"default": True})
        yield
        teardown_databases(made, verbosity=0)


@pytest.fixture
def database(project: None) -> Iterator[None]:
    """Nobody has a user, a session or a log entry before or after the test, and the store no record."""
    yield
    from django.contrib.admin.models import LogEntry
    from django.contrib.auth.models import User
    from django.contrib.sessions.models import Session

    from celery_idempotent.django import models

    tables = (models.IdempotencyRecord, models.Counter, models.Mark)
    for model in (LogEntry, Session, User, *tables):
        model._default_manager.all().delete()


@pytest.fixture(scope="session")
def _postgresql(project: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    alias = "admin_postgresql"
    with databases.fresh("postgresql", tmp_path_factory.mktemp("postgresql"), alias):
        yield alias


@pytest.fixture
def postgresql(_postgresql: str) -> str:
    """The alias of a database in PostgreSQL with our tables, and nothing in them."""
    databases.clear(_postgresql)
    return _postgresql


@pytest.fixture
def serve(database: None) -> Iterator[Callable[..., Any]]:
    """Let the admin show this store; gives the app."""
    with ExitStack() as stack:

        def serve(store: Store | str, **settings: Any) -> Any:
            app = make_app(store, **settings)
            stack.enter_context(override_settings(CELERY_IDEMPOTENT_APP=app))
            return app

        yield serve


@pytest.fixture(params=[pytest.param("redis", marks=pytest.mark.wide), "sql"])
def store(request: pytest.FixtureRequest, serve: Callable[..., Any]) -> Iterator[Store]:
    """A store of each kind in turn, empty, which the admin shows."""
    url = "django://default"
    if request.param == "redis":
        prefix = request.getfixturevalue("prefix")
        url = f"{request.getfixturevalue('redis_url')}?prefix={prefix}"
    store = open_store(url)
    serve(store)
    yield store
    store.close()


@pytest.fixture
def memory(serve: Callable[..., Any]) -> Store:
    """A store for tests that any store would do for, which the admin shows."""
    store = MemoryStore()
    serve(store)
    return store


@pytest.fixture
def app() -> Any:
    """The app whose store the admin shows; it comes after that store."""
    known: Any = settings
    return known.CELERY_IDEMPOTENT_APP


@pytest.fixture
def log_in(database: None) -> Callable[..., Client]:
    """A function that gives the browser of somebody with these permissions, by default all of ours."""

    def log_in(*permissions: str, everything: bool = False) -> Client:
        client = Client(SERVER_NAME="localhost")
        user = make_user(uuid.uuid4().hex, PERMISSIONS if everything else permissions)
        client.force_login(user)
        return client

    return log_in


@pytest.fixture
def operator(log_in: Callable[..., Client]) -> Client:
    """The browser of somebody who may do everything."""
    return log_in(everything=True)
