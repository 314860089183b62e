"""The verbs as these tests ask for them: with the usual times, about one key unless a test names another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

from celery_idempotent.records import Identity, Record, Renewal, SettleRequest, State
from tests.stores.verbs import KEEP_MS, KEY, LEASE_MS, VALUE
from tests.stores.verbs import ask as claim
from tests.stores.verbs import claim as claimed
from tests.support.threads import in_background

__all__ = ["KEY", "VALUE", "claim", "claimed"]


def named(key: str) -> Identity:
    return Identity(namespace="charge", key=key)


def end_of(record: Record, **changes: Any) -> SettleRequest:
    """Return what completes a claim."""
    asked: Any = {"state": State.COMPLETED, "value": VALUE, "keep_ms": 60_000, **changes}
    return SettleRequest(record=record, **asked)


def renewal(record: Record, **changes: Any) -> Renewal:
    """Return what renews a claim."""
    asked: Any = {"lease_ms": LEASE_MS, "keep_ms": KEEP_MS, **changes}
    return Renewal(identity=record.identity, token=record.token, **asked)


def found(store: Any, identity: Identity = KEY) -> Record:
    """Return the record that there is."""
    record: Record | None = store.get(identity)
    assert record is not None
    return record


@contextmanager
def frozen(
    store: Any, record: Record, write: Callable[[Any], object] = lambda _: None, *, settles: bool
) -> Iterator[Callable[[], str]]:
    """A run that stands still in its transaction, before its settle or after that; give what lets it go on.

    That returns how it ended: its session says as little as that of a process that is frozen.
    """
    from django.db import connections

    stands, go_on = Event(), Event()

    def run() -> str:
        try:
            with store.transaction(record) as run:
                write(store)
                assert not settles or run.settle(end_of(record))
                stands.set()
                go_on.wait(60)
                assert settles or run.settle(end_of(record))
        except Exception as error:  # noqa: BLE001  the test looks at it
            return type(error).__name__
        finally:
            connections[store.alias].close()
        return "committed"

    ended = in_background(run)
    assert stands.wait(30)

    def thaw() -> str:
        go_on.set()
        return ended.result(60)

    try:
        yield thaw
    finally:
        thaw()
