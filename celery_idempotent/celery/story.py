"""A record for people: its story in sentences, its result or error as text; and whether sweeps run.

The CLI's ``show`` and the admin's page of a record tell the same story.
"""

from __future__ import annotations

import json
import logging
import pprint
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_idempotent.celery.codec import TaskCodec
from celery_idempotent.celery.finding import scope_in_words, task_name
from celery_idempotent.celery.operations import OPERATIONS, Operation, is_live, offered
from celery_idempotent.celery.registry import definition_of
from celery_idempotent.celery.republish import redelivery_timeout
from celery_idempotent.celery.sweep import sweep_interval
from celery_idempotent.errors import IdempotencyError, InvalidOption
from celery_idempotent.protocol.options import Policy
from celery_idempotent.records import Identity, Record, State, Stats, Stored
from celery_idempotent.serializers import LARGEST

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.stores import Store

logger = logging.getLogger(__name__)

#: So many characters of a value are shown; bodies of more bytes are not even read.
LONGEST, _LARGEST = 10_000, 1024 * 1024

#: A message that waits in the outbox for longer has lost its sender, or its broker.
OUTBOX_MS = 60_000

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


# -- times -------------------------------------------------------------------------------------------------------------


def iso(ms: int | None) -> str | None:
    """Return a time in ISO 8601, in UTC."""
    if ms is None:
        return None
    return f"{(_EPOCH + timedelta(milliseconds=ms)).isoformat(timespec='milliseconds')[:-6]}Z"


def time_in_words(ms: int) -> str:
    """Return a length of time in its two largest units."""
    seconds = ms // 1000
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def ago(ms: int, now_ms: int) -> str:
    """Return how far a time is away."""
    words = time_in_words(abs(now_ms - ms))
    return f"in {words}" if ms > now_ms else f"{words} ago"


# -- values ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A value as text; ``trouble`` says why there is none, ``cut`` that there is more of it."""

    text: str = ""
    trouble: str = ""
    cut: bool = False

    @classmethod
    def of(cls, value: object) -> Shown:
        """Return a value as people read it."""
        if isinstance(value, BaseException):
            text = f"{type(value).__name__}: {value}"
        elif isinstance(value, str):
            text = value
        else:
            text = pprint.pformat(value, width=100)
        return cls(text=text[:LONGEST], cut=len(text) > LONGEST)


def show_value(app: Celery, record: Record) -> Shown:
    """Return what a settled record says, its result or its error, read only as the app accepts it."""
    stored = record.value
    if stored is None or record.replaced:
        return Shown(trouble="It was not kept in the record.")
    if is_too_large(stored):
        return Shown(trouble=f"It is too large to be shown: {len(stored.body):,} bytes.")
    try:
        codec = _codec(app, record)
        load = codec.load_error if record.state.is_failure else codec.load_value
        return Shown.of(load(stored))
    except IdempotencyError as error:
        return Shown(trouble=str(error))
    except Exception as error:  # noqa: BLE001  what a stored value does when it is read is not ours
        return Shown(trouble=f"It cannot be read ({type(error).__name__}).")


def is_too_large(stored: Stored) -> bool:
    """Is this more than is read for people?"""
    return len(stored.body) > _LARGEST


def value_from_json(app: Celery, identity: Identity, text: str) -> Stored:
    """Return the value that somebody gives for a key, as its task would write it.

    Raises:
        ValueError: if it is no JSON, if no task of this app has that namespace, or if the task cannot write it.
    """
    definition = definition_of(app, identity.namespace, load=True)
    if definition is None:
        raise ValueError(
            f"no task of this app has the namespace {identity.namespace}, so nobody here knows how a value of it is"
            " written: only the key of a task can be completed."
        )
    if len(text) > LARGEST:
        raise ValueError(f"the value is longer than {LARGEST:,} bytes.")
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        problem = f"the value is no JSON ({error}). A text stands in quotes: '\"ch_17\"'."
        raise ValueError(problem) from None
    return definition.codec.dump_given(value)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is none of its numbers")


def _codec(app: Celery, record: Record) -> TaskCodec:
    namespace = record.identity.namespace
    definition = definition_of(app, namespace, load=True)
    return TaskCodec(app, namespace, Policy()) if definition is None else definition.codec


def _error_name(app: Celery, record: Record) -> str:
    stored = record.value
    if not record.state.is_failure or stored is None or is_too_large(stored):
        return ""
    try:
        return type(_codec(app, record).load_error(stored)).__name__
    except Exception as error:  # noqa: BLE001  what a stored value does when it is read is not ours
        logger.debug("idempotency: the error of %s cannot be read: %r", record.identity, error)
        return ""


# -- health ------------------------------------------------------------------------------------------------------------


class Sweeps(NamedTuple):
    """Whether sweeps run, in a sentence, and how long ago the last one ended."""

    well: bool
    ago_ms: int | None
    sentence: str


