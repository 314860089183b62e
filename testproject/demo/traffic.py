"""Delivers events as the internet does: one to four times each, some copies at the same moment."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from testproject.demo.events import Event
from testproject.demo.processes import DemoError
from testproject.demo.rehearsal import QUICK_S

__all__ = ["Send", "Traffic", "plan_sends", "plan_work"]

_THREADS = 8
_TRIES = 20
_COPIES = (1, 2, 3, 4)
_WEIGHTS = (30, 30, 25, 15)
#: Longer than the visibility timeout of the demo, which is 2 s and looked after every second.
_SLOW_S = (3.2, 3.6)
#: One of so many is slow.
_SLOW_ONE_OF = 16
_SLOW = 2


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Send:
    """One HTTP request: when, in seconds from the start, and which of the events."""

    due_s: float
    event: int


def plan_sends(
    events: Sequence[Event], *, chance: random.Random, rate: float, at_least_s: float
) -> list[Send]:
    """Spread one to four copies of each event over the time, half of them at the same moment.

    As many a second as ``rate`` says, but for ``at_least_s`` seconds.
    """
    copies = chance.choices(_COPIES, _WEIGHTS, k=len(events))
    seconds = max(at_least_s, sum(copies) / rate)
    sends = []
    for number, count in enumerate(copies):
        first = chance.uniform(0, seconds * 0.9)
        sends.append(Send(due_s=first, event=number))
        for _ in range(count - 1):
            together = chance.random() < 0.5
            due = first if together else min(first + chance.uniform(0.05, 4.0), seconds)
            sends.append(Send(due_s=due, event=number))
    return sorted(sends)


def plan_work(events: Sequence[Event], *, chance: random.Random) -> dict[str, float]:
    """How long the first runs of each take: most no time, a few longer than their visibility."""
    ids = sorted({event.delivery_id for event in events})
    slow = set(chance.sample(ids, min(_SLOW, len(ids) // _SLOW_ONE_OF)))
    return {each: _work(chance, slow=each in slow) for each in ids}


def _work(chance: random.Random, *, slow: bool) -> float:
    if slow:
        return chance.uniform(*_SLOW_S)
    return chance.uniform(0.05, 0.15) if chance.random() < 0.1 else chance.uniform(0, QUICK_S)


class Traffic:
    """The sender: a thread that follows the plan, and a few that speak HTTP."""

    def __init__(self, events: Sequence[Event], sends: Sequence[Send], *, secret: str) -> None:
        self._events = events
        self._sends = sends
        self._port = 0
        self._secret = secret.encode()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._failure: str | None = None
        self.requests = 0
        self.accepted = 0

    def start(self, port: int) -> None:
        """Begin to send, to this port of this machine."""
        self._port = port
        self._thread.start()

    def close(self) -> None:
        """Send nothing more."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2)

    @property
    def finished(self) -> bool:
        return self._thread.ident is not None and not self._thread.is_alive()

    def check(self) -> None:
        """Raise :exc:`DemoError` if the receiver refused what it should have taken."""
        if self._failure is not None:
            raise DemoError(self._failure)

    def _run(self) -> None:
        begin = time.monotonic()
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="sender") as pool:
            for send in self._sends:
                if self._stop.wait(max(0.0, begin + send.due_s - time.monotonic())):
                    break
                pool.submit(self._deliver, self._events[send.event])

    def _deliver(self, event: Event) -> None:
        """Send one copy until it is accepted, as a webhook sender does that keeps trying."""
        for _ in range(_TRIES):
            if self._stop.is_set() or self._failure is not None:
                return
            status, answer = self._post(event)
            with self._lock:
                self.requests += 1
                self.accepted += status == http.client.ACCEPTED
            if status == http.client.ACCEPTED:
                return
            if status and status != http.client.SERVICE_UNAVAILABLE:
                self._failure = f"delivery {event.delivery_id} was refused: {status} {answer}"
                return
            self._stop.wait(0.5)
        self._failure = f"delivery {event.delivery_id} was never accepted: {status} {answer}"

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
