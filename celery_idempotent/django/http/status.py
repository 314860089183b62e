"""The status resource: where an operation is, as JSON, and only for its caller."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from urllib.parse import quote

from django.core.serializers.json import DjangoJSONEncoder
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.urls import NoReverseMatch, reverse
from django.utils.cache import get_conditional_response, patch_vary_headers
from django.views.decorators.http import require_safe

from celery_idempotent.celery.definition import definition_of
from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.callers import caller_scope
from celery_idempotent.django.http.messages import refusal
from celery_idempotent.django.http.options import HttpOptions, http_options
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.http.describing import describe
from celery_idempotent.http.keys import http_identity
from celery_idempotent.http.problems import RETRY_AFTER, RequestRefused
from celery_idempotent.stores import get_store

_VARY = ("Authorization", "Cookie")


def status_url(namespace: str, key: str) -> str | None:
    """Return the path of the status of a key, ``None`` if the project has no status resource."""
    try:
        base = reverse("celery_idempotent_http:root")
    except NoReverseMatch:
        return None
    return f"{base}{_segment(namespace)}/{_segment(key)}"


def _segment(text: str) -> str:
    """Return ``text`` as one part of a path: ``a/b`` as ``a~1b``, ``..`` as ``~2.``.

    Servers decode ``%2F`` before they route, and clients take ``.`` and ``..`` for directions, escaped or not.
    """
    text = text.replace("~", "~0").replace("/", "~1")
    if text in (".", ".."):
        text = "~2" + text[1:]
    return quote(text, safe="~")


def _text(segment: str) -> str:
    return segment.replace("~2", ".").replace("~1", "/").replace("~0", "~")


@require_safe
def status(request: HttpRequest, namespace: str, key: str) -> HttpResponseBase:
    """Show the status of a key of the caller."""
    return respond(request, namespace, key)


def respond(request: HttpRequest, namespace: str, key: str) -> HttpResponseBase:
    """Answer a request for a status; ``request`` may be one of Django REST framework, with its own user."""
    options = http_options()
    try:
        described = _look_up(request, _text(namespace), _text(key), options)
    except RequestRefused as refused:
        response: HttpResponseBase = refusal(refused, options)
        patch_vary_headers(response, _VARY)
        return response
    body = json.dumps(described, cls=DjangoJSONEncoder)
    response = HttpResponse(body, content_type="application/json")
    response["ETag"] = f'"{hashlib.sha256(body.encode()).hexdigest()[:32]}"'
    response["Cache-Control"] = "private, no-cache"
    patch_vary_headers(response, _VARY)
    if not described["settled"]:
        response["Retry-After"] = str(RETRY_AFTER)
    plain: HttpRequest = getattr(request, "_request", request)
    found = get_conditional_response(plain, etag=response["ETag"], response=response)
    assert found is not None, "there was a response"
    return found


def _look_up(
    request: HttpRequest, namespace: str, key: str, options: HttpOptions
) -> dict[str, object]:
    app = celery_app()
    scope = caller_scope(request, options)
    try:
        identity = http_identity(namespace, scope, key)
        record = get_store(app).get(identity)
    except RequestRefused:
        record = None
    except (StoreUnavailable, StoreMisconfigured) as error:
        raise RequestRefused("store_unavailable", "Ask again later.") from error
    if record is None or record.uncommitted:
        # The same answer for a key that never existed, was forgotten, may be rolled back, or is another caller's.
        raise RequestRefused("unknown_key", "You have no such key here, or it was too long ago.")
    definition = definition_of(app, namespace, load=True)
    task: Any = None if definition is None else app.tasks[definition.name]
    return describe(record, key=key, task=task, encoder=DjangoJSONEncoder)
