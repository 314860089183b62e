"""What is asked of a store with many keys, each as calls to be timed: the same among few and among many."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence

from celery import Celery

from benchmarks.operations import claim, prepared_claim, settle
from celery_idempotent.celery import reaper
from celery_idempotent.operations.explaining import story_of
from celery_idempotent.records import Identity, Selection, Settled, State
from celery_idempotent.stores.base import Store

__all__ = ["NAMESPACE", "Calls", "key_of"]

NAMESPACE = "shop.tasks.charge"
_STALE = 100


def key_of(number: int) -> str:
    """Return the key of one of the completed records: 40 characters."""
    return f"order-{number:034}"


class Calls:
    """Calls on one store that has so many completed records."""

    def __init__(self, store: Store, completed: int, order: random.Random) -> None:
        self._store = store
        self._completed = completed
        self._order = order
        self._numbers = itertools.count()
        self._app = Celery("bench", set_as_current=False)
        #: How many of each a round has, by name.
        self.all: dict[str, tuple[int, Callable[[], object]]] = {
            "claim and settle": (100, self._pair),
            "duplicate of a completed key": (100, self._duplicate),
            "get": (100, self._get),
            "explain": (20, self._explain),
            "a page of the list": (3, lambda: self._list(Selection())),
            "a page of what failed": (
                3,
                lambda: self._list(Selection(states=frozenset({State.FAILED}))),
            ),
            "counts of the states": (3, self._store.stats),
            "sweep of 100 stale": (1, self._sweep),
            "sweep and prune, nothing due": (1, self._idle),
        }

    def time(self) -> dict[str, float]:
        """Return how long each took, in microseconds, in another order each time."""
        return {
            name: self._time(*self.all[name])
            for name in self._order.sample(sorted(self.all), len(self.all))
        }

    def _time(self, often: int, call: Callable[[], object]) -> float:
        if call == self._sweep:
            self._make_stale()
        before = time.perf_counter()
        for _ in range(often):
            call()
        return (time.perf_counter() - before) / often * 1e6

    def _old(self) -> Identity:
        return Identity(namespace=NAMESPACE, key=key_of(self._order.randrange(self._completed)))

    def _new(self) -> Identity:
        return Identity(namespace=NAMESPACE, key=f"new-{next(self._numbers)}")

    def _pair(self) -> None:
        settle(self._store, claim(self._store, self._new()))

    def _duplicate(self) -> None:
        assert isinstance(prepared_claim(self._store, self._old())(), Settled)

    def _get(self) -> None:
        assert self._store.get(self._old()) is not None

    def _explain(self) -> None:
        record = self._store.get(self._old())
        assert record is not None
        story_of(self._app, self._store, record)

    def _list(self, selection: Selection) -> Sequence[object]:
        return self._store.list(selection, limit=50).records

    def _make_stale(self) -> None:
        for _ in range(_STALE):
            claim(self._store, self._new(), lease_ms=1)
        time.sleep(0.01)

    def _sweep(self) -> None:
        found = len(self._store.sweep(limit=reaper.SWEEP_LIMIT).interrupted)
        assert found == _STALE, f"a sweep found {found} of {_STALE}"

    def _idle(self) -> None:
        self._store.sweep(limit=reaper.SWEEP_LIMIT)
        self._store.prune(limit=reaper.SWEEP_LIMIT)
