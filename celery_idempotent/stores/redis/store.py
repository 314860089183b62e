"""Records in Redis or Valkey: three scripts are the fast paths of a run, the table decides all else in Python."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from struct import Struct
from typing import TYPE_CHECKING, TypeVar

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import (
    Identity,
    Record,
    Renewal,
    ResultWrite,
    SettledWith,
    SettleRequest,
    State,
)
from celery_idempotent.stores.base import Store, Taken
from celery_idempotent.stores.deciding import (
    Asked,
    Look,
    asked_to_settle,
    brought,
)
from celery_idempotent.stores.redis.browse import Browsing
from celery_idempotent.stores.redis.format import STARTS, pack_own, pack_tail
from celery_idempotent.stores.redis.keyspace import Keyspace
from celery_idempotent.stores.redis.look import ChangedError, RedisLook
from celery_idempotent.stores.redis.servers import (
    SCRIPTS,
    Command,
    Reply,
    endpoint_of,
    exchange,
)
from celery_idempotent.stores.redis.upkeep import Upkeep
from celery_idempotent.stores.redis.urls import link_and_prefix
from celery_idempotent.stores.table import OUTCOME, PROCESSING, Verb

if TYPE_CHECKING:
    from redis import ConnectionPool

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The token and the time that a new record got.
_STAMP = Struct(">QQ")
#: The state of a record that each verb makes where there is none, and the attempts to run it.
_NEW: dict[Verb, tuple[State, int]] = {
    "claim": (State.PROCESSING, 1),
    "reserve": (State.QUEUED, 0),
}
#: Members of an Enum take Python 3.11 0.2 µs to look up.
_SETTLED = {b"stored": SettledWith.RESULT, b"settled": SettledWith.NOTHING}
_FAILED, _LOST = State.FAILED, SettledWith.LOST
#: What a settle carries over, but for what its script copies.
_CARRIED = tuple(
    name for name in OUTCOME if name not in ("token", "created_ms", "crashes", "attempts")
)
_carried_by = attrgetter(*_CARRIED)
_CLAIM, _END, _RENEW, _SWAP = (SCRIPTS[name] for name in ("claim", "end", "renew", "swap"))


class RedisStore(Browsing, Upkeep, Store):
    """Stores the records in Redis (6.2 or later) or Valkey, alone, under Sentinel or in a Cluster.

    ``url`` is ``redis://``, ``rediss://``, ``unix://``, ``sentinel://h1:p1;h2:p2/master/db`` or
    ``redis+cluster://h1:p1,h2:p2``, with redis-py's options and ``prefix`` in its query; ``prefix``
    and ``options`` (arguments of redis-py's connections) may also be given apart. Nothing connects
    before the first verb. Safe to share between threads and greenlets and to take along over a
    fork.
    """

    supports_counting = True
    #: Until the server refuses it.
    _takes_results = True

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        prefix: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        link, named = link_and_prefix(url, options or {})
        super().__init__(link, Keyspace(named if prefix is None else prefix))

    def __repr__(self) -> str:
        return f"<RedisStore: {self._link.where}, prefix {self._keys.prefix}>"

    @property
    def prefix(self) -> str:
        """What all our keys in Redis start with."""
        return self._keys.prefix

    def _take_key(self, verb: Verb, identity: Identity, asked: Asked) -> Taken:
        """Claim or reserve a key; in one trip where it has no record, or cannot be had."""
        state, attempts = _NEW[verb]
        lease_ms = asked.delay_ms
        assert asked.attempt is not None
        assert lease_ms is not None
        tail = pack_tail(asked.fields, attempt=asked.attempt)
        args = b"%d" % lease_ms, b"%d" % (lease_ms + asked.keep_ms), STARTS[state], b"%d" % attempts
        answer = self._send(_CLAIM.call(self._keys.of_record(identity)[:2], *args, tail))
        if not isinstance(answer, bytes):
            return self._with(answer, identity, lambda look: self._take(verb, look, asked))
        token, now_ms = _STAMP.unpack(answer)
        return Record(
            state=state,
            token=token,
            created_ms=now_ms,
            updated_ms=now_ms,
            deadline_ms=now_ms + lease_ms,
            attempts=attempts,
            **asked.fields,
        )

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state, unless the key has another token by now."""
        return self._settle(request) is not _LOST

    def settle_with_result(self, request: SettleRequest, result: ResultWrite) -> SettledWith:
        """Write the end state and the result in one script.

        A server may refuse scripts with two unrelated keys: what looks like one server may be a cluster, or a proxy.
        Then it is not asked again.
        """
        if self._takes_results:
            try:
                return self._settle(request, result)
            except StoreMisconfigured as refused:
                done = self._settle(request)
                self._takes_results = False
                logger.warning("idempotency: results are stored apart from records: %s", refused)
                return done
        return self._settle(request)

    def _settle(self, request: SettleRequest, result: ResultWrite | None = None) -> SettledWith:
        record, identity = request.record, request.record.identity
        answer: Reply = None
        if record.state is PROCESSING and request.restore and not request.note:
            answer = self._send(self._end(request, result))
            if isinstance(answer, bytes):
                return _SETTLED[answer]
        asked = asked_to_settle(request)
        done = self._with(answer, identity, lambda look: self._do("settle", look, asked))
        if done.answer != "settled":
            return _LOST
        stored = result is not None and self.write_result(result)
        return SettledWith.RESULT if stored else SettledWith.NOTHING

    def _end(self, request: SettleRequest, result: ResultWrite | None) -> Command:
        """Return the script that settles the claim in the request, if it still runs."""
        record, fields = request.record, brought(request)
        fields.update(zip(_CARRIED, _carried_by(record), strict=True))
        name, leases, failures, _ = self._keys.of_record(record.identity)
        keys: list[bytes] = [name, leases]
        written: tuple[bytes, ...] = ()
        if request.state is _FAILED:
            keys.append(failures)
        if result is not None:
            keys.append(result.key)
            written = (result.payload, b"%d" % result.expires_s)
        args = STARTS[request.state], b"%d" % max(request.keep_ms, 1), pack_tail(fields), *written
        return _END.call(keys, pack_own(record.token), *args)

    def stores_results_of(self, pool: ConnectionPool) -> bool:
        """Are these connections to the same database, with the same login?"""
        # Who overrides settle() does something in it that a settle with the result would leave out.
        overridden = type(self).settle is not RedisStore.settle or "settle" in vars(self)
        ours = None if overridden else getattr(self._link, "endpoint", None)
        return ours is not None and ours == endpoint_of(pool)

    def write_result(self, result: ResultWrite) -> bool:
        """Write the result of a task that a record answered, in one script."""
        if not self._takes_results:
            return False
        write = SCRIPTS["result"].call((result.key,), result.payload, b"%d" % result.expires_s)
        return bool(self._send(write) == b"stored")

    def release(
        self, identity: Identity, *, token: int, requeue_ms: int | None = None, note: str = ""
    ) -> bool:
        """Give the key back; in one trip where nothing stays of it."""
        answer = self._send(_END.call(self._keys.of_record(identity)[:2], pack_own(token)))
        if isinstance(answer, bytes):
            return True
        asked = Asked(fields={"note": note}, token=token, delay_ms=requeue_ms)
        done = self._with(answer, identity, lambda look: self._do("release", look, asked))
        return done.answer != "lost"

    def renew(self, leases: Sequence[Renewal]) -> list[bool]:
        """Let each lease start anew, all in one trip; what a sweep has ended since takes another two."""
        calls = []
        for each in leases:
            args = b"%d" % each.lease_ms, b"%d" % (each.lease_ms + each.keep_ms)
            keys = self._keys.of_record(each.identity)[:2]
            calls.append(_RENEW.call(keys, pack_own(each.token), *args))
        return [
            answer == b"renewed" or self._renew_swept(each, answer)
            for each, answer in zip(leases, self._exchange(*calls), strict=True)
        ]

    def _renew_swept(self, each: Renewal, answer: Reply) -> bool:
        asked = Asked(token=each.token, delay_ms=each.lease_ms, keep_ms=each.keep_ms)
        done = self._with(answer, each.identity, lambda look: self._do("renew", look, asked))
        return done.answer == "renewed"

    def _at(self, identity: Identity, verb: Callable[[Look], T]) -> T:
        return self._with(None, identity, verb)

    def _with(self, answer: Reply, identity: Identity, verb: Callable[[Look], T]) -> T:
        """Do a verb with what a script found, ``None`` for nothing yet; anew if somebody else wrote since."""
        highest = 0
        while True:
            answer = answer or self._send(_CLAIM.call(self._keys.of_record(identity)[:1]))
            try:
                return verb(RedisLook(identity, answer, self._swap, highest))
            except ChangedError as changed:
                answer, highest = None, changed.highest

    def _send(self, command: Command) -> Reply:
        return exchange(self._link, (command,))[0]

    def _swap(self, identity: Identity, args: tuple[bytes, ...]) -> Reply:
        return self._send(_SWAP.call(self._keys.of_record(identity), *args))
