"""The worker's main process: when a pool child is gone, the claim it held is interrupted at once.

The main process and the record must agree about the child (task id, worker, pid), and that pid must be gone: after a
revoke or a time limit the task may go on. All of it is best effort: the lease ends what it misses.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  socket imports it when it first looks up a name
import logging
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback  # type: ignore[attr-defined]
from celery.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.worker.request import Request as CeleryRequest

from celery_idempotent import backoff
from celery_idempotent.celery import losses, republish
from celery_idempotent.celery.callbacks import OUTCOME, callbacks_of
from celery_idempotent.celery.delivery import identify_delivery
from celery_idempotent.keys.stamp import as_mapping
from celery_idempotent.records import Identity
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery_idempotent.celery.definition import DefinedTask

logger = logging.getLogger(__name__)

_POLL, _LONGEST_POLL = 0.02, 1.0


class Request(CeleryRequest):
    """A delivery as the worker's main process sees it."""

    task: DefinedTask
    _loss_handled = False

    def __init__(self, message: Any, *args: Any, **options: Any) -> None:
        """Add the content type of the message and its queue, for the process that runs the task."""
        super().__init__(message, *args, **options)
        request: dict[str, Any] = self._request_dict  # type: ignore[attr-defined]  # Celery has it
        content_type = getattr(message, "content_type", None)  # some transports leave it out
        request["properties"] = {**as_mapping(request["properties"]), "content_type": content_type}
        if self.delivery_info.get("exchange"):
            request["properties"] |= republish.origin(self.task.app, self.delivery_info)

    def on_failure(self, exc_info: ExceptionInfo, *args: Any, **options: Any) -> Any:
        """Interrupt the claim of a lost child before the message goes back."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, (WorkerLostError, Terminated, TimeLimitExceeded, SystemExit)):
            self._child_lost()
        if (outcome := getattr(error, OUTCOME, None)) is not None:
            exc_info.exception = outcome
        return super().on_failure(exc_info, *args, **options)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """Interrupt the claim of a child that a hard time limit ends."""
        if not soft:
            self._child_lost()
        return super().on_timeout(soft, timeout)

    def _success_was_stored(self) -> object:
        """Return ``False`` for a message whose lost child may not have sent all callbacks: it comes back."""
        task, definition = self.task, self.task.idempotency_definition()
        comes_back = task.acks_late and task.reject_on_worker_lost
        # In observe mode it would run again.
        enforced = definition is not None and definition.policy.mode == "enforce"
        if comes_back and enforced and any(callbacks_of(self._context)):  # type: ignore[attr-defined]
            return False
        return super()._success_was_stored()  # type: ignore[misc]

    def _child_lost(self) -> None:
        """Interrupt the claim that the child may have held, in a thread."""
        pid: Any = self.worker_pid
        task, definition = self.task, self.task.idempotency_definition()
        if not pid or pid == os.getpid() or pid >= 2**31 or definition is None:
            return  # never started, in a pool of threads or of greenlets (addresses), or switched off
        if self._loss_handled:  # a hard time limit comes here twice
            return
        self._loss_handled = True
        try:
            headers = self.request_dict
            args, kwargs, _ = self._payload  # type: ignore[attr-defined]  # Celery has it
            identity = identify_delivery(
                definition,
                {**as_mapping(headers.get("stamps")), **headers},
                args,
                kwargs,
                task_id=self.id,
                nesting=headers.get("replaced_task_nesting") or 0,
            ).identity
            # Made here: the thread must not import its modules.
            if not get_store(task.app).safe_beside_forks:
                return  # the lease ends the claim
            work = partial(interrupt_claim, task, identity, self.id, pid)
            thread = threading.Thread(target=work, name="idempotency-background", daemon=True)
            thread.start()
            if losses.gone(pid):
                # Before the message goes back. The pool kills a living child only when this has returned.
                thread.join(0.25)
        except Exception:
            logger.exception(
                "idempotency: could not handle task %s of a lost child process", self.id
            )


def interrupt_claim(task: DefinedTask, identity: Identity, task_id: str, pid: int) -> None:
    """Wait for the end of a child, then interrupt its claim.

    This thread must not import anything: a child that the pool forks meanwhile would find the module's lock taken for
    ever.
    """
    give_up = time.monotonic() + task.idempotency_policy.lease_ms / 1000
    interrupt = partial(losses.interrupt, task, get_store(task.app), identity, task_id, pid)
    try:
        while not losses.gone(pid):
            if time.monotonic() > give_up:
                return
            time.sleep(_POLL)
        backoff.persist(interrupt, until=give_up, longest=_LONGEST_POLL)
    except Exception as error:  # noqa: BLE001  best effort
        line = "idempotency: could not interrupt %s, its lease will end it: %s"
        logger.warning(line, identity, error)
