"""Databases for the projects of users."""

from __future__ import annotations

from tests.sql.conftest import sql_databases, use_database

__all__ = ["sql_databases", "use_database"]
