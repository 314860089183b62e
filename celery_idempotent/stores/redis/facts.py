"""What a Redis says about itself, as far as it concerns records."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from redis.exceptions import RedisError

from celery_idempotent.stores.base import skew_ms
from celery_idempotent.stores.redis.channel import Link, exchange
from celery_idempotent.stores.redis.scripts import plain

__all__ = ["ServerFacts", "facts", "now_ms", "skews_ms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """One server. ``persistent`` is ``None`` where the server does not say whether it saves snapshots."""

    kind: str
    version: str
    eviction: str
    persistent: bool | None
    replicas: int

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers, for comparing."""
        return tuple(int(number) for number in re.findall(r"\d+", self.version)[:2])


def facts(link: Link) -> list[ServerFacts]:
    """Ask each server that keeps records."""
    return [_of_node(link, node) for node in link.nodes()]


def skews_ms(link: Link) -> list[int]:
    """Ask each server that keeps records for the time; return how far it is ahead of this machine's."""
    return [skew_ms(partial(now_ms, link, node)) for node in link.nodes()]


def now_ms(link: Link, node: int) -> int:
    """Ask a server for the time."""
    ((seconds, micros),) = exchange(link, (plain(node, b"TIME"),))
    return int(seconds) * 1000 + int(micros) // 1000


def _of_node(link: Link, node: int) -> ServerFacts:
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
        replicas=int(said.get("connected_slaves", "0")),
    )


def _saves(link: Link, node: int) -> bool | None:
    """Does the server save snapshots? Many do not let everybody ask."""
    try:
        (answer,) = link.exchange((plain(node, b"CONFIG", b"GET", b"save"),))
    except (RedisError, OSError):
        return None
    if isinstance(answer, (list, tuple)) and len(answer) == 2:
        return bool(answer[1])
    if isinstance(answer, dict):  # RESP3
        return any(bool(each) for each in answer.values())
    return None
