"""What a worker with idempotent tasks does when it starts and when it ends: receivers of Celery's signals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_idempotent.celery.checks import insist, worker
from celery_idempotent.celery.registry import has_tasks
from celery_idempotent.protocol.counters import counters
from celery_idempotent.protocol.lease import heartbeat

if TYPE_CHECKING:
    from celery.worker import WorkController
    from celery.worker.consumer import Consumer

__all__ = ["check_setup", "end_heartbeat", "open_store", "write_counters"]


def open_store(sender: WorkController, **_: object) -> None:
    """Make the store before the pool's processes are forked: they inherit its modules, and import none of them.

    Raises:
        SystemExit: if no task could run: the worker would take messages, and get rid of them.
    """
    try:
        insist(sender.app)
    except Exception as error:
        raise SystemExit(f"idempotency: this worker does not start: {error}") from error


def check_setup(sender: Consumer, **_: object) -> None:
    """Let the checks look at how the worker is set up."""
    if has_tasks(sender.app):
        worker.begin(sender.app)


def write_counters(**_: object) -> None:
    """Write what a process of the pool counted before it ends; nothing if no idempotent task ran in it."""
    counters.write()


def end_heartbeat(sender: WorkController, **_: object) -> None:
    """End the heartbeat's thread with the worker: in a test the process lives on."""
    if has_tasks(sender.app):
        heartbeat.finish()
