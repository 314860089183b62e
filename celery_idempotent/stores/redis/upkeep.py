"""Sweep and prune in Redis: what is due in any bucket, found through the indexes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import Record, State, SweepReport
from celery_idempotent.stores.base import ATTEMPT_BYTES
from celery_idempotent.stores.redis.channel import Link, exchange
from celery_idempotent.stores.redis.keyspace import BUCKETS, Keyspace
from celery_idempotent.stores.redis.packed import unpack
from celery_idempotent.stores.redis.scripts import Command, plain, script

__all__ = ["prune", "sweep"]

#: No script works on more records than this at a time, so that no other client waits for one for
#: long.
_PER_SCRIPT = 100

#: So many keys a prune looks at, and one step of its scan, while the index of INTERRUPTED records is not complete.
_PER_PRUNE, _PER_SCAN = 5_000, 500

#: What is noted once it is, or that we may not look.
_INDEXED, _REFUSED = b"done", b"refused"


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
        indexes = (keys.leases(bucket), keys.interrupted(bucket))
        commands.append(script("sweep").call(bucket, (*indexes, *names), *arguments))
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
    for index in (keys.failures, keys.interrupted):
        for bucket, names in _due(link, index, each=min(limit, _PER_SCRIPT)):
            if left <= 0:
                break
            most = b"%d" % min(left, len(names))
            commands.append(script("prune").call(bucket, (index(bucket),), most))
            left -= len(names)
    _complete_index(link, keys)
    return sum(_ask_all(link, commands))


def _complete_index(link: Link, keys: Keyspace) -> None:
    """Index what was INTERRUPTED before there was an index: once for each store, in steps of so many keys a prune.

    Two at a time do the same twice. A user who may not scan leaves it at that: a sweep shall need no such right.
    """
    (place,) = exchange(link, (plain(0, b"GET", keys.indexed),))
    if place in (_INDEXED, _REFUSED):
        return
    # Nobody has to have this now: a server that takes no writes is asked again.
    with suppress(StoreUnavailable):
        try:
            place = _index_step(link, keys, place)
        except StoreMisconfigured:
            place = _REFUSED
        exchange(link, (plain(0, b"SET", keys.indexed, place),))


def _index_step(link: Link, keys: Keyspace, place: bytes | None) -> bytes:
    """Look at so many keys from a place on; return where to go on."""
    node, at = map(int, place.split(b":")) if place else (0, 0)
    nodes, looked_at = link.nodes(), 0
    while node < len(nodes) and looked_at < _PER_PRUNE:
        words = (b"SCAN", b"%d" % at, b"MATCH", keys.pattern, b"COUNT", b"%d" % _PER_SCAN)
        ((after, names),) = exchange(link, (plain(nodes[node], *words),))
        _index(link, keys, names)
        looked_at += _PER_SCAN
        at = int(after)
        node += not at
    return _INDEXED if node >= len(nodes) else b"%d:%d" % (node, at)


def _index(link: Link, keys: Keyspace, names: Sequence[bytes]) -> None:
    """Index those of these records that are INTERRUPTED."""
    located = [(keys.bucket(name), name) for name in names]
    states = _ask_all(
        link, [plain(bucket, b"GETRANGE", name, b"0", b"0") for bucket, name in located]
    )
    found = [each for each, state in zip(located, states, strict=True) if state == b"I"]
    index = script("index")
    _ask_all(link, [index.call(b, (keys.interrupted(b), name)) for b, name in found])


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
