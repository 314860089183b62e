"""The tables of version 1.0."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import migrations, models

from celery_idempotent.django.fields import ShortBinaryField

if TYPE_CHECKING:
    from django.apps.registry import Apps
    from django.db.backends.base.schema import BaseDatabaseSchemaEditor
    from django.db.migrations.operations.base import Operation


def leave_room(_: Apps, editor: BaseDatabaseSchemaEditor) -> None:
    """On PostgreSQL, leave room in each page for the new versions of its rows.

    An update whose indexed columns stay as they are then stays in its page, and no index is touched.
    """
    if editor.connection.vendor == "postgresql":
        for table in ("record", "lease"):
            editor.execute(f"ALTER TABLE celery_idempotent_{table} SET (fillfactor = 70)")


class Migration(migrations.Migration):
    """Makes records, leases and the high-water mark of tokens."""

    initial = True
    dependencies: ClassVar[list[tuple[str, str]]] = []

    operations: ClassVar[list[Operation]] = [
        migrations.CreateModel(
            name="HighWaterMark",
            fields=[
                ("id", models.SmallIntegerField(primary_key=True, serialize=False)),
                ("token", models.BigIntegerField()),
            ],
        ),
        migrations.CreateModel(
            name="Lease",
            fields=[
                (
                    "digest",
                    ShortBinaryField(max_length=16, primary_key=True, serialize=False),
                ),
                ("token", models.BigIntegerField()),
                ("deadline_ms", models.BigIntegerField(null=True)),
                ("due_ms", models.BigIntegerField(db_index=True, null=True)),
                ("expires_ms", models.BigIntegerField()),
                ("version", models.IntegerField()),
                ("requeues", models.IntegerField()),
                ("state", models.CharField(max_length=1)),
                ("on_stale", models.CharField(max_length=1)),
                ("attempt", ShortBinaryField(max_length=16)),
                ("worker", models.TextField()),
                ("message", models.BinaryField(null=True)),
                ("steps", models.BinaryField(null=True)),
            ],
        ),
        migrations.CreateModel(
            name="Record",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("token", models.BigIntegerField()),
                ("created_ms", models.BigIntegerField()),
                ("updated_ms", models.BigIntegerField()),
                ("expires_ms", models.BigIntegerField()),
                ("prune_ms", models.BigIntegerField(db_index=True)),
                ("version", models.IntegerField()),
                ("crashes", models.IntegerField()),
                ("attempts", models.IntegerField()),
                (
                    "state",
                    models.CharField(
                        max_length=1,
                        choices=[
                            ("Q", "QUEUED"),
                            ("P", "PROCESSING"),
                            ("I", "INTERRUPTED"),
                            ("C", "COMPLETED"),
                            ("F", "FAILED"),
                            ("R", "released"),
                        ],
                    ),
                ),
                ("reserved", models.BooleanField()),
                ("replaced", models.BooleanField()),
                ("delivered", models.BooleanField()),
                ("swept", models.BooleanField()),
                ("digest", ShortBinaryField(max_length=16, unique=True)),
                ("fingerprint", ShortBinaryField(max_length=16, null=True)),
                ("namespace", models.CharField(max_length=255)),
                ("scope", models.TextField()),
                ("key", models.TextField()),
                ("task_id", models.TextField()),
                ("value", models.BinaryField(null=True)),
                ("note", models.TextField()),
            ],
        ),
        migrations.RunPython(leave_room, migrations.RunPython.noop),
    ]
