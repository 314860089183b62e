"""Views of the site beside those of the test project."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db.transaction import non_atomic_requests
from django.http import HttpResponse

from celery_idempotent.django.http import idempotent_view
from testproject.payments.models import Payment

__all__ = ["caller"]


def caller(request: Any) -> str | None:
    """Who calls, as a proxy in front of the project might say it."""
    found: str | None = request.headers.get("X-Caller")
    return found


@idempotent_view(scope=caller)
def plain(_: Any) -> HttpResponse:
    return HttpResponse()


@non_atomic_requests
@idempotent_view(scope=caller, atomic=settings.PAYMENTS_ATOMIC)
def broken(request: Any) -> HttpResponse:
    """Write, and answer with any status."""
    enter(request)
    return HttpResponse(status=int(request.GET["status"]))


@non_atomic_requests
@idempotent_view(scope=caller, atomic=settings.PAYMENTS_ATOMIC)
async def abroken(request: Any) -> HttpResponse:
    await Payment.objects.acreate(**payment(request))
    return HttpResponse(status=int(request.GET["status"]))


def enter(request: Any) -> None:
    Payment.objects.create(**payment(request))


def payment(request: Any) -> dict[str, Any]:
    return {
        "payer_id": 1,
        "amount": 1,
        "currency": "EUR",
        "recipient": "a",
        "key": request.idempotency_key,
    }
