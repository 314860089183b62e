"""Redis Cluster: which node serves which bucket, and what to do when that changes.

::

    store    settle ─▶ node A: MOVED (its slot is node B's now) ─ ask for the slots ─ settle ─▶ node B
    store    settle ─▶ node A: ASK B (this key is there already) ─ ASKING, settle ─▶ node B
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

from redis import exceptions
from redis.crc import key_slot

from celery_idempotent import backoff
from celery_idempotent.stores.redis.channel import Address, Channel, Connection, passing
from celery_idempotent.stores.redis.keyspace import BUCKETS
from celery_idempotent.stores.redis.scripts import Command, Reply, plain

#: How often an exchange follows the cluster's changes, at once at first, and in 0.35 s altogether. A failover takes
#: seconds: then the caller's backoff has to do.
_ROUNDS = 5
_TRY_AGAIN = {"MOVED", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "READONLY"}
_SLOTS = plain(0, b"CLUSTER", b"SLOTS")
_ASKING = plain(0, b"ASKING")


class Cluster:
    """All nodes of a cluster, each with its own connections."""

    def __init__(
        self, connect: Callable[[Address], Connection], seeds: Sequence[Address], *, where: str
    ) -> None:
        self.where = where
        self.spans = False
        self._connect = connect
        self._seeds = tuple(seeds)
        self._channels: dict[Address, Channel] = {}
        #: The node that serves each slot. Replaced as a whole, so that threads never see half of a change.
        self._masters: dict[int, Address] = {}

    def exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """Return the answer to each command, from whichever node serves it by now."""
        answers: list[Reply] = [None] * len(commands)
        waiting = list(range(len(commands)))
        for attempt in range(_ROUNDS):
            if attempt > 1:
                backoff.pause(attempt - 1)
            if attempt or not self._masters:
                self._refresh()
            waiting = self._round(commands, waiting, answers)
            if not waiting:
                break
        for n in waiting:
            if isinstance(answers[n], (exceptions.ConnectionError, exceptions.TimeoutError)):
                raise answers[n]
        return answers

    def nodes(self) -> list[int]:
        """Return one bucket of each node, in an order that stays while the cluster does."""
        if not self._masters:
            self._refresh()
        first: dict[Address | None, int] = {}
        for bucket in range(BUCKETS):
            first.setdefault(self._masters.get(slot_of(bucket)), bucket)
        return [bucket for _, bucket in sorted(first.items(), key=lambda item: str(item[0]))]

    def close(self) -> None:
        """Close the idle connections to every node."""
        for channel in list(self._channels.values()):
            channel.close()

    def _round(
        self, commands: Sequence[Command], waiting: Sequence[int], answers: list[Reply]
    ) -> list[int]:
        """Send each waiting command to its node; return those that must be sent again."""
        by_node: dict[Address | None, list[int]] = {}
        for n in waiting:
            by_node.setdefault(self._masters.get(slot_of(commands[n].bucket)), []).append(n)
        again: list[int] = []
        for address, numbers in by_node.items():
            if address is None:
                down = exceptions.ClusterDownError("CLUSTERDOWN no node serves the slot")
                got: list[Reply] = [down] * len(numbers)
            else:
                got = self._ask(address, [commands[n] for n in numbers])
            for n, answer in zip(numbers, got, strict=True):
                if passing(answer) == "ASK":
                    answer = self._redirected(answer, commands[n])
                answers[n] = answer
                if passing(answer) in _TRY_AGAIN or _gone(answer):
                    again.append(n)
        return again

    def _ask(self, address: Address, commands: Sequence[Command]) -> list[Reply]:
        channel = self._channel(address)
        try:
            return channel.exchange(commands)
        except exceptions.ConnectionError as error:
            if not _gone(error):
                raise
            channel.close()
            return [error] * len(commands)

    def _redirected(self, ask: Reply, command: Command) -> Reply:
        """Follow ASK: the slot is being moved, and the other node has this key already."""
        host, _, port = str(ask).rpartition(" ")[2].rpartition(":")
        channel = self._channel((host, int(port)))
        return channel.exchange([_ASKING, command])[1]

    def _refresh(self) -> None:
        """Ask any node which node serves which slots."""
        known = list(self._channels)
        random.shuffle(known)
        error: Exception | None = None
        for address in dict.fromkeys([*known, *self._seeds]):
            try:
                (ranges,) = self._channel(address).exchange([_SLOTS], fresh=True)
                if isinstance(ranges, Exception):
                    raise ranges
            except (exceptions.ConnectionError, exceptions.TimeoutError) as caught:
                error = caught
                continue
            self._masters = _masters(ranges, asked=address)
            return
        assert error is not None
        raise error

    def _channel(self, address: Address) -> Channel:
        try:
            return self._channels[address]
        except KeyError:
            channel = Channel(functools.partial(self._connect, address))
            return self._channels.setdefault(address, channel)


@functools.cache
def slot_of(bucket: int) -> int:
    """Return the slot of a bucket, whose number is the hash tag in the names of all its keys."""
    return int(key_slot(b"%d" % bucket))


def _masters(ranges: Sequence[Reply], *, asked: Address) -> dict[int, Address]:
    masters = {}
    for first, last, master, *_ in ranges:
        # A node that does not know its own address leaves it empty: it is the one that was asked.
        host = master[0].decode() if master[0] else asked[0]
        for slot in range(first, last + 1):
            masters[slot] = (host, int(master[1]))
    return masters


def _gone(answer: object) -> bool:
    return isinstance(answer, exceptions.ConnectionError) and not isinstance(
        answer, (exceptions.AuthenticationError, exceptions.AuthorizationError)
    )
