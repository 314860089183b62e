"""Everything that is told of outcomes while a test listens: events, counters and lines of the log."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

from celery_idempotent.signals import OUTCOMES, Counters, Counts, Event
from tests.support.paths import ROOT


class Row(NamedTuple):
    """What docs/options.md says of an outcome."""

    states: set[str]
    levels: list[str]


def documented() -> dict[str, Row]:
    """Return the list of the outcomes in docs/options.md."""
    text = (ROOT / "docs" / "options.md").read_text()
    outcomes = text.partition("## Signals\n")[2].partition("\n## ")[0]
    words = re.compile("`([A-Z]+)`")
    return {
        name: Row(set(words.findall(when)), words.findall(level))
        for name, level, when in re.findall(
            r"^- `(\w+)` \(([^:]*)\): (.*)$", outcomes, re.MULTILINE
        )
    }


class Heard:
    """What was told: events with the names of their signals, counted outcomes, and lines."""

    def __init__(self) -> None:
        self.events: list[tuple[str, object, Event]] = []
        self.counted = Counts(int)
        self.lines: list[logging.LogRecord] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.events]


@contextmanager
def listening() -> Iterator[Heard]:
    """Hear what is told in this process."""
    heard = Heard()

    class Hearing(Counters):
        def of(self, store: Any) -> Counts:
            return heard.counted

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()  # or it cannot be written
            # The heartbeat says so of another test's store.
            if "outcomes are counted later" not in text:
                heard.lines.append(record)

    logger, handler = logging.getLogger("celery_idempotent.signals"), Handler()
    level = logger.level
    with ExitStack() as stack:
        for name, signal in OUTCOMES.items():
            note = _noting(heard, name)
            signal.connect(note, weak=False)
            stack.callback(signal.disconnect, note)
        stack.enter_context(mock.patch("celery_idempotent.signals.counters", Hearing()))
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        logger.setLevel(logging.DEBUG)
        stack.callback(logger.setLevel, level)
        yield heard


def _noting(heard: Heard, name: str) -> Callable[..., None]:
    def note(sender: object, event: Event, **_: object) -> None:
        heard.events.append((name, sender, event))

    return note


def assert_told(heard: Heard, *expected: str, task: str, namespace: str, who: str) -> None:
    """Each outcome once, in this order, in all three ways; ``"settled FAILED"`` is an outcome with its state."""
    rows = documented()
    told = [
        f"{name} {event.state.value}" if event.state else name for name, _, event in heard.events
    ]
    assert told == list(expected)
    names = [each.split()[0] for each in expected]
    counted = [(SWEEP if name == "swept" else task, name) for name in names]
    counted += [(task, "failed") for each in expected if each == "settled FAILED"]
    ended = {"settled": "failed", "released": "released"}
    for name, _, event in heard.events:
        if event.error is not None and name in ended:
            counted.append((task, f"{ended[name]}:{type(event.error).__name__}"))
    assert heard.counted == Counter(counted)
    assert len(heard.lines) == len(expected)
    for (name, _, event), line in zip(heard.events, heard.lines, strict=True):
        assert line.levelname in rows[name].levels, line.getMessage()
        assert line.getMessage().startswith("idempotency: ")
        assert event.who == who
        if event.state is not None:
            assert event.state.value in rows[name].states
        if name != "swept":
            assert (event.task, event.identity and event.identity.namespace) == (task, namespace)
            assert event.task_id


SWEEP = "celery_idempotent.sweep"
