"""Counts what a piece of work costs in something that is the same in every run: calls of functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

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
