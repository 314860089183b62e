"""Payments in the admin: to look at, not to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin

from testproject.payments.models import Payment

if TYPE_CHECKING:
    PaymentBase = admin.ModelAdmin[Payment]
else:
    PaymentBase = admin.ModelAdmin

__all__ = ["PaymentAdmin"]


@admin.register(Payment)
class PaymentAdmin(PaymentBase):
    list_display = ("id", "payer", "sum", "recipient", "created", "key")
    fields = ("payer", "sum", "recipient", "created", "key")
    search_fields = ("key", "recipient")

    @admin.display(description="Amount", ordering="amount")
    def sum(self, payment: Payment) -> str:
        return f"{payment.amount / 100:.2f} {payment.currency}"

    def has_add_permission(self, request: Any) -> bool:  # noqa: ARG002  the interface
        return False

    def has_change_permission(self, *_: Any, **__: Any) -> bool:
        return False

    def has_delete_permission(self, *_: Any, **__: Any) -> bool:
        return False
