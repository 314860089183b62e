"""The sweep: a beat task that registers itself, and interrupts claims whose worker never came back."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery.signals import beat_init

from celery_idempotent import signals
from celery_idempotent.celery.registry import definition_of, task_name_of
from celery_idempotent.errors import InvalidOption, ProcessingTimedOut
from celery_idempotent.protocol.counters import tally
from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.records import Record, State
from celery_idempotent.settings import milliseconds
from celery_idempotent.signals import Event, emit
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.stores.base import Store

__all__ = [
    "REQUEUE_MS",
    "SWEEP",
    "event_of",
    "install",
    "mend_row",
    "send_again",
    "sweep",
    "sweep_interval",
]

logger = logging.getLogger(__name__)

#: The name of the task, and of its entry in the beat schedule.
SWEEP = "celery_idempotent.sweep"

#: The most records that one sweep looks at: the next one goes on where it stopped.
LIMIT = 10_000

#: A requeued message that did not start in time counts as lost, and is published again.
REQUEUE_MS = 60_000

#: What we write into a row that we disable; one that people disabled stays so.
_DISABLED = "Disabled because idempotency_sweep_interval is None."

_installed: weakref.WeakSet[Celery] = weakref.WeakSet()
_installing = threading.Lock()


def sweep(app: Celery, *, limit: int = LIMIT, sender: object = None) -> dict[str, Any]:
    """Interrupt stale claims and prune what is past its retention; return the counts.

    Safe to run on any number of machines at once: whether a claim is stale is decided by the store at the moment of the
    write. ``more`` says that ``limit`` left work for the next sweep.

    Raises:
        StoreUnavailable: if the store did not answer; the next sweep does the work.
    """
    store = get_store(app)
    started = time.monotonic()
    report = store.sweep(limit=limit, requeue_ms=REQUEUE_MS)
    failed = 0
    for record in report.interrupted:
        logger.warning(
            "idempotency: %s was stale and is interrupted: %s did not come back (crash %d)",
            record.identity,
            record.owner,
            record.crashes,
        )
        emit(signals.interrupted, sender, event_of(record))
        tally.add(store, task_name_of(app, record.identity.namespace), "interrupted")
        if record.on_stale == "fail":
            failed += _fail(app, store, record, sender)
    requeued = sum(send_again(app, record, sender) for record in report.requeued)
    pruned = store.prune(limit=limit)
    counts: dict[str, Any] = {
        "interrupted": len(report.interrupted),
        "failed": failed,
        "requeued": requeued,
        "pruned": pruned,
        "more": report.more,
        "seconds": round(time.monotonic() - started, 4),
    }
    tally.add(store, SWEEP, "swept")
    tally.write()
    emit(signals.swept, sender, Event(task=SWEEP, count=len(report.interrupted)))
    counts |= store.upkeep(app, limit=limit)
    store.note_sweep()
    busy = report.interrupted or report.requeued or pruned
    logger.log(
        logging.INFO if busy else logging.DEBUG,
        "idempotency: sweep interrupted %d, failed %d, requeued %d, pruned %d in %.3f s",
        *(counts[word] for word in ("interrupted", "failed", "requeued", "pruned", "seconds")),
    )
    return counts


def _fail(app: Celery, store: Store, record: Record, sender: object) -> bool:
    """Settle a stale record FAILED for good (``idempotency_on_stale="fail"``), unless it was claimed meanwhile."""
    error = ProcessingTimedOut(
        f"{record.identity} did not come back before its lease ran out: {record.owner} claimed it last."
    )
    definition = definition_of(app, record.identity.namespace)
    keep_ms = Policy().failed_keep_ms if definition is None else definition.policy.failed_keep_ms
    value = None if definition is None else definition.codec.dump_error(error)
    # Nor if it was claimed and released, and has no record any more.
    if not store.settle(record, state=State.FAILED, value=value, keep_ms=keep_ms, restore=False):
        return False
    logger.error("idempotency: %s", error)
    emit(signals.settled, sender, event_of(record, error))
    tally.add(store, task_name_of(app, record.identity.namespace), "settled")
    return True


def send_again(
    app: Celery, record: Record, sender: object, *, who: str = "", reason: str = ""
) -> bool:
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
    except Exception as error:
        logger.exception("idempotency: %s could not be requeued", record.identity)
        emit(signals.store_failed, sender, event_of(record, error))
        return False
    logger.warning(
        "idempotency: %s was stale and is queued again (crash %d)", record.identity, record.crashes
    )
    emit(signals.requeued, sender, replace(event_of(record), who=who, reason=reason))
    tally.add(get_store(app), task_name_of(app, record.identity.namespace), "requeued")
    return True


def event_of(record: Record, error: BaseException | None = None) -> Event:
    """Return what receivers of signals are told about a record that nobody runs."""
    return Event(
        task=record.identity.namespace,
        task_id=record.task_id,
        identity=record.identity,
        record=record,
        error=error,
    )


def install(app: Celery) -> None:
    """Give ``app`` the sweep task and its beat entry, as soon as its tasks are complete, and a close; all that once.

    Raises:
        InvalidOption: for a bad ``idempotency_sweep_interval``.
    """
    interval = sweep_interval(app)
    with _installing:
        if app in _installed:
            return
        _installed.add(app)
    _finish_with(app)
    if vars(app)["finalized"]:
        _register(app, interval)
    else:
        # Not at once: the app may be walking through its tasks right now.
        app.on_after_finalize.connect(lambda **_: _register(app, interval), weak=False)


def _finish_with(app: Celery) -> None:
    """Let ``app.close()`` end the heartbeat's thread, too."""
    close = app.close

    def close_and_finish() -> None:
        close()
        heartbeat.finish()

    app.close = close_and_finish  # type: ignore[method-assign]


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
        raise InvalidOption("idempotency_sweep_interval takes at least 0.1 seconds, or None.")
    return interval / 1000


