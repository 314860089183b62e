"""What operators did, in the log of Django's admin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.contenttypes.models import ContentType

from celery_idempotent.django.admin.identities import unparse
from celery_idempotent.django.admin.wording import WORDINGS
from celery_idempotent.django.models import IdempotencyRecord
from celery_idempotent.operations import Operation
from celery_idempotent.records import Identity

if TYPE_CHECKING:
    from django.http import HttpRequest

__all__ = ["entries", "note"]

#: So many entries a page shows.
_SHOWN = 20


def note(
    request: HttpRequest,
    identity: Identity,
    operation: Operation,
    reason: str,
    forced: bool,
    trouble: str,
) -> None:
    """Write down who did what to which key, and why."""
    user: Any = request.user
    message = WORDINGS[operation].done
    if forced:
        message += ", forced on a live owner"
    if trouble:
        message += f" ({trouble})"
    if reason:
        message += f". Reason: {reason}"
    # Not log_action(): Django 5.1 gave it another name and other arguments.
    LogEntry.objects.create(
        user_id=user.pk,
        content_type=_content_type(),
        object_id=unparse(identity),
        object_repr=str(identity)[:200],
        action_flag=DELETION if operation == "forget" else CHANGE,
        change_message=message,
    )


def entries(identity: Identity) -> Sequence[LogEntry]:
    """Return what operators did to this key, the last first."""
    found = LogEntry.objects.filter(content_type=_content_type(), object_id=unparse(identity))
    return list(found.select_related("user").order_by("-action_time")[:_SHOWN])


def _content_type() -> ContentType:
    return ContentType.objects.get_for_model(IdempotencyRecord)
