"""The verbs as these tests ask for them: with the usual times, about one key unless a test names another."""

from __future__ import annotations

from typing import Any

from celery_idempotent.records import Identity, Record, Renewal, SettleRequest, State
from tests.stores import verbs
from tests.stores.verbs import KEY, VALUE

__all__ = ["KEY", "TIMES", "VALUE", "claim", "claimed", "end_of", "named", "renewal"]

TIMES: Any = {"lease_ms": 60_000, "keep_ms": 60_000}


def named(key: str) -> Identity:
    return Identity(namespace="charge", key=key)


def claim(store: Any, identity: Identity = KEY, **changes: Any) -> Any:
    """Ask for a key; return the answer."""
    return verbs.ask(store, identity, **{**TIMES, **changes})


def claimed(store: Any, identity: Identity = KEY, **changes: Any) -> Record:
    """Claim a key that is free; return its record."""
    return verbs.claim(store, identity, **{**TIMES, **changes})


def end_of(record: Record, **changes: Any) -> SettleRequest:
    """Return what completes a claim."""
    asked: Any = {"state": State.COMPLETED, "value": VALUE, "keep_ms": 60_000, **changes}
    return SettleRequest(record=record, **asked)


def renewal(record: Record, **changes: Any) -> Renewal:
    """Return what renews a claim."""
    return Renewal(identity=record.identity, token=record.token, **{**TIMES, **changes})
