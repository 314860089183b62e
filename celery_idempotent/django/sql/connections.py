"""Which connection a verb uses: one of the store's own, never the thread's.

A verb commits by itself: a claim must be visible to others at once, and stay when the task or view around it is rolled
back.
So it shares neither the session of the project's own statements nor what they leave there (``search_path``, a role)::

    thread   BEGIN ─ INSERT order ─────────────── ROLLBACK     connections["default"]
    verb                        claim, committed               a connection of the store

No session state is relied on between two verbs, so a pooler (PgBouncer) may stand in between. ``OPTIONS["pool"]`` of
the project does not apply: a task in a transaction holds one connection of the pool while its verb would wait for a
second.

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
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections
from django.db.transaction import atomic
from django.utils.connection import ConnectionDoesNotExist

from celery_idempotent import backoff
from celery_idempotent.django.sql.dialects import Dialect, Kind, dialect, error_code, kind
from celery_idempotent.django.sql.forking import unforked
from celery_idempotent.django.testcases import in_testcase, under_test
from celery_idempotent.errors import IdempotencyError, StoreMisconfigured, StoreUnavailable

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

T = TypeVar("T")

#: For how long a verb that collides with others is repeated.
_RETRY_SECONDS = 10.0
#: How many connections of the store a process uses at once. Who finds none free waits, and then opens one more.
MAX_OPEN = 8
_WAIT_SECONDS = 2.0
#: How many idle ones stay open, and for how long.
MAX_IDLE = 2
_MAX_AGE = 60.0

#: A value of so many bytes fits into every statement; beside a value a statement has fewer than so many bytes.
_SMALL = 256 * 1024
_REST_OF_STATEMENT = 64 * 1024
_ESCAPED = (b"\0", b"\n", b"\r", b"\x1a", b'"', b"'", b"\\")

#: What PostgreSQL, MariaDB and MySQL call a table that is not there.
_NO_TABLE = ("42P01", 1146)
#: Django takes it where it is there, else psycopg2.
_PSYCOPG_3 = find_spec("psycopg") is not None
#: A statement that was prepared is not there, or there already; its plan no longer fits the table.
_NOT_PREPARED = ("26000", "42P05", "0A000")

#: Connections that a fork copied: their sockets are the parent's. Using them would mix the answers of both processes,
#: and closing them (as the garbage collector does) would end the parent's session. So they are referenced for ever.
_inherited: list[object] = []
_known: weakref.WeakSet[Connections] = weakref.WeakSet()


class _Changed(Exception):
    """What was read has changed since."""


class Session:
    """One connection for the length of one verb."""

    def __init__(self, connection: BaseDatabaseWrapper, words: Dialect) -> None:
        self.connection = connection
        self.dialect = words

    def execute(self, sql: str, params: Sequence[Any] = ()) -> int:
        """Run a statement; return how many rows it touched."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params)
            touched: int = cursor.rowcount
            return touched

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement; return its rows."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params)
            return list(cursor.fetchall())

    def swap(self, sql: str, params: Sequence[Any]) -> None:
        """Run a statement that writes one row; if it does not, the verb begins again."""
        if self.execute(sql, params) != 1:
            self.again()

    def takes(self, value: bytes) -> bool:
        """Does a statement with this value fit? MySQL and MariaDB end the session of a client that sends more."""
        if self.dialect.vendor != "mysql" or len(value) < _SMALL:
            return True
        escaped = sum(map(value.count, _ESCAPED))  # each of them is two bytes in the statement
        ((most,),) = self.rows("SELECT @@max_allowed_packet")
        return len(value) + escaped + _REST_OF_STATEMENT < int(most)

    def again(self) -> NoReturn:
        """Let the verb begin again: what it read has changed since."""
        raise _Changed


