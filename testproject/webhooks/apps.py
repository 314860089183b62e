"""The app, and the journal mode of its SQLite file."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db.backends.signals import connection_created


class WebhooksConfig(AppConfig):
    name = "testproject.webhooks"
    verbose_name = "GitHub webhooks"

    def ready(self) -> None:
        connection_created.connect(_let_readers_and_a_writer_share, dispatch_uid=self.name)


def _let_readers_and_a_writer_share(connection: Any, **_: Any) -> None:
    """Put SQLite into write-ahead mode: readers no longer wait for the writer, nor it for them."""
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.execute("PRAGMA synchronous = NORMAL")
