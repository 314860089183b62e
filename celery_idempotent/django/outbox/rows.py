"""The statements on the table of the outbox: each of them short, and nothing is locked while a message is sent."""

from __future__ import annotations

import logging
import random
import re
import time
import uuid

from django.db import DatabaseError, transaction
from django.db.models import Min, QuerySet

from celery_idempotent.django.outbox.models import ERROR_CHARS, NowMs, OutboxMessage

logger = logging.getLogger(__name__)

#: How long one who sends a group is left alone: from the staging to the commit, and for each message after it.
LEASE_MS = 60_000

#: A group whose message could not be sent rests this long, doubled with every failure, up to the longest.
BACKOFF_MS = 1_000
LONGEST_BACKOFF_MS = 5 * 60_000

#: To the last @ of the word: a password that was not quoted may contain one, or a slash.
_CREDENTIALS = re.compile(r"://\S*@")


class GroupLease:
    """The right to send one group of an app, for :data:`LEASE_MS` unless it is renewed."""

    __slots__ = ("_renewed", "app", "group", "holder", "using")

    def __init__(self, using: str, app: str, group: str) -> None:
        self.using = using
        self.app = app
        self.group = group
        self.holder = uuid.uuid4().hex
        self._renewed = time.monotonic()

    def take(self, head: int, *, resting: bool = False) -> bool:
        """Take a group by its oldest message; ``False`` if another process was faster, or sends it now.

        One conditional update decides: the loser of a race has lost one statement, and no row stays locked.
        ``resting``: also a group that rests after a failure.
        """
        free = rows(self.using).filter(pk=head)
        free = free.filter(holder="") if resting else free.filter(due_ms__lte=NowMs())
        self._renewed = time.monotonic()
        try:
            if not free.update(holder=self.holder, due_ms=NowMs() + LEASE_MS):
                return False
        except DatabaseError as error:
            # Two who update one row: above READ COMMITTED the second gets this instead of 0 rows.
            logger.debug("idempotency: outbox group %s was not taken: %s", self.group, error)
            return False
        rest = self.all().filter(pk__gt=head)
        rest.update(holder=self.holder, due_ms=NowMs() + LEASE_MS)
        return True

    def hold(self) -> bool:
        """Renew the lease where it is time for that; ``False`` if another process sends this group by now."""
        now = time.monotonic()
        if now - self._renewed < LEASE_MS / 3000:
            return True
        self._renewed = now
        return bool(self._mine().update(due_ms=NowMs() + LEASE_MS))

    def messages(self, limit: int) -> list[OutboxMessage]:
        """Return the oldest messages of the group."""
        return list(self._mine().order_by("pk")[:limit])

    def fail(self, pk: int, error: BaseException) -> None:
        """Note that a message could not be sent, and let the group rest."""
        with transaction.atomic(using=self.using):
            failed = rows(self.using).filter(pk=pk)
            before = failed.values_list("attempts", flat=True).first() or 0
            failed.update(attempts=before + 1, failed_ms=NowMs(), error=error_text(error))
            rest = min(BACKOFF_MS * 2 ** min(before, 20), LONGEST_BACKOFF_MS)
            wait = int(rest * random.uniform(0.75, 1.25))
            self._mine().update(holder="", due_ms=NowMs() + wait)

    def give_back(self) -> None:
        """Let anybody send the rest of the group, at once."""
        self._mine().update(holder="", due_ms=NowMs())

    def all(self) -> QuerySet[OutboxMessage]:
        """Return all messages of the group, held or not.

        Two apps may use one name, and have two groups then: what is for one broker does not go to the other, nor wait
        for it.
        """
        return rows(self.using).filter(group=self.group, app=self.app)

    def _mine(self) -> QuerySet[OutboxMessage]:
        return self.all().filter(holder=self.holder)


def rows(using: str) -> QuerySet[OutboxMessage]:
    """Return all staged messages of a database, whatever its routers say."""
    return OutboxMessage.objects.using(using)


def add(using: str, message: OutboxMessage) -> int:
    """Stage a message in the transaction that this connection is in; return its id."""
    message.created_ms = NowMs()  # the database computes it
    message.due_ms = NowMs() + LEASE_MS
    message.save(using=using, force_insert=True)
    return int(message.pk)


def delete(using: str, pk: int) -> bool:
    """Forget a message; ``False`` if it is gone already."""
    return bool(rows(using).filter(pk=pk).delete()[0])


def error_text(error: BaseException) -> str:
    """Return class and message of an error, without the credentials that a URL in it may hold."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return _CREDENTIALS.sub("://***@", text)[:ERROR_CHARS]


def has_earlier(lease: GroupLease, pk: int) -> bool:
    """Does an older message of the group still wait?"""
    return lease.all().filter(pk__lt=pk).exists()


def head_of(lease: GroupLease) -> int | None:
    """Return the oldest message of the group, held or not."""
    return lease.all().order_by("pk").values_list("pk", flat=True).first()


def heads(using: str, app: str, limit: int) -> list[tuple[int, str]]:
    """Return the oldest messages (id and group) of groups that anybody may send now, those due longest first.

    One pass over the table finds the oldest of each group. Where each message is asked for an older one instead, a
    database may look at every pair of a large group, or of what another app has in a group of that name.
    """
    oldest = rows(using).filter(app=app).values("group").annotate(oldest=Min("pk"))
    due = rows(using).filter(pk__in=oldest.values("oldest"), due_ms__lte=NowMs())
    return list(due.order_by("due_ms", "pk").values_list("pk", "group")[:limit])
