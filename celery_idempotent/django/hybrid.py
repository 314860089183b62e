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
from contextlib import contextmanager
from urllib.parse import parse_qsl, urlencode

from celery_idempotent.django.sql.atomic import ClaimTransaction
from celery_idempotent.django.store import DjangoStore
from celery_idempotent.errors import InvalidOption, StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import (
    Answer,
    ClaimRequest,
    Identity,
    Record,
    Reservation,
    ReserveRequest,
    Settled,
    SettleRequest,
    State,
)
from celery_idempotent.stores.base import Store
from celery_idempotent.stores.redis.format import Keyspace, pack, unpack
from celery_idempotent.stores.redis.servers import (
    Command,
    Reply,
    exchange,
    link_and_prefix,
    plain,
)
from celery_idempotent.stores.table import Snapshot, StoredRecord

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
    """Settled records of a database, in Redis; ``url``, ``prefix`` and ``options`` are as for a RedisStore."""

    def __init__(
        self, url: str, *, prefix: str | None = None, options: Mapping[str, object] | None = None
    ) -> None:
        timeouts = {"socket_timeout": _TIMEOUT, "socket_connect_timeout": _TIMEOUT}
        self._link, named = link_and_prefix(url, {**timeouts, **(options or {})})
        self.prefix = f"{named if prefix is None else prefix}.cache"
        self._keys = Keyspace(self.prefix)
        self.away_until = 0.0

    def look(self, identity: Identity) -> Settled | None:
        """Return what is cached; ``None`` also without an answer, and for what this version cannot read."""
        name = self._name(identity)
        entry, left_ms = self._try(plain(b"GET", name), plain(b"PTTL", name)) or (None, 0)
        if not entry or entry == b"T" or left_ms < 0:
            return None
        try:
            record = unpack(identity, entry[_AGE_BYTES:]).record
        except StoreMisconfigured:
            return None
        age_ms = int.from_bytes(entry[:_AGE_BYTES], "big") - left_ms
        return Settled(record, max(age_ms, 0)) if record.state.settled else None

    def ticket(self, identity: Identity) -> bytes | None:
        """Return the right to fill in what is read from now on, ``None`` without an answer."""
        bucket, brace, _ = self._name(identity).partition(b"}")
        ticket = bucket + brace + b"!" + os.urandom(8)
        made = self._try(plain(b"SET", ticket, b"", b"PX", b"%d" % _TICKET_MS))
        return ticket if made else None

    def fill(self, identity: Identity, ticket: bytes, snapshot: Snapshot) -> bool:
        """Cache the settled record of a look that came after the ticket; the entry ends before the record does."""
        assert snapshot.stored is not None
        now_ms, record = snapshot.now_us // 1000, snapshot.stored.record
        left_ms = snapshot.stored.expires_ms - now_ms - _TICKET_MS
        age_ms = max(now_ms - record.updated_ms + left_ms, 0)
        entry = age_ms.to_bytes(_AGE_BYTES, "big") + pack(StoredRecord(record, 0), bytes(4))
        if left_ms <= 0 or len(entry) > _MAX_BYTES:
            return False
        answers = self._try(
            plain(b"SET", ticket, entry, b"XX", b"PX", b"%d" % left_ms),
            plain(b"COPY", ticket, self._name(identity)),
            plain(b"DEL", ticket),
        )
        return bool(answers and answers[1])

    def bury(self, identity: Identity, *, must: bool) -> None:
        """Leave a tombstone; if it ``must`` be there, raise where the server did not take it."""
        ask = self._ask if must else self._try
        ask(plain(b"SET", self._name(identity), b"T", b"PX", b"%d" % _TOMBSTONE_MS))

    def close(self) -> None:
        """Close the idle connections."""
        self._link.close()

    def _name(self, identity: Identity) -> bytes:
        return self._keys.of_record(identity)[0]

    def _try(self, *commands: Command) -> list[Reply] | None:
        """Return the answers, ``None`` if there is none: then the cache is left alone for a while."""
        if time.monotonic() < self.away_until:
            return None
        try:
            return self._ask(*commands)
        except (StoreUnavailable, StoreMisconfigured):
            return None

    def _ask(self, *commands: Command) -> list[Reply]:
        try:
            answers = exchange(self._link, commands)
        except (StoreUnavailable, StoreMisconfigured) as error:
            if not self.away_until:
                logger.warning("idempotency: going without the cache for now: %s", error)
            self.away_until = time.monotonic() + _PAUSE
            raise
        self.away_until = 0.0
        return answers


