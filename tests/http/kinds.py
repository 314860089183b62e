"""A view of each kind around one piece of work."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from asgiref.sync import sync_to_async
from django.http import JsonResponse
from django.template.response import TemplateResponse
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
    from rest_framework.viewsets import ViewSet

    def plain(request: Any, **url: Any) -> Any:
        status, told = work(request, **url)
        return JsonResponse(told, status=status)

    async def coroutine(request: Any, **url: Any) -> Any:
        status, told = await sync_to_async(work)(request, **url)
        return JsonResponse(told, status=status)

    def responding(request: Any, **url: Any) -> Any:
        status, told = work(request, **url)
        return Response(told, status=status)

    def rendered_later(request: Any, **url: Any) -> Any:
        status, told = work(request, **url)
        template: Any = SimpleNamespace(render=lambda context, _: json.dumps(context))
        return TemplateResponse(request, template, told, status=status)

    class Handled(View):
        @guarded
        def post(self, request: Any, **url: Any) -> Any:
            return plain(request, **url)

    class AsyncHandled(View):
        @guarded
        async def post(self, request: Any, **url: Any) -> Any:
            return await coroutine(request, **url)

    class Rest(APIView):
        authentication_classes = ()
        permission_classes = ()

        @guarded
        def post(self, request: Any, **url: Any) -> Any:
            return responding(request, **url)

    class Things(ViewSet):
        authentication_classes = ()
        permission_classes = ()

        @guarded
        def create(self, request: Any, **url: Any) -> Any:
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
        "template": guarded(rendered_later),
        "handler": Handled.as_view(),
        "async-handler": AsyncHandled.as_view(),
        "rest": Rest.as_view(),
        "rest-function": rest_function,
        "view-set": Things.as_view({"post": "create"}),
    }
