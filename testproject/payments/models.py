"""The payments that were made."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import models


class Payment(models.Model):
    """One payment, entered once the bank took it.

    No constraint makes the key unique: that would hide the double payments that this project shows not to happen.
    """

    payer = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="payments"
    )
    amount = models.PositiveBigIntegerField()
    currency = models.CharField(max_length=3)
    recipient = models.CharField(max_length=64)
    key = models.CharField(max_length=255, db_index=True)
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-pk",)

    def told(self) -> dict[str, Any]:
        """Return what the APIs tell of it."""
        names = ("id", "amount", "currency", "recipient", "key", "created")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return f"{self.amount / 100:.2f} {self.currency} to {self.recipient}"
