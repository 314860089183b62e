"""The layout in Redis: the names of records and their indexes, and the bytes of a record.

::

    idem:{7}:payments.charge:acct_1:order-17    a record: namespace, scope, key
    idem:{7}!leases                             sorted set: PROCESSING and QUEUED records by deadline, and "!" by the
                                                largest token of the bucket, in µs: never due
    idem:{7}!failures, idem:{7}!interrupted     sorted sets: such records by their last change; a prune
                                                removes those that have expired
    idem:{0}!layout                             number of this layout: of these names, and of how records spread
    idem:{0}!counts:3600000:1795874400000       hash: counts of outcome and task, in so many ms from then on
    idem:{0}!swept                              end of the last sweep, ms since the epoch
    idem:{0}!used                               first use, ms since the epoch, negative; positive: since a loss

The bucket number in braces is the Cluster hash tag: every name that a script touches lies in one slot.

A record is a head of 83 bytes that scripts read, a line of JSON, then the value. Numbers are big-endian::

    1      letter of the state ·  2 version of this format ·  3 token
    11     created, ms ·  19 crashes ·  21 attempts, both up to 65,535
    23     updated, ms, 0 as created ·  31 from then until the deadline, ms
    39     flags: 1 a release has to ask the table, 2 there is a value, 4 a fingerprint
    40     id of the write, random: two writes never have the same head
    44     id of the attempt ·  52 fingerprint ·  68 task id, if it is a UUID; zeros for none of these
    84     JSON object of all other fields that are not as usual, or nothing · newline · the value
"""

from __future__ import annotations

import functools
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from struct import Struct

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import (
    ATTEMPT_BYTES,
    ClaimRequest,
    Identity,
    PackedId,
    Record,
    State,
    Stored,
    uuid_text,
)
from celery_idempotent.stores import table
from celery_idempotent.stores.fields import LETTERS, STORED, FieldCodec, Unreadable, without_long
from celery_idempotent.stores.table import BROUGHT, LEASED, StoredRecord

LAYOUT = b"2"
BUCKETS = 256  # fixed for this layout: it decides the names of records
#: The member of a bucket's leases whose score is its largest token.
MARK = b"!"
LEASES, FAILURES, INTERRUPTED = KINDS = b"!leases", b"!failures", b"!interrupted"
#: The kind of index that has the records of a state.
INDEXED = dict.fromkeys(LEASED, LEASES) | {State.FAILED: FAILURES, State.INTERRUPTED: INTERRUPTED}


class Keyspace:
    """The names of everything that a store with this prefix writes."""

    def __init__(self, prefix: str) -> None:
        if not prefix or "{" in prefix or "}" in prefix:
            raise StoreMisconfigured(
                f"the key prefix {prefix!r} cannot be used: give at least one character"
                " and no braces, which mark the Redis Cluster hash tag"
            )
        self._start = prefix.encode()
        self._heads = [b"%b:{%d}" % (self._start, bucket) for bucket in range(BUCKETS)]
        kinds = b":", LEASES, FAILURES, INTERRUPTED  # joined now: 2 % of a claim's instructions
        self._buckets = [tuple(head + kind for kind in kinds) for head in self._heads]
        marks = b"!swept", b"!layout", b"!used"
        self.swept, self.layout, self.used = (self._heads[0] + mark for mark in marks)
        special = {ord(c): f"\\{c}" for c in "\\*?[]^"}
        #: Finds all records and no index.
        self.pattern = prefix.translate(special).encode() + b":{*}:*"

    def of_record(self, identity: Identity) -> tuple[bytes, bytes, bytes, bytes]:
        """Name the record and its bucket's indexes: leases, failures, interrupted records."""
        text = f"{_escaped(identity.namespace, identity.scope)}:{identity.key}".encode()
        start, leases, failures, interrupted = self._buckets[zlib.crc32(text) % BUCKETS]
        return start + text, leases, failures, interrupted

    def identity(self, name: bytes) -> Identity:
        text = name[len(self._start) :].partition(b"}:")[2].decode()
        namespace, scope, key = text.split(":", 2)
        return Identity(namespace=_unescape(namespace), scope=_unescape(scope), key=key)

    def index(self, kind: bytes) -> list[bytes]:
        """Name the index of this kind of each bucket."""
        return [head + kind for head in self._heads]

    def counts(self, length_ms: int, start_ms: int) -> bytes:
        return b"%b!counts:%d:%d" % (self._heads[0], length_ms, start_ms)


@functools.lru_cache(maxsize=256)  # most calls have the same: 6 % of a verb's instructions
def _escaped(*parts: str) -> str:
    return ":".join(part.replace("%", "%25").replace(":", "%3A") for part in parts)


def _unescape(part: str) -> str:
    return part.replace("%3A", ":").replace("%25", "%")


