"""The sweep: a beat task that registers itself, and interrupts claims whose worker never came back.

A record whose lease ran out is handled as its task asked when it claimed the key (``idempotency_on_stale``)::

    "interrupt"   INTERRUPTED, one crash more       the next delivery or call claims it
    "fail"        INTERRUPTED, then FAILED          duplicates get ProcessingTimedOut
    "requeue"     QUEUED, one crash more            its message is published again, from the record

The store writes the new state first. If the sweep dies then, another one publishes the message after a minute (a second
copy is a redelivery), and the next delivery or call settles the record FAILED.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import TYPE_CHECKING

from celery_idempotent import signals
from celery_idempotent.celery.definition import definition_of
from celery_idempotent.celery.typed import AnyTask
from celery_idempotent.errors import IdempotencyError, ProcessingTimedOut, bad_option
from celery_idempotent.protocol.options import Policy, duration
from celery_idempotent.records import EndState, Record, SettleRequest, State, Stored
from celery_idempotent.serializers import NotStored, Serializer, log_not_kept
from celery_idempotent.signals import FAILED_WITHOUT_RUN, Call, Details, Line, counters, report
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

#: The name of the task, and of its entry in the beat schedule.
SWEEP = "celery_idempotent.sweep"
#: The most records that one sweep looks at.
SWEEP_LIMIT = 10_000
#: A requeued message that no worker takes in this time is published again.
REQUEUE_MS = 60_000

_STALE = "the lease ran out"


def sweep(app: Celery, *, limit: int = SWEEP_LIMIT, sender: object = None) -> dict[str, object]:
    """Interrupt stale claims and prune records past their retention; return the counts.

    Safe on many machines at once. ``more``: ``limit`` left work for the next sweep.
    """
    store, started = get_store(app), time.monotonic()
    found = store.sweep(limit=limit, requeue_ms=REQUEUE_MS)
    for record in found.interrupted:
        report_record(app, signals.interrupted, record, state=record.state, reason=_STALE)
    counts = {
        "interrupted": len(found.interrupted),
        "requeued": sum(send_again(app, each, reason=_STALE) for each in found.requeued),
        # Last, since each asks the store once more.
        "failed": sum(_time_out(app, each) for each in found.interrupted),
        "pruned": store.prune(limit=limit),
    }
    done = ", ".join(f"{name} {count}" for name, count in counts.items())
    seconds = round(time.monotonic() - started, 4)
    level = logging.INFO if any(counts.values()) else logging.DEBUG
    about: Details = {"line": Line(level, signals.swept.line.text)}
    about |= {"count": counts["interrupted"], "reason": f"{done} in {seconds:.3f} s"}
    report(Call(name=SWEEP, sender=sender, store=store), signals.swept, has_writer=False, **about)
    counters.write()
    kept = store.upkeep(app, limit=limit)
    store.note_sweep()
    store.probe()
    return {**counts, "more": found.more, "seconds": seconds, **kept}


def report_record(
    app: Celery, outcome: signals.OutcomeSignal, record: Record, **details: Unpack[Details]
) -> None:
    """Report an outcome of a record without a run; the caller writes the counters."""
    identity, store = record.identity, get_store(app)
    definition = definition_of(app, identity.namespace)  # None: of a view, or of another app
    name = definition.name if definition else identity.namespace
    sender = app.tasks[name] if definition else None
    call = Call(name=name, sender=sender, store=store, identity=identity, task_id=record.task_id)
    report(call, outcome, record, has_writer=False, **details)


def _time_out(app: Celery, record: Record) -> bool:
    """Settle a record FAILED whose worker was lost, if its task wants that (``idempotency_on_stale``)."""
    error = ProcessingTimedOut(
        f"{record.identity} did not come back before its lease ran out: {record.owner} claimed it last."
    )
    if record.on_stale != "fail" or not end_record(app, record, error):
        return False
    details: Details = {"error": error, "reason": _STALE, "line": FAILED_WITHOUT_RUN}
    details["state"] = State.FAILED
    report_record(app, signals.settled, record, **details)
    return True


def send_again(app: Celery, record: Record, **details: Unpack[Details]) -> bool:
    """Publish the message that a record keeps; on failure, the sweep after its deadline tries again."""
    definition = definition_of(app, record.identity.namespace)
    try:
        if definition is None or record.message is None:
            raise LookupError("no task of this app has that namespace")
        definition.codec.load_message(record.message).apply_async()
    except Exception as error:  # noqa: BLE001  a broker fails in its own ways, and so does a message
        line = Line(logging.ERROR, "{event.identity} could not be requeued: {event.error}")
        details |= {"error": error, "line": line}
        report_record(app, signals.store_failed, record, **details)
        return False
    details["state"] = State.QUEUED
    report_record(app, signals.requeued, record, **details)
    return True


def end_record(
    app: Celery, record: Record, end: Stored | IdempotencyError | None, *, note: str = ""
) -> bool:
    """Settle a record that no worker runs, with an error or a value; ``False`` if it has changed since."""
    definition = definition_of(app, record.identity.namespace, load=bool(note))
    policy = Policy() if definition is None else definition.policy
    state: EndState = State.COMPLETED
    words = ""
    if isinstance(end, IdempotencyError):
        state, kind, words = State.FAILED, type(end), signals.error_in_words(end)
        about = {"exc_type": kind.__name__, "exc_module": kind.__module__, "exc_message": str(end)}
        try:
            end = definition.codec.dump_error(end) if definition else Serializer().dump(about)
        except NotStored as problem:
            log_not_kept(record.identity, state, problem)
            end = None
    request = SettleRequest(
        record=record,
        state=state,
        value=end,
        keep_ms=policy.settled_keep_ms,
        restore=False,  # a key that was released a moment ago stays free
        swept=not note,
        note=note,
        message=record.message if state is State.FAILED else None,
        error=words,
    )
    store = get_store(app)
    settled, found = store.settle(request), store.get(record.identity)
    if found is None or (found.state, found.value) != (state, end):
        return False  # its owner may have settled it first, and then that end state stays
    # An operator's settle gives a new token: asked again because the answer was lost, it finds its own note.
    return found.note == note if note else settled and found.token == record.token


def sweep_interval(app: Celery) -> float | None:
    """Return the seconds between two sweeps by beat, ``None`` for none; raise ``InvalidOption`` for a bad setting."""
    value = app.conf.get("idempotency_sweep_interval", 30)
    try:
        return None if value is None else duration(at_least_ms=100)(value) / 1000
    except ValueError as error:
        problem = f"{error}, or None for no sweeps"
        raise bad_option("idempotency_sweep_interval", "the app", value, problem) from None


_swept_apps: weakref.WeakSet[Celery] = weakref.WeakSet()


def install_sweep(app: Celery) -> None:
    """Give ``app`` the sweep task and its beat entry; raise as :func:`sweep_interval`."""
    interval = sweep_interval(app)
    if app in _swept_apps:
        return
    _swept_apps.add(app)

    def register(**_: object) -> None:
        # Not shared: Celery would hand it to every other app of the process.
        @app.task(name=SWEEP, bind=True, shared=False, ignore_result=False, acks_late=False)
        def sweep_task(self: AnyTask, limit: int = SWEEP_LIMIT) -> dict[str, object]:
            return sweep(self.app, limit=limit, sender=self)

        if interval is None or SWEEP in app.conf.beat_schedule:
            return
        # A tick that no worker took before the next one is dropped, by RabbitMQ itself.
        options = dict.fromkeys(("expires", "expiration"), max(interval, 1.0))
        entry = {"task": SWEEP, "schedule": interval, "options": options}
        # The name that Celery looks for first has the prefix of all settings.
        prefix: str = getattr(app.conf, "prefix", None) or ""
        name = f"{prefix}beat_schedule"
        app.conf[name.upper() if prefix.isupper() else name] = {
            **app.conf.beat_schedule,
            SWEEP: entry,
        }

    if vars(app)["finalized"]:
        register()
    else:  # not at once: the app may be walking through its tasks right now
        app.on_after_finalize.connect(register, weak=False)
