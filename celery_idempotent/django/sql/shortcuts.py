"""The verbs of almost every task as one statement: claim of a free key, settle, release.

Each answers only where there is nothing to decide, and else leaves the verb to the long way: a
look, a decision, a conditional write. Only PostgreSQL can write two tables in one statement;
elsewhere there is the long way alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from celery_idempotent.django.sql.connections import Session
from celery_idempotent.django.sql.dialects import LOCK_TIMEOUT_MS
from celery_idempotent.django.sql.rows import LETTERS, PRUNE_SLACK_MS, RELEASED, digest
from celery_idempotent.records import Identity, Record, State
from celery_idempotent.stores.cas import Done
from celery_idempotent.stores.machine import Asked, decide
from celery_idempotent.stores.table import Verb
from celery_idempotent.stores.values import pack_value

__all__ = ["SHORTCUTS", "claim"]


def claim(session: Session, asked: Asked) -> Record | None:
    """Claim a key that has no row; ``None`` if it has one."""
    if session.words.vendor != "postgresql":
        return None
    fields, lease_ms = asked.fields, asked.delay_ms or 0
    identity, life_ms = fields["identity"], lease_ms + asked.keep_ms
    name, letter = digest(identity), LETTERS[State.PROCESSING]
    found = session.rows(
        f"{_clock(session)}, r AS ("
        "INSERT INTO celery_idempotent_record (digest, namespace, scope, key, token, created_ms,"
        " updated_ms, expires_ms, prune_ms, version, crashes, attempts, state, reserved, replaced,"
        " delivered, fingerprint, task_id)"
        " SELECT %s, %s, %s, %s, greatest(us, 1 + coalesce("
        "(SELECT max(token) FROM celery_idempotent_highwatermark), 0)),"
        " us / 1000, us / 1000, us / 1000 + %s, us / 1000 + %s, 0, 0, 1, %s, false, false, false,"
        " %s, %s FROM t"
        # Not left to the conflict alone: that waits for the transaction that is writing the row.
        " WHERE NOT EXISTS (SELECT 1 FROM celery_idempotent_record WHERE digest = %s)"
        " ON CONFLICT (digest) DO NOTHING"
        " RETURNING digest, token, created_ms, expires_ms"
        "), l AS ("
        "INSERT INTO celery_idempotent_lease AS lease (digest, token, deadline_ms, due_ms,"
        " expires_ms, version, requeues, state, on_stale, attempt, worker, message)"
        " SELECT digest, token, created_ms + %s, created_ms + %s, expires_ms, 0, 0, %s, %s, %s,"
        " %s, %s FROM r"
        # One that was left behind.
        " ON CONFLICT (digest) DO UPDATE SET token = excluded.token,"
        " deadline_ms = excluded.deadline_ms, due_ms = excluded.due_ms,"
        " expires_ms = excluded.expires_ms, version = lease.version + 1, requeues = 0,"
        " state = excluded.state, on_stale = excluded.on_stale, attempt = excluded.attempt,"
        " worker = excluded.worker, message = excluded.message, steps = NULL"
        ") SELECT token, created_ms FROM r",
        (
            name, identity.namespace, identity.scope, identity.key,
            life_ms, life_ms, letter, fields["fingerprint"], fields["task_id"], name,
            lease_ms, lease_ms, letter, fields["on_stale"][0], asked.attempt, fields["worker"],
            fields["message"],
        ),
    )  # fmt: skip
    if not found:
        return None
    ((token, now_ms),) = found
    return decide("claim", None, asked, now_ms).after(None, asked, now_ms, token).record


def _settle(session: Session, identity: Identity, asked: Asked) -> Done | None:
    """Complete a claim that is unfinished and not over; ``None`` for any other, and for a failure."""
    state, value, keep_ms = asked.fields["state"], asked.fields["value"], asked.keep_ms
    if session.words.vendor != "postgresql" or state is not State.COMPLETED or asked.state:
        return None
    found = session.rows(
        f"{_clock(session)}, r AS ("
        "UPDATE celery_idempotent_record AS record SET state = %s, value = %s, replaced = %s,"
        " reserved = false, updated_ms = us / 1000, expires_ms = us / 1000 + %s,"
        " prune_ms = least(prune_ms, us / 1000 + %s), version = record.version + 1"
        " FROM t, celery_idempotent_lease AS lease"
        " WHERE record.digest = %s AND record.token = %s AND record.state IN ('P', 'I', 'Q')"
        " AND lease.digest = record.digest AND lease.token = record.token"
        " AND lease.expires_ms > us / 1000 RETURNING record.digest"
        "), l AS (DELETE FROM celery_idempotent_lease USING r"
        " WHERE celery_idempotent_lease.digest = r.digest) SELECT 1 FROM r",
        (
            LETTERS[state],
            None if value is None else pack_value(value),
            asked.fields["replaced"],
            keep_ms,
            keep_ms + PRUNE_SLACK_MS,
            digest(identity),
            asked.token,
        ),
    )
    return Done("settled") if found else None


def _release(session: Session, identity: Identity, asked: Asked) -> Done | None:
    """Give back a claim without steps; ``None`` for any other."""
    if session.words.vendor != "postgresql":
        return None
    found = session.rows(
        f"{_clock(session)}, r AS ("
        "UPDATE celery_idempotent_record AS record SET state = %s, value = NULL,"
        " expires_ms = us / 1000, prune_ms = least(prune_ms, us / 1000 + %s),"
        " version = record.version + 1"
        " FROM t, celery_idempotent_lease AS lease"
        " WHERE record.digest = %s AND record.token = %s AND record.state IN ('P', 'Q')"
        " AND NOT ((record.reserved OR lease.message IS NOT NULL) AND %s)"
        " AND lease.digest = record.digest AND lease.token = record.token"
        " AND lease.steps IS NULL AND lease.expires_ms > us / 1000 RETURNING record.digest"
        "), l AS (DELETE FROM celery_idempotent_lease USING r"
        " WHERE celery_idempotent_lease.digest = r.digest) SELECT 1 FROM r",
        (RELEASED, PRUNE_SLACK_MS, digest(identity), asked.token, asked.delay_ms is not None),
    )
    return Done("released") if found else None


def _mark_delivered(session: Session, identity: Identity, asked: Asked) -> Done:
    """Mark a settled record, on any database."""
    marked = session.write(
        "UPDATE celery_idempotent_record SET delivered = %s, version = version + 1"
        " WHERE digest = %s AND token = %s AND state IN ('C', 'F')"
        f" AND expires_ms > {session.words.now_ms}",
        (True, digest(identity), asked.token),
    )
    return Done("marked" if marked == 1 else "lost")


#: Verbs that are one statement, where this is all that they need; ``None`` leaves one to the long way.
SHORTCUTS: Mapping[Verb, Callable[[Session, Identity, Asked], Done | None]] = {
    "settle": _settle,
    "release": _release,
    "mark_delivered": _mark_delivered,
}


def _clock(session: Session) -> str:
    """Open a statement with the time, read once, and with a bound to its waits for locks.

    What is set is local to the statement's own transaction. It works within the statement that sets
    it, because the row that is to be locked is found by way of this one.
    """
    return (
        f"WITH t AS MATERIALIZED (SELECT {session.words.now_us} AS us,"
        f" set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true))"
    )
