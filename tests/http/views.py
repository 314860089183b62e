"""Views of every kind, each counting its runs in a file outside of all of them."""

from __future__ import annotations

import os
import signal
import time
from functools import wraps
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from celery.signals import before_task_publish
from django.conf import settings
from django.db.transaction import non_atomic_requests
from django.http import HttpResponse, JsonResponse
from rest_framework.decorators import api_view, parser_classes, throttle_classes
from rest_framework.parsers import FormParser, JSONParser, MultiPartParser
from rest_framework.response import Response
from rest_framework.throttling import SimpleRateThrottle

from celery_idempotent import current_claim
from celery_idempotent.django.http import enqueue, idempotent_view, keyed_view
from testproject.payments import bank
from testproject.payments.models import Payment
from testproject.payments.tasks import pay

__all__ = ["caller"]


def caller(request: Any) -> str | None:
    """Who calls, as a proxy in front of the project might say it."""
    found: str | None = request.headers.get("X-Caller")
    return found


def ran(request: Any) -> int:
    """Note a run of this view, and return how many there were with its key."""
    plain = getattr(request, "_request", request)
    path = Path(os.environ["DATABASE_PATH"]).with_name(f"runs-{plain.idempotency_key}")
    with path.open("ab") as file:
        file.write(b"x")
    return path.stat().st_size


guarded = idempotent_view(scope=caller)


@guarded
def plain(request: Any) -> HttpResponse:
    response = JsonResponse({"run": ran(request), "nonce": os.urandom(8).hex()}, status=201)
    response["Location"] = "/things/1/"
    response["X-Request-ID"] = "of the first request"
    response["Date"] = "Thu, 01 Jan 1970 00:00:00 GMT"
    response.set_cookie("session", "never to be repeated")
    return response


@idempotent_view(scope=caller, wait=20)
def patient(request: Any) -> HttpResponse:
    number = ran(request)
    time.sleep(1)
    return JsonResponse({"run": number})


@guarded
def stepping(request: Any) -> HttpResponse:
    """Fail after a step, the first time."""
    claim = current_claim()
    assert claim is not None
    charged = claim.step("charge", ran, request)
    attempts = Path(os.environ["DATABASE_PATH"]).with_name(f"tries-{request.idempotency_key}")
    if not attempts.exists():
        attempts.touch()
        return HttpResponse(status=503)
    return JsonResponse({"charged": charged})


@guarded
def slow(request: Any) -> HttpResponse:
    """Take longer than the lease."""
    number = ran(request)
    time.sleep(float(request.GET["seconds"]))
    return JsonResponse({"run": number})


@api_view(["POST"])
@idempotent_view
def rest_inside(request: Any) -> Response:
    return Response({"run": ran(request), "user": request.user.username})


class OnceAnHour(SimpleRateThrottle):
    """Lets a caller ask once an hour; which hour it is, the request says."""

    rate = "1/hour"

    def get_cache_key(self, request: Any, view: Any) -> str:
        return f"{request.user.pk} {request.headers['X-Hour']}"


@api_view(["POST"])
@throttle_classes([OnceAnHour])
@idempotent_view
def throttled(request: Any) -> Response:
    return Response({"run": ran(request)})


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


@api_view(["POST"])
@keyed_view
def rolled_back(request: Any) -> Response:
    """Queue, and fail."""
    answer = enqueue(request, pay, kwargs={"payer": request.user.pk, **request.data})
    assert answer.status_code == 202
    raise RuntimeError("after enqueue")


@api_view(["POST"])
@keyed_view
def hesitating(request: Any) -> Any:
    """Queue, and take time before the COMMIT."""
    answer = enqueue(request, pay, kwargs={"payer": request.user.pk, **request.data})
    bank.receipt()
    return answer


@non_atomic_requests
@idempotent_view(scope=caller, atomic=settings.PAYMENTS_ATOMIC)
def announcing(request: Any) -> HttpResponse:
    """Write, and publish what follows from it, in one transaction."""
    enter(request)
    task: Any = pay  # of a Django project
    task.apply_async_on_commit(
        kwargs={"payer": 1, "amount": 1, "currency": "EUR", "recipient": "acct_1"},
        idempotency_key=f"after-{request.idempotency_key}",
    )
    bank.receipt()
    return HttpResponse(status=201)


@before_task_publish.connect
def doomed(**_: Any) -> None:
    """Take this process down between the reservation and the publishing, where a test wants that."""
    if Path(os.environ["DATABASE_PATH"]).with_name("doom").exists():
        os.kill(os.getpid(), signal.SIGKILL)


@non_atomic_requests
@api_view(["POST"])
@keyed_view(required=False)
def at_once(request: Any) -> Any:
    """Queue outside of any transaction."""
    return enqueue(request, pay, kwargs={"payer": request.user.pk, **request.data})


def reading(view: Any) -> Any:
    """Parse the form before the view, as Django's own protection against forged requests does."""

    @wraps(view)
    def wrapper(request: Any) -> Any:
        request.POST.get("csrfmiddlewaretoken")
        return view(request)

    return wrapper


@guarded
def form(request: Any) -> HttpResponse:
    """Pay what a form says."""
    return JsonResponse({"run": ran(request), "amount": request.POST.get("amount")}, status=201)


form_read = reading(form)


@api_view(["POST"])
@parser_classes([FormParser, MultiPartParser, JSONParser])
@idempotent_view(scope=caller)
def rest_form(request: Any) -> Response:
    ran(request)
    return Response({"amount": str(request.data.get("amount"))}, status=201)


def pay_by(request: Any, data: Any) -> HttpResponse:
    order = {"amount": int(data.get("amount", 0)), "currency": "EUR", "recipient": "acct_1"}
    return enqueue(request, pay, kwargs={"payer": 1, **order}, scope="c")


@keyed_view(scope=caller)
def form_later(request: Any) -> HttpResponse:
    return pay_by(request, request.POST)


def form_bare_later(request: Any) -> HttpResponse:
    """Hand a request on that nobody has looked at."""
    return pay_by(request, request.POST)


@keyed_view(scope=caller)
async def aform_later(request: Any) -> HttpResponse:
    data = request.POST
    return await sync_to_async(pay_by)(request, data)
