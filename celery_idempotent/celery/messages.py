"""What every message of an app with idempotent tasks carries, however it is sent: its key, and the run of a chain.

An ``IdempotentTask`` stamps its own calls. This is for the others: a call by name (``app.send_task``), and a task of
another class that leads a chain whose last step is idempotent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery.canvas import Signature
from celery.utils import uuid

from celery_idempotent.celery.registry import has_active_tasks, is_other_task
from celery_idempotent.identity import stamp
from celery_idempotent.identity.stamp import as_mapping

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["prepare"]


def prepare(app: Celery, options: dict[str, Any]) -> None:
    """Complete the options of one ``app.send_task``: its headers, and the last step of its chain."""
    raw, chain = _raw_headers(options), options.get("chain")
    if raw or chain:
        options["task_id"] = options.get("task_id") or uuid()
    if raw:
        options["headers"] = _stamped(raw, options["task_id"])
    if chain:
        options["chain"] = [_with_run(app, chain[0], options["task_id"]), *chain[1:]]


def _raw_headers(options: dict[str, Any]) -> dict[str, Any] | None:
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
    if not isinstance(headers, Mapping) or stamp.RAW.keys().isdisjoint(headers):
        return None
    return dict(headers)


def _stamped(headers: dict[str, Any], task_id: str) -> dict[str, Any]:
    """Return headers that say whose key this is, without what was handed on with the headers of another message."""
    own = stamp.bound(headers, task_id)[stamp.STAMP_HEADER]
    handed_on = {name for name, word in stamp.RAW.items() if word not in own}
    rest = {name: value for name, value in headers.items() if name not in handed_on}
    return {**rest, stamp.STAMP_HEADER: own}


def _with_run(app: Celery, step: Any, run: str) -> Any:
    """Return a copy of a chain's last step that says to which application of the chain it belongs.

    A chain object that is applied twice gives its last step the same task id both times (``prepare_steps`` leaves it in
    the chain's options): without this the second one would pass for a redelivery of the first. A retried or redelivered
    head carries it along.
    """
    if not isinstance(step, Mapping):
        return step
    kwargs = step.get("kwargs") or {}
    if step.get("task") == "celery.chord" and kwargs.get("body"):
        return {**step, "kwargs": {**kwargs, "body": _with_run(app, kwargs["body"], run)}}
    if step.get("task") == "celery.chain" and kwargs.get("tasks"):
        *first, last = kwargs["tasks"]
        return {**step, "kwargs": {**kwargs, "tasks": [*first, _with_run(app, last, run)]}}
    known = step.app if isinstance(step, Signature) else app
    if is_other_task(known, str(step.get("task"))) or not has_active_tasks(known):
        return step
    options = step.get("options") or {}
    headers, task_id = as_mapping(options.get("headers")), options.get("task_id")
    if not task_id or stamp.RUN in stamp.said_of(headers, task_id):
        return step
    marked = stamp.bound(headers, task_id, more={stamp.RUN: run})
    return {**step, "options": {**options, "headers": marked}}
