"""The log of Django's admin: an entry for each operation of a user, under the record's name in addresses."""

from __future__ import annotations

import json
from collections.abc import Sequence

from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.auth import get_user_model
from django.contrib.contenttypes.models import ContentType
from django.db import connection

from celery_idempotent.celery.operations import OperationRequest
from celery_idempotent.django.models import IdempotencyRecord
from celery_idempotent.keys.stamp import is_text
from celery_idempotent.records import Identity

#: The vendor of ``DATABASES = {}``, as ``idempotency web`` has it: there is no log.
NO_DATABASE = "unknown"


def write_entry(identity: Identity, request: OperationRequest, message: str) -> None:
    """Log an operation that a user of this project did or may have done; ignore any other name."""
    if connection.vendor == NO_DATABASE:
        return
    users = get_user_model()._default_manager  # a model of the project's own may have no `objects`
    user = users.filter(**{get_user_model().USERNAME_FIELD: request.who}).first()
    if user is None:
        return
    # Not log_action(): Django 5.1 gave it another name and other arguments.
    LogEntry.objects.create(
        user_id=user.pk,
        content_type=_content_type(),
        object_id=unparse(identity),
        object_repr=str(identity)[:200],
        action_flag=DELETION if request.operation == "forget" else CHANGE,
        change_message=message,
    )


def log_entries(identity: Identity) -> Sequence[LogEntry]:
    """Return the last twenty entries of this key, the last first."""
    if connection.vendor == NO_DATABASE:
        return []
    found = LogEntry.objects.filter(content_type=_content_type(), object_id=unparse(identity))
    return list(found.select_related("user").order_by("-action_time")[:20])


def _content_type() -> ContentType:
    return ContentType.objects.get_for_model(IdempotencyRecord)


def unparse(identity: Identity) -> str:
    """Return the identity as one text."""
    parts = [identity.namespace, identity.scope, identity.key]
    return json.dumps(parts, ensure_ascii=False, separators=(",", ":"))


def parse(name: str) -> Identity:
    """Return the identity that :func:`unparse` wrote down.

    Raises:
        ValueError: if it wrote no such text.
    """
    try:
        namespace, scope, key = json.loads(name)
    except (RecursionError, TypeError):
        raise ValueError("no list of three") from None
    # Printable: without NUL, which no database takes, and without lone surrogates.
    if not (is_text(namespace) and is_text(key) and (scope == "" or is_text(scope))):
        raise ValueError("not the texts of an identity")
    return Identity(namespace=namespace, scope=scope, key=key)
