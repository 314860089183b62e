"""Payments in the admin."""

from __future__ import annotations

from django.contrib import admin

from testproject.payments.models import Payment

admin.site.register(
    Payment,
    list_display=("id", "payer", "amount", "currency", "recipient", "created", "key"),
    search_fields=("key", "recipient"),
)
