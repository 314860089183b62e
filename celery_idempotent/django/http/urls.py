"""The status resource: ``path("idempotency/", include("celery_idempotent.django.http.urls"))``.

Where Django REST framework is installed it is a view of that, and knows callers as the project's API does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from django.apps import apps
from django.http import Http404, HttpRequest, HttpResponseBase
from django.urls import path, re_path

app_name = "celery_idempotent_http"


def _root(_request: HttpRequest) -> NoReturn:
    raise Http404


def _view() -> Callable[..., HttpResponseBase]:
    if apps.is_installed("rest_framework"):
        from celery_idempotent.django.http.rest import StatusView

        return StatusView.as_view()
    from celery_idempotent.django.http.status import status

    return status


urlpatterns = [
    path("", _root, name="root"),
    re_path(r"^(?P<namespace>[^/]+)/(?P<key>[^/]+)\Z", _view(), name="status"),
]