class CachingStore(Store):
    """The verbs of a store with a ``cache``, a mixin before the store itself.

    The cache only says that a key *is* settled. The store answers everything else: another fingerprint too, and the
    task that settled the key, whose callbacks may have to be sent again.
    """

    cache: Cache

    def claim(self, request: ClaimRequest) -> Answer:
        """Take the key if no live claim holds it; a settled one is answered by the cache."""
        return self._cached(request) or super().claim(request)

    def reserve(self, request: ReserveRequest) -> Reservation:
        """Take the key for a message; a settled one is answered by the cache."""
        return self._cached(request) or super().reserve(request)

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state, then cache what is stored; needs the cache if a FAILED record is to end anew."""
        identity = request.record.identity
        if request.record.state.settled and not request.restore:
            with self._buried(identity):
                return super().settle(request)
        settled = super().settle(request)
        if settled:
            self.fill(identity)
        return settled

    def forget(
        self, identity: Identity, *, token: int | None = None, state: State | None = None
    ) -> bool:
        """Delete the record, with ``token`` and ``state`` only if it has these; needs the cache."""
        with self._buried(identity):
            return super().forget(identity, token=token, state=state)

    def forget_mark(self, identity: Identity, *, token: int) -> None:
        """Forget what a run without retention left, also without the cache: its copies answer no other task."""
        self.cache.bury(identity, must=False)
        super().forget(identity, token=token)

    def fill(self, identity: Identity) -> None:
        """Cache what is committed, if that is an end state. Never raises for cache or store."""
        ticket = None if self.joined() else self.cache.ticket(identity)
        if ticket is None:
            return
        try:
            snapshot = self._at(identity, lambda snapshot: snapshot)
        except (StoreUnavailable, StoreMisconfigured):
            return  # what the caller came for is done
        record = snapshot.stored and snapshot.stored.record
        # What a sweep failed its owner may still settle; what an operator settled is told with who and why.
        if record and record.state.settled and not (record.swept or record.settled_by_operator):
            self.cache.fill(identity, ticket, snapshot)

    def close(self) -> None:
        """Close the connections of both."""
        self.cache.close()
        super().close()

    def _cached(self, request: ClaimRequest | ReserveRequest) -> Settled | None:
        found = self.cache.look(request.identity)
        if found is None or (request.task_id and request.task_id == found.record.task_id):
            return None
        known, asked = found.record.fingerprint, request.fingerprint
        return found if known is None or asked is None or known == asked else None

    @contextmanager
    def _buried(self, identity: Identity) -> Iterator[None]:
        """Change a settled record while no copy of it is answered or made."""
        try:
            self.cache.bury(identity, must=True)
        except (StoreUnavailable, StoreMisconfigured) as error:
            raise type(error)(
                f"nothing was changed: a copy of the record may be in the cache. {error}"
            ) from error
        yield
        # The first may be lost by now, and a copy in its place.
        self.cache.bury(identity, must=False)


class HybridStore(CachingStore, DjangoStore):
    """Keeps the records in the database ``alias``, behind the :class:`Cache` at ``url``."""

    def __init__(
        self,
        url: str,
        alias: str = "default",
        *,
        prefix: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(alias)
        self.cache = Cache(url, prefix=prefix, options=options)

    def __repr__(self) -> str:
        return f"<HybridStore: {self.alias}, cached with prefix {self.cache.prefix}>"

    def transaction(self, record: Record) -> ClaimTransaction:
        """Return the database's transaction; what it settles is cached after its COMMIT."""
        return ClaimTransaction(self.connections, record, self.fill)


def open_hybrid(url: str) -> HybridStore:
    """Open ``hybrid+redis://…?truth=alias``: before the database ``alias``, or ``default``."""
    address, _, query = url.removeprefix("hybrid+").partition("?")
    options = parse_qsl(query, keep_blank_values=True)
    alias, *others = [value for name, value in options if name == "truth"] or ["default"]
    if others or not alias or any(mark in alias for mark in ":/?#@"):
        raise InvalidOption(
            "a hybrid store's URL names one alias of Django's DATABASES as its truth: ?truth=alias"
        )
    rest = urlencode([(name, value) for name, value in options if name != "truth"])
    return HybridStore(f"{address}?{rest}".removesuffix("?"), alias)
