"""Runs the checks when a worker starts, and logs a line for each finding."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from celery_idempotent.celery.checks import check_settings, check_store
from celery_idempotent.celery.registry import has_loaded_tasks

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING}


def begin(app: Celery) -> None:
    """Run the checks in a thread.

    A server that does not answer must not delay the worker's first message, nor its end: the thread is a daemon.
    """
    has_loaded_tasks(app)
    name = "celery-idempotent-checks"
    threading.Thread(target=_report, args=(app,), name=name, daemon=True).start()


def _report(app: Celery) -> None:
    try:
        for look in (check_settings, check_store):  # first those that need no server
            for each in look(app):
                said = f"{each.problem.rstrip('.')}. {each.hint}"
                extra = {"idempotency_finding": each.id}
                logger.log(_LEVELS[each.level], "idempotency: %s %s", each.id, said, extra=extra)
    except Exception:
        logger.warning("idempotency: the checks themselves failed", exc_info=True)
