"""May this caller still see the answer? Asked before every replay, for which the view itself is not called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponseBase

from celery_idempotent.django.http.messages import awaited
from celery_idempotent.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def object_permissions(request: HttpRequest, *_: object, **__: object) -> bool:
    """Ask what a view of Django REST framework about one object asks: its ``get_object()``.

    For ``@idempotent_view(authorize=object_permissions)``: a caller who no longer gets the object from
    ``get_queryset()``, or is refused by a ``has_object_permission()``, gets the framework's 404 or 403. An action of a
    router that is about no object (``create``) has nothing to ask.

    Raises:
        InvalidOption: for a view that has no ``get_object()``.
    """
    view: Any = getattr(request, "parser_context", {}).get("view")
    if getattr(view, "detail", None) is False:
        return True
    if not hasattr(view, "get_object"):
        raise InvalidOption(
            "authorize=object_permissions is for views of Django REST framework with a get_object(); "
            "give a function of your own: authorize(request, *args, **kwargs) -> bool"
        )
    view.get_object()
    return True


def refused_replay(
    authorize: Callable[..., object],
    seen: HttpRequest,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    name: str,
) -> HttpResponseBase | None:
    """Return the answer to a caller who may not have the replay, ``None`` for any other.

    Raises:
        PermissionDenied: if ``authorize`` says neither yes nor what to answer.
    """
    found = awaited(authorize(seen, *args, **kwargs), f"authorize of {name}")
    if isinstance(found, HttpResponseBase):
        return found
    if not found:
        raise PermissionDenied
    return None
