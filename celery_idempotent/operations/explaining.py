"""The story of a record in sentences: what happened, what happens next and when, what can be done and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_idempotent.celery.operations import Operation, is_live, offered
from celery_idempotent.celery.registry import definition_of
from celery_idempotent.operations.finding import scope_in_words, task_name
from celery_idempotent.operations.health import sweeps
from celery_idempotent.operations.values import error_name
from celery_idempotent.operations.wording import (
    ago,
    holder,
    intervention_in_words,
    moment,
    time_in_words,
)
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.records import Record, State
from celery_idempotent.stores.refusals import KEPT

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.definition import Definition
    from celery_idempotent.stores import Store

__all__ = ["EFFECTS", "STEP_EFFECTS", "Choice", "Story", "story_of", "story_of_nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An operation that means something for a record: what it does, and what that may cost."""

    operation: Operation
    effect: str
    cost: str


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


def story_of(app: Celery, store: Store, record: Record, *, errors: bool = True) -> Story:
    """Tell the story of a record as :meth:`Store.get` returns it; the store is asked three questions at most.

    ``errors``: may the name of a FAILED record's exception be told?
    """
    teller = _Teller(app, store, record, errors=errors)
    return Story(
        headline=teller.headline(),
        past=tuple(teller.past()),
        future=tuple(teller.future()),
        live=teller.live,
        choices=tuple(teller.choices()),
    )


