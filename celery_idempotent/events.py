"""Events: the counter, the signal and the line in the log of each outcome, in one call, from every place.

Each outcome is reported where it becomes a fact, and there alone: the line says what happened to the key, while what
becomes of the message (it comes back in 3 s, the task fails) is logged by the code that does it.

A report costs a run less than a microsecond and no round trip: counts are added up in each process and written by the
heartbeat's thread, kept by the hour, and the event is made only if a receiver or the log wants it. A process that ends
writes what it counted; one that is killed takes it along: these are figures for charts, not for the books.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypedDict

from celery_idempotent import signals
from celery_idempotent.errors import STORE_ERRORS, IdempotencyError, InvalidOption
from celery_idempotent.records import State
from celery_idempotent.signals import Event, OutcomeSignal
from celery_idempotent.signals import Line as Line

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from celery_idempotent.records import Identity, Record
    from celery_idempotent.stores.base import Store

logger = logging.getLogger(__name__)

#: A process writes what it counted at most so often, in seconds.
WRITE_EVERY = 5.0

_HOST = socket.gethostname()
#: Tells this process, and all that it forks, from those of another machine with the same name and the same pids: two
#: containers, say. A worker's children get it from its main process, which thus knows how they name themselves.
_ORIGIN = os.urandom(4).hex()


def worker_name(pid: int) -> str:
    """Return how records name this process, or a child that it forked: ``hostname:pid/id``."""
    return f"{_HOST}:{pid}/{_ORIGIN}"


class Counters:
    """How often each outcome came about in this process since that was written last, by store and task."""

    #: Does a thread of this process write the counts? The heartbeat says so, and how to start it.
    has_writer = False
    start_writer: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # No lock, and no weak references: an exception may strike wherever a run counts.
        self.counts: dict[Store, Counter[tuple[str, str]]] = {}
        self._written = time.monotonic()

    def add(self, store: Store, task: str, outcome: str) -> None:
        """Count one outcome; the heartbeat writes it in a few seconds, or the caller, with :meth:`write`."""
        counts = self.counts.get(store)
        if counts is None:
            if not store.supports_counting:
                return
            counts = self.counts.setdefault(store, Counter())
        counts[task, outcome] += 1

    @property
    def empty(self) -> bool:
        """Is everything written?"""
        return not self.counts

    def beat(self) -> None:
        """Write what was counted, if it is time."""
        if time.monotonic() - self._written >= WRITE_EVERY:
            self.write()

    def write(self) -> None:
        """Write what was counted, now, from any thread; what a store does not take is kept for the next time."""
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
                self.counts.setdefault(store, Counter()).update(counts)
            except Exception:
                logger.exception("idempotency: outcomes could not be counted")


#: The counters of this process.
counters = Counters()


_CLAIMED_AGAIN = Line(
    logging.WARNING,
    "task %(task_id)s (%(task)s) runs %(identity)s again (crash %(crashes)s, attempt %(attempts)s)",
)

#: The line of a FAILED that is not the end of a run: a person should read it.
FAILED_WITHOUT_RUN = Line(logging.ERROR, "%(error)s")


class Details(TypedDict, total=False):
    """What a report may say beside the outcome and the call: see :class:`~celery_idempotent.signals.Event`."""

    state: State | None
    error: BaseException | None
    who: str
    reason: str
    count: int
    observed: bool
    seconds: float | None
    #: What the log says instead of the usual.
    line: Line | None


class Reporter:
    """Reports what becomes of the calls of one task, by its registered name.

    ``sender`` returns whom its signals come from: the task, or the view. ``store`` returns the store that counts where
    a report does not name one.
    """

    def __init__(self, task: str, sender: Callable[[], object], store: Callable[[], Store]) -> None:
        self.task = task
        self._sender = sender
        self._store = store

    def report(
        self,
        outcome: OutcomeSignal,
        identity: Identity | None,
        task_id: str = "",
        record: Record | None = None,
        *,
        store: Store | None = None,
        has_writer: bool = True,
        **details: Unpack[Details],
    ) -> None:
        """Report one outcome.

        ``store`` spares a look into the app's settings. Without ``has_writer`` the caller writes the counters of this
        process: a worker's main process, which forks, has no thread for that.
        """
        if store is None:
            with suppress(*STORE_ERRORS, InvalidOption):  # there may be none that could count
                store = self._store()
        if store is not None:
            counters.add(store, self.task, outcome.counter)
            if outcome is signals.settled and details.get("state") is State.FAILED:
                counters.add(store, self.task, "failed")
            if has_writer and not counters.has_writer:
                counters.start_writer()
        line = details.pop("line", None)
        if line is None:
            line = outcome.observed if details.get("observed") else outcome.line
            if outcome is signals.claimed and record is not None and record.crashes:
                line = _CLAIMED_AGAIN
        logged = logger.isEnabledFor(line.level)
        if not logged and not outcome.receivers:
            return
        details["who"] = details.get("who") or worker_name(os.getpid())
        event = Event(task=self.task, task_id=task_id, identity=identity, record=record, **details)  # type: ignore[misc]  # the line is taken out
        if logged:
            fields = facts(outcome, event)
            extra = {f"idempotency_{name}": value for name, value in fields.items()}
            logger.log(line.level, "idempotency: " + line.text, _words(event), extra=extra)  # noqa: G003  a constant
        if outcome.receivers:
            outcome.send(sender=self._sender(), event=event)


def facts(outcome: OutcomeSignal, event: Event) -> dict[str, str | int | bool]:
    """Return what is known of an event, under the names that log records and traces use.

    A handler that writes JSON has them as ``idempotency_key``, ``idempotency_task_id`` and so on.
    """
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


def _words(event: Event) -> dict[str, object]:
    """Return what a line may say of an event: ``first``, ``owner`` and ``found`` are those of the record."""
    words = {name: getattr(event, name) for name in ("task", "task_id", "who", "error", "count")}
    words["identity"] = event.identity
    words["state"] = event.state and event.state.value
    words["why"] = f": {event.reason}" if event.reason else ""
    if (record := event.record) is not None:
        words |= {name: getattr(record, name) for name in ("owner", "token", "crashes", "attempts")}
        words |= {"first": record.task_id, "found": record.state.value}
        words["created"] = record.created_at.isoformat(timespec="milliseconds")
        words["updated"] = record.updated_at.isoformat(timespec="milliseconds")
    return {
        name: printable(word) if isinstance(word, str) else word for name, word in words.items()
    }


def printable(text: str) -> str:
    """Return a text with its control characters escaped: with a line feed, somebody could forge a line of a log."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
