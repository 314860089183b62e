"""The tables of the receiver."""

# ruff: noqa: RUF012 -- the form that Django gives its migrations

from __future__ import annotations

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Run",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "kind",
                    models.CharField(
                        choices=[("plain", "celery.Task"), ("idempotent", "IdempotentTask")],
                        max_length=10,
                    ),
                ),
                ("delivery_id", models.UUIDField()),
                ("task_id", models.CharField(max_length=255)),
                ("pid", models.PositiveIntegerField()),
                ("started", models.DateTimeField(auto_now_add=True)),
            ],
            options={
                "indexes": [
                    models.Index(fields=["kind", "delivery_id"], name="webhooks_run_delivery")
                ],
            },
        ),
        migrations.CreateModel(
            name="LedgerEntry",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "kind",
                    models.CharField(
                        choices=[("plain", "celery.Task"), ("idempotent", "IdempotentTask")],
                        max_length=10,
                    ),
                ),
                ("delivery_id", models.UUIDField()),
                ("event", models.CharField(max_length=64)),
                ("action", models.CharField(blank=True, max_length=64)),
                ("task_id", models.CharField(max_length=255)),
                ("pid", models.PositiveIntegerField()),
                ("created", models.DateTimeField(auto_now_add=True)),
                (
                    "run",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="entry",
                        to="webhooks.run",
                    ),
                ),
            ],
            options={
                "verbose_name_plural": "ledger entries",
                "indexes": [
                    models.Index(fields=["kind", "delivery_id"], name="webhooks_entry_delivery")
                ],
            },
        ),
    ]
