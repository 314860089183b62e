"""What the parts of the contract share: the fixtures to override, and short ways to say things."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence

import pytest

from celery_idempotent.records import (
    ATTEMPT_BYTES,
    Answer,
    Claimed,
    ClaimRequest,
    EndState,
    Identity,
    Record,
    Renewal,
    Reservation,
    Reserved,
    ReserveRequest,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores.base import Store
from celery_idempotent.stores.table import Fields

Advance = Callable[[float], None]

KEY = Identity(namespace="payments.charge", scope="acct_1", key="order-17")
MESSAGE = b'{"id": "6ff5d5ba", "args": [17]}'
VALUE = Stored(content_type="application/json", content_encoding="utf-8", body=b'{"paid": true}')
FINGERPRINT = bytes(range(16))
OTHER_FINGERPRINT = bytes(range(16, 32))
TASK_ID = "6ff5d5ba-6ff1-4b4f-8f0e-4f0f2f1f0f3f"

#: So many that a sweep with a limit takes several turns.
NAMES = [dataclasses.replace(KEY, key=f"order-{n}") for n in range(40)]


def attempt() -> bytes:
    """Return a new attempt id."""
    return os.urandom(ATTEMPT_BYTES)


class ContractBase:
    """The fixtures that a subclass overrides, and the helpers of all parts."""

    #: How long the tests' leases last, and records beyond them.
    lease_ms = 60_000
    keep_ms = 120_000
    #: How many want one key at once.
    many = 50
    #: Whether `make test` walks over one cell of the table for each answer and outcome only.
    few_cells = False

    @pytest.fixture
    def store(self) -> Store:
        """Return the store to test, without any record."""
        raise NotImplementedError("override the fixture `store`")

    @pytest.fixture
    def advance(self) -> Advance:
        """Return a function that lets milliseconds pass by the store's clock."""
        return lambda ms: time.sleep(ms / 1000)

    @pytest.fixture
    def stop_at(self) -> Callable[[int], None]:
        """Return a function that stops the store's clock at a millisecond; skip where that is not possible."""
        pytest.skip("the store's clock cannot be stopped")

    def set_back(self, advance: Advance) -> None:
        """Set the store's clock back by an hour, unless only time itself lets it advance."""
        with contextlib.suppress(ValueError):
            advance(-3_600_000)

    def claim(self, store: Store, identity: Identity = KEY, /, **changes: object) -> Record:
        """Claim a key that is free; return the record."""
        answer = self.try_claim(store, identity, **changes)
        assert isinstance(answer, Claimed)
        return answer.record

    def try_claim(self, store: Store, identity: Identity = KEY, /, **changes: object) -> Answer:
        """Claim a key, whatever the answer."""
        asked: Fields = {
            "identity": identity,
            "attempt": attempt(),
            "lease_ms": self.lease_ms,
            "keep_ms": self.keep_ms,
            "fingerprint": FINGERPRINT,
            "task_id": TASK_ID,
            "worker": "web-1:4711",
        }
        return store.claim(ClaimRequest(**{**asked, **changes}))

    def reserve(self, store: Store, identity: Identity = KEY, /, **changes: object) -> Record:
        """Reserve a key that can be reserved; return the record."""
        answer = self.try_reserve(store, identity, **changes)
        assert isinstance(answer, Reserved)
        return answer.record

    def try_reserve(
        self, store: Store, identity: Identity = KEY, /, **changes: object
    ) -> Reservation:
        """Reserve a key, whatever the answer."""
        asked: Fields = {
            "identity": identity,
            "task_id": TASK_ID,
            "deadline_ms": self.lease_ms,
            "keep_ms": self.keep_ms,
            "fingerprint": FINGERPRINT,
        }
        return store.reserve(ReserveRequest(**{**asked, **changes}))

    def settle(
        self,
        store: Store,
        record: Record,
        state: EndState = State.COMPLETED,
        **changes: object,
    ) -> bool:
        """Settle a claim."""
        asked: Fields = {"value": VALUE, "keep_ms": self.keep_ms, **changes}
        return store.settle(SettleRequest(record=record, state=state, **asked))

    def lease(self, record: Record, **changes: object) -> Renewal:
        """Return what renews a claim."""
        asked: Fields = {"token": record.token, "lease_ms": self.lease_ms, "keep_ms": self.keep_ms}
        return Renewal(identity=record.identity, **{**asked, **changes})

    def renew(self, store: Store, record: Record, **changes: object) -> bool:
        """Renew one claim."""
        (renewed,) = store.renew([self.lease(record, **changes)])
        return renewed

    def found(self, store: Store, identity: Identity = KEY) -> Record:
        """Return the record that there is."""
        record = store.get(identity)
        assert record is not None
        return record

    def known(self, store: Store, identities: Sequence[Identity]) -> list[Record]:
        """Return the records that these identities have."""
        found = [store.get(identity) for identity in identities]
        return [record for record in found if record is not None]
