"""What Celery's result backend says about the task that a record names."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery_idempotent.django.admin.values import Shown, text_of

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["Result", "result_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A state of Celery, PENDING where nothing is known, and the value for those who may see it."""

    state: str = ""
    done: datetime | str | None = None
    value: Shown | None = None
    trouble: str = ""


def result_of(app: Celery, task_id: str, *, may_see: bool) -> Result:
    """Ask the app's result backend, which reads only what the app accepts."""
    backend: Any = app.backend
    try:
        meta = backend.get_task_meta(task_id)
    except (NotImplementedError, AttributeError):
        return Result(trouble="This app keeps no results.")
    except Exception as error:
        logger.warning("idempotency: the result backend does not answer", exc_info=True)
        return Result(trouble=f"The result backend does not answer ({type(error).__name__}).")
    state = str(meta.get("status"))
    value = text_of(meta.get("result")) if may_see and state in {"SUCCESS", "FAILURE"} else None
    return Result(state=state, done=meta.get("date_done"), value=value)
