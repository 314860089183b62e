"""In no order of their steps does a fill of the cache undo a forget, whatever the cache loses or does late.

The calls run in threads of their own, each stopped before every question to the cache or to the store behind it. What
the cache says, at any moment, must be what that store says, until the forget has answered.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest
import redis

pytest.importorskip("django")

from celery_idempotent.django.hybrid import Cache
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.records import Identity
from celery_idempotent.stores.table import Snapshot
from celery_idempotent.testing import FakeClock
from tests.stores.hybrids import BadLink, MemoryHybrid
from tests.stores.verbs import KEY, claim, settle

pytestmark = pytest.mark.redis
T = TypeVar("T")


class Call:
    """A call in a thread of its own, which takes one step at a time."""

    current = threading.local()

    def __init__(self, do: Callable[[], Any]) -> None:
        self.done = False
        self.answer: Any = None
        self.error: BaseException | None = None
        self._do = do
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()
        self._stopped.acquire()

    @classmethod
    def stop(cls) -> None:
        """Let the call that this thread runs, if any, wait to be told to go on."""
        call = getattr(cls.current, "call", None)
        if call is not None:
            call._stopped.release()
            call._go.acquire()

    def step(self) -> None:
        if not self.done:
            self._go.release()
            assert self._stopped.acquire(timeout=30)

    def _run(self) -> None:
        Call.current.call = self
        try:
            self.stop()
            self.answer = self._do()
        except BaseException as error:  # noqa: BLE001  the test looks at it
            self.error = error
        self.done = True
        self._stopped.release()


class WatchedStore(MemoryHybrid):
    """Stops a call before it asks the memory, or the cache."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache, FakeClock())
        for verb in ("look", "ticket", "fill", "bury"):
            setattr(cache, verb, self._watched(getattr(cache, verb)))

    def _at(self, identity: Identity, verb: Callable[[Snapshot], T]) -> T:
        Call.stop()
        return super()._at(identity, verb)

    def _watched(self, method: Callable[..., T]) -> Callable[..., T]:
        def ask(*args: Any, **kwargs: Any) -> T:
            Call.stop()
            return method(*args, **kwargs)

        return ask


def overlaps(first: int, second: int) -> list[tuple[int, ...]]:
    """Return every order of so many steps of one call and so many of another: 0 or 1 for each step."""
    both = range(first + second)
    return [
        tuple(int(n not in of_first) for n in both)
        for of_first in itertools.combinations(both, first)
    ]


@pytest.mark.parametrize("event", ["nothing", "flush", "late answers"])
def test_in_no_order_of_their_steps_does_a_fill_undo_a_forget(
    redis_url: str, redis_client: redis.Redis, prefix: str, event: str
) -> None:
    url = f"{redis_url}?prefix={prefix}&socket_timeout=5"
    ended = {"forgotten": 0, "refused": 0, "cached": 0}
    spy = Cache(url)
    for number, order in enumerate(overlaps(5, 4)):
        cache: Any = Cache(url)
        cache._link = bad = BadLink(cache._link)
        store = WatchedStore(cache)
        record = claim(store)
        calls = settling, forgetting = (
            Call(partial(settle, store, record)),
            Call(partial(store.forget, KEY)),
        )

        def flush() -> None:
            for name in redis_client.scan_iter(match=f"{prefix}*"):
                redis_client.delete(name)

        def agree(store: Any = store, forgetting: Call = forgetting) -> None:
            found = spy.look(KEY)
            ended["cached"] += found is not None
            assert found is None or found.record == store.get(KEY) or not forgetting.done

        # It comes at another moment every time, and so at every step of each call.
        for n, which in enumerate(order):
            if n == number % len(order) and event == "flush":
                flush()
            elif n == number % len(order) and event == "late answers":
                bad.mode = "frozen"
            calls[which].step()
            agree()
        bad.thaw()
        cache.away_until = 0.0
        while not (settling.done and forgetting.done):
            settling.step()
            forgetting.step()
            agree()
        assert settling.answer is True
        assert forgetting.error is None or isinstance(forgetting.error, StoreUnavailable)
        ended["refused" if forgetting.error else "forgotten"] += 1
        agree()
        # Forgotten once more, it is gone everywhere.
        store.forget(KEY)
        assert store.get(KEY) is None
        agree()
        flush()
        cache.close()
    spy.close()
    assert ended["forgotten"] >= 60
    assert ended["cached"] >= 5
