"""The table of staged messages."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    """Create the outbox."""

    dependencies = (("celery_idempotent", "0002_counter"),)

    operations = (
        migrations.CreateModel(
            name="OutboxMessage",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("app", models.CharField(max_length=255)),
                ("task", models.CharField(max_length=255)),
                ("task_id", models.CharField(max_length=255)),
                ("key", models.CharField(blank=True, default="", max_length=255)),
                ("scope", models.CharField(blank=True, default="", max_length=255)),
                ("payload", models.BinaryField()),
                ("created_ms", models.BigIntegerField()),
                ("due_ms", models.BigIntegerField()),
                ("attempts", models.PositiveIntegerField(default=0)),
                ("failed_ms", models.BigIntegerField(blank=True, null=True)),
                ("error", models.CharField(blank=True, default="", max_length=500)),
            ],
            options={
                "verbose_name": "staged message",
                "db_table": "celery_idempotent_outbox",
                "indexes": [
                    models.Index(fields=["due_ms"], name="idem_outbox_due"),
                ],
            },
        ),
    )
