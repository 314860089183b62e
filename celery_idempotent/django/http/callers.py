"""Who calls: the scope of a request's key is always its caller. No caller sees a record of another."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from celery_idempotent.django.scopes import tenant_scope, user_scope
from celery_idempotent.errors import InvalidKey
from celery_idempotent.http.problems import RequestRefused

if TYPE_CHECKING:
    from django.http import HttpRequest

    from celery_idempotent.django.http.options import HttpOptions


def caller_scope(request: HttpRequest, options: HttpOptions) -> object:
    """Return the scope of the caller's keys.

    Raises:
        RequestRefused: ``caller_unknown``, if the request has no known caller. All callers in one scope would
            hand one visitor the answers of another.
    """
    if options.scope is not None:
        scope = options.scope(request)
        if scope is not None:
            return scope
        raise _caller_unknown("The request does not say who sends it.")
    if (user := _user_of(request)) is None:
        raise _caller_unknown("Log in, or send credentials.")
    return _scope_of(user)


def session_scope(request: HttpRequest) -> tuple[object, ...]:
    """Return the scope of the user, or of the session of a visitor who is not logged in: ``scope=session_scope``.

    Raises:
        RequestRefused: ``caller_unknown``, without a session that the server keeps.
    """
    if (user := _user_of(request)) is not None:
        return _scope_of(user)
    session = getattr(request, "session", None)
    if session is None:
        raise _caller_unknown("There is no session to know the caller by.")
    if not session.session_key:
        session.save()  # gives it its key
    key = session.session_key
    # Signed cookies keep no session: their "key" is all its content, and changes with it.
    if not key or not session.exists(key):
        raise _caller_unknown("There is no session to know the caller by.")
    # A digest: who reads records must not be able to take over sessions.
    return (*tenant_scope(), "session", hashlib.sha256(key.encode()).hexdigest())


def _user_of(request: HttpRequest) -> object:
    user = getattr(request, "user", None)
    return user if user is not None and user.is_authenticated else None


def _scope_of(user: object) -> tuple[object, ...]:
    try:
        return user_scope(user)
    except InvalidKey:
        raise _caller_unknown("The user has no identity of its own.") from None


def _caller_unknown(detail: str) -> RequestRefused:
    return RequestRefused("caller_unknown", detail)
