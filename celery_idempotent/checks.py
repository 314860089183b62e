"""Looking for what may go wrong before it does: the names that the documentation gives."""

from __future__ import annotations

from celery_idempotent.celery.checks import Finding, check, check_settings, check_store

__all__ = ["Finding", "check", "check_settings", "check_store"]
