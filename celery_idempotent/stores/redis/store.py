"""Records in Redis or Valkey: one script and one round trip a verb."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import (
    Answer,
    Claimed,
    ClaimRequest,
    Held,
    Identity,
    Mismatched,
    Record,
    Renewal,
    Reservation,
    Reserved,
    ReserveRequest,
    Settled,
    State,
    Stored,
)
from celery_idempotent.stores.base import ATTEMPT_BYTES, Store
from celery_idempotent.stores.redis.browse import Browsing
from celery_idempotent.stores.redis.keyspace import Keyspace
from celery_idempotent.stores.redis.packed import (
    pack_claim,
    pack_fingerprint,
    pack_message,
    pack_note,
    pack_reservation_flags,
    pack_state,
    pack_token,
    unpack_new,
    unpack_record,
    unreadable,
)
from celery_idempotent.stores.redis.scripts import VERBS, Command, Reply, plain, script
from celery_idempotent.stores.redis.settling import Settling
from celery_idempotent.stores.redis.upkeep import Upkeep
from celery_idempotent.stores.redis.url import link_and_prefix
from celery_idempotent.stores.values import pack_text, pack_value


class RedisStore(Browsing, Settling, Upkeep, Store):
    """Stores the records in Redis (6.2 or later) or Valkey, alone, under Sentinel or in a Cluster.

    ``url`` is ``redis://``, ``rediss://``, ``unix://``, ``sentinel://h1:p1;h2:p2/master/db`` or
    ``redis+cluster://h1:p1,h2:p2``, with redis-py's options and ``prefix`` in its query; ``prefix``
    and ``options`` (arguments of redis-py's connections) may also be given apart. Nothing connects
    before the first verb. Safe to share between threads and greenlets and to take along over a
    fork.
    """

    supports_counting = True

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        prefix: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        link, named = link_and_prefix(url, options or {})
        super().__init__(link, Keyspace(named if prefix is None else prefix))
        for verb in VERBS:
            script(verb)  # read now: a process may be forked while a thread reads one

    def __repr__(self) -> str:
        return f"<RedisStore: {self._link.where}, prefix {self._keys.prefix}>"

    @property
    def prefix(self) -> str:
        """What all our keys in Redis start with."""
        return self._keys.prefix

    def claim(self, request: ClaimRequest) -> Answer:
        """Take the key if no live claim holds it."""
        if len(request.attempt) != ATTEMPT_BYTES:
            raise ValueError(f"an attempt has {ATTEMPT_BYTES} bytes")
        identity, lease_ms = request.identity, request.lease_ms
        brought, flags = pack_claim(request)
        bucket, *keys = self._names(identity)
        word, *rest = self._ask(
            script("claim").call(
                bucket,
                keys,
                brought,
                b"%d" % lease_ms,
                b"%d" % (lease_ms + request.keep_ms),
                flags,
            )
        )
        if word in (b"new", b"claimed"):
            record = (
                unpack_new(request, rest[0]) if word == b"new" else unpack_record(identity, rest[0])
            )
            return Claimed(record)
        return self._refusal(identity, word, rest)

    def renew(self, leases: Sequence[Renewal]) -> list[bool]:
        """Let each lease start anew."""
        answers = self._ask_all([self._renewal(lease) for lease in leases])
        swept = [n for n, answer in enumerate(answers) if answer == b"interrupted"]
        again = self._ask_all([self._renewal(leases[n], interrupted=True) for n in swept])
        for n, answer in zip(swept, again, strict=True):
            answers[n] = answer
        return [answer == b"renewed" for answer in answers]

    def _renewal(self, lease: Renewal, *, interrupted: bool = False) -> Command:
        bucket, name = self._keys.locate(lease.identity)
        keys = [name, self._keys.leases(bucket)]
        if interrupted:
            keys.append(self._keys.interrupted(bucket))
        life_ms = lease.lease_ms + lease.keep_ms
        arguments = pack_token(lease.token), b"%d" % lease.lease_ms, b"%d" % life_ms
        return script("renew").call(bucket, keys, *arguments)

    def reserve(self, request: ReserveRequest) -> Reservation:
        """Take the key for a message that is about to be published."""
        identity, deadline_ms = request.identity, request.deadline_ms
        bucket, *keys = self._names(identity)
        owner = pack_text(request.task_id)
        word, *rest = self._ask(
            script("reserve").call(
                bucket,
                keys,
                # A digest of the task id: shows whose reservation this is, also where the task id in the record is
                # that of another message.
                hashlib.blake2b(owner, digest_size=ATTEMPT_BYTES).digest(),
                b"%d" % deadline_ms,
                b"%d" % (deadline_ms + request.keep_ms),
                pack_fingerprint(request.fingerprint),
                owner,
                pack_message(request.message),
                pack_reservation_flags(request),
            )
        )
        if word == b"reserved":
            return Reserved(unpack_record(identity, rest[0]))
        return self._refusal(identity, word, rest)

    def checkpoint(self, identity: Identity, *, token: int, name: str, value: Stored) -> bool:
        """Add the result of a step."""
        step = (pack_text(name), pack_value(value))
        word = self._ask_about("checkpoint", identity, pack_token(token), *step)
        return bool(word != b"lost")

    def mark_delivered(self, identity: Identity, *, token: int) -> bool:
        """Note that the callbacks of the settled task were sent."""
        word = self._ask_about("mark_delivered", identity, pack_token(token))
        return bool(word == b"marked")

    def release(
        self, identity: Identity, *, token: int, requeue_ms: int | None = None, note: str = ""
    ) -> bool:
        """Give the key back."""
        deadline = b"" if requeue_ms is None else b"%d" % requeue_ms
        given = pack_token(token), deadline, pack_note(note)
        return bool(self._ask_about("release", identity, *given) != b"lost")

    def interrupt(self, identity: Identity, *, token: int) -> Record | None:
        """Note that a crash took the owner."""
        word, *rest = self._ask_about("interrupt", identity, pack_token(token))
        return unpack_record(identity, rest[0]) if word == b"interrupted" else None

    def get(self, identity: Identity) -> Record | None:
        """Return the record as it is."""
        bucket, name = self._keys.locate(identity)
        packed = self._ask(plain(bucket, b"GET", name))
        return None if packed is None else unpack_record(identity, packed)

    def requeue(
        self, identity: Identity, *, deadline_ms: int, token: int | None = None, note: str = ""
    ) -> Record | None:
        """Make an unfinished record that has a message QUEUED."""
        attempt = os.urandom(ATTEMPT_BYTES)
        only = b"" if token is None else pack_token(token)
        word, *rest = self._ask_about(
            "requeue", identity, b"%d" % deadline_ms, attempt, only, pack_note(note)
        )
        if word == b"unreadable":
            raise unreadable(identity)
        return unpack_record(identity, rest[0]) if word == b"requeued" else None

    def forget(
        self, identity: Identity, *, token: int | None = None, state: State | None = None
    ) -> bool:
        """Delete the record; with ``token`` and ``state`` only if it has these."""
        bucket, *keys = self._names(identity)
        only = (
            b"" if token is None else pack_token(token),
            b"" if state is None else pack_state(state),
        )
        del keys[3]  # the bucket's token stays
        word = self._ask(script("forget").call(bucket, keys, *only))
        return bool(word == b"forgotten")

    def _refusal(
        self, identity: Identity, word: bytes, rest: Sequence[Reply]
    ) -> Held | Settled | Mismatched:
        """Return why a key cannot be had."""
        if word == b"unreadable":
            raise unreadable(identity)
        record = unpack_record(identity, rest[0])
        match word:
            case b"held":
                return Held(record, left_ms=rest[1])
            case b"settled":
                return Settled(record, age_ms=max(rest[1], 0))
            case b"mismatched":
                return Mismatched(record)
        raise StoreMisconfigured(f"{self._link.where} answered with {word!r}")

    def _ask_about(self, verb: str, identity: Identity, *arguments: bytes) -> Reply:
        """Run the script of a verb that needs the record, the leases, what is interrupted and the token."""
        bucket, name, leases, _, token, interrupted = self._names(identity)
        keys = (name, leases, interrupted, token)
        return self._ask(script(verb).call(bucket, keys, *arguments))
