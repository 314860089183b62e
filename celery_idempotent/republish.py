"""Sending a message round again, when it may not run yet: after a conflict, or when the store failed."""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from celery.exceptions import Ignore, Reject, Retry

from celery_idempotent import sentry
from celery_idempotent.errors import IdempotencyError, InProgress
from celery_idempotent.records import Record
from celery_idempotent.stores import ATTEMPT_BYTES

if TYPE_CHECKING:
    from celery.canvas import Signature

    from celery_idempotent.task import IdempotentTask

__all__ = ["Dropped", "conflict", "longest_wait_ms", "store_failed", "unanswered"]

logger = logging.getLogger(__name__)

#: Own counts of the rounds of a message, so that the user's ``max_retries`` is not consumed.
CONFLICTS_HEADER = "idempotency_conflicts"
STORE_FAILURES_HEADER = "idempotency_store_failures"
#: Attempts to claim of earlier rounds that no store answered, in hexadecimal: it may have them, under nobody.
UNANSWERED_HEADER = "idempotency_unanswered"
_MOST_UNANSWERED = 8

#: The visibility timeout of kombu's Redis transport where none is set, in seconds.
_VISIBILITY_TIMEOUT = 3600


_ATTEMPTS = re.compile(f"(?:[0-9a-f]{{{2 * ATTEMPT_BYTES}}}){{1,{_MOST_UNANSWERED}}}")


class Dropped(Ignore):
    """A duplicate is dropped, and whoever watches events shall see it: the worker's main process tells them."""


def conflict(task: IdempotentTask, request: Any, record: Record, left_ms: int) -> NoReturn:
    """Somebody holds the key: send this copy round again, or say so, as the task's policy wants.

    A redelivery (the holder's own task id) may be the broker's only copy, and failing it would fail
    the original's chord and chain: it always goes round again, and leaves the result alone.
    """
    policy = task.idempotency_policy
    same = record.task_id == request.id
    left = left_ms / 1000
    error = InProgress(
        f"{record.identity} is held by {record.owner}, whose lease runs {left:.1f} s more unless "
        "it is renewed.",
        record.task_id,
        left,
    )
    if request.is_eager or (policy.on_conflict == "raise" and not same):
        raise error
    if policy.on_conflict == "ignore" and not same:
        _ignored(task, request, error)
    # A redelivery outlives its expiry: the operation that it belongs to has begun in time.
    options: dict[str, Any] = {"expires": None} if same else {}
    count, delay, again = _again(task, request, CONFLICTS_HEADER, left, options, {})
    logger.info(
        "idempotency: %s[%s] found %s held by %s (conflict %d), and comes back in %.1f s",
        task.name,
        request.id,
        record.identity,
        record.owner,
        count,
        delay,
    )
    _send(task, request, again)
    if same:
        raise Ignore(str(error))
    sentry.still_on_its_way(request)
    raise Retry(str(error), exc=error, when=delay, sig=again)  # type: ignore[arg-type]


def _ignored(task: IdempotentTask, request: Any, error: InProgress) -> NoReturn:
    """Drop a duplicate, in plain sight: its state is IGNORED, not PENDING for ever."""
    logger.info("idempotency: %s[%s] is dropped: %s", task.name, request.id, error)
    if not request.ignore_result:
        backend: Any = task.backend
        try:
            backend.store_result(request.id, str(error), "IGNORED", request=request)
        except Exception:
            logger.exception(
                "idempotency: the state of %s[%s] is not stored", task.name, request.id
            )
    raise Dropped(str(error))


def store_failed(
    task: IdempotentTask, request: Any, error: IdempotencyError, attempt: bytes
) -> NoReturn:
    """The store cannot say whether this call may run: nothing runs, and this copy comes back."""
    if request.is_eager:
        raise error
    # Without a new one, those that it came with are among its headers.
    known = {}
    if attempt:
        attempts = (*unanswered(request.headers), attempt)[-_MOST_UNANSWERED:]
        known[UNANSWERED_HEADER] = b"".join(attempts).hex()
    count, delay, again = _again(task, request, STORE_FAILURES_HEADER, None, {}, known)
    logger.error(
        "idempotency: %s[%s] did not run, its store failed (%d times now), and comes back in "
        "%.1f s: %s",
        task.name,
        request.id,
        count,
        delay,
        error,
    )
    _send(task, request, again)
    raise Ignore(str(error)) from error


def unanswered(headers: Mapping[str, Any] | None) -> tuple[bytes, ...]:
    """Return the attempts to claim that a message brings along; of what is none, nothing."""
    found = (headers or {}).get(UNANSWERED_HEADER)
    if not isinstance(found, str) or not _ATTEMPTS.fullmatch(found):
        return ()
    attempts = bytes.fromhex(found)
    return tuple(attempts[at : at + ATTEMPT_BYTES] for at in range(0, len(attempts), ATTEMPT_BYTES))


def _again(
    task: IdempotentTask,
    request: Any,
    counter: str,
    left: float | None,
    options: dict[str, Any],
    known: Mapping[str, Any],
) -> tuple[int, float, Signature[Any]]:
    """Return how often this message went round, in how many seconds it comes back, and itself.

    The countdown stays well under the visibility timeout: while it lasts, the broker counts the
    message as delivered and not acknowledged.
    """
    # kombu's Redis transport marks a restored message in its headers, too, for all its retries.
    headers = {k: v for k, v in (request.headers or {}).items() if k != "redelivered"}
    before = headers.get(counter, 0)
    count = before + 1 if isinstance(before, int) else 1
    limits = [
        2.0 ** min(count - 1, 20),
        task.idempotency_policy.conflict_backoff_max_ms / 1000,
        _unacknowledged(task),
    ]
    if left is not None:
        limits.append(max(left, 0.1))
    delay = min(limits) * random.uniform(0.5, 1)
    again = task.signature_from_request(
        request,
        countdown=delay,
        retries=request.retries,
        headers={**headers, **known, counter: count},
        add_to_parent=False,
        **options,
    )
    return count, delay, again


def longest_wait_ms(task: IdempotentTask, request: Any) -> int | None:
    """Return how long this delivery may hold its worker while another runs; ``None``: as long as its policy wants.

    Past the visibility timeout the broker gives a waiting message to one process after the other, and all of them wait.
    """
    if request.is_eager:
        return 0
    late: bool | None = task.acks_late
    if task.idempotency_policy.on_conflict != "wait" or not late:
        return None
    return int(_unacknowledged(task) * 1000)


def _unacknowledged(task: IdempotentTask) -> float:
    """Return for how many seconds a message may stay unacknowledged, far from being taken for lost."""
    visible = task.app.conf.broker_transport_options.get("visibility_timeout")
    return float(visible or _VISIBILITY_TIMEOUT) / 4


def _send(task: IdempotentTask, request: Any, again: Signature[Any]) -> None:
    """Publish; a message that cannot be published must not be lost.

    With late acks the broker still has it: pause, and give it back as it is. With early acks it is
    gone there, so keep trying.
    """
    pause = 1.0
    while True:
        try:
            again.apply_async()
            return
        except Exception as error:  # noqa: BLE001  a broker fails in its own ways
            logger.error(
                "idempotency: %s[%s] cannot be published, pausing %.0f s: %s",
                task.name,
                request.id,
                pause,
                type(error).__name__,
            )
            reason = type(error).__name__
        time.sleep(pause)
        if task.acks_late:
            raise Reject(reason, requeue=True)
        pause = min(pause * 2, 30.0)
