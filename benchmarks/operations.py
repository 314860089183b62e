"""The verbs of a store, each as calls that have been prepared and can be timed one by one."""

from __future__ import annotations

import functools
import itertools
import json
import os
import uuid
from collections.abc import Callable, Sequence

import redis

from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Identity,
    Record,
    Renewal,
    ResultWrite,
    SettledWith,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores.base import Store
from celery_idempotent.stores.redis.store import RedisStore

__all__ = [
    "KEEP_MS",
    "LEASE_MS",
    "RESULT",
    "Operations",
    "claim",
    "prepared_claim",
    "prepared_settle_with_result",
    "settle",
]

LEASE_MS = 60_000
KEEP_MS = 24 * 3_600_000
FINGERPRINT = bytes(range(16))

#: 100 bytes of JSON.
RESULT = Stored(
    content_type="application/json", content_encoding="utf-8", body=b'"' + b"r" * 98 + b'"'
)

Call = Callable[[], object]


def prepared_claim(store: Store, identity: Identity) -> Call:
    """Return the call with which a worker claims the key."""
    return functools.partial(
        store.claim,
        ClaimRequest(
            identity=identity,
            attempt=os.urandom(8),
            lease_ms=LEASE_MS,
            keep_ms=KEEP_MS,
            fingerprint=FINGERPRINT,
            task_id=str(uuid.uuid4()),
            worker="worker-1.example.com:12345",
        ),
    )


def claim(store: Store, identity: Identity) -> Record:
    """Claim a key that is free."""
    answer = prepared_claim(store, identity)()
    assert isinstance(answer, Claimed)
    return answer.record


def settle(store: Store, record: Record) -> bool:
    """Settle as a worker does."""
    return store.settle(
        SettleRequest(record=record, state=State.COMPLETED, value=RESULT, keep_ms=KEEP_MS)
    )


def prepared_settle_with_result(store: RedisStore, record: Record) -> Callable[[], SettledWith]:
    """Return the call with which a worker settles whose result backend is the store's own database.

    It writes what Celery would write for the result, 172 bytes.
    """
    task_id = str(uuid.uuid4())
    meta: dict[str, object] = {
        "status": "SUCCESS",
        "result": None,
        "traceback": None,
        "children": [],
        "date_done": "2026-01-01T00:00:00.000000+00:00",
        "task_id": task_id,
    }
    return functools.partial(
        store.settle_with_result,
        SettleRequest(record=record, state=State.COMPLETED, value=RESULT, keep_ms=KEEP_MS),
        ResultWrite(
            key=f"celery-task-meta-{task_id}".encode(),
            payload=json.dumps(meta).encode(),
            expires_s=KEEP_MS // 1000,
        ),
    )


class Operations:
    """Calls of every verb, on records that were put into the state which the verb is for; empties the server."""

    def __init__(self, url: str) -> None:
        self._store = RedisStore(url)
        self._client = redis.Redis.from_url(url)
        self._client.flushall()
        self._one = self._client.script_load("return 1")
        self._numbers = itertools.count()
        self._prepare: dict[str, Callable[[], Call]] = {
            "bare EVALSHA": self._bare,
            "claim": self._claim,
            "settle": self._settle,
            "settle with the task's result": self._settle_with_result,
            "release": self._release,
            "renew": self._renew,
            "interrupt": self._interrupt,
            "get": self._get,
            "claim of a completed key (replay)": self._replay,
            "claim of a held key (conflict)": self._conflict,
            "forget": self._forget,
        }

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._prepare)

    def prepare(self, name: str, count: int) -> list[Call]:
        """Return so many calls; whatever has to happen before is done."""
        return [self._prepare[name]() for _ in range(count)]

    def _identity(self) -> Identity:
        return Identity(namespace="shop.tasks.charge", key=f"order-{next(self._numbers):020}")

    def _held(self) -> Record:
        return claim(self._store, self._identity())

    def _completed(self) -> Identity:
        record = self._held()
        settle(self._store, record)
        return record.identity

    def _bare(self) -> Call:
        return functools.partial(self._client.evalsha, self._one, 0)

    def _claim(self) -> Call:
        return prepared_claim(self._store, self._identity())

    def _settle(self) -> Call:
        return functools.partial(settle, self._store, self._held())

    def _settle_with_result(self) -> Call:
        return prepared_settle_with_result(self._store, self._held())

    def _release(self) -> Call:
        record = self._held()
        return functools.partial(self._store.release, record.identity, token=record.token)

    def _renew(self) -> Call:
        record = self._held()
        lease = Renewal(
            identity=record.identity, token=record.token, lease_ms=LEASE_MS, keep_ms=KEEP_MS
        )
        return functools.partial(self._store.renew, [lease])

    def _interrupt(self) -> Call:
        record = self._held()
        return functools.partial(self._store.interrupt, record.identity, token=record.token)

    def _get(self) -> Call:
        return functools.partial(self._store.get, self._completed())

    def _replay(self) -> Call:
        return prepared_claim(self._store, self._completed())

    def _conflict(self) -> Call:
        return prepared_claim(self._store, self._held().identity)

    def _forget(self) -> Call:
        return functools.partial(self._store.forget, self._completed())
