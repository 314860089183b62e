"""The payments API of FastAPI, for the same page, people and records: ``make serve APP=fastapi``."""

from __future__ import annotations

from io import BytesIO
from typing import Annotated, Any, Literal

from django.contrib.auth.middleware import AuthenticationMiddleware
from django.contrib.sessions.middleware import SessionMiddleware
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpResponse
from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from rest_framework.exceptions import APIException, NotAuthenticated, ValidationError
from rest_framework.views import APIView

from celery_idempotent.django import user_scope
from celery_idempotent.http import enqueue, task_status
from testproject.payments.api import problems
from testproject.payments.tasks import pay

api = FastAPI(title="Payments")


class Order(BaseModel):
    """What to pay."""

    amount: Annotated[int, Field(ge=1, le=100_000_000, description="In cents.")]
    currency: Literal["EUR", "GBP", "USD"]
    recipient: Annotated[str, Field(pattern=r"^acct_[A-Za-z0-9]{1,40}$")]


def caller(request: Request) -> Any:
    """Return the user, whom Django knows by a password, or by a session and its CSRF token; the body is not its."""
    headers = [each for each in request.headers.raw if not each[0].startswith(b"content-")]
    asked = ASGIRequest({**request.scope, "headers": headers}, BytesIO())
    for middleware in (SessionMiddleware, AuthenticationMiddleware):
        middleware(HttpResponse).process_request(asked)
    user = APIView().initialize_request(asked).user
    if not user.is_authenticated:
        raise NotAuthenticated
    return user


Caller = Annotated[Any, Depends(caller)]
Text = Annotated[str | None, Header()]


@api.get("/payments/")
def payments(user: Caller) -> Any:
    """List the caller's last payments."""
    return [each.told() for each in user.payments.all()[:50]]


@api.post("/payments/", status_code=202)
def pay_later(user: Caller, order: Order, idempotency_key: Text = None) -> Response:
    """Let a worker pay: 202 and where to ask for its status."""
    answer = enqueue(
        pay,
        kwargs={"payer": user.pk, **order.model_dump()},
        key=idempotency_key,
        scope=user_scope(user),
        status_url="/payments/status/?key={key}",
    )
    return Response(*answer)


@api.get("/payments/status/")
def status(user: Caller, key: str) -> Response:
    """Return where a payment is."""
    return Response(*task_status(pay, key, scope=user_scope(user)))


@api.exception_handler(APIException)
def refused(request: Request, error: APIException) -> Response:
    """Answer what is refused as the API of Django does."""
    answer: Any = problems(error, {"request": request})
    return Response(answer.content, answer.status_code, dict(answer.headers))


@api.exception_handler(RequestValidationError)
def invalid(request: Request, error: RequestValidationError) -> Response:
    return refused(
        request, ValidationError({each["loc"][-1]: [each["msg"]] for each in error.errors()})
    )
