"""The events to deliver: from a file of JSON lines, or the sample that ships with the project."""

from __future__ import annotations

import gzip
import json
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testproject.demo.processes import DemoError

__all__ = ["Event", "load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One delivery, as GitHub sends it: two headers and a body."""

    event: str
    delivery_id: str
    body: bytes


def load(path: Path) -> list[Event]:
    """Read a ``.jsonl`` or ``.jsonl.gz`` file: an ``event``, a ``delivery`` and a ``payload`` a line.

    Raises :exc:`DemoError`, with the line, for anything else.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DemoError(f"cannot read the events in {path}: {error}") from error
    lines = enumerate(text.split("\n"), start=1)
    events = [_event(path, number, line) for number, line in lines if line.strip()]
    if not events:
        raise DemoError(f"there are no events in {path}")
    return events


def _event(path: Path, number: int, line: str) -> Event:
    try:
        entry: dict[str, Any] = json.loads(line)
        return Event(
            event=str(entry["event"]),
            delivery_id=str(uuid.UUID(entry["delivery"])),
            body=json.dumps(entry["payload"]).encode(),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DemoError(
            f"{path}, line {number}: not an object with event, delivery and payload ({error!r})"
        ) from None
