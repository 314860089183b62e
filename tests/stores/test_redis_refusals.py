"""What refusals cost in Redis: nothing where there are none, little where there are."""

from __future__ import annotations

import os
from typing import Any

import pytest
import redis

from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Held,
    Identity,
    Mismatched,
    Record,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores.redis.packed import pack_settled, unpack_record
from celery_idempotent.stores.redis.store import RedisStore

pytestmark = pytest.mark.redis

KEY = Identity(namespace="charge", key="order-17")
LEASE_MS, KEEP_MS = 60_000, 120_000
ONE, OTHER = bytes(16), bytes(range(16))


@pytest.fixture
def name(redis_store: RedisStore) -> bytes:
    return redis_store._keys.locate(KEY)[1]


def claim(store: RedisStore, **changes: Any) -> Any:
    asked = {"attempt": os.urandom(8), "lease_ms": LEASE_MS, "keep_ms": KEEP_MS, **changes}
    return store.claim(ClaimRequest(identity=KEY, **{"fingerprint": ONE, **asked}))


def claimed(store: RedisStore, **changes: Any) -> Record:
    answer = claim(store, **changes)
    assert isinstance(answer, Claimed)
    return answer.record


def settle(store: RedisStore, record: Record, body: bytes = b"17") -> Record:
    value = Stored(content_type="application/json", content_encoding="utf-8", body=body)
    assert store.settle(
        SettleRequest(record=record, state=State.COMPLETED, value=value, keep_ms=KEEP_MS)
    )
    found = store.get(KEY)
    assert found is not None
    return found


def test_a_record_without_a_refusal_has_not_a_byte_of_them(
    redis_store: RedisStore, redis_client: redis.Redis, name: bytes
):
    found = settle(redis_store, claimed(redis_store))
    plain = pack_settled(SettleRequest.ending_as(found, record=found, keep_ms=1))
    assert redis_client.get(name) == plain
    assert isinstance(claim(redis_store, fingerprint=OTHER, task_id="x" * 500), Mismatched)
    # The flag; two bytes of length; eight and the task id.
    noted: Any = redis_client.get(name)
    assert len(noted) == len(plain) + 2 + 8 + 100
    assert unpack_record(KEY, noted) == found


def test_a_replay_writes_nothing(redis_store: RedisStore, redis_client: redis.Redis, name: bytes):
    settle(redis_store, claimed(redis_store))
    claim(redis_store, fingerprint=OTHER)
    before = redis_client.get(name)
    claim(redis_store, task_id="another")
    assert redis_client.get(name) == before


def test_a_storm_ends_at_five_notes_and_leaves_the_end_of_the_record_alone(
    redis_store: RedisStore, redis_client: redis.Redis, name: bytes
):
    claimed(redis_store)
    redis_client.pexpire(name, 50_000)
    sizes = []
    for number in range(20):
        assert isinstance(claim(redis_store, task_id=f"{number:x<200}"), Held)
        sizes.append(redis_client.strlen(name))
    assert len(set(sizes[4:])) == 1
    assert sizes[4] - sizes[0] == 4 * 108
    assert 0 < redis_client.pttl(name) <= 50_000


def test_a_record_of_more_than_64_kib_is_not_written_again_for_a_note(
    redis_store: RedisStore, redis_client: redis.Redis, name: bytes
):
    settle(redis_store, claimed(redis_store), b"x" * 70_000)
    before = redis_client.get(name)
    assert isinstance(claim(redis_store, fingerprint=OTHER), Mismatched)
    assert redis_client.get(name) == before
