"""Records in a Django database: one row a key, one statement for each verb of a task that meets nobody.

A claim is an INSERT, a settle and a renewal are UPDATEs on condition that the token is still there. Everything else
looks at the row without locking it, decides in Python by the table, and writes on condition that the version is still
the one that it saw. So no isolation level, session or lock is relied on, and nothing is held while a task runs.

A run in its own transaction (:mod:`.sql.atomic`) is not renewed. It has a lock of the database's instead, which ends
with the transaction; a look that finds the lease of such a run over and the lock taken says that the lease is alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError

from celery_idempotent import backoff
from celery_idempotent.django.sql import atomic, browse, upkeep
from celery_idempotent.django.sql.connections import Connections
from celery_idempotent.django.sql.look import Look, claim_free_key, settle_claim
from celery_idempotent.django.sql.reach import missing_bounds
from celery_idempotent.django.sql.rows import digest
from celery_idempotent.errors import InvalidOption, StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import (
    ATTEMPT_BYTES,
    FINGERPRINT_BYTES,
    Counted,
    Identity,
    Page,
    Record,
    Renewal,
    Selection,
    SettleRequest,
    State,
    Stats,
)
from celery_idempotent.stores import table
from celery_idempotent.stores.base import Store, Taken
from celery_idempotent.stores.table import Asked, Verb

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.django.sql.connections import Session

T = TypeVar("T")

#: How long to wait for the end of a COMMIT whose answer was lost.
_COMMIT_SECONDS = 10.0


class DjangoStore(Store):
    """Keeps the records in the database ``alias`` of Django's settings.

    PostgreSQL, MariaDB, MySQL and SQLite, at every isolation level. Nothing connects before the
    first verb. Safe to share between threads and greenlets and to take along over a fork. A verb
    never joins the caller's transaction, except on SQLite, where there can be only one writer.
    """

    supports_transactions = supports_counting = True

    def __init__(self, alias: str = "default") -> None:
        self.alias = alias
        self.outbox_alias = alias
        self.connections = Connections(alias)
        # Imports the backend, and opens nothing. The first verb of a worker's main process may come from a thread, and
        # a child that is forked while a thread imports finds the locks of its modules taken for ever.
        own = None
        with suppress(StoreMisconfigured, ImproperlyConfigured):
            own = self.connections.own()
        if own is not None and not own.settings_dict["AUTOCOMMIT"]:
            raise InvalidOption(
                f"the idempotency store's database {alias!r} has AUTOCOMMIT = False, and what is not committed guards "
                "nothing: leave AUTOCOMMIT on, and use transaction.atomic(), or name another database."
            )

    def __repr__(self) -> str:
        return f"<DjangoStore: {self.alias}>"

    def _at(self, identity: Identity, verb: Callable[[table.Look], T]) -> T:
        return self.connections.run(lambda session: verb(Look(session, identity)))

    def _take_key(self, verb: Verb, identity: Identity, asked: Asked) -> Taken:
        """Claim or reserve a key: one INSERT where a claim meets nobody, or a look at what is there."""
        fields = asked.fields
        if asked.attempt is None or len(asked.attempt) != ATTEMPT_BYTES:
            raise ValueError(f"an attempt has {ATTEMPT_BYTES} bytes")
        if fields["fingerprint"] is not None and len(fields["fingerprint"]) != FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes")
        # PostgreSQL knows no NUL, and a message may bring one.
        fields["task_id"] = fields["task_id"].replace("\0", "\ufffd")
        if verb == "reserve":
            return super()._take_key(verb, identity, asked)

        def work(session: Session) -> Taken:
            found = claim_free_key(session, identity, asked)
            return found if isinstance(found, Record) else self._take(verb, found, asked)

        return self.connections.run(work)

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state: one UPDATE, unless the claim was swept, lost, or is an operator's to settle."""
        own = request.record.state is State.PROCESSING and request.restore and not request.note
        settled = own and self.connections.run(lambda session: settle_claim(session, request))
        return settled or super().settle(request)

    def renew(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Let each lease start anew, all of one length in one statement. A run within its transaction needs none."""
        groups: dict[tuple[int, int], list[Renewal]] = {}
        for each in set(renewals):
            if not atomic.runs_here(each.identity, each.token):
                groups.setdefault((each.lease_ms, each.keep_ms), []).append(each)
        lost: set[Renewal] = set()
        for group in groups.values():
            missed = self.connections.run(partial(upkeep.renew, renewals=group))
            # A sweep may have interrupted them: then the record says whether they go on.
            lost |= {each for each in missed if not self._renew(each)}
        return [each not in lost for each in renewals]

    def _due(self, limit: int) -> Sequence[Identity]:
        return self.connections.run(lambda session: upkeep.find_due(session, limit))

    def prune(self, *, limit: int) -> int:
        """Delete records past their retention, in batches."""
        return upkeep.prune(self.connections, limit=limit)

    def stats(self) -> Stats:
        """Count the unfinished and the failed records."""
        return self.connections.run(browse.stats)

    def list(
        self, selection: Selection, *, cursor: str = "", limit: int = 50, look_at: int = 5000
    ) -> Page:
        """Return about ``limit`` of the selected records: the newest claim first, or the one that is kept longest."""
        return self.connections.run(
            lambda session: browse.list_records(
                session, selection, cursor=cursor, limit=limit, look_at=look_at
            )
        )

    def count(self, outcomes: Mapping[tuple[str, str], int]) -> None:
        """Add to the counters of this hour; nothing that a test has counted.

        That is written by a thread of its own, outside of the test, or when the test's database is gone.
        """
        if not self.connections.tested:
            self.connections.run(lambda session: browse.count(session, outcomes))

    def counts(self, *, hours: int) -> Sequence[Counted]:
        """Return the counters of the last hours."""
        return self.connections.run(lambda session: browse.counts(session, hours=hours))

    def note_sweep(self) -> None:
        """Note that a sweep ended just now."""
        self.connections.run(browse.note_sweep)

    def missing_bounds(self) -> Sequence[str]:
        """Return the options that would bound the waits for a server that stays silent, and are not set.

        Raises:
            StoreMisconfigured: if Django's settings do not have this database.
        """
        return missing_bounds(self.connections.own())

    def now_ms(self) -> int:
        """Return the time by the database's clock."""
        return self.connections.run(browse.database_ms)

    def joined(self) -> bool:
        """Is this SQLite, and the thread in a transaction?"""
        return self.connections.joined()

    def transaction(self, record: Record | None) -> AbstractContextManager[atomic.ClaimTransaction]:
        """Begin the thread's own transaction: the task of this claim runs in it, and is settled in it.

        See :class:`~celery_idempotent.django.sql.atomic.ClaimTransaction`.
        """
        return atomic.transaction(self.connections, record)

    def committed(self, record: Record) -> bool:
        """Wait for the end of the transaction that settled this claim, and tell whether it was committed."""
        give_up, attempt, name = time.monotonic() + _COMMIT_SECONDS, 0, digest(record.identity)
        while self.connections.run(lambda session: upkeep.is_running(session, name, record.token)):
            attempt += 1
            if not backoff.pause(attempt, until=give_up, first=0.02, longest=0.5):
                raise StoreUnavailable(f"the transaction of {record.identity} is not over yet")
        # Asked after the lock was found free: what was committed is visible before its locks are free.
        found = self.get(record.identity)
        done = (
            found is not None
            and found.token == record.token
            and found.state.settled
            and not found.swept
        )
        atomic.resolve_commit(record, committed=done)
        return done

    def abandon(self, record: Record) -> None:
        """End the transaction of this claim, should an exception have left it open."""
        atomic.abandon(self.connections, record)

    def upkeep(self, app: Celery, *, limit: int) -> dict[str, int]:
        """Send what waits in the outbox: the beat task calls this after sweep and prune."""
        from celery_idempotent.django import outbox

        try:
            report = outbox.sweep(app, using=self.alias, limit=limit)
        except DatabaseError as error:
            raise StoreUnavailable(
                f"the outbox in the database {self.alias!r} could not be swept ({type(error).__name__}): is it up, and"
                " migrated?"
            ) from error
        return {"outbox_sent": report.sent, "outbox_failed": report.failed}

    def close(self) -> None:
        """Close the store's own connections; the threads' are Django's."""
        self.connections.close()


def open_django(url: str) -> DjangoStore:
    """Open ``django://`` or ``django://alias``."""
    alias = url.partition("://")[2]
    if any(character in alias for character in "/?#@"):
        raise InvalidOption(
            "the idempotency store's URL names a database of Django's DATABASES and nothing else:"
            " django:// or django://alias"
        )
    return DjangoStore(alias or "default")
