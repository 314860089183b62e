"""The status resource: ``path("idempotency/", include("celery_idempotent.django.http.urls"))``.

Where Django REST framework is installed it is a view of that, and knows callers as the project's API does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.urls import re_path

from celery_idempotent.django.http.requests import http_options
from celery_idempotent.django.http.status import status

if TYPE_CHECKING:
    from django.http import HttpResponseBase
    from rest_framework.permissions import _SupportsHasPermission
    from rest_framework.request import Request

view: Any = status
if apps.is_installed("rest_framework"):
    from rest_framework.permissions import IsAuthenticated
    from rest_framework.renderers import JSONRenderer
    from rest_framework.views import APIView

    class StatusView(APIView):
        """Where an operation is: queued, processing, completed with its result, or failed with its error."""

        renderer_classes = (JSONRenderer,)
        http_method_names = ("get", "head", "options")

        def get_permissions(self) -> Sequence[_SupportsHasPermission]:
            """Callers are known by the project's own rule, or else are to log in."""
            known = http_options().scope is not None
            return super().get_permissions() if known else [IsAuthenticated()]

        def get(self, request: Request, namespace: str, key: str) -> HttpResponseBase:
            """Show the status of a key of the caller."""
            return status(request, namespace, key)

    view = StatusView.as_view()

app_name = "celery_idempotent_http"
# No key "." or "..": clients take these for directions, escaped or not.
urlpatterns = [re_path(r"^(?P<namespace>[^/]+)/(?P<key>(?!\.\.?\Z)[^/]+)\Z", view, name="status")]
