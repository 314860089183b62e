"""Checks of settings, tasks and servers: the public names."""

from __future__ import annotations

from celery_idempotent.celery.checks import Finding, check, check_settings, check_store

__all__ = ["Finding", "check", "check_settings", "check_store"]
