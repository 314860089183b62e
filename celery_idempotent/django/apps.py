"""The Django app: ``INSTALLED_APPS = [..., "celery_idempotent.django"]``."""

from __future__ import annotations

from django.apps import AppConfig

__all__ = ["IdempotencyConfig"]


class IdempotencyConfig(AppConfig):
    """Tables, pages and checks of celery-idempotent."""

    name = "celery_idempotent.django"
    label = "celery_idempotent"
    verbose_name = "Idempotency"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks."""
        from celery_idempotent.django import checks  # noqa: F401
