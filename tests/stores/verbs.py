"""The verbs of a store in few words: of one key, with a lease of a minute, for a record that is kept for two more."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Held,
    Identity,
    Record,
    Renewal,
    Reserved,
    ReserveRequest,
    Settled,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores.redis.format import Keyspace

KEY = Identity(namespace="charge", key="order-17")
VALUE = Stored(content_type="application/json", content_encoding="utf-8", body=b"17")
LEASE_MS, KEEP_MS = 60_000, 120_000


def in_one_bucket(count: int) -> list[Identity]:
    """Return keys whose records a Redis store keeps in one bucket, number 17."""
    names, numbers = Keyspace("x"), itertools.count()
    keys = (Identity(namespace="charge", key=f"{n}") for n in numbers)
    return list(itertools.islice((k for k in keys if b"{17}" in names.of_record(k)[0]), count))


def ask(store: Any, identity: Identity = KEY, **changes: Any) -> Any:
    """Claim; return whatever is answered."""
    asked = {"attempt": os.urandom(8), "lease_ms": LEASE_MS, "keep_ms": KEEP_MS, **changes}
    return store.claim(ClaimRequest(identity=identity, **asked))


def claim(store: Any, identity: Identity = KEY, **changes: Any) -> Record:
    """Claim, and get the key."""
    answer = ask(store, identity, **changes)
    assert isinstance(answer, Claimed)
    return answer.record


def reserve(store: Any, identity: Identity = KEY, **changes: Any) -> Any:
    """Reserve; return whatever is answered."""
    asked = {"task_id": "id", "deadline_ms": LEASE_MS, "keep_ms": KEEP_MS, **changes}
    return store.reserve(ReserveRequest(identity=identity, **asked))


def renew(store: Any, *records: Record, lease_ms: int = LEASE_MS) -> Any:
    """Renew these claims together; return whether each was."""
    return store.renew(
        [
            Renewal(identity=each.identity, token=each.token, lease_ms=lease_ms, keep_ms=KEEP_MS)
            for each in records
        ]
    )


def settle(store: Any, record: Record, state: Any = State.COMPLETED, **changes: Any) -> Any:
    """Settle; return whether it was accepted."""
    asked = {"value": VALUE, "keep_ms": KEEP_MS, **changes}
    return store.settle(SettleRequest(record=record, state=state, **asked))


def _settled(store: Any, key: Identity, state: Any) -> None:
    record = claim(store, key)
    assert settle(store, record, state)
    answer = ask(store, key)
    assert isinstance(answer, Settled)
    assert answer.record.value == VALUE
    assert store.mark_delivered(key, token=record.token)


def _released(store: Any, key: Identity, **how: Any) -> None:
    record = claim(store, key)
    assert isinstance(ask(store, key), Held)
    assert store.release(key, token=record.token, **how)


def _released_with_a_step(store: Any, key: Identity) -> None:
    record = claim(store, key)
    assert store.checkpoint(key, token=record.token, name="pay", value=VALUE)
    assert store.release(key, token=record.token)
    assert claim(store, key).steps == (("pay", VALUE),)


def _retried(store: Any, key: Identity) -> None:
    assert isinstance(reserve(store, key, message=b"message"), Reserved)
    _released(store, key, requeue_ms=LEASE_MS)


def _interrupted(store: Any, key: Identity) -> None:
    assert store.interrupt(key, token=claim(store, key).token)


def _claimed_again(store: Any, key: Identity) -> None:
    _interrupted(store, key)
    assert claim(store, key).crashes == 1


def _requeued(store: Any, key: Identity) -> None:
    reserve(store, key)
    assert store.interrupt(key, token=claim(store, key, message=b"message").token)
    assert store.requeue(key, deadline_ms=LEASE_MS)


def _swept(store: Any, key: Identity, **changes: Any) -> None:
    record = claim(store, key, **changes)
    assert renew(store, record, lease_ms=1) == [True]
    time.sleep(0.01)
    report = store.sweep(limit=10)
    assert [each.identity for each in report.interrupted + report.requeued] == [key]


def _forgotten(store: Any, key: Identity) -> None:
    claim(store, key)
    assert store.forget(key)


def _pruned(store: Any, key: Identity) -> None:
    assert settle(store, claim(store, key), State.FAILED, keep_ms=1)
    time.sleep(0.01)
    assert store.prune(limit=10) == 1


#: What may become of a key: together they run every script on every path.
LIVES: dict[str, Callable[[Any, Identity], Any]] = {
    "claimed": claim,
    "reserved": reserve,
    "completed": partial(_settled, state=State.COMPLETED),
    "failed": partial(_settled, state=State.FAILED),
    "released": _released,
    "released with a step": _released_with_a_step,
    "retried": _retried,
    "interrupted": _interrupted,
    "claimed again": _claimed_again,
    "requeued": _requeued,
    "swept": _swept,
    "swept and requeued": partial(_swept, on_stale="requeue", message=b"message"),
    "forgotten": _forgotten,
    "pruned": _pruned,
}


def use(store: Any) -> None:
    """Use every verb, each with a key of its own, then forget them and close the store."""
    for life, live in LIVES.items():
        key = Identity(namespace="charge", key=life)
        live(store, key)
        store.forget(key)
    store.close()
