"""The API: ``POST /payments/`` hands a payment to a worker, ``POST /payments/now/`` makes it in the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db.transaction import non_atomic_requests
from django.utils.decorators import method_decorator
from rest_framework import serializers
from rest_framework.exceptions import APIException, ValidationError
from rest_framework.response import Response
from rest_framework.views import APIView, exception_handler

from celery_idempotent.django.http import enqueue, idempotent_view, keyed_view, problem
from testproject.payments import bank
from testproject.payments.tasks import make_payment, pay

if TYPE_CHECKING:
    from django.http import HttpResponse
    from rest_framework.request import Request


_UNREACHABLE: Any = {"status": 502, "title": "The bank is out of reach", "retryable": True}


class Order(serializers.Serializer[Any]):
    """What to pay."""

    amount = serializers.IntegerField(
        min_value=1, max_value=100_000_000, help_text="In minor units: 100 is one euro."
    )
    currency = serializers.ChoiceField(choices=["EUR", "GBP", "USD"])
    recipient = serializers.RegexField(r"^acct_[A-Za-z0-9]{1,40}\Z")


def order_of(request: Request) -> dict[str, Any]:
    """Return what is to be paid; :exc:`ValidationError` if the body is no order."""
    order = Order(data=request.data)
    order.is_valid(raise_exception=True)
    return dict(order.validated_data)


def problems(error: Exception, context: dict[str, Any]) -> HttpResponse | Response | None:
    """Answer what the framework refuses (no login, a bad body) as the library answers what it refuses."""
    usual = exception_handler(error, context)
    if usual is None or not isinstance(error, APIException):
        return usual
    members: dict[str, Any] = {"errors": error.detail} if isinstance(error, ValidationError) else {}
    answer = problem(
        "body_invalid" if members else str(error.default_code),
        "Some fields are not valid." if members else str(error.detail),
        status=error.status_code,
        title=str(error.default_detail),
        retryable=error.status_code == 429,
        **members,
    )
    for name in ("WWW-Authenticate", "Retry-After"):
        if usual.has_header(name):
            answer[name] = usual[name]
    if context["request"].headers.get("X-Requested-With") == "fetch":
        # Asked by a page's script: for a challenge the browser would open a dialog of its own.
        del answer["WWW-Authenticate"]
    return answer


class Payments(APIView):
    """Payments by a worker."""

    def get(self, request: Request) -> Response:
        """List the caller's last payments."""
        user: Any = request.user
        return Response([each.told() for each in user.payments.all()[:50]])

    @keyed_view
    def post(self, request: Request) -> HttpResponse:
        """Let a worker pay: 202 and where to ask for its status."""
        return enqueue(request, pay, kwargs={"payer": request.user.pk, **order_of(request)})


# The view's own transaction is inside its claim.
@method_decorator(non_atomic_requests, name="dispatch")
class PayNow(APIView):
    """Payments in the request."""

    @idempotent_view(atomic=settings.PAYMENTS_ATOMIC)
    def post(self, request: Request) -> HttpResponse:
        """Pay now: 201 and the payment."""
        try:
            made = make_payment(payer=int(request.user.pk or 0), **order_of(request))
        except bank.PaymentRefused as refused:
            return problem("payment_refused", str(refused), status=402, title="The bank refuses it")
        except bank.BankUnreachable:
            return problem("bank_unreachable", "Nothing was paid.", **_UNREACHABLE)
        return Response(made, status=201, headers={"Location": f"/payments/?id={made['id']}"})
