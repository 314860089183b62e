"""From an HTTP request to a delivery that can be trusted, or the reason why it cannot."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.http.request import UnreadablePostError

if TYPE_CHECKING:
    from django.http import HttpRequest

__all__ = ["Delivery", "DeliveryError", "read_delivery"]

_EVENT = re.compile(r"[a-z][a-z0-9_]{0,63}")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


class DeliveryError(Exception):
    """Not a delivery: ``status`` and ``code`` say so to programs, the text to people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What the tasks need to know of a delivery."""

    delivery_id: str
    event: str
    action: str


def read_delivery(request: HttpRequest) -> Delivery:
    """Check size, signature, headers and body, in this order: the unsigned is not looked into."""
    body = _body(request)
    _check_signature(request, body)
    event = request.headers.get("X-GitHub-Event", "")
    if not _EVENT.fullmatch(event):
        raise DeliveryError(
            400, "invalid_event", "X-GitHub-Event is missing or not the name of an event."
        )
    delivery_id = request.headers.get("X-GitHub-Delivery", "")
    if not _UUID.fullmatch(delivery_id):
        raise DeliveryError(400, "invalid_delivery", "X-GitHub-Delivery is missing or not a UUID.")
    if request.content_type != "application/json":
        raise DeliveryError(
            400, "invalid_content_type", "Set the webhook's content type to application/json."
        )
    action = _json_object(body).get("action")
    return Delivery(
        # One spelling for one id: it becomes the idempotency key.
        delivery_id=str(uuid.UUID(delivery_id)),
        event=event,
        action=action[:64] if isinstance(action, str) else "",
    )


def _body(request: HttpRequest) -> bytes:
    too_large = DeliveryError(
        413, "too_large", f"The payload is larger than {settings.WEBHOOK_MAX_BYTES} bytes."
    )
    try:
        if int(request.META.get("CONTENT_LENGTH") or 0) > settings.WEBHOOK_MAX_BYTES:
            raise too_large
    except ValueError:
        raise DeliveryError(400, "invalid_length", "Content-Length is not a number.") from None
    try:
        return request.body
    except RequestDataTooBig:
        raise too_large from None
    except UnreadablePostError:
        raise DeliveryError(400, "incomplete", "The payload ended early.") from None


def _check_signature(request: HttpRequest, body: bytes) -> None:
    """Compare ``X-Hub-Signature-256``, in constant time, if a secret is set."""
    secret: str = settings.GITHUB_WEBHOOK_SECRET
    if not secret:
        return
    expected = "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    given = request.headers.get("X-Hub-Signature-256", "")
    if not hmac.compare_digest(expected.encode(), given.encode("utf-8", "surrogateescape")):
        raise DeliveryError(403, "invalid_signature", "X-Hub-Signature-256 is missing or wrong.")


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError):  # ValueError: not JSON, or not UTF-8
        raise DeliveryError(400, "invalid_json", "The payload is not JSON.") from None
    if not isinstance(payload, dict):
        raise DeliveryError(400, "invalid_payload", "The payload is not a JSON object.")
    return payload
