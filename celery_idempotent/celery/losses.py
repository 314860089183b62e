"""A process of this worker that is gone: its claim is interrupted, which is a crash.

The worker's main process hears of most. Of two that die at once, the pool may take the task of one for not begun, and
give it to a third, which meets the claim: then that one looks.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from celery_idempotent import signals
from celery_idempotent.celery.sweep import report_record
from celery_idempotent.records import Identity, Record, State
from celery_idempotent.signals import counters, worker_name

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyTask
    from celery_idempotent.stores import Store


def is_over(task: AnyTask, store: Store, record: Record) -> bool:
    """Interrupt a claim whose process is gone, if this worker forked it; is it interrupted?"""
    found = record.worker.rpartition(":")[2].partition("/")[0]
    pid = int(found) if found.isdigit() else os.getpid()
    if record.worker != worker_name(pid) or not gone(pid):
        return False
    return interrupt(task, store, record.identity, record.task_id, pid)


def interrupt(task: AnyTask, store: Store, identity: Identity, task_id: str, pid: int) -> bool:
    """Interrupt the claim if it is that child's.

    A pid may be given out twice, and the message delivered to the second child that has it. Hence this order::

        read: token 5 is held by pid 71 of this worker ─▶ no pid 71 lives ─▶ interrupt token 5
    """
    record: Record | None = store.get(identity)
    if record is None or not gone(pid):
        return False
    held = State.PROCESSING, task_id, worker_name(pid)
    if (record.state, record.task_id, record.worker) != held:
        return False
    if record.on_stale == "interrupt" or (task.acks_late and task.reject_on_worker_lost):
        # Else its message is gone: the sweep does what the task wants once the lease is over.
        record = store.interrupt(identity, token=record.token)
        if record is not None:
            why = f"its process {pid} is gone"
            report_record(task.app, signals.interrupted, record, state=record.state, reason=why)
            counters.write()
            return True
    return False


def gone(pid: int) -> bool:
    """Has this process ended, reaped or not?"""
    # WNOWAIT leaves the child to the pool. Some platforms have no waitid().
    with suppress(ChildProcessError, AttributeError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    try:
        os.kill(pid, 0)
    except OSError as error:  # we may not signal it, or there is none
        return isinstance(error, ProcessLookupError)
    return False
