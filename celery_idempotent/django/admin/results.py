"""What Celery's result backend says about the task that a record names."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db import connections

from celery_idempotent.operations.values import Shown, text_of

if TYPE_CHECKING:
    from celery import Celery
    from celery.backends.base import Backend

#: What a result backend knows of a task.
Meta = dict[str, Any]

logger = logging.getLogger(__name__)

#: How long a page waits for the result backend, in seconds. Its own limits are for workers: Celery lets Redis take two
#: minutes, and tries again twenty times.
BACKEND_TIMEOUT = 3.0

#: So many questions may be without an answer at a time: each has a thread until the backend's own limits end it.
_asking = threading.BoundedSemaphore(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendResult:
    """A state of Celery, PENDING where nothing is known, and the value for those who may see it."""

    state: str = ""
    done: datetime | str | None = None
    value: Shown | None = None
    trouble: str = ""


def result_of(app: Celery, task_id: str, *, may_see: bool) -> BackendResult:
    """Ask the app's result backend, which reads only what the app accepts."""
    try:
        meta = _stored_meta(app.backend, task_id)
    except (NotImplementedError, AttributeError):
        return BackendResult(trouble="This app keeps no results.")
    except NotYet:
        logger.warning(
            "idempotency: the result backend does not answer within %s s", BACKEND_TIMEOUT
        )
        return BackendResult(
            trouble=f"The result backend does not answer within {BACKEND_TIMEOUT:g} seconds."
        )
    except Exception as error:
        logger.warning("idempotency: the result backend does not answer", exc_info=True)
        return BackendResult(
            trouble=f"The result backend does not answer ({type(error).__name__})."
        )
    state = str(meta.get("status"))
    value = text_of(meta.get("result")) if may_see and state in {"SUCCESS", "FAILURE"} else None
    return BackendResult(state=state, done=meta.get("date_done"), value=value)


def _stored_meta(backend: Backend, task_id: str) -> Meta:
    """Ask in a thread of its own: whatever the backend is, a page does not hang because it does."""
    if not _asking.acquire(blocking=False):
        raise NotYet
    answer: Future[Meta] = Future()

    def ask() -> None:
        try:
            answer.set_result(backend.get_task_meta(task_id))
        except BaseException as error:  # noqa: BLE001  the page's to judge
            answer.set_exception(error)
        finally:
            _asking.release()
            connections.close_all()  # this thread's, of a backend in the database

    try:
        threading.Thread(target=ask, name="idempotency-result", daemon=True).start()
    except BaseException:
        _asking.release()
        raise
    return answer.result(BACKEND_TIMEOUT)
