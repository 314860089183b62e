"""The tables of the receiver."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

KINDS = [("plain", "celery.Task"), ("idempotent", "IdempotentTask")]


def fields(*more: tuple[str, models.Field[Any, Any]]) -> list[tuple[str, models.Field[Any, Any]]]:
    """Return the columns of a table, with those that both have."""
    return [
        ("id", models.BigAutoField("ID", primary_key=True, serialize=False, auto_created=True)),
        ("kind", models.CharField(choices=KINDS, max_length=10)),
        ("delivery_id", models.UUIDField()),
        ("task_id", models.CharField(max_length=255)),
        ("pid", models.PositiveIntegerField()),
        *more,
    ]


def share(_: Any, editor: Any) -> None:
    """Put SQLite's file into write-ahead mode: readers no longer wait for the writer, nor it for them."""
    if editor.connection.vendor == "sqlite":
        editor.execute("PRAGMA journal_mode = WAL")


class Migration(migrations.Migration):
    initial = True
    atomic = False
    dependencies: ClassVar = []
    operations: ClassVar = [
        migrations.RunPython(share, migrations.RunPython.noop),
        migrations.CreateModel(
            name="Run",
            fields=fields(("started", models.DateTimeField(auto_now_add=True))),
            options={
                "indexes": [
                    models.Index(fields=["kind", "delivery_id"], name="webhooks_run_delivery")
                ]
            },
        ),
        migrations.CreateModel(
            name="LedgerEntry",
            fields=fields(
                ("event", models.CharField(max_length=64)),
                ("action", models.CharField(blank=True, max_length=64)),
                ("created", models.DateTimeField(auto_now_add=True)),
                ("run", models.OneToOneField("webhooks.run", models.PROTECT, related_name="entry")),
            ),
            options={
                "verbose_name_plural": "ledger entries",
                "indexes": [
                    models.Index(fields=["kind", "delivery_id"], name="webhooks_entry_delivery")
                ],
            },
        ),
    ]
