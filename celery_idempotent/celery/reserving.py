"""A call that reserves its key: it is sent, or answered by the record that an earlier call left.

``publish_once``, the outbox and ``enqueue()`` of any framework follow one table, that of docs/internals.md. Whatever a
reservation finds, it is a write before the call is sent: of many callers one sends, and the others are held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from celery_idempotent import signals
from celery_idempotent.errors import FingerprintMismatch, IdempotencyError
from celery_idempotent.records import (
    Held,
    Identity,
    Mismatched,
    Record,
    Reservation,
    Reserved,
    ReserveRequest,
    Settled,
)
from celery_idempotent.signals import Call, report

if TYPE_CHECKING:
    from celery_idempotent.celery.definition import DefinedTask, Definition
    from celery_idempotent.stores import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ReservedCall(Call):
    """One call whose key is reserved before its message is sent; a subclass sends it."""

    #: An outbox sends it, maybe twice.
    is_staged = False
    #: The end of another task answers nobody, if its policy says so.
    each_runs = True
    #: The message belongs to a transaction that may be rolled back.
    uncommitted = False

    task: DefinedTask
    definition: Definition
    store: Store
    identity: Identity
    fingerprint: bytes | None

    # -- the caller's part ---------------------------------------------------------------------------------------------

    #: Returns after how long the message is taken for lost.
    deadline_ms: Callable[[], int]
    #: Sends the message of a reservation, or sees to it that it is sent.
    queue: Callable[[Record], None]
    #: Returns the message, for a task id, that a sweep sends if no worker claims the key in time; ``None``: none.
    message: Callable[[str], bytes | None]
    #: Does an earlier call answer? Reports it; ``False``: reserve again, after a pause or a write.
    is_answered: Callable[[Held | Settled], bool]

    def ask(self, verb: Callable[[], T]) -> T:
        """Return the answer of the store, or raise the outcome of a call without one."""
        raise NotImplementedError

    # -- the decision --------------------------------------------------------------------------------------------------

    def reserve_and_send(self, task_id: str) -> tuple[Record, bool]:
        """Send the call; return the record, and whether it is that of an earlier call, which answers.

        Raises:
            FingerprintMismatch: if the key belongs to a call with other arguments.
        """
        message = None if self.uncommitted else self.message(task_id)
        while True:
            answer = self.reserve(task_id, message)
            record = answer.record
            match answer:
                case Reserved() if record.task_id != task_id and message is not None:
                    # The message in the record has to have its task id.
                    task_id, message = record.task_id, self.message(record.task_id)
                case Reserved():
                    try:
                        self.queue(record)
                    except BaseException:
                        self.give_back(record)
                        raise
                    return record, False
                case Mismatched():
                    report(self, signals.mismatched, record)
                    raise FingerprintMismatch(
                        f"{record.identity} belongs to task {record.task_id}, which was called with other arguments: a "
                        "key identifies one operation."
                    )
                case Held() | Settled() if self.is_answered(answer):
                    return record, True

    def reserve(self, task_id: str, message: bytes | None) -> Reservation:
        """Reserve the key for a task id: with its message, until that is lost."""
        policy = self.definition.policy
        request = ReserveRequest(
            identity=self.identity,
            fingerprint=self.fingerprint,
            task_id=task_id,
            deadline_ms=self.deadline_ms(),
            keep_ms=policy.keep_ms,
            message=message,
            uncommitted=self.uncommitted,
            copies=(task_id,) if self.is_staged else (),
            each_runs=policy.each_runs and self.each_runs,
        )
        return self.ask(partial(self.store.reserve, request))

    def give_back(self, record: Record) -> None:
        """Release a reservation whose message is not sent; if the store fails, its deadline ends it."""
        try:
            self.store.release(record.identity, token=record.token)
        except IdempotencyError as error:
            line = "idempotency: %s is reserved until its deadline: %s"
            logger.warning(line, record.identity, error)
