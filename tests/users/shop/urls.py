"""Where a user's views are."""

from __future__ import annotations

from django.urls import include, path

from tests.users.shop import views

urlpatterns = [
    path("buy/", views.buy),
    path("buy-atomically/", views.buy_atomically),
    path("order/", views.order),
    path("idempotency/", include("celery_idempotent.django.http.urls")),
]
