"""A user's guarded views."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse

from celery_idempotent.django.http import enqueue, idempotent_view, keyed_view
from tests.users.shop.models import Payment
from tests.users.shop.tasks import pay


def anybody(_: Any) -> str:
    return "anybody"


@idempotent_view
def buy(request: HttpRequest) -> HttpResponse:
    payment = Payment.objects.create(order=request.POST["order"])
    return JsonResponse({"payment": payment.pk}, status=201)


@idempotent_view(atomic=True)
def buy_atomically(request: HttpRequest) -> HttpResponse:
    payment = Payment.objects.create(order=request.POST["order"])
    return JsonResponse({"payment": payment.pk}, status=201)


@keyed_view
def order(request: HttpRequest) -> HttpResponse:
    return enqueue(request, pay, kwargs={"order": request.POST["order"]})
