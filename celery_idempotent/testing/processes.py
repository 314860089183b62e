"""A delivery in a forked process, which may be killed at a line; the records outlive it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, get_args

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.stores import Store, get_store, swap_store
from celery_idempotent.stores.table import Verb
from celery_idempotent.testing.delivery import Delivery, Message, run

if TYPE_CHECKING:
    from _typeshed import TraceFunction

    from celery_idempotent.celery.typed import AnyTask

#: Decides at each event whether to die there. It gets how many there were before, and the number of the line that is
#: about to be executed, or `RETURN`.
Kill = Callable[[int, int], bool]

#: The body returns.
RETURN = 0

#: So many seconds a process may be silent.
_SILENT_S = 60


def AFTER_THE_RUN(count: int, line: int) -> bool:  # noqa: N802, ARG001  a constant that happens to be a function
    """Die when the end is stored, and the message is not yet acknowledged."""
    return False


@dataclass(slots=True)
class ProcessEnd:
    """The lines that a process reached, and how the delivery ended, unless it died."""

    lines: list[int] = field(default_factory=list)
    delivery: Delivery | None = None
    trouble: str = ""


class _Link:
    """Reports to the process that forked this one, and has it do the verbs of its store; any thread may ask."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.RLock()

    def send(self, kind: str, content: object) -> None:
        with self._lock:
            self._connection.send((kind, content))

    def __getattr__(self, verb: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            with self._lock:
                self.send("verb", (verb, args, kwargs))
                good, answer = self._connection.recv()
            if not good:
                raise answer
            return answer

        return call


def _forwarded(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self.link, name)(*args, **kwargs)


#: A store whose verbs the parent executes, without the further abilities of that one.
_Forwarding: Any = type(
    "_Forwarding",
    (Store,),
    {
        name: _forwarded(name)
        for name in (*get_args(Verb), "get", "list", "stats", "prune", "now_ms", "_at")
    },
)


def body_of(task: AnyTask) -> CodeType:
    """Return the code of the function that was written as a task.

    Raises:
        IdempotencyError: if it is not written in Python.
    """
    function: Any = getattr(task.run, "__func__", task.run)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code: CodeType | None = getattr(function, "__code__", None)
    if code is None:
        raise IdempotencyError(f"{task.name} is not a Python function: no line of it can be seen")
    return code


def run_and_kill(
    task: AnyTask, message: Message, *, kill: Kill | None = None, redelivered: bool = False
) -> ProcessEnd:
    """Fork, deliver the message there, and kill the process at the event that ``kill`` chooses.

    An event: a line of the task's body is about to be executed, or the body returns. A process that is silent for a
    minute is killed too.

    Raises:
        IdempotencyError: where another process would not see what this one wrote, or the system cannot fork.
    """
    if not hasattr(os, "fork"):
        raise IdempotencyError("a process is forked for this, which this system cannot do")
    if "django.db" in sys.modules:
        from celery_idempotent.django.testcases import close_before_fork

        close_before_fork()
    store, body = get_store(task.app), body_of(task)
    here, there = Pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on: another thread may hold a lock. Celery and we make our locks anew in a child.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            here.close()
            link = _Link(there)
            if not store.supports_transactions:
                # Else its records are in a database, which outlives this process too.
                store = _Forwarding()
                store.link = link
                swap_store(task.app, store)
            try:
                _deliver(task, message, link, _tracer(body, link, kill), kill, redelivered)
            except BaseException as error:  # noqa: BLE001  the parent reports it
                link.send("trouble", repr(error))
        finally:
            os._exit(1)
    there.close()
    try:
        return _listen(here, store)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # if this process was interrupted
        os.waitpid(child, 0)


def _listen(here: Connection, store: Store) -> ProcessEnd:
    """Do the verbs that the child asks for, and note its reports, until it ends."""
    ended = ProcessEnd()
    with here, suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while here.poll(_SILENT_S):
            kind, content = here.recv()
            if kind == "verb":
                verb, args, kwargs = content
                try:
                    answer = True, getattr(store, verb)(*args, **kwargs)
                except Exception as error:  # noqa: BLE001  it is raised where the verb was called
                    answer = False, error
                here.send(answer)
            elif kind == "line":
                ended.lines.append(content)
            elif kind == "ended":
                ended.delivery = content
            else:
                ended.trouble = content
        ended.trouble = f"nothing happened for {_SILENT_S} seconds"
    return ended


def _deliver(
    task: AnyTask,
    message: Message,
    link: _Link,
    trace: TraceFunction,
    kill: Kill | None,
    redelivered: bool,
) -> None:
    sys.settrace(trace)
    try:
        delivery = run(task, message, redelivered=redelivered)
    finally:
        sys.settrace(None)
    if kill is AFTER_THE_RUN:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        link.send("ended", delivery)
    except Exception:  # noqa: BLE001  pickle raises anything
        link.send("ended", Delivery(delivery.state, repr(delivery.value)))
    os._exit(0)


def _tracer(body: CodeType, link: _Link, kill: Kill | None) -> TraceFunction:
    """Return what ``sys.settrace`` takes: it reports each event, and dies at the one chosen."""
    last = max((line for _, _, line in body.co_lines() if line is not None), default=0)
    count = 0

    def see(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        nonlocal count
        code = frame.f_code  # that of the body, or of a function that is written in it
        if code.co_filename != body.co_filename or not (
            body.co_firstlineno <= code.co_firstlineno <= last
        ):
            return None
        if event == "line" or (event == "return" and code is body):
            line = frame.f_lineno if event == "line" else RETURN
            if kill is not None and kill(count, line):
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            link.send("line", line)
        return see

    return see
