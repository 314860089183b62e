"""Records in a Django database: each verb a short transaction, one statement where PostgreSQL allows.

A verb looks at the rows without locking them, decides in Python, and writes on condition that they
are still what it saw; else it looks again. So it needs no isolation level, no session and no lock
that outlives it, and nothing is held while the task runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar

from django.core.exceptions import ImproperlyConfigured

from celery_idempotent.django.sql import atomic, browse, elsewhere, refusals, shortcuts, upkeep
from celery_idempotent.django.sql.autocommit import commits_by_hand, committing
from celery_idempotent.django.sql.connections import Lines, Session
from celery_idempotent.django.sql.holders import end_holder
from celery_idempotent.django.sql.reach import missing_bounds
from celery_idempotent.django.sql.rows import Row, digest, pack_steps, read, remove, write
from celery_idempotent.errors import InvalidOption, StoreMisconfigured
from celery_idempotent.records import (
    FINGERPRINT_BYTES,
    Answer,
    Claimed,
    ClaimRequest,
    Counted,
    Held,
    Identity,
    Mismatched,
    Page,
    Record,
    Renewal,
    Reservation,
    Reserved,
    Retained,
    Selection,
    State,
    Stats,
    Stored,
    SweepReport,
)
from celery_idempotent.stores import transitions
from celery_idempotent.stores.base import ATTEMPT_BYTES, skew_ms
from celery_idempotent.stores.transitions import Kept

if TYPE_CHECKING:
    from celery import Celery
    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["DjangoStore", "open_django"]

T = TypeVar("T")

_HELD_MS = 1_000


class DjangoStore:
    """Keeps the records in the database ``alias`` of Django's settings.

    PostgreSQL, MariaDB, MySQL and SQLite, at every isolation level. Nothing connects before the
    first verb. Safe to share between threads and greenlets and to take along over a fork. A verb
    never joins the caller's transaction, except on SQLite, where there can be only one writer.
    """

    def __init__(self, alias: str = "default") -> None:
        self.alias = alias
        self.lines = Lines(alias)
        elsewhere.watch()
        # Imports the backend, and opens nothing. The first verb of a worker's main process may come from a thread, and
        # a child that is forked while a thread imports finds the locks of its modules taken for ever.
        with suppress(StoreMisconfigured, ImproperlyConfigured):
            self.lines.own()

    def __repr__(self) -> str:
        return f"<DjangoStore: {self.alias}>"

    def claim(self, request: ClaimRequest) -> Answer:
        """Take the key if nobody holds it."""
        attempt, identity = request.attempt, request.identity
        if len(attempt) != ATTEMPT_BYTES:
            raise ValueError(f"an attempt has {ATTEMPT_BYTES} bytes")
        asked = Record(
            identity=identity,
            state=State.PROCESSING,
            token=0,
            created_ms=0,
            updated_ms=0,
            deadline_ms=request.lease_ms,
            fingerprint=_checked(request.fingerprint),
            task_id=_text(request.task_id),
            worker=_text(request.worker),
            on_stale=request.on_stale,
            message=request.message,
        )

        def decide(session: Session, row: Row) -> Answer:
            taken = transitions.claimed(
                row.kept, _from_now(asked, row), attempt, row.now_ms, request.unanswered
            )
            if not isinstance(taken, Record):
                return taken
            old = None if row.kept is None or taken.token else row.kept.record
            if old is not None and old.attempts and not end_holder(session, old):
                # It may not be ended: its transaction holds locks that our run would wait for.
                return Held(old, left_ms=_HELD_MS)
            life_ms = request.lease_ms + request.keep_ms
            return Claimed(_take(session, row, taken, attempt, life_ms))

        def work(session: Session) -> Answer:
            taken = shortcuts.claim(session, asked, attempt, request.keep_ms)
            if taken is not None:
                return Claimed(taken)
            row = read(session, digest(identity), identity)
            answer = decide(session, row)
            if isinstance(answer, (Held, Mismatched)):
                refusals.note(session, row, answer, request.task_id)
            return answer

        return self.lines.run(work)

    def renew(self, leases: Sequence[Renewal]) -> list[bool]:
        """Let each lease start anew."""
        if not leases:
            return []
        return self.lines.run(lambda session: upkeep.renew(session, leases))

    def settle(
        self,
        record: Record,
        *,
        state: Literal[State.COMPLETED, State.FAILED],
        value: Stored | None,
        keep_ms: int,
        replaced: bool = False,
        restore: bool = True,
    ) -> bool:
        """Write the end state, unless the key has another token by now."""
        keep_ms = max(keep_ms, 1)

        def work(session: Session) -> bool:
            if shortcuts.settle(session, record, state, value, keep_ms, replaced):
                return True
            row = read(session, digest(record.identity), record.identity)
            if row.kept is not None:
                if row.kept.record.token != record.token:
                    return False
                if row.kept.record.state.settled:
                    return True
            elif not restore:
                return False
            end = transitions.settled(
                record, row.kept, state=state, value=value, replaced=replaced, now_ms=row.now_ms
            )
            write(session, row, Kept(end, row.now_ms + keep_ms))
            return True

        return self.lines.run(work)

    def reserve(
        self,
        identity: Identity,
        *,
        task_id: str,
        deadline_ms: int,
        keep_ms: int,
        fingerprint: bytes | None = None,
        message: bytes | None = None,
    ) -> Reservation:
        """Take the key for a message that is about to be published."""
        # Tells who reserves also where the record keeps another's task id.
        attempt = hashlib.blake2b(task_id.encode(), digest_size=ATTEMPT_BYTES).digest()
        asked = Record(
            identity=identity,
            state=State.QUEUED,
            token=0,
            created_ms=0,
            updated_ms=0,
            deadline_ms=deadline_ms,
            attempts=0,
            fingerprint=_checked(fingerprint),
            task_id=_text(task_id),
            reserved=True,
            message=message,
        )

        def decide(session: Session, row: Row) -> Reservation:
            taken = transitions.reserved(row.kept, _from_now(asked, row), attempt, row.now_ms)
            if not isinstance(taken, Record):
                if isinstance(taken, Mismatched):
                    refusals.note(session, row, taken, task_id)
                return taken
            return Reserved(_take(session, row, taken, attempt, deadline_ms + keep_ms))

        return self._about(identity, decide)

    def checkpoint(self, identity: Identity, *, token: int, name: str, value: Stored) -> bool:
        """Add the result of a step."""

        def decide(session: Session, row: Row) -> bool:
            kept = _held(row, token)
            if kept is None or not row.lease_counts:
                return False
            after = transitions.add_step(kept.record, name, value)
            if after is not kept.record:
                # Only the lease: the record may be part of the task's own transaction.
                session.expect(
                    "UPDATE celery_idempotent_lease SET steps = %s, version = version + 1"
                    " WHERE digest = %s AND version = %s",
                    (pack_steps(after.steps), row.digest, row.lease_version),
                )
            return True

        return self._about(identity, decide)

    def mark_delivered(self, identity: Identity, *, token: int) -> bool:
        """Note that the callbacks of the settled task were sent."""
        return self.lines.run(lambda session: shortcuts.mark_delivered(session, identity, token))

    def release(self, identity: Identity, *, token: int, requeue_ms: int | None = None) -> bool:
        """Give the key back."""

        def decide(session: Session, row: Row) -> bool:
            kept = _held(row, token, State.PROCESSING, State.QUEUED)
            if kept is None:
                return False
            after = transitions.given_back(kept, requeue_ms, row.now_ms)
            if after is None:
                remove(session, row)
            else:
                write(session, row, after)
            return True

        def work(session: Session) -> bool:
            if shortcuts.release(session, identity, token, may_requeue=requeue_ms is not None):
                return True
            return decide(session, read(session, digest(identity), identity))

        return self.lines.run(work)

    def interrupt(self, identity: Identity, *, token: int) -> Record | None:
        """Note that a crash took the owner."""

        def decide(session: Session, row: Row) -> Record | None:
            kept = _held(row, token)
            if kept is None:
                return None
            after = transitions.interrupted(kept, row.now_ms)
            write(session, row, after)
            return after.record

        return self._about(identity, decide)

    def get(self, identity: Identity) -> Record | None:
        """Return the record as it is."""

        def work(session: Session) -> Record | None:
            row = read(session, digest(identity), identity, refusals=True)
            if row.kept is None:
                return None
            return replace(row.kept.record, refusals=refusals.unpack(row.refusals))

        return self.lines.run(work)

    def requeue(
        self, identity: Identity, *, deadline_ms: int, token: int | None = None
    ) -> Record | None:
        """Make an unfinished record that has a message QUEUED."""

        def decide(session: Session, row: Row) -> Record | None:
            kept = row.kept
            if kept is None or not transitions.may_requeue(kept.record, token, row.now_ms):
                return None
            after = transitions.requeued(kept, deadline_ms, row.now_ms)
            if after is None:
                return None
            write(session, row, after)
            return after.record

        return self._about(identity, decide)

    def sweep(self, *, limit: int, requeue_ms: int = 60_000) -> SweepReport:
        """Interrupt or requeue what is stale, requeue what nobody sent."""
        return upkeep.sweep(self.lines, limit=limit, requeue_ms=requeue_ms)

    def prune(self, *, limit: int) -> int:
        """Delete records past their retention, in batches."""
        return upkeep.prune(self.lines, limit=limit)

    def forget(
        self, identity: Identity, *, token: int | None = None, state: State | None = None
    ) -> bool:
        """Delete the record; with ``token`` and ``state`` only if it has these."""

        def decide(session: Session, row: Row) -> bool:
            kept = row.kept
            if token is not None and (kept is None or kept.record.token != token):
                return False
            if state is not None and (kept is None or kept.record.state is not state):
                return False
            if row.id is not None:
                remove(session, row, forget=True)
            return row.kept is not None

        return self._about(identity, decide)

    def stats(self) -> Stats:
        """Count the records that have a lease row."""
        return self.lines.run(browse.stats)

    def list(
        self, selection: Selection, *, cursor: str = "", limit: int = 50, look_at: int = 5000
    ) -> Page:
        """Return about ``limit`` of the selected records."""
        return self.lines.run(
            lambda session: browse.list_records(
                session, selection, cursor=cursor, limit=limit, look_at=look_at
            )
        )

    def count(self, outcomes: Mapping[tuple[str, str], int]) -> None:
        """Add to the counters of this hour; nothing that a test has counted.

        That is written by a thread of its own, outside of the test, or when the test's database is gone.
        """
        if self.lines.tested:
            return
        self.lines.run(lambda session: browse.count(session, outcomes))

    def counts(self, *, hours: int) -> Sequence[Counted]:
        """Return the counters of the last hours."""
        return self.lines.run(lambda session: browse.counts(session, hours=hours))

    def note_sweep(self) -> None:
        """Note that a sweep ended just now."""
        self.lines.run(browse.note_sweep)

    def retained(self, identity: Identity) -> Retained | None:
        """Return the settled record as it is committed, and for how long it is kept."""

        def decide(_: Session, row: Row) -> Retained | None:
            if row.kept is None or not row.kept.record.state.settled:
                return None
            record, now = row.kept.record, row.now_ms
            age_ms = max(now - record.updated_ms, 0)
            return Retained(record, age_ms=age_ms, left_ms=row.kept.expires_ms - now)

        # Within the thread's transaction it would see what is not committed yet.
        return None if self.joined() else self._about(identity, decide)

    def missing_bounds(self) -> Sequence[str]:
        """Return the options that would bound the waits for a server that stays silent, and are not set.

        Raises:
            StoreMisconfigured: if Django's settings do not have this database.
        """
        return missing_bounds(self.lines.own())

    def skews_ms(self) -> Sequence[int]:
        """Return how far the database's clock is ahead of this machine's."""
        return [skew_ms(lambda: self.lines.run(browse.database_ms))]

    def joined(self) -> bool:
        """Is this SQLite, and the thread in a transaction?"""
        return self.lines.joined()

    def transaction(self, record: Record | None) -> AbstractContextManager[atomic.AtomicRun]:
        """Begin the thread's own transaction: the task of this claim runs in it, and is settled in it.

        See :class:`~celery_idempotent.django.sql.atomic.AtomicRun`.
        """
        run, own = atomic.transaction(self.lines, record), self.lines.own()
        return _by_itself(own, run) if commits_by_hand(own) else run

    def committed(self, record: Record) -> bool:
        """Wait for the end of the transaction that settled this claim, and tell whether it was committed."""
        name = digest(record.identity)

        def work(session: Session) -> bool:
            # A write waits for the transaction that has the row locked, even if there is nothing to change.
            session.write(
                "UPDATE celery_idempotent_record SET version = version + 1"
                " WHERE digest = %s AND token = %s",
                (name, record.token),
            )
            return bool(
                session.rows(
                    "SELECT 1 FROM celery_idempotent_record"
                    " WHERE digest = %s AND token = %s AND state IN ('C', 'F')",
                    (name, record.token),
                )
            )

        done = self.lines.run(work)
        atomic.answer(record, committed=done)
        return done

    def abandon(self, record: Record) -> None:
        """End the transaction of this claim, should an exception have left it open."""
        atomic.abandon(self.lines, record)

    @property
    def outbox_alias(self) -> str:
        """The database whose outbox :meth:`upkeep` sweeps."""
        return self.alias

    def upkeep(self, app: Celery, *, limit: int) -> dict[str, int]:
        """Send what the outbox holds for this app: its beat task calls this after sweep and prune."""
        # Not before: models are made once the apps are.
        from celery_idempotent.django.outbox import sending as outbox_sending

        return outbox_sending.upkeep(app, using=self.alias, limit=limit)

    def close(self) -> None:
        """Close the store's own connections; the threads' are Django's."""
        self.lines.close()

    def _about(self, identity: Identity, decide: Callable[[Session, Row], T]) -> T:
        """Look at the record, and do what it asks for."""
        name = digest(identity)
        return self.lines.run(lambda session: decide(session, read(session, name, identity)))


