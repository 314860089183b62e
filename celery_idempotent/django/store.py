"""Records in a Django database: one row a key, one statement for each verb of a task that meets nobody.

A claim is an INSERT, a settle and a renewal are UPDATEs on condition of the token. Every other verb looks at the row
without locking it, decides in Python by the table, and writes on condition that the version is still the one it saw.
So no isolation level, session or lock is relied on, and nothing is held while a task runs.

A page of a list is a stretch of an index of at most ``look_at`` rows, filtered::

    index    │ r1 r2 r3 r4 r5 r6 │ r7 r8 …       look_at = 6
    page     │    r2       r5    │               two are selected
    cursor                     ▲ r6              the next page begins behind the last that was looked at
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, router
from django.db.transaction import atomic

from celery_idempotent import records
from celery_idempotent.django.sql import rows
from celery_idempotent.django.sql.atomic import ClaimTransaction
from celery_idempotent.django.sql.connections import Connections, Session
from celery_idempotent.django.sql.dialects import PROBED, SWEPT, TOKENS, USED
from celery_idempotent.django.sql.rows import COLUMNS, UNFINISHED, RowSnapshot, digest
from celery_idempotent.errors import InvalidOption, StoreMisconfigured
from celery_idempotent.records import Identity, Record, Selection, State
from celery_idempotent.stores import base, table
from celery_idempotent.stores.fields import LETTERS, Unreadable
from celery_idempotent.stores.table import Verb

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

#: Of our own tables, which are always here.
LABEL = "celery_idempotent"
#: How many rows one statement of a prune deletes: larger batches gain nothing.
PRUNE_BATCH = 1_000
#: Values are not read for a list; the text has the message and the steps, which are left out later.
_SUMMARY = ", ".join("NULL" if name == "value" else name for name in COLUMNS)


def in_session(
    verb: Callable[Concatenate[DjangoStore, Session, P], T],
) -> Callable[Concatenate[DjangoStore, P], T]:
    """Give a verb a session of the store's own; where it collides with another it begins again."""

    @wraps(verb)
    def run(store: DjangoStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return store.connections.run(lambda session: verb(store, session, *args, **kwargs))

    return run


class DjangoStore(base.Store):
    """Keeps the records in the database ``alias`` of Django's settings.

    PostgreSQL, MariaDB, MySQL and SQLite, at every isolation level. Nothing connects before the
    first verb. Safe to share between threads and greenlets and to take along over a fork. A verb
    never joins the caller's transaction, except on SQLite, where there can be only one writer.
    """

    supports_transactions = supports_counting = True

    def __init__(self, alias: str = "default") -> None:
        self.alias = self.outbox_alias = alias
        self.connections = Connections(alias)
        # Imports the backend, and opens nothing. The first verb of a worker's main process may come from a thread, and
        # a child that is forked while a thread imports finds the locks of its modules taken for ever.
        own = None
        with suppress(StoreMisconfigured, ImproperlyConfigured):
            own = self.connections.own()
        self.safe_beside_forks = own is None or own.vendor != "sqlite"
        if own is not None and not own.settings_dict["AUTOCOMMIT"]:
            raise InvalidOption(
                f"the idempotency store's database {alias!r} has AUTOCOMMIT = False, but a record guards nothing until "
                "it is committed: leave AUTOCOMMIT on, and use transaction.atomic(), or name another database."
            )

    def __repr__(self) -> str:
        return f"<DjangoStore: {self.alias}>"

    # -- the verbs --

    @in_session
    def _at(self, session: Session, identity: Identity, verb: Callable[[table.Snapshot], T]) -> T:
        return verb(RowSnapshot(session, identity))

    def fast(self, verb: Verb, request: Any) -> Any:
        """Claim a key without a row by one INSERT, settle a claim by one UPDATE."""
        if verb == "settle":
            # Not one that an operator settles, or that has to be as it was seen.
            own = request.record.state is State.PROCESSING and request.restore and not request.note
            return own and self.connections.run(lambda session: rows.settle_claim(session, request))
        # PostgreSQL knows no NUL, and a message may bring one.
        request.task_id = request.task_id.replace("\0", "\ufffd")
        if verb == "reserve":
            return None
        identity, args = request.identity, table.arguments(request)

        def work(session: Session) -> object:
            found = rows.claim_free_key(session, identity, args)
            if isinstance(found, Record):
                return records.Claimed(found)
            return self._taken(verb, found, args)

        return self.connections.run(work)

    def renew(self, renewals: Sequence[records.Renewal]) -> list[bool]:
        """Let each lease start anew, all of one length in one statement."""
        groups: dict[tuple[int, int], list[records.Renewal]] = {}
        for each in set(renewals):
            groups.setdefault((each.lease_ms, each.keep_ms), []).append(each)
        missed = [each for group in groups.values() for each in self._renew_all(group)]
        # A sweep may have interrupted them: then the record says whether they go on.
        lost = {each for each in missed if not self._renew(each)}
        return [each not in lost for each in renewals]

    @in_session
    def _renew_all(
        self, session: Session, renewals: Sequence[records.Renewal]
    ) -> Sequence[records.Renewal]:
        """Renew leases of one length; return those that may not be renewed. A renewal touches no index."""
        # In one order: two processes that renew the same leases in different orders would deadlock.
        claims = sorted((digest(each.identity), each.token) for each in renewals)
        now, lease_ms = session.dialect.now_ms, renewals[0].lease_ms
        same = " OR ".join(["(digest = %s AND token = %s)"] * len(claims))
        renewed = session.execute(
            f"UPDATE celery_idempotent_record SET deadline_ms = {now} + %s, due_ms = {now} + %s,"
            f" expires_ms = {now} + %s, version = version + 1"
            f" WHERE ({same}) AND state = 'P' AND expires_ms > {now}",
            (lease_ms, lease_ms, lease_ms + renewals[0].keep_ms, *itertools.chain(*claims)),
        )
        return () if renewed == len(claims) else renewals

    # -- many records --

    @in_session
    def _due(self, session: Session, limit: int) -> Sequence[Identity]:
        """Of the index all that is PROCESSING or QUEUED is read, up to the limit."""
        now, key = session.dialect.now_ms, session.dialect.key
        found = session.rows(
            f"SELECT namespace, scope, {key} FROM celery_idempotent_record WHERE state IN ('P', 'Q')"
            f" AND {UNFINISHED} AND due_ms <= {now} AND expires_ms > {now} LIMIT %s",
            (limit,),
        )
        return [Identity(namespace=name, scope=scope, key=each) for name, scope, each in found]

    @in_session
    def discard(self, session: Session, identity: Identity) -> bool:
        name = (digest(identity),)
        whose = "celery_idempotent_record WHERE digest = %s"
        for (token,) in session.rows(f"SELECT token FROM {whose}", name):
            session.execute(session.dialect.raise_mark, (TOKENS, token))
        return session.execute(f"DELETE FROM {whose}", name) == 1

    def prune(self, *, limit: int) -> int:
        """Delete records past their retention, in batches, found by the time when they were expected to be.

        What lives longer than expected is given its new time and left: a renewal does not write ``prune_ms``, so its
        index is not written at each beat.
        """
        gone = 0
        while gone < limit:
            batch = min(limit - gone, PRUNE_BATCH)
            looked, deleted = self._prune(batch)
            gone += deleted
            if looked < batch:
                break
        return gone

    @in_session
    def _prune(self, session: Session, batch: int) -> tuple[int, int]:
        """Do one batch; return how many rows were looked at, and how many are gone."""
        dialect, now = session.dialect, session.dialect.now_ms
        # Not what is within its transaction, however long ago its lease was. The subquery reads the time once, as
        # PostgreSQL needs it to search an index.
        found = session.rows(
            f"SELECT digest, token, expires_ms > {now} FROM celery_idempotent_record r WHERE prune_ms <= (SELECT {now})"
            f" AND NOT (state = 'P' AND expires_ms <= {now} AND {dialect.running}) ORDER BY prune_ms LIMIT %s",
            (batch,),
        )
        over = sorted(bytes(name) for name, _, lives in found if not lives)
        alive = sorted(bytes(name) for name, _, lives in found if lives)
        deleted, here = 0, "celery_idempotent_record WHERE digest IN"
        if over:
            # Before the rows, so that no crash in between loses a token.
            session.execute(dialect.raise_mark, (TOKENS, max(token for _, token, _ in found)))
            still = f"expires_ms <= {now} AND prune_ms <= {now}"
            deleted = session.execute(f"DELETE FROM {here} ({_marks(over)}) AND {still}", over)
        if alive:
            update = f"UPDATE celery_idempotent_record SET prune_ms = expires_ms WHERE digest IN ({_marks(alive)})"
            session.execute(update, alive)
        return len(found), deleted

    @in_session
    def stats(self, session: Session) -> records.Stats:
        """Count what is unfinished or failed, by the index of these."""
        now = session.dialect.now_ms
        ((now_ms, swept_ms, outbox, outbox_ms),) = session.rows(
            f"SELECT {now}, (SELECT value FROM celery_idempotent_mark WHERE id = {SWEPT}),"
            f" count(*), {now} - min(created_ms) FROM celery_idempotent_outbox"
        )
        groups = session.rows(
            "SELECT CASE WHEN state = 'I' THEN 'interrupted' WHEN state = 'F' THEN 'failed'"
            " WHEN deadline_ms <= %s THEN 'stale' ELSE 'live' END, count(*),"
            " count(CASE WHEN state = 'Q' THEN 1 END)"
            f" FROM celery_idempotent_record WHERE {UNFINISHED} AND expires_ms > %s GROUP BY 1",
            (now_ms, now_ms),
        )
        counts = dict.fromkeys(("live", "stale", "interrupted", "failed"), 0)
        counts |= {name: count for name, count, _ in groups}
        counts["queued"] = sum(queued for _, _, queued in groups)
        times = {"now_ms": now_ms, "swept_ms": swept_ms, "outbox_ms": outbox_ms}
        return records.Stats(outbox=outbox, **times, **counts)

    @in_session
    def list(
        self,
        session: Session,
        selection: Selection,
        *,
        cursor: str = "",
        limit: int = 50,
        look_at: int = 5000,
    ) -> records.Page:
        # The last change first, or what is kept longest: COMPLETED records are in no other index.
        letters, since_ms = sorted(LETTERS[each] for each in selection.wanted), selection.since_ms
        # By state, so that failures, of which there may be many, hide no others.
        since = "" if since_ms is None else f" AND updated_ms >= {since_ms:d}"
        where = [f"state = '{each}' AND {UNFINISHED}{since}" for each in letters]
        kind, order = "n", "updated_ms"
        if selection.scans:
            kind, order, where = "k", "prune_ms", ["0 = 0"]
        place: tuple[int, ...] | None = base.read_cursor(cursor, kind, 2) if cursor else None
        now_ms, found, looked = _now_ms(session), list[Record](), 0
        while len(found) < limit and looked < look_at:
            batch = min(look_at - looked, max(4 * limit, 100))
            stretch = _stretch(session, order, where, place, batch)
            for at, name, namespace, scope, key, *row in stretch:
                looked, place = looked + 1, (at, int.from_bytes(bytes(name), "big"))
                identity = Identity(namespace=namespace, scope=scope, key=key)
                is_here = row[rows.STATE] in letters and row[rows.EXPIRES] > now_ms
                if is_here and selection.names(identity):
                    try:
                        record = rows.stored_record(identity, row).record
                    except Unreadable as error:
                        logger.warning("idempotency: %s", error)
                        continue
                    if selection.includes(record, now_ms):
                        found.append(replace(record, message=None, steps=()))
                if len(found) == limit:
                    break
            else:
                if len(stretch) < batch:
                    place = None  # the end
                    break
        after = "" if place is None else base.write_cursor(kind, *place)
        return records.Page(records=tuple(found), cursor=after, looked_at=looked, now_ms=now_ms)

    # -- beyond the verbs --

    def count(self, outcomes: Mapping[tuple[str, str], int]) -> None:
        """Add to the counters of this hour, and drop those of the hour that is too long ago.

        Nothing that a test has counted: that is written by a thread of its own, outside of the test, or when the test's
        database is gone.
        """
        if not self.connections.tested:
            self._count(outcomes)

    @in_session
    def _count(self, session: Session, outcomes: Mapping[tuple[str, str], int]) -> None:
        now_ms = _now_ms(session)
        # In one order: two processes that count the same outcomes in different orders would deadlock.
        counted = [
            (each.ms, each.start(now_ms), task[:255], outcome[:100], number)
            for each in base.PERIODS
            for (task, outcome), number in sorted(outcomes.items())
        ]
        table = "celery_idempotent_counter"
        if counted:
            values = ", ".join(["(%s, %s, %s, %s, %s)"] * len(counted)) + session.dialect.or_add
            columns = "length_ms, start_ms, task, outcome, count"
            insert = f"INSERT INTO {table} ({columns}) VALUES {values}"
            session.execute(insert, [*itertools.chain(*counted)])
        is_over = " OR ".join(["(length_ms = %s AND start_ms <= %s)"] * len(base.PERIODS))
        over = [(each.ms, each.start(now_ms, each.kept)) for each in base.PERIODS]
        session.execute(f"DELETE FROM {table} WHERE {is_over}", [*itertools.chain(*over)])

    @in_session
    def _counts(
        self, session: Session, period: base.Period, starts: Sequence[int]
    ) -> Sequence[records.Counted]:
        found = session.rows(
            "SELECT start_ms, task, outcome, count FROM celery_idempotent_counter"
            " WHERE length_ms = %s AND start_ms >= %s ORDER BY 1, 2, 3",
            (period.ms, starts[0]),
        )
        return [records.Counted(start_ms=s, task=t, outcome=o, count=n) for s, t, o, n in found]

    @in_session
    def note_sweep(self, session: Session) -> None:
        session.execute(session.dialect.raise_mark, (SWEPT, _now_ms(session)))

    @in_session
    def mark_use(self, session: Session, *, lost_ms: int = 0) -> int:
        """Write the mark of the first use, but not that of a test, which is rolled back."""
        if self.connections.tested:
            return 0
        now_ms, write = _now_ms(session), session.dialect.raise_mark
        session.execute(write, (PROBED, now_ms))
        session.execute(write, (USED, lost_ms or -now_ms))
        ((mark,),) = session.rows(f"SELECT value FROM celery_idempotent_mark WHERE id = {USED}")
        return int(mark)

    @in_session
    def now_ms(self, session: Session) -> int:
        return _now_ms(session)

    def atomic_findings(self) -> Sequence[str]:
        """Return W025 on SQLite, and W026 if Django's routers write no model of the project to this database."""
        configs = apps.get_app_configs() if apps.ready else ()
        models = [model for each in configs if each.label != LABEL for model in each.get_models()]
        elsewhere = models and self.alias not in map(router.db_for_write, models)
        is_sqlite = self.connections.own().vendor == "sqlite"
        return ["W025"] * is_sqlite + ["W026"] * bool(elsewhere)

    def joined(self) -> bool:
        return self.connections.joined()

    def unguarded_transaction(self) -> AbstractContextManager[object]:
        return atomic(self.alias, durable=True)

    def transaction(self, record: Record) -> ClaimTransaction:
        return ClaimTransaction(self.connections, record)

    def upkeep(self, app: Celery, *, limit: int) -> dict[str, int]:
        from celery_idempotent.django import outbox

        try:
            sent, failed = outbox.sweep(app, using=self.alias, limit=limit)
        except DatabaseError as error:
            raise self.connections.trouble(error) from error
        return {"outbox_sent": sent, "outbox_failed": failed}

    def close(self) -> None:
        self.connections.close()


def _now_ms(session: Session) -> int:
    ((now_ms,),) = session.rows(f"SELECT {session.dialect.now_ms}")
    return int(now_ms)


def _stretch(
    session: Session, order: str, where: Sequence[str], place: tuple[int, ...] | None, batch: int
) -> Sequence[tuple[Any, ...]]:
    after, params = "", tuple[object, ...]()
    if place is not None:
        after = f" AND {order} <= %s AND ({order} < %s OR digest < %s)"
        # The number of a made-up cursor may be too large for a digest.
        name = (place[1] % 256**rows.DIGEST_BYTES).to_bytes(rows.DIGEST_BYTES, "big")
        params = (place[0], place[0], name)
    part = (
        f"SELECT * FROM (SELECT {order} AS place, digest, namespace, scope, {session.dialect.key}, {_SUMMARY}"
        f" FROM celery_idempotent_record WHERE {{}}{after} ORDER BY {order} DESC, digest DESC LIMIT %s) AS part"
    )
    union = " UNION ALL ".join(map(part.format, where))
    limits = (*(*params, batch) * len(where), batch)
    return session.rows(f"{union} ORDER BY 1 DESC, 2 DESC LIMIT %s", limits)


def _marks(values: Sequence[object]) -> str:
    return ", ".join(["%s"] * len(values))


def named(alias: str) -> str:
    """Return the alias in a URL. Any other text is not shown: it may have a password."""
    if not alias or any(mark in alias for mark in ":/?#@"):
        raise InvalidOption(
            "the idempotency store's URL names one alias of Django's DATABASES as its truth and nothing else:"
            " django:// or django://alias, or ?truth=alias of a hybrid store"
        )
    return alias


def open_django(url: str) -> DjangoStore:
    """Open ``django://`` or ``django://alias``."""
    return DjangoStore(named(url.partition("://")[2] or "default"))
