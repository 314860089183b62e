"""A call that reserves its key: it is sent, or answered by the record that an earlier call left.

The table of a store answers a reservation; ``publish_once``, the outbox and ``enqueue()`` of any framework follow::

    none, INTERRUPTED, another task's mark      Reserved                    send, under the task id of this call
    QUEUED past its deadline                    Reserved, of its task id    send again, each time after twice as long
    PROCESSING past its lease                   Reserved, of its task id    send again; its owner may still come back
    QUEUED by this task id                      Reserved                    send again: the sender died, or asks twice
    QUEUED, uncommitted                         Held                        wait for the COMMIT, then as the others
    QUEUED, where calls replace each other      Held                        its message is replaced, and it answers
    QUEUED, PROCESSING                          Held                        the earlier call answers
    COMPLETED, FAILED                           Settled                     the earlier call answers, or see `remakes`
    this task's own end, or of an earlier copy  Settled                     not sent: it has run
    another fingerprint                         Mismatched                  FingerprintMismatch
    no answer                                                               see `ask`

"Another task's mark" is an end where each call runs: with a retention of 0, or ``publish_once="until_start"``. Each of
the first four is a write: of many callers one sends, and the others are held.
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
    Mismatched,
    Record,
    Reservation,
    Reserved,
    ReserveRequest,
    Settled,
)
from celery_idempotent.signals import Call, report

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from celery_idempotent.celery.definition import DefinedTask, Definition
    from celery_idempotent.keys.stamp import Identified
    from celery_idempotent.signals import Details, OutcomeSignal
    from celery_idempotent.stores import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ReservedCall:
    """One call whose key is reserved before its message is sent; a subclass sends it."""

    #: An outbox sends it, maybe twice.
    is_staged = False
    #: The end of another task answers nobody, if its policy says so.
    each_runs = True
    #: The task id of the call, for reports; empty: that of the record.
    call_id = ""
    #: The message belongs to a transaction that may be rolled back.
    uncommitted = False

    task: DefinedTask
    definition: Definition
    identified: Identified
    store: Store

    # -- the caller's part ---------------------------------------------------------------------------------------------

    def deadline_ms(self) -> int:
        """Return after how long the message is taken for lost."""
        raise NotImplementedError

    def queue(self, record: Record) -> None:
        """Send the message of a reservation, or see to it that it is sent."""
        raise NotImplementedError

    def message(self, task_id: str) -> bytes | None:
        """Return the message that a sweep sends if no worker claims the key in time; ``None``: none."""
        raise NotImplementedError

    def ask(self, verb: Callable[[], T]) -> T:
        """Return the answer of the store, or raise the outcome of a call without one."""
        raise NotImplementedError

    def waits(self, record: Record) -> bool:  # noqa: ARG002
        """Wait for the COMMIT of a reservation; ``False``: it answers as it is."""
        return False

    def replacement(self, record: Record) -> bytes | None:  # noqa: ARG002
        """Return the message that a call which waits is to take over, ``None`` for none."""
        return None

    def remakes(self, record: Record) -> bool:  # noqa: ARG002
        """May this settled call be made anew?"""
        return False

    def answers(self, record: Record) -> bool:  # noqa: ARG002
        """Does the record answer the call here? Else a worker does, and reports that."""
        return True

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
                    self.report(signals.mismatched, record)
                    raise FingerprintMismatch(
                        f"{record.identity} belongs to task {record.task_id}, which was called with other arguments: a "
                        "key identifies one operation."
                    )
                case Held() if record.uncommitted and self.waits(record):
                    pass
                case Held() if (newest := self.replacement(record)) is not None:
                    replace = partial(self.store.replace, token=record.token, message=newest)
                    if self.ask(partial(replace, record.identity)):
                        self.report(signals.replayed, record)
                        return record, True
                case Settled() if self.remakes(record):
                    # Deletes this end only: if another call has reserved the key meanwhile, the next round finds that.
                    forget = partial(self.store.forget, token=record.token, state=record.state)
                    if self.ask(partial(forget, record.identity)):
                        why = "it failed, and a request tries it again"
                        self.report(signals.forgotten, record, reason=why)
                case _:
                    if self.answers(record):
                        self.report(signals.replayed, record)
                    return record, True

    def reserve(self, task_id: str, message: bytes | None) -> Reservation:
        """Reserve the key for a task id: with its message, until that is lost."""
        policy = self.definition.policy
        request = ReserveRequest(
            identity=self.identified.identity,
            fingerprint=self.identified.fingerprint,
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

    def report(
        self, outcome: OutcomeSignal, record: Record | None = None, **details: Unpack[Details]
    ) -> None:
        """Report an outcome of the call."""
        call = Call(
            name=self.definition.name,
            sender=self.task,
            store=self.store,
            identity=self.identified.identity,
            task_id=self.call_id or ("" if record is None else record.task_id),
        )
        report(call, outcome, record, **details)
