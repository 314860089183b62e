"""The status resource for people: its page, the page of a refusal, and the way to the login."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from django.conf import settings
from django.core.serializers.json import DjangoJSONEncoder
from django.http import HttpResponseRedirect, QueryDict
from django.shortcuts import render, resolve_url
from django.urls import NoReverseMatch, Resolver404, resolve

from celery_idempotent.django.http.problems import CONDITIONS, RequestRefused

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse


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
