"""What histories that ``explain`` tells have in common: what really happened, and what of it has to be told.

With the environment variable ``CELERY_IDEMPOTENT_HISTORIES`` each is written to ``NN.txt`` in the directory that it
names, to be read by people who do not know what happened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["History", "check", "write"]


class History(NamedTuple):
    """What really happened to an order, and what of it has to be told."""

    number: int
    happened: str
    facts: tuple[str, ...]


def write(told: Mapping[int, str]) -> None:
    """Write what was told, if somebody wants to read it."""
    directory = os.environ.get("CELERY_IDEMPOTENT_HISTORIES")
    for number, text in told.items() if directory else ():
        Path(str(directory), f"{number:02}.txt").write_text(text)


def check(history: History, told: Mapping[int, str]) -> None:
    """Find the facts in what was told, wherever its lines end."""
    text = " ".join(told[history.number].split())
    for fact in history.facts:
        assert fact in text
