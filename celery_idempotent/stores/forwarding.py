"""A store before another: what it does not change, the other does."""

from __future__ import annotations

from typing import Any

from celery_idempotent.stores.base import Store

__all__ = ["ForwardingStore"]


def _forwarded(name: str) -> Any:
    """Return a method that does what the method of this name of the inner store does."""

    def forward(self: ForwardingStore, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return forward


class ForwardingStore(Store):
    """Forwards every call to ``inner``, and can do what that can.

    Except standing behind a cache, and storing results: a subclass that settles in its own way would be passed by.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.supports_transactions = inner.supports_transactions
        self.supports_counting = inner.supports_counting
        self.outbox_alias = inner.outbox_alias

    claim = _forwarded("claim")
    renew = _forwarded("renew")
    settle = _forwarded("settle")
    reserve = _forwarded("reserve")
    checkpoint = _forwarded("checkpoint")
    mark_delivered = _forwarded("mark_delivered")
    release = _forwarded("release")
    interrupt = _forwarded("interrupt")
    get = _forwarded("get")
    requeue = _forwarded("requeue")
    sweep = _forwarded("sweep")
    prune = _forwarded("prune")
    forget = _forwarded("forget")
    stats = _forwarded("stats")
    list = _forwarded("list")
    close = _forwarded("close")
    now_ms = _forwarded("now_ms")
    joined = _forwarded("joined")
    transaction = _forwarded("transaction")
    committed = _forwarded("committed")
    abandon = _forwarded("abandon")
    count = _forwarded("count")
    counts = _forwarded("counts")
    note_sweep = _forwarded("note_sweep")
    upkeep = _forwarded("upkeep")
    missing_bounds = _forwarded("missing_bounds")
    missing_rights = _forwarded("missing_rights")
