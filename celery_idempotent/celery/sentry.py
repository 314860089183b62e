"""Keeps errors from being reported to Sentry twice, where its Celery integration is in use."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["reported_before", "still_on_its_way"]

#: The header that makes a message a run of a monitor (Sentry Crons).
_MONITOR = "sentry-monitor-slug"


def reported_before(error: BaseException) -> None:
    """Keep an error that is answered from a record out of what the delivery at work reports."""
    scope: Any = getattr(sys.modules.get("sentry_sdk"), "get_isolation_scope", None)
    if scope is None:
        return

    def drop(event: Any, hint: dict[str, Any]) -> Any:
        return None if (hint.get("exc_info") or (None, None))[1] is error else event

    scope().add_event_processor(drop)


def still_on_its_way(request: Any) -> None:
    """Leave the monitor's check-in to the copy that was published: to Sentry a retry is a run that failed."""
    headers = request.headers
    for each in (headers, headers.get("headers")) if isinstance(headers, dict) else ():
        if isinstance(each, dict):
            each.pop(_MONITOR, None)
