"""Which connection a verb uses: the thread's own while it is idle, else one of the store's.

A verb commits by itself: a claim must be visible to other workers at once, and must stay when the task or the view
around it rolls back. So the thread's connection serves only while it is open and in no transaction. Else the verb
takes a spare connection, which is put back for the next verb of any thread::

    thread      BEGIN ─ INSERT order ─────────────────────── ROLLBACK     its own connection
    verb                               claim, committed                   a spare connection

No session state is relied on between two verbs, so a pooler (pgbouncer) may stand in between.

Two exceptions, where the verb becomes part of the thread's transaction: on SQLite, which has one write lock for the
whole database, a second connection would wait for its own thread. And in a ``TestCase``, which rolls back all that
the test wrote.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import Error, NotSupportedError, connections
from django.utils.connection import ConnectionDoesNotExist

from celery_idempotent import backoff
from celery_idempotent.django.sql.columns import ColumnValues, ReadRows
from celery_idempotent.django.sql.dialects import Dialect, Kind, dialect, error_code, kind
from celery_idempotent.django.sql.forking import unforked
from celery_idempotent.django.sql.spare_connections import SpareConnections, is_inherited
from celery_idempotent.django.testcases import in_testcase, under_test
from celery_idempotent.errors import IdempotencyError, StoreMisconfigured, StoreUnavailable

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper

T = TypeVar("T")

#: For how long a verb that collides with others is repeated.
_CONNECT_RETRY_SECONDS = 10.0

#: A value of so many bytes fits into every statement; beside a value a statement has fewer than so many bytes.
_SMALL = 256 * 1024
_REST_OF_STATEMENT = 64 * 1024
_ESCAPED = (b"\0", b"\n", b"\r", b"\x1a", b'"', b"'", b"\\")

#: What PostgreSQL, MariaDB and MySQL call a table that is not there.
_NO_TABLE = ("42P01", 1146)


class _Conflict(Exception):
    """What was read has changed since."""


class RowLocked(StoreUnavailable):
    """Another transaction locks the record's row for longer than we wait."""


