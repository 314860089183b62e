"""A site of the matrix: one worker, and everything that callers and Flower see of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import redis

from tests.delivery import app as app_module
from tests.support import sites
from tests.support.watch import Copies, Onlooker, copies
from tests.support.workers import Worker


@dataclass
class Site(sites.Site):
    """A site with one worker, which is watched, and may be killed once."""

    module: ClassVar[Any] = app_module

    onlooker: Onlooker = field(init=False)
    lead: Worker = field(init=False)
    #: The cells that wait for the worker to be killed, and what must be true in that moment.
    prepared: set[str] = field(default_factory=set)
    vulnerable: Callable[[], bool] = lambda: True
    #: The messages that the broker has then.
    kept: set[str] = field(default_factory=set)
    killed: bool = False

    def open(self, *, concurrency: int) -> Onlooker:
        """Start the worker, and watch it."""
        self.onlooker = Onlooker(self.app, self.redis)
        self.lead = self.worker(concurrency=concurrency, arguments=["-E"])
        return self.onlooker

    def kill(self) -> None:
        """Kill the worker with all its children, and start it again; or try again later.

        kombu takes a message from Redis and notes that it did in two steps: what a worker has just taken when it is
        killed between the two is lost, whatever the class of its task. Not here.
        """
        self.lead.freeze()
        if self.broker == "redis" and not self._has_all():
            self.lead.thaw()
            return
        self.lead.kill()
        self.lead.start(timeout=90)
        self.killed = True

    def _has_all(self) -> bool:
        with redis.Redis.from_url(self.settings["broker_url"]) as client:
            return all(copies(client, self.queue, each) for each in self.kept)

    def logged(self, task_id: str, phrase: str) -> bool:
        return any(task_id in line and phrase in line for line in self.lead.log.splitlines())

    def copies(self, task_id: str) -> Copies:
        return Copies(self.settings["broker_url"], self.queue, task_id)

    def left_over(self) -> int:
        """Stop the worker, and return how many messages the broker has then."""
        self.lead.stop(timeout=60)
        return self.length(taken=True)
