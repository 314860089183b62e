"""The Django app of a user's project."""

from __future__ import annotations

from django.apps import AppConfig


class ShopConfig(AppConfig):
    """Loads the Celery app, as every project does."""

    name = "tests.users.shop"
    label = "shop"

    def ready(self) -> None:
        from tests.users.shop import celery  # noqa: F401
