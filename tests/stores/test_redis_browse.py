"""Lists in Redis: only our records, in bounded steps, wherever a page ends."""

from __future__ import annotations

import os
from typing import Any

import pytest
import redis

from celery_idempotent.records import Claimed, Identity, Selection, State, Stored
from celery_idempotent.stores.keyspace import Keyspace
from celery_idempotent.stores.redis import RedisStore

pytestmark = pytest.mark.redis

COMPLETED = Selection(states=frozenset({State.COMPLETED}))
PROCESSING = Selection(states=frozenset({State.PROCESSING}))


def in_one_bucket(count: int) -> list[Identity]:
    keyspace, n = Keyspace("x"), 0
    found: list[Identity] = []
    while len(found) < count:
        identity = Identity(namespace="charge", key=f"{n}")
        if keyspace.locate(identity)[0] == 17:
            found.append(identity)
        n += 1
    return found


def claim(store: RedisStore, identity: Identity, *, complete: bool = False) -> None:
    answer = store.claim(identity, attempt=os.urandom(8), lease_ms=60_000, keep_ms=120_000)
    assert isinstance(answer, Claimed)
    if complete:
        store.settle(answer.record, state=State.COMPLETED, value=None, keep_ms=120_000)


def all_keys(store: RedisStore, selection: Selection, **how: Any) -> list[str]:
    cursor, found = "", []
    while True:
        page = store.list(selection, cursor=cursor, **how)
        found += [record.identity.key for record in page.records]
        cursor = page.cursor
        if not cursor:
            return found


def test_a_page_may_end_in_the_middle_of_a_bucket(redis_store):
    wanted = in_one_bucket(12)
    for identity in wanted:
        claim(redis_store, identity)
    assert sorted(all_keys(redis_store, PROCESSING, limit=5)) == sorted(w.key for w in wanted)


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_a_page_may_end_in_the_middle_of_a_step_of_the_scan(redis_store, limit):
    wanted = [f"{n}" for n in range(40)]
    for key in wanted:
        claim(redis_store, Identity(namespace="charge", key=key), complete=True)
    found = all_keys(redis_store, COMPLETED, limit=limit)
    # A rehash between two pages may show a key twice, and never hides one.
    assert sorted(set(found)) == sorted(wanted)


def test_other_keys_of_the_server_are_not_ours(redis_url, prefix, redis_client: redis.Redis):
    ours, theirs = (RedisStore(redis_url, prefix=f"{prefix}{end}") for end in ("[a]*", "a"))
    try:
        claim(ours, Identity(namespace="charge", key="{ours}:x"), complete=True)
        claim(theirs, Identity(namespace="charge", key="theirs"), complete=True)
        redis_client.set(f"{prefix}[a]*:notes", "no record", ex=60)
        assert all_keys(ours, Selection()) == ["{ours}:x"]
        assert all_keys(theirs, Selection()) == ["theirs"]
    finally:
        ours.close()
        theirs.close()


def test_what_an_index_still_names_and_is_gone_is_passed_over(redis_store, redis_client):
    gone, there = in_one_bucket(2)
    claim(redis_store, gone)
    claim(redis_store, there)
    redis_client.delete(redis_store._keys.locate(gone)[1])
    assert all_keys(redis_store, PROCESSING) == [there.key]


def test_a_large_result_does_not_travel(redis_store):
    identity = Identity(namespace="charge", key="large")
    answer = redis_store.claim(identity, attempt=os.urandom(8), lease_ms=60_000, keep_ms=60_000)
    value = b"x" * 1_000_000
    stored = Stored(content_type="text/plain", content_encoding="utf-8", body=value)
    redis_store.settle(answer.record, state=State.COMPLETED, value=stored, keep_ms=60_000)
    read = []
    exchange = redis_store._link.exchange

    def weigh(commands):
        answers = exchange(commands)
        read.extend(len(a) for a in answers if isinstance(a, bytes))
        return answers

    redis_store._link.exchange = weigh
    assert all_keys(redis_store, COMPLETED) == ["large"]
    assert 0 < max(read) < 4096
