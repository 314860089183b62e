"""Renewing, sweeping and pruning: what works on many rows at a time, in short transactions."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from celery_idempotent.django.sql.columns import ColumnValues, digest
from celery_idempotent.django.sql.connections import Lines, Session
from celery_idempotent.records import Renewal

#: How many rows one transaction of a prune deletes: see docs/sql.md for what others cost.
PRUNE_BATCH = 1_000

_RENEW = (
    "UPDATE celery_idempotent_lease SET deadline_ms = {now} + %s, due_ms = {now} + %s,"
    " expires_ms = {now} + %s, version = version + 1"
    " WHERE digest = %s AND token = %s AND state = 'P' AND expires_ms > {now}"
)


def renew(session: Session, leases: Sequence[Renewal]) -> list[bool]:
    """Let each lease start anew; only lease rows are written, which no task's transaction holds.

    A process may have frozen while it wrote one of them. That one is not renewed, and raises once all others are: to be
    tried again. So the rows that nobody has locked come first, without a wait::

        leases a, b, c; b is locked     a, c: SKIP LOCKED, renewed at once ─ b: waits, lock_timeout ─ raises
    """
    # In one order: two processes that renew the same leases in different orders would deadlock.
    distinct = [lease for _, lease in sorted({_claim(lease): lease for lease in leases}.items())]
    if session.words.vendor == "sqlite":
        # One writer: its lock is the only one there is to wait for.
        with session.transaction():
            renewed = {_claim(lease) for lease in distinct if _renewed(session, lease)}
        return [_claim(lease) in renewed for lease in leases]
    renewed = _renew_free(session, distinct) if len(distinct) > 1 else set()
    rest = [lease for lease in distinct if _claim(lease) not in renewed]
    # The first row that stays locked ends this; in random order, so that the same others are not always left out.
    random.shuffle(rest)
    renewed.update(_claim(lease) for lease in rest if _renewed(session, lease))
    return [_claim(lease) in renewed for lease in leases]


def find_due(session: Session, limit: int) -> list[bytes]:
    """Return the digests of leases that are past their end, in no order, so that sweeps at once meet rarely."""
    now = session.words.now_ms
    found = session.rows(
        "SELECT digest FROM celery_idempotent_lease"
        f" WHERE due_ms <= {now} AND expires_ms > {now} ORDER BY due_ms LIMIT %s",
        (limit,),
    )
    return [bytes(name) for (name,) in found]


def prune(lines: Lines, *, limit: int) -> int:
    """Delete records past their retention, found by the time when they were expected to be.

    What lives longer than expected is given its new time and left. ``prune_ms`` is that expected time: a renewal does
    not write it, since it writes the lease row alone, and so the index of ``prune_ms`` is not written at each beat.
    """
    gone = 0
    while gone < limit:
        batch = min(limit - gone, PRUNE_BATCH)
        looked, deleted = lines.run(lambda session, batch=batch: _prune(session, batch))  # type: ignore[misc]
        gone += deleted
        if looked < batch:
            break
    return gone


def _claim(lease: Renewal) -> tuple[bytes, int]:
    return digest(lease.identity), lease.token


def _renewed(session: Session, lease: Renewal) -> bool:
    """Renew one lease, if need be after a wait."""
    life_ms = lease.lease_ms + lease.keep_ms
    params = (lease.lease_ms, lease.lease_ms, life_ms, *_claim(lease))
    return session.write(_RENEW.format(now=session.words.now_ms), params) == 1


def _renew_free(session: Session, leases: Sequence[Renewal]) -> set[tuple[bytes, int]]:
    """Renew the leases whose rows are not locked, without a wait; return them."""
    if session.words.vendor == "postgresql":
        return _renew_at_once(session, leases)
    if not session.connection.features.has_select_for_update_skip_locked:
        return set()
    names = [digest(lease.identity) for lease in leases]
    with session.transaction():
        found = session.rows(
            "SELECT digest FROM celery_idempotent_lease"
            f" WHERE digest IN ({_marks(names)}) FOR UPDATE SKIP LOCKED",
            names,
        )
        free = {bytes(name) for (name,) in found}
        return {
            _claim(lease)
            for lease in leases
            if digest(lease.identity) in free and _renewed(session, lease)
        }


def _renew_at_once(session: Session, leases: Sequence[Renewal]) -> set[tuple[bytes, int]]:
    values = ", ".join(["(%s::bytea, %s::bigint, %s::bigint, %s::bigint)"] * len(leases))
    params: list[object] = []
    for lease in leases:
        params += (*_claim(lease), lease.lease_ms, lease.lease_ms + lease.keep_ms)
    found = session.rows(
        f"WITH t AS MATERIALIZED (SELECT {session.words.now_ms} AS ms),"
        f" v (digest, token, lease_ms, life_ms) AS MATERIALIZED (VALUES {values}),"
        " free AS MATERIALIZED (SELECT lease.digest FROM celery_idempotent_lease AS lease"
        " WHERE lease.digest IN (SELECT digest FROM v) FOR NO KEY UPDATE SKIP LOCKED)"
        " UPDATE celery_idempotent_lease AS lease SET deadline_ms = ms + v.lease_ms,"
        " due_ms = ms + v.lease_ms, expires_ms = ms + v.life_ms, version = lease.version + 1"
        " FROM t, v, free WHERE lease.digest = free.digest"
        " AND lease.digest = v.digest AND lease.token = v.token AND lease.state = 'P'"
        " AND lease.expires_ms > ms RETURNING lease.digest, lease.token",
        params,
    )
    return {(bytes(name), token) for name, token in found}


def _prune(session: Session, batch: int) -> tuple[int, int]:
    """Do one batch; return how many rows were looked at, and how many are gone."""
    words = session.words
    features, lock = session.connection.features, ""
    if features.has_select_for_update:
        lock = " FOR UPDATE"
        if features.has_select_for_update_skip_locked:
            lock += " SKIP LOCKED"
    with session.transaction():
        ((now,),) = session.rows(f"SELECT {words.now_ms}")
        found = session.rows(
            "SELECT id, digest, token, state, expires_ms FROM celery_idempotent_record"
            f" WHERE prune_ms <= %s ORDER BY prune_ms LIMIT %s{lock}",
            (now, batch),
        )
        if not found:
            return 0, 0
        live = _lives(session, [row for row in found if row[3] in "QPI"])
        ends = {
            row_id: live.get((bytes(name), token), expires_ms)
            for row_id, name, token, _, expires_ms in found
        }
        for row_id, end in ends.items():
            if end > now:
                session.write(
                    "UPDATE celery_idempotent_record SET prune_ms = %s WHERE id = %s",
                    (end, row_id),
                )
        over = [row for row in found if ends[row[0]] <= now]
        if over:
            _delete(session, over)
    return len(found), len(over)


def _lives(session: Session, rows: Iterable[ColumnValues]) -> dict[tuple[bytes, int], int]:
    """Return when the leases of these unfinished records say that they are over."""
    names = [bytes(row[1]) for row in rows]
    if not names:
        return {}
    found = session.rows(
        "SELECT digest, token, expires_ms FROM celery_idempotent_lease"
        f" WHERE digest IN ({_marks(names)})",
        names,
    )
    return {(bytes(name), token): expires_ms for name, token, expires_ms in found}


def _delete(session: Session, rows: Sequence[ColumnValues]) -> None:
    ids, names = [row[0] for row in rows], [bytes(row[1]) for row in rows]
    tables = (("record", "id", ids), ("lease", "digest", names))
    for table, column, values in tables:
        name = f"celery_idempotent_{table}"
        statement = f"DELETE FROM {name} WHERE {column} IN ({_marks(values)})"
        if session.words.vendor == "mysql":
            # Left to itself it may look at every row of the table, and wait for those of others.
            due = f"SELECT %s AS {column}" + " UNION ALL SELECT %s" * (len(values) - 1)
            statement = (
                f"DELETE gone FROM ({due}) AS due STRAIGHT_JOIN {name} AS gone"
                f" ON gone.{column} = due.{column}"
            )
        session.write(statement, values)
    session.write(session.words.raise_mark, (max(row[2] for row in rows),))


def _marks(values: Sequence[object]) -> str:
    return ", ".join(["%s"] * len(values))
