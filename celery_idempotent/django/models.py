"""The tables of celery-idempotent in a Django database.

What may change while a task runs is apart from what a claim and a settle write: a renewal or a step
never waits for, nor breaks, the transaction of the task that settles the record (under REPEATABLE
READ a row that another transaction updated meanwhile could not be written any more). Times are
milliseconds since the epoch by the database's clock.
"""

from __future__ import annotations

from django.db import models

from celery_idempotent.django.fields import EndedIndex, ShortBinaryField
from celery_idempotent.django.outbox.models import OutboxMessage

__all__ = [
    "Counter",
    "HighWaterMark",
    "IdempotencyRecord",
    "Lease",
    "OutboxMessage",
    "Record",
    "Sweep",
]


class Record(models.Model):
    """One key: a row from its first claim until a prune finds it past its retention.

    Of all that is indexed, nothing changes on the way from claim to settle, so PostgreSQL can update
    the row in place.
    """

    #: Grows, so it sorts by age.
    id = models.BigAutoField(primary_key=True)
    #: Of the last claim: grows with every claim of the key, and is at least the time in microseconds.
    token = models.BigIntegerField()
    #: When the key was first claimed or reserved.
    created_ms = models.BigIntegerField()
    #: When the state last changed.
    updated_ms = models.BigIntegerField()
    #: When a settled or released record is over; an unfinished one goes by its lease.
    expires_ms = models.BigIntegerField()
    #: When a prune looks at the row, at most an hour after it is over.
    prune_ms = models.BigIntegerField(db_index=True)
    #: One more with every write: what was read is written only if nobody wrote since.
    version = models.IntegerField()
    #: How often a claim was lost.
    crashes = models.IntegerField()
    #: How often it was claimed.
    attempts = models.IntegerField()
    #: Its first letter; R is released: as if there were no row, it only keeps the token.
    state = models.CharField(
        max_length=1,
        choices=[
            ("Q", "QUEUED"),
            ("P", "PROCESSING"),
            ("I", "INTERRUPTED"),
            ("C", "COMPLETED"),
            ("F", "FAILED"),
            ("R", "released"),
        ],
    )
    #: The key was reserved before its message was published.
    reserved = models.BooleanField()
    #: The task ended with ``self.replace``.
    replaced = models.BooleanField()
    #: The callbacks of the settled task were sent.
    delivered = models.BooleanField()
    #: A sweep ended the claim or settled the record; its owner may still go on with its token.
    swept = models.BooleanField()
    #: Of namespace, scope and key: the start of the SHA-256.
    digest = ShortBinaryField(max_length=16, unique=True)
    #: Of the arguments: a digest.
    fingerprint = ShortBinaryField(max_length=16, null=True)
    #: What the key is for.
    namespace = models.CharField(max_length=255)
    #: In canonical form.
    scope = models.TextField()
    #: In canonical form.
    key = models.TextField()
    #: Who claimed it last.
    task_id = models.TextField()
    #: Result or exception: one byte for its content types, then the body.
    value = models.BinaryField(null=True)
    #: What an operator did to it last, who and why.
    note = models.TextField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        scope = f" in scope {self.scope}" if self.scope else ""
        return f"{self.namespace} key {self.key}{scope}"


class Lease(models.Model):
    """The part of a record that may change while a task runs: a row if it is QUEUED, PROCESSING or INTERRUPTED.

    Also while it is FAILED: whatever may need an operator is found among few rows. It counts only if
    the record is in such a state and has the same token; one that was left behind goes with the
    next sweep. Of the index, MySQL and MariaDB have all rows; others only those that are INTERRUPTED or FAILED.
    """

    #: The record's.
    digest = ShortBinaryField(max_length=16, primary_key=True)
    #: The record's.
    token = models.BigIntegerField()
    #: When the lease runs out, or the message counts as lost; none for INTERRUPTED.
    deadline_ms = models.BigIntegerField(null=True)
    #: The deadline, if a sweep has to act on it.
    due_ms = models.BigIntegerField(null=True, db_index=True)
    #: When the record is over, unless it is renewed.
    expires_ms = models.BigIntegerField()
    #: One more with every write: what was read is written only if nobody wrote since.
    version = models.IntegerField()
    #: How often a sweep sent the message again.
    requeues = models.IntegerField()
    #: Q, P, I or F, as the record's.
    state = models.CharField(max_length=1)
    #: i interrupt, f fail, r requeue; in upper case while the reservation is not committed.
    on_stale = models.CharField(max_length=1)
    #: Which attempt to claim or reserve wrote this: a repeated one gets the same answer.
    attempt = ShortBinaryField(max_length=16)
    #: ``hostname:pid/id``, the id being one of the worker process.
    worker = models.TextField()
    #: What to publish when it is requeued.
    message = models.BinaryField(null=True)
    #: Each step: length in 4 bytes, name after its length in 2, value as in the record.
    steps = models.BinaryField(null=True)

    class Meta:
        default_permissions = ()
        # Finds what an operator looks for. Of what it is made of, nothing changes while the task runs.
        indexes = (EndedIndex(fields=["state", "token", "digest"], name="celery_idempotent_ended"),)

    def __str__(self) -> str:
        return f"lease of token {self.token}"


class HighWaterMark(models.Model):
    """The largest token of the rows that were deleted, so that tokens grow over a forget and a prune: one row."""

    #: Always 1.
    id = models.SmallIntegerField(primary_key=True)
    #: That token.
    token = models.BigIntegerField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.token}"


class Sweep(models.Model):
    """When the last sweep ended: one row."""

    #: Always 1.
    id = models.SmallIntegerField(primary_key=True)
    #: When.
    ended_ms = models.BigIntegerField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.ended_ms}"


class Counter(models.Model):
    """How often something happened to a task within one hour."""

    #: Grows.
    id = models.BigAutoField(primary_key=True)
    #: Hours since 1970.
    hour = models.IntegerField()
    #: The task's name, or the view's.
    task = models.CharField(max_length=255)
    #: What happened, named as the signal is.
    outcome = models.CharField(max_length=32)
    #: How often.
    count = models.BigIntegerField()

    class Meta:
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(
                fields=["hour", "task", "outcome"], name="celery_idempotent_counter_once"
            ),
        )

    def __str__(self) -> str:
        return f"{self.task} {self.outcome}"


class IdempotencyRecord(models.Model):
    """A record of whatever store, for the admin: it has no table, but permissions and a place in the index."""

    #: Namespace, scope and key, see :mod:`celery_idempotent.django.admin.identities`.
    name = models.TextField(primary_key=True)

    class Meta:
        managed = False
        verbose_name = "idempotency record"
        default_permissions = ("view",)
        permissions = (
            ("view_result", "Can see results and errors of idempotency records"),
            ("release_record", "Can release idempotency records"),
            ("requeue_record", "Can requeue idempotency records"),
            ("complete_record", "Can complete idempotency records"),
            ("fail_record", "Can fail idempotency records"),
            ("forget_record", "Can forget idempotency records"),
        )

    def __str__(self) -> str:
        return self.name
