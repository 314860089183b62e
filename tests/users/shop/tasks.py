"""A user's tasks: a payment beside its record, and one that is committed with it."""

from __future__ import annotations

from typing import Any

from celery_idempotent.django import IdempotentTask
from tests.users.shop.celery import app
from tests.users.shop.models import Payment


@app.task(base=IdempotentTask, bind=True, idempotency_key="order")
def pay(self: Any, order: str) -> str:
    self.idempotency.step("write", _write, order)
    if order.startswith("bad"):
        raise ValueError(order)
    return f"paid {order}"


@app.task(base=IdempotentTask, bind=True, idempotency_key="order", idempotency_atomic=True)
def charge(self: Any, order: str) -> str:
    Payment.objects.create(order=order)
    pay.delay_on_commit(f"follow-up of {order}")
    if order.startswith("bad"):
        raise ValueError(order)
    return f"charged {order}"


@app.task(base=IdempotentTask, idempotency_key="order")
def pay_carelessly(order: str) -> str:
    Payment.objects.create(order=order)
    return f"paid {order}"


def _write(order: str) -> int:
    return int(Payment.objects.create(order=order).pk)
