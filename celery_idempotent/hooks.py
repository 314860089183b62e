"""Celery signal receivers, and the names of the headers that carry a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

from celery_idempotent.checks import insist, worker
from celery_idempotent.identified import Identified
from celery_idempotent.lease import heartbeat
from celery_idempotent.tally import tally

__all__ = [
    "KEEP_FAILURE",
    "KEEP_FAILURE_HEADER",
    "KEY_HEADER",
    "RAW_KEY",
    "RAW_SCOPE",
    "RUN",
    "SCOPE_HEADER",
    "STAMP_HEADER",
    "as_mapping",
    "bound",
    "is_foreign",
    "leaves",
    "own_id",
    "said_of",
    "stamp_of",
    "unstamp",
]

#: What a publisher of any language may set: the raw key (str, int, or a list of these) and scope.
KEY_HEADER = "idempotency_key"
SCOPE_HEADER = "idempotency_scope"

#: Somebody asks for the outcome by the key, and is to learn of a final failure: it is kept as FAILED. Retries of the
#: message carry it along.
KEEP_FAILURE_HEADER = "idempotency_keep_failure"

#: All that this library says about a message, under the task id of that message: its canonical key, scope and
#: fingerprint, computed once when it was first published, and what it went through since.
STAMP_HEADER = "idempotency"

#: In a stamp: which application of a chain its last step belongs to, the task id of that application's head.
RUN = "run"

#: In a stamp: what a publisher said in headers of its own.
RAW_KEY, RAW_SCOPE, KEEP_FAILURE = "raw_key", "raw_scope", "keep_failure"
_RAW = {KEY_HEADER: RAW_KEY, SCOPE_HEADER: RAW_SCOPE, KEEP_FAILURE_HEADER: KEEP_FAILURE}


def stamp_of(headers: Mapping[str, Any], task_id: str | None) -> object:
    """Return the stamp of the message with this task id, or ``None``.

    A task that hands its own headers on to another call (tracing does) hands on a stamp that is not the other's.
    """
    found = headers.get(STAMP_HEADER)
    if isinstance(found, Mapping) and found.get("id") != task_id:
        return None
    return found


def said_of(headers: Mapping[str, Any], task_id: str | None) -> dict[str, Any]:
    """Return all that headers say about the message with this task id: its stamp, and what a publisher set beside it.

    What is repeated from the stamp of another message was handed on with it, and says nothing about this one.
    """
    own = as_mapping(stamp_of(headers, task_id))
    others = {} if own else as_mapping(headers.get(STAMP_HEADER))
    raw = {
        word: headers[name]
        for name, word in _RAW.items()
        if headers.get(name) is not None and others.get(word) != headers[name]
    }
    return {**raw, **own}


def bound(
    headers: Mapping[str, Any],
    task_id: str,
    identified: Identified | None = None,
    more: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Return headers that say nothing about any other message, wherever they are copied to.

    All that they say about the message with this task id is in its stamp, and so is what it is about, and ``more``.
    """
    said = said_of(headers, task_id)
    if identified is not None:
        for word in (RAW_KEY, RAW_SCOPE, *Identified.WORDS):
            said.pop(word, None)
        said |= identified.to_header()
    rest = {name: value for name, value in headers.items() if name not in _RAW}
    return {**rest, STAMP_HEADER: {**said, **(more or {}), "id": task_id}}


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
    raw = _RAW.keys() & headers.keys()
    if raw and headers.get("id"):
        headers[STAMP_HEADER] = said = bound(headers, headers["id"])[STAMP_HEADER]
        for name in raw:
            if _RAW[name] not in said:
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
    if not task_id or RUN in said_of(headers, task_id):
        return step
    return {**step, "options": {**options, "headers": bound(headers, task_id, more={RUN: run})}}


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


def own_id(headers: Mapping[str, Any], task_id: str) -> str:
    """Return what tells this message from all that are not redeliveries of it: its task id, and its run of a chain."""
    run = said_of(headers, task_id).get(RUN)
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


@worker_shutdown.connect(weak=False, dispatch_uid="celery_idempotent.finish")
def end_heartbeat(**_: Any) -> None:
    """End the heartbeat's thread with the worker: in a test the process lives on."""
    heartbeat.finish()


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


def unstamp(signature: Any, task_id: str | None) -> None:
    """Take out of a canvas what was handed on of the message with this task id, which its replacement takes over."""
    for leaf in leaves(signature):
        options = leaf.get("options") or {}
        headers = as_mapping(options.get("headers"))
        if isinstance(leaf, dict) and stamp_of(headers, task_id) is not None:
            del headers[STAMP_HEADER]
            leaf["options"] = {**options, "headers": headers}


def as_mapping(headers: object) -> dict[str, Any]:
    """Return a copy of headers, or none where they are no mapping: Celery passes on whatever it is given."""
    return dict(headers) if isinstance(headers, Mapping) else {}
