"""The test project's addresses, and views of the tests beside its own."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db.transaction import non_atomic_requests
from django.http import HttpResponse
from django.urls import include, path

from celery_idempotent.django.http import idempotent_view
from testproject.payments.models import Payment


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
    Payment.objects.create(**payment(request))
    return HttpResponse(status=int(request.GET["status"]))


@non_atomic_requests
@idempotent_view(scope=caller, atomic=settings.PAYMENTS_ATOMIC)
async def abroken(request: Any) -> HttpResponse:
    await Payment.objects.acreate(**payment(request))
    return HttpResponse(status=int(request.GET["status"]))


def payment(request: Any) -> dict[str, Any]:
    order = {"payer_id": 1, "amount": 1, "currency": "EUR", "recipient": "a"}
    return {**order, "key": request.idempotency_key}


def csrf_exempt(view: Any) -> Any:
    """As Django's, whose own makes a plain function of a coroutine before Django 5.0."""
    view.csrf_exempt = True
    return view


urlpatterns = [
    path("", include("testproject.urls")),
    *(path(f"t/{each.__name__}/", csrf_exempt(each)) for each in (plain, broken, abroken)),
]
