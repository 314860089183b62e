"""Which connection a verb uses: one of the store's own, never the thread's.

A claim must be visible to others at once, and stay when the task or view around it is rolled back. So a verb shares
neither the session of the project's statements nor what they leave there (``search_path``, a role)::

    thread   BEGIN ─ INSERT order ─────────────── ROLLBACK     connections["default"]
    verb                        claim, committed               a connection of the store

No session state is relied on between two verbs, so a pooler (PgBouncer) may stand in between. ``OPTIONS["pool"]`` of
the project is not used: a task in a transaction holds one of its connections while its verb would wait for a second.

Two exceptions, where a verb is part of the thread's transaction: SQLite, whose one write lock a second connection would
wait for, and a ``TestCase``, which rolls back all that the test wrote.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import Error, IntegrityError, OperationalError, connections
from django.db.transaction import atomic
from django.utils.connection import ConnectionDoesNotExist

from celery_idempotent import backoff
from celery_idempotent.django.sql.dialects import Dialect, dialect_of, error_code, kind
from celery_idempotent.django.transactions import in_testcase, under_test
from celery_idempotent.errors import IdempotencyError, StoreMisconfigured, StoreUnavailable

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

T = TypeVar("T")

#: For how long a verb that collides with others is repeated.
_RETRY_SECONDS = 10.0
#: How many connections of the store a process uses at once. Who finds none free waits, and then opens one more.
MAX_OPEN = 8
_WAIT_SECONDS = 2.0
#: How many idle ones stay open.
MAX_IDLE = 2
#: How often a statement is executed before psycopg prepares it.
_PREPARE_AFTER = 3
#: Lets psycopg prepare those that ask for it, and no other statement of the connection.
_NEVER = 2**31

#: A value of so many bytes fits into every statement; beside a value a statement has fewer than so many bytes.
_SMALL = 256 * 1024
_REST_OF_STATEMENT = 64 * 1024

#: PostgreSQL's code of a write on a standby or in a read-only transaction.
READ_ONLY = "25006"
_LET_WRITE = (
    "the transaction is read-only: turn off default_transaction_read_only, and set no READ ONLY"
)
_MIGRATE = "put celery_idempotent.django in INSTALLED_APPS and run manage.py migrate"
#: What to do, by the codes of PostgreSQL, MariaDB and MySQL.
_HINTS = {READ_ONLY: _LET_WRITE, 1792: _LET_WRITE, "42P01": _MIGRATE, 1146: _MIGRATE}

#: Connections that a fork copied, referenced for ever: their sockets are the parent's, and closing them, as the garbage
#: collector does, would end its sessions.
_inherited: list[object] = []
_known: weakref.WeakSet[Connections] = weakref.WeakSet()


class Session:
    """A connection and its statements; with ``prepare`` psycopg prepares each of them at once."""

    #: psycopg's, of the connection as it is open now, with its last result.
    cursor: Any = None

    def __init__(
        self, connection: BaseDatabaseWrapper, dialect: Dialect, *, prepare: bool | None = None
    ) -> None:
        self.connection, self.dialect, self._prepare = connection, dialect, prepare

    def execute(self, sql: str, params: Sequence[Any] = (), *, first: str = "") -> int:
        """Run a statement, after the ``first``, on MariaDB in one trip; return how many rows it touched."""
        if first and getattr(self.connection, "mysql_is_mariadb", False):
            sql = f"BEGIN NOT ATOMIC {first}; {sql}; END"
        elif first:
            self._execute(first, (), attrgetter("rowcount"))
        return int(self._execute(sql, params, attrgetter("rowcount")))

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement; return its rows."""
        return list(self._execute(sql, params, methodcaller("fetchall")))

    def _execute(self, sql: str, params: Sequence[Any], read: Callable[[Any], Any]) -> Any:
        raw: Any = self.connection.connection
        if raw is None or not _is_psycopg_3(self.connection):
            with self.connection.cursor() as cursor:
                cursor.execute(sql, params)
                return read(cursor)
        # Not by Django's cursor, which takes longer, and has none prepared: planning takes longer than executing.
        if self.cursor is None or self.cursor.connection is not raw:
            from psycopg import Cursor

            if self._prepare and raw.prepare_threshold is None:
                raw.prepare_threshold = _NEVER
            self.cursor = Cursor(raw)
        with self.connection.wrap_database_errors:
            return read(self.cursor.execute(sql, params, prepare=self._prepare))

    def swap(self, sql: str, params: Sequence[Any]) -> None:
        """Run a statement that writes one row; if it does not, the row has changed, and the verb begins again."""
        if self.execute(sql, params) != 1:
            raise IntegrityError

    def takes(self, size: int) -> bool:
        """Does a statement with such a value fit? MySQL and MariaDB end the session of a client that sends more."""
        if self.dialect.vendor != "mysql" or size < _SMALL:
            return True
        ((most,),) = self.rows("SELECT @@max_allowed_packet")
        # A byte is two in the statement: hexadecimal digits by PyMySQL, at worst an escape by mysqlclient.
        return 2 * size + _REST_OF_STATEMENT < int(most)


