"""A task's own transaction, which settles its record too.

How a later claim ends a frozen one is in :mod:`celery_idempotent.django.sql.holders`.

::

    worker A   claim ─ BEGIN ─ lock named after the claim ─ run() ──(frozen)
    worker B                      lease runs out ─ claim: who holds that lock? ─ ends A's session,
                                  which rolls back ─ claims, with a larger token
    worker A   (thawed) ─ its connection is gone: nothing of its run is there

The named lock lasts as long as A's transaction (on MariaDB and MySQL until it is released after that), so the database
itself tells who is at work. The row of the record is written by the last statement only (on SQLite, for the lock that
there is for writing, by the first one, too), and on condition that it still has the claim's token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from weakref import WeakValueDictionary

from django.db import Error

from celery_idempotent import errors
from celery_idempotent.django.sql import plans
from celery_idempotent.django.sql.blocks import RunBlock, refuse_outer
from celery_idempotent.django.sql.columns import (
    LIVE_SQL,
    PRUNE_SLACK_MS,
    ColumnValues,
    ReadRows,
    digest,
)
from celery_idempotent.django.sql.connections import Lines, Session
from celery_idempotent.django.sql.dialects import LOCK_TIMEOUT_MS, kind
from celery_idempotent.django.sql.elsewhere import OtherConnections
from celery_idempotent.django.sql.ended import SessionLost, check_open, is_open, raise_if_over
from celery_idempotent.django.sql.holders import lock_name, lock_number
from celery_idempotent.django.sql.interruptions import drop, sound
from celery_idempotent.records import Identity, Record, SettleRequest
from celery_idempotent.stores.values import LETTERS, pack_value

logger = logging.getLogger(__name__)

#: Those that may still wait to hear what became of their COMMIT, by identity and token.
_runs: WeakValueDictionary[tuple[Identity, int], ClaimTransaction] = WeakValueDictionary()

_SAVEPOINT = "celery_idempotent_run"
#: Behind a pooler the session may not know the plan of the settle: that must not cost the task its transaction.
_BEFORE_SETTLE = "celery_idempotent_settle"
#: Also one that a sweep failed: the token decides.
_OURS = f" WHERE digest = %s AND token = %s AND ({LIVE_SQL} OR (state = 'F' AND swept))"

#: Bounds the waits of one statement of ours, and of none of the task's, nor its COMMIT: ``was`` is what it had.
_LOCK_TIMEOUT_SET = (
    "WITH own AS MATERIALIZED (SELECT current_setting('lock_timeout') AS was), lock_wait AS MATERIALIZED"
    f" (SELECT was, set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true) FROM own)"
)
_LOCK_TIMEOUT_RESTORED = "set_config('lock_timeout', was, true)"

_SETTLE = (
    "UPDATE celery_idempotent_record SET state = %s, value = %s, replaced = %s, reserved = %s, swept = false,"
    " updated_ms = {now}, expires_ms = {now} + %s, prune_ms = {least}(prune_ms, {now} + %s),"
    " version = version + 1{source}" + _OURS
)
_SETTLE_TYPES = plans.types_of(("", b"", True, True, 0, 0, b"", 0))

#: On PostgreSQL the lease goes with it, if nobody else has its row locked: the task's transaction must not fail for it.
#: Nor under REPEATABLE READ or stricter, for a heartbeat may have renewed it since the snapshot of the transaction.
_SETTLE_WITH_LEASE = (
    _LOCK_TIMEOUT_SET + ", r AS ({settle} RETURNING digest, token),"
    " free AS (SELECT e.digest FROM celery_idempotent_lease e, r WHERE e.digest = r.digest AND e.token = r.token"
    " AND current_setting('transaction_isolation') = 'read committed' FOR UPDATE OF e SKIP LOCKED),"
    " l AS (DELETE FROM celery_idempotent_lease e USING free WHERE e.digest = free.digest RETURNING 1)"
    f" SELECT (SELECT count(*) FROM r), (SELECT count(*) FROM l), {_LOCK_TIMEOUT_RESTORED} FROM lock_wait"
)


class ClaimTransaction:
    """The transaction of one claim, from just after its BEGIN; without a claim, a transaction only.

    :meth:`settle` has to be the last statement before the COMMIT that the end of the ``with`` block
    brings. ``settled`` tells whether it was done: an error that leaves the block after that may
    come from a COMMIT whose answer was lost. Then
    :meth:`~celery_idempotent.django.store.DjangoStore.committed` tells how it went: it waits for
    the row, whatever its state.
    """

    def __init__(self, session: Session, record: Record | None) -> None:
        self.settled = False
        #: Is the lease deleted in this transaction, too?
        self.without_lease = False
        #: The functions that wait for the commit and were not called yet.
        self.waiting: list[Callable[[], None]] = []
        self._other_connections = OtherConnections(session.connection)
        self.record = record
        self._session = session
        #: What settles by a plan of the server's, where it has one.
        self._planned: str | None = None

    def of(self, record: Record) -> bool:
        """Is this the run of that claim?"""
        mine = self.record
        return mine is not None and (mine.identity, mine.token) == (record.identity, record.token)

    def plan(self) -> None:
        """Have the server plan the settle; before the BEGIN."""
        if self.record is not None:
            self._planned = plans.plan(self._session, self._settle_sql(), _SETTLE_TYPES)

    def begin(self) -> None:
        """Take the lock named after the claim, once no earlier session has it: one that was cut off may live on.

        Raises :exc:`~celery_idempotent.errors.LeaseLost` if the claim is over.
        """
        session, record = self._session, self.record
        claim = (b"", 0) if record is None else _claim_of(record)
        if session.words.vendor == "sqlite":
            # The first statement being a write, it waits for the lock that there is for writing;
            # Django's BEGIN alone takes none, and a reader cannot wait for it later.
            ours = session.execute(
                "UPDATE celery_idempotent_record SET version = version" + _OURS, claim
            )
        elif record is None:
            return
        elif session.words.vendor == "postgresql":
            ours = self._begin_on_postgresql(*claim)
        else:
            ((got,),) = session.rows(
                "SELECT get_lock(%s, %s)", (lock_name(session, *claim), LOCK_TIMEOUT_MS / 1000)
            )
            if got != 1:
                raise errors.StoreUnavailable(
                    f"another session is still in the transaction of the claim of {record.identity}"
                )
            ours = len(session.rows("SELECT 1 FROM celery_idempotent_record" + _OURS, claim))
        if record is None:
            return
        if not ours:
            raise errors.LeaseLost(f"the claim of {record.identity} is no longer ours")
        if session.words.vendor != "postgresql":
            session.execute(f"SAVEPOINT {_SAVEPOINT}")

    def _begin_on_postgresql(self, name: bytes, token: int) -> int:
        # Without parameters several statements go at once.
        ours = _OURS % (f"decode('{name.hex()}', 'hex')", f"{token:d}")
        look, lock = f" FROM celery_idempotent_record{ours}", lock_number(name, token)
        found = self._session.rows_of_last(
            f"SAVEPOINT {_SAVEPOINT}; SELECT pg_try_advisory_xact_lock({lock:d}){look}"
        )
        if found == [(False,)]:
            # The second statement sees what was committed while the first waited.
            found = self._session.rows_of_last(
                f"{_LOCK_TIMEOUT_SET} SELECT pg_advisory_xact_lock({lock:d}),"
                f" {_LOCK_TIMEOUT_RESTORED} FROM lock_wait; SELECT 1{look}"
            )
        return len(found)

    def has(self, connection: object) -> bool:
        """Is this the connection of another thread, to the same database?"""
        return self._other_connections.has(connection)

    def guards(self, connection: object) -> bool:
        """Would a reader of the task expect a write there to be part of the transaction?"""
        return self._other_connections.guards(connection)

    def outside(self) -> AbstractContextManager[None]:
        """Refuse statements that write, other than through another connection."""
        return self._other_connections.step()

    def unlock(self) -> None:
        """Unlock the claim, where a lock outlives its transaction."""
        session, record = self._session, self.record
        if session.words.vendor == "mysql" and record is not None:
            with suppress(Error):
                lock = lock_name(session, *_claim_of(record))
                if session.connection.connection is not None:
                    session.rows("SELECT release_lock(%s)", (lock,))

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state with the task's own writes; ``False`` if another has the key by now.

        Raises:
            TransactionEnded: if the task committed, rolled back or broke the transaction.
            StoreUnavailable: if the record could not be reached: roll back, and try again.
            Error: what befell the transaction as a whole, a serialization failure for instance.
        """
        session, record, keep_ms = self._session, request.record, max(request.keep_ms, 1)
        if self.record is None:
            raise errors.StoreMisconfigured("this transaction has no claim to settle")
        bounded = session.words.vendor == "postgresql"
        # If so, the savepoint is released in one round trip with the settle.
        open_ = bounded and self.of(record) and is_open(session.connection)
        if self.of(record) and not open_:
            check_open(session, _SAVEPOINT)
        statement = self._settle_sql()
        value = None if request.value is None else pack_value(request.value)
        if value is not None and not session.takes(value):
            logger.warning(
                "idempotency: the result of %s, of %d bytes, is more than the database accepts (max_allowed_packet), "
                "and is not kept in its record: duplicates will look for it in the result backend",
                record.identity,
                len(value),
            )
            value = None
        params = (
            LETTERS[request.state],
            value,
            request.replaced,
            False,
            keep_ms,
            keep_ms + PRUNE_SLACK_MS,
            *_claim_of(record),
        )
        try:
            if bounded:
                ((written, deleted, _),) = self._settle_with_lease(statement, params, open_=open_)
                self.without_lease = bool(deleted)
            else:
                written = session.write(statement, params)
        except Error as error:
            if open_:
                raise_if_over(error)
            if self.passes(error):
                raise
            raise errors.StoreUnavailable(
                f"the record of {record.identity} could not be settled in the task's transaction"
                f" ({type(error).__name__})"
            ) from error
        self.settled = written == 1
        return self.settled

    def _settle_sql(self) -> str:
        words = self._session.words
        if words.vendor != "postgresql":
            return _SETTLE.format(now=words.now_ms, least=words.least, source="")
        settle = _SETTLE.format(now=words.now_ms, least=words.least, source=" FROM lock_wait")
        return _SETTLE_WITH_LEASE.format(settle=settle)

    def _settle_with_lease(self, sql: str, params: ColumnValues, *, open_: bool) -> ReadRows:
        session = self._session
        if not open_:
            return session.rows_of_last(sql, params)
        release = f"RELEASE SAVEPOINT {_SAVEPOINT}; "
        if self._planned is None:
            return session.rows_of_last(release + sql, params)
        try:
            return session.rows_of_last(
                f"{release}SAVEPOINT {_BEFORE_SETTLE}; {self._planned}", params
            )
        except Error as error:
            if not plans.is_missing(session, error):
                raise
        return session.rows_of_last(f"ROLLBACK TO SAVEPOINT {_BEFORE_SETTLE}; {sql}", params)

    def passes(self, error: Exception) -> bool:
        """Is this a serialization failure, a deadlock, or the loss of the session?"""
        vendor = self._session.words.vendor
        return isinstance(error, SessionLost) or (
            isinstance(error, Error) and kind(error, vendor) in ("conflict", "lost")
        )


