"""The endpoint that GitHub calls, and the page that shows what came of it."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import uuid

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST, require_safe
from kombu.exceptions import OperationalError as BrokerError

from celery_idempotent.django.http import problem
from celery_idempotent.errors import StoreUnavailable
from testproject.webhooks import figures
from testproject.webhooks.tasks import record_delivery, record_delivery_plain

log = logging.getLogger(__name__)

_EVENT = re.compile(r"[a-z][a-z0-9_]{0,63}")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


class Refused(Exception):
    """Not a delivery: status and code for programs, a sentence for people."""


@csrf_exempt  # GitHub has no session and no cookie here; its signature says who it is
@require_POST
def github(request: HttpRequest) -> HttpResponse:
    """Queue a delivery: 202 with the task ids, or a JSON body that says what is wrong."""
    try:
        arguments = _read(request)
    except Refused as refused:
        status, code, detail = refused.args
        return problem(code, detail, status=status)
    try:
        tasks = {
            "idempotent": record_delivery.delay(*arguments).id,
            "plain": record_delivery_plain.delay(*arguments).id,
        }
    except (BrokerError, StoreUnavailable) as trouble:
        # What was queued before is queued again when the sender comes back: a duplicate.
        log.warning("delivery %s put off: %s", arguments[0], trouble)
        return problem("not_queued", "The delivery could not be queued; send it again.")
    return JsonResponse({"delivery": arguments[0], "tasks": tasks}, status=202)


def _read(request: HttpRequest) -> tuple[str, str, str]:
    """Return id, event and action of a delivery; what is not signed is not looked into."""
    try:
        body = request.body
    except RequestDataTooBig:
        raise Refused(413, "too_large", "The payload is too large.") from None
    if secret := settings.GITHUB_WEBHOOK_SECRET:
        expected = "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
        given = request.headers.get("X-Hub-Signature-256", "")
        if not hmac.compare_digest(expected.encode(), given.encode("utf-8", "surrogateescape")):
            raise Refused(403, "invalid_signature", "X-Hub-Signature-256 is missing or wrong.")
    event = request.headers.get("X-GitHub-Event", "")
    if not _EVENT.fullmatch(event):
        raise Refused(400, "invalid_event", "X-GitHub-Event is missing or not an event's name.")
    delivery_id = request.headers.get("X-GitHub-Delivery", "")
    if not _UUID.fullmatch(delivery_id):
        raise Refused(400, "invalid_delivery", "X-GitHub-Delivery is missing or not a UUID.")
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError):  # ValueError: not JSON, or not UTF-8
        payload = None
    if not isinstance(payload, dict):
        raise Refused(400, "invalid_payload", "The payload is not a JSON object.")
    action = payload.get("action")
    # One spelling for one id: it becomes the idempotency key.
    return str(uuid.UUID(delivery_id)), event, action[:64] if isinstance(action, str) else ""


@never_cache
@require_safe
def status(request: HttpRequest) -> HttpResponse:
    """Show what both tasks did, side by side; ``?refresh=2`` reloads every two seconds."""
    refresh = request.GET.get("refresh", "")
    context = {"ledgers": figures.ledgers(), "refresh": refresh if refresh.isdecimal() else ""}
    return render(request, "webhooks/status.html", context)
