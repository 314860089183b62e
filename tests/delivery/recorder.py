"""What is written down of every task on either side, as one line of JSON each, wherever it happens."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from celery import current_task, signals
from celery.app.task import Context

from tests.support.ledger import Growing


class Recorder:
    """A file to which the processes of one side append; a line is one write, and whole."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def write(self, kind: str, task_id: Any, root_id: Any, **data: Any) -> None:
        line = {"kind": kind, "id": task_id, "root": root_id, "scenario": here.scenario, **data}
        line["pid"] = os.getpid()
        Growing(self.path).append(json.dumps(line, default=repr, skipkeys=True))


class _Here(threading.local):
    """What this thread works on: in the tests a scenario on one side, in a worker its one recorder."""

    scenario: str | None = None
    recorder: Recorder | None = None


here = _Here()

#: The recorder of a worker's process, which has one side only.
_worker: list[Recorder] = []


def _recorder() -> Recorder | None:
    return here.recorder or (_worker[0] if _worker else None)


def note(what: str, *values: Any, request: Any = None) -> None:
    """Write down something that a task's body, handler or errback saw."""
    recorder = _recorder()
    current: Any = current_task
    request = request or (current and current.request)
    if recorder is not None and request and request.id:
        recorder.write("note", request.id, request.root_id or request.id, what=what, values=values)


def context(request: Any) -> dict[str, Any]:
    """Return the documented attributes of a request."""
    names = [name for name in vars(Context) if not name.startswith("_")]
    found = {name: getattr(request, name, None) for name in names}
    return {name: value for name, value in found.items() if not callable(value)}


def _soon(moment: Any) -> Any:
    """Return a moment as the seconds until then, rounded up: one, also where a slow machine has let it pass."""
    with suppress(TypeError, ValueError):
        then = datetime.fromisoformat(str(moment))
        if then.tzinfo is None:
            then = then.replace(tzinfo=timezone.utc)
        seconds = math.ceil((then - datetime.now(timezone.utc)).total_seconds())
        return f"in {seconds or 1} s"
    return moment


def _publish(headers: Mapping[str, Any], body: Any, **message: Any) -> None:
    if recorder := _recorder():
        shown = dict(headers)
        for name in ("eta", "expires"):
            shown[name] = _soon(shown.get(name))
        recorder.write(
            "publish",
            headers["id"],
            headers.get("root_id"),
            headers=shown,
            body=body,
            declare=[each.name for each in message.get("declare") or ()],
            **{
                name: message.get(name)
                for name in ("exchange", "routing_key", "properties", "retry_policy")
            },
        )


def _failure(sender: Any, task_id: str, exception: Any, einfo: Any, **rest: Any) -> None:
    request = sender.request
    if request.id is not None:
        told = {name: rest.get(name) for name in ("args", "kwargs")}
        _on("failure", request, exception=repr(exception), einfo=str(einfo), **told)
    elif recorder := _recorder():  # told by the worker's main process
        recorder.write("lost", task_id, None, exception=repr(exception))


def _on(kind: str, request: Any, **data: Any) -> None:
    request_id = getattr(request, "id", None)
    if (recorder := _recorder()) and request_id:
        recorder.write(kind, request_id, getattr(request, "root_id", None) or request_id, **data)


def _told(kind: str, names: str, *, sender: Any, **about: Any) -> None:
    """Write down what a signal says, by these names."""
    task = about.get("task") or sender
    request = about.get("request") or task.request
    data = {name: about[name] for name in names.split()}
    if kind == "prerun":
        data["context"] = context(request)
    shown = ("args", "kwargs", "context", "state", "terminated", "expired")
    _on(kind, request, **{k: v if k in shown else repr(v) for k, v in data.items()})


_RECEIVERS: dict[str, Any] = {
    "before_task_publish": _publish,
    "task_failure": _failure,
    **{
        f"task_{kind}": partial(_told, kind, names)
        for kind, names in {
            "prerun": "args kwargs",
            "postrun": "retval state",
            "success": "result",
            "retry": "reason",
            "received": "",
            "revoked": "terminated signum expired",
            "internal_error": "exception",
        }.items()
    },
}


def watch(recorder: Recorder | None = None) -> None:
    """Listen to Celery's signals, for a worker of one side or for threads that say ``here``."""
    if recorder is not None:
        _worker.append(recorder)
    for name, receiver in _RECEIVERS.items():
        getattr(signals, name).connect(receiver, weak=False, dispatch_uid=f"documented.{name}")


def unwatch() -> None:
    for name in _RECEIVERS:
        getattr(signals, name).disconnect(dispatch_uid=f"documented.{name}")
