"""A cache in Redis before a Django database: it answers for settled keys, and the database for everything else.

An entry is a settled record, or for an hour the tombstone of one that was changed or forgotten. Only the settle of a
record fills its entry, after the COMMIT, with what the database has by then. A fill needs a ticket, which lives for ten
seconds, and never replaces an entry::

    settle   UPDATE, COMMIT ─ ticket ─ reads the record ───────────────────── fill: refused
    forget                                               tombstone ─ DELETE ─ tombstone

A fill after a forget finds the tombstone, which outlives every ticket; after a flush it finds no ticket. A process that
dies in between leaves a tombstone (the database answers until it ends) or no entry.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlencode

from celery_idempotent.django.sql.atomic import ClaimTransaction
from celery_idempotent.django.store import DjangoStore, named
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import Identity, Record, Settled, SettleRequest
from celery_idempotent.stores.base import Store
from celery_idempotent.stores.redis.format import Keyspace, pack, unpack
from celery_idempotent.stores.redis.servers import Command, Reply, exchange, link_and_prefix
from celery_idempotent.stores.table import Snapshot, Verb

logger = logging.getLogger(__name__)

#: A cache that takes longer than that, in seconds, is not worth waiting for. A URL's query may say otherwise.
_TIMEOUT = 0.25
#: For how many seconds a cache that did not answer is left alone.
_PAUSE = 5.0
_TICKET_MS = 10_000
#: Must outlast every ticket, and the change of the database that it was written for.
_TOMBSTONE_MS = 3_600_000
#: A larger record is not cached.
_MAX_BYTES = 1024 * 1024
#: An entry begins with how old its record is when the entry ends, in ms.
_AGE_BYTES = 8


class Cache:
    """Settled records of a database, in Redis; ``url`` and ``options`` are as for a RedisStore."""

    def __init__(self, url: str, options: Mapping[str, object] | None = None) -> None:
        timeouts = {"socket_timeout": _TIMEOUT, "socket_connect_timeout": _TIMEOUT}
        self._link, prefix = link_and_prefix(url, {**timeouts, **(options or {})})
        self.prefix = f"{prefix}.cache"
        self._keys = Keyspace(self.prefix)
        self.away_until = 0.0

    def look(self, identity: Identity) -> Settled | None:
        """Return what is cached; ``None`` also without an answer, and for what this version cannot read."""
        name = self._name(identity)
        entry, left_ms = self._ask((b"GET", name), (b"PTTL", name)) or (None, 0)
        if not entry or entry == b"T" or left_ms < 0:
            return None
        try:
            record = unpack(self._keys, identity, entry[_AGE_BYTES:]).record
        except StoreMisconfigured:
            return None
        age_ms = int.from_bytes(entry[:_AGE_BYTES], "big") - left_ms
        return Settled(record, max(age_ms, 0)) if record.state.is_final else None

    def ticket(self, identity: Identity) -> bytes | None:
        """Return the right to fill in what is read from now on, ``None`` without an answer."""
        bucket, brace, _ = self._name(identity).partition(b"}")
        ticket = bucket + brace + b"!" + os.urandom(8)
        made = self._ask((b"SET", ticket, b"", b"PX", b"%d" % _TICKET_MS))
        return ticket if made else None

    def fill(self, identity: Identity, ticket: bytes, snapshot: Snapshot) -> None:
        """Cache the end state of a look that came after the ticket; the entry ends before the record does."""
        stored, now_ms = snapshot.stored, snapshot.now_us // 1000
        if stored is None or not stored.record.state.is_final:
            return
        record, left_ms = stored.record, stored.expires_ms - now_ms - _TICKET_MS
        age_ms = max(now_ms - record.updated_ms + left_ms, 0)
        # The message that a FAILED record keeps is for an operator, and has arguments.
        copy = stored._replace(record=replace(record, message=None))
        entry = age_ms.to_bytes(_AGE_BYTES, "big") + pack(copy)
        # What a sweep failed its owner may still settle; what an operator settled is reported with who and why.
        final = not (record.swept or record.settled_by_operator)
        if final and left_ms > 0 and len(entry) <= _MAX_BYTES:
            self._ask(
                (b"SET", ticket, entry, b"XX", b"PX", b"%d" % left_ms),
                (b"COPY", ticket, self._name(identity)),
                (b"DEL", ticket),
            )

    def bury(self, identity: Identity, *, must: bool) -> None:
        """Leave a tombstone; if it ``must`` be there, raise where the server did not take it."""
        self._ask((b"SET", self._name(identity), b"T", b"PX", b"%d" % _TOMBSTONE_MS), must=must)

    def close(self) -> None:
        """Close the idle connections."""
        self._link.close()

    def _name(self, identity: Identity) -> bytes:
        return self._keys.of_record(identity)[0]

    def _ask(self, *commands: Command, must: bool = False) -> list[Reply] | None:
        """Return the answers; without one raise if they ``must`` be, and leave the cache alone for a while."""
        if not must and time.monotonic() < self.away_until:
            return None
        try:
            answers = exchange(self._link, commands)
        except (StoreUnavailable, StoreMisconfigured) as error:
            if not self.away_until:
                logger.warning("idempotency: the cache is not used for now: %s", error)
            self.away_until = time.monotonic() + _PAUSE
            if must:
                raise
            return None
        self.away_until = 0.0
        return answers


class CachingStore(Store):
    """The verbs of a store with a ``cache``, a mixin before the store itself.

    The cache only says that a key *is* settled. The store answers everything else: another fingerprint too, and the
    task that settled the key, whose callbacks may have to be sent again.
    """

    cache: Cache

    def fast(self, verb: Verb, request: Any) -> Any:
        """Answer a claim or a reservation of a settled key by the cache."""
        found = None if verb == "settle" else self.cache.look(request.identity)
        if found is not None and request.each_runs:
            # It answers nobody but its own task, which the store answers.
            self.cache.bury(request.identity, must=False)
        elif (
            found is not None
            and (request.task_id or None) != found.record.task_id
            and len({found.record.fingerprint, request.fingerprint, None}) < 3
        ):
            return found
        return super().fast(verb, request)

    def settle(self, request: SettleRequest) -> bool:
        # A FAILED record ends anew: needs the cache.
        anew = request.record.state.is_final and not request.restore
        with self._buried(request.record.identity) if anew else nullcontext():
            settled = super().settle(request)
        if settled and not anew:
            self.fill(request.record.identity)
        return settled

    def forget(self, identity: Identity, **how: Any) -> bool:
        with self._buried(identity):
            return super().forget(identity, **how)

    def requeue(self, identity: Identity, **how: Any) -> Record | None:
        with self._buried(identity):  # it may be FAILED
            return super().requeue(identity, **how)

    def discard(self, identity: Identity) -> bool:
        with self._buried(identity):
            return super().discard(identity)

    def fill(self, identity: Identity) -> None:
        """Cache what is committed, if that is an end state. Never raises for cache or store."""
        ticket = None if self.joined() else self.cache.ticket(identity)
        if ticket is not None:
            with suppress(StoreUnavailable, StoreMisconfigured):
                self.cache.fill(identity, ticket, self._at(identity, lambda snapshot: snapshot))

    def close(self) -> None:
        self.cache.close()
        super().close()

    @contextmanager
    def _buried(self, identity: Identity) -> Iterator[None]:
        """Change a settled record while no copy of it is answered or made."""
        try:
            self.cache.bury(identity, must=True)
        except (StoreUnavailable, StoreMisconfigured) as error:
            problem = "nothing was changed: a copy of the record may be in the cache"
            raise type(error)(f"{problem}. {error}") from error
        yield
        # The first may be lost by now, and a copy in its place.
        self.cache.bury(identity, must=False)


class HybridStore(CachingStore, DjangoStore):
    """Keeps the records in the database ``alias``, behind the :class:`Cache` at ``url``."""

    def __init__(
        self, url: str, alias: str = "default", *, options: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(alias)
        self.cache = Cache(url, options)

    def __repr__(self) -> str:
        return f"<HybridStore: {self.alias}, cached with prefix {self.cache.prefix}>"

    def transaction(self, record: Record) -> ClaimTransaction:
        # What it settles is cached after its COMMIT.
        return ClaimTransaction(self.connections, record, self.fill)


def open_hybrid(url: str) -> HybridStore:
    """Open ``hybrid+redis://…?truth=alias``: before the database ``alias``, or ``default``."""
    address, _, query = url.removeprefix("hybrid+").partition("?")
    options = parse_qs(query, keep_blank_values=True)
    alias = named("/".join(options.pop("truth", ["default"])))
    return HybridStore(f"{address}?{urlencode(options, doseq=True)}".removesuffix("?"), alias)
