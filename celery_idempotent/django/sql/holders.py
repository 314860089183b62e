"""Ends the database session of an atomic run whose lease has run out.

An atomic run takes an advisory lock that is named after its claim, in its transaction. A later claim of the key finds
the session by this lock and has the server end it: else a frozen worker could thaw and commit after its successor::

    worker A   BEGIN, lock "claim 7" ─ frozen ──────────────────────────── COMMIT fails: its session is gone
    worker B                       lease over ─ end the session of "claim 7" ─ claim 8 ─ run
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from django.db import Error

from celery_idempotent.django.sql.dialects import error_code

if TYPE_CHECKING:
    from celery_idempotent.django.sql.connections import Session
    from celery_idempotent.records import Identity, Record

logger = logging.getLogger("celery_idempotent.django.holders")  # the docs name it

#: How long to wait until a session that is being ended is gone.
_END_SECONDS = 2.0
#: Claims for which this process has logged that their session cannot be ended: duplicates try again and again.
_warned: deque[tuple[Identity, int]] = deque(maxlen=1000)
#: Error codes of PostgreSQL and MySQL: no right to end this session; the session is gone already.
_NOT_ALLOWED, _GONE = ("42501", 1095), (1094,)


def lock_number(name: bytes, token: int) -> int:
    """Return the claim as the name of an advisory lock of PostgreSQL."""
    packed = hashlib.blake2b(name + b"%d" % token, digest_size=8, person=b"idempotent").digest()
    return int.from_bytes(packed, "big", signed=True)


def lock_name(session: Session, name: bytes, token: int) -> str:
    """Return the claim as the name of a lock of MySQL. All databases of a server share these names."""
    database = str(session.connection.settings_dict["NAME"]).encode()
    packed = hashlib.blake2b(name + b"%d %b" % (token, database), digest_size=16)
    return f"celery_idempotent:{packed.hexdigest()}"


def end_holder(session: Session, name: bytes, record: Record) -> bool:
    """End the session whose transaction runs this claim, if any; ``False`` if this user may not.

    ``name`` is the digest of its key. Once the session is ended, the verb begins again: it may have committed a moment
    before.
    """
    token = record.token
    if session.inside:
        return True  # this transaction wrote the record, and no other session sees it
    if session.words.vendor == "postgresql":
        key = lock_number(name, token) & (2**64 - 1)
        where = (
            " FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            f" AND classid::bigint = {key >> 32} AND objid::bigint = {key & (2**32 - 1)}"
        )
        look, end = f"SELECT pid{where}", f"SELECT pg_terminate_backend(pid){where}"
    elif session.words.vendor == "mysql":
        lock = lock_name(session, name, token)
        look, end = (
            f"SELECT id FROM (SELECT is_used_lock('{lock}') AS id) u WHERE id > 0",
            "KILL {}",
        )
    else:
        # SQLite has one writer at a time: this transaction is the one, so no other run is in the middle of its own.
        return True
    holders = session.rows(look)
    if not holders:
        return True
    try:
        for (holder,) in holders:
            session.execute(end.format(holder))
    except Error as error:
        code = error_code(error)
        if code in _NOT_ALLOWED:
            return _not_ended(record, f"this user may not end it ({_first_line(error)})")
        if code not in _GONE:
            raise
    give_up = time.monotonic() + _END_SECONDS
    while session.rows(look):
        if time.monotonic() > give_up:
            return _not_ended(record, "it was told to end, and is there still")
        time.sleep(0.01)
    return session.again()


def _not_ended(record: Record, why: str) -> bool:
    """Log it, once per claim: until an operator acts or the session ends, the key stays held."""
    claim = (record.identity, record.token)
    if claim not in _warned:
        _warned.append(claim)
        logger.warning(
            "idempotency: %s stays held: its lease is over, but the database session of task %s at %s is still in the "
            "transaction, and %s",
            record.identity,
            record.task_id,
            record.worker,
            why,
            extra={
                "idempotency_outcome": "holder_not_ended",
                "idempotency_key": record.identity.key,
            },
        )
    return False


def _first_line(error: Error) -> str:
    return str(error).strip().partition("\n")[0]
