"""Watching from outside: what is stored for tasks, and how many copies of a message the broker has."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from typing import Any
from uuid import uuid4

import redis


class States:
    """Every result that is stored for a task id from now on, in order: Celery's Redis backend announces each one."""

    def __init__(self, client: redis.Redis, task_id: str) -> None:
        self._client = client
        self._results = f"celery-task-meta-{task_id}"
        self._mark = f"up-to-here-{uuid4()}"
        self._pubsub = client.pubsub()
        self._pubsub.subscribe(self._results, self._mark)
        self._stored: list[dict[str, Any]] = []
        self.stored()  # the subscriptions stand

    def stored(self) -> list[dict[str, Any]]:
        # A server hands out what is published in its order: whatever was stored before comes before the mark.
        while not self._client.publish(self._mark, ""):
            time.sleep(0.01)
        while (message := self._pubsub.get_message(timeout=5)) is not None:
            if message["type"] == "message":
                if message["channel"].decode() == self._mark:
                    return self._stored
                self._stored.append(json.loads(message["data"]))
        raise AssertionError(f"{self._mark} never came back")

    def close(self) -> None:
        self._pubsub.close()


def copies(client: redis.Redis, queue: str, task_id: str) -> int:
    """Return how many copies of a message a Redis broker has in this moment."""
    with client.pipeline(transaction=True) as pipe:
        pipe.lrange(queue, 0, -1)
        pipe.hvals("unacked")
        queued, unacked = pipe.execute()
    return sum(task_id.encode() in message for message in (*queued, *unacked))


class Results:
    """The states of all results that are stored from now on, in order."""

    def __init__(self, client: redis.Redis) -> None:
        self._pubsub = client.pubsub(ignore_subscribe_messages=True)
        self._pubsub.psubscribe("celery-task-meta-*")
        self._pubsub.get_message(timeout=5)  # the subscription stands
        self._states: dict[str, list[str]] = defaultdict(list)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self._pubsub.close()

    def of(self, task_id: str) -> list[str]:
        """Return the states that were stored for a task so far."""
        while (message := self._pubsub.get_message()) is not None:
            name = message["channel"].decode().removeprefix("celery-task-meta-")
            self._states[name].append(json.loads(message["data"])["status"])
        return list(self._states.get(task_id, ()))
