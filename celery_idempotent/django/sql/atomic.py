"""A task's own transaction, whose last statement settles its record.

::

    claim (committed) ─ BEGIN, lock, time-out ─ run() ─ settle, if the token is ours ─ COMMIT ─ ack

Three things of the database do what the heartbeat does for other runs:

- *The lock* (an advisory lock of the transaction on PostgreSQL, ``get_lock`` on MariaDB and MySQL) shows that the run
  is alive once its lease is over. A renewal from another session would break the settle at REPEATABLE READ.
- *The time-out* ends a transaction that is silent for a lease, as that of a frozen worker: the lock is free, and the
  next claim takes over. A statement that runs is no silence, however long it takes.
- *The condition on the token* refuses a late settle.

SQLite has one writer, and nothing that ends a frozen one.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error, OperationalError
from django.db.transaction import Atomic

from celery_idempotent import backoff
from celery_idempotent.django.sql.connections import READ_ONLY, Connections, Session
from celery_idempotent.django.sql.dialects import POSTGRESQL_LOCK, error_code, kind
from celery_idempotent.django.sql.rows import OPEN, RowSnapshot, digest, settle_claim
from celery_idempotent.django.transactions import is_testcase
from celery_idempotent.errors import (
    IdempotencyError,
    LeaseLost,
    StoreMisconfigured,
    StoreUnavailable,
)
from celery_idempotent.records import Identity, Record, SettleRequest

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger(__name__)

_SAVEPOINT, _STEP = "celery_idempotent_run", "celery_idempotent_step"
_OURS = f"digest = %s AND token = %s AND {OPEN}"
#: How long to wait for the end of a COMMIT whose answer was lost.
_COMMIT_SECONDS = 10.0
#: How often PostgreSQL looks whether the client of a running statement is still there.
_CHECK_MS = 5_000

#: An earlier error broke the transaction; the savepoint is gone: in another transaction, in none; MySQL.
_ENDED = ("25P02", "3B001", "25P01", 1305)


_LOST = (
    "the session of the task's transaction was lost before the COMMIT: everything is rolled back. The database ends one"
    " that is silent for longer than the task's idempotency_lease"
)
_TASK_ENDED_IT = (
    "the transaction of an idempotency_atomic task ended or failed before the task did. The task committed it, rolled"
    " it back or marked it for that, perhaps by a statement that commits implicitly; closed its connection"
    " (close_old_connections()); or continued after a database error. Do not end it in the task, and put a statement"
    " that may fail inside transaction.atomic(), with the error caught outside of that block"
)


class SessionLost(OperationalError):
    """The session of the task's transaction was lost before the COMMIT: everything is rolled back."""


