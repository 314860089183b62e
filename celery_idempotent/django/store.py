"""Records in a Django database: each verb a short transaction, one statement where PostgreSQL allows.

A verb looks at the rows without locking them, decides in Python, and writes on condition that they
are still what it saw; else it looks again. So it needs no isolation level, no session and no lock
that outlives it, and nothing is held while the task runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, TypeVar

from django.core.exceptions import ImproperlyConfigured

from celery_idempotent.django.sql import atomic, browse, elsewhere, shortcuts, upkeep
from celery_idempotent.django.sql.columns import ENDED, digest
from celery_idempotent.django.sql.connections import Lines, RowLocked, Session
from celery_idempotent.django.sql.reach import missing_bounds
from celery_idempotent.django.sql.rows import read
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
    Retained,
    Selection,
    Settled,
    Stats,
    SweepReport,
)
from celery_idempotent.stores.base import ATTEMPT_BYTES
from celery_idempotent.stores.deciding import Asked, DecidingStore, Done, Look, asked_by, report
from celery_idempotent.stores.table import Verb

if TYPE_CHECKING:
    from celery import Celery

T = TypeVar("T")


class DjangoStore(DecidingStore):
    """Keeps the records in the database ``alias`` of Django's settings.

    PostgreSQL, MariaDB, MySQL and SQLite, at every isolation level. Nothing connects before the
    first verb. Safe to share between threads and greenlets and to take along over a fork. A verb
    never joins the caller's transaction, except on SQLite, where there can be only one writer.
    """

    supports_transactions = supports_counting = True

    def __init__(self, alias: str = "default") -> None:
        self.alias = alias
        self.outbox_alias = alias
        self.lines = Lines(alias)
        elsewhere.watch()
        # Imports the backend, and opens nothing. The first verb of a worker's main process may come from a thread, and
        # a child that is forked while a thread imports finds the locks of its modules taken for ever.
        own = None
        with suppress(StoreMisconfigured, ImproperlyConfigured):
            own = self.lines.own()
        if own is not None and not own.settings_dict["AUTOCOMMIT"]:
            raise InvalidOption(
                f"the idempotency store's database {alias!r} has AUTOCOMMIT = False, and what is not committed guards "
                "nothing: leave AUTOCOMMIT on, and use transaction.atomic(), or name another database."
            )

    def __repr__(self) -> str:
        return f"<DjangoStore: {self.alias}>"

    def _at(self, identity: Identity, verb: Callable[[Look], T]) -> T:
        name = digest(identity)
        return self.lines.run(lambda session: verb(read(session, name, identity)))

    def _check(self, asked: Asked) -> None:
        fields = asked.fields
        if asked.attempt is None or len(asked.attempt) != ATTEMPT_BYTES:
            raise ValueError(f"an attempt has {ATTEMPT_BYTES} bytes")
        if fields["fingerprint"] is not None and len(fields["fingerprint"]) != FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes")
        for name, value in fields.items():
            if isinstance(value, str):
                # PostgreSQL knows no NUL, and a message may bring one.
                fields[name] = value.replace("\0", "\ufffd")

    def claim(self, request: ClaimRequest) -> Answer:
        """Take the key if nobody holds it."""
        asked, identity = asked_by(request), request.identity
        self._check(asked)

        def work(session: Session) -> Record | Held | Settled | Mismatched:
            taken = shortcuts.claim(session, asked)
            if isinstance(taken, Record):
                return taken
            look = taken or read(session, digest(identity), identity)
            return self._take("claim", look, asked)

        answer = self.lines.run(work)
        return Claimed(answer) if isinstance(answer, Record) else answer

    def _ask(self, verb: Verb, identity: Identity, asked: Asked) -> Done:
        shortcut = shortcuts.SHORTCUTS.get(verb)

        def work(session: Session) -> Done:
            done = None if shortcut is None else shortcut(session, identity, asked)
            if done is not None:
                return done
            look = read(session, digest(identity), identity)
            gone = look.stored is None and look.id is not None
            if verb == "forget" and gone and asked.token is None and asked.state is None:
                # What is left of a record that was given back, or has expired.
                look.remove(forget=True)
            return self._do(verb, look, asked)

        return self.lines.run(work)

    def renew(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Let each lease start anew."""
        if not renewals:
            return []
        renewed = self.lines.run(lambda session: upkeep.renew(session, renewals))
        # A sweep may have interrupted the others; then their records' rows are written, too.
        return [done or self._renew(each) for done, each in zip(renewed, renewals, strict=True)]

    def retained(self, identity: Identity) -> Retained | None:
        """Return the settled record as it is committed, and for how long it is kept."""
        # Within the thread's transaction it would see what is not committed yet.
        return None if self.joined() else super().retained(identity)

    def sweep(self, *, limit: int, requeue_ms: int = 60_000) -> SweepReport:
        """Interrupt or requeue what is stale, requeue what nobody sent; one transaction for each."""
        due = self.lines.run(lambda session: upkeep.find_due(session, limit + 1))
        more, due = len(due) > limit, due[:limit]
        # Sweeps at once shall not all wait for the same row, one after another.
        random.shuffle(due)
        swept = [self._sweep_lease(name, requeue_ms) for name in due]
        return report([record for record in swept if record], more=more)

    def _sweep_lease(self, name: bytes, requeue_ms: int) -> Record | None:
        def work(session: Session) -> Record | None:
            look = read(session, name)
            if look.lease_counts:
                return self._sweep(look, requeue_ms)
            look.delete_lease()  # left behind by a task that settled in its own transaction
            return None

        # RowLocked: a task that froze between the settle in its own transaction and the COMMIT. The next claim ends its
        # session; nobody else's record shall wait for that.
        with suppress(RowLocked):
            return self.lines.run(work)
        return None

    def prune(self, *, limit: int) -> int:
        """Delete records past their retention, in batches."""
        return upkeep.prune(self.lines, limit=limit)

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

    def missing_bounds(self) -> Sequence[str]:
        """Return the options that would bound the waits for a server that stays silent, and are not set.

        Raises:
            StoreMisconfigured: if Django's settings do not have this database.
        """
        return missing_bounds(self.lines.own())

    def now_ms(self) -> int:
        """Return the time by the database's clock."""
        return self.lines.run(browse.database_ms)

    def joined(self) -> bool:
        """Is this SQLite, and the thread in a transaction?"""
        return self.lines.joined()

    def transaction(self, record: Record | None) -> AbstractContextManager[atomic.ClaimTransaction]:
        """Begin the thread's own transaction: the task of this claim runs in it, and is settled in it.

        See :class:`~celery_idempotent.django.sql.atomic.ClaimTransaction`.
        """
        return atomic.transaction(self.lines, record)

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
                    f" WHERE digest = %s AND token = %s AND {ENDED}",
                    (name, record.token),
                )
            )

        done = self.lines.run(work)
        atomic.answer(record, committed=done)
        return done

    def abandon(self, record: Record) -> None:
        """End the transaction of this claim, should an exception have left it open."""
        atomic.abandon(self.lines, record)

    def upkeep(self, app: Celery, *, limit: int) -> dict[str, int]:
        """Send what waits in the outbox: the beat task calls this after sweep and prune."""
        from celery_idempotent.django.outbox import sending  # models are made once the apps are

        return sending.upkeep(app, using=self.alias, limit=limit)

    def close(self) -> None:
        """Close the store's own connections; the threads' are Django's."""
        self.lines.close()


def open_django(url: str) -> DjangoStore:
    """Open ``django://`` or ``django://alias``."""
    alias = url.partition("://")[2]
    if any(character in alias for character in "/?#@"):
        raise InvalidOption(
            "the idempotency store's URL names a database of Django's DATABASES and nothing else:"
            " django:// or django://alias"
        )
    return DjangoStore(alias or "default")
