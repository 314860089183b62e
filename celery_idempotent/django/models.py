"""The tables in a Django database. Times are milliseconds since the epoch by its clock."""

from __future__ import annotations

from django.db import models

from celery_idempotent.django.fields import ShortBinaryField, UnfinishedIndex


class IdempotencyRecord(models.Model):
    """One key: a row from its first claim until a prune finds it past its retention.

    A renewal changes no column that is indexed, so PostgreSQL updates the row in place. The admin shows the records of
    every store under the name of this model, and guards its pages by the permissions.
    """

    #: Of namespace, scope and key: the start of the SHA-256.
    digest = ShortBinaryField(max_length=16, primary_key=True)
    namespace = models.CharField(max_length=255)
    #: In canonical form, both.
    scope = models.TextField()
    key = models.TextField()
    #: When a prune looks at the row, at most an hour after it is over.
    prune_ms = models.BigIntegerField(db_index=True)
    #: One more with every write: what was read is written only if nobody wrote since.
    version = models.IntegerField()
    #: Its first letter, or R, released: as if there were no row, but for the token.
    state = models.CharField(max_length=1)
    #: Of the last claim: grows with every claim of the key, and is at least the time in microseconds.
    token = models.BigIntegerField()
    #: When the key was first claimed or reserved.
    created_ms = models.BigIntegerField()
    #: When the state last changed.
    updated_ms = models.BigIntegerField()
    #: When the lease runs out, or the message is taken for lost.
    deadline_ms = models.BigIntegerField(null=True)
    #: The deadline, if a sweep has to act on it.
    due_ms = models.BigIntegerField(null=True)
    #: When the record is over, unless it is renewed.
    expires_ms = models.BigIntegerField()
    #: How often a claim was lost.
    crashes = models.IntegerField()
    #: Who claimed it last.
    task_id = models.TextField()
    #: All other fields that are not as usual, in JSON.
    data = models.TextField()
    #: Result or exception, as it was serialized.
    value = models.BinaryField(null=True)

    class Meta:
        db_table = "celery_idempotent_record"
        verbose_name = "idempotency record"
        indexes = (
            UnfinishedIndex(fields=["state", "updated_ms"], name="celery_idempotent_unfinished"),
        )
        default_permissions = ("view",)
        permissions = (
            ("view_result", "Can see results and errors of idempotency records"),
            ("release_record", "Can release idempotency records"),
            ("requeue_record", "Can requeue idempotency records"),
            ("complete_record", "Can complete idempotency records"),
            ("fail_record", "Can fail idempotency records"),
            ("forget_record", "Can forget idempotency records"),
        )


class Mark(models.Model):
    """A number that only grows, see :mod:`celery_idempotent.django.sql.dialects`: four rows."""

    #: 1: the largest token of the rows that were deleted, so that tokens grow over a forget and a prune. 2: when the
    #: last sweep ended. 3: the first use, negative; positive: the first use after a loss. 4: the last probe.
    id = models.SmallIntegerField(primary_key=True)
    value = models.BigIntegerField()

    class Meta:
        default_permissions = ()


class Counter(models.Model):
    """How often something happened to a task within a minute or an hour."""

    id = models.BigAutoField(primary_key=True)
    length_ms = models.IntegerField()
    start_ms = models.BigIntegerField()
    #: The task's name, or the view's.
    task = models.CharField(max_length=255)
    #: What happened, named as the signal is; a failure also by its class, as "failed:ValueError".
    outcome = models.CharField(max_length=100)
    count = models.BigIntegerField()

    class Meta:
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(
                fields=["length_ms", "start_ms", "task", "outcome"],
                name="celery_idempotent_counter_once",
            ),
        )


class OutboxMessage(models.Model):
    """A message between the transaction that staged it and the broker; deleted once it is sent.

    Its sender has it until ``due_ms``. After that any process may take it, by moving ``due_ms``.
    """

    id = models.BigAutoField(primary_key=True)
    #: The name of the Celery app whose broker the message is for.
    app = models.CharField(max_length=255)
    #: The next four, as they are stamped on the message, are for people and lists.
    task = models.CharField(max_length=255)
    task_id = models.CharField(max_length=255)
    key = models.CharField(max_length=255, blank=True, default="")
    scope = models.CharField(max_length=255, blank=True, default="")
    #: The whole call, serialized.
    payload = models.BinaryField()
    #: When it was staged.
    created_ms = models.BigIntegerField()
    #: From when on any process may take it.
    due_ms = models.BigIntegerField()
    #: How often sending it failed, and how it did last: never the arguments.
    attempts = models.PositiveIntegerField(default=0)
    error = models.CharField(max_length=500, blank=True, default="")

    class Meta:
        default_permissions = ()
        db_table = "celery_idempotent_outbox"
        verbose_name = "staged message"
        # A table that is empty most of the time: an index on a column that changes costs nothing here.
        indexes = (models.Index(fields=("due_ms",), name="idem_outbox_due"),)
