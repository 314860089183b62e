"""Watching from outside: what is stored for tasks, their events, and how many copies of a message the broker has."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import redis
from celery.events import EventReceiver
from celery.events.state import State

if TYPE_CHECKING:
    from celery import Celery


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

    def names(self) -> list[str]:
        return [each["status"] for each in self.stored()]

    def close(self) -> None:
        self._pubsub.close()


class Copies:
    """How many copies of one message the Redis broker has, in its queue and unacknowledged, sampled all the time."""

    def __init__(self, broker_url: str, queue: str, task_id: str) -> None:
        self._client = redis.Redis.from_url(broker_url)
        self._queue = queue
        self._id = task_id
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.most = 0

    def __enter__(self) -> Copies:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def now(self) -> int:
        return copies(self._client, self._queue, self._id)

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.most = max(self.most, self.now())


def copies(client: redis.Redis, queue: str, task_id: str) -> int:
    """Return how many copies of a message a Redis broker has in this moment."""
    with client.pipeline(transaction=True) as pipe:
        pipe.lrange(queue, 0, -1)
        pipe.hvals("unacked")
        queued, unacked = pipe.execute()
    return sum(task_id.encode() in message for message in (*queued, *unacked))


class Onlooker:
    """Everything that is stored for tasks and every event of workers, from now on: what callers and Flower see."""

    def __init__(self, app: Celery, client: redis.Redis) -> None:
        self.state: Any = State()
        self._stored: dict[str, list[str]] = defaultdict(list)
        self._events: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._client = client
        self._pubsub = client.pubsub(ignore_subscribe_messages=True)
        self._pubsub.psubscribe("celery-task-meta-*")
        self._pubsub.get_message(timeout=5)  # the subscription stands
        self._connection = app.connection_for_read()
        self._receiver = _Receiver(self._connection, handlers={"*": self._on_event}, app=app)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch_results, daemon=True),
            threading.Thread(target=self._receiver.capture, daemon=True),
        ]

    def __enter__(self) -> Onlooker:
        for thread in self._threads:
            thread.start()
        assert self._receiver.ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._receiver.should_stop = True
        for thread in self._threads:
            thread.join(10)
        self._pubsub.close()
        self._connection.release()

    def stored(self, task_id: str) -> list[str]:
        """Return the states that were stored for a task, in order."""
        return list(self._stored.get(task_id, ()))

    def events(self, task_id: str) -> list[str]:
        """Return the events of a task, without ``task-``, in order."""
        return [each["type"].partition("-")[2] for each in self._events.get(task_id, ())]

    def all(self, kind: str) -> list[dict[str, Any]]:
        """Return all events of one type."""
        return [each for some in self._events.values() for each in some if each["type"] == kind]

    def shown(self, task_id: str) -> Any:
        """Return a task as Flower shows it."""
        return self.state.tasks.get(task_id)

    def _watch_results(self) -> None:
        while not self._stop.is_set():
            message = self._pubsub.get_message(timeout=0.2)
            if message is not None:
                task_id = message["channel"].decode().removeprefix("celery-task-meta-")
                self._stored[task_id].append(json.loads(message["data"])["status"])

    def _on_event(self, event: dict[str, Any]) -> None:
        self.state.event(event)
        if "uuid" in event:
            self._events[event["uuid"]].append(event)


class _Receiver(EventReceiver):
    """A receiver that says when it listens."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ready = threading.Event()

    def on_consume_ready(self, *args: Any, **options: Any) -> None:
        super().on_consume_ready(*args, **options)
        self.ready.set()
