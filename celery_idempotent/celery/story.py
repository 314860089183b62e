"""A record for people: its story in sentences, its result or error as text; and whether sweeps run.

The CLI's ``show`` and the admin's page of a record tell the same story.
"""

from __future__ import annotations

import json
import pprint
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery_idempotent.celery.codec import TaskCodec
from celery_idempotent.celery.definition import definition_of
from celery_idempotent.celery.finding import scope_in_words, task_name
from celery_idempotent.celery.operations import OPERATIONS, Operation, is_live, offered
from celery_idempotent.celery.republish import redelivery_timeout
from celery_idempotent.celery.sweep import sweep_interval
from celery_idempotent.errors import IdempotencyError, InvalidOption, ResultUnavailable
from celery_idempotent.protocol.options import Policy
from celery_idempotent.records import Identity, Record, State, Stats, Stored

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.stores import Store

#: So many characters of a value are shown; bodies of more bytes are not even read.
LONGEST, _LARGEST = 10_000, 1024 * 1024

#: A message that waits in the outbox for longer has lost its sender, or its broker.
OUTBOX_MS = 60_000


# -- times -------------------------------------------------------------------------------------------------------------


def _when(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, timezone.utc)


def iso(ms: int | None) -> str | None:
    """Return a time in ISO 8601, in UTC."""
    if ms is None:
        return None
    return _when(ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


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


def show_value(app: Celery, record: Record, read: Callable[[Stored], object] | None = None) -> str:
    """Return what a settled record says, its result or its error, read only as the app accepts it; or why not."""
    try:
        value = _load(app, record, read)
        if isinstance(value, BaseException):
            value = f"{type(value).__name__}: {value}"
        text = value if isinstance(value, str) else pprint.pformat(value, width=100)
    except IdempotencyError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  what a stored value does when it is read is not ours
        return f"It cannot be read ({type(error).__name__})."
    more = "\n… There is more of it: this is the beginning." if len(text) > LONGEST else ""
    return text[:LONGEST] + more


def _error_name(app: Celery, record: Record) -> str:
    try:
        return f" with {type(_load(app, record)).__name__}"
    except Exception:  # noqa: BLE001  as above
        return ""


def _load(app: Celery, record: Record, read: Callable[[Stored], object] | None = None) -> object:
    stored, namespace = record.value, record.identity.namespace
    if stored is None or record.replaced:
        raise ResultUnavailable("It was not kept in the record.")
    if len(stored.body) > _LARGEST:
        raise ResultUnavailable(f"It is too large to be shown: {len(stored.body):,} bytes.")
    definition = definition_of(app, namespace, load=True)
    codec = TaskCodec(app, namespace, Policy()) if definition is None else definition.codec
    load = codec.load_error if record.state.is_failure else codec.load_value
    return (read or load)(stored)


def value_from_json(app: Celery, identity: Identity, text: str) -> Stored:
    """Return the value that somebody gives for a key, as its task would write it.

    Raises:
        ValueError: if it is no JSON, if no task of this app has that namespace, or if the task cannot write it.
    """
    definition = definition_of(app, identity.namespace, load=True)
    if definition is None:
        raise ValueError(OPERATIONS["complete"].refusal)
    try:
        value = json.loads(text, parse_constant=int)  # which refuses NaN
    except (ValueError, RecursionError) as error:
        problem = f"the value is no JSON ({error}). A text stands in quotes: '\"ch_17\"'."
        raise ValueError(problem) from None
    return definition.codec.dump_given(value)


# -- health ------------------------------------------------------------------------------------------------------------

#: What people see of what the counters count, from below in a chart, and the outcomes that it adds up. A run ends
#: ``settled`` (which is not shown), ``failed`` or ``released``: the key was given back, because the run failed or asked
#: for a retry.
SERIES: Mapping[str, tuple[str, ...]] = {
    "runs": ("claimed",),
    "releases": ("released",),
    "failures": ("failed",),
    "replays": ("replayed",),
    "conflicts": ("conflicted",),
    "trouble": ("mismatched", "interrupted", "lease_lost", "settle_failed", "store_failed"),
}


def sweeps_of(app: Celery, store: Store, stats: Stats) -> tuple[bool, str]:
    """Say whether a sweep ended less than three intervals ago, by what the store counted."""
    if not store.supports_counting:
        return True, "This store does not note sweeps."
    try:
        interval = sweep_interval(app)
    except InvalidOption:
        interval = None  # a worker does not start with it, and says so
    if interval is None:
        return True, "This app asks for no sweeps."
    well, last = False, "none has ended yet"
    if stats.swept_ms is not None:
        well = stats.now_ms - stats.swept_ms < 3000 * interval
        last = f"the last ended {ago(stats.swept_ms, max(stats.now_ms, stats.swept_ms))}"
    doubt = "." if well else ": does beat run, and a worker that consumes its queue?"
    return well, f"Sweeps are due every {interval:g} s, and {last}{doubt}"


def check_health(app: Celery, store: Store, *, outbox_ms: int | None) -> tuple[dict[str, Any], str]:
    """Return whether all is well right now, as JSON, and a sentence about sweeps.

    ``outbox_ms`` is the age of the oldest message in the outbox.

    Raises:
        StoreUnavailable: if the store does not answer.
    """
    began = time.perf_counter()
    stats = store.stats()
    answered_ms = round((time.perf_counter() - began) * 1000, 1)
    swept, sentence = sweeps_of(app, store, stats)
    swept_ms = None if stats.swept_ms is None else max(stats.now_ms - stats.swept_ms, 0)
    sent = outbox_ms is None or outbox_ms <= OUTBOX_MS
    found: dict[str, Any] = {
        "well": swept and sent,
        "store": {"well": True, "answered_ms": answered_ms},
        "sweep": {"well": swept, "ago_s": None if swept_ms is None else swept_ms // 1000},
        "outbox": {"well": sent, "oldest_s": None if outbox_ms is None else outbox_ms // 1000},
    }
    return found, sentence


# -- the story ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
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


def tell_absence(what: str) -> Story:
    """Tell what it can mean that there is no such record."""
    return Story(
        headline=f"There is no record of {what}. The workers' logs say which of these it is:",
        past=(
            "It was never called, or its message is still in the queue: a run claims its key when it starts.",
            "It was called under another key or in another scope.",
            "Its run failed, and gave the key back: a retry or the next call runs.",
            "It was done longer ago than its retention: the next call runs.",
            "An operator released or forgot it: the next call runs.",
            "The store lost it (a flush, an eviction, a restart without persistence): see `check`.",
        ),
    )


#: What the next sweep does with a stale record.
_SWEPT = {
    "interrupt": "makes it INTERRUPTED: it then waits for a delivery or a call.",
    "fail": "settles it FAILED (ProcessingTimedOut), as the task's idempotency_on_stale says.",
    "requeue": "publishes its message again, as the task's idempotency_on_stale says.",
}


def tell_story(app: AnyCelery, store: Store, record: Record, *, errors: bool = True) -> Story:
    """Tell the story of a record as :meth:`Store.get` returns it: a sentence for each fact that is true.

    ``errors``: may the name of a FAILED record's exception be told?
    """
    identity, state, now_ms = record.identity, record.state, store.now_ms()
    definition = definition_of(app, identity.namespace, load=True)
    policy = Policy() if definition is None else definition.policy
    known = definition is not None  # else it may be of a view
    queued, interrupted = state is State.QUEUED, state is State.INTERRUPTED
    live, stale = is_live(record, now_ms), record.stale(now_ms)
    failed = state is State.FAILED
    crashes = record.crashes + stale  # as the next claim finds them, its own included
    lost = stale or (interrupted and crashes > 0)
    # A host name has no colon but in IPv6. What follows the pid tells machines of one name apart, for machines.
    host, _, pid = record.worker.partition("/")[0].rpartition(":")
    holder = f"task {record.task_id}" if record.task_id else "an unknown task"
    holder += f" on {host}, pid {pid}" if host else ""
    scope = f" in scope {scope_in_words(identity.scope)}" if identity.scope else ""
    error = _error_name(app, record) if failed and errors else ""

    def at(ms: int) -> str:
        return f"{_when(ms):%Y-%m-%d %H:%M:%S} UTC ({ago(ms, now_ms)})"

    deadline = at(record.deadline_ms or 0)
    headline, *_ = _true(
        queued and "QUEUED: its message is on its way, and no worker has it yet.",
        live and f"PROCESSING: {holder}, runs it, or died within the last lease.",
        stale and f"stuck PROCESSING: the lease of {holder}, ran out.",
        lost and "INTERRUPTED: its worker was lost, and nothing runs it now.",
        interrupted and "INTERRUPTED: its run failed after some steps, and nothing runs it now.",
        failed and f"FAILED for good{error}: it is not run again.",
        record.replaced and "COMPLETED: another task (self.replace) took over its task id.",
        record.settled_by_operator and "COMPLETED: an operator completed it with a value.",
        known and "COMPLETED: it took effect, and is not run again.",
        "COMPLETED: it was answered, and is not run again.",
    )
    claims, *_ = _true(
        crashes > 0 and policy.on_stale == "fail" and "settles it FAILED (ProcessingTimedOut)",
        crashes > policy.max_crashes and "settles it FAILED (TooManyCrashes) without a run",
        crashes > 0 and f"runs it ({crashes} of {policy.max_crashes} crashes allowed so far)",
        "runs it",
    )
    answer, *_ = _true(
        failed and "this error",
        record.replaced and "that other task's result",
        record.value is None and "what the result backend has: its result is not in the record",
        "its result" if known else "the same answer",
    )
    last = f"; {holder}, had it last" if record.attempts else ""
    steps = ", ".join(name for name, _ in record.steps)
    broker = redelivery_timeout(app) if lost else None
    when = "once the connection of its worker is gone"
    if broker is not None:
        when = f"{broker.seconds:g} s after it was taken ({broker.option}), or later"
    return Story(
        headline=f"{identity.key} of {task_name(app, identity)}{scope} is {headline}",
        past=_true(
            record.updated_ms - record.created_ms > 1000
            and f"First claimed or reserved {at(record.created_ms)}.",
            (record.attempts > 1 or record.crashes > 0)
            and f"Claims so far: {record.attempts}; lost workers: {record.crashes}.",
            f"{state.value} since {at(record.updated_ms)}{last}.",
            record.delivered and "Its callbacks (links, chain, chord) were sent.",
            steps and f"Steps done, which are not repeated: {steps}.",
            record.note and f"Last operation: {record.note}.",
        ),
        future=_true(
            queued
            and "It runs when a worker takes its message: see that a worker listens to its queue.",
            queued
            and f"From {deadline} on {'the next call' if record.message is None else 'a sweep'}"
            " publishes its message again, under the same task id.",
            live and f"Its lease ends {deadline}, and is renewed as long as its worker lives.",
            live
            and known
            and f"A duplicate meanwhile: idempotency_on_conflict={policy.on_conflict!r}.",
            stale
            and f"Its lease ran out {deadline}: its worker is dead, frozen, or cut off from the store.",
            stale
            and f"{sweeps_of(app, store, store.stats())[1]} The next one {_SWEPT[record.on_stale]}",
            stale and f"A delivery or call before that claims it at once, and {claims}.",
            interrupted and f"The next delivery or call claims it, and {claims}.",
            lost and f"The broker delivers its message again {when}.",
            state.settled
            and known
            and f"Kept until {at(record.updated_ms + policy.settled_keep_ms)}, by the options of its task.",
            state.settled and f"Until it expires, a duplicate gets {answer}, without a run.",
        ),
        live=live,
        choices=[
            Choice(each, OPERATIONS[each].effect, _cost(each, record, live, known, policy.atomic))
            for each in offered(app, record)
        ],
    )


def _cost(operation: Operation, record: Record, live: bool, known: bool, atomic: bool) -> str:
    """Tell what may happen a second time, or is not noticed by callers."""
    unfinished = record.state in {State.FAILED, State.INTERRUPTED}
    cost, *_ = _true(
        live
        and "Its owner is not stopped: its result is dropped, and what it does may be done twice.",
        operation == "complete" and "Check the outside system first: callers get what you say.",
        operation == "fail" and "If it took effect before, callers do not learn its result.",
        record.state is State.COMPLETED
        and f"{'It TOOK EFFECT' if known else 'If it TOOK EFFECT'}: the next call does it a second time.",
        unfinished
        and atomic
        and "What it wrote to the database was rolled back. What it did elsewhere may be done twice.",
        record.state is State.QUEUED
        and "If its message still comes, it runs; a further call may then run as well.",
        "What it did before it failed or was lost may be done twice: look there first.",
    )
    again = operation == "forget" and record.steps and not live
    return f"{cost} Its steps are done again as well." if again else cost


def _true(*facts: str | bool) -> Sequence[str]:
    """Return the sentences of the facts that are true, each written as ``fact and sentence``."""
    return tuple(each for each in facts if isinstance(each, str) and each)
