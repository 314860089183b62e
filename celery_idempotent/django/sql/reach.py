"""Which waits the settings of a database leave unbounded: for a server that accepts connections and never answers.

A machine that loses its power or its network closes no connection. Without these options a driver waits for its answer
for as long as TCP does, which may be hours; the run's lease is over by then, and its worker process can do nothing
else. The system checks name what is missing (``missing_bounds``); they set nothing by themselves, because the settings
are the project's.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

#: The options of each vendor's driver, each with the environment variable that sets it too.
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

    Empty for a database on this machine, and where a file that we do not read has the settings.
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