class Connections:
    """The store's own connections of this process to the database of one alias."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        #: May psycopg prepare statements? ``None``: not known before the first connection.
        self.prepares: bool | None = None
        #: Was a verb used by a test? After it, the alias is the project's database again: nothing is counted there.
        self.tested = False
        self._dialect: Dialect | None = None
        self._begin_empty()
        _known.add(self)

    def _begin_empty(self) -> None:
        """Begin without connections: at first, and in a forked child."""
        self._idle: list[Session] = []
        # Not a Semaphore: that is Python, and an exception out of a signal handler could leave its lock taken.
        self._tickets: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(MAX_OPEN):
            self._tickets.put(None)
        # The heartbeat's thread may write counters after the store was closed: a connection is idle again.
        self._at_end = weakref.finalize(self, _close_all, self._idle)
        self._at_end.atexit = False

    def forget_inherited(self) -> None:
        """Leave the connections of the parent alone, in a forked child."""
        self._at_end.detach()
        _inherited.append(self._idle)
        self._begin_empty()

    def run(self, work: Callable[[Session], T]) -> T:
        """Do a verb, again if it collided with another or its connection was dead.

        Raises:
            StoreUnavailable: if trying again may help.
            StoreMisconfigured: if it will not.
        """
        give_up, own = time.monotonic() + _RETRY_SECONDS, self.own()
        attempt, lost = 0, False
        while True:
            attempt += 1
            try:
                with self._session(own) as session:
                    return work(session)
            except Error as error:
                trouble = kind(error, own.vendor)
                # As part of the thread's transaction nothing can be repeated.
                may_repeat = not self.joined()
                if may_repeat and trouble == "lost" and not lost:
                    lost = True
                    self.close()  # the idle ones are dead as well
                    continue
                # The first of them needs a moment to finish.
                pauses = {"until": give_up, "first": 0.002, "longest": 0.05}
                again = may_repeat and trouble in ("conflict", "duplicate")
                if not again or not backoff.pause(attempt, **pauses):
                    raise self.trouble(error) from error

    def joined(self) -> bool:
        """Would a verb become part of the thread's transaction?"""
        own = self.own()
        return _uses_own(own) and (
            own.in_atomic_block or (own.connection is not None and own.connection.in_transaction)
        )

    def own(self) -> BaseDatabaseWrapper:
        """Return the thread's own connection, open or not."""
        try:
            return connections[self.alias]
        except ConnectionDoesNotExist:
            problem = f"there is no database {self.alias!r} in DATABASES"
            hint = "give the store's URL one of these, as in django://default"
            raise StoreMisconfigured(f"{problem}: {hint}") from None
        except ImproperlyConfigured as error:
            raise StoreMisconfigured(f"the store is a database of Django: {error}") from error

    def session_of(self, own: BaseDatabaseWrapper, *, prepare: bool | None = None) -> Session:
        """Return the session of a connection to this database."""
        if self._dialect is None:
            self._dialect = dialect_of(own.vendor)
        return Session(own, self._dialect, prepare=prepare)

    def close(self) -> None:
        """Close the idle connections."""
        _close_all(self._idle)

    def trouble(self, error: Error) -> StoreUnavailable | StoreMisconfigured:
        """Return our error for what the database raised: by whether trying again may help."""
        where, what = f"the database {self.alias!r}", kind(error, self.own().vendor)
        if what == "duplicate":
            return StoreUnavailable(f"{where}: other writers changed the same record too often")
        # Never the text of an error about data: it quotes the data, which may be secret.
        if what == "misconfigured":
            is_new = "no such table" in str(error)
            hint = _MIGRATE if is_new else _HINTS.get(error_code(error), "its log says why")
            problem = f"{where} refused a statement ({type(error).__name__})"
            return StoreMisconfigured(f"{problem}: {hint}")
        text = str(error).strip().split("\n", 1)[0]
        return StoreUnavailable(f"{where} cannot serve us at the moment: {text}")

    def _session(self, own: BaseDatabaseWrapper) -> contextlib.AbstractContextManager[Session]:
        """Return the session of one verb."""
        self.tested = self.tested or under_test()
        return self._joining(own) if _uses_own(own) else self._lent()

    @contextlib.contextmanager
    def _joining(self, own: BaseDatabaseWrapper) -> Iterator[Session]:
        # A statement that fails shall not break a test's transaction.
        with atomic(self.alias) if in_testcase(own) else contextlib.nullcontext():
            yield self.session_of(own)

    @contextlib.contextmanager
    def _lent(self) -> Iterator[Session]:
        """Give one of the store's own; if it breaks, close it, so that no later verb gets a broken one."""
        tickets, got = self._tickets, True
        # An exception out of a signal handler may lose a ticket for good. After the wait the verb goes on without one.
        try:
            tickets.get(timeout=_WAIT_SECONDS)
        except queue.Empty:
            got = False
        try:
            if under_test():  # an alias stands for another database then
                self.close()
            try:
                session = self._idle.pop()
            except IndexError:
                session = self._new()
            is_reusable = False
            try:
                yield session
                is_reusable = True
            except (Error, IdempotencyError) as error:
                read_only = error_code(error) == READ_ONLY
                if read_only and session.rows("SELECT pg_is_in_recovery()")[0][0]:
                    # Lost: the next connection may lead to the server that is the primary by now.
                    raise OperationalError("it is a standby") from error
                # Any other exception may come out of a signal handler, in the middle of an exchange with the server.
                is_reusable = kind(error, session.dialect.vendor) != "lost"
                raise
            finally:
                # Not in tests: PostgreSQL refuses to drop a test's database while a connection to it is open.
                if is_reusable and len(self._idle) < MAX_IDLE and not under_test():
                    session.cursor = None
                    self._idle.append(session)
                else:
                    _close_all([session])
        finally:
            if got:
                tickets.put(None)

    def _new(self) -> Session:
        """Open one. psycopg has the server plan a statement once: planning a claim takes longer than executing it."""
        connection = connections.create_connection(self.alias)
        settings = connection.settings_dict
        left_out = ("pool", "server_side_binding", "isolation_level", "prepare_threshold")
        known = {**dialect_of(connection.vendor).bounds, **settings["OPTIONS"]}
        options = {name: each for name, each in known.items() if name not in left_out}
        if connection.vendor == "mysql":
            # Never READ UNCOMMITTED: what is not committed may never be.
            options["isolation_level"] = "read committed"
            # Django before 5.2 chooses one without emoji.
            options.setdefault("charset", "utf8mb4")
        connection.settings_dict = {**settings, "OPTIONS": options}
        connection.inc_thread_sharing()
        session = self.session_of(connection)
        connection.ensure_connection()
        raw: Any = connection.connection
        if self.prepares is None and _is_psycopg_3(connection):
            # A pooler says that it is the session, and a statement may find another one than prepared it.
            ((pid,),) = session.rows("SELECT pg_backend_pid()")
            pooled = settings.get("DISABLE_SERVER_SIDE_CURSORS")
            self.prepares = pid == raw.info.backend_pid and not pooled
        if self.prepares:
            raw.prepare_threshold = _PREPARE_AFTER
        return session


def _uses_own(own: BaseDatabaseWrapper) -> bool:
    """Does a verb use the thread's own connection? See the module's exceptions."""
    return in_testcase(own) or (own.vendor == "sqlite" and not own.needs_rollback)


def _is_psycopg_3(connection: BaseDatabaseWrapper) -> bool:
    return connection.Database.__name__ == "psycopg"  # type: ignore[attr-defined,no-any-return]


def _close_all(opened: list[Session]) -> None:
    # Not by Django's own close(): it refuses wherever an event loop runs, and garbage is collected there, too.
    with contextlib.suppress(IndexError):
        while True:  # other threads may be taking and closing them as well
            own = opened.pop().connection
            raw, own.connection = own.connection, None
            if raw is not None:
                with contextlib.suppress(Exception):
                    raw.close()


def _after_in_child() -> None:
    for known in list(_known):
        known.forget_inherited()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_in_child)
