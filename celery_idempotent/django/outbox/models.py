"""The table of the outbox: messages that a transaction staged and that were not sent yet."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from django.db import models

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

#: How much of an error is kept for operators.
ERROR_CHARS = 500


class OutboxMessage(models.Model):
    """A message between the transaction that staged it and the broker; deleted once it is sent.

    Its sender has it until ``due_ms``. After that any process may take it, by moving ``due_ms``.
    """

    id = models.BigAutoField(primary_key=True)
    #: The name of the Celery app whose broker the message is for.
    app = models.CharField(max_length=255)
    #: As it is stamped on the message, for people and lists; so are the next three.
    task = models.CharField(max_length=255)
    #: Of the message.
    task_id = models.CharField(max_length=255)
    #: Of the call.
    key = models.CharField(max_length=255, blank=True, default="")
    #: Of the call.
    scope = models.CharField(max_length=255, blank=True, default="")
    #: The whole call, serialized.
    payload = models.BinaryField()
    #: When it was staged. All times are milliseconds since the epoch, by the database's clock.
    created_ms = models.BigIntegerField()
    #: From when on any process may take it: until then its sender does, or, after a failure, none does.
    due_ms = models.BigIntegerField()
    #: How often sending it failed.
    attempts = models.PositiveIntegerField(default=0)
    #: When sending it last failed.
    failed_ms = models.BigIntegerField(null=True, blank=True)
    #: How it failed: class and message of the error, never the arguments.
    error = models.CharField(max_length=ERROR_CHARS, blank=True, default="")

    class Meta:
        """One index: what is due."""

        app_label = "celery_idempotent"
        db_table = "celery_idempotent_outbox"
        default_permissions = ()
        verbose_name = "staged message"
        # A table that is empty most of the time: an index on a column that changes costs nothing here.
        indexes = (models.Index(fields=("due_ms",), name="idem_outbox_due"),)

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"


#: A piece of SQL, and its parameters.
_Sql = tuple[str, list[str | int]]


class NowMs(models.Func):
    """Milliseconds since the epoch by the database's clock, when the statement runs."""

    output_field = models.BigIntegerField()
    arity = 0

    def as_sql(
        self, compiler: object, connection: BaseDatabaseWrapper, *_: object, **__: object
    ) -> _Sql:
        """Ask this machine's clock, for a database whose own is not known here."""
        del compiler, connection
        return "%s", [int(time.time() * 1000)]

    def as_postgresql(self, compiler: object, connection: BaseDatabaseWrapper, **_: object) -> _Sql:
        """Not ``now()``, which stands still within a transaction."""
        del compiler, connection
        return "(extract(epoch from clock_timestamp()) * 1000)::bigint", []

    def as_mysql(self, compiler: object, connection: BaseDatabaseWrapper, **_: object) -> _Sql:
        """In UTC, which no time zone of a session moves."""
        del compiler, connection
        return "(timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000)", []

    def as_sqlite(self, compiler: object, connection: BaseDatabaseWrapper, **_: object) -> _Sql:
        """A Julian day is a float that knows milliseconds."""
        del compiler, connection
        return "cast(round((julianday('now') - 2440587.5) * 86400000) as integer)", []
