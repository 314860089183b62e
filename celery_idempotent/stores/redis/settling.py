"""The verb settle in Redis, alone or together with the task's result."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Identity, ResultWrite, SettledWith, SettleRequest
from celery_idempotent.stores.redis.channel import Server
from celery_idempotent.stores.redis.endpoint import endpoint_of
from celery_idempotent.stores.redis.facts import Servers
from celery_idempotent.stores.redis.packed import pack_settled, pack_state, unreadable
from celery_idempotent.stores.redis.scripts import script

if TYPE_CHECKING:
    from redis import ConnectionPool

logger = logging.getLogger(__name__)

_SETTLED_WITH = {
    b"settled": SettledWith.NOTHING,
    b"stored": SettledWith.RESULT,
    b"lost": SettledWith.LOST,
    b"none": SettledWith.LOST,
}


class Settling(Servers):
    """The verb that ends a claim."""

    #: Until the server refuses it.
    _takes_results = True

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state, unless the key has another token by now."""
        return self._settle(request) == b"settled"

    def stores_results_of(self, pool: ConnectionPool) -> bool:
        """Are these connections to the same database, with the same login?"""
        link = self._link
        # Who overrides settle() does something in it that a settle with the result would leave out.
        overridden = type(self).settle is not Settling.settle or "settle" in vars(self)
        if overridden or not isinstance(link, Server):
            return False
        return link.endpoint is not None and link.endpoint == endpoint_of(pool)

    def settle_with_result(self, request: SettleRequest, result: ResultWrite) -> SettledWith:
        """Write the end state and the result in one script.

        A server may refuse scripts with two unrelated keys: what looks like one server may be a cluster, or a proxy.
        Then it is not asked again.
        """
        if self._takes_results:
            try:
                return _SETTLED_WITH[self._settle(request, result)]
            except StoreMisconfigured as refused:
                if not self.settle(request):
                    return SettledWith.LOST
                self._takes_results = False
                logger.warning("idempotency: results are stored apart from records: %s", refused)
                return SettledWith.NOTHING
        return SettledWith.NOTHING if self.settle(request) else SettledWith.LOST

    def write_result(self, result: ResultWrite) -> bool:
        """Write the result of a task that a record answered, in one script."""
        if not self._takes_results:
            return False
        write = script("write_result")
        answer = self._ask(write.call(0, (result.key,), result.payload, _expiry(result)))
        return bool(answer == b"stored")

    def _settle(self, request: SettleRequest, result: ResultWrite | None = None) -> bytes:
        identity = request.record.identity
        bucket, name, leases, failures, token, interrupted = self._names(identity)
        keys = [name, leases, failures, interrupted]
        payload = expiry = b""
        if request.by_operator:
            keys.append(token)
        elif result is not None:
            keys.append(result.key)
            payload, expiry = result.payload, _expiry(result)
        arguments = [pack_settled(request), b"%d" % max(request.keep_ms, 1), payload, expiry]
        if not request.restore or request.by_operator:
            arguments += (
                b"" if request.restore else pack_state(request.record.state),
                b"1" if request.by_operator else b"",
            )
        word: bytes = self._ask(script("settle").call(bucket, keys, *arguments))
        if word == b"unreadable":
            raise unreadable(identity)
        return word

    def _names(self, identity: Identity) -> tuple[int, bytes, bytes, bytes, bytes, bytes]:
        """Return the bucket, and the names of the record and of the bucket's indexes and token."""
        bucket, name = self._keys.locate(identity)
        leases, failures, interrupted, token = self._keys.indexes(bucket)
        return bucket, name, leases, failures, token, interrupted


def _expiry(result: ResultWrite) -> bytes:
    return b"%d" % result.expires_s if result.expires_s else b""
