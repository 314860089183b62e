"""The statements on the table of the outbox: one each, and nothing is locked while a message is sent."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Collection
from typing import cast

from django.db import DatabaseError
from django.db.models import F, QuerySet

from celery_idempotent.django.outbox.models import ERROR_CHARS, NowMs, OutboxMessage

logger = logging.getLogger(__name__)

#: How long the sender of a message is left alone: from the staging, or from when a sweep took the message.
LEASE_MS = 60_000

#: A message that could not be sent rests this long, doubled with every failure, up to the longest.
BACKOFF_MS = 1_000
LONGEST_BACKOFF_MS = 5 * 60_000

#: To the last @ of the word: a password that was not quoted may contain one, or a slash.
_CREDENTIALS = re.compile(r"://\S*@")


def rows(using: str) -> QuerySet[OutboxMessage]:
    """Return all staged messages of a database, whatever its routers say."""
    return OutboxMessage.objects.using(using)


def add(using: str, message: OutboxMessage) -> int:
    """Stage a message in the transaction that this connection is in; return its id."""
    message.created_ms = NowMs()  # the database computes it
    message.due_ms = NowMs() + LEASE_MS
    message.save(using=using, force_insert=True)
    return int(message.pk)


def due(using: str, app: str, limit: int) -> list[int]:
    """Return the messages of an app that anybody may send now, those due longest first."""
    found = rows(using).filter(app=app, due_ms__lte=NowMs())
    return list(found.order_by("due_ms", "pk").values_list("pk", flat=True)[:limit])


def take(using: str, pk: int, *, within_ms: int = 0) -> bool:
    """Take a message that is due now, or within this time; ``False``: another process sends it, or it is locked.

    One conditional update decides: the loser of a race has lost one statement, and no row stays locked.
    """
    free = rows(using).filter(pk=pk, due_ms__lte=NowMs() + within_ms)
    try:
        return bool(free.update(due_ms=NowMs() + LEASE_MS))
    except DatabaseError as error:
        # Two who update one row: above READ COMMITTED the second gets this instead of 0 rows.
        logger.debug("idempotency: outbox message %s was not taken: %s", pk, error)
        return False


def fail(using: str, pk: int, error: str, *, attempts: int) -> None:
    """Note that a message could not be sent, after so many attempts before, and let it rest."""
    rest = min(BACKOFF_MS * 2 ** min(attempts, 20), LONGEST_BACKOFF_MS)
    wait = int(rest * random.uniform(0.75, 1.25))
    rows(using).filter(pk=pk).update(
        attempts=attempts + 1, failed_ms=NowMs(), error=error, due_ms=NowMs() + wait
    )


def delete(using: str, pk: int) -> None:
    """Forget a message."""
    rows(using).filter(pk=pk)._raw_delete(using)  # noqa: SLF001  the public one has three statements


def error_text(error: BaseException) -> str:
    """Return class and message of an error, without the credentials that a URL in it may hold."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return _CREDENTIALS.sub("://***@", text)[:ERROR_CHARS]


def oldest_ms(*, using: str | None) -> int | None:
    """Return for how long the oldest message waits; ``None`` if none does, or without a database (``using``)."""
    if using is None:
        return None
    ages = rows(using).annotate(age_ms=NowMs() - F("created_ms")).order_by("pk")
    return cast("int | None", ages.values_list("age_ms", flat=True).first())


def of_scopes(scopes: Collection[str], *, using: str) -> QuerySet[OutboxMessage]:
    """Return the messages of these scopes (canonical)."""
    return rows(using).filter(scope__in=scopes)
