"""A delivery in a process of its own, which may be killed at a line; the records outlive it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import CodeType, FrameType
from typing import TYPE_CHECKING, cast

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.stores import get_store, swap_store
from celery_idempotent.stores.forwarding import ForwardingStore
from celery_idempotent.testing.delivery import Delivery, Message, run

if TYPE_CHECKING:
    from _typeshed import TraceFunction

    from celery_idempotent.celery.typed import AnyTask
    from celery_idempotent.stores.base import Store

#: A function of those that are watched, by its place among them, and the number of a line in it.
WatchedLine = tuple[int, int]

#: Decides at each event whether to die there. It gets how many there were before, and the line that is about to be
#: executed, or `RETURN`.
Kill = Callable[[int, WatchedLine], bool]

#: The body returns.
RETURN: WatchedLine = (0, 0)


def AFTER_THE_RUN(count: int, line: WatchedLine) -> bool:  # noqa: N802, ARG001  a constant that happens to be a function
    """Die when the end is stored, and the message is not yet acknowledged."""
    return False


@dataclass(slots=True)
class ProcessEnd:
    """What is known of a process: the lines that it reached, and how the delivery ended, unless it died."""

    lines: list[WatchedLine] = field(default_factory=list)
    delivery: Delivery | None = None
    trouble: str = ""


class _Link:
    """Tells the process that forked this one, and has it do the verbs of its store; any thread may ask."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.RLock()

    def tell(self, kind: str, said: object) -> None:
        with self._lock:
            self._connection.send((kind, said))

    def __getattr__(self, verb: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            with self._lock:
                self.tell("verb", (verb, args, kwargs))
                good, answer = self._connection.recv()
            if not good:
                raise answer
            return answer

        return call


def body_of(task: AnyTask) -> CodeType:
    """Return the code of the function that was written as a task."""
    return code_of(task.run, task.name)


def code_of(function: Callable[..., object], name: str) -> CodeType:
    """Return the code of a function.

    Raises:
        IdempotencyError: if it is not written in Python.
    """
    function = getattr(function, "__func__", function)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    if code is None:
        raise IdempotencyError(f"{name} is not a Python function: no line of it can be seen")
    return cast("CodeType", code)


def run_and_kill(
    task: AnyTask,
    message: Message,
    *,
    watched: Sequence[CodeType],
    kill: Kill | None = None,
    redelivered: bool = False,
    timeout_s: float = 60,
) -> ProcessEnd:
    """Fork, deliver the message there, and kill the process at the event that ``kill`` chooses.

    An event is that a line of a ``watched`` function is about to be executed, or that the first of them, the body,
    returns. The process is also killed if nothing is
    heard of it for ``timeout_s`` seconds.
    """
    store = get_store(task.app)
    _let_go()
    here, there = Pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on: another thread may hold a lock. Celery and we make our locks anew in a child.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            here.close()
            link = _Link(there)
            try:
                _be_a_child(task, message, store, link, watched, kill, redelivered)
            except BaseException as error:  # noqa: BLE001  the parent reports it
                link.tell("trouble", repr(error))
        finally:
            os._exit(1)
    there.close()
    ended = ProcessEnd()
    try:
        with here, suppress(EOFError, ConnectionResetError, BrokenPipeError):
            while here.poll(timeout_s):
                kind, said = here.recv()
                if kind == "verb":
                    here.send(_do_verb(store, *said))
                elif kind == "line":
                    ended.lines.append(said)
                elif kind == "ended":
                    ended.delivery = said
                else:
                    ended.trouble = said
            else:
                ended.trouble = f"nothing happened for {timeout_s:g} seconds"
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # if this process was interrupted
        os.waitpid(child, 0)
    return ended


def _do_verb(
    store: Store, verb: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[bool, object]:
    try:
        return True, getattr(store, verb)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  it is raised where the verb was called
        return False, error


def _be_a_child(
    task: AnyTask,
    message: Message,
    store: Store,
    link: _Link,
    watched: Sequence[CodeType],
    kill: Kill | None,
    redelivered: bool,
) -> None:
    if not store.supports_transactions:
        # Else its records are in a database, which outlives this process too.
        swap_store(task.app, _Forwarding(cast("Store", link)))
    sys.settrace(_tracer(watched, link, kill))
    try:
        delivery = run(task, message, redelivered=redelivered)
    finally:
        sys.settrace(None)
    if kill is AFTER_THE_RUN:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        link.tell("ended", delivery)
    except Exception as error:  # noqa: BLE001  pickle raises anything
        link.tell("trouble", f"its value stayed in its process: {error!r}")
        link.tell("ended", Delivery(delivery.state, repr(delivery.value)))
    os._exit(0)


class _Forwarding(ForwardingStore):
    """Forwards the verbs; what a store may offer beyond them it does not."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner


def _tracer(watched: Sequence[CodeType], link: _Link, kill: Kill | None) -> TraceFunction:
    """Return what ``sys.settrace`` takes: it tells each event, and dies at the one chosen."""
    spans = [(code.co_filename, code.co_firstlineno, _last_line(code)) for code in watched]
    count = 0

    def place(code: CodeType) -> int | None:
        """Return which function this is, or is written in."""
        for number, (file, first, last) in enumerate(spans):
            if code.co_filename == file and first <= code.co_firstlineno <= last:
                return number
        return None

    def see(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        nonlocal count
        number = place(frame.f_code)
        if event == "call" or number is None:
            return None if number is None else see
        if event == "line" or (event == "return" and frame.f_code is watched[0]):
            line = (number, frame.f_lineno) if event == "line" else RETURN
            if kill is not None and kill(count, line):
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            link.tell("line", line)
        return see

    return see


def _last_line(code: CodeType) -> int:
    return max((line for _, _, line in code.co_lines() if line is not None), default=0)


def _let_go() -> None:
    """Leave no connection of Django's open that both processes would use.

    Raises:
        IdempotencyError: where another process would not see what this one wrote.
    """
    if not hasattr(os, "fork"):
        raise IdempotencyError("a process is forked for this, which this system cannot do")
    if "django.db" in sys.modules:
        from celery_idempotent.django.testcases import close_before_fork

        close_before_fork()
