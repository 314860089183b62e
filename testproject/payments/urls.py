"""The payments API and its page."""

from __future__ import annotations

from django.urls import path

from testproject.payments.api import Payments, PayNow
from testproject.payments.pages import pay_page

__all__ = ["urlpatterns"]

urlpatterns = [
    path("pay/", pay_page, name="pay"),
    path("payments/", Payments.as_view(), name="payments"),
    path("payments/now/", PayNow.as_view(), name="payments-now"),
]
