"""The tables, and the permissions of the admin's pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import migrations, models

from celery_idempotent.django.fields import ShortBinaryField, UnfinishedIndex

if TYPE_CHECKING:
    from django.apps.registry import Apps
    from django.db.backends.base.schema import BaseDatabaseSchemaEditor
    from django.db.migrations.operations.base import Operation


def leave_room(_: Apps, editor: BaseDatabaseSchemaEditor) -> None:
    """On PostgreSQL, leave room in each page for the new versions of its rows.

    An update whose indexed columns stay as they are then stays in its page, and no index is touched.
    """
    if editor.connection.vendor == "postgresql":
        editor.execute("ALTER TABLE celery_idempotent_record SET (fillfactor = 90)")


class Migration(migrations.Migration):
    """Makes all tables."""

    initial = True
    dependencies: ClassVar[list[tuple[str, str]]] = []

    operations: ClassVar[list[Operation]] = [
        migrations.CreateModel(
            name="Mark",
            fields=[
                ("id", models.SmallIntegerField(primary_key=True, serialize=False)),
                ("value", models.BigIntegerField()),
            ],
            options={"default_permissions": ()},
        ),
        migrations.CreateModel(
            name="IdempotencyRecord",
            fields=[
                ("digest", ShortBinaryField(max_length=16, primary_key=True, serialize=False)),
                ("namespace", models.CharField(max_length=255)),
                ("scope", models.TextField()),
                ("key", models.TextField()),
                ("prune_ms", models.BigIntegerField(db_index=True)),
                ("version", models.IntegerField()),
                ("state", models.CharField(max_length=1)),
                ("token", models.BigIntegerField()),
                ("created_ms", models.BigIntegerField()),
                ("updated_ms", models.BigIntegerField()),
                ("deadline_ms", models.BigIntegerField(null=True)),
                ("due_ms", models.BigIntegerField(null=True)),
                ("expires_ms", models.BigIntegerField()),
                ("crashes", models.IntegerField()),
                ("task_id", models.TextField()),
                ("data", models.TextField()),
                ("value", models.BinaryField(null=True)),
            ],
            options={
                "db_table": "celery_idempotent_record",
                "verbose_name": "idempotency record",
                "indexes": [
                    UnfinishedIndex(
                        fields=["state", "updated_ms"], name="celery_idempotent_unfinished"
                    )
                ],
                "default_permissions": ("view",),
                "permissions": (
                    ("view_result", "Can see results and errors of idempotency records"),
                    ("release_record", "Can release idempotency records"),
                    ("requeue_record", "Can requeue idempotency records"),
                    ("complete_record", "Can complete idempotency records"),
                    ("fail_record", "Can fail idempotency records"),
                    ("forget_record", "Can forget idempotency records"),
                ),
            },
        ),
        migrations.CreateModel(
            name="Counter",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("length_ms", models.IntegerField()),
                ("start_ms", models.BigIntegerField()),
                ("task", models.CharField(max_length=255)),
                ("outcome", models.CharField(max_length=100)),
                ("count", models.BigIntegerField()),
            ],
            options={
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("length_ms", "start_ms", "task", "outcome"),
                        name="celery_idempotent_counter_once",
                    ),
                ],
            },
        ),
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
                ("error", models.CharField(blank=True, default="", max_length=500)),
            ],
            options={
                "default_permissions": (),
                "verbose_name": "staged message",
                "db_table": "celery_idempotent_outbox",
                "indexes": [
                    models.Index(fields=["due_ms"], name="idem_outbox_due"),
                ],
            },
        ),
        migrations.RunPython(leave_room, migrations.RunPython.noop),
    ]
