"""What Sentry's Celery integration must not report a second time; does nothing where Sentry is not in use."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery.app.task import Context

#: The header that makes a message a run of a monitor (Sentry Crons).
_MONITOR = "sentry-monitor-slug"


def reported_before(error: BaseException) -> None:
    """Keep an error that is answered from a record out of what the delivery at work reports."""
    scope = getattr(sys.modules.get("sentry_sdk"), "get_isolation_scope", None)
    if scope is None:
        return

    def drop(event: object, hint: dict[str, Any]) -> object:
        return None if (hint.get("exc_info") or (None, None))[1] is error else event

    scope().add_event_processor(drop)


def still_on_its_way(request: Context) -> None:
    """Leave the monitor's check-in to the copy that was published: to Sentry a retry is a run that failed."""
    headers = request.headers
    for each in (headers, headers.get("headers")) if isinstance(headers, dict) else ():
        if isinstance(each, dict):
            each.pop(_MONITOR, None)
