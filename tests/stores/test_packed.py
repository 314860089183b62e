"""A packed record says all that the record says, in few bytes."""

from __future__ import annotations

import dataclasses
import os
import uuid

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Identity,
    Record,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores.redis.packed import pack_settled, unpack_record
from celery_idempotent.stores.redis.store import RedisStore
from celery_idempotent.stores.values import unpack_value
from tests.support.tiers import examples

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
identity = Identity(namespace="charge", key="order-17")
values = st.builds(
    Stored,
    content_type=st.sampled_from(["application/json", "application/data", ""]) | texts,
    content_encoding=st.sampled_from(["utf-8", "binary", ""]) | texts,
    body=st.binary(max_size=300),
)
milliseconds = st.integers(0, 2**48 - 1)
records = st.builds(
    Record,
    identity=st.just(identity),
    state=st.sampled_from([State.COMPLETED, State.FAILED]),
    token=st.integers(0, 2**53),
    created_ms=milliseconds,
    updated_ms=milliseconds,
    crashes=st.integers(0, 255),
    attempts=st.integers(0, 255),
    fingerprint=st.none() | st.binary(min_size=16, max_size=16),
    task_id=st.uuids().map(str) | st.uuids().map(lambda u: str(u).upper()) | texts,
    value=st.none() | values,
    replaced=st.booleans(),
)


def pack(record):
    return pack_settled(SettleRequest.ending_as(record, record=record, keep_ms=1))


@given(records)
def test_a_settled_record_comes_back(record):
    assert unpack_record(identity, pack(record)) == record


@pytest.mark.redis
@given(
    task_id=texts | st.uuids().map(str),
    worker=texts,
    fingerprint=st.none() | st.binary(min_size=16, max_size=16),
    lease_ms=st.integers(1, 2**36),
)
@settings(
    max_examples=examples(25, 50),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_live_record_comes_back(redis_store: RedisStore, task_id, worker, fingerprint, lease_ms):
    answer = redis_store.claim(
        ClaimRequest(
            identity=identity,
            attempt=os.urandom(8),
            lease_ms=lease_ms,
            keep_ms=60_000,
            task_id=task_id,
            worker=worker,
            fingerprint=fingerprint,
        )
    )
    assert isinstance(answer, Claimed)
    record = answer.record
    assert (record.task_id, record.worker, record.fingerprint) == (task_id, worker, fingerprint)
    assert record.deadline_ms == record.created_ms + lease_ms
    assert redis_store.get(identity) == record
    interrupted = redis_store.interrupt(identity, token=record.token)
    assert interrupted is not None
    assert interrupted == dataclasses.replace(
        record,
        state=State.INTERRUPTED,
        crashes=1,
        deadline_ms=None,
        updated_ms=interrupted.updated_ms,
    )
    assert redis_store.forget(identity)


COMPLETED = Record(
    identity=identity,
    state=State.COMPLETED,
    token=1,
    created_ms=2,
    updated_ms=3,
    fingerprint=bytes(16),
    task_id=str(uuid.UUID(int=4)),
    value=Stored(content_type="application/json", content_encoding="utf-8", body=b"x" * 100),
)


def test_a_result_of_100_bytes_fits_the_allocators_class_of_160():
    # Redis adds 4 bytes to a string of this length.
    assert len(pack(COMPLETED)) == 156


def test_counts_beyond_255_stay_there():
    many = dataclasses.replace(COMPLETED, crashes=300, attempts=1000)
    found = unpack_record(identity, pack(many))
    assert (found.crashes, found.attempts) == (255, 255)


def test_a_delivered_record_stays_readable():
    packed = pack(COMPLETED)
    marked = packed[:1] + bytes((packed[1] | 16,)) + packed[2:]
    assert unpack_record(identity, marked) == dataclasses.replace(COMPLETED, delivered=True)


@pytest.mark.parametrize(
    "newer",
    [
        b"S" + pack(COMPLETED)[1:],
        b"Q\x08" + pack(COMPLETED)[2:],
        b"C\x80" + pack(COMPLETED)[2:],
        b"",
        b"C",
        pack(dataclasses.replace(COMPLETED, task_id=""))[:41] + b"\xff{}",
    ],
)
def test_what_a_newer_version_wrote_is_told_so(newer):
    with pytest.raises(StoreMisconfigured, match="newer version"):
        unpack_record(identity, newer)


def readable(packed):
    """Return the record, ``None`` where one is told that it cannot be read."""
    try:
        return unpack_record(identity, packed)
    except StoreMisconfigured:
        return None


def test_a_damaged_record_is_told_so_or_read_and_nothing_else():
    """Cut anywhere, and with any byte of its head another: whoever looks at it knows what to expect."""
    value = Stored(content_type="x/y", content_encoding="z", body=b"{}")
    whole = pack(dataclasses.replace(COMPLETED, value=value, task_id="t"))
    live = bytes((ord("P"),)) + whole[1:]
    damaged = [record[:end] for record in (whole, live) for end in range(len(record))]
    damaged += [
        record[:at] + bytes((byte,)) + record[at + 1 :]
        for record in (whole, live)
        for at in range(len(record))
        for byte in (0, 1, 0x7F, 0x80, 0xFF)
    ]
    read = [record for record in map(readable, damaged) if record is not None]
    assert 0 < len(read) < len(damaged)
    for record in read:
        assert record.created_at.year >= 1970
        assert record.updated_at.year >= 1970


@pytest.mark.parametrize("packed", [b"", b"\x00\x00\x01\xff\x00\x00"])
def test_a_value_that_is_damaged_is_refused(packed):
    with pytest.raises(StoreMisconfigured, match="damaged"):
        unpack_value(packed, 0)


def test_a_value_in_a_form_of_a_newer_version_is_refused():
    with pytest.raises(StoreMisconfigured, match="newer version"):
        unpack_value(bytes((99,)) + b"body", 0)
