"""The status resource: where an operation is, for programs and for people, and only for its caller."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from django.conf import settings
from django.core.serializers.json import DjangoJSONEncoder
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect, QueryDict
from django.shortcuts import render, resolve_url
from django.urls import NoReverseMatch, Resolver404, resolve, reverse
from django.utils.cache import get_conditional_response, patch_vary_headers
from django.views.decorators.http import require_safe

from celery_idempotent.celery.registry import definition_of, find_task
from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.describing import describe
from celery_idempotent.django.http.keys import caller_scope, http_identity
from celery_idempotent.django.http.options import HttpOptions, http_options
from celery_idempotent.django.http.problems import CONDITIONS, RequestRefused
from celery_idempotent.django.http.views import least_shown
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.identity.identified import Identified
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.records import Identity, Record


def for_people(request: HttpRequest) -> bool:
    """Does the client prefer a page? One that accepts anything gets JSON."""
    accepted = request.headers.get("Accept", "")
    return "text/html" in accepted and "application/json" not in accepted


def status_page(request: HttpRequest, described: dict[str, object], *, every: int) -> HttpResponse:
    """Show what the resource says; the page asks again each ``every`` seconds until it is settled."""
    result = described.get("result")
    shown = "" if result is None else _laid_out(result)
    context = {
        "told": described,
        "result": shown,
        "every": every,
        "settled": described["settled"],
    }
    return render(request, "celery_idempotent/http/status.html", context)


def _laid_out(result: object) -> str:
    try:
        return json.dumps(result, cls=DjangoJSONEncoder, indent=2)
    except RecursionError:  # json is less patient with what is laid out
        return json.dumps(result, cls=DjangoJSONEncoder)


def refusal_page(
    request: HttpRequest, refusal: RequestRefused, docs_url: str | None
) -> HttpResponse:
    """Say the same as the problem that a program gets, with its status and headers."""
    problem = refusal.response(docs_url)
    status, title, retryable = CONDITIONS[refusal.code]
    context = {
        "title": title,
        "detail": refusal.detail,
        "retryable": retryable,
        "every": problem.get("Retry-After", "0"),
        "settled": True,
    }
    page = render(request, "celery_idempotent/http/refusal.html", context, status=status)
    for name, value in problem.items():
        if name != "Content-Type":
            page[name] = value
    return page


def login_redirect(request: HttpRequest) -> HttpResponse | None:
    """Return the way to the project's login and back; ``None`` if it has none, or it would not help."""
    user = getattr(request, "user", None)
    if user is not None and user.is_authenticated:
        return None
    try:
        login = urlsplit(resolve_url(settings.LOGIN_URL))
        if not login.netloc:
            resolve(login.path)
    except (NoReverseMatch, Resolver404):
        return None
    query = QueryDict(login.query, mutable=True)
    query["next"] = request.get_full_path()
    # Django's own redirect_to_login() comes with the models of django.contrib.auth, which may not be installed.
    answer = HttpResponseRedirect(login._replace(query=query.urlencode(safe="/")).geturl())
    answer["Cache-Control"] = "no-store"
    return answer


_VARY = ("Accept", "Authorization", "Cookie")


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
    options = replace(options, show_errors=least_shown(options.show_errors))
    plain: HttpRequest = getattr(request, "_request", request)
    people = for_people(plain)
    try:
        described = _look_up(request, _text(namespace), _text(key), options)
    except RequestRefused as refusal:
        response = _refuse(plain, refusal, options, people=people)
        patch_vary_headers(response, _VARY)
        return response
    body = json.dumps(described, cls=DjangoJSONEncoder)
    digest = hashlib.sha256(f"{people} {body}".encode()).hexdigest()[:32]
    if people:
        response = status_page(plain, described, every=max(round(options.retry_after), 1))
    else:
        response = HttpResponse(body, content_type="application/json")
    response["ETag"] = f'"{digest}"'
    response["Cache-Control"] = "private, no-cache"
    patch_vary_headers(response, _VARY)
    if not described["settled"]:
        response["Retry-After"] = str(max(round(options.retry_after), 1))
    found = get_conditional_response(plain, etag=response["ETag"], response=response)
    assert found is not None, "there was a response"
    return found


def _refuse(
    request: HttpRequest, refusal: RequestRefused, options: HttpOptions, *, people: bool
) -> HttpResponse:
    if not people:
        return refusal.response(options.docs_url)
    # A scope of the project's own is not known by a login.
    unknown = refusal.code == "caller_unknown" and options.scope is None
    return (login_redirect(request) if unknown else None) or refusal_page(
        request, refusal, options.docs_url
    )


def _found(app: Celery, identity: Identity) -> Record | None:
    """Return the record of a key, or that of its former identity if a deploy changed the namespace."""
    store = get_store(app)
    record = store.get(identity)
    if record is not None:
        return record
    definition = definition_of(app, identity.namespace, load=True)
    old = definition and definition.identifier.renamed(Identified(identity)).old
    return store.get(old.identity) if old else None


def _look_up(
    request: HttpRequest, namespace: str, key: str, options: HttpOptions
) -> dict[str, object]:
    app = celery_app(options.app)
    scope = caller_scope(request, options)
    try:
        identity = http_identity(namespace, scope, key)
        record = _found(app, identity) if options.shows(namespace) else None
    except RequestRefused:
        record = None
    except (StoreUnavailable, StoreMisconfigured) as error:
        raise RequestRefused(
            "store_unavailable", "Ask again later.", retry_after=options.retry_after
        ) from error
    if record is None:
        # The same answer for a key that never existed, was forgotten, or belongs to another caller.
        raise RequestRefused("unknown_key", "You have no such key here, or it was too long ago.")
    return describe(record, key=key, task=find_task(app, namespace, load=True), options=options)
