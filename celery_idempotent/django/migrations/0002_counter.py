"""Counters of outcomes, by task and hour."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    """Makes the table."""

    dependencies = (("celery_idempotent", "0001_initial"),)

    operations = (
        migrations.CreateModel(
            name="Counter",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("hour", models.IntegerField()),
                ("task", models.CharField(max_length=255)),
                ("outcome", models.CharField(max_length=32)),
                ("count", models.BigIntegerField()),
            ],
            options={
                "constraints": (
                    models.UniqueConstraint(
                        fields=("hour", "task", "outcome"), name="celery_idempotent_counter_once"
                    ),
                ),
            },
        ),
    )
