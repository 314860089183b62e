"""The test project's addresses, and those of the views of the tests."""

from __future__ import annotations

from typing import Any

from django.urls import include, path

from tests.http import views


def csrf_exempt(view: Any) -> Any:
    """As Django's, whose own makes a plain function of a coroutine before Django 5.0."""
    view.csrf_exempt = True
    return view


urlpatterns = [
    path("", include("testproject.urls")),
    *[
        path(f"t/{name}/", csrf_exempt(getattr(views, name)))
        for name in ("plain", "broken", "abroken")
    ],
]
