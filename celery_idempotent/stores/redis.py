"""Records in Redis or Valkey: one script and one round trip a verb."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import (
    FINGERPRINT_BYTES,
    Answer,
    Claimed,
    Held,
    Identity,
    Lease,
    Mismatched,
    Record,
    Settled,
    State,
    Stored,
    SweepReport,
)
from celery_idempotent.stores.base import ATTEMPT_BYTES
from celery_idempotent.stores.channel import exchange
from celery_idempotent.stores.keyspace import BUCKETS, Keyspace
from celery_idempotent.stores.packed import (
    pack_owner,
    pack_settled,
    pack_token,
    unpack,
    unreadable,
)
from celery_idempotent.stores.redis_url import link_and_prefix
from celery_idempotent.stores.scripts import VERBS, Command, plain, script

__all__ = ["RedisStore"]

#: No script works on more records than this at a time, so that no other client waits for one for
#: long.
_PER_SCRIPT = 100


class RedisStore:
    """Keeps the records in Redis (6.2 or later) or Valkey, alone, under Sentinel or in a Cluster.

    ``url`` is ``redis://``, ``rediss://``, ``unix://``, ``sentinel://h1:p1;h2:p2/master/db`` or
    ``redis+cluster://h1:p1,h2:p2``, with redis-py's options and ``prefix`` in its query; ``prefix``
    and ``options`` (arguments of redis-py's connections) may also be given apart. Nothing connects
    before the first verb. Safe to share between threads and greenlets and to take along over a
    fork.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        prefix: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._link, named = link_and_prefix(url, options or {})
        self._keys = Keyspace(named if prefix is None else prefix)
        for verb in VERBS:
            script(verb)  # read now: a process may be forked while a thread reads one

    def __repr__(self) -> str:
        return f"<RedisStore: {self._link.where}, prefix {self._keys.prefix}>"

    @property
    def prefix(self) -> str:
        """What all our keys in Redis start with."""
        return self._keys.prefix

    def claim(
        self,
        identity: Identity,
        *,
        attempt: bytes,
        lease_ms: int,
        keep_ms: int,
        fingerprint: bytes | None = None,
        task_id: str = "",
        worker: str = "",
    ) -> Answer:
        """Take the key if nobody holds it."""
        fingerprint = fingerprint or b""
        if len(attempt) != ATTEMPT_BYTES or len(fingerprint) not in (0, FINGERPRINT_BYTES):
            raise ValueError(
                f"an attempt has {ATTEMPT_BYTES} bytes, a fingerprint {FINGERPRINT_BYTES}"
            )
        bucket, name = self._keys.locate(identity)
        keys = (
            name,
            self._keys.leases(bucket),
            self._keys.failures(bucket),
            self._keys.token(bucket),
        )
        word, *rest = self._ask(
            script("claim").call(
                bucket,
                keys,
                attempt,
                b"%d" % lease_ms,
                b"%d" % (lease_ms + keep_ms),
                fingerprint,
                pack_owner(task_id, worker),
            )
        )
        if word == b"unreadable":
            raise unreadable(identity)
        record = unpack(identity, rest[0])
        match word:
            case b"claimed":
                return Claimed(record)
            case b"held":
                return Held(record, left_ms=rest[1])
            case b"settled":
                return Settled(record, age_ms=max(rest[1], 0))
            case b"mismatched":
                return Mismatched(record)
        raise StoreMisconfigured(f"{self._link.where} answered a claim with {word!r}")

    def renew(self, leases: Sequence[Lease]) -> list[bool]:
        """Let each lease start anew."""
        renew = script("renew")
        commands = []
        for lease in leases:
            bucket, name = self._keys.locate(lease.identity)
            commands.append(
                renew.call(
                    bucket,
                    (name, self._keys.leases(bucket)),
                    pack_token(lease.token),
                    b"%d" % lease.lease_ms,
                    b"%d" % (lease.lease_ms + lease.keep_ms),
                )
            )
        return [answer == b"renewed" for answer in self._ask_all(commands)]

    def settle(
        self,
        record: Record,
        *,
        state: Literal[State.COMPLETED, State.FAILED],
        value: Stored | None,
        keep_ms: int,
        replaced: bool = False,
    ) -> bool:
        """Write the end state, unless the key has another token by now."""
        bucket, name = self._keys.locate(record.identity)
        word = self._ask(
            script("settle").call(
                bucket,
                (name, self._keys.leases(bucket), self._keys.failures(bucket)),
                pack_settled(record, state=state, value=value, replaced=replaced),
                b"%d" % max(keep_ms, 1),
            )
        )
        if word == b"unreadable":
            raise unreadable(record.identity)
        return bool(word == b"settled")

    def release(self, identity: Identity, *, token: int) -> bool:
        """Give the key back."""
        bucket, name = self._keys.locate(identity)
        keys = (name, self._keys.leases(bucket))
        word = self._ask(script("release").call(bucket, keys, pack_token(token)))
        return bool(word == b"released")

    def interrupt(self, identity: Identity, *, token: int) -> Record | None:
        """Note that a crash took the owner."""
        bucket, name = self._keys.locate(identity)
        keys = (name, self._keys.leases(bucket))
        word, *rest = self._ask(script("interrupt").call(bucket, keys, pack_token(token)))
        return unpack(identity, rest[0]) if word == b"interrupted" else None

    def get(self, identity: Identity) -> Record | None:
        """Return the record as it is."""
        bucket, name = self._keys.locate(identity)
        packed = self._ask(plain(bucket, b"GET", name))
        return None if packed is None else unpack(identity, packed)

    def sweep(self, *, limit: int) -> SweepReport:
        """Interrupt what is stale."""
        each = min(limit, _PER_SCRIPT)
        commands, asked, left, more = [], [], limit, False
        # One more than a script may take, to know whether there is more.
        for bucket, names in self._due(self._keys.leases, each=each + 1):
            more = more or len(names) > min(each, left)
            names = names[: min(each, left)]
            if not names:
                break
            left -= len(names)
            asked += names
            commands.append(script("sweep").call(bucket, (self._keys.leases(bucket), *names)))
        swept = [packed for answer in self._ask_all(commands) for packed in answer]
        records = tuple(
            unpack(self._keys.identity(name), packed)
            for name, packed in zip(asked, swept, strict=True)
            if packed is not None
        )
        return SweepReport(interrupted=records, more=more)

    def prune(self, *, limit: int) -> int:
        """Drop index entries of expired records; Redis drops the records by itself."""
        commands, left = [], limit
        for bucket, names in self._due(self._keys.failures, each=min(limit, _PER_SCRIPT)):
            if left <= 0:
                break
            commands.append(
                script("prune").call(
                    bucket, (self._keys.failures(bucket),), b"%d" % min(left, len(names))
                )
            )
            left -= len(names)
        return sum(self._ask_all(commands))

    def forget(self, identity: Identity) -> bool:
        """Delete the record whatever its state."""
        bucket, name = self._keys.locate(identity)
        keys = (name, self._keys.leases(bucket), self._keys.failures(bucket))
        return bool(self._ask(script("forget").call(bucket, keys)) == b"forgotten")

    def close(self) -> None:
        """Close the idle connections."""
        self._link.close()

    def _due(
        self, index: Callable[[int], bytes], *, each: int
    ) -> Iterator[tuple[int, list[bytes]]]:
        """Look into all buckets for names whose time has come, up to ``each`` names of a bucket.

        Starts anywhere, so that a limit never starves the same buckets. One node's time serves for
        all: this only finds candidates, and a script decides about each by its own server's time.
        """
        start = random.randrange(BUCKETS)
        buckets = [*range(start, BUCKETS), *range(start)]
        seconds, micros = self._ask(plain(start, b"TIME"))
        now = b"%d" % (int(seconds) * 1000 + int(micros) // 1000)
        limit = b"%d" % each
        found = self._ask_all(
            [
                plain(b, b"ZRANGEBYSCORE", index(b), b"-inf", now, b"LIMIT", b"0", limit)
                for b in buckets
            ]
        )
        return ((bucket, names) for bucket, names in zip(buckets, found, strict=True) if names)

    def _ask(self, command: Command) -> Any:
        return exchange(self._link, (command,))[0]

    def _ask_all(self, commands: Sequence[Command]) -> list[Any]:
        return exchange(self._link, commands) if commands else []
