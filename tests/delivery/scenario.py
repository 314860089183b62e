"""How a scenario is written down: a sentence, and a function that plays it on one side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import celery

from tests.delivery.sides import Stage

CELERY = tuple(int(part) for part in celery.__version__.split(".")[:2])


@dataclass(frozen=True)
class Scenario:
    """What documents say, played on either side.

    ``absent`` messages stay where no worker takes them, or end untold. ``since`` is the first Celery that does so.
    What is ``slow`` begins first; what is ``alone`` (it touches Celery's global state) is played when all else is over.
    ``differs`` names the announced difference that it shows: then the two sides are *not* equal.
    """

    sentence: str
    play: Callable[[Stage], None]
    absent: int = 0
    since: tuple[int, int] = (5, 4)
    differs: str = ""
    slow: bool = False
    alone: bool = False

    def __str__(self) -> str:
        return self.sentence


_all: list[Scenario] = []


def scenario(
    sentence: str, **how: Any
) -> Callable[[Callable[[Stage], None]], Callable[[Stage], None]]:
    """Register a scenario under its sentence."""

    def register(function: Callable[[Stage], None]) -> Callable[[Stage], None]:
        assert all(sentence != each.sentence for each in _all), f"twice: {sentence}"
        _all.append(Scenario(sentence, function, **how))
        return function

    return register


def everything() -> list[Scenario]:
    """Return all scenarios, of every module and for every Celery."""
    for name in ("calling", "working", "canvas"):
        import_module(f"tests.delivery.{name}")
    return list(_all)
