"""The pages for operators in Django's admin, over whatever store the app uses."""

from __future__ import annotations

from django.contrib import admin

from celery_idempotent.django.admin.site import IdempotencyRecordAdmin
from celery_idempotent.django.models import IdempotencyRecord

__all__ = ["IdempotencyRecordAdmin"]

# Autodiscovered. Another site registers it itself.
admin.site.register(IdempotencyRecord, IdempotencyRecordAdmin)
