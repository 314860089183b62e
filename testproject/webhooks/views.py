"""The endpoint that GitHub calls, and the page that shows what came of it."""

from __future__ import annotations

import logging

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe
from kombu.exceptions import OperationalError as BrokerError

from celery_idempotent.errors import StoreUnavailable
from testproject.webhooks import figures
from testproject.webhooks.deliveries import DeliveryError, read_delivery
from testproject.webhooks.tasks import record_delivery, record_delivery_plain

__all__ = ["github", "status"]

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5


@csrf_exempt  # GitHub has no session and no cookie here; its signature says who it is
def github(request: HttpRequest) -> HttpResponse:
    """Queue a delivery: 202 with the task ids, or a JSON body that says what is wrong."""
    if request.method != "POST":
        answer = _error(405, "method_not_allowed", "Deliveries are sent with POST.")
        answer["Allow"] = "POST"
        return answer
    try:
        delivery = read_delivery(request)
    except DeliveryError as refused:
        return _error(refused.status, refused.code, str(refused))
    arguments = (delivery.delivery_id, delivery.event, delivery.action)
    try:
        tasks = {
            "idempotent": record_delivery.delay(*arguments).id,
            "plain": record_delivery_plain.delay(*arguments).id,
        }
    except (BrokerError, StoreUnavailable) as trouble:
        # Whatever was queued before the trouble is queued again when the sender comes back: a
        # duplicate, and so nothing to worry about.
        log.warning("delivery %s put off: %s", delivery.delivery_id, trouble)
        answer = _error(503, "unavailable", "The delivery could not be queued; send it again.")
        answer["Retry-After"] = str(RETRY_AFTER_S)
        return answer
    return JsonResponse({"delivery": delivery.delivery_id, "tasks": tasks}, status=202)


@never_cache
@require_safe
def status(request: HttpRequest) -> HttpResponse:
    """Show what both tasks did, side by side; ``?refresh=2`` reloads every two seconds."""
    refresh = request.GET.get("refresh", "")
    return render(
        request,
        "webhooks/status.html",
        {
            "ledgers": figures.ledgers(),
            "refresh": refresh if refresh.isdecimal() and int(refresh) > 0 else "",
        },
    )


def _error(status: int, code: str, message: str) -> JsonResponse:
    return JsonResponse({"error": {"code": code, "message": message}}, status=status)
