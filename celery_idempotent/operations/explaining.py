"""The story of a record in sentences: what happened, what happens next and when, what can be done and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_idempotent.celery.operations import is_live
from celery_idempotent.celery.redelivery import redelivery_timeout
from celery_idempotent.celery.registry import definition_of
from celery_idempotent.operations.choosing import Choice, choices_of
from celery_idempotent.operations.finding import scope_in_words, task_name
from celery_idempotent.operations.health import sweeps
from celery_idempotent.operations.values import error_name
from celery_idempotent.operations.wording import (
    holder,
    moment,
    redelivery_in_words,
    time_in_words,
    times,
)
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.records import Record, State

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.definition import Definition
    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.stores import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What there is to say about a key: in one sentence, and then in the order of time.

    ``live``: its owner is at work, so that every choice has to be forced.
    """

    headline: str
    past: Sequence[str] = ()
    future: Sequence[str] = ()
    live: bool = False
    choices: Sequence[Choice] = ()


def story_of(app: AnyCelery, store: Store, record: Record, *, errors: bool = True) -> Story:
    """Tell the story of a record as :meth:`Store.get` returns it; the store is asked three questions at most.

    ``errors``: may the name of a FAILED record's exception be told?
    """
    teller = _Teller(app, store, record, errors=errors)
    return Story(
        headline=teller.headline(),
        past=tuple(teller.past()),
        future=tuple(teller.future()),
        live=teller.live,
        choices=tuple(choices_of(record, teller.definition, live=teller.live)),
    )


def story_of_nothing(app: AnyCelery, what: str, namespace: str | None) -> Story:
    """Tell what it can mean that there is no such record."""
    definition = None if namespace is None else definition_of(app, namespace)
    policy = Policy() if definition is None else definition.policy
    now = f" (now {time_in_words(policy.retention_ms)})" if definition else ""
    past = [
        "It was never called, or its message is still in the queue: a key is claimed when its run starts.",
        "It was called under another key or in another scope: a key within a scope is found only with --scope.",
        "Its run failed, and gave the key back, as failures do: a retry or the next call runs.",
        f"It was done longer ago than its retention{now}: the next call runs.",
        "An operator released or forgot it: the next call runs. The log of that command, or of the admin, says who.",
        "The store lost it (a flush, an eviction, a restart without persistence): `check` says whether that can be.",
    ]
    return Story(
        headline=f"There is no record of {what}. The workers' logs say which of these it is:",
        past=past,
    )


