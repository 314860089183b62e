"""Names in Redis tell every identity from every other, and lead back to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Identity
from celery_idempotent.stores.redis.format import Keyspace

texts = st.text(st.sampled_from("ab%3A5:{}!\u20ac"), max_size=6) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=30
)
identities = st.builds(Identity, namespace=texts, scope=texts, key=texts)
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
