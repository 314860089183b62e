"""The status resource as a view of Django REST framework: callers are known as in the rest of the project's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rest_framework.permissions import IsAuthenticated
from rest_framework.renderers import JSONRenderer
from rest_framework.views import APIView

from celery_idempotent.django.http.requests import http_options
from celery_idempotent.django.http.status import respond

if TYPE_CHECKING:
    from django.http import HttpResponseBase
    from rest_framework.permissions import _SupportsHasPermission
    from rest_framework.request import Request


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
        return respond(request, namespace, key)
