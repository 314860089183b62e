"""Whose key it is: the caller's, always, so that nobody meets the keys of somebody else."""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING, Any

from celery_idempotent.django.http.problems import Refusal

if TYPE_CHECKING:
    from django.http import HttpRequest

    from celery_idempotent.django.http.options import HttpOptions

__all__ = ["caller_scope", "user_scope"]


def user_scope(user: Any) -> tuple[object, ...]:
    """Return the scope of a user's keys, for ``apply_async(..., idempotency_scope=user_scope(user))``.

    It says that it is a user's: the scopes that a project gives its tasks for reasons of its own (``tenant 5``) never
    equal that of user 5, and are out of reach of the status resource.
    """
    pk = user.pk
    usable = isinstance(pk, (int, str, uuid.UUID)) and not isinstance(pk, bool)
    return ("user", pk if usable else str(pk))


def caller_scope(request: Any, options: HttpOptions) -> object:
    """Return the scope of the caller's keys.

    Raises:
        Refusal: ``caller_unknown``, if there is nobody whose they could be. All the world in one scope would hand one
            visitor the answers of another.
    """
    if options.scope is not None:
        scope = options.scope(request)
        if scope is not None:
            return scope
        raise _unknown("The request does not say who sends it.")
    user = getattr(request, "user", None)
    if user is not None and user.is_authenticated:
        return user_scope(user)
    if options.anonymous == "session":
        return _session_scope(request)
    raise _unknown("Log in, or send credentials.")


def _session_scope(request: HttpRequest) -> tuple[str, str]:
    session = getattr(request, "session", None)
    if session is None:
        raise _unknown("There is no session to know the caller by.")
    if not session.session_key:
        session.save()  # gives it its key
    key = session.session_key
    # Signed cookies keep no session: their "key" is all its content, and changes with it.
    if not key or not session.exists(key):
        raise _unknown("There is no session to know the caller by.")
    # A digest: whoever reads records must not be able to take over sessions.
    return ("session", hashlib.sha256(key.encode()).hexdigest())


def _unknown(detail: str) -> Refusal:
    return Refusal("caller_unknown", detail)