class ClaimTransaction:
    """The transaction of one claim, as a context.

    :meth:`settle` has to be the last statement before the COMMIT that the end of the ``with`` block brings. An error
    that leaves the block after that may come from a COMMIT whose answer was lost: :meth:`committed` asks the database.
    """

    def __init__(
        self,
        connections: Connections,
        record: Record,
        after_commit: Callable[[Identity], None] = lambda _: None,
    ) -> None:
        self.record, self._connections, self._after_commit = record, connections, after_commit
        self._own = own = connections.own()
        self._session = connections.session_of(own, prepare=connections.prepares)
        self._block = Atomic(connections.alias, True, False)
        #: Finds the claim's row.
        self._claim = digest(record.identity), record.token
        #: Its lock (MariaDB, MySQL).
        self._lock_name = f"celery_idempotent:{self._claim[0].hex().upper()}{record.token}"
        #: The lease that the claim was made with.
        self._lease_ms = max((record.deadline_ms or 0) - record.updated_ms, 1_000)
        #: Is it within the transaction of a TestCase?
        self._nested = own.in_atomic_block
        self._stage: Literal["", "begins", "entered"] = ""
        #: The functions that wait for the commit, if its answer was lost.
        self._waiting: list[Callable[[], object]] = []
        #: What the session had for its time-out (MariaDB, MySQL).
        self._timeout: tuple[str, int] | None = None

    def __enter__(self) -> ClaimTransaction:
        # Begin; once more if the server had closed the connection, since nothing has run yet.
        own = self._own
        by_hand = own.connection is not None and not own.in_atomic_block and not own.autocommit
        if by_hand or not all(map(is_testcase, own.atomic_blocks)):
            raise StoreMisconfigured(
                "an idempotency_atomic task commits its own writes with its record, so it cannot run"
                " inside another transaction: call it outside of atomic()"
            )
        for is_last in (self._nested, True):
            try:
                self._begin()
                break
            except BaseException as error:
                self._roll_back(error)
                if not isinstance(error, Error):
                    raise
                if not self._nested:
                    drop(own)
                if is_last or kind(error, own.vendor) != "lost":
                    raise self._connections.trouble(error) from error
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Commit, or roll back after an exception."""
        try:
            if error is not None:
                raise error
            self._commit()
        except BaseException as found:
            is_lost = self._roll_back(found)
            if is_lost and isinstance(found, Error):
                # 25P03 is an InternalError to Django: an autoretry_for of OperationalError shall see it.
                raise SessionLost(_LOST) from found
            if found is not error:
                raise
        else:
            self._after_commit(self.record.identity)

    def is_transient(self, error: Exception, *, at_end: bool) -> bool:
        if isinstance(error, SessionLost):
            return True
        is_of_database = at_end and isinstance(error, Error)
        return is_of_database and kind(error, self._own.vendor) in ("conflict", "lost")

    @contextmanager
    def read_only(self) -> Iterator[None]:
        # MariaDB and MySQL cannot; on SQLite the record is rolled back as well.
        if self._own.vendor != "postgresql":
            yield
            return
        self._session.execute(f"SAVEPOINT {_STEP}")
        self._session.execute("SET LOCAL transaction_read_only = on")
        try:
            yield
        except Error as error:
            if error_code(error) != READ_ONLY:
                raise
            raise IdempotencyError(
                "a step of an idempotency_atomic task may not write to the database of its transaction: it is not done"
                " again, so a rollback of the task would lose the write. Write outside of the step"
            ) from error
        finally:
            if self._own.connection is not None:
                with suppress(Error):
                    self._session.execute(f"ROLLBACK TO SAVEPOINT {_STEP}")
                    self._session.execute(f"RELEASE SAVEPOINT {_STEP}")

    def _begin(self) -> None:
        """Begin, take the lock and set the time-out: one statement on PostgreSQL after the BEGIN, on MariaDB two."""
        vendor, self._stage = self._own.vendor, "begins"
        if not self._nested:
            # Django leaves that of an earlier transaction there.
            self._own.rollback_exc = None  # type: ignore[attr-defined]
        locks = {"postgresql": self._lock_row, "mysql": self._lock_session}
        lock = locks.get(vendor, self._lock_all)
        begins = vendor == "mysql" and not self._nested
        found = lock() if begins else []
        self._block.__enter__()
        self._stage = "entered"
        found = found if begins else lock()
        if not found:
            raise LeaseLost(f"the claim of {self.record.identity} is no longer ours")
        if not found[0][0]:
            # The server may not know yet that it is gone.
            raise StoreUnavailable("another session is still in the transaction of this claim")

    # Each returns a row whose first column is false if the lock is another's, and none if the claim is over.

    def _lock_all(self) -> list[tuple[Any, ...]]:
        """Take SQLite's write lock first thing, by a write: a reader cannot wait for that later."""
        write = f"UPDATE celery_idempotent_record SET version = version WHERE {_OURS}"
        found = [(1,)] * self._session.execute(write, self._claim)
        self._session.execute(f"SAVEPOINT {_SAVEPOINT}")
        return found

    def _lock_row(self) -> list[tuple[Any, ...]]:
        version: int = self._own.pg_version  # type: ignore[attr-defined]
        return self._session.rows(_lock_statement(self._lease_ms, version), self._claim)

    def _lock_session(self) -> list[tuple[Any, ...]]:
        """Take the lock and begin, which Django finds done: :meth:`_unlock` undoes lock and time-out, the session's."""
        # MySQL has no time-out for transactions: the session's own does it.
        mariadb = getattr(self._own, "mysql_is_mariadb", False)
        variable = "idle_transaction_timeout" if mariadb else "wait_timeout"
        ((locked, known, ours),) = self._session.rows(
            f"SELECT get_lock(%s, 0), @@SESSION.{variable},"
            f" (SELECT count(*) FROM celery_idempotent_record WHERE {_OURS})",
            (self._lock_name, *self._claim),
        )
        lease = self._lease_ms // 1000
        self._timeout = (variable, known)
        begin = f"SET SESSION {variable} = {min(lease, known or lease)}, autocommit = 0"
        self._session.execute(f"SAVEPOINT {_SAVEPOINT}", first=begin)
        return [(locked,)] if ours else []

    def settle(self, request: SettleRequest) -> bool:
        own, session = self._own, self._session
        if own.closed_in_transaction or own.connection is None or own.needs_rollback:
            cause: Any = own.rollback_exc if own.needs_rollback else None  # type: ignore[attr-defined]
            if isinstance(cause, Error) and kind(cause, own.vendor) == "lost":
                raise SessionLost(_LOST) from cause
            raise StoreMisconfigured(_TASK_ENDED_IT) from cause
        try:
            # Set first thing in the transaction, so it exists only as long as the transaction does.
            first = "" if own.vendor == "postgresql" else f"RELEASE SAVEPOINT {_SAVEPOINT}"
            settled = settle_claim(session, request, first=first)
            if own.vendor == "postgresql" and not settled:
                found = session.rows("SELECT current_setting('celery_idempotent.token', true)")
                if found != [(str(request.record.token),)]:
                    raise StoreMisconfigured(_TASK_ENDED_IT)
        except Error as error:
            if kind(error, own.vendor) in ("conflict", "lost"):
                raise
            if error_code(error) in _ENDED or "no such savepoint" in str(error):
                raise StoreMisconfigured(_TASK_ENDED_IT) from error
            raise self._connections.trouble(error) from error
        return settled

    def _commit(self) -> None:
        """Commit. What waits for that (``on_commit``) does not undo it: an exception there is logged, not raised."""
        own, record, waiting = self._own, self.record, []
        if not self._nested:
            hooks: list[Any] = own.run_on_commit
            name = record.identity
            hooks[:] = [(hook[0], partial(_call_hook, hook[1], name), False) for hook in hooks]
            waiting = [hook[1] for hook in hooks]
        try:
            self._block.__exit__(None, None, None)
        except BaseException as error:
            if isinstance(error, Error):
                self._waiting = waiting
            if not self._nested and (is_async(error) or not own.autocommit):
                drop(own)
            raise
        finally:
            self._stage = ""
            self._unlock()

    def committed(self) -> bool:
        identity, token = self.record.identity, self.record.token
        until, attempt = time.monotonic() + _COMMIT_SECONDS, 0
        while self._connections.run(self._holds_lock):
            attempt += 1
            if not backoff.pause(attempt, until=until, first=0.02, longest=0.5):
                raise StoreUnavailable(f"the transaction of {identity} is not over yet")
        # Asked after the lock was found free: what was committed is visible before its locks are free.
        stored = self._connections.run(lambda session: RowSnapshot(session, identity).stored)
        found = None if stored is None else stored.record
        if found is None or found.token != token or found.swept or not found.state.is_final:
            return False
        waiting, self._waiting = self._waiting, []
        for function in waiting:
            function()
        return True

    def _holds_lock(self, session: Session) -> bool:
        """Is a session, of whatever process, within the transaction of this claim's run?"""
        ours = f"digest = %s AND token = %s AND {session.dialect.running}"
        return bool(
            session.rows(f"SELECT 1 FROM celery_idempotent_record r WHERE {ours}", self._claim)
        )

    def abandon(self) -> None:
        if self._stage and not self._nested:
            self._stage = ""
            drop(self._own)

    def _roll_back(self, error: BaseException) -> bool:
        """Roll back, whatever state the session is in; say whether it was lost.

        After a strike or an error the connection is closed: Django turns autocommit on even if its ROLLBACK failed, and
        that *commits* on MySQL and SQLite.
        """
        own, stage, self._stage = self._own, self._stage, ""
        if self._nested and stage == "entered":
            self._block.__exit__(type(error), error, error.__traceback__)
        if self._nested or not stage:
            return False
        try:
            if own.connection is None or stage != "entered" or is_async(error):
                drop(own)
            else:
                with own.wrap_database_errors:
                    own.connection.rollback()
                self._block.__exit__(type(error), error, error.__traceback__)
                self._unlock()
        except Error:
            drop(own)
            return True
        except BaseException:
            drop(own)
            raise
        return False

    def _unlock(self) -> None:
        """Undo what :meth:`_lock_session` did."""
        if self._timeout is None:
            return
        variable, known = self._timeout
        self._timeout = None
        try:
            if self._own.connection is not None:
                self._session.execute(
                    f"SET SESSION {variable} = {known}, @celery_idempotent = release_lock(%s)",
                    (self._lock_name,),
                )
        except BaseException as error:
            drop(self._own)  # the server may still answer
            if not isinstance(error, Error):
                raise


