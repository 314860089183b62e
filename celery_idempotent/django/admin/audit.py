"""What operators did, in the log of Django's admin.

::

    begun: "Forget: begun, and it is not known how it ended" ─ the operation ─┬─ done: "Forgotten"
                                                                              ├─ failed: "Forget failed: …"
                                                                              ├─ nothing was done: the entry is deleted
                                                                              └─ ✗ the process dies: the entry stays

In this order, since an operation without an entry could not be told from one that nobody did.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.auth import get_user_model
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import SynchronousOnlyOperation
from django.db import DatabaseError

from celery_idempotent.celery.operations import StartedOperation
from celery_idempotent.django.admin.identities import unparse
from celery_idempotent.django.models import IdempotencyRecord
from celery_idempotent.operations.acting import DONE
from celery_idempotent.records import Identity

logger = logging.getLogger(__name__)

#: So many entries a page shows.
_SHOWN = 20


class AdminLogEntry:
    """Who does what to which key, and why: written down before it is done, so that nothing is done without a trace.

    If the process dies in between, the entry says that the outcome is unknown.
    """

    def __init__(self, started: StartedOperation, user_pk: int | str) -> None:
        self._started, request = started, started.request
        self._button = request.operation.capitalize()
        # Not log_action(): Django 5.1 gave it another name and other arguments.
        self._entry = LogEntry.objects.create(
            user_id=user_pk,
            content_type=_content_type(),
            object_id=unparse(started.identity),
            object_repr=str(started.identity)[:200],
            action_flag=DELETION if request.operation == "forget" else CHANGE,
            change_message=self._message(
                f"{self._button}: begun, and it is not known how it ended"
            ),
        )

    def done(self, trouble: str = "") -> None:
        """Write that it was done."""
        self._end(DONE[self._started.request.operation].capitalize(), trouble)

    def failed(self, trouble: str) -> None:
        """Write that it was tried."""
        self._end(f"{self._button} failed", trouble)

    def withdraw(self) -> None:
        """Delete the entry: nothing was done."""
        with self._ignoring_outages():
            self._entry.delete()

    def _end(self, message: str, trouble: str) -> None:
        self._entry.change_message = self._message(message, trouble)
        with self._ignoring_outages():
            self._entry.save(update_fields=["change_message"])

    @contextlib.contextmanager
    def _ignoring_outages(self) -> Iterator[None]:
        """Let what was done be done: without its end the entry says that the outcome is unknown."""
        try:
            yield
        except DatabaseError as error:
            logger.warning("idempotency: the admin's log does not have how it ended: %s", error)

    def _message(self, message: str, trouble: str = "") -> str:
        request = self._started.request
        if self._started.forced:
            message += ", forced on a live owner"
        if trouble:
            message += f" ({trouble})"
        if request.reason:
            message += f". Reason: {request.reason}"
        return message


def open_entry(started: StartedOperation) -> AdminLogEntry | None:
    """Begin an entry about a user of this project; ``None`` about anybody else."""
    users = get_user_model()._default_manager  # a model of the project's own may have no `objects`
    try:
        user = users.filter(**{get_user_model().USERNAME_FIELD: started.request.who}).first()
        return None if user is None else AdminLogEntry(started, user.pk)
    except (DatabaseError, SynchronousOnlyOperation) as error:
        # An incident does not wait for this database: the event and the log have it.
        logger.warning("idempotency: the admin's log does not have what follows: %s", error)
        return None


def log_entries(identity: Identity) -> Sequence[LogEntry]:
    """Return what operators did to this key, the last first."""
    found = LogEntry.objects.filter(content_type=_content_type(), object_id=unparse(identity))
    return list(found.select_related("user").order_by("-action_time")[:_SHOWN])


def _content_type() -> ContentType:
    return ContentType.objects.get_for_model(IdempotencyRecord)
