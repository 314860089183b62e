"""A record in sentences, its result or error as text, and the health of store and sweep: for CLI and admin alike."""

from __future__ import annotations

import json
import pprint
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery_idempotent.celery.codec import TaskCodec
from celery_idempotent.celery.definition import definition_of
from celery_idempotent.celery.finding import celery_meta, task_name
from celery_idempotent.celery.operations import OPERATIONS, Operation, is_live, offered
from celery_idempotent.celery.republish import redelivery_timeout
from celery_idempotent.celery.sweep import sweep_interval
from celery_idempotent.errors import IdempotencyError, ResultUnavailable
from celery_idempotent.protocol.options import Policy
from celery_idempotent.records import Identity, Record, State, Stats, Stored, moment
from celery_idempotent.serializers import HTTP

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.stores.base import Health, Store

#: The most characters of a value that are shown.
LONGEST = 10_000

#: A message that waits in the outbox for longer has lost its sender, or its broker.
OUTBOX_MS = 60_000


def iso(ms: int | None) -> str | None:
    """Return a time in ISO 8601, in UTC."""
    text = None if ms is None else moment(ms).isoformat(timespec="milliseconds")
    return text and text.replace("+00:00", "Z")


def time_in_words(ms: int) -> str:
    """Return a length of time in the largest unit that it has at least twice."""
    seconds = ms // 1000
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def ago(ms: int, now_ms: int) -> str:
    """Return the distance of a time in words."""
    words = time_in_words(abs(now_ms - ms))
    return f"in {words}" if ms > now_ms else f"{words} ago"


def cells(
    app: AnyCelery, record: Record, now_ms: int, *, errors: bool = False
) -> dict[str, object]:
    """Return the columns of a record in a list; ``errors``: with their messages, which may be private."""
    error = record.error if errors else record.error.partition(":")[0]
    if record.state is State.INTERRUPTED:
        error = f"Its {'lease ended without a result' if record.crashes else 'run ended after some steps'}."
    return {
        "key": record.identity.key,
        "state": record.state.value + ", stale" * record.stale(now_ms),
        "changed": ago(min(record.updated_ms, now_ms), now_ms),
        "task": task_name(app, record.identity),
        "scope": record.identity.scope,
        "error": error,
        "crashes": record.crashes,
        "worker": record.worker.partition("/")[0],  # the rest tells machines of one name apart
    }


def show_value(app: AnyCelery, record: Record) -> str:
    """Return the result or error of a record as text, or the reason why it cannot be read."""
    try:
        value = _load(app, record)
        if isinstance(value, BaseException):
            value = f"{type(value).__name__}: {value}"
        elif not record.state.is_final:
            value = json.dumps(value)  # as complete takes it
        text = value if isinstance(value, str) else pprint.pformat(value, width=100)
    except IdempotencyError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  a stored value may raise anything when it is read
        return f"It cannot be read ({type(error).__name__})."
    return text[:LONGEST] + ("\n… (cut here)" if len(text) > LONGEST else "")


def _load(app: AnyCelery, record: Record) -> object:
    if record.value is None or record.replaced:
        meta = {} if record.state is State.FAILED else celery_meta(app, record.task_id)
        if meta.get("status") == "SUCCESS":
            return meta["result"]
        raise ResultUnavailable("It was not kept in the record.")
    if record.value.content_type == HTTP:
        return record.value.body.decode(errors="replace")
    definition = definition_of(app, namespace := record.identity.namespace, load=True)
    codec = TaskCodec(app, namespace, Policy()) if definition is None else definition.codec
    load = codec.load_error if record.state is State.FAILED else codec.load_value
    return load(record.value)


def value_from_json(app: AnyCelery, identity: Identity, text: str) -> Stored:
    """Return a value that an operator gives for a key, as its task would write it.

    Raises:
        ValueError: if it is not JSON, or if no task of this app has that namespace or can write it.
    """
    definition = definition_of(app, identity.namespace, load=True)
    if definition is None:
        raise ValueError(OPERATIONS["complete"].refusal)
    try:
        value = json.loads(text, parse_constant=int)  # which refuses NaN
    except (ValueError, RecursionError) as error:
        problem = f"the value is not JSON ({error}). A text stands in quotes: '\"ch_17\"'."
        raise ValueError(problem) from None
    return definition.codec.dump_given(value)


