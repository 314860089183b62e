"""What Django's models lack: short binary columns that MySQL can index, an index of few rows, the server's time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import models

from celery_idempotent.django.sql.dialects import dialect_of

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.base.schema import BaseDatabaseSchemaEditor
    from django.db.backends.ddl_references import Statement


class ShortBinaryField(models.BinaryField):  # type: ignore[type-arg]  # generic only in the stubs
    """Up to ``max_length`` bytes: ``varbinary`` on MySQL and MariaDB, as any BinaryField elsewhere."""

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        """Return the type of the column."""
        if connection.vendor == "mysql":
            return f"varbinary({self.max_length})"
        return super().db_type(connection)


class UnfinishedIndex(models.Index):
    """Of keys that a sweep or an operator may have to act on, by their state: a sweep reads no failure.

    A renewal changes nothing in it. MySQL and MariaDB have no partial index: there it is of all keys.
    """

    def create_sql(
        self,
        model: type[models.Model],
        schema_editor: BaseDatabaseSchemaEditor,
        using: str = "",
        **kwargs: object,
    ) -> Statement:
        """Return the statement that makes it."""
        partial = schema_editor.connection.features.supports_partial_indexes
        condition = models.Q(state__in=["Q", "P", "I", "F"]) if partial else None
        index = models.Index(fields=self.fields, name=self.name, condition=condition)
        return index.create_sql(model, schema_editor, using, **kwargs)


class NowMs(models.Expression):
    """Milliseconds since the epoch by the database's clock, when the statement begins."""

    output_field = models.BigIntegerField()

    def as_sql(
        self,
        compiler: object,  # noqa: ARG002
        connection: BaseDatabaseWrapper,
    ) -> tuple[str, list[str | int]]:
        """Return the SQL of this vendor: a subquery, as PostgreSQL searches no index by what changes in a statement."""
        return f"(SELECT {dialect_of(connection.vendor).now_ms})", []
