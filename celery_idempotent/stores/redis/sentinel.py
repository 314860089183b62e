"""Redis Sentinel: asks which server is the master now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from redis import exceptions

from celery_idempotent.stores.redis.channel import Address, Connection
from celery_idempotent.stores.redis.scripts import Reply, plain


class Sentinels:
    """Some servers that watch a master by name.

    They are asked for every new connection to the master, over a connection that is closed afterwards. redis-py's own
    client waits seconds for each Sentinel that is down, and reuses its connections: after an interrupted question, its
    answer would be read as that to the next question.
    """

    def __init__(
        self, connect: Callable[[Address], Connection], addresses: Sequence[Address], name: str
    ) -> None:
        self._connect = connect
        self._addresses = tuple(addresses)
        self._name = name

    def master(self) -> Address:
        """Return the address of the master, from the first Sentinel that knows it."""
        reason: Exception = exceptions.ConnectionError(f"none knows a master named {self._name}")
        for address in self._addresses:
            try:
                found = self._ask(address)
            except (exceptions.RedisError, OSError) as error:
                reason = error
                continue
            if found is not None:
                # The next question goes to the one that answered.
                self._addresses = (address, *(each for each in self._addresses if each != address))
                return found[0].decode(), int(found[1])
        raise reason

    def _ask(self, address: Address) -> Reply:
        question = plain(0, b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._name.encode())
        connection = self._connect(address)
        try:
            connection.send_packed_command([question.packed()])
            return connection.read_response()
        finally:
            connection.disconnect()
