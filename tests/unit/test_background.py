"""The one thread that does what a worker's main process has to tell the store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_idempotent import backoff
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.background import Background
from tests.support.waiting import wait_for


class Work:
    """A job that notes its steps."""

    def __init__(
        self,
        name: str,
        done: list[str],
        *steps: Any,
        patience: float = 60,
    ) -> None:
        self.name, self.done, self.steps = name, done, list(steps)
        self.give_up = time.monotonic() + patience

    def __str__(self) -> str:
        return f"do {self.name}"

    def step(self) -> float | None:
        self.done.append(self.name)
        step = self.steps.pop(0) if self.steps else None
        if isinstance(step, Exception):
            raise step
        return step() if callable(step) else step


@pytest.fixture
def done() -> list[str]:
    return []


@pytest.fixture
def idle() -> Iterator[Callable[[], None]]:
    """Wait until the thread has ended."""

    def idle() -> None:
        wait_for(
            lambda: "idempotency-background" not in {each.name for each in threading.enumerate()},
            what="the thread to end",
        )

    yield idle
    idle()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def closed(gate: threading.Event) -> Callable[[], None]:
    """A step that lasts until the gate opens."""

    def step() -> None:
        gate.wait(30)

    return step


def test_one_thread_does_all_and_ends_when_nothing_is_left(done, idle):
    background = Background()
    before = threading.active_count()
    for n in range(500):
        background.put(Work(str(n), done, 0.01))
        assert threading.active_count() <= before + 1
    idle()
    assert sorted(done) == sorted([*map(str, range(500))] * 2)
    background.put(Work("later", done))
    idle()
    assert done[-1] == "later"


def test_while_the_store_is_away_it_is_asked_no_more_than_once_a_second(done, idle, monkeypatch):
    pauses: list[float] = []
    fake = SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append)
    monkeypatch.setattr(backoff, "time", fake)
    background = Background()
    for n in range(3):
        background.put(Work(str(n), done, *[StoreUnavailable("away")] * 10))
    idle()
    # Each try is followed by a pause, whichever job it was for.
    assert len(pauses) == 30
    assert 0.5 <= max(pauses) <= 1.0
    assert sorted(done) == sorted(["0", "1", "2"] * 11)


def test_a_job_whose_time_is_over_is_given_up_and_told(done, idle, caplog):
    background = Background()
    background.put(Work("it", done, StoreUnavailable("away"), patience=0))
    idle()
    assert done == ["it"]
    assert "could not do it: away" in caplog.text


def test_a_thread_that_cannot_be_started_is_started_with_the_next_job(done, idle, monkeypatch):
    background = Background()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            background.put(Work("first", done))
    background.put(Work("second", done))
    idle()
    assert done == ["first", "second"]


def test_a_job_that_fails_harms_no_other(done, idle, caplog):
    background = Background()
    background.put(Work("bad", done, ValueError("a fault")))
    background.put(Work("good", done))
    idle()
    assert done == ["bad", "good"]
    assert "could not do bad: a fault" in caplog.text


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_no_jobs_of_its_parent_and_a_thread_of_its_own(done, idle, gate):
    background = Background()
    background.put(Work("first", done, closed(gate)))
    background.put(Work("second", done))
    wait_for(lambda: done, what="the first")
    read, write = os.pipe()
    with background._changed:  # as another thread of the parent may have it at that moment
        pid = os.fork()
    if pid == 0:
        mine: list[str] = []
        background.put(Work("child", mine))
        wait_for(lambda: mine, what="the child's own job")
        time.sleep(0.05)
        os.write(write, " ".join(mine + done).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        assert stream.read() == "child first"
    os.waitpid(pid, 0)