def _call_hook(function: Callable[[], object], identity: Identity) -> None:
    """Call what waited for the commit; its failure stops no other, and fails no committed task."""
    try:
        function()
    except Exception:
        while isinstance(function, partial):
            function = function.func
        logger.exception(
            "idempotency: %s is committed, but an on_commit function failed: %s",
            identity.namespace,
            getattr(function, "__qualname__", type(function).__qualname__),
            extra={"idempotency_outcome": "on_commit_failed", "idempotency_key": identity.key},
        )


def is_async(error: BaseException | None) -> bool:
    """May this have been raised by a signal handler, in the middle of an exchange with the database?"""
    while error is not None:
        if isinstance(error, SoftTimeLimitExceeded) or not isinstance(error, Exception):
            return True
        error = error.__cause__ or error.__context__
    return False


def drop(own: BaseDatabaseWrapper) -> None:
    """Close the connection, in whatever state it is: the database rolls back what is not committed."""
    own.atomic_blocks, own.savepoint_ids, own.run_on_commit = [], [], []
    own.in_atomic_block = own.needs_rollback = own.closed_in_transaction = False
    if own.connection is not None and own.vendor == "sqlite":
        # Django never closes a database in memory. The task may have closed it by the driver's own method.
        with suppress(sqlite3.ProgrammingError):
            own.connection.rollback()
    with suppress(Exception):
        own.close()
    if own.vendor != "sqlite" or not own.is_in_memory_db():  # type: ignore[attr-defined]
        own.connection = None


@lru_cache
def _lock_statement(lease_ms: int, version: int) -> str:
    """Return what takes PostgreSQL's lock, and sets time-outs for the transaction unless shorter ones are set."""
    # The second is for a client that takes no more of a result.
    bounds = {"idle_in_transaction_session_timeout": lease_ms, "tcp_user_timeout": lease_ms}
    if version >= 140_000:
        # For a statement of a worker that was killed: without, the server goes on with it.
        bounds["client_connection_check_interval"] = min(lease_ms, _CHECK_MS)
    columns = [f"pg_try_advisory_xact_lock({POSTGRESQL_LOCK})"]
    for name, ms in bounds.items():
        known = f"current_setting('{name}')"
        # Usually none is set, and nothing has to be parsed.
        columns.append(
            f"set_config('{name}', CASE WHEN {known} <> '0' AND {known}::interval < '{ms}ms'"
            f" THEN {known} ELSE '{ms}ms' END, true)"
        )
    columns.append("set_config('celery_idempotent.token', r.token::text, true)")
    return f"SELECT {', '.join(columns)} FROM celery_idempotent_record r WHERE {_OURS}"