class Session:
    """One connection for the length of one verb."""

    def __init__(self, connection: BaseDatabaseWrapper, words: Dialect, *, inside: bool) -> None:
        self.connection = connection
        self.words = words
        #: Is this the thread's own transaction?
        self.inside = inside
        #: Is the next statement part of a transaction?
        self.begun = inside
        self._savepoints = 0

    def execute(self, sql: str, params: ColumnValues = ()) -> int:
        """Run a statement; return how many rows it touched."""
        with self._cursor() as cursor:
            cursor.execute(sql, params)
            touched: int = cursor.rowcount
            return touched

    def rows(self, sql: str, params: ColumnValues = ()) -> ReadRows:
        """Run a query."""
        with self._cursor() as cursor:
            cursor.execute(sql, params)
            return list(cursor.fetchall())

    def rows_of_last(self, sql: str, params: ColumnValues = ()) -> ReadRows:
        """Run several statements at once; return what the last one found. PostgreSQL only."""
        with self._cursor() as cursor:
            cursor.execute(sql, params)
            # psycopg2 has the last one's alone, and says so.
            with contextlib.suppress(NotSupportedError):
                while cursor.nextset():
                    pass
            return list(cursor.fetchall())

    def write(self, sql: str, params: Sequence[object] = (), *, durable: bool = True) -> int:
        """Run a statement that waits for a locked row only so long; outside of a transaction an UPDATE or DELETE.

        One that is not ``durable`` may be lost if the server crashes within a second.
        """
        alone = self.words.alone if durable else self.words.alone_at_ease
        before, after = ("", "") if self.begun else alone
        return self.execute(before + self.words.lock_wait + sql + after, params)

    def expect(self, sql: str, params: Sequence[object] = ()) -> None:
        """Run a statement that writes one row; if it does not, the verb begins again."""
        if self.write(sql, params) != 1:
            self.again()

    def takes(self, value: bytes) -> bool:
        """Does a statement with this value fit? MySQL and MariaDB end the session of a client that sends more."""
        if self.words.vendor != "mysql" or len(value) < _SMALL:
            return True
        escaped = sum(map(value.count, _ESCAPED))  # each of them is two bytes in the statement
        ((most,),) = self.rows("SELECT @@max_allowed_packet")
        return len(value) + escaped + _REST_OF_STATEMENT < int(most)

    def again(self) -> NoReturn:
        """Let the verb begin again: what it read has changed since."""
        raise _Conflict

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit what is done in the block, or nothing."""
        begin, commit, undo = self.words.begin, "COMMIT", ["ROLLBACK"]
        if self.inside:
            self._savepoints += 1  # MySQL forgets one when another takes its name
            name = f"celery_idempotent_verb_{self._savepoints}"
            begin, commit = f"SAVEPOINT {name}", f"RELEASE SAVEPOINT {name}"
            undo = [f"ROLLBACK TO SAVEPOINT {name}", commit]
        self.control(begin)
        outer, self.begun = self.begun, True
        try:
            yield
            self.control(commit)
        except BaseException:
            with contextlib.suppress(Error):
                for statement in undo:
                    self.control(statement)
            raise
        finally:
            self.begun = outer

    def control(self, sql: str) -> None:
        """Run a statement without parameters."""
        with self._cursor() as cursor:
            cursor.execute(sql)

    def _cursor(self) -> CursorWrapper:
        """Return a cursor that writes the parameters into the statement, also where the project's own do not.

        With Django's option ``server_side_binding`` PostgreSQL would have to guess the types of the parameters, and
        would take neither several statements at once nor parameters of EXECUTE.
        """
        own = self.connection
        if not getattr(own.features, "uses_server_side_binding", False):  # PostgreSQL's has it
            return own.cursor()
        from psycopg import ClientCursor

        own.close_if_health_check_failed()  # now, or cursor() would do it, and open another one
        own.ensure_connection()
        raw: Any = own.connection
        theirs, raw.cursor_factory = raw.cursor_factory, ClientCursor
        try:
            return own.cursor()
        finally:
            raw.cursor_factory = theirs


class Lines:
    """The connections to the database of one alias."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._spare = SpareConnections(alias)
        self._words: Dialect | None = None
        #: Was a verb used by a test? Then this process writes nothing more in the background: after the test, the alias
        #: stands for the project's own database again.
        self.tested = False

    def run(self, work: Callable[[Session], T]) -> T:
        """Do a verb, again if it collided with another or its connection was dead.

        Raises :exc:`~celery_idempotent.errors.StoreUnavailable` or
        :exc:`~celery_idempotent.errors.StoreMisconfigured` for whatever else goes wrong.
        """
        give_up = time.monotonic() + _CONNECT_RETRY_SECONDS
        attempt, lost = 0, False
        while True:
            attempt += 1
            error: Exception | None = None
            trouble: Kind
            try:
                with self._apart(), self._session(fresh=lost) as session:
                    return work(session)
            except _Conflict:
                trouble = "conflict"
            except Error as found:
                error, trouble = found, kind(found, self._vendor())
            if _within(self.own()):
                # Part of the thread's transaction: nothing can be repeated.
                raise self.trouble(error, trouble) from error
            if trouble == "lost" and not lost:
                lost = True
                continue
            # The first of them needs a moment to finish.
            if trouble not in ("conflict", "duplicate") or not backoff.pause(
                attempt, until=give_up, first=0.002, longest=0.05
            ):
                raise self.trouble(error, trouble) from error

    def _apart(self) -> contextlib.AbstractContextManager[None]:
        """Let this process not fork in the middle of a verb on SQLite, see forking.py."""
        return unforked() if self.own().vendor == "sqlite" else contextlib.nullcontext()

    def joined(self) -> bool:
        """Would a verb become part of the thread's transaction?"""
        return _within(self.own())

    def close(self) -> None:
        """Close the spare connections."""
        self._spare.close()

    def words(self, connection: BaseDatabaseWrapper) -> Dialect:
        """Return the dialect of this database."""
        if self._words is None:
            mariadb = connection.vendor == "mysql" and bool(
                getattr(connection, "mysql_is_mariadb", False)
            )
            self._words = dialect(connection.vendor, mariadb=mariadb)
        return self._words

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

    @contextlib.contextmanager
    def _session(self, *, fresh: bool) -> Iterator[Session]:
        """Give the connection for one verb; if it breaks, close it, so that no later query gets a broken one."""
        own = self.own()
        self.tested = self.tested or under_test()
        if in_testcase(own):
            session = Session(own, self.words(own), inside=True)
            # A statement that fails shall not break the transaction of the test.
            with session.transaction():
                yield session
            return
        inside = _within(own)
        if inside or is_idle(own):
            try:
                yield Session(own, self.words(own), inside=inside)
            except (_Conflict, IdempotencyError):
                raise
            except BaseException as error:
                if not inside:
                    _discard_if_broken(own, error)
                raise
            return
        expected = (_Conflict, IdempotencyError)
        with self._spare.take(fresh=fresh, harmless=expected) as connection:
            yield Session(connection, self.words(connection), inside=False)

    def _vendor(self) -> str:
        return self._words.vendor if self._words is not None else self.own().vendor

    def trouble(
        self, error: Exception | None, trouble: Kind
    ) -> StoreUnavailable | StoreMisconfigured:
        """Return our error for what the database raised: by whether trying again may help."""
        where = f"the database {self.alias!r}"
        if error is None or trouble == "duplicate":
            return StoreUnavailable(f"{where}: too many others wrote the same record")
        # Never the text of an error about data: it quotes the data, which may be secret.
        text = str(error).strip().split("\n", 1)[0] if trouble != "misconfigured" else ""
        if trouble == "misconfigured":
            hint = "its log says why"
            if error_code(error) in _NO_TABLE or "no such table" in str(error):
                hint = "put celery_idempotent.django in INSTALLED_APPS and run manage.py migrate"
            return StoreMisconfigured(
                f"{where} refused a statement ({type(error).__name__}): {hint}"
            )
        if trouble == "busy":
            return RowLocked(f"{where}: somebody holds the record's row ({text})")
        return StoreUnavailable(f"{where} cannot serve us at the moment: {text}")