class _Teller:
    """Tells of one record, at one time of the store's clock."""

    def __init__(self, app: Celery, store: Store, record: Record, *, errors: bool) -> None:
        self.error = error_name(app, record) if errors else ""
        self.app = app
        self.store = store
        self.record = record
        self.now_ms = store.now_ms()
        self.definition: Definition | None = definition_of(
            app, record.identity.namespace, load=True
        )
        self.policy = Policy() if self.definition is None else self.definition.policy
        self.live = is_live(record, self.now_ms)
        # Whose task is not known may well be a view, whose names only its project has.
        self.kind = "task" if self.definition else "task or request"

    def headline(self) -> str:
        record = self.record
        identity = record.identity
        scope = f" in scope {scope_in_words(identity.scope)}" if identity.scope else ""
        subject = f"{identity.key} of {task_name(self.app, identity)}{scope}"
        return f"{subject} is {self._end() if record.state.settled else self._stage()}"

    def _stage(self) -> str:
        record = self.record
        match record.state:
            case State.QUEUED if (record.deadline_ms or self.now_ms + 1) <= self.now_ms:
                return "QUEUED, and its message should have started by now."
            case State.QUEUED if record.attempts:
                return "QUEUED again: its message was published once more, and no worker has it."
            case State.QUEUED:
                return "QUEUED: its message is on its way, and no worker has it yet."
            case State.PROCESSING if self.live:
                return f"PROCESSING: {holder(record, self.kind)}, is at work, or died within the last lease."
            case State.PROCESSING:
                return f"stuck PROCESSING: the lease of {holder(record, self.kind)}, ran out."
            case State.INTERRUPTED if record.crashes:
                return "INTERRUPTED: its worker was lost, and nothing runs it now."
            case _:
                return "INTERRUPTED: its run failed after some steps, and nothing runs it now."

    def _end(self) -> str:
        record = self.record
        match record.state:
            case State.COMPLETED if record.replaced:
                return "COMPLETED: another task (self.replace) took over its task id."
            case State.COMPLETED if record.settled_by_operator:
                return "COMPLETED: an operator completed it with a value, and it is not run."
            case State.COMPLETED:
                done = "it took effect" if self.definition else "it was answered"
                return f"COMPLETED: {done}, and is not run again."
            case State.FAILED if record.settled_by_operator:
                return "FAILED for good: an operator failed it; it is not run again."
            case _:
                error = f" with {self.error}" if self.error else ""
                return f"FAILED for good{error}: it is not run again."

    def past(self) -> Iterator[str]:
        record = self.record
        first = "First claimed or reserved" if record.state.settled else "First claimed"
        if record.reserved and not record.state.settled:
            first = "Reserved, before its message was published,"
        if record.updated_ms - record.created_ms > 1000:
            yield f"{first} {self._at(record.created_ms)}."
        if record.attempts > 1 or record.crashes:
            crashes = f"; its worker was lost {times(record.crashes)}" if record.crashes else ""
            yield f"Claimed {times(record.attempts)}{crashes}."
        if record.crashes and record.state is State.COMPLETED and not record.settled_by_operator:
            yield "What a lost run did outside, the run after it may have done again."
        yield from self._present()
        if record.steps:
            names = ", ".join(name for name, _ in record.steps)
            yield f"Steps done, which are not repeated: {names}."
        if record.note:
            yield f"Last operation: {record.note}."
        if record.state.settled:
            yield "Not kept here: earlier runs that failed or asked for a retry, and calls that were given this answer."

    def _present(self) -> Iterator[str]:
        """Tell of the last change of the state."""
        record, at = self.record, self._at(self.record.updated_ms)
        match record.state:
            case State.QUEUED if record.attempts:
                yield f"Queued again {at}, under task {record.task_id}: {_AGAIN}"
            case State.QUEUED:
                yield f"Queued {at}, under task {record.task_id}."
            case State.PROCESSING:
                yield f"Claimed {at} by {holder(record, self.kind)}."
            case State.INTERRUPTED:
                yield f"Interrupted {at}; {holder(record, self.kind)}, had it last."
            case State.COMPLETED | State.FAILED:
                yield self._settled(at)
                if record.delivered and not record.replaced:
                    yield "Its callbacks (links, chain, chord) were sent."

    def _settled(self, at: str) -> str:
        """Tell who settled it: a run, an operator, or nobody who ran."""
        record = self.record
        if record.settled_by_operator:
            if not record.attempts:
                return f"Task {record.task_id} was to do it, and had not begun."
            unsettled = ", and had not settled it" if record.state is State.FAILED else ""
            return f"Task {record.task_id} had it last{unsettled}."
        if self.error == "TooManyCrashes":
            most = self.policy.max_crashes
            return f"Settled {at} without another run: more than {most} crashes. Task {record.task_id} had it last."
        if self.error == "ProcessingTimedOut":
            return (
                f"Settled {at} without another run: task {record.task_id} had it last, and did not come back before"
                " its lease ran out."
            )
        return f"Settled {at} by {self.kind} {record.task_id}."

    def future(self) -> Iterator[str]:
        record = self.record
        yield from filter(None, [self._kept_until()])
        match record.state:
            case State.QUEUED:
                yield from self._queued()
            case State.PROCESSING if self.live:
                every = (
                    f" every {time_in_words(self.policy.lease_ms // 3)}" if self.definition else ""
                )
                yield (
                    f"Its lease ends {self._at(record.deadline_ms or 0)}, and is renewed{every}"
                    " as long as its worker lives."
                )
                yield _MEANWHILE[self.policy.on_conflict] if self.definition else _MEANWHILE_ELSE
            case State.PROCESSING:
                yield f"Its lease ran out {self._at(record.deadline_ms or 0)}: {_LOST}"
                yield f"{self._sweep()} {_SWEPT[record.on_stale]}"
                yield f"A delivery or call before that claims it at once, and {self._claimed(record.crashes + 1)}."
                if self.definition is not None:
                    yield redelivery_in_words(redelivery_timeout(self.app))
            case State.INTERRUPTED:
                claimed = f"That claims it, and {self._claimed(record.crashes)}."
                if self.definition is None:
                    yield f"It waits for another delivery, call or request. {claimed}"
                else:
                    lost = "the broker to deliver its message again"
                    it = lost if record.crashes else "its retry, if it asked for one"
                    yield f"It waits for {it}, or for another call. {claimed}"
                    if record.crashes:
                        yield redelivery_in_words(redelivery_timeout(self.app))
                    kept = time_in_words(self.policy.keep_ms)
                    yield f"Kept for {kept} after the end of its lease: then a call runs as if it were the first."
            case State.COMPLETED:
                if record.replaced:
                    yield "Until then whoever asks again gets that other task's result, without a run."
                elif record.value is not None:
                    what = "its result" if self.definition else "the same answer"
                    what = "that value" if record.settled_by_operator else what
                    yield f"Until then whoever asks again gets {what}, without a run."
                else:
                    yield (
                        "Until then it is not run again. Its result is not in the record (too large, or"
                        " idempotency_store_result is off): duplicates ask the result backend for it."
                    )
            case State.FAILED:
                yield "Until then whoever asks again gets this error, without a run."

    def _queued(self) -> Iterator[str]:
        record = self.record
        deadline_ms = record.deadline_ms or 0
        yield "It runs when a worker takes its message: see that a worker listens to its queue."
        over = "is" if deadline_ms > self.now_ms else "was"
        then = (
            f"{self._sweep()} Past the deadline a sweep publishes it again."
            if record.message is not None
            else "Past the deadline the next call publishes it again, under the same task id."
        )
        yield f"Its deadline {over} {self._at(deadline_ms)}. {then}"

    def _sweep(self) -> str:
        """Tell when sweeps come."""
        about = sweeps(self.app, self.store.stats())
        if about.interval is None:
            return "This app asks for no sweeps; where somebody does:"
        every = f"Sweeps are due every {about.interval:g} s, and"
        if about.last is None:
            return f"{every} none has ended yet: does beat run?"
        if not about.well:
            return f"{every} the last ended {about.ago} ago: beat, or the queue of the sweep, stands still."
        return f"{every} the last ended {about.ago} ago."

    def _claimed(self, crashes: int) -> str:
        """Tell what a claim does that finds so many crashes, its own included."""
        if crashes and self.policy.on_stale == "fail":
            return "settles it FAILED (ProcessingTimedOut) without a run, as the task's idempotency_on_stale says"
        if crashes > self.policy.max_crashes:
            return f"settles it FAILED (TooManyCrashes) without a run: that is over {self.policy.max_crashes} crashes"
        if not crashes:
            return "runs it"
        return f"runs it ({crashes} of {self.policy.max_crashes} crashes allowed so far)"

    def _kept_until(self) -> str:
        """Tell when a settled record expires: the store knows, or the options of its task do."""
        record = self.record
        if not record.state.settled:
            return ""
        store = self.store.without_cache()
        if store.supports_cache:
            retained = store.retained(record.identity)
            return (
                ""
                if retained is None
                else f"Kept until {self._at(self.now_ms + retained.left_ms)}."
            )
        if self.definition is None:
            return (
                "For how long it is kept is not known here: no task of this app has its namespace."
            )
        until = self._at(record.updated_ms + self.policy.settled_keep_ms)
        return f"Kept until {until}, by the options that its task has now."

    def _at(self, ms: int) -> str:
        return moment(ms, self.now_ms)


_LOST = "its worker is dead, frozen, or cut off from the store."

_SWEPT = {
    "interrupt": "The next one makes it INTERRUPTED: it then waits for a delivery or a call.",
    "fail": "The next one settles it FAILED (ProcessingTimedOut), as the task's idempotency_on_stale says.",
    "requeue": "The next one publishes its message again, as the task's idempotency_on_stale says.",
}

_AGAIN = "by a sweep or an operator after its worker was lost, or by its own run for a retry (the log says)."

#: Of no task of this app; in most cases of a view.
_MEANWHILE_ELSE = "A duplicate meanwhile is refused; a request over HTTP is answered 409."

_MEANWHILE = {
    "retry": "A duplicate meanwhile goes back to the queue with a countdown.",
    "wait": "A duplicate meanwhile waits for it, and then goes back to the queue.",
    "ignore": "A duplicate under another task id is dropped meanwhile.",
    "raise": "A duplicate under another task id fails with InProgress meanwhile.",
}
