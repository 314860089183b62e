"""Stores of records: what they must do (:mod:`.base`), how they decide, and which one an app uses."""

from __future__ import annotations

from celery_idempotent.stores.base import Store
from celery_idempotent.stores.opening import get_store, open_store

__all__ = ["Store", "get_store", "open_store"]
