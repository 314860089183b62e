"""The servers of a store, asked about themselves: version, settings, rights and time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError

from celery_idempotent.stores.redis.channel import Link, exchange
from celery_idempotent.stores.redis.keyspace import Keyspace
from celery_idempotent.stores.redis.scripts import Command, Reply, pairs, plain, script


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """One server, and how it is set up.

    ``persistent`` is ``None`` where the server does not say whether it saves snapshots.
    """

    kind: str
    version: str
    eviction: str
    persistent: bool | None

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers, for comparing."""
        return tuple(int(number) for number in re.findall(r"\d+", self.version)[:2])


class Servers:
    """What every part of a Redis store works with: the way to its servers, and the names of its keys there."""

    def __init__(self, link: Link, keys: Keyspace) -> None:
        self._link = link
        self._keys = keys

    def facts(self) -> Sequence[ServerFacts]:
        """Ask each server what concerns its records: version, eviction, persistence."""
        nodes = self._link.nodes()
        return [_facts_of(self._link, node) for node in nodes]

    def missing_rights(self) -> Sequence[str]:
        """Return the commands that a worker needs and this user may not run; Redis 6 cannot be asked."""
        nodes = self._link.nodes()
        asked = [script("rights").call(node, (self._keys.leases(node),)) for node in nodes]
        return sorted({each.decode() for answer in self._ask_all(asked) for each in answer})

    def now_ms(self) -> int:
        """Return the time by the clock of one server."""
        return now_ms(self._link)

    def close(self) -> None:
        """Close the idle connections."""
        self._link.close()

    def _ask(self, command: Command) -> Reply:
        return exchange(self._link, (command,))[0]

    def _ask_all(self, commands: Sequence[Command]) -> list[Reply]:
        return exchange(self._link, commands) if commands else []


def now_ms(link: Link, bucket: int = 0) -> int:
    """Return the time by the clock of the server that has this bucket."""
    ((seconds, micros),) = exchange(link, (plain(bucket, b"TIME"),))
    return int(seconds) * 1000 + int(micros) // 1000


def _facts_of(link: Link, node: int) -> ServerFacts:
    """Read what a server says of itself in INFO.

    Valkey says ``redis_version:7.2.4`` as well, for clients that know no Valkey: its own version is in another line.
    """
    (answer,) = exchange(link, (plain(node, b"INFO"),))
    said: dict[str, str] = {}
    for line in answer.decode(errors="replace").splitlines():
        word, colon, what = line.partition(":")
        if colon:
            said[word] = what.strip()
    valkey = said.get("valkey_version") or said.get("server_version")
    if said.get("server_name") == "valkey" and valkey:
        kind, version = "Valkey", valkey
    else:
        kind, version = "Redis", said.get("redis_version", "0")
    persistent: bool | None = True
    if said.get("aof_enabled") != "1":
        persistent = _saves(link, node)
    return ServerFacts(
        kind=kind,
        version=version,
        eviction=said.get("maxmemory_policy", "unknown"),
        persistent=persistent,
    )


def _saves(link: Link, node: int) -> bool | None:
    """Does the server save snapshots? ``None``: it does not say (hosted servers often refuse ``CONFIG``)."""
    try:
        (answer,) = link.exchange((plain(node, b"CONFIG", b"GET", b"save"),))
    except (RedisError, OSError):
        return None
    if isinstance(answer, RedisError) or not answer:
        return None
    return any(value for _, value in pairs(answer))
