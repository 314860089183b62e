"""The pages for operators in Django's admin, over whatever store the app uses."""

from __future__ import annotations

from django.contrib import admin

from celery_idempotent.django.admin.site import IdempotencyRecordAdmin, OutboxAdmin
from celery_idempotent.django.models import IdempotencyRecord, OutboxMessage

__all__ = ["IdempotencyRecordAdmin", "OutboxAdmin"]

# Autodiscovered. Another site registers them itself.
admin.site.register(IdempotencyRecord, IdempotencyRecordAdmin)
admin.site.register(OutboxMessage, OutboxAdmin)
