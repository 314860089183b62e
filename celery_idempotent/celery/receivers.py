"""Receivers of Celery's signals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import current_app
from celery.canvas import Signature
from celery.signals import (
    before_task_publish,
    worker_init,
    worker_process_shutdown,
    worker_ready,
    worker_shutdown,
)

from celery_idempotent.celery.checks import insist, worker
from celery_idempotent.identity.stamp import (
    KEY_HEADER,
    RAW,
    RUN,
    SCOPE_HEADER,
    STAMP_HEADER,
    as_mapping,
    read_stamp,
    with_stamp,
)
from celery_idempotent.protocol.counters import counters
from celery_idempotent.protocol.lease import heartbeat

__all__ = ["is_foreign"]


@before_task_publish.connect(weak=False, dispatch_uid="celery_idempotent.carry_key")
def carry_key(headers: Any = None, properties: Any = None, **_: Any) -> None:
    """Move a key given to ``app.send_task("name", idempotency_key=...)`` into the headers, and say whose it is.

    Celery makes an option that it does not know a message property, which RabbitMQ drops; an ``IdempotentTask``
    publishing itself has taken its key out of the options already. What a task of another class was sent with, and
    hands on, is taken out.
    """
    if not isinstance(headers, dict) or not isinstance(properties, dict):
        return
    for name in (KEY_HEADER, SCOPE_HEADER):
        if name in properties:
            value = properties.pop(name)
            headers.setdefault(name, value)
    raw = RAW.keys() & headers.keys()
    if raw and headers.get("id"):
        headers[STAMP_HEADER] = said = as_mapping(with_stamp(headers, headers["id"])[STAMP_HEADER])
        for name in raw:
            if RAW[name] not in said:
                del headers[name]


@before_task_publish.connect(weak=False, dispatch_uid="celery_idempotent.mark_run")
def mark_run(headers: Any = None, body: Any = None, **_: Any) -> None:
    """Tell the last step of a chain which application of the chain it belongs to.

    A chain object that is applied twice gives its last step the same task id both times (``prepare_steps`` leaves it in
    the chain's options): without a mark the second one would pass for a redelivery of the first. A retried or
    redelivered head carries the mark along.
    """
    embed: Any = body[2] if isinstance(body, (tuple, list)) and len(body) == 3 else None
    chain = embed.get("chain") if isinstance(embed, dict) else None
    if chain and isinstance(headers, dict) and headers.get("id"):
        embed["chain"] = [_marked(chain[0], headers["id"]), *chain[1:]]


def _marked(step: Any, run: str) -> Any:
    """Return a copy of a chain's last step with the mark on what runs last in it."""
    if not isinstance(step, Mapping):
        return step
    kwargs = step.get("kwargs") or {}
    if step.get("task") == "celery.chord" and kwargs.get("body"):
        return {**step, "kwargs": {**kwargs, "body": _marked(kwargs["body"], run)}}
    if step.get("task") == "celery.chain" and kwargs.get("tasks"):
        *first, last = kwargs["tasks"]
        return {**step, "kwargs": {**kwargs, "tasks": [*first, _marked(last, run)]}}
    if is_foreign(step) or not _has_ours(_app_of(step)):
        return step
    options = step.get("options") or {}
    headers, task_id = as_mapping(options.get("headers")), options.get("task_id")
    if not task_id or RUN in read_stamp(headers, task_id):
        return step
    return {
        **step,
        "options": {**options, "headers": with_stamp(headers, task_id, more={RUN: run})},
    }


def is_foreign(step: Mapping[str, Any]) -> bool:
    """Is this a task that is known here, and known to be none of ours? Its messages are none of our business."""
    task = _app_of(step).tasks.get(step.get("task"))
    return task is not None and not _is_ours(task)


def _app_of(step: Mapping[str, Any]) -> Any:
    return step.app if isinstance(step, Signature) else current_app


def _is_ours(task: Any) -> bool:
    return hasattr(task, "idempotency_definition") and task.idempotency_definition() is not None


def _has_ours(app: Any) -> bool:
    """Has this app any task of ours? Then a task that it does not know may be one as well."""
    return any(map(_is_ours, app.tasks.values()))


@worker_init.connect(weak=False, dispatch_uid="celery_idempotent.open_store")
def open_store(sender: Any = None, **_: Any) -> None:
    """Make the store before the pool's processes are forked: they inherit its modules, and import none of them.

    Raises:
        SystemExit: if no task could run: the worker would take messages, and get rid of them.
    """
    try:
        insist(sender.app)
    except Exception as error:
        raise SystemExit(f"idempotency: this worker does not start: {error}") from error


@worker_ready.connect(weak=False, dispatch_uid="celery_idempotent.check_setup")
def check_setup(sender: Any = None, **_: Any) -> None:
    """Let the checks look at how the worker is set up."""
    worker.begin(sender.app)


@worker_process_shutdown.connect(weak=False, dispatch_uid="celery_idempotent.counters")
def write_counters(**_: Any) -> None:
    """Write what a process of the pool counted before it ends."""
    counters.write()


@worker_shutdown.connect(weak=False, dispatch_uid="celery_idempotent.finish")
def end_heartbeat(**_: Any) -> None:
    """End the heartbeat's thread with the worker: in a test the process lives on."""
    heartbeat.finish()
