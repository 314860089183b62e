"""Renewing, sweeping and pruning: what works on many rows at a time, a statement for each batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

from celery_idempotent.django.sql.connections import Connections, Session
from celery_idempotent.django.sql.rows import UNFINISHED, digest
from celery_idempotent.records import Identity, Renewal

#: How many rows one statement of a prune deletes: see docs/sql.md for what others cost.
PRUNE_BATCH = 1_000


def renew(session: Session, renewals: Sequence[Renewal]) -> set[Renewal]:
    """Renew leases of one length; return those that are not renewed. A renewal touches no index."""
    # In one order: two processes that renew the same leases in different orders would deadlock.
    claims = sorted((digest(each.identity), each.token) for each in renewals)
    now, (lease_ms, keep_ms) = session.dialect.now_ms, (renewals[0].lease_ms, renewals[0].keep_ms)
    same = " OR ".join(["(digest = %s AND token = %s)"] * len(claims))
    renewed = session.execute(
        f"UPDATE celery_idempotent_record SET deadline_ms = {now} + %s, due_ms = {now} + %s, expires_ms = {now} + %s,"
        f" version = version + 1 WHERE ({same}) AND state = 'P' AND expires_ms > {now}",
        (lease_ms, lease_ms, lease_ms + keep_ms, *itertools.chain(*claims)),
    )
    if renewed == len(claims):
        return set()
    if len(claims) == 1:
        return set(renewals)
    return set().union(*(renew(session, [each]) for each in renewals))


def find_due(session: Session, limit: int) -> list[Identity]:
    """Return the keys that are past their deadline; of the index of unfinished keys all is read, up to the limit."""
    now, key = session.dialect.now_ms, session.dialect.key
    found = session.rows(
        f"SELECT namespace, scope, {key} FROM celery_idempotent_record WHERE {UNFINISHED}"
        f" AND state IN ('P', 'Q') AND due_ms <= {now} AND expires_ms > {now} LIMIT %s",
        (limit,),
    )
    return [Identity(namespace=namespace, scope=scope, key=key) for namespace, scope, key in found]


def is_running(session: Session, name: bytes, token: int) -> bool:
    """Is a session, of whatever process, within the transaction of this claim's run?"""
    return bool(
        session.rows(
            "SELECT 1 FROM celery_idempotent_record r"
            f" WHERE digest = %s AND token = %s AND {session.dialect.running}",
            (name, token),
        )
    )


def prune(connections: Connections, *, limit: int) -> int:
    """Delete records past their retention, found by the time when they were expected to be.

    What lives longer than expected is given its new time and left: a renewal does not write ``prune_ms``, so its index
    is not written at each beat.
    """
    gone = 0
    while gone < limit:
        batch = min(limit - gone, PRUNE_BATCH)
        looked, deleted = connections.run(partial(_prune, batch=batch))
        gone += deleted
        if looked < batch:
            break
    return gone


def _prune(session: Session, batch: int) -> tuple[int, int]:
    """Do one batch; return how many rows were looked at, and how many are gone."""
    words = session.dialect
    now = words.now_ms
    found: list[tuple[Any, ...]] = session.rows(
        f"SELECT digest, token, CASE WHEN expires_ms > {now} THEN 0 WHEN state = 'P' AND {words.running} THEN 2"
        f" ELSE 1 END FROM celery_idempotent_record r WHERE prune_ms <= {now} ORDER BY prune_ms LIMIT %s",
        (batch,),
    )
    over, alive, running = (
        sorted(bytes(name) for name, _, kind in found if kind == wanted) for wanted in (1, 0, 2)
    )
    deleted = 0
    if over:
        # Before the rows, so that no crash in between loses a token.
        session.execute(words.raise_mark, (max(token for _, token, _ in found),))
        deleted = session.execute(
            f"DELETE FROM celery_idempotent_record WHERE digest IN ({_marks(over)}) AND expires_ms <= {now}"
            f" AND prune_ms <= {now}",
            over,
        )
    for names, end in ((alive, "expires_ms"), (running, f"{now} + 60000")):
        if names:
            session.execute(
                f"UPDATE celery_idempotent_record SET prune_ms = {end} WHERE digest IN ({_marks(names)})",
                names,
            )
    return len(found), deleted


def _marks(values: Sequence[object]) -> str:
    return ", ".join(["%s"] * len(values))
