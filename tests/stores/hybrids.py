"""Hybrid stores for tests: over a memory that counts its looks, with links that count, fail and lag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from redis import exceptions

pytest.importorskip("django")

from celery_idempotent.django.hybrid import Cache, CachingStore
from celery_idempotent.records import Identity
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis.servers import Command, Link
from celery_idempotent.stores.table import Snapshot
from tests.stores.shifted import CountingLink

T = TypeVar("T")


class CountedMemory(MemoryStore):
    """A memory whose looks are counted."""

    asked = 0

    def _at(self, identity: Identity, verb: Callable[[Snapshot], T]) -> T:
        self.asked += 1
        return super()._at(identity, verb)


class MemoryHybrid(CachingStore, CountedMemory):
    """A memory behind a cache."""

    def __init__(self, cache: Cache, clock: Callable[[], int] | None = None) -> None:
        super().__init__(clock)
        self.cache = cache


class BadLink(CountingLink):
    """A server that can be away, lose answers, or execute what it was sent only much later."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.mode = "well"
        self.late: list[Sequence[Command]] = []

    def exchange(self, commands: Sequence[Command], node: Any = None) -> list[Any]:
        if self.mode == "away":
            self.trips += 1
            raise exceptions.ConnectionError("Connection refused.")
        if self.mode == "frozen":
            self.late.append(commands)
            raise exceptions.TimeoutError("Timeout reading from socket")
        answers = super().exchange(commands, node)
        if self.mode == "deaf":
            raise exceptions.TimeoutError("Timeout reading from socket")
        return answers

    def thaw(self) -> None:
        self.mode = "well"
        late, self.late = self.late, []
        for commands in late:
            self._link.exchange(commands)
