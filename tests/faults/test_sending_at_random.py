"""Chains, chords, links, errbacks and replacements under random faults: nothing that follows is left behind.

A chord whose body (or an errback of it) the broker refused, and a replacement that it refused, end as with Celery, and
their results say so. Messages that kombu lost, as the log of Redis shows, explain what is missing.

A short run each time; ``CELERY_IDEMPOTENT_SENDING_RUNS=1000`` makes it that many canvases for each broker,
``CELERY_IDEMPOTENT_SENDING_SEED`` another run. What took effect is counted in the ledger; what a worker announces of
itself is not believed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from celery import chain, chord, group
from celery.exceptions import ChordError
from celery.result import AsyncResult
from kombu.exceptions import OperationalError

from tests.faults.stand import Stand, open_stand
from tests.support.sites import RABBITMQ, REDIS
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]

RUNS = int(os.environ.get("CELERY_IDEMPOTENT_SENDING_RUNS", "8"))
SEED = int(os.environ.get("CELERY_IDEMPOTENT_SENDING_SEED", "20261122"))

#: So many canvases are at work at a time.
AT_ONCE = 16
#: A canvas is left behind when nothing has happened for so long, in seconds: longer than anything that may come back.
STALLED = 60


@pytest.fixture(params=[REDIS, RABBITMQ])
def stand(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stand]:
    rabbitmq = request.getfixturevalue("rabbitmq") if request.param == "rabbitmq" else None
    directory = tmp_path_factory.mktemp("random")
    options: dict[str, Any] = {"idempotency_lease": 3, "idempotency_max_crashes": 1000}
    # A connection that a worker reads from, cut off from Redis, loses the message that was on its way (kombu).
    writing: dict[str, Any] = {"only_writing": rabbitmq is None}
    with open_stand(
        request.param, directory, rabbitmq, concurrency=4, **writing, **options
    ) as stand:
        yield stand


class Shapes:
    """Sends canvases; each returns the labels that have to take effect."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.results: dict[str, AsyncResult[Any]] = {}

    def step(self, key: str, letter: str, name: str = "step") -> Any:
        return self.stand.step(f"{key}/{letter}", name=name)

    def links(self, key: str) -> str:
        first = self.step(key, "a")
        first.link(self.step(key, "b"))
        first.link(chain(self.step(key, "c"), self.step(key, "d")))
        first.link(group([self.step(key, "e"), self.step(key, "f")], app=self.stand.app))
        self.results[key] = first.apply_async()
        return "abcdef"

    def chain(self, key: str) -> str:
        self.results[key] = chain(*(self.step(key, each) for each in "abcd")).apply_async()
        return "abcd"

    def chord(self, key: str) -> str:
        body = self.step(key, "d")
        body.link(self.step(key, "e"))
        self.results[key] = chord(
            [self.step(key, each) for each in "abc"], body, app=self.stand.app
        ).apply_async()
        return "abcde"

    def chord_in_a_chain(self, key: str) -> str:
        middle = group([self.step(key, "b"), self.step(key, "c")], app=self.stand.app)
        self.results[key] = chain(
            self.step(key, "a"), middle, self.step(key, "d"), self.step(key, "e")
        ).apply_async()
        return "abcde"

    def chains_in_a_chord(self, key: str) -> str:
        header = [chain(self.step(key, "a"), self.step(key, "b")), self.step(key, "c")]
        self.results[key] = chord(header, self.step(key, "d"), app=self.stand.app).apply_async()
        return "abcd"

    def errbacks(self, key: str) -> str:
        first = self.step(key, "a", "refuse")
        first.link_error(self.stand.mourn(f"{key}/b"))
        first.link_error(self.stand.mourn(f"{key}/c"))
        self.results[key] = first.apply_async()
        return "abc"

    def failed_member(self, key: str) -> str:
        body = self.step(key, "c")
        body.link_error(self.stand.mourn(f"{key}/d"))
        header = [self.step(key, "a"), self.step(key, "b", "refuse")]
        self.results[key] = chord(header, body, app=self.stand.app).apply_async()
        return "abd"

    def replacement(self, key: str) -> str:
        queue = self.stand.conf["task_default_queue"]
        swap = self.stand.app.tasks["swap"].si(f"{key}/a", queue)
        self.results[key] = chain(swap, self.step(key, "b")).apply_async()
        return "ab"