#: The head of a record: what a claim writes first, and the rest, which it is given.
START, _TAIL, HEAD = map(Struct, (">2sQQ", ">HHQqB4s8s16s16s", ">2sQQHHQqB4s8s16s16s"))
MOST = 65_535  # crashes and attempts
_ASKS, _HAS_VALUE, _HAS_FINGERPRINT = 1, 2, 4
_VERSION = b"\xa3"
#: The first bytes of each state's records.
STARTS: Mapping[object, bytes] = {s: letter.encode() + _VERSION for s, letter in LETTERS.items()}
_STATES = {STARTS[state]: state for state in State}
#: Packs a token into the first bytes of the record of its claim while that runs.
pack_own = functools.partial(Struct(">2sQ").pack, STARTS[State.PROCESSING])

_is_uuid = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch
_NO_ID, NO_ATTEMPT = bytes(16), bytes(ATTEMPT_BYTES)
#: Of a claim, whose token no other has, and its settle.
NO_WRITE = bytes(4)
NO_IDS = NO_WRITE, NO_ATTEMPT
#: The fields of the JSON line: scripts write the others, or they have a place of their own.
_CODEC = FieldCodec("deadline_ms", "crashes", "attempts", "fingerprint", "task_id")


@functools.lru_cache(maxsize=256)  # a settle has that of its claim: 8 % of its instructions
def _bytes_of_uuid(task_id: str) -> bytes:
    """Return the bytes of a UUID in its usual form, none for any other text."""
    return bytes.fromhex(task_id.replace("-", "")) if _is_uuid(task_id) else b""


CLAIMED, SETTLED = _CODEC.writer(BROUGHT[ClaimRequest]), _CODEC.writer(table.SETTLED)
_WHOLE = _CODEC.writer(STORED)


def tail(
    write_line: Callable[..., bytes],
    subject: object,
    owner: Record | ClaimRequest,
    numbers: tuple[int, int, int, int],
    ids: tuple[bytes, bytes],
    message: bytes | None,
    value: Stored | None = None,
    steps: Sequence[tuple[str, Stored]] = (),
    is_reserved: bool = False,
) -> bytes:
    """Return a record from its crashes on: ``numbers`` up to its flags, ``ids`` of write and attempt."""
    task_id, fingerprint = owner.task_id, owner.fingerprint
    task = task_id.packed if isinstance(task_id, PackedId) else _bytes_of_uuid(task_id)
    others = {"task_id": task_id} if task_id and not task else {}
    line = write_line(subject, value, message, steps, others)
    flags = _ASKS if is_reserved or steps or message is not None else 0
    if value is not None:
        flags |= _HAS_VALUE
    if fingerprint is not None:
        flags |= _HAS_FINGERPRINT
    (crashes, attempts, updated_ms, delay_ms), (write, attempt) = numbers, ids
    known, task = fingerprint or _NO_ID, task or _NO_ID
    head = _TAIL.pack(crashes, attempts, updated_ms, delay_ms, flags, write, attempt, known, task)
    return b"%b%b\n%b" % (head, line, b"" if value is None else value.body)


def pack(stored: StoredRecord, write: bytes = NO_WRITE) -> bytes:
    """Return the whole record."""
    record, ids = stored.record, (write, stored.attempt or NO_ATTEMPT)
    updated_ms = record.updated_ms
    delay_ms = 0 if record.deadline_ms is None else record.deadline_ms - updated_ms
    numbers = min(record.crashes, MOST), min(record.attempts, MOST), updated_ms, delay_ms
    rest = record.message, record.value, record.steps, record.reserved
    end = tail(_WHOLE, stored, record, numbers, ids, *rest)
    return START.pack(STARTS[record.state], record.token, record.created_ms) + end


def unpack(
    keys: Keyspace, identity: Identity, packed: bytes, expires_ms: int = 0, *, summary: bool = False
) -> StoredRecord:
    """Return the record; ``summary``: its beginning, without value, message and steps."""
    try:
        (start, token, created_ms, crashes, attempts, updated_ms, delay_ms,
         flags, _, attempt, fingerprint, task) = HEAD.unpack_from(packed)  # fmt: skip
        line, newline, value = packed[HEAD.size :].partition(b"\n")
        if summary:
            line, flags = without_long(line), flags & ~_HAS_VALUE
        elif not newline:
            raise ValueError(line)
        others = _CODEC.decode(line, value if flags & _HAS_VALUE else None)
        requeues = others.pop("requeues", 0)
        if task != _NO_ID:
            others["task_id"] = uuid_text(task)
        state, updated_ms = _STATES[start], updated_ms or created_ms  # KeyError for another version
        deadline_ms = updated_ms + delay_ms if state in LEASED else None
        times, counts = (created_ms, updated_ms, deadline_ms), (crashes, attempts)
        known = fingerprint if flags & _HAS_FINGERPRINT else None
        record = Record(identity, state, token, *times, *counts, known, **others)
    except (struct.error, ValueError, KeyError, TypeError) as error:
        place = f"Redis key {keys.of_record(identity)[0].decode()}"
        raise Unreadable.at(identity, place) from error
    return StoredRecord(record, expires_ms, b"" if attempt == NO_ATTEMPT else attempt, requeues)
