"""The request class of idempotent tasks, for those who derive their own from it."""

from __future__ import annotations

from celery_idempotent.celery.worker import Request

__all__ = ["Request"]
