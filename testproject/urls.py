"""Where things are: the status page and the webhook."""

from __future__ import annotations

from django.urls import include, path

__all__ = ["urlpatterns"]

urlpatterns = [path("", include("testproject.webhooks.urls"))]
