"""Times the verbs on PostgreSQL in a process of its own."""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
from collections.abc import Callable
from typing import Any

from django.db import transaction

from benchmarks.operations import (
    KEEP_MS,
    RESULT,
    Call,
    claim,
    identity,
    prepared_claim,
    prepared_renew,
    settle,
    time_in_rounds,
)
from benchmarks.postgresql import execute, open_database
from celery_idempotent.records import Identity, Record, SettleRequest, State

_TABLE = (
    "CREATE TABLE bare (digest bytea PRIMARY KEY, token bigint NOT NULL, state char NOT NULL,"
    " key text NOT NULL, value bytea) WITH (fillfactor = 70)"
)
_INSERT = (
    "INSERT INTO bare VALUES (%s, %s, 'P', %s) ON CONFLICT (digest) DO NOTHING RETURNING token"
)
_LOCK = "SELECT state FROM bare WHERE digest = %s AND token = %s FOR UPDATE"
_UPDATE = "UPDATE bare SET state = 'C', value = %s WHERE digest = %s AND token = %s"


def main(rounds: int, calls: int, seed: int) -> None:
    with open_database():
        from celery_idempotent.django.store import DjangoStore

        execute(_TABLE)
        store, free = DjangoStore(), map(identity, itertools.count())

        def by_hand(pair: Callable[[str, bytes], None]) -> Callable[[], Call]:
            """Each call has a key of its own, and the digest of that."""

            def prepare() -> Call:
                key = next(free).key
                return functools.partial(pair, key, hashlib.sha256(key.encode()).digest()[:16])

            return prepare

        def completed() -> Record:
            record = claim(store, next(free))
            settle(store, record)
            return record

        operations: dict[str, Callable[[], Call]] = {
            "bare INSERT and UPDATE": by_hand(_bare),
            "a transaction by hand": by_hand(_transaction),
            "claim and settle": lambda: functools.partial(_pair, store, next(free)),
            "in the task's own transaction": lambda: functools.partial(_atomic, store, next(free)),
            "claim of a completed key (replay)": lambda: prepared_claim(
                store, completed().identity
            ),
            "renew": lambda: prepared_renew(store, claim(store, next(free))),
        }
        time_in_rounds(operations, rounds, calls, seed)
        store.close()


def _bare(key: str, digest: bytes) -> None:
    execute(_INSERT, (digest, 17, key))
    execute(_UPDATE, (RESULT.body, digest, 17))


def _transaction(key: str, digest: bytes) -> None:
    """What an atomic run promises: a claim that others see, a lock meanwhile, an end that commits with the writes."""
    execute(_INSERT, (digest, 17, key))
    with transaction.atomic():
        execute(_LOCK, (digest, 17))
        execute(_UPDATE, (RESULT.body, digest, 17))


def _pair(store: Any, identity: Identity) -> None:
    settle(store, claim(store, identity))


def _atomic(store: Any, identity: Identity) -> None:
    record = claim(store, identity)
    end = SettleRequest(record=record, state=State.COMPLETED, value=RESULT, keep_ms=KEEP_MS)
    with store.transaction(record) as run:
        run.settle(end)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
