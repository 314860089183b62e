"""A stored record says all that the record says, in few bytes; its name in Redis leads back to its identity."""

from __future__ import annotations

import dataclasses
import uuid
from datetime import timedelta, timezone
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from celery_idempotent.celery.story import iso
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Identity, Record, State, Stored
from celery_idempotent.stores.fields import LETTERS
from celery_idempotent.stores.redis import format as layout
from celery_idempotent.stores.redis.format import HEAD, Keyspace, pack
from celery_idempotent.stores.table import LEASED, StoredRecord

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
identity = Identity(namespace="charge", key="order-17")
unpack = partial(layout.unpack, layout.Keyspace("idem"))
values = st.builds(
    Stored,
    content_type=st.sampled_from(["application/json", "application/data", ""]) | texts,
    content_encoding=st.sampled_from(["utf-8", "binary", ""]) | texts,
    body=st.binary(max_size=300),
)
milliseconds = st.integers(0, 2**48 - 1)
common = {
    "identity": st.just(identity),
    "token": st.integers(0, 2**53),
    "created_ms": milliseconds,
    "updated_ms": st.integers(1, 2**48 - 1),
    "crashes": st.integers(0, 65_535),
    "attempts": st.integers(0, 65_535),
    "fingerprint": st.none() | st.binary(min_size=16, max_size=16),
    "task_id": st.uuids().map(str) | st.uuids().map(lambda u: str(u).upper()) | texts,
    "swept": st.booleans(),
    "note": texts,
}
settled = st.builds(
    Record,
    state=st.sampled_from([State.COMPLETED, State.FAILED]),
    value=st.none() | values,
    replaced=st.booleans(),
    delivered=st.booleans(),
    **common,
)
live = st.builds(
    lambda deadline_ms, **others: Record(
        deadline_ms=deadline_ms if others["state"] in LEASED else None, **others
    ),
    state=st.sampled_from([State.QUEUED, State.PROCESSING, State.INTERRUPTED]),
    deadline_ms=st.integers(1, 2**48),
    worker=texts,
    reserved=st.booleans(),
    uncommitted=st.booleans(),
    on_stale=st.sampled_from(["interrupt", "fail", "requeue"]),
    message=st.none() | st.binary(max_size=300),
    steps=st.lists(st.tuples(texts, values), max_size=3).map(tuple),
    **common,
)
stored = st.builds(
    StoredRecord,
    record=settled | live,
    expires_ms=st.just(0),
    attempt=st.just(b"") | st.binary(min_size=8, max_size=8).filter(any),
    requeues=st.integers(0, 20),
)


def packed(record: Record) -> bytes:
    return pack(StoredRecord(record, 0), b"\1\2\3\4")


@given(stored)
def test_a_record_comes_back(each: StoredRecord):
    assert unpack(identity, pack(each, b"\1\2\3\4")) == each


@given(stored, st.integers(1300, 2048))
def test_a_summary_is_all_but_value_message_and_steps(each: StoredRecord, size: int):
    record = unpack(identity, pack(each, b"\1\2\3\4")[:size], summary=True).record
    wanted = dataclasses.replace(each.record, value=None, message=None, steps=())
    cut = b"\n" not in pack(each, b"\1\2\3\4")[HEAD.size : size]
    if cut and not each.record.steps:
        wanted = dataclasses.replace(record, state=each.record.state, token=each.record.token)
    assert record == wanted


def test_a_summary_of_many_steps_has_what_comes_before_them():
    steps = tuple((f"step {n}", COMPLETED.value) for n in range(100))
    record = dataclasses.replace(
        COMPLETED, state=State.INTERRUPTED, value=None, steps=steps, worker="w", note='"steps":'
    )
    found = unpack(identity, packed(record)[:2048], summary=True).record
    assert found == dataclasses.replace(record, steps=())


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


def test_a_result_of_100_bytes_takes_84_more():
    assert len(packed(COMPLETED)) == 184


def test_each_state_has_a_letter_that_no_other_has():
    """A database marks a key that was given back with R."""
    assert LETTERS.keys() == set(State)
    assert len({*LETTERS.values(), "R"}) == len(State) + 1


