"""A view of each kind around one piece of work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async
from django.http import JsonResponse
from django.views import View

__all__ = ["kinds"]


def kinds(guarded: Any, work: Callable[..., tuple[int, Any]]) -> dict[str, Any]:
    """Return a view of each kind; ``work`` is given the request and what its URL says, and returns status and data."""
    from rest_framework.decorators import (
        api_view,
        authentication_classes,
        parser_classes,
        permission_classes,
    )
    from rest_framework.parsers import FormParser, JSONParser, MultiPartParser
    from rest_framework.response import Response
    from rest_framework.views import APIView

    def plain(request: Any, **url: Any) -> Any:
        status, told = work(request, **url)
        return JsonResponse(told, status=status)

    async def coroutine(request: Any, **url: Any) -> Any:
        status, told = await sync_to_async(work)(request, **url)
        return JsonResponse(told, status=status)

    def responding(request: Any, **url: Any) -> Any:
        status, told = work(request, **url)
        return Response(told, status=status)

    class Handled(View):
        @guarded
        def post(self, request: Any, **url: Any) -> Any:
            return plain(request, **url)

    class Rest(APIView):
        authentication_classes = ()
        permission_classes = ()

        @guarded
        def post(self, request: Any, **url: Any) -> Any:
            return responding(request, **url)

    @api_view(["POST"])
    @authentication_classes([])
    @permission_classes([])
    @parser_classes([FormParser, MultiPartParser, JSONParser])
    @guarded
    def rest_function(request: Any, **url: Any) -> Any:
        return responding(request, **url)

    return {
        "plain": guarded(plain),
        "coroutine": guarded(coroutine),
        "handler": Handled.as_view(),
        "rest": Rest.as_view(),
        "rest-function": rest_function,
    }
