"""The webhook and its status page."""

from __future__ import annotations

from django.urls import path

from testproject.webhooks import views

__all__ = ["urlpatterns"]

urlpatterns = [
    path("", views.status, name="status"),
    path("webhooks/github/", views.github, name="github-webhook"),
]
