"""The ``on_commit`` functions of a task: each of them is called, and one that fails is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import current_task

from celery_idempotent.django.sql.interruptions import struck

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from celery_idempotent.records import Record

logger = logging.getLogger("celery_idempotent.django.commit_hooks")  # the docs name it


def make_robust(own: BaseDatabaseWrapper, record: Record | None) -> list[Callable[[], None]]:
    """Wrap the functions that wait for this connection's commit, so that one that fails does not stop the others.

    Django raises the first one's exception and drops the rest. The record is committed by then, so the task would fail
    while its duplicates get its result. Therefore the exception is logged and not raised::

        Django   COMMIT ─ send receipt ✗ ───────────────────────── task fails, the ledger is never informed
        here     COMMIT ─ send receipt ✗ (logged) ─ inform ledger ─ task succeeds

    Returns the functions that were not called yet: Django calls none of them if the answer to the COMMIT is lost.
    """
    waiting: list[Any] = own.run_on_commit  # the stubs know entries of two parts only
    uncalled: list[Callable[[], None]] = []
    waiting[:] = [
        (entry[0], partial(_call_hook, entry[1], record, uncalled), False) for entry in waiting
    ]
    uncalled += [entry[1] for entry in waiting]
    return uncalled


def _call_hook(
    function: Callable[[], object], record: Record | None, uncalled: list[Callable[[], None]]
) -> None:
    uncalled.clear()  # the COMMIT was answered, and Django calls them all
    try:
        function()
    except BaseException as error:
        over = struck(error)
        logger.exception(
            "idempotency: %s is committed, but %s, which it wanted done after that, failed%s",
            _task(record),
            _name_of_hook(function),
            ", and what was to follow is left out: its time is over" if over else "",
            extra={
                "idempotency_outcome": "on_commit_failed",
                "idempotency_task": _task(record),
                "idempotency_key": "" if record is None else record.identity.key,
            },
        )
        if over:
            raise


def _task(record: Record | None) -> str:
    task: Any = current_task
    if task:
        return str(task.name)
    return "" if record is None else record.identity.namespace


def _name_of_hook(function: object) -> str:
    """Return what the function is called, without the arguments that it was given beforehand."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))
