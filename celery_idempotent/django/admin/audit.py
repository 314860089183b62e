"""What operators did, in the log of Django's admin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.contenttypes.models import ContentType

from celery_idempotent.celery.operations import Operation
from celery_idempotent.django.admin.identities import unparse
from celery_idempotent.django.admin.wording import WORDINGS
from celery_idempotent.django.models import IdempotencyRecord
from celery_idempotent.records import Identity

if TYPE_CHECKING:
    from django.http import HttpRequest

#: So many entries a page shows.
_SHOWN = 20


class Note:
    """Who does what to which key, and why: written down before it is done, so that nothing is done without a trace.

    Should the process die in between, the note says that nobody knows how it ended.
    """

    def __init__(
        self,
        request: HttpRequest,
        identity: Identity,
        operation: Operation,
        *,
        reason: str,
        forced: bool,
    ) -> None:
        self._wording = WORDINGS[operation]
        self._forced, self._reason = forced, reason
        user: Any = request.user
        # Not log_action(): Django 5.1 gave it another name and other arguments.
        self._entry = LogEntry.objects.create(
            user_id=user.pk,
            content_type=_content_type(),
            object_id=unparse(identity),
            object_repr=str(identity)[:200],
            action_flag=DELETION if operation == "forget" else CHANGE,
            change_message=self._message(
                f"{self._wording.button}: begun, and it is not known how it ended"
            ),
        )

    def done(self, trouble: str = "") -> None:
        """Note that it was done."""
        self._end(self._wording.done, trouble)

    def failed(self, trouble: str) -> None:
        """Note that it was tried."""
        self._end(f"{self._wording.button} failed", trouble)

    def withdraw(self) -> None:
        """Delete the note: nothing was done."""
        self._entry.delete()

    def _end(self, message: str, trouble: str) -> None:
        self._entry.change_message = self._message(message, trouble)
        self._entry.save(update_fields=["change_message"])

    def _message(self, message: str, trouble: str = "") -> str:
        if self._forced:
            message += ", forced on a live owner"
        if trouble:
            message += f" ({trouble})"
        if self._reason:
            message += f". Reason: {self._reason}"
        return message


def entries(identity: Identity) -> Sequence[LogEntry]:
    """Return what operators did to this key, the last first."""
    found = LogEntry.objects.filter(content_type=_content_type(), object_id=unparse(identity))
    return list(found.select_related("user").order_by("-action_time")[:_SHOWN])


def _content_type() -> ContentType:
    return ContentType.objects.get_for_model(IdempotencyRecord)
