"""The callbacks of a finished task (links, chain, chord part, errbacks): Celery sends them, the record is marked.

A worker may die between the settle and the sending. So the record is marked as *delivered* when Celery reports the end
of the task, its last step::

    run ─ settle ─┬─ ✗ ······················ redelivered: answered in full, Celery sends
                  └─ Celery: links, chain, result, chord part, task_success ─ mark ─┬─ ✗ ── redelivered: silent
                                                                                    └─ ack
    between the sending and the mark: sent twice, under ids made from the parent's, so it takes effect once

An error while Celery sends would make the task a FAILURE. From the settle to the end of the delivery the tracer has a
view of the result backend that stores none, and the message comes back::

    run ─ settle ─ Celery sends ─┬─ all: task_success ─ mark ─ ack
                                 └─ ✗ no FAILURE ─┬─ published again with a countdown ─ ack
                                                  └─ ✗ the broker is away: pause ─ requeue

A permanent error (an unknown serializer) fails the task, as with Celery.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from functools import cache, partial
from operator import attrgetter
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from celery import signals as celery_signals
from celery.backends.base import BaseKeyValueStoreBackend
from celery.exceptions import Ignore, Reject
from kombu.exceptions import DecodeError, EncodeError, SerializationError, SerializerNotInstalled

from celery_idempotent.celery import republish
from celery_idempotent.celery.republish import DeliveredRun
from celery_idempotent.celery.typed import AnyTask
from celery_idempotent.errors import IdempotencyError, StoreUnavailable
from celery_idempotent.records import State
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery.app.task import Context

logger = logging.getLogger(__name__)

#: An attribute of the exception that a message ended with: the outcome that the main process tells Celery instead.
OUTCOME = "idempotency_outcome"

#: Errors of a signature or a value: the next try would meet them again.
_PERMANENT = (SerializationError, SerializerNotInstalled, IdempotencyError)
#: The same, unless a client of a broker or server raises them when its connection breaks.
_AMBIGUOUS = (TypeError, ValueError, LookupError, AttributeError, NotImplementedError)
_CLIENTS = ("kombu.transport.", "kombu.connection", "amqp.", "redis.")


#: Reads the links, errbacks, chain and chord of a request.
callbacks_of = attrgetter("callbacks", "errbacks", "chain", "chord")


def chord_is_claimed(task: AnyTask, request: Context) -> bool:
    """Has a process, living or dead, claimed the chord of this part?

    Celery >= 5.7 would return the part in vain::

    process A   the last part ─ claims the chord ─ ✗ SIGKILL, or the backend does not answer
    process B                               the same part ─ waits until the claim is over ─ claims the chord
    """
    backend: Any = task.backend
    if not isinstance(backend, BaseKeyValueStoreBackend):
        return False
    try:
        claim = backend.get(backend.get_key_for_group(str(request.group), ".c"))
    except Exception:  # noqa: BLE001  nor could it take the part
        return True
    return claim not in (None, b"done")


#: The delivery that was settled last in this context, until Celery reports the end of its task.
settled_run: ContextVar[DeliveredRun | None] = ContextVar("idempotency_settled_run", default=None)


def expect_callbacks(
    run: DeliveredRun, state: State, token: int | None, *, age_ms: int = 0
) -> None:
    """Have a record, settled ``age_ms`` ago, marked when Celery is done with this delivery."""
    _listen()
    # An eager call has no message that could come back.
    left_ms = 0 if run.request.is_eager else run.policy.settled_keep_ms // 2 - age_ms
    run.ended_as, run.mark_token = state, token
    run.comes_back_until = time.monotonic() + left_ms / 1000
    run.chain = list(run.request.chain or ()) or None
    settled_run.set(run)


def mark_delivered(sender: AnyTask, *, state: State, **_: object) -> None:
    """Mark a record of this state: Celery has sent its callbacks."""
    run = settled_run.get()
    if run is None or run.task_id != sender.request.id or run.ended_as is not state:
        return
    settled_run.set(None)
    if run.mark_token is None:
        return
    try:
        get_store(sender.app).mark_delivered(run.identity, token=run.mark_token)
    except Exception as error:  # noqa: BLE001  all of it is done
        logger.warning(
            "idempotency: %s is done and its callbacks are sent, but it could not be marked: if its message comes "
            "back, they are sent again, under the same ids: %s",
            run.identity,
            error,
        )


@cache
def _listen() -> None:
    """Connect to the ends of tasks, which take longer in a process where somebody listens."""
    celery_signals.task_success.connect(partial(mark_delivered, state=State.COMPLETED), weak=False)
    # Also sent when Celery could not send the callbacks of a success: that record stays unmarked.
    celery_signals.task_failure.connect(partial(mark_delivered, state=State.FAILED), weak=False)


class BackendAfterSettle:
    """Stands for the result backend from the settle to the end of the delivery."""

    def __init__(self, backend: Any, run: DeliveredRun) -> None:
        self._backend, self._run = backend, run

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def mark_as_failure(
        self, task_id: str, exc: BaseException, *args: object, **options: object
    ) -> object:
        """Fail the task, unless its body succeeded and its callbacks can be sent later."""
        ours, failed = task_id == self._run.task_id, self._run.ended_as is State.FAILED
        if ours and not failed and _comes_back(self._run, exc, exc):
            return None
        try:
            return self._backend.mark_as_failure(task_id, exc, *args, **options)
        except Exception as trouble:  # its errbacks, or its part of a chord
            if ours and failed and _comes_back(self._run, exc, trouble):
                return None
            raise


def _comes_back(run: DeliveredRun, ended_with: BaseException, trouble: BaseException) -> bool:
    """Have the message come back if this trouble is transient; return whether it does."""
    reason = type(trouble).__name__
    may_pass = time.monotonic() <= run.comes_back_until and is_transient(trouble)
    published = may_pass and republish.come_back(run)
    if not published and not (may_pass and run.task.acks_late):
        line = "idempotency: %s[%s] is done, but its callbacks cannot be sent: %s"
        logger.critical(line, run.task.name, run.task_id, reason)
        return False
    settled_run.set(None)
    line = "idempotency: %s[%s] is done, its callbacks are not all sent yet (%s), and its message comes back"
    logger.error(line, run.task.name, run.task_id, reason)
    setattr(ended_with, OUTCOME, Ignore(reason) if published else Reject(reason, requeue=True))
    if not published:
        time.sleep(1.0)  # the broker is away
    return True


def is_transient(error: BaseException) -> bool:
    """May the same be sent successfully later?"""
    # kombu wraps whatever an encoder raises, also in the code of a value.
    cause = error.__context__ if isinstance(error, (EncodeError, DecodeError)) else error
    if isinstance(cause, (OSError, StoreUnavailable)):
        return True  # an OSError may be a ValueError as well: TLS raises one for a certificate
    if not isinstance(error, (*_PERMANENT, *_AMBIGUOUS)):
        return True
    modules = (frame.f_globals.get("__name__") for frame, _line in walk_tb(error.__traceback__))
    is_of_client = any(str(each).startswith(_CLIENTS) for each in modules)
    return is_of_client and not isinstance(error, _PERMANENT)
