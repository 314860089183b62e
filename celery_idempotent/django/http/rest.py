"""The status resource as a view of Django REST framework: authenticated and described as the project's API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rest_framework.exceptions import NotAuthenticated
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.permissions import IsAuthenticated
from rest_framework.renderers import JSONRenderer
from rest_framework.views import APIView

from celery_idempotent.django.http.options import http_options
from celery_idempotent.django.http.status import for_people, login_redirect, respond

if TYPE_CHECKING:
    from django.http import HttpResponseBase
    from rest_framework.parsers import BaseParser
    from rest_framework.permissions import _SupportsHasPermission
    from rest_framework.renderers import BaseRenderer
    from rest_framework.request import Request


class _Ours(BaseContentNegotiation):
    """The resource itself looks at ``Accept``: a page is no renderer's work."""

    def select_parser(self, request: Request, parsers: Iterable[BaseParser]) -> BaseParser:  # noqa: ARG002  the interface
        """There is no body to parse."""
        return next(iter(parsers))

    def select_renderer(
        self,
        request: Request,  # noqa: ARG002  the interface
        renderers: Iterable[BaseRenderer],
        format_suffix: str | None = None,  # noqa: ARG002  the interface
    ) -> tuple[BaseRenderer, str]:
        """For the errors of the framework."""
        first = next(iter(renderers))
        return first, first.media_type


class StatusView(APIView):
    """Where an operation is: queued, processing, completed with its result, or failed with its error."""

    content_negotiation_class = _Ours
    renderer_classes = (JSONRenderer,)
    http_method_names = ("get", "head", "options")

    def get_permissions(self) -> Sequence[_SupportsHasPermission]:
        """Callers are known by the project's own rule, or else are to log in."""
        options = http_options()
        known = options.scope is not None or options.anonymous == "session"
        return super().get_permissions() if known else [IsAuthenticated()]

    def get(self, request: Request, namespace: str, key: str) -> HttpResponseBase:
        """Show the status of a key of the caller."""
        return respond(request, namespace, key)

    def handle_exception(self, exc: Exception) -> Any:  # a redirect is no Response of the framework
        """Lead people to the login; programs get what the project answers."""
        request = self.request
        found = None
        if isinstance(exc, NotAuthenticated) and for_people(request):
            found = login_redirect(request)
        return found or super().handle_exception(exc)
