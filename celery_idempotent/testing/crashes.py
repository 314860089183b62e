"""Runs a task in a process that is killed: at one place, or after each line in turn."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Literal

from celery.canvas import Signature

from celery_idempotent.stores import get_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.delivery import Delivery, Message, deliver_message, message_of
from celery_idempotent.testing.isolation import FakeClock, isolated_records, redefined

if TYPE_CHECKING:
    from _typeshed import TraceFunction

    from celery_idempotent.celery.typed import AnyTask, Sig

#: Places that are no line: before the first one (and the body's return), after the run.
_BEFORE = _RETURN = 0
_AFTER = -1

#: The lease meanwhile, in seconds: nobody can move the clock of a database.
_LEASE = 1.0


@dataclass(frozen=True, slots=True)
class KilledAt:
    """A kill after ``line``; 0: before the first line, -1: after the run, before the acknowledgement.

    ``effects`` and ``state`` are those after the second delivery. ``verdict`` is ``ok``, ``doubled``, ``lost``,
    ``differs`` or ``failed``.
    """

    line: int
    effects: object
    state: str
    verdict: str


@dataclass(frozen=True, slots=True)
class CrashReport:
    """The verdicts of :func:`crash_matrix`; as text, a listing of the task with one for each line."""

    task: str
    #: The effects of a run that nothing disturbed.
    expected: object
    places: Sequence[KilledAt]
    source: Sequence[tuple[int, str]]

    @property
    def ok(self) -> bool:
        """Did every kill leave the right effects?"""
        return all(place.verdict == "ok" for place in self.places)

    def __str__(self) -> str:
        rows = [("-", _BEFORE, "before the first line")]
        rows += [(str(line), line, text) for line, text in self.source]
        rows += [("-", _AFTER, "after the run, before the acknowledgement")]
        lines = [f"{self.task}, killed after each line; without a kill: {self.expected!r}"]
        for number, line, text in rows:
            killed = [place for place in self.places if place.line == line]
            verdict, found = "ok" if killed else "", ""
            if bad := next((place for place in killed if place.verdict != "ok"), None):
                verdict, found = bad.verdict.upper(), f"    <- {bad.effects!r}, {bad.state}"
            lines.append(f"{verdict:>8} {number:>4}  {text}{found}".rstrip())
        return "\n".join(lines)


def crash_matrix(
    task: AnyTask,
    *,
    arguments: Callable[[str], Sequence[object] | Sig],
    effects: Callable[[str], object],
) -> CrashReport:
    """Kill a task after every line of its body, deliver it again, and compare its effects.

    ``arguments`` gets the name of an operation, a UUID as text, and returns positional arguments, or a signature
    (``charge.s(1999).set(idempotency_key=name)``), which give it a key of its own. ``effects`` gets the name too, and
    returns the effects of the operation, as seen from outside of the process.

    The task runs in a fork of this process, and its messages go nowhere. Records are in memory, unless the store is a
    Django database.

    Raises:
        AssertionError: if a kill doubled, lost or changed an effect; its text is the report.
        IdempotencyError: if a fork would not see what the test wrote.
    """
    __tracebackhide__ = True  # pytest shows the test, and the report

    def begin() -> tuple[str, Message]:
        given = arguments(name := str(uuid.uuid4()))
        call, args = (given, ()) if isinstance(given, Signature) else (task, given)
        return name, message_of(call, args, {})

    with _stage(task) as let_leases_end:
        name, message = begin()
        before = effects(name)
        first = _run_and_kill(task, message)
        if first.delivery is None:
            raise AssertionError(f"{task.name} did not end without a kill: {first.trouble}")
        expected, state = effects(name), first.delivery.state
        if expected == before:
            text = f"effects() returns {before!r} before and after a run of {task.name}."
            raise AssertionError(f"{text} It must return what the run changes.")
        # The last events are the return and the end of the run.
        lines = [_BEFORE, *first.lines[:-2], _AFTER]
        killed = [(line, *begin()) for line in lines]
        for event, (_, _, message) in enumerate(killed):
            _run_and_kill(task, message, kill=("event", event))
        let_leases_end()
        places = []
        for line, name, message in killed:
            second = _run_and_kill(task, message, redelivered=True).delivery
            found, end = effects(name), "no end" if second is None else second.state
            same = "ok" if end == state else "failed"
            verdict = same if found == expected else _difference(found, expected)
            places.append(KilledAt(line, found, end, verdict))
    texts, first_line = inspect.getsourcelines(_body_of(task))
    source = [*enumerate((text.rstrip("\n") for text in texts), first_line)]
    report = CrashReport(task.name, expected, places, source)
    if not report.ok:
        raise AssertionError(str(report))
    return report


def lose_worker(
    task: AnyTask,
    *args: object,
    at: int | Literal["start", "end", "acknowledge"] = "end",
    **kwargs: object,
) -> Delivery:
    """Kill the process of a run, deliver its message again once the lease is over, and return how that ended.

    ``at``: before the first line (``start``), before the line of this number in the task's file, after the last line
    (``end``: its effects are made, its result is not stored), or once the result is stored (``acknowledge``).

    Raises:
        AssertionError: if the run never comes to this line.
    """
    named = {"start": ("event", 0), "end": ("line", _RETURN), "acknowledge": ("line", _AFTER)}
    kill = named[at] if isinstance(at, str) else ("line", at)
    with _stage(task) as let_leases_end:
        message = message_of(task, args, kwargs)
        if _run_and_kill(task, message, kill=kill).delivery is not None:
            raise AssertionError(f"{task.name} ended without reaching {at!r}")
        let_leases_end()
        ended = _run_and_kill(task, message, redelivered=True)
    if ended.delivery is None:
        raise AssertionError(f"the second run of {task.name} did not end: {ended.trouble}")
    return ended.delivery


@contextmanager
def _stage(task: AnyTask) -> Iterator[Callable[[], None]]:
    """Give the task records of its own, and a function that lets the leases of dead owners end."""
    clock = FakeClock()
    isolated = isolated_records(task.app, clock=clock)
    with isolated as store, redefined(task, idempotency_lease=_LEASE):
        is_faked = isinstance(store, MemoryStore)
        yield (
            partial(clock.advance, _LEASE * 1000)
            if is_faked
            else partial(time.sleep, _LEASE + 0.01)
        )


def _difference(effects: Any, expected: Any) -> str:
    """Return the verdict on effects that differ: more, fewer, or others."""
    with suppress(TypeError):
        found, wanted = [len(e) if isinstance(e, Sized) else e for e in (effects, expected)]
        if found != wanted:
            return "doubled" if found > wanted else "lost"
    return "differs"


@dataclass(slots=True)
class _ProcessEnd:
    """The report of a forked process: the lines that it reached, and how the delivery ended, unless it died."""

    lines: list[int] = field(default_factory=list)
    delivery: Delivery | None = None
    trouble: str = "its process died"
    #: The records in memory, and the highest token of these.
    records: tuple[Any, int] | None = None


def _run_and_kill(
    task: AnyTask,
    message: Message,
    *,
    kill: tuple[str, int] | None = None,
    redelivered: bool = False,
) -> _ProcessEnd:
    """Fork, deliver the message there, and kill the process at an event or a line; the records outlive it.

    Events are each line of the task's body before it is executed, the return of the body, and the end of the run.
    """
    if "django.db" in sys.modules:
        from celery_idempotent.django.transactions import close_before_fork

        close_before_fork()
    store = get_store(task.app)
    here, there = Pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on: another thread may hold a lock. Celery and we make our locks anew in a child.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            here.close()
            _deliver_and_die(there, task, message, redelivered, kill)
        finally:
            os._exit(1)
    there.close()
    ended = _ProcessEnd()
    try:
        with here, suppress(EOFError, ConnectionResetError):
            ended = here.recv()
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if isinstance(store, MemoryStore) and ended.records is not None:
        store.records, store.highest_token = ended.records
    return ended


def _body_of(task: AnyTask) -> CodeType:
    code: CodeType = inspect.unwrap(getattr(task.run, "__func__", task.run)).__code__
    return code


def _deliver_and_die(
    parent: Connection, task: AnyTask, message: Message, redelivered: bool, kill: object
) -> None:
    """Deliver a message in the forked process; report to the parent and die at the chosen place, or at the end."""
    body, ended = _body_of(task), _ProcessEnd()
    last = max((line for _, _, line in body.co_lines() if line is not None), default=0)

    def die() -> None:
        sys.settrace(None)
        if isinstance(store := get_store(task.app), MemoryStore):
            ended.records = dict(store.records), store.highest_token
        try:
            parent.send(ended)
        except Exception:  # noqa: BLE001  pickle raises anything
            if ended.delivery:
                ended.delivery = Delivery(ended.delivery.state, repr(ended.delivery.value))
            parent.send(ended)
        os.kill(os.getpid(), signal.SIGKILL)

    def reach(line: int) -> None:
        if kill in (("event", len(ended.lines)), ("line", line)):
            die()
        ended.lines.append(line)

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        # Of the body, and of functions that are written in it.
        code = frame.f_code
        is_inside = body.co_firstlineno <= code.co_firstlineno <= last
        if code.co_filename != body.co_filename or not is_inside:
            return None
        if event == "line":
            reach(frame.f_lineno)
        elif event == "return" and code is body:
            reach(_RETURN)
        return trace

    sys.settrace(trace)
    try:
        delivery = deliver_message(task, message, redelivered=redelivered)
    except BaseException as error:  # noqa: BLE001  the parent reports it
        ended.trouble = repr(error)
    else:
        reach(_AFTER)
        ended.delivery = delivery
    die()
