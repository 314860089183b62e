"""What a piece of work costs, in something that is the same in every run: calls of functions, and statements."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import celery_idempotent

_PACKAGE = str(Path(celery_idempotent.__file__).parent)


def calls(function: Callable[[], object]) -> int:
    """Return how many functions of ours it calls, and how many others they call."""
    count = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        place = frame.f_code.co_filename
        ours = place.startswith(_PACKAGE) and not place.startswith(f"{_PACKAGE}/testing")
        count += ours and event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


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
