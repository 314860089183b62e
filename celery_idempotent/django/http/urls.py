"""The status resource: ``path("idempotency/", include("celery_idempotent.django.http.urls"))``.

Where Django REST framework is installed it is a view of that, and knows callers as the project's API does.
"""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.urls import re_path

from celery_idempotent.django.http.responses import status

view: Any = status
if apps.is_installed("rest_framework"):
    from rest_framework.decorators import api_view

    view = api_view(["GET", "HEAD"])(status)

app_name = "celery_idempotent_http"
# No key "." or "..": clients take these for directions, escaped or not.
urlpatterns = [re_path(r"^(?P<namespace>[^/]+)/(?P<key>(?!\.\.?\Z)[^/]+)\Z", view, name="status")]
