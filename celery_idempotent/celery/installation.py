"""Changes to Celery outside of this library: receivers of signals once per process, a sweep once per app.

Importing the library changes nothing; the first idempotent task of an app does. docs/differences.md lists all of it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from celery import signals

from celery_idempotent.celery import callbacks, reaper, receivers
from celery_idempotent.settings import real_app

if TYPE_CHECKING:
    from celery import Celery


def install_tasks(app: Celery) -> None:
    """Prepare ``app``, its workers and its beat for idempotent tasks.

    Raises:
        InvalidOption: for a bad ``idempotency_sweep_interval``.
    """
    _connect_receivers()
    reaper.install_sweep(real_app(app))


@cache
def _connect_receivers() -> None:
    """Connect everything that listens to Celery; each acts on an app with idempotent tasks alone."""
    for signal, receiver in (
        (signals.worker_init, receivers.make_store),
        (signals.worker_ready, receivers.check_setup),
        (signals.worker_ready, receivers.watch_children),
        (signals.worker_process_shutdown, receivers.write_counters),
        (signals.worker_shutdown, receivers.end_heartbeat),
        (signals.task_success, callbacks.mark_success),
        (signals.task_failure, callbacks.mark_failure),
    ):
        uid = f"celery_idempotent.{receiver.__name__}"
        signal.connect(receiver, weak=False, dispatch_uid=uid)
