"""Who settled a record by hand, and why; the permission to complete records."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    """Adds the column, and the permission."""

    dependencies = (("celery_idempotent", "0006_ended"),)

    operations = (
        migrations.AddField(
            model_name="record",
            name="interventions",
            field=models.TextField(null=True),
        ),
        migrations.AlterModelOptions(
            name="idempotencyrecord",
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
    )
