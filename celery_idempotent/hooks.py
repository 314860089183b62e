"""Celery signal receivers, and the names of the headers that carry a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from celery import current_app
from celery.canvas import Signature
from celery.signals import (
    before_task_publish,
    worker_init,
    worker_process_shutdown,
    worker_ready,
)

from celery_idempotent.checks import insist, worker
from celery_idempotent.tally import tally

if TYPE_CHECKING:
    from celery_idempotent.keys import Identified

__all__ = [
    "KEEP_FAILURE_HEADER",
    "KEY_HEADER",
    "RUN_HEADER",
    "SCOPE_HEADER",
    "STAMP_HEADER",
    "as_mapping",
    "is_foreign",
    "leaves",
    "own_id",
    "stamp",
    "stamp_of",
]

#: What a publisher of any language may set: the raw key (str, int, or a list of these) and scope.
KEY_HEADER = "idempotency_key"
SCOPE_HEADER = "idempotency_scope"

#: Somebody asks for the outcome by the key, and is to learn of a final failure: it is kept as FAILED. Retries of the
#: message carry it along.
KEEP_FAILURE_HEADER = "idempotency_keep_failure"

#: Task id, canonical key, scope and fingerprint, computed once when the message was first published.
STAMP_HEADER = "idempotency"

#: Which application of a chain its last step belongs to: the task id of that application's head.
RUN_HEADER = "idempotency_run"


def stamp(identified: Identified, task_id: str) -> dict[str, str]:
    """Return the stamp of the message with this task id."""
    return {"id": task_id, **identified.to_header()}


def stamp_of(headers: Mapping[str, Any], task_id: str | None) -> object:
    """Return the stamp of the message with this task id, or ``None``.

    A task that hands its own headers on to another call (tracing does) hands on a stamp that is not the other's.
    """
    found = headers.get(STAMP_HEADER)
    if isinstance(found, Mapping) and found.get("id") != task_id:
        return None
    return found


@before_task_publish.connect(weak=False, dispatch_uid="celery_idempotent.carry_key")
def carry_key(headers: Any = None, properties: Any = None, **_: Any) -> None:
    """Move a key given to ``app.send_task("name", idempotency_key=...)`` into the headers.

    Celery makes an option that it does not know a message property, which RabbitMQ drops; an
    ``IdempotentTask`` publishing itself has taken its key out of the options already.
    """
    if not isinstance(headers, dict) or not isinstance(properties, dict):
        return
    for name in (KEY_HEADER, SCOPE_HEADER):
        if name in properties:
            value = properties.pop(name)
            headers.setdefault(name, value)


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
    if is_foreign(step):
        return step
    options = step.get("options") or {}
    marked = {RUN_HEADER: run, **as_mapping(options.get("headers"))}
    return {**step, "options": {**options, "headers": marked}}


def is_foreign(step: Mapping[str, Any]) -> bool:
    """Is this a task that is known here, and known to be none of ours? Its messages are none of our business."""
    app: Any = step.app if isinstance(step, Signature) else current_app
    task = app.tasks.get(step.get("task"))
    return task is not None and not hasattr(task, "identify_delivery")


def own_id(headers: Mapping[str, Any], task_id: str) -> str:
    """Return what tells this message from all that are not redeliveries of it: its task id, and its run of a chain."""
    run = headers.get(RUN_HEADER)
    return f"{task_id}/{run}" if isinstance(run, str) else task_id


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


@worker_process_shutdown.connect(weak=False, dispatch_uid="celery_idempotent.tally")
def write_tally(**_: Any) -> None:
    """Write what a process of the pool counted before it ends."""
    tally.write()


def leaves(signature: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the signatures of single tasks in a canvas."""
    if not isinstance(signature, Mapping):
        return
    kwargs = signature.get("kwargs") or {}
    if str(signature.get("task")) not in {"celery.chain", "celery.group", "celery.chord"}:
        yield signature
        return
    for part in ("tasks", "header", "body"):
        inner = kwargs.get(part)
        for each in inner if isinstance(inner, (list, tuple)) else [inner]:
            yield from leaves(each)


def as_mapping(headers: object) -> dict[str, Any]:
    """Return a copy of headers, or none where they are no mapping: Celery passes on whatever it is given."""
    return dict(headers) if isinstance(headers, Mapping) else {}
