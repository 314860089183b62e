"""The run of a chain, in the headers of its last step: a chain object that is applied twice runs twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery.canvas import Signature, maybe_signature

from celery_idempotent.celery.registry import has_active_tasks, is_other_task
from celery_idempotent.celery.trees import AnySignature, with_last_task
from celery_idempotent.keys import stamp
from celery_idempotent.keys.stamp import as_mapping

if TYPE_CHECKING:
    from celery import Celery


def with_run(app: Celery, step: object, run: str) -> object:
    """Return a copy of a chain's last step that says to which application of the chain it belongs.

    A chain object that is applied twice gives its last step the same task id both times (``prepare_steps`` writes it to
    the chain's options): without this the second one would pass for a redelivery of the first. A retried or redelivered
    head carries it along.
    """

    def marked(task: AnySignature) -> AnySignature:
        known = task.app if isinstance(task, Signature) else app
        if is_other_task(known, str(task.get("task"))) or not has_active_tasks(known):
            return task
        options = task.get("options") or {}
        headers, task_id = as_mapping(options.get("headers")), options.get("task_id")
        if not task_id or stamp.RUN in stamp.read_stamp(headers, task_id):
            return task
        marked = stamp.with_stamp(headers, task_id, more={stamp.RUN: run})
        return {**task, "options": {**options, "headers": marked}}

    last = with_last_task(step, marked)
    if not isinstance(step, Signature):
        return last
    made: Any = maybe_signature(last, app=app)
    made.update(last)  # a chord writes its header in another form when it is made
    return made
