"""The Django app: ``INSTALLED_APPS = [..., "celery_idempotent.django"]``."""

from __future__ import annotations

from django.apps import AppConfig, apps


class IdempotencyConfig(AppConfig):
    """Tables, pages and checks of celery-idempotent."""

    name = "celery_idempotent.django"
    label = "celery_idempotent"
    verbose_name = "Idempotency"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks, and the admin's log as where operations are written down.

        Raises:
            ImproperlyConfigured: if tenants of django-tenants would have tables of their own.
        """
        from celery_idempotent.celery.operations import audit_logs
        from celery_idempotent.django import checks  # noqa: F401
        from celery_idempotent.django.tenants import refuse_tenant_tables

        if apps.is_installed("django_tenants"):
            refuse_tenant_tables()
        if apps.is_installed("django.contrib.admin"):
            from celery_idempotent.django.admin.audit import write_entry

            audit_logs.append(write_entry)
