"""What a user's tasks write."""

from __future__ import annotations

from django.db import models


class Payment(models.Model):
    """One effect."""

    order = models.CharField(max_length=50)

    class Meta:
        app_label = "shop"

    def __str__(self) -> str:
        return self.order
