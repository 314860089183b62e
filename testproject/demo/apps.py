"""Brings the rehearsal into each process of the demo."""

from __future__ import annotations

from django.apps import AppConfig


class DemoConfig(AppConfig):
    name = "testproject.demo"

    def ready(self) -> None:
        from testproject.demo import rehearsal

        rehearsal.connect()