@dataclass
class Faults:
    """Breaks what a random number says, and mends it, until told to stop; never while a canvas is being sent."""

    stand: Stand
    random: random.Random
    sending: threading.Lock
    done: Counter[str] = field(default_factory=Counter)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        faults: list[tuple[Callable[[], None], int]] = [
            (self.kill_a_child, 10),
            (self.cut, 6),
            (self.refuse, 3),
            (self.lose_an_answer, 3),
            (self.kill_the_worker, 1),
            (self.restart_redis, 1),
        ]
        kinds, weights = zip(*faults, strict=True)
        while not self.stop.wait(self.random.uniform(0.2, 1.5)):
            if not self.stand.ready():
                continue  # who is hit again and again at the start never does anything
            (fault,) = self.random.choices(kinds, weights)
            with contextlib.suppress(ProcessLookupError, IndexError, AssertionError):
                fault()
                self.done[fault.__name__] += 1

    def kill_a_child(self) -> None:
        """A process of the pool dies."""
        os.kill(self.random.choice(self.stand.worker.children()), signal.SIGKILL)

    def kill_the_worker(self) -> None:
        """The machine is lost, and another takes over."""
        os.killpg(self.stand.worker.pid, signal.SIGKILL)

    def cut(self) -> None:
        """The connections to the broker break."""
        self.stand.proxy.cut()

    def refuse(self) -> None:
        """The broker is away for a while."""
        self.stand.proxy.refuse()
        self.stop.wait(self.random.uniform(0.2, 3))
        wait_for(self._healed, 10, "the proxy's port")

    def _healed(self) -> bool:
        with contextlib.suppress(OSError):  # a client may have the port for a moment
            self.stand.proxy.heal()
            return True
        return False

    def lose_an_answer(self) -> None:
        """The broker takes a message, and its answer is lost."""
        publish = b"LPUSH" if self.stand.broker == "redis" else b"step"
        self.stand.proxy.swallow_replies(publish)

    def restart_redis(self) -> None:
        """The store and the results, and on Redis the broker, are killed and come back with all that they had."""
        with self.sending:
            self.stand.server.kill()
            self.stop.wait(self.random.uniform(0.2, 3))
            self.stand.server.start()


@pytest.mark.timeout(240 + 3 * RUNS)
def test_nothing_that_follows_is_left_behind(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(f"{SEED} {stand.broker}")
    shapes = Shapes(stand)
    makers = [
        getattr(shapes, name)
        for name in vars(Shapes)
        if not name.startswith("_") and name != "step"
    ]
    faults = Faults(stand, random.Random(f"{SEED} faults {stand.broker}"), threading.Lock())
    breaking = threading.Thread(target=faults.run, daemon=True)
    #: What every canvas that is not done yet has to bring about.
    wanted: dict[str, set[str]] = {}
    #: Those that a refusal ended.
    ended: set[str] = set()
    sent = Counter[str]()
    began = moved = time.monotonic()
    seen = -1
    breaking.start()
    try:
        while len(sent) == 0 or sent.total() < RUNS or wanted:
            while sent.total() < RUNS and len(wanted) < AT_ONCE:
                make, key = chance.choice(makers), stand.label()
                with faults.sending:
                    wanted[key] = {f"{key}/{each}" for each in make(key)}
                    if make == shapes.replacement:
                        wanted[key].add(f"{key}/a'")
                sent[make.__name__] += 1
            effects = {each.key for each in stand.ledger.entries("effect")}
            wanted = {key: labels for key, labels in wanted.items() if not labels <= effects}
            # Else they would keep their places, until nothing more is sent.
            with faults.sending:  # the results are there
                ended |= {key for key in wanted if _ended_by_refusal(shapes.results[key])}
            wanted = {key: labels for key, labels in wanted.items() if key not in ended}
            if sent.total() == RUNS:
                faults.stop.set()
            if len(effects) != seen:
                seen, moved = len(effects), time.monotonic()
            if time.monotonic() - moved > STALLED:
                break
            time.sleep(0.1)
    finally:
        faults.stop.set()
        breaking.join()
    counts = Counter(each.key for each in stand.ledger.entries("effect"))
    lost = stand.lost_by_kombu()
    left = {
        key: sorted(labels - counts.keys())
        for key, labels in wanted.items()
        if not any(each.startswith(key) for each in lost)
    }
    report = (
        f"{stand.broker}: {sent.total()} canvases {dict(sent)} in {time.monotonic() - began:.0f} s, {len(counts)} "
        f"effects, {sum(each > 1 for each in counts.values())} more than once (killed at work); "
        f"faults {dict(faults.done)}; {len(ended)} ended by a refusal; lost by kombu {lost}; left behind {left}"
    )
    with capsys.disabled():
        sys.stdout.write(f"\n{report}\n")
    assert not left, f"{report}\n{stand.worker.tail()}"


def _ended_by_refusal(result: object) -> bool:
    """Did Celery end this canvas because the broker refused a replacement, or the body of a chord or its errback?"""
    while isinstance(result, AsyncResult):
        error = result.result if result.state == "FAILURE" else None
        broken = isinstance(error, AttributeError) and "'NoneType'" in str(error)  # kombu's
        # The last one where the results were away, too.
        if broken or isinstance(error, (ChordError, OperationalError, redis.ConnectionError)):
            return "Refused(" not in str(error)
        result = result.parent
    return False