def _within(own: BaseDatabaseWrapper) -> bool:
    """Does a verb have to become part of the thread's transaction (or database)?"""
    if in_testcase(own):
        return True
    if own.vendor != "sqlite" or own.connection is None:
        # In memory: another connection would see another database.
        return False
    if own.in_atomic_block or own.connection.in_transaction:
        return not own.needs_rollback
    return False


def is_idle(own: BaseDatabaseWrapper) -> bool:
    """Is the thread's connection open, our own, and in no transaction of any kind?"""
    if own.vendor == "sqlite" and own.is_in_memory_db():  # type: ignore[attr-defined]
        return True
    raw = own.connection
    if raw is None or own.in_atomic_block or not own.autocommit or is_inherited(raw):
        return False
    # mysqlclient does not say; then Django's own flag, checked above, has to do.
    return not transaction_begun(own, if_unknown=False)


def transaction_begun(own: BaseDatabaseWrapper, *, if_unknown: bool = True) -> bool:
    """Has a transaction begun on the thread's connection, which is open?"""
    raw = own.connection
    if own.vendor == "postgresql":
        return int(raw.info.transaction_status) != 0
    if own.vendor == "mysql":
        status: int | None = getattr(raw, "server_status", None)
        return if_unknown if status is None else bool(status & 1)
    return own.vendor == "sqlite" and bool(raw.in_transaction)


def _discard_if_broken(own: BaseDatabaseWrapper, error: BaseException) -> None:
    """Close the thread's connection, which is in no transaction, unless it still serves."""
    if isinstance(error, Error) and own.connection is not None:
        own.close_if_unusable_or_obsolete()
    else:
        own.close()
