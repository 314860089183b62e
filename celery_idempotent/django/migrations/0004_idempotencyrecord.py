"""The permissions of the admin's pages; the tables themselves are not registered and need none."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    """Makes no table."""

    dependencies = (("celery_idempotent", "0003_outbox"),)

    operations = (
        migrations.CreateModel(
            name="IdempotencyRecord",
            fields=[("name", models.TextField(primary_key=True, serialize=False))],
            options={
                "managed": False,
                "verbose_name": "idempotency record",
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
        *(
            migrations.AlterModelOptions(name=name, options={"default_permissions": ()})
            for name in ("Counter", "HighWaterMark", "Lease", "Record")
        ),
        migrations.AlterModelOptions(
            name="OutboxMessage",
            options={"default_permissions": (), "verbose_name": "staged message"},
        ),
    )
