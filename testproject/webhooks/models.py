"""The runs that were started, and the ledger that all of it is about."""

from __future__ import annotations

from django.db import models

__all__ = ["Kind", "LedgerEntry", "Run"]


class Kind(models.TextChoices):
    """Which of the two tasks."""

    PLAIN = "plain", "celery.Task"
    IDEMPOTENT = "idempotent", "IdempotentTask"


class Run(models.Model):
    """One start of a task, written before anything else: a killed run has no entry."""

    kind = models.CharField(max_length=10, choices=Kind.choices)
    delivery_id = models.UUIDField()
    task_id = models.CharField(max_length=255)
    pid = models.PositiveIntegerField()
    started = models.DateTimeField(auto_now_add=True)

    class Meta:
        indexes = (models.Index(fields=["kind", "delivery_id"], name="webhooks_run_delivery"),)

    def __str__(self) -> str:
        return f"{self.kind} run of {self.delivery_id}"


class LedgerEntry(models.Model):
    """The effect of a run. Only the task prevents that a delivery is entered twice.

    A unique constraint on the delivery would hide the duplicates that this project is here to show.
    """

    kind = models.CharField(max_length=10, choices=Kind.choices)
    delivery_id = models.UUIDField()
    event = models.CharField(max_length=64)
    action = models.CharField(max_length=64, blank=True)
    run = models.OneToOneField(Run, on_delete=models.PROTECT, related_name="entry")
    task_id = models.CharField(max_length=255)
    pid = models.PositiveIntegerField()
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "ledger entries"
        indexes = (models.Index(fields=["kind", "delivery_id"], name="webhooks_entry_delivery"),)

    def __str__(self) -> str:
        return f"{self.kind} entry of {self.delivery_id}"
