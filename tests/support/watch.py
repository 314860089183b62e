"""Watching from outside: what is stored for tasks, and how many copies of a message the broker has."""

from __future__ import annotations

import json
from collections import defaultdict

import redis


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
