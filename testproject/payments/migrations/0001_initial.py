"""The table of payments."""

from __future__ import annotations

from typing import ClassVar

from django.conf import settings
from django.db import migrations, models

USER = settings.AUTH_USER_MODEL


class Migration(migrations.Migration):
    initial = True
    dependencies: ClassVar = [migrations.swappable_dependency(USER)]
    operations: ClassVar = [
        migrations.CreateModel(
            name="Payment",
            fields=[
                (
                    "id",
                    models.BigAutoField("ID", primary_key=True, serialize=False, auto_created=True),
                ),
                ("amount", models.PositiveBigIntegerField()),
                ("currency", models.CharField(max_length=3)),
                ("recipient", models.CharField(max_length=64)),
                ("key", models.CharField(db_index=True, max_length=255)),
                ("created", models.DateTimeField(auto_now_add=True)),
                ("payer", models.ForeignKey(USER, models.PROTECT, related_name="payments")),
            ],
            options={"ordering": ("-pk",)},
        ),
    ]
