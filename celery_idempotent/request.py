"""The request class of idempotent tasks, as a base for your own."""

from __future__ import annotations

from celery_idempotent.celery.worker import Request

__all__ = ["Request"]
