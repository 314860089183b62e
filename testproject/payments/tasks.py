"""Paying, in a worker."""

from __future__ import annotations

from typing import Any

from celery_idempotent import IdempotentTask, current_claim
from testproject.celery import app
from testproject.payments import bank
from testproject.payments.models import Payment


@app.task(
    base=IdempotentTask,
    idempotency_permanent_errors=(bank.PaymentRefused,),
    ignore_result=True,
)
def pay(payer: int, amount: int, currency: str, recipient: str) -> dict[str, Any]:
    """Make a payment; its key came with the request."""
    return make_payment(payer, amount, currency, recipient)


def make_payment(payer: int, amount: int, currency: str, recipient: str) -> dict[str, Any]:
    """Ask the bank, and enter the payment."""
    bank.transfer(recipient)
    claim = current_claim()
    payment = Payment.objects.create(
        payer_id=payer,
        amount=amount,
        currency=currency,
        recipient=recipient,
        key=claim.key if claim is not None else "",
    )
    bank.receipt()
    return payment.told()
