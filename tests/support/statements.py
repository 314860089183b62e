"""What a piece of work asks of the databases."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def statements() -> Iterator[list[str]]:
    """Note every statement of this thread on every connection of Django's: a store has some of its own."""
    from django.db.backends.utils import CursorWrapper

    from celery_idempotent.django.sql import connections

    asked: list[str] = []
    ours = threading.current_thread()
    wrapper: Any = CursorWrapper
    execute = wrapper._execute_with_wrappers

    def noting(self: Any, sql: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is ours:
            asked.append(str(sql))
        return execute(self, sql, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapper, "_execute_with_wrappers", noting)
        # A store would go by psycopg's own cursor.
        patch.setattr(connections, "_is_psycopg_3", lambda _: False)
        yield asked
