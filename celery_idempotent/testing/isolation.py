"""Replaces the store, the options or the time of an app for the length of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from celery_idempotent.celery.definition import definitions
from celery_idempotent.errors import InvalidOption
from celery_idempotent.settings import real_app
from celery_idempotent.stores import Store, get_store, open_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.opening import opened

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyCelery


class FakeClock:
    """Gives the time in microseconds since the epoch; it stands still until it is moved."""

    def __init__(self, start_us: int = 1_700_000_000_000_000) -> None:
        self._now_us = start_us

    def __call__(self) -> int:
        return self._now_us

    def advance(self, ms: float) -> None:
        """Let ``ms`` milliseconds pass."""
        self._now_us += round(ms * 1000)


@contextmanager
def isolated_records(app: AnyCelery, *, clock: Callable[[], int] | None = None) -> Iterator[Store]:
    """Give ``app`` an empty store for the length of the block, as a context manager or as a decorator of a test.

    The store is in memory, whatever ``idempotency_store`` is, and its time is that of ``clock`` (microseconds). A
    Django database stays the store, because Django's test cases roll it back, but without the cache of a hybrid store.
    Runs in other processes are not isolated.

    Raises:
        InvalidOption: if ``idempotency_store`` cannot be read.
    """
    used = store = None
    try:
        used = get_store(app)
        store = open_store(f"django://{used.outbox_alias}") if used.outbox_alias else used
    except InvalidOption:
        if app.conf.get("idempotency_store") is not None:
            raise
    if store is None or not store.supports_transactions:
        store = MemoryStore(clock)
    opened[real_app(app)] = store
    try:
        yield store
    finally:
        if used is None:
            del opened[real_app(app)]
        else:
            opened[real_app(app)] = used


@contextmanager
def idempotency_off(app: AnyCelery) -> Iterator[None]:
    """Let the tasks of ``app`` that do not set ``idempotency_mode`` run as plain Celery tasks in the block."""
    with ExitStack() as stack:
        for task in [app.tasks[each.name] for each in definitions(app)]:
            if not hasattr(task, "idempotency_mode"):
                stack.enter_context(redefined(task, idempotency_mode="off"))
        yield


@contextmanager
def redefined(task: Any, **options: Any) -> Iterator[None]:
    """Give a task other options for the length of the block, by binding it anew."""
    kind = task.__class__  # not that of a proxy
    try:
        with patch.multiple(kind, create=True, **options):
            kind.bind(task.app)
            yield
    finally:
        kind.bind(task.app)
