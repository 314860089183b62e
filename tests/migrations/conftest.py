"""One worker with the tasks of every page, its broker and its store, for all tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.migrations import app
from tests.support import sites
from tests.support.sites import Site
from tests.support.waiting import wait_for

#: A result, or whatever a test waits for, is there after so many seconds, or never.
PATIENCE = 30

#: Of all tasks that do not say otherwise, so that a frozen worker loses its key soon.
LEASE = 2


@dataclass
class Shop(Site):
    """The publisher's side, and what happened on the worker's."""

    module: ClassVar[Any] = app

    def order(self, word: str, key: str) -> Path:
        """Tell the work on ``key`` to wait (``closed1`` in its first run, …), to ``kill`` its process, to ``fail``."""
        path = app.order(self.ledger.path.parent, word, key)
        path.touch()
        return path

    def starts(self, key: str) -> int:
        return self.ledger.count("start", key)

    def ends(self, key: str) -> int:
        return self.ledger.count("end", key)

    def started(self, key: str, times: int = 1) -> None:
        """Wait until the work on ``key`` started so many times."""
        wait_for(
            lambda: self.starts(key) >= times,
            PATIENCE,
            lambda: f"start {times} of {key}: {self.ledger.entries(key=key)}",
        )

    def passed(self) -> None:
        """Wait until everything that was sent before this has reached a process: the queue is in order."""
        self.publish("fence").get(timeout=PATIENCE)


@pytest.fixture(scope="session")
def shop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    with sites.share(Shop, request, tmp_path_factory, "redis", idempotency_lease=LEASE) as shop:
        shop.worker(concurrency=6)
        yield shop


@pytest.fixture
def key(shop: Shop) -> Iterator[str]:
    """A key that nobody else uses; whatever waits for it goes on after the test."""
    name = f"key.{uuid.uuid4().hex}"
    yield name
    for path in shop.ledger.path.parent.glob(f"closed* {name}"):
        path.unlink(missing_ok=True)
