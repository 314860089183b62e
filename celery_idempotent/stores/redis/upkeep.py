"""Sweep and prune in Redis: what is due in any bucket, found through the indexes."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from redis.exceptions import ClusterCrossSlotError

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Record, State, SweepReport
from celery_idempotent.stores.base import ATTEMPT_BYTES
from celery_idempotent.stores.redis.facts import Servers, now_ms
from celery_idempotent.stores.redis.keyspace import BUCKETS
from celery_idempotent.stores.redis.packed import unpack_record
from celery_idempotent.stores.redis.scripts import Command, plain, script

#: No script works on more records, or looks into more indexes, than this: Redis serves no other client while one runs.
_PER_SCRIPT, _PER_LOOK = 50, 256

#: A bucket, and the names in one of its indexes whose time has come.
_Due: TypeAlias = tuple[int, list[bytes]]


class Upkeep(Servers):
    """The verbs of the periodic sweep."""

    def sweep(self, *, limit: int, requeue_ms: int = 60_000) -> SweepReport:
        """Interrupt or requeue what is stale, requeue reservations whose message was not sent in time."""
        delay, attempt = b"%d" % requeue_ms, os.urandom(ATTEMPT_BYTES)
        interrupted: list[Record] = []
        requeued: list[Record] = []
        left_over = False
        for due, more in self._rounds(self._keys.leases, limit):
            left_over = more
            groups = list(self._together(due))
            answers = self._ask_all([self._swept_together(g, delay, attempt) for g in groups])
            names = (name for group in groups for _, names in group for name in names)
            for name, packed in zip(names, itertools.chain.from_iterable(answers), strict=True):
                if packed is not None:
                    record = unpack_record(self._keys.identity(name), packed)
                    (requeued if record.state is State.QUEUED else interrupted).append(record)
        return SweepReport(interrupted=tuple(interrupted), requeued=tuple(requeued), more=left_over)

    def _together(self, due: Sequence[_Due]) -> Iterator[Sequence[_Due]]:
        """Divide what is due among scripts, as few as may be: starting one costs as much as a record does."""
        group: list[_Due] = []
        size = 0
        for bucket, names in due:
            if group and (not self._link.spans or size + len(names) > _PER_SCRIPT):
                yield group
                group, size = [], 0
            group.append((bucket, names))
            size += len(names)
        if group:
            yield group

    def _swept_together(self, due: Sequence[_Due], delay: bytes, attempt: bytes) -> Command:
        keys: list[bytes] = []
        for bucket, names in due:
            keys += (self._keys.leases(bucket), self._keys.interrupted(bucket), *names)
        sizes = [b"%d" % len(names) for _, names in due]
        return script("sweep").call(due[0][0], keys, delay, attempt, *sizes)

    def prune(self, *, limit: int) -> int:
        """Drop index entries of expired records; Redis drops the records by itself."""
        pruned = 0
        for index in (self._keys.failures, self._keys.interrupted):
            for due, _ in self._rounds(index, limit - pruned):
                prune = script("prune")
                pruned += sum(
                    self._ask_all(
                        [prune.call(b, (index(b),), b"%d" % len(names)) for b, names in due]
                    )
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
        buckets: Sequence[int] = [*range(start, BUCKETS), *range(start)]
        while buckets and left > 0:
            # One more than a script may take, to know whether there is more.
            found = self._due(index, buckets, each=min(left, _PER_SCRIPT) + 1)
            due, rest = [], []
            for bucket, names in found:
                taken = names[: min(left, _PER_SCRIPT)]
                left -= len(taken)
                if taken:
                    due.append((bucket, taken))
                if len(names) > len(taken):
                    rest.append(bucket)
            yield due, bool(rest)
            buckets = rest

    def _due(
        self, index: Callable[[int], bytes], buckets: Sequence[int], *, each: int
    ) -> list[_Due]:
        """Look into these buckets for names whose time has come, up to ``each`` names of a bucket."""
        most = b"%d" % each
        if self._link.spans:
            try:
                return self._look([index(bucket) for bucket in buckets], buckets, most)
            except StoreMisconfigured as error:
                if not isinstance(error.__cause__, ClusterCrossSlotError):
                    raise
                # A cluster behind one address: its scripts have one bucket each, as in any cluster.
                self._link.spans = False
        # A script for each bucket would cost the servers five times as much. One node's time serves for all: this only
        # finds candidates, and a script decides about each by its own server's time.
        words = (b"-inf", b"%d" % now_ms(self._link, buckets[0]), b"LIMIT", b"0", most)
        found = self._ask_all([plain(b, b"ZRANGEBYSCORE", index(b), *words) for b in buckets])
        return [(bucket, names) for bucket, names in zip(buckets, found, strict=True) if names]

    def _look(self, indexes: Sequence[bytes], buckets: Sequence[int], most: bytes) -> list[_Due]:
        starts = range(0, len(indexes), _PER_LOOK)
        due = script("due")
        answers = self._ask_all(
            [due.call(buckets[at], indexes[at : at + _PER_LOOK], most) for at in starts]
        )
        return [
            (buckets[at + place - 1], names)
            for at, answer in zip(starts, answers, strict=True)
            for place, names in answer
        ]
