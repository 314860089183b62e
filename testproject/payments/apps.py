"""The app."""

from __future__ import annotations

from django.apps import AppConfig

__all__ = ["PaymentsConfig"]


class PaymentsConfig(AppConfig):
    name = "testproject.payments"
    verbose_name = "Payments"
