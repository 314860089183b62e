"""The calls that could not have a key, in a table of their own, so that a note never collides with a holder's write.

A note of the claim that is refused goes neither into the record, which a task's own transaction may be about to settle,
nor into the lease, which is renewed: at no isolation level can it make those fail, wait or be lost. A row belongs to
the record of its digest and its birth; what a record that was given back left is written over or pruned.

The last five are one text, the latest first, all of one width, so that a single blind statement adds one and drops the
oldest: without a look, so no two who are refused at once have to begin again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from django.db import Error

from celery_idempotent.django.sql.connections import Session
from celery_idempotent.django.sql.dialects import kind as kind_of
from celery_idempotent.records import Refusal, RefusalKind
from celery_idempotent.stores.refusals import KEPT, KINDS, WHO_BYTES, cut

if TYPE_CHECKING:
    from celery_idempotent.django.sql.rows import Row

#: Kind, length of the task id, task id, milliseconds.
_CALLER = 1 + 3 + WHO_BYTES
_WIDTH = _CALLER + 14

_TABLE = "celery_idempotent_refusals"
_INTO = f"INSERT INTO {_TABLE} (digest, created_ms, entries)"
_UPDATE = (
    " ON CONFLICT (digest) DO UPDATE SET entries = excluded.entries || CASE"
    f" WHEN {_TABLE}.created_ms <> excluded.created_ms THEN ''"
    f" WHEN substr({_TABLE}.entries, 1, {_CALLER}) = substr(excluded.entries, 1, {_CALLER})"
    f" THEN substr({_TABLE}.entries, {_WIDTH + 1}, {_WIDTH * (KEPT - 1)})"
    f" ELSE substr({_TABLE}.entries, 1, {_WIDTH * (KEPT - 1)}) END,"
    " created_ms = excluded.created_ms"
)
_STATEMENTS = {
    # A note may be lost when the server crashes: a refused call must not wait for a disk.
    "postgresql": (
        "WITH t AS MATERIALIZED (SELECT set_config('lock_timeout', '1000', true),"
        " set_config('synchronous_commit', 'off', true))"
        f" {_INTO} SELECT %s, %s, %s FROM t{_UPDATE}"
    ),
    "sqlite": f"{_INTO} VALUES (%s, %s, %s){_UPDATE}",
    "mysql": (
        f"{_INTO} VALUES (%s, %s, %s) ON DUPLICATE KEY UPDATE"
        " entries = concat(VALUES(entries), CASE"
        " WHEN created_ms <> VALUES(created_ms) THEN ''"
        f" WHEN BINARY substr(entries, 1, {_CALLER}) = BINARY substr(VALUES(entries), 1, {_CALLER})"
        f" THEN substr(entries, {_WIDTH + 1}, {_WIDTH * (KEPT - 1)})"
        f" ELSE substr(entries, 1, {_WIDTH * (KEPT - 1)}) END),"
        " created_ms = VALUES(created_ms)"
    ),
}
#: So often, because MariaDB calls it a deadlock when several insert the first one.
_TRIES = 3
#: On SQLite a note waits no longer for the one who may write, who may be a task in its transaction.
_SQLITE_MS = 50


def note_refusal(row: Row, kind: RefusalKind, task_id: str) -> None:
    """Note who could not have the key, unless the database has no time for that."""
    assert row.stored is not None
    session = row.session
    who = cut(task_id).replace("\0", "\ufffd")
    entry = f"{kind[0]}{len(who):03}{who:<{WHO_BYTES}}{row.now_us // 1000:014}"
    params = (row.digest, row.stored.record.created_ms, entry)
    with _short_lock_wait(session):
        for _ in range(_TRIES):
            if _tried(session, params):
                return


def _tried(session: Session, params: tuple[object, ...]) -> bool:
    """Write a note; ``False`` if another try may do better."""
    try:
        session.execute(session.words.lock_wait + _STATEMENTS[session.words.vendor], params)
    except Error as error:
        trouble = kind_of(error, session.words.vendor)
        if trouble in ("lost", "misconfigured"):
            raise
        return trouble not in ("conflict", "duplicate")
    return True


def split_refusals(entries: str | None) -> tuple[Refusal, ...]:
    """Return what is noted, the latest last."""
    found = []
    for at in range(0, len(entries or ""), _WIDTH):
        entry = (entries or "")[at : at + _WIDTH]
        kind = KINDS.get(entry[0])
        if kind is not None:
            who = entry[4 : 4 + int(entry[1:4])]
            found.append(Refusal(kind=kind, at_ms=int(entry[_CALLER:]), task_id=who))
    return tuple(reversed(found))


@contextlib.contextmanager
def _short_lock_wait(session: Session) -> Iterator[None]:
    if session.words.vendor != "sqlite":
        yield
        return
    ((lock_wait,),) = session.rows("PRAGMA busy_timeout")
    session.rows(f"PRAGMA busy_timeout = {min(lock_wait, _SQLITE_MS)}")
    try:
        yield
    finally:
        session.rows(f"PRAGMA busy_timeout = {lock_wait}")
