"""The runs that were started, and the ledger that all of it is about."""

from __future__ import annotations

from django.db import models


class Kind(models.TextChoices):
    """Which of the two tasks."""

    PLAIN = "plain", "celery.Task"
    IDEMPOTENT = "idempotent", "IdempotentTask"


class _Attempt(models.Model):
    kind = models.CharField(max_length=10, choices=Kind.choices)
    delivery_id = models.UUIDField()
    task_id = models.CharField(max_length=255)
    pid = models.PositiveIntegerField()

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.kind}, {self.delivery_id}"


class Run(_Attempt):
    """One start of a task, written before anything else: a killed run has no entry."""

    started = models.DateTimeField(auto_now_add=True)

    class Meta:
        indexes = (models.Index(fields=["kind", "delivery_id"], name="webhooks_run_delivery"),)


class LedgerEntry(_Attempt):
    """The effect of a run. Only the task prevents that a delivery is entered twice.

    A unique constraint on the delivery would hide the duplicates that this project is here to show.
    """

    event = models.CharField(max_length=64)
    action = models.CharField(max_length=64, blank=True)
    run = models.OneToOneField(Run, on_delete=models.PROTECT, related_name="entry")
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "ledger entries"
        indexes = (models.Index(fields=["kind", "delivery_id"], name="webhooks_entry_delivery"),)
