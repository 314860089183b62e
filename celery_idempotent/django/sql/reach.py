"""How long a database that accepts connections and stays silent is waited for: what its settings leave unbounded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["missing_bounds"]

#: What each vendor's driver calls them, and the environment variable that stands in for one.
_BOUNDS = {
    "postgresql": (
        ("connect_timeout", "PGCONNECT_TIMEOUT"),
        ("keepalives_idle", ""),
        ("tcp_user_timeout", ""),
    ),
    "mysql": (("read_timeout", ""), ("write_timeout", "")),
}


def missing_bounds(database: BaseDatabaseWrapper) -> tuple[str, ...]:
    """Return the OPTIONS that would bound the waits for this database, and are not set.

    None for one on this machine, nor where the settings are elsewhere.
    """
    settings = database.settings_dict
    options = settings.get("OPTIONS") or {}
    host = str(settings.get("HOST") or "")
    if not host or host.startswith("/") or "service" in options or "read_default_file" in options:
        return ()
    return tuple(
        name
        for name, variable in _BOUNDS.get(database.vendor, ())
        if name not in options and not os.environ.get(variable)
    )
