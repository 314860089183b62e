"""One signal an outcome, each sent with one frozen object: the seam for logging, metrics and tests.

A receiver takes ``sender`` (the task) and ``event`` (an :class:`Event`)::

    @replayed.connect
    def count(sender, event, **kwargs):
        print(event.task, event.identity.key, event.record.token)

Celery's signals swallow and log what a receiver raises, so a receiver never changes the outcome.
"""

from __future__ import annotations

from dataclasses import dataclass
from logging import CRITICAL, DEBUG, INFO, WARNING
from typing import Final, NamedTuple

from celery.utils.dispatch import Signal

from celery_idempotent.records import Identity, Record, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happened: to which key, in which call of which task. The reference has a table of its fields.

    ``record`` is the holder's in a conflict, the claim's in what a run writes. ``state`` is the state that was written.
    ``seconds`` is how long the store took to answer a claim or to take an end state, or how long a duplicate waited.
    """

    task: str
    task_id: str = ""
    identity: Identity | None = None
    record: Record | None = None
    error: BaseException | None = None
    count: int = 0
    observed: bool = False
    who: str = ""
    reason: str = ""
    state: State | None = None
    seconds: float | None = None

    @property
    def namespace(self) -> str:
        """What the key is for; ``""`` for an event without a key. By default it is the task's name."""
        return "" if self.identity is None else self.identity.namespace


class Line(NamedTuple):
    """How an outcome is logged: at which level, and in which words, with names that an event fills in."""

    level: int
    text: str


#: Every outcome by its name, which is that of its signal and of its counter.
OUTCOMES: Final[dict[str, OutcomeSignal]] = {}


class OutcomeSignal(Signal):
    """The signal of one outcome, with its usual line, and its line where ``idempotency_mode`` is ``"observe"``."""

    def __init__(self, counter: str, text: str, level: int = DEBUG, observed: str = "") -> None:
        super().__init__(name=f"idempotency_{counter}")
        self.counter = counter
        self.line = Line(level, text)
        self.observed = Line(WARNING, observed) if observed else self.line
        OUTCOMES[counter] = self


_TASK = "task {event.task_id} ({event.task})"
_CALL = "{event.task}[{event.task_id}]"
_OBSERVED = f"observed: {_TASK} runs, and would have been"
_HOLDER = (
    "task {record.owner}, which claimed {event.identity} at {record.created_at:%Y-%m-%d %H:%M:%S} UTC and is "
    "{record.state.value}"
)
_LOST = "{event.identity} was claimed anew while task {event.task_id} (token {record.token}) ran: its result"

# The table in docs/options.md says when each is reported.

reserved = OutcomeSignal("reserved", "{event.identity} is reserved for " + _TASK)
claimed = OutcomeSignal("claimed", _TASK + " runs {event.identity}")
replayed = OutcomeSignal(
    "replayed",
    _CALL
    + " gets the stored result of {event.identity}: task {record.task_id}, {record.state.value} since "
    "{record.updated_at:%Y-%m-%d %H:%M:%S} UTC",
    INFO,
    f"{_OBSERVED} answered by {_HOLDER}",
)
conflicted = OutcomeSignal(
    "conflicted",
    _CALL + " met {event.identity}, which {record.owner} holds",
    observed=f"{_OBSERVED} in conflict with {_HOLDER}",
)
mismatched = OutcomeSignal(
    "mismatched",
    _CALL + " is refused: task {record.task_id} called {event.identity} with other arguments",
    INFO,
    f"{_OBSERVED} refused because of {_HOLDER}",
)
settled = OutcomeSignal("settled", _TASK + " settled {event.identity}: {event.state.value}")
released = OutcomeSignal("released", _TASK + " released {event.identity}")
interrupted = OutcomeSignal(
    "interrupted",
    "{event.identity} of {record.owner} is INTERRUPTED (crash {record.crashes}){why}",
    WARNING,
)
lease_lost = OutcomeSignal(
    "lease_lost", f"{_LOST} is dropped", WARNING, f"{_LOST} would have been dropped"
)
requeued = OutcomeSignal(
    "requeued",
    "{event.identity} did not run or did not end in time, and is queued again (crash {record.crashes})",
    WARNING,
)
forgotten = OutcomeSignal("forgotten", "{event.who} forgot {event.identity}{why}", WARNING)
swept = OutcomeSignal("swept", "a sweep interrupted {event.count}")
settle_failed = OutcomeSignal(
    "settle_failed",
    "task {event.task_id} of {event.identity} took effect, but its result could not be stored ({event.error}): after "
    "the lease a duplicate runs again",
    CRITICAL,
)
store_failed = OutcomeSignal("store_failed", f"store error in {_CALL}: {{event.error}}", WARNING)
