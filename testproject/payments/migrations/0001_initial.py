"""The table of payments."""

from __future__ import annotations

from typing import ClassVar

from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies: ClassVar = [migrations.swappable_dependency(settings.AUTH_USER_MODEL)]
    operations: ClassVar = [
        migrations.CreateModel(
            name="Payment",
            fields=[
                (
                    "id",
                    models.BigAutoField("ID", primary_key=True, serialize=False, auto_created=True),
                ),
                (
                    "amount",
                    models.PositiveBigIntegerField(help_text="In minor units: 100 is one euro."),
                ),
                ("currency", models.CharField(max_length=3)),
                ("recipient", models.CharField(max_length=64)),
                ("key", models.CharField(db_index=True, max_length=255)),
                ("created", models.DateTimeField(auto_now_add=True)),
                (
                    "payer",
                    models.ForeignKey(
                        settings.AUTH_USER_MODEL, models.PROTECT, related_name="payments"
                    ),
                ),
            ],
            options={"ordering": ("-pk",)},
        ),
    ]
