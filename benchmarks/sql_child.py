"""Times the verbs on PostgreSQL in a process of its own; prints one JSON object a round."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from django.db import transaction

from benchmarks.operations import KEEP_MS, LEASE_MS, RESULT, claim, prepared_claim, settle
from benchmarks.postgresql import execute, open_database
from celery_idempotent.records import Identity, Renewal

Call = Callable[[], object]

_TABLE = (
    "CREATE TABLE bare (digest bytea PRIMARY KEY, token bigint NOT NULL, state char NOT NULL,"
    " key text NOT NULL, value bytea) WITH (fillfactor = 70)"
)
_INSERT = (
    "INSERT INTO bare VALUES (%s, %s, 'P', %s) ON CONFLICT (digest) DO NOTHING RETURNING token"
)
_LOCK = "SELECT state FROM bare WHERE digest = %s FOR UPDATE"
_UPDATE = "UPDATE bare SET state = 'C', value = %s WHERE digest = %s AND token = %s"


def main(rounds: int, calls: int, seed: int) -> None:
    """Time ``calls`` of each, in another order each round; the first round warms up."""
    with open_database():
        from celery_idempotent.django.store import DjangoStore

        execute(_TABLE)
        store, order = DjangoStore(), random.Random(seed)
        numbers = itertools.count()
        operations = {
            "bare INSERT and UPDATE": functools.partial(_by_hand, _bare, numbers),
            "SELECT … FOR UPDATE held around both": functools.partial(_by_hand, _held, numbers),
            "SELECT … FOR UPDATE in a transaction each": functools.partial(
                _by_hand, _locked, numbers
            ),
            "claim and settle": functools.partial(_pair, store, numbers),
            "in the task's own transaction": functools.partial(_atomic, store, numbers),
            "claim of a completed key (replay)": functools.partial(_replay, store, numbers),
            "renew": functools.partial(_renew, store, numbers),
        }
        for number in range(-1, rounds):
            times = {
                name: _time(list(operations[name](calls)))
                for name in order.sample(list(operations), len(operations))
            }
            if number >= 0:
                print(json.dumps({name: times[name] for name in operations}), flush=True)
        store.close()


def _identity(numbers: Iterator[int]) -> Identity:
    return Identity(namespace="shop.tasks.charge", key=f"order-{next(numbers):020}")


def _by_hand(
    pair: Callable[[str, bytes], None], numbers: Iterator[int], calls: int
) -> Iterator[Call]:
    """Yield calls of ``pair``, each with a key of its own and the digest of that."""
    for _ in range(calls):
        key = f"order-{next(numbers):020}"
        yield functools.partial(pair, key, hashlib.sha256(key.encode()).digest()[:16])


def _bare(key: str, digest: bytes) -> None:
    execute(_INSERT, (digest, 17, key))
    execute(_UPDATE, (RESULT.body, digest, 17))


def _held(key: str, digest: bytes) -> None:
    """What people write by hand: look at the row, hold it while the task works, and store the end."""
    with transaction.atomic():
        execute(_LOCK, (digest,))
        _bare(key, digest)


def _locked(key: str, digest: bytes) -> None:
    """The same in two transactions, so that others see that the task runs, and nothing is held meanwhile."""
    with transaction.atomic():
        execute(_LOCK, (digest,))
        execute(_INSERT, (digest, 17, key))
    with transaction.atomic():
        execute(_LOCK, (digest,))
        execute(_UPDATE, (RESULT.body, digest, 17))


def _pair(store: Any, numbers: Iterator[int], calls: int) -> Iterator[Call]:
    for _ in range(calls):
        identity = _identity(numbers)

        def pair(identity: Identity = identity) -> None:
            settle(store, claim(store, identity))

        yield pair


def _atomic(store: Any, numbers: Iterator[int], calls: int) -> Iterator[Call]:
    from celery_idempotent.records import SettleRequest, State

    for _ in range(calls):
        identity = _identity(numbers)

        def pair(identity: Identity = identity) -> None:
            record = claim(store, identity)
            end = SettleRequest(record=record, state=State.COMPLETED, value=RESULT, keep_ms=KEEP_MS)
            with store.transaction(record) as run:
                run.settle(end)

        yield pair


def _replay(store: Any, numbers: Iterator[int], calls: int) -> Iterator[Call]:
    for _ in range(calls):
        record = claim(store, _identity(numbers))
        settle(store, record)
        yield prepared_claim(store, record.identity)


def _renew(store: Any, numbers: Iterator[int], calls: int) -> Iterator[Call]:
    for _ in range(calls):
        record = claim(store, _identity(numbers))
        lease = Renewal(
            identity=record.identity, token=record.token, lease_ms=LEASE_MS, keep_ms=KEEP_MS
        )
        yield functools.partial(store.renew, [lease])


def _time(calls: Sequence[Call]) -> list[int]:
    clock, times = time.perf_counter_ns, []
    for call in calls:
        before = clock()
        call()
        times.append(clock() - before)
    return times


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
