"""One operation on all records that a filter means: looked for first, then done one by one, as far as one comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from celery_idempotent.celery.operations import Operation, Outcome, is_live, offered, operate
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.records import Record, Stored

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["Ended", "Verdict", "carry_out", "verdict"]

#: What is to become of a record: it is done; its owner is live; the operation means nothing for it.
Verdict = Literal["do", "live", "left"]


@dataclass(frozen=True, slots=True)
class Ended:
    """What came of an operation on one record: an outcome, or the trouble that kept us from knowing it."""

    record: Record
    outcome: Outcome | None
    trouble: str = ""


def verdict(operation: Operation, record: Record, now_ms: int) -> Verdict:
    """Say what an operation would do to a record."""
    if operation not in offered(record):
        return "left"
    return "live" if is_live(record, now_ms) else "do"


def carry_out(
    app: Celery,
    operation: Operation,
    records: Iterable[Record],
    *,
    force: bool,
    who: str,
    reason: str,
    step: str | None = None,
    value: Stored | None = None,
) -> Iterator[Ended]:
    """Do an operation to one record after the other; each is yielded as soon as it is done.

    The first that the store does not answer is the last: those after it would wait for as long, each.
    """
    for record in records:
        try:
            outcome = operate(
                app,
                record.identity,
                operation,
                token=record.token,
                state=record.state,
                force=force,
                who=who,
                reason=reason,
                step=step,
                value=value,
            )
        except IdempotencyError as error:
            yield Ended(record, None, str(error))
            return
        yield Ended(record, outcome)
