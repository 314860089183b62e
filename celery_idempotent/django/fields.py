"""Columns of a few bytes, which have to be short ones for MySQL and MariaDB to index them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    BinaryField = models.BinaryField[Any, Any]
else:
    BinaryField = models.BinaryField

__all__ = ["ShortBinaryField"]


class ShortBinaryField(BinaryField):
    """Up to ``max_length`` bytes: ``varbinary`` on MySQL and MariaDB, as any BinaryField elsewhere."""

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        """Return the type of the column."""
        if connection.vendor == "mysql":
            return f"varbinary({self.max_length})"
        return super().db_type(connection)
