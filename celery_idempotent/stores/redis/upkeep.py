"""Sweep and prune in Redis: what is due in any bucket, found through the indexes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Identity, Record, SweepReport
from celery_idempotent.stores.base import Store, report
from celery_idempotent.stores.redis.keyspace import BUCKETS
from celery_idempotent.stores.redis.look import RedisLook
from celery_idempotent.stores.redis.servers import (
    SCRIPTS,
    Command,
    Servers,
    ask_indexes,
    exchange,
    in_steps,
)

#: No script takes more names of an index than this: Redis serves nobody else meanwhile.
_PER_INDEX = 50
#: How many records one trip reads or writes.
_PER_TRIP = 250

#: An index, and names in it whose time has come.
_Due: TypeAlias = tuple[bytes, list[bytes]]


class Upkeep(Servers, Store):
    """The verbs of the periodic sweep."""

    def sweep(self, *, limit: int, requeue_ms: int = 60_000) -> SweepReport:
        """Interrupt or requeue what is stale, requeue reservations whose message was not sent in time."""
        swept: list[Record] = []
        left_over = False
        for due, more in self._rounds(self._keys.leases, limit):
            left_over = more
            names = [name for _, some in due for name in some]
            for step in in_steps(names, _PER_TRIP):
                swept += self._sweep_some(step, requeue_ms)
        return report(swept, more=left_over)

    def _sweep_some(self, names: Sequence[bytes], requeue_ms: int) -> Iterator[Record]:
        """Decide about some records with two trips: one to look, one to write."""
        plan: list[Command] = []

        def swap_later(identity: Identity, args: tuple[bytes, ...]) -> int:
            plan.append(SCRIPTS["swap"].call(self._keys.of_record(identity), *args))
            return 1

        looks = [SCRIPTS["claim"].call((name,)) for name in names]
        planned: list[Record | None] = []
        for name, answer in zip(names, exchange(self._link, looks), strict=True):
            try:
                look = RedisLook(self._keys.identity(name), answer, swap_later)
            except StoreMisconfigured:
                continue  # left to the newer version that wrote it
            record = self._sweep(look, requeue_ms)
            if record is None:
                look.mend()
            planned.append(record)
        # Whoever wrote meanwhile knows better, or the next sweep finds it.
        for record, written in zip(planned, exchange(self._link, plan), strict=True):
            if record is not None and written == 1:
                yield record

    def prune(self, *, limit: int) -> int:
        """Drop index entries of expired records; Redis drops the records by itself."""
        pruned, due = 0, SCRIPTS["due"]
        for index in (self._keys.failures, self._keys.interrupted):
            for found, _ in self._rounds(index, limit - pruned):
                calls = [due.call((key,), b"%d" % len(names), b"1") for key, names in found]
                pruned += sum(
                    len(names) for each in exchange(self._link, calls) for _, names in each
                )
        return pruned

    def _rounds(
        self, index: Callable[[int], bytes], limit: int
    ) -> Iterator[tuple[list[_Due], bool]]:
        """Yield what is due, up to ``limit`` names, and whether there is more.

        A round takes no more names of one bucket than a script may have: a bucket that a client filled on purpose keeps
        no other one waiting. The rounds start anywhere, so that a limit never starves the same buckets.
        """
        start, left = random.randrange(BUCKETS), limit
        indexes: Sequence[bytes] = [index((start + n) % BUCKETS) for n in range(BUCKETS)]
        while indexes and left > 0:
            due, rest, most = [], [], min(left, _PER_INDEX)
            # One more than a script may take, to know whether there is more.
            for key, names in ask_indexes(self._link, "due", indexes, b"%d" % (most + 1), b""):
                taken = names[: min(left, _PER_INDEX)]
                left -= len(taken)
                if taken:
                    due.append((key, taken))
                if len(names) > len(taken):
                    rest.append(key)
            yield due, bool(rest)
            indexes = rest