def test_counts_stay_where_they_end():
    many = dataclasses.replace(COMPLETED, crashes=70_000, attempts=70_000)
    found = unpack(identity, packed(many)).record
    assert (found.crashes, found.attempts) == (65_535, 65_535)


def test_a_field_of_a_newer_version_is_left_out():
    head, _, rest = packed(COMPLETED).partition(b"\n")
    assert unpack(identity, head + b'{"later":1}\n' + rest).record == COMPLETED


def readable(damaged: bytes) -> Record | None:
    """Return the record, ``None`` where one is told that it cannot be read."""
    try:
        return unpack(identity, damaged).record
    except StoreMisconfigured:
        return None


def test_a_damaged_record_is_told_so_or_read_and_nothing_else():
    """Cut anywhere, and with any byte another: whoever looks at it knows what to expect."""
    value = Stored(content_type="x/y", content_encoding="z", body=b"{}")
    whole = packed(dataclasses.replace(COMPLETED, value=value, task_id="t"))
    running = packed(
        dataclasses.replace(
            COMPLETED, state=State.PROCESSING, value=None, message=b"m", steps=(("s", value),)
        )
    )
    damaged = [record[:end] for record in (whole, running) for end in range(len(record))]
    damaged += [
        record[:at] + bytes((byte,)) + record[at + 1 :]
        for record in (whole, running)
        for at in range(len(record))
        for byte in (0, 1, 0x7F, 0x80, 0xFF)
    ]
    read = [record for record in map(readable, damaged) if record is not None]
    assert 0 < len(read) < len(damaged)


def test_the_times_of_a_damaged_record_can_be_shown_in_every_time_zone():
    late = 2**64 - 1
    damaged = dataclasses.replace(
        COMPLETED, state=State.PROCESSING, created_ms=late, updated_ms=late, deadline_ms=late
    )
    found = unpack(identity, packed(damaged)).record
    assert found.deadline is not None
    shown = found.created_at, found.updated_at, found.deadline
    assert {each.astimezone(timezone(timedelta(hours=14))).year for each in shown} == {9999}
    assert iso(found.created_ms) == "9999-01-01T00:00:00.000Z"


# Names ----------------------------------------------------------------------------------------------------------------

parts = st.text(st.sampled_from("ab%3A5:{}!\u20ac"), max_size=6) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=30
)
identities = st.builds(Identity, namespace=parts, scope=parts, key=parts)
keyspace = Keyspace("idem")


@given(identities, identities)
def test_two_identities_never_share_a_name(one, other):
    assert (one == other) == (keyspace.of_record(one)[0] == keyspace.of_record(other)[0])


@given(identities, st.sampled_from(["idem", "my:app", "a!b", "\u20ac"]))
def test_a_name_leads_back_to_its_identity(identity, prefix):
    space = Keyspace(prefix)
    assert space.identity(space.of_record(identity)[0]) == identity


@given(identities)
def test_all_that_a_script_touches_lies_in_one_slot(identity):
    name, *companions = keyspace.of_record(identity)
    assert {key_slot(each) for each in companions} == {key_slot(name)}
    assert name not in companions
    assert companions[0] in keyspace.index(b"!leases")


def test_names_are_fixed_for_ever():
    identity = Identity(namespace="payments.charge", scope="acct_1", key="order-17")
    odd = Identity(namespace="a:b", scope="100%", key="x:y%z")
    assert keyspace.of_record(odd)[0].partition(b"}")[2] == b":a%3Ab:100%25:x:y%z"
    assert keyspace.of_record(identity) == (
        b"idem:{123}:payments.charge:acct_1:order-17",
        b"idem:{123}!leases",
        b"idem:{123}!failures",
        b"idem:{123}!interrupted",
    )
    assert keyspace.index(b"!leases")[123] == b"idem:{123}!leases"


@pytest.mark.parametrize("prefix", ["", "{", "a}b", "{x}"])
def test_a_prefix_with_braces_is_refused(prefix):
    with pytest.raises(StoreMisconfigured, match="braces"):
        Keyspace(prefix)
