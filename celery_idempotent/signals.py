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
    """What happened: to which key, in which call of which task.

    ``task`` is the task's registered name (a view's name; the namespace, where no task of the app has it). ``record``
    is the holder's in a conflict, the claim's in what a run writes. ``state`` is the state that was written, ``None``
    if the record was deleted, or nothing was written. ``count``: how many records a sweep interrupted. ``observed``:
    this is what would have happened, had ``idempotency_mode`` not been ``"observe"``. ``who`` did it: the operator whom
    an operation names, else the process (``hostname:pid/id``). ``seconds`` is how long the store took to answer the
    claim (``claimed``) or to take the end state (``settled``; with the COMMIT of an atomic task), or how long a
    duplicate waited in its worker (``replayed``, ``conflicted``, ``mismatched``); ``None`` where nobody timed it.
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

    def __init__(self, counter: str, level: int, text: str, observed: str = "") -> None:
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

#: A key was reserved, and its message is published or staged (``idempotency_publish_once``, ``enqueue``).
reserved = OutcomeSignal(
    "reserved", DEBUG, "%(identity)s is reserved for task %(task_id)s (%(task)s)"
)
#: This task has the key, and run() is about to start.
claimed = OutcomeSignal("claimed", DEBUG, "task %(task_id)s (%(task)s) runs %(identity)s")
#: The first call answers this one: its stored result or exception, or its task id where it was published or queued.
replayed = OutcomeSignal(
    "replayed",
    INFO,
    "%(task)s[%(task_id)s] gets the stored result of %(identity)s: task %(first)s, %(found)s since %(updated)s",
    _OBSERVED.format("been answered by"),
)
#: Another call holds the key.
conflicted = OutcomeSignal(
    "conflicted",
    DEBUG,
    "%(task)s[%(task_id)s] met %(identity)s, which %(owner)s holds",
    _OBSERVED.format("been in conflict with"),
)
#: The key belongs to a call with other arguments.
mismatched = OutcomeSignal(
    "mismatched",
    INFO,
    "%(task)s[%(task_id)s] is refused: task %(first)s called %(identity)s with other arguments",
    _OBSERVED.format("been refused because of"),
)
#: The end state was written.
settled = OutcomeSignal(
    "settled", DEBUG, "task %(task_id)s (%(task)s) settled %(identity)s: %(state)s"
)
#: The key was given back after a failure, or before a retry.
released = OutcomeSignal("released", DEBUG, "task %(task_id)s (%(task)s) released %(identity)s")
#: A crash took the owner: noticed by the worker's main process, or by a sweep (in the sweeping process).
interrupted = OutcomeSignal(
    "interrupted",
    WARNING,
    "the lease of %(owner)s on %(identity)s ran out: the record is INTERRUPTED (crash %(crashes)s)",
)
#: A newer claim exists: the result of this run is dropped.
lease_lost = OutcomeSignal(
    "lease_lost", WARNING, f"{_LOST}is dropped", f"{_LOST}would have been dropped"
)
#: A stale record's message was published again: by a sweep, or by an operator.
requeued = OutcomeSignal(
    "requeued",
    WARNING,
    "%(identity)s did not run or did not end in time, and is queued again (crash %(crashes)s)",
)
#: A record was deleted, by an operator, by code, or by a request that tries a failure again: the next call runs.
forgotten = OutcomeSignal("forgotten", WARNING, "%(who)s forgot %(identity)s%(why)s")
#: A sweep is done; ``event.count`` records were interrupted.
swept = OutcomeSignal("swept", DEBUG, "a sweep interrupted %(count)s")
#: run() returned, but its result could not be recorded within a lease.
settle_failed = OutcomeSignal(
    "settle_failed",
    CRITICAL,
    "task %(task_id)s of %(identity)s took effect, but its result could not be stored (%(error)s): after the lease a "
    "duplicate runs again",
)
#: The store did not answer. Nothing ran, or an atomic run was rolled back: the message goes back.
store_failed = OutcomeSignal(
    "store_failed", WARNING, "store error in %(task)s[%(task_id)s]: %(error)s"
)
