"""What finds INTERRUPTED and FAILED records, newest first, and the time of the last sweep."""

from __future__ import annotations

from django.db import migrations, models

from celery_idempotent.django.fields import EndedIndex


class Migration(migrations.Migration):
    """Makes the index and the table."""

    dependencies = (("celery_idempotent", "0004_idempotencyrecord"),)

    operations = (
        migrations.CreateModel(
            name="Sweep",
            fields=[
                ("id", models.SmallIntegerField(primary_key=True, serialize=False)),
                ("ended_ms", models.BigIntegerField()),
            ],
            options={"default_permissions": ()},
        ),
        migrations.AddIndex(
            model_name="lease",
            index=EndedIndex(fields=["state", "token", "digest"], name="celery_idempotent_ended"),
        ),
    )