@contextmanager
def transaction(lines: Lines, record: Record | None) -> Iterator[ClaimTransaction]:
    """Open the thread's own transaction for the run of a claim, or for one that settles nothing."""
    own = lines.own()
    refuse_outer(own)
    session = Session(own, lines.words(own), inside=True)
    run = ClaimTransaction(session, record)
    if record is not None:
        _runs[record.identity, record.token] = run
    nested = own.in_atomic_block
    begun = RunBlock(lines, own, run, record, nested=nested)
    try:
        with begun:
            yield run
        run.unlock()
    except BaseException as error:
        if not begun.over:
            if not nested and not sound(own, error):
                drop(own)
            run.unlock()
        raise
    if run.settled and record is not None and not run.without_lease:
        # Not in the transaction: a heartbeat renews it right now, or did so meanwhile, and under REPEATABLE READ it
        # could not be deleted any more. A sweep does what is not done here, or was lost in a crash.
        claim = _claim_of(record)
        with suppress(errors.IdempotencyError):
            lines.run(
                lambda session: session.write(
                    "DELETE FROM celery_idempotent_lease WHERE digest = %s AND token = %s",
                    claim,
                    durable=False,
                )
            )


def _claim_of(record: Record) -> tuple[bytes, int]:
    """Return what a claim's rows are found by."""
    return digest(record.identity), record.token


def answer(record: Record, *, committed: bool) -> None:
    """Call what waits for the commit of this claim's run, or drop it, now that its lost answer is known."""
    run = _runs.pop((record.identity, record.token), None)
    waiting = [] if run is None else run.waiting[:]
    if run is not None:
        run.waiting.clear()
    with suppress(Exception):  # a time limit, which is logged, and ends them all
        for function in waiting if committed else ():
            function()


def abandon(lines: Lines, record: Record) -> None:
    """End the transaction that this thread began for a claim, if it is still open.

    An exception that strikes between two contexts leaves it to the garbage collector, which comes too late: a verb on
    SQLite would be part of it.
    """
    for block in lines.own().atomic_blocks:
        if isinstance(block, RunBlock) and block.abandoned(record):
            return
