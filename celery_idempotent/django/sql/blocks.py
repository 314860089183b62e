"""The block of a run's transaction: begun on a live connection, and never committed by a rollback that was cut off.

::

    BEGIN, lock ─┬─ ✗ the server had closed the connection: once more, on a new one
                 └─ body ─┬─ settle ─ COMMIT
                          └─ raises ─ ROLLBACK ─ ✗ a time limit strikes: the connection is closed, which rolls back

Both ✗ are invisible to the task: the first since nothing has run yet, the second since nothing of it is left.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from django.db import Error
from django.db.transaction import Atomic

from celery_idempotent.django.sql.commit_hooks import make_robust
from celery_idempotent.django.sql.connections import Lines
from celery_idempotent.django.sql.dialects import kind
from celery_idempotent.django.sql.interruptions import drop, struck
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import Record

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from celery_idempotent.django.sql.atomic import ClaimTransaction


class RunBlock(Atomic):
    """``transaction.atomic`` that begins with the run's first statements, on a live connection."""

    def __init__(
        self,
        lines: Lines,
        own: BaseDatabaseWrapper,
        run: ClaimTransaction,
        record: Record | None,
        *,
        nested: bool,
    ) -> None:
        super().__init__(lines.alias, True, False)
        self._own = own
        self._nested = nested
        self._run = run
        self._record = record
        self._lines = lines
        #: Closing this now comes too late: another run uses the connection.
        self.over = False

    def abandoned(self, record: Record) -> bool:
        """Close the connection if this is the run of the claim."""
        if self._nested or not self._run.of(record):
            return False
        self.over = True
        drop(self._own)
        return True

    def __enter__(self) -> None:
        """Begin, once more if the server had closed the connection."""
        try:
            self._enter()
        except Error as error:
            if kind(error, self._own.vendor) != "lost":
                raise self._trouble(error) from error
            self._own.close()
            try:
                self._enter()
            except Error as again:
                raise self._trouble(again) from again

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit or roll back."""
        if self.over:
            return
        undo = kind is not None or self._own.needs_rollback
        if not self._nested and not undo:
            self._run.waiting = make_robust(self._own, self._record)
        if self._nested or not undo or self._rolled_back(error):
            super().__exit__(kind, error, trace)

    def _rolled_back(self, error: BaseException | None) -> bool:
        """Roll back; ``False`` if that took the connection.

        Django turns autocommit on whatever came of its ROLLBACK, and that *commits* on MySQL and SQLite: a time limit
        that strikes there would leave the writes of a task without their record.
        """
        own = self._own
        try:
            if not struck(error):
                own._rollback()  # type: ignore[attr-defined]  # noqa: SLF001
                return True
        except Error:
            pass
        except BaseException:
            drop(own)
            raise
        drop(own)
        return False

    def _enter(self) -> None:
        if not self._nested:
            # Django leaves that of an earlier transaction there.
            self._own.rollback_exc = None  # type: ignore[attr-defined]
        try:
            if not self._nested:
                self._run.plan()
            super().__enter__()
        except BaseException:
            if not self._nested:
                drop(self._own)
            raise
        try:
            self._run.begin()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _trouble(self, error: Error) -> StoreUnavailable | StoreMisconfigured:
        return self._lines.trouble(error, kind(error, self._own.vendor))


def refuse_outer(own: BaseDatabaseWrapper) -> None:
    """Raise if the thread is in a transaction that the run would become part of."""
    # Django's TestCase wraps each test in blocks of its own, and calls durable ones inner then.
    outer = [block for block in own.atomic_blocks if not getattr(block, "_from_testcase", False)]
    if outer or (own.connection is not None and not own.in_atomic_block and not own.autocommit):
        raise StoreMisconfigured(
            "an idempotency_atomic task commits its own writes with its record, so it cannot run"
            " inside another transaction: call it outside of atomic()"
        )