def sweeps_of(app: Celery, store: Store, stats: Stats) -> Sweeps:
    """Return whether a sweep ended less than three intervals ago, by what the store counted."""
    ago_ms = None if stats.swept_ms is None else max(stats.now_ms - stats.swept_ms, 0)
    if not store.supports_counting:
        return Sweeps(True, ago_ms, "This store does not note sweeps.")
    try:
        interval = sweep_interval(app)
    except InvalidOption:
        interval = None  # a worker does not start with it, and says so
    if interval is None:
        return Sweeps(True, ago_ms, "This app asks for no sweeps.")
    last = "none has ended yet" if ago_ms is None else f"the last ended {time_in_words(ago_ms)} ago"
    well = ago_ms is not None and ago_ms < 3000 * interval
    doubt = "." if well else ": does beat run, and a worker that consumes its queue?"
    return Sweeps(well, ago_ms, f"Sweeps are due every {interval:g} s, and {last}{doubt}")


def check_health(app: Celery, store: Store, *, outbox_ms: int | None) -> tuple[dict[str, Any], str]:
    """Return whether all is well right now, as JSON, and a sentence about sweeps.

    ``outbox_ms`` is the age of the oldest message in the outbox.

    Raises:
        StoreUnavailable: if the store does not answer.
    """
    began = time.perf_counter()
    sweeps = sweeps_of(app, store, store.stats())
    answered_ms = round((time.perf_counter() - began) * 1000, 1)
    sent = outbox_ms is None or outbox_ms <= OUTBOX_MS
    found: dict[str, Any] = {
        "well": sweeps.well and sent,
        "store": {"well": True, "answered_ms": answered_ms},
        "sweep": {"well": sweeps.well, "ago_s": _seconds(sweeps.ago_ms)},
        "outbox": {"well": sent, "oldest_s": _seconds(outbox_ms)},
    }
    return found, sweeps.sentence


def _seconds(ms: int | None) -> int | None:
    return None if ms is None else ms // 1000


# -- the story ---------------------------------------------------------------------------------------------------------


class Choice(NamedTuple):
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


def tell_story(app: AnyCelery, store: Store, record: Record, *, errors: bool = True) -> Story:
    """Tell the story of a record as :meth:`Store.get` returns it.

    ``errors``: may the name of a FAILED record's exception be told?
    """
    explanation = _Explanation(app, store, record, errors=errors)
    return Story(
        headline=explanation.headline(),
        past=tuple(explanation.past()),
        future=tuple(explanation.future()),
        live=explanation.live,
        choices=tuple(
            Choice(each, OPERATIONS[each].effect, explanation.cost(each))
            for each in offered(record, known=explanation.known)
        ),
    )


def tell_absence(what: str) -> Story:
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


class _Explanation:
    """The sentences about one record, at one time of the store's clock."""

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
        self.error = _error_name(app, record) if errors else ""
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
            case State.INTERRUPTED:
                why = "its worker was lost" if record.crashes else "its run failed after some steps"
                return f"INTERRUPTED: {why}, and nothing runs it now."
            case State.COMPLETED if record.replaced:
                return "COMPLETED: another task (self.replace) took over its task id."
            case State.COMPLETED if record.settled_by_operator:
                return "COMPLETED: an operator completed it with a value, and it is not run."
            case State.COMPLETED:
                done = "it took effect" if self.known else "it was answered"
                return f"COMPLETED: {done}, and is not run again."
            case _:
                error = f" with {self.error}" if self.error else ""
                return f"FAILED for good{error}: it is not run again."

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
                sweeps = sweeps_of(self.app, self.store, self.store.stats())
                yield f"{sweeps.sentence} {_SWEPT[record.on_stale]}"
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
        when = "once the connection of its worker is gone"
        if broker is not None:
            when = f"{broker.seconds:g} s after it was taken ({broker.option}), or later"
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
        steps = (
            " Its steps are done again as well." if operation == "forget" and record.steps else ""
        )
        match record.state:
            case State.COMPLETED:
                what = "It TOOK EFFECT" if self.known else "If it TOOK EFFECT, as its answer says"
                cost = f"{what}: the next call does it a second time."
            case State.FAILED | State.INTERRUPTED if self.policy.atomic:
                cost = "What it wrote to the database was rolled back. What it did elsewhere may be done twice."
            case State.QUEUED:
                cost = "If its message still comes, it runs; a further call may then run as well."
            case _:
                cost = (
                    "What it did before it failed or was lost may be done twice: look there first."
                )
        return cost + steps

    def _at(self, ms: int) -> str:
        at = _EPOCH + timedelta(milliseconds=ms)
        return f"{at:%Y-%m-%d %H:%M:%S} UTC ({ago(ms, self.now_ms)})"


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
