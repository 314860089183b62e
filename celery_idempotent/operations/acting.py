"""One operation on several records: each is done as it was seen, by its token and its state.

Nothing is locked between the look and the operation::

    operator   look: order-17 is FAILED, token 7 ─ ask ─────────────────────── forget, if FAILED with token 7: CHANGED
    worker                                           claim: PROCESSING, token 8
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

from celery_idempotent.celery.operations import (
    Operation,
    OperationRequest,
    Outcome,
    is_live,
    offered,
    operate,
)
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.records import Identity, Record, State

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

#: What becomes of a record: it is done; its owner is live; the operation means nothing for it.
Verdict = Literal["do", "live", "left"]

#: What a record is after an operation.
DONE: dict[Operation, str] = {
    "release": "released",
    "requeue": "requeued",
    "complete": "completed",
    "fail": "failed",
    "forget": "forgotten",
}

EFFECTS: dict[Operation, str] = {
    "release": "ends the claim: the next delivery or call runs.",
    "requeue": "publishes the message that the record keeps again, under the same task id.",
    "complete": "settles it COMPLETED with the value that you give: nothing runs, and callers get that value.",
    "fail": "settles it FAILED: nothing runs until its retention ends, and callers get FailedByOperator.",
    "forget": "deletes the record with all it knows: the next call runs.",
}

#: The outcome on one record, unless it is :data:`DONE`.
OUTCOMES: dict[Outcome, str] = {
    Outcome.UNSENT: "queued, and not published yet: the next sweep after its deadline tries again",
    Outcome.CHANGED: "left alone: it has changed meanwhile",
    Outcome.LIVE: "left alone: its owner is live",
}

#: Why an operation that means nothing for a record is refused.
REFUSALS: dict[Operation, str] = {
    "release": "only a QUEUED or a PROCESSING record can be released.",
    "requeue": "only an INTERRUPTED or a PROCESSING record that keeps its message"
    ' (idempotency_on_stale="requeue") can be requeued. Calling the task again has the same effect.',
    "complete": "only a record that is not COMPLETED, of a task of this app, can be completed. Forget it first.",
    "fail": "only a QUEUED, PROCESSING or INTERRUPTED record can be failed.",
    "forget": "there is no record.",
}

#: After so many records in a row for which the store did not answer no further one is tried: each takes a time-out.
_SILENT = 2


class SeenRecord(Protocol):
    """A record as somebody saw it, who decided what is to be done to it."""

    @property
    def identity(self) -> Identity:
        """Which record it is."""

    @property
    def token(self) -> int:
        """The token that it had."""

    @property
    def state(self) -> State:
        """The state that it was in."""


SeenT = TypeVar("SeenT", bound=SeenRecord)


@dataclass(frozen=True, slots=True)
class Ended(Generic[SeenT]):
    """An operation on one record: its outcome, or the trouble because of which that is not known."""

    record: SeenT
    outcome: Outcome | None
    trouble: str = ""


def verdict(operation: Operation, record: Record, now_ms: int, *, known: bool = True) -> Verdict:
    """Say what an operation would do to a record; see :func:`.offered`."""
    if operation not in offered(record, known=known):
        return "left"
    return "live" if is_live(record, now_ms) else "do"


def may_repeat(operation: Operation, state: State) -> bool:
    """May something that took effect before be done a second time because of this operation?"""
    return operation in {"release", "requeue", "forget"} and state is not State.QUEUED


def execute(
    app: Celery, request: OperationRequest, records: Iterable[SeenT]
) -> Iterator[Ended[SeenT]]:
    """Operate on one record after the other; each is yielded as soon as it is done.

    A failure of one does not keep the others, unless the store is silent: then the rest is not tried.
    """
    silent, operation = 0, request.operation
    for record in records:
        try:
            outcome = operate(app, record.identity, request, token=record.token, state=record.state)
        except IdempotencyError as error:  # noqa: PERF203  each by itself
            logger.warning("idempotency: %s of %s failed: %s", operation, record.identity, error)
            yield Ended(record, None, str(error))
            silent += 1
            if silent == _SILENT:
                return
        except Exception as error:  # a fault that concerns one record
            logger.exception("idempotency: %s of %s failed", operation, record.identity)
            yield Ended(record, None, f"{type(error).__name__}. The log says more.")
        else:
            silent = 0
            yield Ended(record, outcome)
