"""Sending what was staged: one message at a time, and again where it is not known to be sent.

Whoever sends a message holds it by a lease, and deletes it after the broker has confirmed it::

    process A   m1: sent, deleted ─ m2: sent ─ ✗ dies
    sweep B                                       the lease ends ─ takes m2 ─ sent again, deleted
    worker      m1 runs ─────────── m2 runs ──────────────────────── m2: a redelivery

A message that cannot be sent stays, with the error beside it, and rests for a while, longer after each failure.
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
from weakref import WeakKeyDictionary

from django.db import DatabaseError, connections

from celery_idempotent.celery.publishing import DeferredCall
from celery_idempotent.celery.task import IdempotentTask
from celery_idempotent.django.outbox import rows
from celery_idempotent.django.outbox.broker import confirming, is_unreachable
from celery_idempotent.django.outbox.payload import load
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.keys.stamp import MAX_CHARS

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.django.outbox.models import OutboxMessage

logger = logging.getLogger(__name__)

#: The most messages that one sweep sends, and the longest it works: the next one goes on where it stopped.
LIMIT = 10_000
BUDGET_SECONDS = 25.0

#: After so many messages in a row that did not reach the broker, a sweep does not try the others.
MAX_UNREACHED = 3

#: For so long after a message that did not reach the broker, others are not tried after their COMMIT.
UNREACHED_SECONDS = 1.0

#: How many messages are looked up at a time.
_BATCH = 200

#: When an app last did not reach its broker (``time.monotonic``), and the error.
_unreached: WeakKeyDictionary[Celery, tuple[float, str]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """How many messages were sent, how many could not be, and whether there is more to send by now."""

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
    task: Any = app.tasks[payload.task]
    with confirming(app) as producer:
        if producer is not None:
            options["producer"] = producer
        if isinstance(task, IdempotentTask):
            call = DeferredCall(
                args=payload.args, kwargs=payload.kwargs, options=options, reserve=payload.once
            )
            task.send_deferred(call)
        else:
            task.apply_async(payload.args, payload.kwargs, **options)


def send_after_commit(
    app: Celery, using: str, pk: int, label: str, content: bytes, staged_at: float
) -> None:
    """Send one message; whatever fails, the transaction is committed, and a sweep sends it.

    ``staged_at`` (``time.monotonic``): a transaction may have taken so long that a sweep is at the message.
    """
    try:
        at, error = _unreached.get(app, (0.0, ""))
        if error and time.monotonic() - at < UNREACHED_SECONDS:
            rows.fail(using, pk, error, attempts=0)
            return
        third_ms = rows.LEASE_MS // 3
        if (time.monotonic() - staged_at) * 1000 >= third_ms and not rows.take(
            using, pk, within_ms=2 * third_ms
        ):
            return
        _send(partial(publish_staged, app, content), app, using, pk, label, attempts=0)
    except Exception:
        logger.exception("idempotency: staged message %s is left to the sweep", label)


def _send(
    publishing: Callable[[], None], app: Celery, using: str, pk: int, label: str, *, attempts: int
) -> Exception | None:
    """Publish a message and forget it; return the error if it cannot be published."""
    try:
        publishing()
    except Exception as error:  # noqa: BLE001  a broker fails in its own ways, and so does what it is given
        text = rows.error_text(error)
        logger.warning(
            "idempotency: staged message %s could not be sent, and stays: %s", label, text
        )
        if is_unreachable(app, error):
            _unreached[app] = time.monotonic(), text
        rows.fail(using, pk, text, attempts=attempts)
        return error
    # Should this fail, the message is sent again under the same task id.
    rows.delete(using, pk)
    return None


def sweep(app: Celery, *, using: str = "default", limit: int = LIMIT) -> Sent:
    """Send what dead senders left, and what could not be sent before and has rested.

    Safe to run on any number of machines at once: a message is held by one of them, for a lease.
    """
    until = time.monotonic() + BUDGET_SECONDS
    report, unreached = Sent(), 0
    if not rows.due(using, name_of(app), 1):
        return report
    with _publisher(app) as send_now:
        for message in _taken(using, name_of(app), until):
            publishing = partial(send_now, bytes(message.payload))
            error = _send(
                publishing, app, using, message.pk, str(message), attempts=message.attempts
            )
            report = replace(
                report,
                sent=report.sent + (error is None),
                failed=report.failed + (error is not None),
            )
            unreached = unreached + 1 if is_unreachable(app, error) else 0
            if report.sent >= limit or unreached >= MAX_UNREACHED:
                break
    if report.sent or report.failed:
        logger.info(
            "idempotency: outbox of %s: %d messages sent, %d could not be",
            using,
            report.sent,
            report.failed,
        )
    return replace(report, more=bool(rows.due(using, name_of(app), 1)))


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


def _taken(using: str, app: str, until: float) -> Iterator[OutboxMessage]:
    """Take one after the other of the messages that are due, until none is left to try, or the time is over.

    One that is not had at once, and is due all the same when they are looked up again, is left to the next sweep: its
    row is locked, and a try may take as long as the database waits for a lock.
    """
    tried: set[int] = set()
    while True:
        due = rows.due(using, app, _BATCH + len(tried))
        tried.intersection_update(due)  # the others were another sweep's
        untried = [pk for pk in due if pk not in tried]
        if not untried:
            break
        for pk in untried:
            if time.monotonic() > until:
                return
            if not rows.take(using, pk):
                tried.add(pk)
            elif (message := rows.rows(using).filter(pk=pk).first()) is not None:
                yield message
    if tried:
        logger.warning(
            "idempotency: outbox of %s: %d messages could not be taken, and are left to the next sweep: are their rows "
            "locked, or is the database read-only?",
            using,
            len(tried),
        )
