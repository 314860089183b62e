"""Sending what was staged: in order, by one process at a time, and again where it is not known to be sent.

The messages of one group, which is one app's, are sent in the order in which they were staged. Whoever sends them
holds the group by a lease, and deletes each message after the broker has confirmed it::

    process A   takes the group ─ m1: sent, deleted ─ m2: sent ─ ✗ dies
    sweep B                                                         the lease ends ─ takes it ─ m2: sent again ─ m3
    worker                        m1 runs ─ m2 runs ───────────────────────────────────────────── m2: a redelivery

A message that cannot be sent stays first in its group, with the error beside it, and those behind it wait: else a
"refund" could be sent before its "charge". The group rests for a while, longer after each failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.canvas import Signature
from django.db import DatabaseError, connections

from celery_idempotent.celery.publishing import DeferredCall
from celery_idempotent.celery.task import IdempotentTask
from celery_idempotent.django.outbox import rows
from celery_idempotent.django.outbox.broker import confirming, is_unreachable
from celery_idempotent.django.outbox.payload import load
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.identity.identified import MAX_CHARS

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

#: The most messages that one sweep sends, and the longest it works: the next one goes on where it stopped.
LIMIT = 10_000
BUDGET_SECONDS = 25.0

#: After so many groups in a row that did not reach the broker, a sweep does not try the others.
MAX_UNREACHED = 3

#: How many groups, and how many messages of one, are looked up at a time.
_GROUPS = 64
_BATCH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """How many messages were sent, how many groups came to a stop, and whether there is more to send by now."""

    sent: int = 0
    failed: int = 0
    more: bool = False


@contextmanager
def _publisher(app: Celery) -> Iterator[Callable[[bytes], None]]:
    """Give what publishes a staged message and waits until it is, in a thread that works on no task.

    So it is no task's child, and the same from everywhere.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="idempotency-outbox") as pool:
        try:
            yield lambda content: pool.submit(publish_staged, app, content).result()
        finally:
            # Those that a receiver of Celery's signals opened there.
            pool.submit(connections.close_all).result()


def name_of(app: Celery) -> str:
    """Return the name under which the messages of this app are staged: each app has its own broker."""
    return str(app.main or "")[:MAX_CHARS]


def publish_staged(app: Celery, content: bytes) -> None:
    """Publish what was staged, and return when the broker has it."""
    payload = load(app, content)
    options = dict(payload.options)
    task: Any = app.tasks[payload.task] if payload.canvas is None else None
    with confirming(app) as producer:
        if producer is not None:
            options["producer"] = producer
        if payload.canvas is not None:
            canvas: Any = Signature.from_dict(dict(payload.canvas), app=app)
            canvas.apply_async(payload.args, payload.kwargs, **options)
        elif isinstance(task, IdempotentTask):
            call = DeferredCall(
                args=payload.args, kwargs=payload.kwargs, options=options, reserve=payload.once
            )
            task.send_deferred(call)
        else:  # any more
            task.apply_async(payload.args, payload.kwargs, **options)


def send_one(publishing: Callable[[], None], using: str, pk: int, label: str) -> Exception | None:
    """Publish a message and forget it; return the error if it cannot be published."""
    try:
        publishing()
    except Exception as error:  # noqa: BLE001  a broker fails in its own ways, and so does what it is given
        logger.warning(
            "idempotency: staged message %s could not be sent, and stays: %s",
            label,
            rows.error_text(error),
        )
        return error
    # Should this fail, the message is sent again under the same task id.
    rows.delete(using, pk)
    return None


def send(app: Celery, group: str, *, using: str = "default") -> Sent:
    """Send a group of this app now, in order, also one that rests after a failure.

    One that another process is sending is left to it.
    """
    lease = rows.GroupLease(using, name_of(app), group)
    head = rows.head_of(lease)
    if head is None:
        return Sent()
    if not lease.take(head, resting=True):
        return Sent(more=True)
    with _publisher(app) as send_now:
        sent, error = _send_group(send_now, lease, LIMIT, time.monotonic() + BUDGET_SECONDS)
    more = rows.head_of(lease) is not None
    return Sent(sent=sent, failed=int(error is not None), more=more)


def sweep(app: Celery, *, using: str = "default", limit: int = LIMIT) -> Sent:
    """Send what dead senders left, and what could not be sent before and has rested.

    Safe to run on any number of machines at once: a group is held by one of them, for a lease.
    """
    until = time.monotonic() + BUDGET_SECONDS
    report, failures = Sent(), 0
    if not rows.heads(using, name_of(app), 1):
        return report
    with _publisher(app) as send_now:
        for lease in _leases(using, name_of(app), until):
            sent, error = _send_group(send_now, lease, limit - report.sent, until)
            failures = failures + 1 if is_unreachable(app, error) else 0
            failed = report.failed + (error is not None)
            report = replace(report, sent=report.sent + sent, failed=failed)
            if report.sent >= limit or failures >= MAX_UNREACHED:
                break
    if report.sent or report.failed:
        logger.info(
            "idempotency: outbox of %s: %d messages sent, %d groups could not be",
            using,
            report.sent,
            report.failed,
        )
    return replace(report, more=bool(rows.heads(using, name_of(app), 1)))


def upkeep(app: Celery, *, using: str, limit: int) -> dict[str, int]:
    """Do the outbox's part of the beat task; return the counts.

    Raises:
        StoreUnavailable: if the database failed; what was sent and not deleted is sent again.
    """
    try:
        report = sweep(app, using=using, limit=limit)
    except DatabaseError as error:
        raise StoreUnavailable(
            f"the outbox in the database {using!r} could not be swept ({type(error).__name__}): is it up, and migrated?"
        ) from error
    return {"outbox_sent": report.sent, "outbox_failed": report.failed}


def _leases(using: str, app: str, until: float) -> Iterator[rows.GroupLease]:
    """Hold one after the other of the groups that wait, until none is left to try, or the time is over.

    One that is not had at once, and is due all the same when they are looked up again, is left to the next sweep: its
    row is locked, and a try may take as long as the database waits for a lock.
    """
    tried: set[int] = set()
    while True:
        due = rows.heads(using, app, _GROUPS + len(tried))
        tried.intersection_update(head for head, _ in due)  # the others were another sweep's
        untried = [(head, group) for head, group in due if head not in tried]
        if not untried:
            break
        for head, group in untried:
            if time.monotonic() > until:
                return
            lease = rows.GroupLease(using, app, group)
            if lease.take(head):
                yield lease
            else:
                tried.add(head)
    if tried:
        logger.warning(
            "idempotency: outbox of %s: %d groups could not be taken, and are left to the next sweep: are their rows "
            "locked, or is the database read-only?",
            using,
            len(tried),
        )


def _send_group(
    send_now: Callable[[bytes], None], lease: rows.GroupLease, limit: int, until: float
) -> tuple[int, Exception | None]:
    """Send a group that is held; return how many messages were sent, and what stopped it.

    Before each message the lease is renewed if it is time for that (``hold``). Where another process has the group by
    now, that one goes on.
    """
    sent = 0
    while batch := lease.messages(_BATCH):
        for message in batch:
            if sent >= limit or time.monotonic() > until:
                lease.give_back()
                return sent, None
            if not lease.hold():
                return sent, None
            publishing = partial(send_now, bytes(message.payload))
            error = send_one(publishing, lease.using, message.pk, str(message))
            if error is not None:
                lease.fail(message.pk, error)
                return sent, error
            sent += 1
        if len(batch) < _BATCH:
            break
    return sent, None
