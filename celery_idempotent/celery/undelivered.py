"""The message of a finished task comes back when Celery cannot send its callbacks; its state does not become FAILURE.

Celery takes an error of its own sending for the task's: it stores FAILURE, sends errbacks, fails the chord and
acknowledges. From the settle to the end of the delivery the tracer therefore finds a backend that does none of it, and
the main process gives the message back::

    run ─ settle ─ Celery sends ─┬─ all: task_success ─ mark ─ ack
                                 └─ ✗ no FAILURE ─┬─ published again with a countdown ─ ack
                                                  └─ ✗ the broker is away: pause ─ requeue

The next delivery is answered from the record, and Celery sends again. Hooks and signals of the task (``on_failure``,
``task_failure``) report each error. A permanent error (an unknown serializer) fails the task, as with Celery.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from traceback import walk_tb
from typing import TYPE_CHECKING

from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from kombu.exceptions import SerializationError, SerializerNotInstalled

from celery_idempotent.celery.delivery import current_due
from celery_idempotent.errors import IdempotencyError, StoreUnavailable
from celery_idempotent.records import State

if TYPE_CHECKING:
    from celery_idempotent.celery.delivery import Due
    from celery_idempotent.celery.typed import AnyBackend

logger = logging.getLogger(__name__)

#: How long a process waits before its message goes back to a broker that is away, in seconds.
PAUSE = 1.0

#: On an exception, which takes it to the main process: the outcome for the message that ended with it.
_OUTCOME = "idempotency_outcome"

#: These come from a signature or a value: the next try would meet them again.
_PERMANENT = (SerializationError, SerializerNotInstalled, IdempotencyError)
#: So do these, unless a client of a broker or server raises them when its connection breaks.
_AMBIGUOUS = (TypeError, ValueError, LookupError, AttributeError, NotImplementedError)
_CLIENTS = ("kombu.transport.", "kombu.connection", "amqp.", "redis.")


class BackendAfterSettle:
    """Stands for a task's result backend from the settle to the end of the delivery."""

    def __init__(self, backend: AnyBackend, due: Due) -> None:
        self._backend, self._due = backend, due

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def mark_as_failure(
        self, task_id: str, exc: BaseException, *args: object, **options: object
    ) -> object:
        """Fail the task, unless its body succeeded and its callbacks can be sent later."""
        if task_id != self._due.task_id:
            return self._backend.mark_as_failure(task_id, exc, *args, **options)
        failed = self._due.state is State.FAILED
        if not failed and self._comes_back(exc, exc):
            return None
        try:
            return self._backend.mark_as_failure(task_id, exc, *args, **options)
        except Exception as trouble:  # its errbacks, or its part of a chord
            if failed and self._comes_back(exc, trouble):
                return None
            raise

    def _comes_back(self, ended_with: BaseException, trouble: BaseException) -> bool:
        """Have the message come back, if this trouble may pass; ``False`` if it does not."""
        due, reason = self._due, type(trouble).__name__
        may_pass = time.monotonic() <= due.give_up and is_transient(trouble)
        published = may_pass and due.publish_again()
        if not published and not (may_pass and due.acks_late):
            logger.critical(
                "idempotency: %s[%s] is done, but its callbacks cannot be sent: %s",
                due.task.name,
                due.task_id,
                reason,
            )
            return False
        current_due.set(None)
        logger.error(
            "idempotency: %s[%s] is done, its callbacks are not all sent yet (%s), and its message comes back",
            due.task.name,
            due.task_id,
            reason,
        )
        setattr(ended_with, _OUTCOME, Ignore(reason) if published else Reject(reason, requeue=True))
        if not published:
            with suppress(SoftTimeLimitExceeded):
                time.sleep(PAUSE)
        return True


def is_transient(error: BaseException) -> bool:
    """May the same be sent successfully later?"""
    if isinstance(error, (OSError, StoreUnavailable)):
        return True  # an OSError may be a ValueError as well: TLS raises one for a certificate
    if not isinstance(error, (*_PERMANENT, *_AMBIGUOUS)):
        return True
    frames = (frame for frame, _line in walk_tb(error.__traceback__))
    return not isinstance(error, _PERMANENT) and any(
        str(frame.f_globals.get("__name__")).startswith(_CLIENTS) for frame in frames
    )


def outcome_of(error: BaseException | None) -> Ignore | Reject | None:
    """Return the outcome for a message that ended with this error, if its task is done."""
    outcome: Ignore | Reject | None = getattr(error, _OUTCOME, None)
    return outcome
