"""The workers' app, whose process kills itself before or after the store's n-th ``forget``: ``DIE="before 2"``."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

from celery_idempotent.stores.redis.store import RedisStore
from tests.worker.app import app

__all__ = ["app"]


def _lay(when: str, which: int) -> None:
    forget, calls = RedisStore.forget, itertools.count(1)

    def struck(self: RedisStore, *args: Any, **kwargs: Any) -> bool:
        call = next(calls)
        if (when, call) == ("before", which):
            os.kill(os.getpid(), signal.SIGKILL)
        done = forget(self, *args, **kwargs)
        if (when, call) == ("after", which):
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    RedisStore.forget = struck  # type: ignore[method-assign]


if "DIE" in os.environ:
    _when, _which = os.environ["DIE"].split()
    _lay(_when, int(_which))
