"""What every message of an app with idempotent tasks carries, however it is sent: its key, and the run of a chain.

An ``IdempotentTask`` stamps its own calls. This is for the others: a call by name (``app.send_task``), and a task of
another class that leads a chain whose last step is idempotent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from celery.canvas import Signature
from celery.utils import uuid

from celery_idempotent.celery.registry import has_active_tasks, is_other_task
from celery_idempotent.celery.typed import Options
from celery_idempotent.identity import stamp
from celery_idempotent.identity.identified import MAPPINGS
from celery_idempotent.identity.stamp import as_mapping
from celery_idempotent.identity.trees import AnySignature, with_last_task

if TYPE_CHECKING:
    from celery import Celery


def prepare(app: Celery, options: Options) -> None:
    """Complete the options of one ``app.send_task``: its headers, and the last step of its chain."""
    raw, chain = _raw_headers(options), options.get("chain")
    if raw or chain:
        options["task_id"] = options.get("task_id") or uuid()
    if raw:
        options["headers"] = _stamped(raw, options["task_id"])
    if chain:
        options["chain"] = [_with_run(app, chain[0], options["task_id"]), *chain[1:]]


def _raw_headers(options: Options) -> Mapping[str, object] | None:
    """Return the headers, with a key and a scope given as options, if a publisher set any of ours in them.

    Celery would make an option that it does not know a message property, which RabbitMQ drops. What Celery stamps are
    options, too, and stay.
    """
    headers = options.get("headers")
    names = [name for name in (stamp.KEY_HEADER, stamp.SCOPE_HEADER) if name in options]
    if names:
        stamped = options.get("stamped_headers") or ()
        given = {name: options.pop(name) for name in names if name not in stamped}
        headers = {**given, **as_mapping(headers)}
    if not headers or not isinstance(headers, MAPPINGS) or stamp.RAW.keys().isdisjoint(headers):
        return None
    return dict(headers)


def _stamped(headers: Mapping[str, object], task_id: str) -> dict[str, object]:
    """Return headers with the key bound to this message, and without a key copied from another message's headers."""
    own = as_mapping(stamp.with_stamp(headers, task_id)[stamp.STAMP_HEADER])
    handed_on = {name for name, word in stamp.RAW.items() if word not in own}
    rest = {name: value for name, value in headers.items() if name not in handed_on}
    return {**rest, stamp.STAMP_HEADER: own}


def _with_run(app: Celery, step: object, run: str) -> object:
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

    return with_last_task(step, marked)