#: The series of charts and tables, from below, each with its outcomes. ``released``: a run raised or asked for a retry.
SERIES: Mapping[str, tuple[str, ...]] = {
    "runs": ("claimed",),
    "releases": ("released",),
    "failures": ("failed",),
    "replays": ("replayed",),
    "conflicts": ("conflicted",),
    "trouble": ("mismatched", "interrupted", "lease_lost", "settle_failed", "store_failed"),
}


def sweeps_of(app: AnyCelery, store: Store, stats: Stats) -> tuple[bool, str]:
    """Return whether a sweep ended less than three intervals ago, and a sentence about it."""
    interval = sweep_interval(app)
    if not store.supports_counting:
        return True, "This store does not note sweeps."
    if interval is None:
        return True, "This app schedules no sweeps."
    well, last = False, "none has ended yet"
    if stats.swept_ms is not None:
        well = stats.now_ms - stats.swept_ms < 3000 * interval
        last = f"the last ended {ago(stats.swept_ms, max(stats.now_ms, stats.swept_ms))}"
    doubt = "." if well else ": does beat run, and a worker that consumes its queue?"
    return well, f"Sweeps are due every {interval:g} s, and {last}{doubt}"


def check_health(app: AnyCelery, store: Store, health: Health) -> dict[str, Any]:
    """Return the health of store, sweeps and outbox as JSON."""
    about: dict[str, Any] = {"well": not health.problem}
    if health.problem:
        about["problem"] = health.problem
    if (stats := health.stats) is None:
        return {"well": False, "store": about}
    if health.mark > 0:
        about["lost_s"] = max(stats.now_ms - health.mark, 0) // 1000
    swept, _ = sweeps_of(app, store, stats)
    swept_s = None if stats.swept_ms is None else max(stats.now_ms - stats.swept_ms, 0) // 1000
    waits_ms = stats.outbox_ms
    sent = (waits_ms or 0) <= OUTBOX_MS
    return {
        "well": about["well"] and swept and sent,
        "store": about,
        "sweep": {"well": swept, "ago_s": swept_s},
        "outbox": {"well": sent, "oldest_s": None if waits_ms is None else waits_ms // 1000},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A record in one sentence, and then in the order of time.

    ``live``: every operation has to be forced. ``choices``: the operations that apply, each with its effect and risk.
    """

    headline: str
    past: Sequence[str] = ()
    future: Sequence[str] = ()
    live: bool = False
    choices: Mapping[Operation, str] = field(default_factory=dict)

    @property
    def parts(self) -> Mapping[str, Sequence[str]]:
        """The sentences by title."""
        choices = [f"{operation} {text}" for operation, text in self.choices.items()]
        forced = " (its owner is live: wait, or force it with a reason)" if self.live else ""
        first = "So far" if self.future else "What this can mean"
        found = {first: self.past, "Next": self.future, f"What you can do{forced}": choices}
        return {title: sentences for title, sentences in found.items() if sentences}


def tell_absence(app: AnyCelery, text: str, where: str = "") -> Story:
    """Return sentences about what it can mean that no record was found by a key or a task id."""
    status = celery_meta(app, text).get("status", "PENDING")
    ran = f"Celery has {status} for this task id: it ran, or got the end of an earlier call with its key."
    never = "It was never called, or its message is still in the queue: a run claims its key when it starts."
    return Story(
        headline=f"No record has this key or task id: {text}{where}. The workers' logs say why.",
        past=(
            never if status == "PENDING" else ran,
            "It was called under another key or in another scope.",
            "Its run failed, and released the key: a retry or the next call runs.",
            "It was done longer ago than its retention: the next call runs.",
            "An operator released or forgot it: the next call runs.",
            "The store lost it (a flush, an eviction, a restart without persistence): run the checks.",
        ),
    )


#: What the next sweep does with a stale record.
_SWEPT = {
    "interrupt": "makes it INTERRUPTED: it then waits for a delivery or a call.",
    "fail": "settles it FAILED (ProcessingTimedOut), as the task's idempotency_on_stale says.",
    "requeue": "publishes its message again, as the task's idempotency_on_stale says.",
}


def tell_story(app: AnyCelery, store: Store, record: Record) -> Story:
    """Describe a record that :meth:`Store.get` returned: a sentence for each fact."""
    identity, state, now_ms = record.identity, record.state, store.now_ms()
    definition = definition_of(app, identity.namespace, load=True)
    known = definition is not None  # else it may be of a view
    policy = definition.policy if definition else Policy()
    live, stale = is_live(record, now_ms), record.stale(now_ms)
    queued, interrupted = state is State.QUEUED, state is State.INTERRUPTED

    def at(ms: int | None) -> str:
        return f"{moment(ms or 0):%Y-%m-%d %H:%M:%S} UTC ({ago(ms or 0, now_ms)})"

    # A host name has no colon but in IPv6. The id after the pid is for machines.
    host, _, pid = record.worker.partition("/")[0].rpartition(":")
    holder = f"task {record.task_id}" if record.task_id else "an unknown task"
    holder += f" ({host}, pid {pid})" if host else ""
    deadline, until = at(record.deadline_ms), at(record.updated_ms + policy.settled_keep_ms)
    publisher = "the next call" if record.message is None else "a sweep"
    crashes = record.crashes + stale  # as the next claim counts them
    lost = "its lease ended without a result" if crashes else "its run ended after some steps"
    unended = known and (live or stale or interrupted)
    status = celery_meta(app, record.task_id).get("status", "") if unended else ""
    ended = status == "SUCCESS"
    advice = {
        "PENDING": " (nothing): ask the outside system",
        "SUCCESS": ": complete it with that result",
    }
    claims = {
        "runs it": not crashes,
        "settles it FAILED (ProcessingTimedOut)": policy.on_stale == "fail",
        "settles it FAILED (TooManyCrashes) without a run": crashes > policy.max_crashes,
        f"runs it ({crashes} of {policy.max_crashes} crashes allowed so far)": True,
    }
    claimed = _first(claims)
    sweeps = sweeps_of(app, store, store.stats())[1] if stale else ""
    broker, back = redelivery_timeout(app), "once the connection of its worker is gone"
    if broker is not None:
        back = f"{broker.seconds:g} s after it was taken ({broker.option}), or later"
    error = f" with {record.error.partition(':')[0]}" if record.error else ""
    headlines = {
        "QUEUED: its message is on its way, and no worker has it yet.": queued,
        f"PROCESSING, but {holder} is done: its end is not recorded yet.": live and ended,
        f"PROCESSING: {holder} runs it, or died within the last lease.": live,
        f"stuck PROCESSING: the lease of {holder} ran out.": stale,
        f"INTERRUPTED: {lost}, and nothing runs it now.": interrupted,
        f"FAILED permanently{error}: it is not run again.": state is State.FAILED,
        "COMPLETED: another task (self.replace) took over its task id.": record.replaced,
        "COMPLETED: an operator completed it with a value.": record.settled_by_operator,
        "COMPLETED: it took effect, and is not run again.": known,
        "COMPLETED: it was answered, and is not run again.": True,
    }
    answers = {
        "this error": state is State.FAILED,
        "that other task's result": record.replaced,
        "its result from the result backend, as it is not in the record": record.value is None,
        "its result": known,
        "the same answer": True,
    }
    is_old = record.updated_ms - record.created_ms > 1000
    again = record.attempts > 1 or record.crashes
    steps = ", ".join(name for name, _ in record.steps)
    # The headline of a PROCESSING one names its owner.
    named = state is State.PROCESSING or not record.attempts
    last = "" if named else f"; {holder} had it last"
    past = {
        f"First claimed or reserved {at(record.created_ms)}.": is_old,
        f"Claims so far: {record.attempts}; leases without a result: {record.crashes}.": again,
        f"{state.value} since {at(record.updated_ms)}{last}.": True,
        "Its callbacks (links, chain, chord) were sent.": record.delivered,
        f"Steps done, which are not repeated: {steps}.": steps,
        f"Last operation: {record.note}.": record.note,
        f"Celery has {status} for its task{advice.get(status, '')}.": status
        and (ended or not live),
    }
    future = {
        "It runs when a worker takes its message: check that a worker listens to its queue.": queued,
        f"From {deadline} on {publisher} publishes its message again, under the same task id.": queued,
        f"If its worker gives up, its lease ends {deadline}, and the next delivery or call runs it.": live
        and ended,
        f"Its lease ends {deadline}, and is renewed as long as its worker lives.": live
        and not ended,
        f"Its lease ran out {deadline}: its worker died, hangs, or did not reach the store.": stale,
        f"{sweeps} The next one {_SWEPT[record.on_stale]}": stale,
        f"A delivery or call before that claims it at once, and {claimed}.": stale,
        f"The next delivery or call claims it, and {claimed}.": interrupted,
        f"If its worker was lost, the broker delivers its message again {back}.": known
        and (stale or (crashes and interrupted))
        and not ended,
        f"Kept until {until}, by the options of its task.": state.is_final and known,
        f"Until it expires, duplicates do not run: they get {_first(answers)}.": state.is_final,
    }
    scope = f" in scope {identity.scope}" if identity.scope else ""
    return Story(
        headline=f"{identity.key} of {task_name(app, identity)}{scope} is {_first(headlines)}",
        past=[sentence for sentence, holds in past.items() if holds],
        future=[sentence for sentence, holds in future.items() if holds],
        live=live,
        choices={
            each: f"{OPERATIONS[each].effect} {risks(app, each, [record], now_ms)[0]}"
            for each in offered(app, record)
        },
    )


def risks(
    app: AnyCelery, operation: Operation, records: Sequence[Record], now_ms: int
) -> list[str]:
    """Return what may happen a second time, or what callers do not learn, with the number of records for each."""
    counts = Counter(_risk(app, operation, each, now_ms) for each in records)
    it = "It" if len(records) == 1 else ""
    return [f"{it or f'{number:,}'} {risk}" for risk, number in counts.most_common()]


def _risk(app: AnyCelery, operation: Operation, record: Record, now_ms: int) -> str:
    """Return the risk of one record, after "It" or a number."""
    state, live = record.state, is_live(record, now_ms)
    definition = definition_of(app, record.identity.namespace, load=True)
    took = "TOOK EFFECT" if definition else "may have taken effect"
    completes, queued = operation == "complete", state is State.QUEUED
    rolled_back = definition and definition.policy.atomic and state is not State.PROCESSING
    replaced = "(force it, with a reason): callers may have got the old value or error"
    found = {
        "had a live owner, which is not stopped: its result is dropped, and what it does may be done twice.": live,
        f"ended {replaced}, and Celery's result backend keeps it.": completes and state.is_final,
        "may have taken effect or not: check the outside system first.": completes,
        "may have taken effect: then callers do not learn its result.": operation == "fail",
        f"{took}: the next call does it a second time.": state is State.COMPLETED,
        "waited: if its message still comes, it runs; a further call may then run as well.": queued,
        "failed, as its chord, link_error and callers were told: what it did before that, steps included, is done"
        " again.": operation == "requeue" and state is State.FAILED,
        "was rolled back in the database: what it did elsewhere may be done twice.": rolled_back,
        "may have run in part: what it did may be done twice. Check the outside system first.": True,
    }
    again = " Its steps are done again as well."
    return _first(found) + (again if operation == "forget" and record.steps and not live else "")


def _first(texts: Mapping[str, object]) -> str:
    return next(text for text, holds in texts.items() if holds)