def open_django(url: str, *, replicas: int = 0, replica_timeout_ms: int = 0) -> DjangoStore:  # noqa: ARG001
    """Open ``django://`` or ``django://alias``."""
    if replicas:
        raise InvalidOption(
            "idempotency_replicas is for Redis: a database waits for its replicas by its own"
            " settings (synchronous_commit, semi-synchronous replication)."
        )
    alias = url.partition("://")[2]
    if any(character in alias for character in "/?#@"):
        raise InvalidOption(
            "the idempotency store's URL names a database of Django's DATABASES and nothing else:"
            " django:// or django://alias"
        )
    return DjangoStore(alias or "default")


@contextmanager
def _by_itself(
    own: BaseDatabaseWrapper, run: AbstractContextManager[atomic.AtomicRun]
) -> Iterator[atomic.AtomicRun]:
    with committing(own), run as begun:
        yield begun


def _from_now(asked: Record, row: Row) -> Record:
    """Return the record that is asked for, with its times."""
    assert asked.deadline_ms is not None
    now = row.now_ms
    return replace(asked, created_ms=now, updated_ms=now, deadline_ms=now + asked.deadline_ms)


def _take(session: Session, row: Row, new: Record, attempt: bytes, life_ms: int) -> Record:
    """Write a claim or a reservation, with the next token unless it has one."""
    if not new.token:
        new = replace(new, token=max(row.highest + 1, row.now_us))
    requeues = row.kept.requeues if row.kept is not None else 0
    write(session, row, Kept(new, row.now_ms + life_ms, attempt, requeues))
    return new


def _held(row: Row, token: int, *states: State) -> Kept | None:
    """Return what is kept if it has this token and one of the states, PROCESSING by default."""
    kept = row.kept
    if kept is None or kept.record.token != token:
        return None
    return kept if kept.record.state in (states or (State.PROCESSING,)) else None


def _text(value: str) -> str:
    """Return a text that every database takes: PostgreSQL knows no NUL, and a message may bring one."""
    return value.replace("\0", "\ufffd")


def _checked(fingerprint: bytes | None) -> bytes | None:
    if fingerprint is not None and len(fingerprint) != FINGERPRINT_BYTES:
        raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes")
    return fingerprint
