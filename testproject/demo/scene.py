"""Where the records and the ledger are in this performance, and what that promises."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Scene"]

_DATABASES = {"postgresql": "PostgreSQL", "sqlite": "SQLite"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One of the stores, and one of the databases."""

    store: str
    database: str

    @property
    def atomic(self) -> bool:
        """Are a delivery's entry and its record one transaction?"""
        return self.store != "redis"

    def store_url(self, redis_url: str) -> str:
        """Return the setting that it comes from."""
        urls = {"redis": redis_url, "django": "django://", "hybrid": f"hybrid+{redis_url}"}
        return urls[self.store]

    @property
    def promise(self) -> str:
        """Say it to a newcomer."""
        database = _DATABASES[self.database]
        if not self.atomic:
            return (
                f"The records are in Redis, the ledger is in {database}: a kill may fall anywhere but between a run's"
                " write to the one and its write to the other (for that: --store django)."
            )
        cache = ", with a cache of the settled ones in Redis" if self.store == "hybrid" else ""
        return (
            f"Ledger and records are in {database}{cache}: a run's entry and its record are one transaction, and a"
            " kill may fall anywhere."
        )
