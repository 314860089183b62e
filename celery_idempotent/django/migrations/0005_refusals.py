"""The table of those who could not have a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import migrations, models

from celery_idempotent.django.fields import ShortBinaryField

if TYPE_CHECKING:
    from django.apps.registry import Apps
    from django.db.backends.base.schema import BaseDatabaseSchemaEditor


def leave_room(_: Apps, editor: BaseDatabaseSchemaEditor) -> None:
    """On PostgreSQL, leave room in each page for the new versions of its rows."""
    if editor.connection.vendor == "postgresql":
        editor.execute("ALTER TABLE celery_idempotent_refusals SET (fillfactor = 70)")


class Migration(migrations.Migration):
    """Makes the table."""

    dependencies = (("celery_idempotent", "0004_idempotencyrecord"),)

    operations = (
        migrations.CreateModel(
            name="Refusals",
            fields=[
                (
                    "digest",
                    ShortBinaryField(max_length=16, primary_key=True, serialize=False),
                ),
                ("created_ms", models.BigIntegerField()),
                ("entries", models.TextField()),
            ],
            options={"default_permissions": ()},
        ),
        migrations.RunPython(leave_room, migrations.RunPython.noop),
    )
