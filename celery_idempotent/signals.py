"""One signal, counter and log line for each outcome, reported in one call, where the outcome becomes a fact.

A receiver takes ``sender`` (the task) and ``event`` (an :class:`Event`)::

    @replayed.connect
    def count(sender, event, **kwargs):
        print(event.task, event.identity.key, event.record.token)

Celery's signals swallow and log what a receiver raises, so a receiver never changes the outcome.

A report takes less than a microsecond and no round trip: each process adds up its counts, which the heartbeat's thread
writes by minute and hour. A process that is killed loses its last counts: they are for charts, not for accounting.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from logging import CRITICAL, DEBUG, ERROR, INFO, WARNING
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

from celery.utils.dispatch import Signal

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.records import Identity, Record, State

if TYPE_CHECKING:
    from celery_idempotent.stores.base import Store

logger = logging.getLogger(__name__)

#: The shortest time between two writes of the counts, in seconds.
WRITE_EVERY = 5.0

_HOST = socket.gethostname()
#: Tells this process and its forks, whose names a worker's main process thus knows, from those of another container.
_ORIGIN = os.urandom(4).hex()


@lru_cache(maxsize=64)  # pids of other machines' records are asked for, too
def worker_name(pid: int) -> str:
    """Return the name of this process, or of a child that it forked, in records: ``hostname:pid/id``."""
    return f"{_HOST}:{pid}/{_ORIGIN}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One outcome of a call; a table in the documentation of the signals describes its fields."""

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


class Line(NamedTuple):
    """The level of a log line, and its text: a constant, with names that an event fills in."""

    level: int
    text: str


#: A name in the text of a line.
_NAME = re.compile("{[^}]+}")

#: Python 3.11 needs 0.2 µs to look up a member of an Enum.
_FAILED: Final = State.FAILED
#: By the name of the signal, which is that of the counter.
OUTCOMES: Final[dict[str, OutcomeSignal]] = {}


class OutcomeSignal(Signal):
    """The signal of one outcome, with its usual line and that of ``idempotency_mode="observe"``."""

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
_LOST = "{event.identity} was claimed again while task {event.task_id} (token {record.token}) ran: its result"

reserved = OutcomeSignal("reserved", "{event.identity} is reserved for " + _TASK)
claimed = OutcomeSignal("claimed", _TASK + " runs {event.identity}")
_AGAIN = " again (crash {record.crashes}, attempt {record.attempts})"
_CLAIMED_AGAIN = Line(WARNING, claimed.line.text + _AGAIN)
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
#: The line of a FAILED without a run: a person should read it.
FAILED_WITHOUT_RUN = Line(ERROR, "FAILED without a run: {event.error}")
released = OutcomeSignal("released", _TASK + " released {event.identity}")
_RAISED = Line(INFO, released.line.text + " after {event.error.__class__.__name__}")
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
swept = OutcomeSignal("swept", "a sweep ended{why}")
settle_failed = OutcomeSignal(
    "settle_failed",
    "task {event.task_id} of {event.identity} took effect, but its result could not be stored ({event.error}): after "
    "the lease a duplicate runs again",
    CRITICAL,
)
store_failed = OutcomeSignal("store_failed", f"store error in {_CALL}: {{event.error}}", WARNING)


#: By task and outcome. A ``Counter`` takes twice as long to count.
Counts = defaultdict[tuple[str, str], int]


class Counters:
    """The outcomes of this process that are not written yet, by store and task."""

    #: Does a thread write the counts? The heartbeat sets both.
    has_writer = False
    start_writer: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # No lock, and no weak references: an exception may strike wherever a run counts.
        self.counts: dict[Store, Counts] = {}
        self._written = time.monotonic()

    def of(self, store: Store) -> Counts:
        """Return the counts of one store, by task and outcome."""
        counts = Counts(int)
        return self.counts.setdefault(store, counts) if store.supports_counting else counts

    def beat(self) -> None:
        """Write the counts if it is time."""
        if time.monotonic() - self._written >= WRITE_EVERY:
            self.write()

    def write(self) -> None:
        """Write the counts, from any thread; those that a store does not take are kept for the next time."""
        self._written = time.monotonic()
        for store in list(self.counts):
            # Another thread counts on in a new counter. A lock would stay locked if a time limit struck its owner.
            counts = self.counts.pop(store, None)
            if not counts:
                continue
            try:
                store.count(dict(counts))
            except IdempotencyError as error:
                logger.debug("idempotency: outcomes are counted later: %s", error)
                later = self.of(store)
                for key, number in counts.items():
                    later[key] += number
            except Exception:
                logger.exception("idempotency: outcomes could not be counted")


