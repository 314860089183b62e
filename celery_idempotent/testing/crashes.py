"""A task whose worker is killed: at one place, or after each line in turn."""

from __future__ import annotations

import inspect
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from celery.canvas import Signature

from celery_idempotent.records import Selection, State
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.clock import FakeClock
from celery_idempotent.testing.delivery import Delivery, message_of
from celery_idempotent.testing.isolation import isolated_records, redefined
from celery_idempotent.testing.processes import (
    AFTER_THE_RUN,
    RETURN,
    Kill,
    body_of,
    run_and_kill,
)

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyTask, Sig
    from celery_idempotent.stores.base import Store

#: So many kills at most: a loop over many items is tried with few.
MAX_KILLS = 500

#: Kills that follow no line.
_BEFORE, _AFTER = 0, -1

#: The lease while records are in a database, whose clock a test cannot move.
_SHORT_LEASE_S = 1.0


@dataclass(frozen=True, slots=True)
class KilledAt:
    """A kill after ``line``; 0: before the first line, -1: after the run, before the acknowledgement.

    ``effects`` is what the operation had brought about after the second delivery, which ended in ``state``.
    ``verdict`` is ``ok``, ``doubled``, ``lost``, ``differs`` or ``failed``.
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
        """Did each kill leave the effects as they ought to be?"""
        return all(place.verdict == "ok" for place in self.places)

    def __str__(self) -> str:
        of = defaultdict(list)
        for place in self.places:
            of[place.line].append(place)
        lines = [f"{self.task}, killed after each line; without a kill: {self.expected!r}"]
        lines += _row(of[_BEFORE], "-", "before the first line")
        for line, text in self.source:
            lines += _row(of[line], f"{line}", text)
        lines += _row(of[_AFTER], "-", "after the run, before the acknowledgement")
        return "\n".join(lines)


def _row(places: Sequence[KilledAt], number: str, text: str) -> list[str]:
    bad = [place for place in places if place.verdict != "ok"]
    verdict = bad[0].verdict.upper() if bad else "ok" if places else ""
    found = f"    <- {bad[0].effects!r}, {bad[0].state}" if bad else ""
    return [f"{verdict:>8} {number:>4}  {text}{found}".rstrip()]


def crash_matrix(
    task: AnyTask,
    *,
    arguments: Callable[[str], Sequence[object] | Sig],
    effects: Callable[[str], object],
) -> CrashReport:
    """Kill a task after every line of its body, deliver it again, and look at its effects.

    Each kill is one of an operation of its own. ``arguments`` gets its name, a UUID as text, and returns the task's
    positional arguments, or a signature with arguments and options (``charge.s(1999).set(idempotency_key=name)``). They
    must give each operation a key of its own. ``effects`` gets the name too, and says what the operation brought about,
    as seen from outside of the process: the rows of a database, the lines of a file, what a provider's sandbox counted.
    It is compared with the effects of a run that nothing disturbed::

        def test_a_kill_at_any_line_charges_once(bank):
            crash_matrix(charge, arguments=lambda name: (name, 1999), effects=bank.count_charges)

    The task runs in a fork of this process. Records are in memory, and the lease of a killed run is over at once; in a
    Django database they stay there, with a lease of a second for the time being. The task's messages go nowhere.

    Returns the report.

    Raises:
        AssertionError: if a kill doubled, lost or changed an effect; its text is the report.
        IdempotencyError: on a system without fork, or where a fork would not see what the test wrote.
    """
    __tracebackhide__ = True  # pytest shows the test, and the report

    def begin() -> tuple[str, Any]:
        name = str(uuid.uuid4())
        given = arguments(name)
        call, args = (given, ()) if isinstance(given, Signature) else (task, given)
        return name, message_of(call, args, {})

    with _stage(task) as let_leases_end:
        name, message = begin()
        before = effects(name)
        first = run_and_kill(task, message)
        if first.delivery is None:
            raise AssertionError(
                f"{task.name} did not end, though nothing killed it: {first.trouble}"
            )
        expected, state = effects(name), first.delivery.state
        if expected == before:
            raise AssertionError(
                f"effects() sees nothing of a run of {task.name}: it is {before!r} as before"
            )
        # The last event is the return, which is of no line.
        lines = [_BEFORE, *first.lines[:-1], _AFTER]
        if len(lines) > MAX_KILLS:
            raise AssertionError(f"{task.name} executes {len(lines)} lines: give it less to do")
        killed = [(line, *begin()) for line in lines]
        for event, (line, _, message) in enumerate(killed):
            run_and_kill(task, message, kill=AFTER_THE_RUN if line == _AFTER else _at(event))
        let_leases_end()
        places = []
        for line, name, message in killed:
            second = run_and_kill(task, message, redelivered=True).delivery
            found, end = effects(name), "no end" if second is None else second.state
            same = "ok" if end == state else "failed"
            verdict = same if found == expected else _difference(found, expected)
            places.append(KilledAt(line, found, end, verdict))
    texts, number = inspect.getsourcelines(body_of(task))
    source = [(number + place, text.rstrip("\n")) for place, text in enumerate(texts)]
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
    (``end``: its effects are made, its result is not stored), or after the result is stored and before the message is
    acknowledged (``acknowledge``). See :func:`crash_matrix` for what happens where.

    Raises:
        AssertionError: if the run never comes to this line.
    """
    places: dict[object, Kill] = {
        "start": _at(0),
        "end": lambda _, line: line == RETURN,
        "acknowledge": AFTER_THE_RUN,
    }
    with _stage(task) as let_leases_end:
        message = message_of(task, args, kwargs)
        kill = places.get(at, lambda _, line: line == at)
        if run_and_kill(task, message, kill=kill).delivery is not None:
            raise AssertionError(f"{task.name} ended and never came to {at!r}")
        let_leases_end()
        ended = run_and_kill(task, message, redelivered=True)
    if ended.delivery is None:
        raise AssertionError(f"the second run of {task.name} did not end: {ended.trouble}")
    return ended.delivery


@contextmanager
def _stage(task: AnyTask) -> Iterator[Callable[[], None]]:
    """Give the task records of its own, and a function that lets the leases of dead owners end."""
    clock = FakeClock()
    with isolated_records(task.app, clock=clock) as store:
        if isinstance(store, MemoryStore):
            yield lambda: clock.advance(ms=_leases_end_in_ms(store))
        else:
            with redefined(task, idempotency_lease=_SHORT_LEASE_S):
                yield lambda: time.sleep(_leases_end_in_ms(store) / 1000)


def _leases_end_in_ms(store: Store) -> int:
    page = store.list(Selection(states=frozenset({State.PROCESSING})), limit=MAX_KILLS)
    return max([0, *((each.deadline_ms or 0) - page.now_ms + 1 for each in page.records)])


def _at(event: int) -> Kill:
    return lambda count, _: count == event


def _difference(effects: Any, expected: Any) -> str:
    """Say in one word how the effects differ: more, fewer, or just others."""
    with suppress(TypeError):
        sizes = [len(each) if isinstance(each, Sized) else each for each in (effects, expected)]
        if sizes[0] > sizes[1]:
            return "doubled"
        if sizes[0] < sizes[1]:
            return "lost"
    return "differs"
