"""What a worker says about its setup when it starts: a line in its log for each finding, and nothing else."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from celery_idempotent.celery.checks import check_settings, check_store
from celery_idempotent.celery.registry import has_loaded_tasks

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["begin"]

logger = logging.getLogger(__name__)

_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING}


def begin(app: Celery) -> None:
    """Look at everything, unless the app does not want that; nobody waits for it, not even the end of the worker.

    In a thread: a server that does not answer would keep the worker from its messages.
    """
    has_loaded_tasks(app)
    if app.conf.get("idempotency_check_at_start", True):
        name = "celery-idempotent-checks"
        threading.Thread(target=_report, args=(app,), name=name, daemon=True).start()


def _report(app: Celery) -> None:
    try:
        for look in (check_settings, check_store):  # what needs no server is said at once
            for each in look(app):
                said = f"{each.problem.rstrip('.')}. {each.hint}"
                extra = {"finding": each.id}
                logger.log(_LEVELS[each.level], "idempotency: %s %s", each.id, said, extra=extra)
    except Exception:
        logger.warning("idempotency: the checks themselves failed", exc_info=True)
