"""The contract about names and values: any key, any value, and no two keys taken for one."""

from __future__ import annotations

import pytest

from celery_idempotent.records import Identity, Settled, Stored
from celery_idempotent.stores.base import Store
from tests.contract.base import FINGERPRINT, KEY, Advance, ContractBase

#: Each would meet another one if names were made by joining.
CONFUSABLE = [
    Identity(namespace=namespace, scope=scope, key=key)
    for namespace, scope, key in (
        ("a", "", "b:c"),
        ("a", "b", "c"),
        ("a:b", "", "c"),
        ("a:b", "c", ""),
        ("a", "b:c", ""),
        ("a", "", "b%3Ac"),
        ("a%3Ab", "", "c"),
        ("a%253Ab", "", "c"),
        ("a", "b%3Ac", ""),
        ("a", "{1}", "c"),
        ("a", "", "{1}c"),
        ("a", "", "1"),
        ("a", "", "01"),
        ("a", "", '"1"'),
        ("a", "", "1 "),
        ("a", "1", "1"),
        ("A", "", "1"),
        ("a", "", "\u00e9"),
        ("a", "", "e\u0301"),
    )
    if key
]
UNUSUAL = [
    "x" * 255,
    "\u20ac" * 255,
    "\U0001f600",
    "{}{7}",
    "}:{",
    "a b",
    "%",
    "%s%d",
    "*?[a-z]",
    "!leases",
    "'; --",
    "../..",
]


class IdentityContract(ContractBase):
    """Identities and values."""

    def test_identities_that_look_alike_stay_apart(self, store: Store) -> None:
        """A store that joins the parts by a separator takes ``("a", "b:c")`` and ``("a:b", "c")`` for one key; a
        database may compare without case, accents or trailing blanks. Then one customer would get the result of
        another.
        """
        records = [self.claim(store, identity) for identity in CONFUSABLE]
        for identity, record in zip(CONFUSABLE, records, strict=True):
            assert store.get(identity) == record
        for identity in CONFUSABLE[::2]:
            assert store.forget(identity)
        assert self.known(store, CONFUSABLE) == records[1::2]

    @pytest.mark.parametrize("key", UNUSUAL)
    def test_any_printable_key_is_kept_as_it_is(self, store: Store, key: str) -> None:
        """Keys come from clients: they may look like a pattern, a statement, a path or a Redis hash tag."""
        identity = Identity(namespace="tasks.charge", scope=key, key=key)
        record = self.claim(store, identity)
        assert store.get(identity) == record
        assert record.identity == identity
        assert self.settle(store, record)

    def test_a_swept_record_has_the_identity_that_it_was_claimed_with(
        self, store: Store, advance: Advance
    ) -> None:
        """A sweep may know no more of a record than the name that the store made for it, and has to take that apart
        again.
        """
        for identity in CONFUSABLE:
            self.claim(store, identity)
        advance(self.lease_ms + 1)
        swept = store.sweep(limit=1000).interrupted
        assert {record.identity for record in swept} == set(CONFUSABLE)

    @pytest.mark.parametrize(
        "value",
        [
            None,
            ("application/json", "utf-8", b""),
            ("application/json", "utf-8", b"x" * 1024 * 1024),
            ("application/x-python-serialize", "binary", bytes(range(256))),
            ("application/x-msgpack", "binary", b"\x00"),
            ("application/vnd.example+json", "utf-16", "\u20ac".encode("utf-16")),
            ("", "", b"\r\n$5\r\n"),
        ],
        ids=["none", "empty", "1 MiB", "binary", "zero", "unusual type", "no type"],
    )
    @pytest.mark.parametrize("fingerprint", [None, FINGERPRINT])
    def test_any_value_comes_back_as_it_was(
        self, store: Store, value: tuple[str, str, bytes] | None, fingerprint: bytes | None
    ) -> None:
        """A value is bytes with a type, which no store may read, convert or cut; it need not be kept."""
        kept = value and Stored(content_type=value[0], content_encoding=value[1], body=value[2])
        assert self.settle(store, self.claim(store, fingerprint=fingerprint), value=kept)
        answer = self.try_claim(store)
        assert isinstance(answer, Settled)
        assert (answer.record.value, answer.record.fingerprint) == (kept, fingerprint)
        assert self.found(store) == answer.record

    @pytest.mark.parametrize("text", ["", "\u00fc@h\u00f6st:1", "x" * 1000])
    def test_any_owner_comes_back_as_it_was(self, store: Store, text: str) -> None:
        """Task ids are any text, host names too: nothing may rely on UUIDs, on ASCII or on a length."""
        record = self.claim(store, task_id=text, worker=text)
        assert (record.task_id, record.worker) == (text, text)
        assert store.get(KEY) == record
        assert self.settle(store, record)
        found = store.get(KEY)
        assert found is not None
        assert found.task_id == text
