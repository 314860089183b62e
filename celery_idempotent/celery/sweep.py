"""The sweep: a beat task that registers itself, and interrupts claims whose worker never came back.

What becomes of a record whose lease ran out is what its task said when it claimed the key (``idempotency_on_stale``)::

    "interrupt"   INTERRUPTED, one crash more       the next delivery or call claims it
    "fail"        INTERRUPTED, then FAILED          duplicates get ProcessingTimedOut, until a person looks at it
    "requeue"     QUEUED, one crash more            its message is published again, from the record

The store writes the new state first, and then the sweep acts on it. Should it die before it has published a message,
the record is past its new deadline after a minute, and another sweep publishes it. Two copies do no harm: they have one
task id, so the second is a redelivery. A record that it has not settled FAILED stays INTERRUPTED: the next delivery or
call of the key settles it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

from celery_idempotent import signals
from celery_idempotent.celery.registry import definition_of, find_task
from celery_idempotent.celery.typed import AnyTask
from celery_idempotent.errors import IdempotencyError, InvalidOption, ProcessingTimedOut
from celery_idempotent.events import FAILED_WITHOUT_RUN, Details, Line, Reporter, counters
from celery_idempotent.protocol.options import Policy
from celery_idempotent.records import Record, SettleRequest, State, Stored
from celery_idempotent.serializers import NotStored, Serializer
from celery_idempotent.settings import milliseconds, names_of
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery
    from typing_extensions import Unpack

    from celery_idempotent.stores.base import Store

logger = logging.getLogger(__name__)

#: The name of the task, and of its entry in the beat schedule.
SWEEP = "celery_idempotent.sweep"

#: The most records that one sweep looks at: the next one goes on where it stopped.
SWEEP_LIMIT = 10_000

#: A requeued message that did not start in time counts as lost, and is published again.
REQUEUE_MS = 60_000

#: Why a sweep acts.
_STALE = "the lease ran out"

_NOT_REQUEUED = Line(logging.ERROR, "%(identity)s could not be requeued: %(error)s")


_swept_apps: weakref.WeakSet[Celery] = weakref.WeakSet()
_installing = threading.Lock()


def sweep(app: Celery, *, limit: int = SWEEP_LIMIT, sender: object = None) -> dict[str, object]:
    """Interrupt stale claims and prune what is past its retention; return the counts.

    Safe to run on any number of machines at once: whether a claim is stale is decided by the store at the moment of the
    write. ``more`` says that ``limit`` left work for the next sweep.

    Raises:
        StoreUnavailable: if the store did not answer; the next sweep does the work.
    """
    store = get_store(app)
    started = time.monotonic()
    found = store.sweep(limit=limit, requeue_ms=REQUEUE_MS)
    for record in found.interrupted:
        report_record(app, store, signals.interrupted, record, state=record.state, reason=_STALE)
    requeued = sum(send_again(app, store, record, reason=_STALE) for record in found.requeued)
    # Last, since each asks the store once more.
    timed_out = [record for record in found.interrupted if record.on_stale == "fail"]
    failed = sum(_time_out(app, store, record) for record in timed_out)
    pruned = store.prune(limit=limit)
    counts: dict[str, object] = {
        "interrupted": len(found.interrupted),
        "failed": failed,
        "requeued": requeued,
        "pruned": pruned,
        "more": found.more,
        "seconds": round(time.monotonic() - started, 4),
    }
    busy = found.interrupted or found.requeued or failed or pruned
    Reporter(SWEEP, lambda: sender, lambda: store).report(
        signals.swept,
        None,
        store=store,
        count=len(found.interrupted),
        line=Line(
            logging.INFO if busy else logging.DEBUG,
            f"sweep interrupted %(count)d, failed {failed}, requeued {requeued}, pruned {pruned} in "
            f"{counts['seconds']:.3f} s",
        ),
        has_writer=False,
    )
    counters.write()
    counts |= store.upkeep(app, limit=limit)
    store.note_sweep()
    return counts


def report_record(
    app: Celery,
    store: Store,
    outcome: signals.OutcomeSignal,
    record: Record,
    **details: Unpack[Details],
) -> None:
    """Report what became of a record without a run; the caller writes the counters."""
    namespace = record.identity.namespace
    # None: a view's record, or a task of another app that shares the store. It is reported by its namespace.
    task = find_task(app, namespace)
    name = namespace if task is None else task.name
    reporter = Reporter(name, lambda: task, lambda: store)
    about = record.identity, record.task_id, record
    reporter.report(outcome, *about, store=store, has_writer=False, **details)


def _time_out(app: Celery, store: Store, record: Record) -> bool:
    """Settle a record FAILED for good whose worker was lost (``idempotency_on_stale="fail"``)."""
    error = ProcessingTimedOut(
        f"{record.identity} did not come back before its lease ran out: {record.owner} claimed it last."
    )
    if not fail_record(app, store, record, error):
        return False
    report_record(
        app,
        store,
        signals.settled,
        record,
        state=State.FAILED,
        error=error,
        reason=_STALE,
        line=FAILED_WITHOUT_RUN,
    )
    return True


def send_again(app: Celery, store: Store, record: Record, **details: Unpack[Details]) -> bool:
    """Publish the message that a stale record kept; if that fails, the next sweep after its deadline tries again."""
    definition = definition_of(app, record.identity.namespace)
    if definition is None or record.message is None:
        logger.error(
            "idempotency: %s cannot be requeued: no task of this app has that namespace",
            record.identity,
        )
        return False
    try:
        definition.codec.load_message(record.message).apply_async()
    except Exception as error:  # noqa: BLE001  a broker fails in its own ways, and so does a message
        details = {**details, "error": error, "line": _NOT_REQUEUED}
        report_record(app, store, signals.store_failed, record, **details)
        return False
    details = {**details, "state": State.QUEUED}
    report_record(app, store, signals.requeued, record, **details)
    return True


def install_sweep(app: Celery) -> None:
    """Give ``app`` the sweep task and its beat entry, once its tasks are complete.

    Raises:
        InvalidOption: for a bad ``idempotency_sweep_interval``.
    """
    interval = sweep_interval(app)
    with _installing:
        if app in _swept_apps:
            return
        _swept_apps.add(app)
    if vars(app)["finalized"]:
        _register(app, interval)
    else:
        # Not at once: the app may be walking through its tasks right now.
        app.on_after_finalize.connect(lambda **_: _register(app, interval), weak=False)


def sweep_interval(app: Celery) -> float | None:
    """Return every how many seconds beat asks for a sweep, ``None`` if it does not.

    Raises:
        InvalidOption: for a bad ``idempotency_sweep_interval``.
    """
    value = app.conf.get("idempotency_sweep_interval", 30)
    if value is None:
        return None
    try:
        interval = milliseconds(value)
    except ValueError as error:
        raise InvalidOption(
            f"idempotency_sweep_interval {error}, or None to switch it off."
        ) from None
    if interval < 100:
        raise InvalidOption("idempotency_sweep_interval must be at least 0.1 seconds, or None.")
    return interval / 1000


def _register(app: Celery, interval: float | None) -> None:
    # As any task of the app, of the class that the app gives its tasks: what it has receivers, middleware and mixins do
    # to tasks fits that one. Not shared: Celery would hand it to every other app of the process.
    @app.task(name=SWEEP, bind=True, shared=False, ignore_result=False, acks_late=False)
    def sweep_task(self: AnyTask, limit: int = SWEEP_LIMIT) -> dict[str, object]:
        return sweep(self.app, limit=limit, sender=self)

    if interval is None or SWEEP in app.conf.beat_schedule:
        return
    # A tick that no worker took before the next one is of no use any more. RabbitMQ then drops its message.
    seconds = max(interval, 1.0)
    options = {"expires": seconds, "expiration": seconds}
    entry = {"task": SWEEP, "schedule": interval, "options": options}
    schedule = {**app.conf.beat_schedule, SWEEP: entry}
    app.conf.beat_schedule = schedule
    if SWEEP not in app.conf.beat_schedule:
        # Before 5.7, Celery looks for the name with its namespace in all settings first.
        app.conf[names_of(app.conf, "beat_schedule")[0]] = schedule


# -- records that no worker runs -----------------------------------------------------------------------------------


def fail_record(
    app: Celery,
    store: Store,
    record: Record,
    error: IdempotencyError,
    *,
    note: str = "",
) -> bool:
    """Settle a record FAILED that no worker runs; ``False`` if it was claimed, or has ended otherwise, meanwhile."""
    definition = definition_of(app, record.identity.namespace)
    keep_ms = Policy().settled_keep_ms if definition is None else definition.policy.settled_keep_ms
    value = _plain_error(app, error) if definition is None else definition.codec.dump_error(error)
    return end_record(
        store,
        SettleRequest(
            record=record,
            state=State.FAILED,
            value=value,
            keep_ms=keep_ms,
            restore=False,
            swept=not note,
            note=note,
        ),
    )


def end_record(store: Store, end: SettleRequest) -> bool:
    """Settle a record that no worker runs, as it was seen; ``False`` if it has changed, or has ended otherwise.

    The end is not to be restored: a key that was claimed and released a moment ago has no record, and is not to be
    settled for what it was before.
    """
    # One write, to the record with this token and to no other.
    settled, found = store.settle(end), store.get(end.record.identity)
    if found is None or (found.state, found.value) != (end.state, end.value):
        return False  # its owner may have settled it first, and then that end state stays
    # An operator's settle gives a new token: asked again because the answer was lost, it finds its own note.
    return found.note == end.note if end.note else settled and found.token == end.record.token


def _plain_error(app: Celery, error: IdempotencyError) -> Stored | None:
    """Serialize the error of a record whose task is unknown, or that is a view's, as a result backend would."""
    accept = tuple(app.conf.result_accept_content or app.conf.accept_content)
    plain = {
        "exc_type": type(error).__name__,
        "exc_module": type(error).__module__,
        "exc_message": str(error),
    }
    try:
        stored = Serializer("json", accept).dump(plain, max_bytes=None)
    except InvalidOption:  # not readable by anyone
        return None
    return None if isinstance(stored, NotStored) else stored
