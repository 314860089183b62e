"""Sweep and prune in Redis: what is due in any bucket, found through the indexes and never by a scan."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from celery_idempotent.records import Record, State, SweepReport
from celery_idempotent.stores.base import ATTEMPT_BYTES
from celery_idempotent.stores.channel import Link, exchange
from celery_idempotent.stores.keyspace import BUCKETS, Keyspace
from celery_idempotent.stores.packed import unpack
from celery_idempotent.stores.scripts import Command, plain, script

__all__ = ["prune", "sweep"]

#: No script works on more records than this at a time, so that no other client waits for one for
#: long.
_PER_SCRIPT = 100


def sweep(link: Link, keys: Keyspace, *, limit: int, requeue_ms: int) -> SweepReport:
    """Interrupt or requeue what is stale, requeue what nobody sent."""
    each = min(limit, _PER_SCRIPT)
    arguments = (b"%d" % requeue_ms, os.urandom(ATTEMPT_BYTES))
    commands, asked, left, more = [], [], limit, False
    # One more than a script may take, to know whether there is more.
    for bucket, names in _due(link, keys.leases, each=each + 1):
        more = more or len(names) > min(each, left)
        names = names[: min(each, left)]
        if not names:
            break
        left -= len(names)
        asked += names
        commands.append(script("sweep").call(bucket, (keys.leases(bucket), *names), *arguments))
    swept = [packed for answer in _ask_all(link, commands) for packed in answer]
    interrupted: list[Record] = []
    requeued: list[Record] = []
    for name, packed in zip(asked, swept, strict=True):
        if packed is not None:
            record = unpack(keys.identity(name), packed)
            (requeued if record.state is State.QUEUED else interrupted).append(record)
    return SweepReport(interrupted=tuple(interrupted), requeued=tuple(requeued), more=more)


def prune(link: Link, keys: Keyspace, *, limit: int) -> int:
    """Drop index entries of expired records; Redis drops the records by itself."""
    commands, left = [], limit
    for bucket, names in _due(link, keys.failures, each=min(limit, _PER_SCRIPT)):
        if left <= 0:
            break
        commands.append(
            script("prune").call(bucket, (keys.failures(bucket),), b"%d" % min(left, len(names)))
        )
        left -= len(names)
    return sum(_ask_all(link, commands))


def _due(
    link: Link, index: Callable[[int], bytes], *, each: int
) -> Iterator[tuple[int, list[bytes]]]:
    """Look into all buckets for names whose time has come, up to ``each`` names of a bucket.

    Starts anywhere, so that a limit never starves the same buckets. One node's time serves for
    all: this only finds candidates, and a script decides about each by its own server's time.
    """
    start = random.randrange(BUCKETS)
    buckets = [*range(start, BUCKETS), *range(start)]
    ((seconds, micros),) = exchange(link, (plain(start, b"TIME"),))
    now = b"%d" % (int(seconds) * 1000 + int(micros) // 1000)
    limit = b"%d" % each
    found = exchange(
        link,
        [
            plain(b, b"ZRANGEBYSCORE", index(b), b"-inf", now, b"LIMIT", b"0", limit)
            for b in buckets
        ],
    )
    return ((bucket, names) for bucket, names in zip(buckets, found, strict=True) if names)


def _ask_all(link: Link, commands: Sequence[Command]) -> list[Any]:
    return exchange(link, commands) if commands else []
