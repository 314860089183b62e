"""What the broker holds, read from Redis behind Celery's back."""

from __future__ import annotations

from typing import Any

from redis import Redis

__all__ = ["Broker"]

_QUEUE = "celery"
_UNACKED = "unacked"


class Broker:
    """The one queue of the demo, as kombu stores it."""

    def __init__(self, url: str) -> None:
        self._redis: Any = Redis.from_url(url, socket_timeout=5)

    def close(self) -> None:
        self._redis.close()

    def waiting(self) -> int:
        """Messages that no worker has fetched."""
        return int(self._redis.llen(_QUEUE))

    def unacked(self) -> int:
        """Messages that a worker has, or had when it was killed."""
        return int(self._redis.hlen(_UNACKED))

    def fetching(self) -> bool:
        """Is a worker waiting for a message right now?

        Kombu takes a message off the queue with BRPOP and notes it as unacked in a second step: a
        worker killed between the two takes the message with it, and no task class can bring it
        back. That is the transport's gap, not what is shown here, so no worker is killed in it.
        """
        clients = self._redis.client_list()
        return any(client["cmd"] == "brpop" and "b" in client["flags"] for client in clients)