def _register(app: Celery, interval: float | None) -> None:
    # As any task of the app, of the class that the app gives its tasks: what it has receivers, middleware and mixins do
    # to tasks fits that one. Not shared: Celery would hand it to every other app of the process.
    @app.task(name=SWEEP, bind=True, shared=False, ignore_result=False, acks_late=False)
    def sweep_task(self: Any, limit: int = LIMIT) -> dict[str, Any]:
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
        conf: Any = app.conf
        conf[conf._to_keys("beat_schedule")[0]] = schedule  # noqa: SLF001  the only way to know it


@beat_init.connect(weak=False, dispatch_uid="celery_idempotent.mend_row")
def mend_row(sender: Any, **_: Any) -> None:
    """Let django-celery-beat's row of the sweep be as the app's settings are: it never takes back what it once copied.

    Beat makes a row of our entry when it starts, without ``expires``, and leaves it when the entry is gone.
    """
    module: Any = sys.modules.get("django_celery_beat.schedulers")
    scheduler = sender.scheduler
    app = getattr(sender.app, "_get_current_object", lambda: sender.app)()
    if module is None or not isinstance(scheduler, module.DatabaseScheduler):
        return
    if app not in _installed:
        return
    rows = scheduler.Model.objects.filter(name=SWEEP, task=SWEEP)
    entry = app.conf.beat_schedule.get(SWEEP)
    if entry is None:
        changed = rows.filter(enabled=True).update(enabled=False, description=_DISABLED)
    else:
        changed = rows.filter(enabled=False, description=_DISABLED).update(
            enabled=True, description=""
        )
        seconds = (entry.get("options") or {}).get("expires")
        if isinstance(seconds, (int, float)):
            changed += rows.filter(expire_seconds=None).update(expire_seconds=math.ceil(seconds))
    if changed:
        scheduler.Changes.update_changed()
