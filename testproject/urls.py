"""Where things are: the webhook and its page, the payments, the status of their keys, the admin."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.views import LoginView, LogoutView
from django.urls import include, path

__all__ = ["urlpatterns"]

urlpatterns = [
    path("", include("testproject.webhooks.urls")),
    path("", include("testproject.payments.urls")),
    path("idempotency/", include("celery_idempotent.django.http.urls")),
    path("login/", LoginView.as_view(), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("admin/", admin.site.urls),
]
