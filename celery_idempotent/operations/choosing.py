"""What can be done to a record now, in words: what each operation does, and what it may cost.

For a record that is INTERRUPTED after a crash, for example::

    release   is not offered: nobody holds the key
    requeue   publishes the message again …             It may have taken effect before its worker was lost …
    complete  settles it with the value that you give   Check the outside system first …

The cost is the reason why an operator is asked twice: what may happen a second time, and what nobody learns of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_idempotent.celery.operations import Operation, offered
from celery_idempotent.records import Record, State

if TYPE_CHECKING:
    from celery_idempotent.celery.definition import Definition


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An operation that means something for a record: what it does, and what that may cost."""

    operation: Operation
    effect: str
    cost: str


EFFECTS: dict[Operation, str] = {
    "release": "ends the claim: the next delivery or call runs.",
    "requeue": "publishes the message that the record keeps again, under the same task id.",
    "complete": "settles it COMPLETED with the value that you give: nothing runs, and callers get that value.",
    "fail": "settles it FAILED: nothing runs until its retention ends, and callers get FailedByOperator.",
    "forget": "deletes the record with all it knows: the next call runs.",
}

_LIVE: dict[Operation, str] = {
    "complete": "Its owner is not stopped by that: what it does outside takes effect, and its result is dropped.",
    "fail": "Its owner is not stopped by that: what it does outside takes effect, and callers do not learn of it.",
}
_LIVE_BY_DEFAULT = "Its owner is not stopped by that: what it does outside may be done twice."


def choices_of(record: Record, definition: Definition | None, *, live: bool) -> Iterator[Choice]:
    """Yield what can be done; ``definition``: of the record's task, ``live``: its owner is at work."""
    for operation in offered(record, known=definition is not None):
        cost = (
            _LIVE.get(operation, _LIVE_BY_DEFAULT) if live else _cost(record, operation, definition)
        )
        yield Choice(operation=operation, effect=EFFECTS[operation], cost=cost)


def _cost(record: Record, operation: Operation, definition: Definition | None) -> str:
    if operation == "complete":
        return "Check the outside system first: callers get what you say."
    if operation == "fail":
        return "If it took effect before, callers do not learn its result."
    cost = _cost_of_another_run(record, definition)
    if operation == "forget" and record.steps:
        names = ", ".join(name for name, _ in record.steps)
        cost += f" Its steps are done again as well: {names}."
    return cost


def _cost_of_another_run(record: Record, definition: Definition | None) -> str:
    match record.state:
        case State.COMPLETED if record.settled_by_operator:
            return "If it TOOK EFFECT, as the operator said, the next call does it a second time."
        case State.COMPLETED if definition is None:
            # An answer of a view may be a refusal, too.
            return "If it TOOK EFFECT, as its answer says (show --value), the next call does it a second time."
        case State.COMPLETED:
            return "It TOOK EFFECT: the next call does it a second time."
        case State.FAILED | State.INTERRUPTED if (
            definition is not None and definition.policy.atomic
        ):
            return _ROLLED_BACK
        case State.FAILED:
            return "What was done before it failed may be done twice: look there first."
        case State.QUEUED if record.crashes:
            return f"{_MAYBE} And if its message still comes, that may run beside a further call."
        case State.QUEUED:
            return "If its message still comes, it runs; a further call may then run as well."
        case State.INTERRUPTED if not record.crashes:
            return "What its run did before it failed may be done twice: look there first."
        case _:
            return _MAYBE


_ROLLED_BACK = (
    "What it wrote to the database was rolled back. What it did elsewhere may be done twice."
)

_MAYBE = (
    "It may have taken effect before its worker was lost: look there first, or it is done twice."
)
