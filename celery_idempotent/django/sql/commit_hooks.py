"""What a task wants done once its transaction is committed: all of it is tried, and what fails is told."""

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

__all__ = ["make_robust"]

logger = logging.getLogger("celery_idempotent.django.commit_hooks")  # the docs name it


def make_robust(own: BaseDatabaseWrapper, record: Record | None) -> list[Callable[[], None]]:
    """Let the functions that wait for this connection's commit fail each for itself.

    Django gives the first one's exception to the caller and drops the others. Here that would be a task that fails
    although it is committed, and whose duplicates succeed; so the caller is given nothing, and the log is.

    Returned are those that nobody called yet: Django calls none where the answer to the COMMIT is lost.
    """
    waiting: list[Any] = own.run_on_commit
    uncalled: list[Callable[[], None]] = []
    waiting[:] = [
        (entry[0], partial(_call_hook, entry[1], record, uncalled), False) for entry in waiting
    ]
    uncalled += [entry[1] for entry in waiting]
    return uncalled


def _call_hook(
    function: Callable[[], object], record: Record | None, uncalled: list[Callable[[], None]]
) -> None:
    uncalled.clear()  # the commit is known
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
                "event": "on_commit_failed",
                "task": _task(record),
                "key": "" if record is None else str(record.identity),
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
