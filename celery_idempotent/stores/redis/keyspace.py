"""Where each identity lives in Redis: the names of records and of the indexes of their bucket.

::

    idem:{7}:payments.charge:acct_1:order-17    the record (namespace, scope, key)
    idem:{7}!leases                             sorted set: record names by deadline, PROCESSING
                                                and QUEUED only; and "!" by the largest token that
                                                the bucket gave out, in microseconds: never due
    idem:{7}!failures                           sorted set: names of FAILED records by the end of
                                                their retention
    idem:{7}!interrupted                        sorted set: names of INTERRUPTED records by when
                                                they expire
    idem:{0}!counts:484722                      hash: how often which outcome (of which task) in
                                                that hour since the epoch
    idem:{0}!swept                              when the last sweep ended, ms since the epoch

    idem.cache:{7}:payments.charge:acct_1:order-17   the same record, where this is a cache before
                                                     a database (see django/hybrid.py)
    idem.cache:{7}!<8 random bytes>                  a ticket for a fill, for ten seconds

The bucket number in braces is the Cluster hash tag, so that all that a script touches lies in one
slot. Redis takes the first braces of a name, hence braces further right do not matter and the
prefix may have none.
"""

from __future__ import annotations

import functools
import zlib

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Identity

#: How many buckets the records spread over. Fixed for ever: it decides where each record is found.
BUCKETS = 1024
#: Who has the largest token of a bucket as score among its leases.
MARK = b"!"


class Keyspace:
    """The names of all that a store with this prefix writes."""

    def __init__(self, prefix: str) -> None:
        if not prefix or "{" in prefix or "}" in prefix:
            raise StoreMisconfigured(
                f"the key prefix {prefix!r} cannot be used: give at least one character"
                " and no braces, which mark the Redis Cluster hash tag"
            )
        self.prefix = prefix
        self._start = prefix.encode()
        #: What all names of each bucket begin with.
        self._heads = [b"%b:{%d}" % (self._start, bucket) for bucket in range(BUCKETS)]

    def locate(self, identity: Identity) -> tuple[int, bytes]:
        """Return the bucket and the name of the record.

        Namespace and scope are escaped and the key comes last, so two identities never share a
        name.
        """
        namespace, scope = _escape(identity.namespace), _escape(identity.scope)
        text = f"{namespace}:{scope}:{identity.key}".encode()
        bucket = zlib.crc32(text) % BUCKETS
        return bucket, self._heads[bucket] + b":" + text

    def of_record(self, identity: Identity) -> tuple[bytes, bytes, bytes, bytes]:
        """Name the record, and its bucket's indexes of leases, failures and interrupted records."""
        bucket, name = self.locate(identity)
        head = self._heads[bucket]
        return name, head + b"!leases", head + b"!failures", head + b"!interrupted"

    def identity(self, name: bytes) -> Identity:
        """Return the identity that :meth:`locate` gave this name."""
        text = name[len(self._start) :].partition(b"}:")[2].decode()
        namespace, scope, key = text.split(":", 2)
        return Identity(namespace=_unescape(namespace), scope=_unescape(scope), key=key)

    @property
    def pattern(self) -> bytes:
        """The pattern by which ``SCAN`` finds all records and no index."""
        special = {ord(c): f"\\{c}" for c in "\\*?[]^"}
        return self.prefix.translate(special).encode() + b":{*}:*"

    def leases(self, bucket: int) -> bytes:
        """Name the index of the bucket's leases."""
        return self._heads[bucket] + b"!leases"

    def failures(self, bucket: int) -> bytes:
        """Name the index of the bucket's failed records."""
        return self._heads[bucket] + b"!failures"

    def interrupted(self, bucket: int) -> bytes:
        """Name the index of the bucket's interrupted records."""
        return self._heads[bucket] + b"!interrupted"

    def counts(self, hour: int) -> bytes:
        """Name the counters of an hour."""
        return b"%b:{0}!counts:%d" % (self._start, hour)

    @property
    def swept(self) -> bytes:
        """Name the time at which the last sweep ended."""
        return b"%b:{0}!swept" % self._start


@functools.lru_cache(maxsize=256)
def _escape(part: str) -> str:
    return part.replace("%", "%25").replace(":", "%3A")


def _unescape(part: str) -> str:
    return part.replace("%3A", ":").replace("%25", "%")
