"""Settled records in Redis before a store that is the truth: one look answers, and nothing else is believed.

An entry is one of::

    'S' · 16 bytes history · 6 bytes settled at, ms of Redis' clock · the record as format.py says
    'T' · 8 bytes name                                                a tombstone: being forgotten

Only a *fill* writes a record, and only with a *ticket* that a look gave **before** the record was read from the
truth. A forget leaves a tombstone before it deletes from the truth, and lifts it afterwards; both give the bucket
a new generation, and a ticket of an older one is worth nothing. So a fill cannot undo a forget, however late it
arrives::

    reader      look: ticket of generation 1 ── reads the record ─────────── (frozen) ─────────── fill: refused
    forget                                      tombstone, generation 2 ── deletes ── lifts, generation 3
    reader 2                                              look: buried, no ticket               look: a new ticket

Nor can what Redis itself undoes. A ticket and an entry belong to one *history*, Redis' replication id: it
changes when a server is restarted or a replica promoted. What an older snapshot or a lagging replica brings back is
of another history and counts as absent. After a flush the bucket has no generation, which fits no ticket either.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import Identity, Record, Retained
from celery_idempotent.stores.deciding import StoredRecord
from celery_idempotent.stores.hybrid.breaker import Breaker
from celery_idempotent.stores.redis.format import pack, unpack
from celery_idempotent.stores.redis.keyspace import Keyspace
from celery_idempotent.stores.redis.servers import SCRIPTS, Reply, exchange, passing
from celery_idempotent.stores.redis.urls import link_and_prefix

logger = logging.getLogger(__name__)

#: A cache that takes longer than that, in seconds, is not worth waiting for. A URL's query may say otherwise.
DEFAULT_TIMEOUT = 0.25
#: How long a tombstone stays whose forgetter died before it could lift it. Must outlast any delete in the truth.
TOMBSTONE_MS = 3_600_000
_NAME_BYTES = 8
#: A server that refuses writes for now still answers, and at once.
_NO_WRITES = {"OOM", "MISCONF", "NOREPLICAS"}


@dataclass(frozen=True, slots=True)
class Cached:
    """A settled record, ``age_ms`` after it was settled."""

    record: Record
    age_ms: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to fill in what is read from the truth from now on, unless anything in the bucket is forgotten."""

    generation: bytes
    now_ms: int
    history: bytes


class RedisCache:
    """Settled records of another store, in Redis (6.2 or later) or Valkey.

    ``url``, ``prefix`` and ``options`` as for :class:`~celery_idempotent.stores.redis.store.RedisStore`, whose
    keys it never touches. Does without a server that does not answer within ``socket_timeout`` (0.25 s): after a
    failure it asks again a second later, then after two, and so on up to ten.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        prefix: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        timeouts = {"socket_timeout": DEFAULT_TIMEOUT, "socket_connect_timeout": DEFAULT_TIMEOUT}
        self._link, named = link_and_prefix(url, {**timeouts, **(options or {})})
        shared = Keyspace(named if prefix is None else prefix)
        self._keys = Keyspace(f"{shared.prefix}.cache")
        self.breaker = Breaker()

    def __repr__(self) -> str:
        return f"<RedisCache: {self._link.where}, prefix {self._keys.prefix}>"

    @property
    def prefix(self) -> str:
        """What all our keys in Redis start with."""
        return self._keys.prefix

    def look(self, identity: Identity) -> Cached | Ticket | None:
        """Return the record or, on a miss, a ticket; ``None`` if there is no answer, or the key is being forgotten."""
        return self._look(identity, always=b"")

    def ticket(self, identity: Identity) -> Ticket | None:
        """Return a ticket, also where there is an entry; ``None`` if there is no answer, or it is being forgotten."""
        found = self._look(identity, always=b"1")
        return found if isinstance(found, Ticket) else None

    def fill(self, identity: Identity, ticket: Ticket, retained: Retained) -> bool:
        """Cache what was read from the truth after the ticket was given; ``False`` if the ticket is no longer valid."""
        packed = pack(StoredRecord(retained.record, 0), bytes(4))
        word = self._try(
            "cache_fill",
            identity,
            ticket.generation,
            b"%d" % ticket.now_ms,
            ticket.history,
            b"%d" % retained.left_ms,
            b"%d" % retained.age_ms,
            packed,
        )
        return bool(word == b"filled")

    def drop(self, identity: Identity) -> None:
        """Take away an entry that is of no use, if the server answers."""
        self._try("cache_lift", identity, b"", _random())

    def bury(self, identity: Identity) -> bytes:
        """Leave a tombstone, and return its name; raise if the server did not take it."""
        name = _random()
        self._ask("cache_bury", identity, name, _random(), b"%d" % TOMBSTONE_MS)
        return name

    def lift(self, identity: Identity, name: bytes) -> None:
        """Take the tombstone away, with all tickets that were given in its place; raise if that failed."""
        self._ask("cache_lift", identity, name, _random())

    def close(self) -> None:
        """Close the idle connections."""
        self._link.close()

    def _look(self, identity: Identity, *, always: bytes) -> Cached | Ticket | None:
        answer = self._try("cache_look", identity, _random(), always)
        if answer is None:
            return None
        word, *rest = answer
        if word == b"miss":
            return Ticket(generation=rest[0], now_ms=rest[1], history=rest[2])
        if word != b"hit":
            return None
        try:
            record = unpack(identity, rest[0]).record
            if not record.state.settled:
                raise ValueError(record.state)
        except (StoreMisconfigured, ValueError):
            # Written by a newer version, or not by this library: ask the truth.
            logger.warning("idempotency: the cached record of %s cannot be read: dropped", identity)
            self.drop(identity)
            return None
        return Cached(record, age_ms=rest[1])

    def _try(self, verb: str, identity: Identity, *arguments: bytes) -> Reply:
        """Return the script's answer, ``None`` if there is none: then it goes without for a while."""
        if not self.breaker.allows():
            return None
        try:
            return self._ask(verb, identity, *arguments)
        except (StoreUnavailable, StoreMisconfigured):
            return None

    def _ask(self, verb: str, identity: Identity, *arguments: bytes) -> Reply:
        bucket, name = self._keys.locate(identity)
        keys = (name, self._keys.generation(bucket))
        try:
            (answer,) = exchange(self._link, (SCRIPTS[verb].call(keys, *arguments),))
        except (StoreUnavailable, StoreMisconfigured) as error:
            if passing(error.__cause__) not in _NO_WRITES:
                self._failed(error)
            raise
        if self.breaker.open:
            self.breaker.succeeded()
            logger.info("idempotency: the cache answers again: %s", self._link.where)
        return answer

    def _failed(self, error: Exception) -> None:
        if not self.breaker.open:
            logger.warning("idempotency: going without the cache for now: %s", error)
        self.breaker.failed()


def _random() -> bytes:
    return os.urandom(_NAME_BYTES)
