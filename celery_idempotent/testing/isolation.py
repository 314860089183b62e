"""Records that end with a test, for tests of applications."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from celery_idempotent.errors import InvalidOption
from celery_idempotent.stores import get_store, swap_store
from celery_idempotent.stores.base import Store
from celery_idempotent.stores.memory import MemoryStore

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["isolated_records"]


@contextmanager
def isolated_records(app: Celery, *, clock: Callable[[], int] | None = None) -> Iterator[Store]:
    """Let the records of ``app`` end with this block; it begins without any.

    They are kept in memory meanwhile, whatever ``idempotency_store`` says: no server is needed. They go by ``clock``
    (microseconds), a :class:`~celery_idempotent.testing.FakeClock` for instance. Those in a database of Django stay
    there, where its own test cases undo them; of a hybrid store the cache is left out. Gives the store.

    As a context manager, or as a decorator of a test. Runs of other processes are not isolated.

    Raises:
        InvalidOption: if ``idempotency_store`` cannot be read.
    """
    used = _store_of(app)
    store = None if used is None else used.without_cache()
    if store is None or not store.supports_transactions:
        store = MemoryStore(clock)
    swap_store(app, store)
    try:
        yield store
    finally:
        swap_store(app, used)


def _store_of(app: Celery) -> Store | None:
    try:
        return get_store(app)
    except InvalidOption:
        if app.conf.get("idempotency_store") is not None:
            raise
        return None  # none is needed
