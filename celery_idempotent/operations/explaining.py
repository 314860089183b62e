"""The story of a record in sentences: what happened, what happens next, what can be done and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_idempotent.celery.operations import Operation, is_live, offered
from celery_idempotent.celery.registry import definition_of
from celery_idempotent.celery.republish import redelivery_timeout
from celery_idempotent.operations.acting import EFFECTS
from celery_idempotent.operations.finding import scope_in_words, task_name
from celery_idempotent.operations.health import sweeps
from celery_idempotent.operations.values import error_name
from celery_idempotent.operations.wording import moment
from celery_idempotent.protocol.options import Policy
from celery_idempotent.records import Record, State

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.stores import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An operation that means something for a record: its effect, and what that may cost."""

    operation: Operation
    effect: str
    cost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A record in one sentence, and then in the order of time.

    ``live``: its owner is within its lease, so that every choice has to be forced.
    """

    headline: str
    past: Sequence[str] = ()
    future: Sequence[str] = ()
    live: bool = False
    choices: Sequence[Choice] = ()


def story_of(app: AnyCelery, store: Store, record: Record, *, errors: bool = True) -> Story:
    """Tell the story of a record as :meth:`Store.get` returns it.

    ``errors``: may the name of a FAILED record's exception be told?
    """
    teller = _Teller(app, store, record, errors=errors)
    return Story(
        headline=teller.headline(),
        past=tuple(teller.past()),
        future=tuple(teller.future()),
        live=teller.live,
        choices=tuple(
            Choice(operation=each, effect=EFFECTS[each], cost=teller.cost(each))
            for each in offered(record, known=teller.known)
        ),
    )


def story_of_nothing(what: str) -> Story:
    """Tell what it can mean that there is no such record."""
    return Story(
        headline=f"There is no record of {what}. The workers' logs say which of these it is:",
        past=(
            "It was never called, or its message is still in the queue: a key is claimed when its run starts.",
            "It was called under another key or in another scope.",
            "Its run failed, and gave the key back: a retry or the next call runs.",
            "It was done longer ago than its retention: the next call runs.",
            "An operator released or forgot it: the next call runs.",
            "The store lost it (a flush, an eviction, a restart without persistence): see `check`.",
        ),
    )


class _Teller:
    """Tells of one record, at one time of the store's clock."""

    def __init__(self, app: Celery, store: Store, record: Record, *, errors: bool) -> None:
        self.app = app
        self.store = store
        self.record = record
        self.now_ms = store.now_ms()
        definition = definition_of(app, record.identity.namespace, load=True)
        #: Is it of a task of this app? Else it may be of a view.
        self.known = definition is not None
        self.policy = Policy() if definition is None else definition.policy
        self.live = is_live(record, self.now_ms)
        name = error_name(app, record) if errors else ""
        self.with_error = f" with {name}" if name else ""
        # A host name has no colon but in IPv6. What follows the pid tells machines of one name apart, for machines.
        host, _, pid = record.worker.partition("/")[0].rpartition(":")
        task = f"task {record.task_id}" if record.task_id else "an unknown task"
        self.holder = f"{task} on {host}, pid {pid}" if host else task

    def headline(self) -> str:
        identity = self.record.identity
        scope = f" in scope {scope_in_words(identity.scope)}" if identity.scope else ""
        return f"{identity.key} of {task_name(self.app, identity)}{scope} is {self._state()}"

    def _state(self) -> str:
        record = self.record
        match record.state:
            case State.QUEUED:
                return "QUEUED: its message is on its way, and no worker has it yet."
            case State.PROCESSING if self.live:
                return f"PROCESSING: {self.holder}, runs it, or died within the last lease."
            case State.PROCESSING:
                return f"stuck PROCESSING: the lease of {self.holder}, ran out."
            case State.INTERRUPTED if record.crashes:
                return "INTERRUPTED: its worker was lost, and nothing runs it now."
            case State.INTERRUPTED:
                return "INTERRUPTED: its run failed after some steps, and nothing runs it now."
            case State.COMPLETED if record.replaced:
                return "COMPLETED: another task (self.replace) took over its task id."
            case State.COMPLETED if record.settled_by_operator:
                return "COMPLETED: an operator completed it with a value, and it is not run."
            case State.COMPLETED:
                done = "it took effect" if self.known else "it was answered"
                return f"COMPLETED: {done}, and is not run again."
            case _:
                return f"FAILED for good{self.with_error}: it is not run again."

    def past(self) -> Iterator[str]:
        record = self.record
        if record.updated_ms - record.created_ms > 1000:
            yield f"First claimed or reserved {self._at(record.created_ms)}."
        if record.attempts > 1 or record.crashes:
            yield f"Claims so far: {record.attempts}; lost workers: {record.crashes}."
        last = f"; {self.holder}, had it last" if record.attempts else ""
        yield f"{_LAST_CHANGE[record.state]} {self._at(record.updated_ms)}{last}."
        if record.delivered:
            yield "Its callbacks (links, chain, chord) were sent."
        if record.steps:
            names = ", ".join(name for name, _ in record.steps)
            yield f"Steps done, which are not repeated: {names}."
        if record.note:
            yield f"Last operation: {record.note}."

    def future(self) -> Iterator[str]:
        record, deadline = self.record, self._at(self.record.deadline_ms or 0)
        match record.state:
            case State.QUEUED:
                yield "It runs when a worker takes its message: see that a worker listens to its queue."
                by = "a sweep" if record.message is not None else "the next call"
                yield f"From {deadline} on {by} publishes its message again, under the same task id."
            case State.PROCESSING if self.live:
                yield f"Its lease ends {deadline}, and is renewed as long as its worker lives."
                if self.known:
                    yield _MEANWHILE[self.policy.on_conflict]
            case State.PROCESSING:
                yield f"Its lease ran out {deadline}: its worker is dead, frozen, or cut off from the store."
                yield f"{self._sweep()} {_SWEPT[record.on_stale]}"
                yield f"A delivery or call before that claims it at once, and {self._claimed(record.crashes + 1)}."
                yield self._redelivery()
            case State.INTERRUPTED:
                yield f"The next delivery or call claims it, and {self._claimed(record.crashes)}."
                if record.crashes:
                    yield self._redelivery()
            case State.COMPLETED | State.FAILED:
                if self.known:
                    until = self._at(record.updated_ms + self.policy.settled_keep_ms)
                    yield f"Kept until {until}, by the options that its task has now."
                yield f"Until it expires, a duplicate gets {self._answer()}, without a run."

    def _answer(self) -> str:
        record = self.record
        if record.state is State.FAILED:
            return "this error"
        if record.replaced:
            return "that other task's result"
        if record.value is None:
            return "what the result backend has (its result is not in the record: too large, or not stored)"
        return "its result" if self.known else "the same answer"

    def _sweep(self) -> str:
        about = sweeps(self.app, self.store.stats())
        if about.interval is None:
            return "This app asks for no sweeps."
        last = "none has ended yet" if about.ago_ms is None else f"the last ended {about.ago} ago"
        doubt = "" if about.well else ": does beat run, and a worker that consumes its queue?"
        return f"Sweeps are due every {about.interval:g} s, and {last}{doubt or '.'}"

    def _claimed(self, crashes: int) -> str:
        """Tell what a claim does that finds so many crashes, its own included."""
        most = self.policy.max_crashes
        if crashes and self.policy.on_stale == "fail":
            return "settles it FAILED (ProcessingTimedOut) without a run, as the task's idempotency_on_stale says"
        if crashes > most:
            return f"settles it FAILED (TooManyCrashes) without a run: that is over {most} crashes"
        return f"runs it ({crashes} of {most} crashes allowed so far)" if crashes else "runs it"

    def _redelivery(self) -> str:
        broker = redelivery_timeout(self.app)
        when = (
            "once the connection of its worker is gone"
            if broker is None
            else f"{broker.seconds:g} s after it was taken ({broker.option}), or later"
        )
        return f"The broker delivers its message again {when}."

    def cost(self, operation: Operation) -> str:
        """Tell what may happen a second time, or is not noticed by callers."""
        record = self.record
        if self.live:
            return "Its owner is not stopped by that: its result is dropped, and what it does may be done twice."
        if operation == "complete":
            return "Check the outside system first: callers get what you say."
        if operation == "fail":
            return "If it took effect before, callers do not learn its result."
        cost = self._cost_of_another_run()
        if operation == "forget" and record.steps:
            cost += " Its steps are done again as well."
        return cost

    def _cost_of_another_run(self) -> str:
        match self.record.state:
            case State.COMPLETED:
                what = "It TOOK EFFECT" if self.known else "If it TOOK EFFECT, as its answer says"
                return f"{what}: the next call does it a second time."
            case State.FAILED | State.INTERRUPTED if self.policy.atomic:
                return "What it wrote to the database was rolled back. What it did elsewhere may be done twice."
            case State.QUEUED:
                return "If its message still comes, it runs; a further call may then run as well."
            case _:
                return (
                    "What it did before it failed or was lost may be done twice: look there first."
                )

    def _at(self, ms: int) -> str:
        return moment(ms, self.now_ms)


_LAST_CHANGE = {
    State.QUEUED: "Queued",
    State.PROCESSING: "Claimed",
    State.INTERRUPTED: "Interrupted",
    State.COMPLETED: "Settled",
    State.FAILED: "Settled",
}

_SWEPT = {
    "interrupt": "The next one makes it INTERRUPTED: it then waits for a delivery or a call.",
    "fail": "The next one settles it FAILED (ProcessingTimedOut), as the task's idempotency_on_stale says.",
    "requeue": "The next one publishes its message again, as the task's idempotency_on_stale says.",
}

_MEANWHILE = {
    "retry": "A duplicate meanwhile goes back to the queue with a countdown.",
    "wait": "A duplicate meanwhile waits for it, and then goes back to the queue.",
    "ignore": "A duplicate under another task id is dropped meanwhile.",
    "raise": "A duplicate under another task id fails with InProgress meanwhile.",
}