counters = Counters()


class Details(TypedDict, total=False):
    """Optional fields of an :class:`Event`, and the log line that replaces that of the outcome."""

    state: State | None
    error: BaseException | None
    who: str
    reason: str
    count: int
    observed: bool
    seconds: float | None
    line: Line


@dataclass(kw_only=True, eq=False)
class Call:
    """What is reported, a run or a call without one; ``store`` counts the outcomes of ``sender``, a task or view."""

    name: str
    sender: object
    store: Store | None
    identity: Identity | None = None
    task_id: str = ""


def report(
    call: Call,
    outcome: OutcomeSignal,
    record: Record | None = None,
    *,
    has_writer: bool = True,
    state: State | None = None,
    error: BaseException | None = None,
    who: str = "",
    reason: str = "",
    count: int = 0,
    observed: bool = False,
    seconds: float | None = None,
    line: Line | None = None,
) -> None:
    """Report one outcome: count it, log it, send it to its receivers.

    Without ``has_writer`` the caller writes the counters: a worker's main process, which forks, has no thread.
    """
    store = call.store
    if store is not None:
        counts = counters.counts.get(store)
        if counts is None:
            counts = counters.of(store)
        counts[call.name, outcome.counter] += 1
        if outcome is settled and state is _FAILED:
            counts[call.name, "failed"] += 1
        if error is not None and (outcome is settled or outcome is released):
            # A run that raised leaves no record.
            ended = "failed" if outcome is settled else "released"
            counts[call.name, f"{ended}:{type(error).__name__[:80]}"] += 1
        if has_writer and not counters.has_writer:
            counters.start_writer()
    if line is None:
        line = outcome.observed if observed else outcome.line
        if outcome is claimed and record is not None and record.crashes:
            line = _CLAIMED_AGAIN
        elif outcome is released and error is not None:
            line = _RAISED
    logged = logger.isEnabledFor(line.level)
    if not logged and not outcome.receivers:
        return
    event = Event(
        task=call.name,
        task_id=call.task_id,
        identity=call.identity,
        record=record,
        error=error,
        count=count,
        observed=observed,
        who=who or worker_name(os.getpid()),
        reason=reason,
        state=state,
        seconds=seconds,
    )
    if logged:
        why = f": {event.reason}" if event.reason else ""
        # Error trackers group lines by their template.
        template, names = _NAME.sub("%s", line.text), _NAME.findall(line.text)
        args = [printable(each.format(event=event, record=record, why=why)) for each in names]
        extra = {f"idempotency_{name}": value for name, value in facts(outcome, event).items()}
        logger.log(line.level, f"idempotency: {template}", *args, extra=extra)  # noqa: G004  constants
    if outcome.receivers:
        outcome.send(sender=call.sender, event=event)


def facts(outcome: OutcomeSignal, event: Event) -> dict[str, str | int | bool]:
    """Return the known facts of an event, by their names in log records and traces."""
    found: dict[str, str | int | bool] = {"outcome": outcome.counter}
    found |= {"task": event.task, "task_id": event.task_id, "who": event.who}
    if (identity := event.identity) is not None:
        found |= {"namespace": identity.namespace, "key": identity.key, "scope": identity.scope}
    if event.state is not None:
        found["state"] = event.state.value
    if event.error is not None:
        found["error"] = type(event.error).__name__
    if event.observed:
        found["observed"] = True
    if (record := event.record) is not None:
        found |= {"attempt": record.attempts, "crashes": record.crashes}
        if record.task_id != event.task_id:
            found["first_task_id"] = record.task_id
    return found


def error_in_words(error: BaseException) -> str:
    """Return the class of an error and the first line of its message, as "class: message"."""
    text = ""
    with suppress(Exception):  # of classes of any kind
        text = str(error).strip().partition("\n")[0]
    return printable(f"{type(error).__name__}: {text}")[:200].removesuffix(": ")


def printable(text: str) -> str:
    """Return a text with its control characters escaped: a line feed could forge a line of a log."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
