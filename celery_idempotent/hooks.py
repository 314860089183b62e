"""Celery signal receivers, and the names of the headers that carry a key."""

from __future__ import annotations

from typing import Any

from celery.signals import before_task_publish

__all__ = ["KEY_HEADER", "SCOPE_HEADER", "STAMP_HEADER"]

#: What a publisher of any language may set: the raw key (str, int, or a list of these) and scope.
KEY_HEADER = "idempotency_key"
SCOPE_HEADER = "idempotency_scope"

#: Canonical key, scope and fingerprint, computed once when the message was first published.
STAMP_HEADER = "idempotency"


@before_task_publish.connect(weak=False, dispatch_uid="celery_idempotent.carry_key")
def carry_key(headers: Any = None, properties: Any = None, **_: Any) -> None:
    """Move a key given to ``app.send_task("name", idempotency_key=...)`` into the headers.

    Celery makes an option that it does not know a message property, which RabbitMQ drops (CELERY.md, "how a key
    travels"); an ``IdempotentTask`` publishing itself has taken its key out of the options already.
    """
    if not isinstance(headers, dict) or not isinstance(properties, dict):
        return
    for name in (KEY_HEADER, SCOPE_HEADER):
        if name in properties:
            value = properties.pop(name)
            headers.setdefault(name, value)
