"""Celery's ``autoretry_for``, for an error that comes after the body: from the end of its transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from celery.app.autoretry import add_autoretry_behaviour

if TYPE_CHECKING:
    from celery_idempotent.celery.task import IdempotentTask

__all__ = ["outcome"]


def outcome(task: IdempotentTask, error: Exception) -> Exception:
    """Return what is raised for an error as if the body had raised it: a retry, published by now, or the error.

    Celery wraps ``autoretry_for`` around ``run`` when the task is made. The same wrapper goes around a copy of the task
    here, whose ``run`` raises the error: so every option counts, in whatever way this release of Celery reads it.
    """

    def run() -> NoReturn:
        raise error

    late = object.__new__(type(task))
    vars(late).update({**vars(task), "run": run})
    vars(late).pop("_orig_run", None)
    add_autoretry_behaviour(late)
    try:
        late.run()
    except Exception as found:  # noqa: BLE001  whatever it is
        return found
    raise AssertionError
