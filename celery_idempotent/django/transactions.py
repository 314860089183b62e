"""Which transaction the code at work belongs to."""

from __future__ import annotations

from django.db import connections

from celery_idempotent.claim import current_claim

__all__ = ["alias_in_use"]


def alias_in_use() -> str | None:
    """Return the database whose transaction the running atomic task will commit with its record; else ``None``."""
    claim = current_claim()
    if claim is None or claim.transaction is None:
        return None
    alias: str | None = getattr(claim.store, "outbox_alias", None)
    return alias if alias is not None and connections[alias].in_atomic_block else None
