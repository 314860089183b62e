"""Who is at work in a transaction, told by a lock that is named after the claim; and how such a session is ended."""

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

__all__ = ["end_holder", "lock_name", "lock_number"]

logger = logging.getLogger("celery_idempotent.django.holders")  # the docs name it

#: How long a session that was told to end is waited for.
_END_SECONDS = 2.0
#: Claims whose session could not be ended, as this process has said already: a duplicate asks again and again.
_told: deque[tuple[Identity, int]] = deque(maxlen=1000)
#: What MySQL and PostgreSQL say to someone who may not end a session, and to one that is too late.
_NOT_ALLOWED, _GONE = ("42501", 1095), (1094,)


def lock_number(name: bytes, token: int) -> int:
    """Return the claim as the name of an advisory lock of PostgreSQL."""
    packed = hashlib.blake2b(name + b"%d" % token, digest_size=8, person=b"idempotent").digest()
    return int.from_bytes(packed, "big", signed=True)


def lock_name(session: Session, name: bytes, token: int) -> str:
    """Return the claim as the name of a lock of MySQL, whose names are the whole server's."""
    database = str(session.connection.settings_dict["NAME"]).encode()
    packed = hashlib.blake2b(name + b"%d %b" % (token, database), digest_size=16)
    return f"celery_idempotent:{packed.hexdigest()}"


def end_holder(session: Session, name: bytes, record: Record) -> bool:
    """End the session whose transaction runs this claim, if any; ``name`` is the digest of its key.

    ``False`` if it may not be ended. If one was, the verb begins again: it may have committed.
    """
    token = record.token
    if session.inside:
        return True  # nobody else sees the record
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
        # One writer: whoever could write this claim's row knows that nobody else is at it.
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
    """Tell operators, once: without them nothing happens until the session ends."""
    claim = (record.identity, record.token)
    if claim not in _told:
        _told.append(claim)
        logger.warning(
            "idempotency: %s stays held: its lease is over, but the database session of task %s at %s is still in the "
            "transaction, and %s",
            record.identity,
            record.task_id,
            record.worker,
            why,
            extra={"event": "holder_not_ended", "key": str(record.identity)},
        )
    return False


def _first_line(error: Error) -> str:
    return str(error).strip().partition("\n")[0]