class Connections:
    """The store's own connections of this process to the database of one alias."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._dialect: Dialect | None = None
        #: Does the server keep what it planned?
        self._prepares = True
        #: Was a verb used by a test? Then this process writes nothing more in the background: after the test, the alias
        #: stands for the project's own database again.
        self.tested = False
        self._begin_empty()
        _known.add(self)

    def _begin_empty(self) -> None:
        """Begin without connections: at first, and in a forked child."""
        self._open: set[BaseDatabaseWrapper] = set()
        self._idle: list[tuple[float, BaseDatabaseWrapper]] = []
        # Not a Semaphore: that is Python, and an exception out of a signal handler could leave its lock taken.
        self._tickets: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(MAX_OPEN):
            self._tickets.put(None)
        self._pid = os.getpid()
        # The heartbeat's thread may write counters after the store was closed: then a connection is idle again, and
        # is closed with the store that nothing refers to any more.
        weakref.finalize(self, _close_open, self._open, self._pid).atexit = False

    def run(self, work: Callable[[Session], T]) -> T:
        """Do a verb, again if it collided with another or its connection was dead.

        Raises:
            StoreUnavailable: if trying again may help.
            StoreMisconfigured: if it will not.
        """
        give_up = time.monotonic() + _RETRY_SECONDS
        attempt, lost, own = 0, False, self.own()
        while True:
            attempt += 1
            error: Error | None = None
            trouble: Kind = "conflict"
            try:
                with self._session(own) as session:
                    return work(session)
            except _Changed:
                pass
            except Error as found:
                error, trouble = found, kind(found, own.vendor)
            if error is not None and self.joined():
                # Part of the thread's transaction: nothing can be repeated.
                raise self.trouble(error, trouble) from error
            if error is not None and error_code(error) in _NOT_PREPARED and attempt <= MAX_OPEN:
                # A pooler gave the session of another client: connections that are opened from now on prepare nothing.
                self._prepares = False
                self.close()
                continue
            if trouble == "lost" and not lost:
                lost = True
                self.close()  # the idle ones are dead as well
                continue
            # The first of them needs a moment to finish.
            if trouble not in ("conflict", "duplicate") or not backoff.pause(
                attempt, until=give_up, first=0.002, longest=0.05
            ):
                raise self.trouble(error, trouble) from error

    def joined(self) -> bool:
        """Would a verb become part of the thread's transaction?"""
        own = self.own()
        if in_testcase(own):
            return True
        return own.vendor == "sqlite" and _in_transaction(own) and not own.needs_rollback

    def own(self) -> BaseDatabaseWrapper:
        """Return the thread's own connection, open or not."""
        try:
            return connections[self.alias]
        except ConnectionDoesNotExist:
            raise StoreMisconfigured(
                f"there is no database {self.alias!r} in DATABASES: name one that there is in the"
                " store's URL, as in django://default"
            ) from None
        except ImproperlyConfigured as error:
            raise StoreMisconfigured(f"the store is a database of Django: {error}") from error

    def dialect(self, connection: BaseDatabaseWrapper) -> Dialect:
        """Return the SQL of this database."""
        if self._dialect is None:
            self._dialect = dialect(connection.vendor)
        return self._dialect

    def close(self) -> None:
        """Close the idle connections."""
        self._forget_after_fork()
        with contextlib.suppress(IndexError):
            while True:
                self._close(self._idle.pop()[1])

    def trouble(
        self, error: Exception | None, trouble: Kind
    ) -> StoreUnavailable | StoreMisconfigured:
        """Return our error for what the database raised: by whether trying again may help."""
        where = f"the database {self.alias!r}"
        if error is None or trouble == "duplicate":
            return StoreUnavailable(f"{where}: too many others wrote the same record")
        # Never the text of an error about data: it quotes the data, which may be secret.
        if trouble == "misconfigured":
            hint = "its log says why"
            if error_code(error) in _NO_TABLE or "no such table" in str(error):
                hint = "put celery_idempotent.django in INSTALLED_APPS and run manage.py migrate"
            return StoreMisconfigured(
                f"{where} refused a statement ({type(error).__name__}): {hint}"
            )
        text = str(error).strip().split("\n", 1)[0]
        return StoreUnavailable(f"{where} cannot serve us at the moment: {text}")

    @contextlib.contextmanager
    def _session(self, own: BaseDatabaseWrapper) -> Iterator[Session]:
        """Give the connection for one verb; if it breaks, close it, so that no later query gets a broken one."""
        self.tested = self.tested or under_test()
        if in_testcase(own):
            with atomic(
                self.alias
            ):  # a statement that fails shall not break the test's transaction
                yield Session(own, self.dialect(own))
        elif own.vendor == "sqlite" and not own.needs_rollback:
            with unforked():
                yield Session(own, self.dialect(own))
        else:
            with self._lent() as connection:
                yield Session(connection, self.dialect(connection))

    @contextlib.contextmanager
    def _lent(self) -> Iterator[BaseDatabaseWrapper]:
        self._forget_after_fork()
        tickets, got = self._tickets, True
        # An exception out of a signal handler may lose a ticket for good. After the wait the verb goes on without one.
        try:
            tickets.get(timeout=_WAIT_SECONDS)
        except queue.Empty:
            got = False
        connection = None
        try:
            connection = self._newest_idle() or self._new()
            sound = False
            try:
                yield connection
                sound = True
            except (_Changed, IdempotencyError):
                sound = True
                raise
            except Error as error:
                # Any other exception may come out of a signal handler, in the middle of an exchange with the server.
                sound = kind(error, connection.vendor) != "lost"
                raise
            finally:
                # Not in tests: PostgreSQL refuses to drop a test's database while a connection to it is open.
                if sound and len(self._idle) < MAX_IDLE and not under_test():
                    self._idle.append((time.monotonic(), connection))
                else:
                    self._close(connection)
        finally:
            if got:
                tickets.put(None)

    def _newest_idle(self) -> BaseDatabaseWrapper | None:
        while True:
            try:
                used, connection = self._idle.pop()
            except IndexError:
                return None
            settings = connection.settings_dict
            age = time.monotonic() - used
            # During tests an alias stands for another database.
            if age < max(_MAX_AGE, settings["CONN_MAX_AGE"] or 0) and (
                settings["NAME"] == connections[self.alias].settings_dict["NAME"]
            ):
                return connection
            self._close(connection)

    def _new(self) -> BaseDatabaseWrapper:
        connection = connections.create_connection(self.alias)
        settings = connection.settings_dict
        left_out = ("pool", "server_side_binding", "isolation_level", "prepare_threshold")
        options = {name: each for name, each in settings["OPTIONS"].items() if name not in left_out}
        pooled = settings.get("DISABLE_SERVER_SIDE_CURSORS")
        if connection.vendor == "postgresql" and _PSYCOPG_3 and self._prepares and not pooled:
            # psycopg has the server plan each statement once: planning a claim takes it longer than executing it.
            options |= {"server_side_binding": True, "prepare_threshold": 3}
        if connection.vendor == "mysql":
            # Never READ UNCOMMITTED: what is not committed may never be.
            options["isolation_level"] = "read committed"
        connection.settings_dict = {**settings, "OPTIONS": options}
        connection.inc_thread_sharing()
        self._open.add(connection)
        return connection

    def _close(self, connection: BaseDatabaseWrapper) -> None:
        self._open.discard(connection)
        _close_raw(connection)

    def _forget_after_fork(self) -> None:
        if self._pid != os.getpid():
            _inherited.append(self._open)
            self._begin_empty()


def _in_transaction(own: BaseDatabaseWrapper) -> bool:
    raw = own.connection
    return own.in_atomic_block or (raw is not None and bool(raw.in_transaction))


def _close_raw(connection: BaseDatabaseWrapper) -> None:
    # Not by Django's own close(): it refuses wherever an event loop runs, and garbage is collected there, too.
    raw, connection.connection = connection.connection, None
    if raw is not None:
        with contextlib.suppress(Exception):
            raw.close()


def _close_open(opened: set[BaseDatabaseWrapper], pid: int) -> None:
    """Close connections that this process opened."""
    if pid == os.getpid():
        for connection in opened:
            _close_raw(connection)
        opened.clear()


def _close_all() -> None:
    """Close the idle connections before a fork, so that the child gets no copy of them."""
    for known in list(_known):
        known.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_close_all)
