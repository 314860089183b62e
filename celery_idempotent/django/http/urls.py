"""The status resource: ``path("idempotency/", include("celery_idempotent.django.http.urls"))``.

Where Django REST framework is installed it is a view of that, and knows callers as the project's API does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.apps import apps
from django.urls import re_path

from celery_idempotent.django.http.status import status

view: Callable[..., Any] = status
if apps.is_installed("rest_framework"):
    from celery_idempotent.django.http.rest import StatusView

    view = StatusView.as_view()

app_name = "celery_idempotent_http"
urlpatterns = [re_path(r"^(?P<namespace>[^/]+)/(?P<key>[^/]+)\Z", view, name="status")]
