"""What the library adds to Celery: receivers of its signals, once per process, and a sweep, once per app.

Importing the library changes nothing; the first idempotent task of an app does. docs/differences.md lists all of it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from celery import signals as celery_signals

from celery_idempotent.celery import callbacks, delivery, sweep
from celery_idempotent.celery.definition import definitions
from celery_idempotent.events import counters
from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.settings import real_app

if TYPE_CHECKING:
    from celery import Celery
    from celery.worker.consumer import Consumer


def make_store(sender: Any, **_: object) -> None:
    """Note the pool's time limit, and make the store, whose modules the pool's processes thus inherit.

    A worker of which no task could run ends: it would take messages, and get rid of them.
    """
    from celery_idempotent.celery.checks import check_or_raise

    delivery.pool_time_limits[real_app(sender.app)] = sender.time_limit
    try:
        check_or_raise(sender.app)
    except Exception as error:
        raise SystemExit(f"idempotency: this worker does not start: {error}") from error


def check_setup(sender: Consumer, **_: object) -> None:
    """Let the checks look at how the worker is set up."""
    if definitions(sender.app):
        from celery_idempotent.celery.checks import check_in_thread

        check_in_thread(sender.app)


def install_tasks(app: Celery) -> None:
    """Prepare ``app``, its workers and its beat for idempotent tasks, or raise what :func:`.sweep_interval` does."""
    _connect_receivers()
    sweep.install_sweep(real_app(app))


@cache
def _connect_receivers() -> None:
    """Connect everything that listens to Celery; each acts on an app with idempotent tasks alone."""
    for signal, receiver in (
        (celery_signals.worker_init, make_store),
        (celery_signals.worker_ready, check_setup),
        # What a process of the pool counted, and what the main process did, whose thread writes it at its end.
        (celery_signals.worker_process_shutdown, lambda **_: counters.write()),
        (celery_signals.worker_shutdown, lambda **_: heartbeat.finish()),
        (celery_signals.task_success, callbacks.mark_success),
        (celery_signals.task_failure, callbacks.mark_failure),
    ):
        signal.connect(receiver, weak=False)