def story_of_nothing(app: Celery, what: str, namespace: str | None) -> Story:
    """Tell what it can mean that there is no such record."""
    definition = None if namespace is None else definition_of(app, namespace)
    policy = Policy() if definition is None else definition.policy
    now = f" (of {time_in_words(policy.retention_ms)})" if definition else ""
    past = [
        "It was never called, or its message is still in the queue: a key is claimed when its run starts.",
        "It was called under another key or in another scope: a key within a scope is found only with --scope.",
        "Its run failed, and gave the key back, as failures do: a retry or the next call runs.",
        f"It was done longer ago than its retention{now}, or somebody forgot it: the next call runs.",
        "The store lost it (a flush, an eviction, a restart without persistence): `check` says whether that can be.",
    ]
    return Story(headline=f"There is no record of {what}. That can mean:", past=past)


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

    def headline(self) -> str:
        record, now_ms = self.record, self.now_ms
        identity = record.identity
        scope = f" in scope {scope_in_words(identity.scope)}" if identity.scope else ""
        subject = f"{identity.key} of {task_name(self.app, identity)}{scope}"
        match record.state:
            case State.QUEUED if record.deadline_ms is not None and record.deadline_ms <= now_ms:
                return f"{subject} is QUEUED, and its message should have started by now."
            case State.QUEUED:
                return f"{subject} is QUEUED: its message is on its way, and no worker has it yet."
            case State.PROCESSING if self.live:
                return f"{subject} is PROCESSING: {holder(record)}, is at work."
            case State.PROCESSING:
                return f"{subject} is stuck PROCESSING: the lease of {holder(record)}, ran out."
            case State.INTERRUPTED if record.crashes:
                return (
                    f"{subject} is INTERRUPTED: a crash took its worker, and nothing runs it now."
                )
            case State.INTERRUPTED:
                return f"{subject} is INTERRUPTED: its run failed after some steps, and nothing runs it now."
            case State.COMPLETED if record.replaced:
                return f"{subject} is COMPLETED: another task (self.replace) took over its task id."
            case State.COMPLETED if record.settled_by:
                return f"{subject} is COMPLETED: {record.settled_by.who} completed it with a value, and it is not run."
            case State.COMPLETED:
                return f"{subject} is COMPLETED: it took effect, and is not run again."
            case State.FAILED:
                error = f" with {self.error}" if self.error else ""
                by = f" by {record.settled_by.who}" if record.settled_by else ""
                return f"{subject} is FAILED for good{error}{by}: it is not run again."

    def past(self) -> Iterator[str]:
        record = self.record
        first = (
            "Reserved, before its message was published," if record.reserved else "First claimed"
        )
        if record.state.settled:
            first = "First claimed or reserved"
        if record.updated_ms - record.created_ms > 1000:
            yield f"{first} {self._at(record.created_ms)}."
        if record.attempts > 1 or record.crashes:
            crashes = f"; its worker was lost {_times(record.crashes)}" if record.crashes else ""
            yield f"Claimed {_times(record.attempts)}{crashes}."
        yield from self._present()
        if record.steps:
            names = ", ".join(name for name, _ in record.steps)
            yield f"Steps done, which are not repeated: {names}."
        for each in record.interventions:
            yield f"{intervention_in_words(each, self._at(each.at_ms)).rstrip('.')}."
        for refusal in record.refusals:
            why = (
                "another call held the key"
                if refusal.kind == "conflict"
                else "its arguments are not those of the first call (FingerprintMismatch)"
            )
            who = f"task {refusal.task_id}" if refusal.task_id else "a call"
            yield f"Refused: {who}, {self._at(refusal.at_ms)}: {why}."
        if len(record.refusals) == KEPT:
            yield "Refusals before these five are not kept."

    def _present(self) -> Iterator[str]:
        """Tell of the last change of the state."""
        record, at = self.record, self._at(self.record.updated_ms)
        match record.state:
            case State.QUEUED:
                yield f"Queued {at}, under task {record.task_id}."
            case State.PROCESSING:
                yield f"Claimed {at} by {holder(record)}."
            case State.INTERRUPTED:
                yield f"Interrupted {at}; {holder(record)}, had it last."
            case State.COMPLETED | State.FAILED:
                if record.settled_by is None:
                    yield f"Settled {at} by task {record.task_id}."
                else:
                    yield f"Task {record.task_id} had it last."
                if record.delivered:
                    yield "Its callbacks (links, chain, chord) were sent."

    def future(self) -> Iterator[str]:
        record = self.record
        kept = self._kept_until()
        if kept:
            yield kept
        match record.state:
            case State.QUEUED:
                yield from self._queued()
            case State.PROCESSING if self.live:
                yield (
                    f"Its lease ends {self._at(record.deadline_ms or 0)}, and is renewed every"
                    f" {time_in_words(self.policy.lease_ms // 3)} as long as its worker lives."
                )
                yield _MEANWHILE[self.policy.on_conflict]
            case State.PROCESSING:
                yield f"Its lease ran out {self._at(record.deadline_ms or 0)}: {_LOST}"
                yield f"{self._sweep()} {_SWEPT[record.on_stale]}"
                yield f"A delivery or call that comes before claims it at once and runs{self._unless()}."
            case State.INTERRUPTED:
                yield (
                    "Nothing runs by itself: the broker's redelivery, or the next call, claims it and runs"
                    f"{self._unless()}."
                )
                yield "Redis as a broker redelivers after its visibility_timeout, RabbitMQ at once."
            case State.COMPLETED:
                if record.value is not None or record.replaced:
                    yield "Until then whoever asks again gets its result, without a run."
                else:
                    yield "Until then it is not run again. Duplicates ask the result backend for its result."
            case State.FAILED:
                yield "Until then whoever asks again gets this error, without a run."

    def _queued(self) -> Iterator[str]:
        record = self.record
        deadline_ms = record.deadline_ms or 0
        yield "It runs when a worker takes its message: see that a worker listens to its queue."
        over = "is" if deadline_ms > self.now_ms else "was"
        then = (
            f"{self._sweep()} Past the deadline that sends it again."
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

    def _unless(self) -> str:
        """Tell what too many crashes do."""
        left = self.policy.max_crashes - self.record.crashes
        if left < 0:
            return ", unless its crashes are too many: then it is settled FAILED (TooManyCrashes)"
        if not self.record.crashes:
            return ""
        return f" ({self.record.crashes} of {self.policy.max_crashes} crashes allowed so far)"

    def _kept_until(self) -> str:
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
        keep_ms = (
            self.policy.failed_keep_ms
            if record.state is State.FAILED
            else self.policy.settled_keep_ms
        )
        return f"Kept until {self._at(record.updated_ms + keep_ms)}, by the options that its task has now."

    def choices(self) -> Iterator[Choice]:
        for operation in offered(self.record, known=self.definition is not None):
            yield Choice(operation=operation, effect=EFFECTS[operation], cost=self._cost(operation))

    def _cost(self, operation: Operation) -> str:
        state = self.record.state
        if self.live:
            return "Its owner is not stopped by that: what it does outside may be done twice."
        if operation == "complete":
            return "Callers believe it: ask where the effect was to be, before you say what came of it."
        if operation == "fail":
            return "If it took effect before, callers do not learn its result."
        if state is State.COMPLETED:
            return "It TOOK EFFECT: the next call does it a second time."
        if state is State.FAILED:
            return "What the failed run did before its error may be done twice."
        if state is State.QUEUED:
            return "If its message still comes, it runs; a further call may then run as well."
        return "It may have taken effect before its worker was lost: look there first, or it is done twice."

    def _at(self, ms: int) -> str:
        return moment(ms, self.now_ms)

    def _ago(self, ms: int) -> str:
        return ago(ms, self.now_ms)


_LOST = "its worker is dead, frozen, or cut off from the store."

_SWEPT = {
    "interrupt": "The next one makes it INTERRUPTED.",
    "fail": "The next one settles it FAILED (ProcessingTimedOut), as the task's idempotency_on_stale says.",
    "requeue": "The next one publishes its message again, as the task's idempotency_on_stale says.",
}

_MEANWHILE = {
    "retry": "A duplicate meanwhile goes back to the queue with a countdown.",
    "wait": "A duplicate meanwhile waits for it, and then goes back to the queue.",
    "ignore": "A duplicate under another task id is dropped meanwhile.",
    "raise": "A duplicate under another task id fails with InProgress meanwhile.",
}

EFFECTS: dict[Operation, str] = {
    "release": "ends the claim: the next delivery or call runs.",
    "requeue": "publishes the message that the record keeps again, under the same task id.",
    "complete": "settles it COMPLETED with the value that you give: nothing runs, and callers get that value.",
    "fail": "settles it FAILED: nothing runs until its retention ends, and callers get FailedByOperator.",
    "forget": "deletes the record with all it knows: the next call runs.",
}

#: What those of them do that can be about one step.
STEP_EFFECTS: dict[Operation, str] = {
    "complete": "records the result of the step that you give: the next run takes it, and does not do that step.",
    "forget": "takes the result of the step away: the next run does it again.",
}


def _times(count: int) -> str:
    # Redis counts in one byte.
    return {1: "once", 2: "twice", 255: "255 times or more"}.get(count, f"{count} times")
