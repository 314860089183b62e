"""Delivers events as the internet does: one to four times each, some copies at the same moment."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import random
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from testproject.serve import ProcessError

_THREADS = 8
_TRIES = 20
_COPIES = (1, 2, 3, 4)
_WEIGHTS = (30, 30, 25, 15)
#: Longer than the visibility timeout of the demo, which is 2 s and looked after every second.
_SLOW_S = (3.2, 3.6)
#: At most two are slow, and no more than one of sixteen.
_SLOW, _SLOW_ONE_OF = 2, 16


class Event(NamedTuple):
    """One delivery, as GitHub sends it: two headers and a body."""

    event: str
    delivery_id: str
    body: bytes


def load(path: Path) -> list[Event]:
    """Read a ``.jsonl`` file: an ``event``, a ``delivery`` and a ``payload`` a line.

    Raises:
        ProcessError: for anything else.
    """
    events = []
    try:
        for line in filter(str.strip, path.read_text().split("\n")):
            entry: dict[str, Any] = json.loads(line)
            delivery, payload = str(uuid.UUID(entry["delivery"])), json.dumps(entry["payload"])
            events.append(Event(str(entry["event"]), delivery, payload.encode()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProcessError(f"{path}, event {len(events) + 1}: {error!r}") from None
    if not events:
        raise ProcessError(f"there are no events in {path}")
    return events


def plan_sends(
    events: Sequence[Event], *, chance: random.Random, rate: float, at_least_s: float
) -> list[tuple[float, Event]]:
    """Spread one to four copies of each event over the time, half of them at the same moment.

    Returns when each is due, in seconds from the start: as many a second as ``rate`` says, but for ``at_least_s``.
    """
    copies = chance.choices(_COPIES, _WEIGHTS, k=len(events))
    seconds = max(at_least_s, sum(copies) / rate)
    sends = []
    for event, count in zip(events, copies, strict=True):
        first = chance.uniform(0, seconds * 0.9)
        sends.append((first, event))
        for _ in range(count - 1):
            together = chance.random() < 0.5
            due = first if together else min(first + chance.uniform(0.05, 4.0), seconds)
            sends.append((due, event))
    return sorted(sends)


def plan_work(
    events: Sequence[Event], *, chance: random.Random, quick_s: float
) -> dict[str, float]:
    """How long the first runs of each take: most no time, a few longer than their visibility."""
    ids = sorted({event.delivery_id for event in events})
    slow = set(chance.sample(ids, min(_SLOW, len(ids) // _SLOW_ONE_OF)))
    work = {}
    for each in ids:
        longer = (0.05, 0.15) if chance.random() < 0.1 else (0.0, quick_s)
        work[each] = chance.uniform(*(_SLOW_S if each in slow else longer))
    return work


class Traffic:
    """The sender: a few threads that follow the plan and speak HTTP."""

    def __init__(self, sends: Sequence[tuple[float, Event]], *, secret: str, port: int) -> None:
        self._port, self._secret = port, secret.encode()
        self._begin, self._stop = time.monotonic(), threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="sender")
        self._sends = [self._pool.submit(self._deliver, *each) for each in sends]

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def finished(self) -> bool:
        return all(each.done() for each in self._sends)

    @property
    def accepted(self) -> int:
        """So many requests; :exc:`ProcessError` if the receiver refused what it should have taken."""
        return sum(each.result() for each in self._sends if each.done())

    def _deliver(self, due_s: float, event: Event) -> bool:
        """Send one copy until it is accepted, as a webhook sender does that keeps trying; False if it is stopped."""
        pause = max(0.0, self._begin + due_s - time.monotonic())
        status, answer = 0, "never sent"
        for _ in range(_TRIES):
            if self._stop.wait(pause):
                return False
            status, answer = self._post(event)
            if status == http.client.ACCEPTED:
                return True
            if status and status != http.client.SERVICE_UNAVAILABLE:
                break
            pause = 0.5
        raise ProcessError(f"delivery {event.delivery_id} was not accepted: {status} {answer}")

    def _post(self, event: Event) -> tuple[int, str]:
        signature = hmac.new(self._secret, event.body, hashlib.sha256).hexdigest()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "GitHub-Hookshot/demo",
            "X-GitHub-Event": event.event,
            "X-GitHub-Delivery": event.delivery_id,
            "X-Hub-Signature-256": f"sha256={signature}",
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request("POST", "/webhooks/github/", body=event.body, headers=headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error)
        finally:
            connection.close()
