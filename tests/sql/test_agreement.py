"""MemoryStore and DjangoStore answer alike, whatever is asked of them in whatever order."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis.stateful import initialize, invariant

from celery_idempotent.records import Identity, Record
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from tests.sql import databases
from tests.stores.test_agreement import IDENTITIES, Agreement
from tests.support.tiers import examples, run_until_seen

pytest.importorskip("django")

from celery_idempotent.django.store import DjangoStore


class SQLAgreement(Agreement):
    """As the machine for Redis, with a database whose clock says what the test says."""

    store: DjangoStore
    numbers = itertools.count()

    @initialize()
    def open(self) -> None:
        self.clock = FakeClock()
        self.memory: Any = MemoryStore(self.clock)
        databases.clear(self.store.alias)
        self.redis: Any = self.store
        self.names = {}
        self.records: dict[Identity, list[Record]] = {name: [] for name in IDENTITIES}
        # Where the machine for Redis sets that one's clock.
        self.link: Any = SimpleNamespace(set=lambda _: self.set_clock())
        self.set_clock()

    def ask(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        # A token is the time, unless another was given out within the same microsecond, of any key
        # here, of the same one there.
        self.clock.advance(0.001)
        self.set_clock()
        return super().ask(verb, *args, **kwargs)

    def set_clock(self) -> None:
        databases.stop(self.store, self.clock())

    @invariant()
    def same_records(self) -> None:
        for identity in IDENTITIES:
            record = self.ask("get", identity)
            if record is not None:
                self.seen[record.state.name] += 1

    def teardown(self) -> None:
        pass


@pytest.mark.parametrize("vendor", databases.VENDORS)
def test_both_stores_answer_alike(open_store: Callable[..., DjangoStore], vendor: str):
    seen: Counter[str] = Counter()
    machine = type("SQLAgreement", (SQLAgreement,), {"store": open_store(vendor), "seen": seen})
    wanted = {"claim Claimed", "reserve Reserved", "QUEUED", "PROCESSING"}
    if vendor == "sqlite":
        wanted |= {"claim Held", "COMPLETED"}
    tries = examples(15, 40) if vendor == "sqlite" else examples(6, 15)
    run_until_seen(machine, wanted, seen, tries=tries)
