"""Times the verbs on one database in a process of its own."""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
from collections.abc import Callable
from typing import Any

from celery import Celery
from django.db import transaction

from benchmarks.databases import execute, open_database
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
from celery_idempotent.records import Identity, Record, SettleRequest, State

_TABLE = (
    "CREATE TABLE bare (digest char(32) PRIMARY KEY, token bigint NOT NULL, state char(1) NOT NULL,"
    " name text NOT NULL, value text)"
)
_INSERT = "INSERT INTO bare VALUES (%s, 17, 'P', %s, NULL)"
_LOCK = "SELECT state FROM bare WHERE digest = %s AND token = %s FOR UPDATE"
_UPDATE = "UPDATE bare SET state = 'C', value = %s WHERE digest = %s AND token = %s"


def main(server: str, rounds: int, calls: int, seed: int) -> None:
    with open_database(server):
        from celery_idempotent.django import outbox
        from celery_idempotent.django.store import DjangoStore

        execute(_TABLE)
        store, free = DjangoStore(), map(identity, itertools.count())
        app = Celery("bench", broker="memory://", set_as_current=False)
        app.conf.idempotency_store = "django://default"

        plain = app.task(ignore_result=True)(identity)  # never run

        def by_hand(call: Callable[[str, str], None]) -> Callable[[], Call]:
            def prepare() -> Call:
                key = next(free).key
                return functools.partial(call, key, hashlib.sha256(key.encode()).hexdigest()[:32])

            return prepare

        def bare(key: str, digest: str) -> None:
            execute(_INSERT, (digest, key))
            execute(_UPDATE, (RESULT.body.decode(), digest, 17))

        def in_transaction(key: str, digest: str) -> None:
            """What an atomic run promises: a claim that others see, a lock, an end that commits with the writes."""
            execute(_INSERT, (digest, key))
            with transaction.atomic():
                execute(_LOCK, (digest, 17))
                execute(_UPDATE, (RESULT.body.decode(), digest, 17))

        def published(key: str, digest: str) -> None:
            with transaction.atomic():
                execute(_INSERT, (digest, key))
                transaction.on_commit(lambda: plain.apply_async((1,)))

        def staged(key: str, digest: str) -> None:
            with transaction.atomic():
                execute(_INSERT, (digest, key))
                outbox.stage(plain, (1,))

        def pair(identity: Identity) -> Record:
            settle(store, record := claim(store, identity))
            return record

        operations: dict[str, Callable[[], Call]] = {
            "bare INSERT and UPDATE": by_hand(bare),
            "a transaction by hand": by_hand(in_transaction),
            "claim and settle": lambda: functools.partial(pair, next(free)),
            "in the task's own transaction": lambda: functools.partial(_atomic, store, next(free)),
            "claim of a completed key (replay)": lambda: prepared_claim(
                store, pair(next(free)).identity
            ),
            "renew": lambda: prepared_renew(store, claim(store, next(free))),
            "INSERT, COMMIT, publish": by_hand(published),
            "INSERT and outbox, COMMIT, publish": by_hand(staged),
        }
        time_in_rounds(operations, rounds, calls, seed)
        store.close()


def _atomic(store: Any, identity: Identity) -> None:
    record = claim(store, identity)
    end = SettleRequest(record=record, state=State.COMPLETED, value=RESULT, keep_ms=KEEP_MS)
    with store.transaction(record) as run:
        run.settle(end)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
