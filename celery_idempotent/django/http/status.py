"""The status resource: where an operation is, as JSON, and only for its caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.serializers.json import DjangoJSONEncoder
from django.urls import NoReverseMatch, reverse
from django.utils.cache import get_conditional_response, patch_vary_headers
from django.views.decorators.http import require_safe

from celery_idempotent.celery.definition import definition_of
from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.requests import caller_scope, http_options
from celery_idempotent.django.http.responses import response_of
from celery_idempotent.errors import STORE_ERRORS, InvalidKey
from celery_idempotent.http.answers import Answer, RequestRefused
from celery_idempotent.http.keys import http_identity
from celery_idempotent.http.status import status_answer
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponseBase


def status_url(namespace: str, key: str) -> str | None:
    """Return the path of the status of a key, ``None`` if the project has no status resource."""
    try:
        return reverse("celery_idempotent_http:status", args=(_segment(namespace), _segment(key)))
    except NoReverseMatch:
        return None


def _segment(text: str) -> str:
    """Return ``text`` as one part of a path: ``a/b`` as ``a~1b``, ``..`` as ``~2.``.

    Servers decode ``%2F`` before they route, and clients take ``.`` and ``..`` for directions, escaped or not.
    """
    text = text.replace("~", "~0").replace("/", "~1")
    return "~2" + text[1:] if text in (".", "..") else text


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
        answer = _look_up(_text(namespace), _text(key), caller_scope(request, options))
    except RequestRefused as refused:
        answer = refused.answer(options.docs_url)
    response = response_of(answer)
    patch_vary_headers(response, ("Authorization", "Cookie"))
    plain: HttpRequest = getattr(request, "_request", request)
    found = get_conditional_response(plain, etag=response.get("ETag"), response=response)
    assert found is not None, "there was a response"
    return found


def _look_up(namespace: str, key: str, scope: object) -> Answer:
    app = celery_app()
    try:
        record = get_store(app).get(http_identity(namespace, scope, key))
    except InvalidKey:
        record = None
    except STORE_ERRORS as error:
        raise RequestRefused("store_unavailable", "Ask again later.") from error
    if record is None or record.uncommitted:
        # The same answer for a key that never existed, was forgotten, may be rolled back, or is another caller's.
        raise RequestRefused("unknown_key", "You have no such key here, or it was too long ago.")
    definition = definition_of(app, namespace, load=True)
    task: Any = None if definition is None else app.tasks[definition.name]
    return status_answer(record, key=key, task=task, encoder=DjangoJSONEncoder)
