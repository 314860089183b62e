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


_OBSERVED = (
    "observed: task %(task_id)s (%(task)s) runs, and would have {} task %(owner)s, which claimed %(identity)s at "
    "%(created)s and is %(found)s"
)
_LOST = "%(identity)s was claimed anew while task %(task_id)s (token %(token)s) ran: its result "

# The table in docs/reference.md says when each is reported.

reserved = OutcomeSignal("reserved", "%(identity)s is reserved for task %(task_id)s (%(task)s)")
claimed = OutcomeSignal("claimed", "task %(task_id)s (%(task)s) runs %(identity)s")
replayed = OutcomeSignal(
    "replayed",
    "%(task)s[%(task_id)s] gets the stored result of %(identity)s: task %(first)s, %(found)s since %(updated)s",
    INFO,
    _OBSERVED.format("been answered by"),
)
conflicted = OutcomeSignal(
    "conflicted",
    "%(task)s[%(task_id)s] met %(identity)s, which %(owner)s holds",
    observed=_OBSERVED.format("been in conflict with"),
)
mismatched = OutcomeSignal(
    "mismatched",
    "%(task)s[%(task_id)s] is refused: task %(first)s called %(identity)s with other arguments",
    INFO,
    _OBSERVED.format("been refused because of"),
)
settled = OutcomeSignal("settled", "task %(task_id)s (%(task)s) settled %(identity)s: %(state)s")
released = OutcomeSignal("released", "task %(task_id)s (%(task)s) released %(identity)s")
interrupted = OutcomeSignal(
    "interrupted",
    "the lease of %(owner)s on %(identity)s ran out: the record is INTERRUPTED (crash %(crashes)s)",
    WARNING,
)
lease_lost = OutcomeSignal(
    "lease_lost", f"{_LOST}is dropped", WARNING, f"{_LOST}would have been dropped"
)
requeued = OutcomeSignal(
    "requeued",
    "%(identity)s did not run or did not end in time, and is queued again (crash %(crashes)s)",
    WARNING,
)
forgotten = OutcomeSignal("forgotten", "%(who)s forgot %(identity)s%(why)s", WARNING)
swept = OutcomeSignal("swept", "a sweep interrupted %(count)s")
settle_failed = OutcomeSignal(
    "settle_failed",
    "task %(task_id)s of %(identity)s took effect, but its result could not be stored (%(error)s): after the lease a "
    "duplicate runs again",
    CRITICAL,
)
store_failed = OutcomeSignal(
    "store_failed", "store error in %(task)s[%(task_id)s]: %(error)s", WARNING
)
