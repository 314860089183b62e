"""Kills the worker, or one of its pool processes, wherever its tasks are at that moment.

A process that is stopped can be looked at before it is killed::

    SIGSTOP to the pool processes, at a random moment ── look where they are ── SIGKILL
                                                              └─ not now ────── SIGCONT

"Not now" is for two gaps that are not what is shown here. Kombu takes a message off the queue with
BRPOP and notes it as unacked in a second step: a worker killed between the two takes the message
with it, and no task class can bring it back. While the worker has as many messages as it may, one
may also wait in its socket, unread. And with the records in Redis, a run that is killed
after its write and before its key is settled will write again: that gap can only be closed where
write and record are one transaction, in the database (README, "what it promises").
"""

from __future__ import annotations

import contextlib
import enum
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from testproject.demo import whereabouts
from testproject.demo.broker import Broker
from testproject.demo.processes import Child, has_unread, is_asleep
from testproject.demo.whereabouts import Step, Where
from testproject.webhooks.models import Kind

__all__ = ["PLACES", "Killer", "Strike", "Target"]

_PATIENCE_S = 2.5
_LOOK_S = 0.02
_LOOKS = 3
#: How long the victims may go on before they are stopped: the moment is left to chance.
_CHANCE_S = 0.1
#: A task is given up as poison after three crashes (idempotency_max_crashes): stay below.
_CRASHES = 2
_CLAIMED = frozenset({Step.CLAIMED, Step.WORKING, Step.WRITING, Step.WRITTEN})
_UNSETTLED = frozenset({Step.WRITING, Step.WRITTEN})

BEFORE, BETWEEN, AFTER = "before", "between", "after"
#: Where a run was killed.
PLACES = {
    BEFORE: "before their write",
    BETWEEN: "between their write and its commit",
    AFTER: "after the commit, before the ack",
}
_PLACE_OF = {Step.WRITING: BETWEEN, Step.WRITTEN: BETWEEN, Step.SETTLED: AFTER}


class Target(enum.Enum):
    """What a SIGKILL is sent to."""

    WORKER = "the worker"
    PROCESS = "a pool process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A kill, and where the runs were that it ended."""

    target: Target
    victims: tuple[Where, ...]

    def killed(self, kind: Kind) -> Counter[str]:
        """Count the killed runs of a kind by place."""
        return Counter(_place(each) for each in self.victims if each.kind == kind)

    def story(self) -> str:
        """Tell whom it struck."""
        return " ".join(
            f"{kind.label}: "
            + ", ".join(f"{killed[place]} {PLACES[place]}" for place in killed)
            + "."
            for kind in Kind
            if (killed := self.killed(kind))
        )


class Killer:
    """Owns the worker: starts it, kills it, starts it again.

    ``anywhere``: also between a run's write and the settling of its key, which then has to be one transaction.
    """

    def __init__(
        self,
        worker: Child,
        *,
        directory: Path,
        broker: Broker,
        chance: random.Random,
        anywhere: bool,
    ) -> None:
        self.strikes: list[Strike] = []
        self._worker = worker
        self._directory = directory
        self._broker = broker
        self._chance = chance
        self._anywhere = anywhere
        self._crashes: Counter[str] = Counter()
        self._killed: set[int] = set()

    def start_worker(self) -> None:
        """Start the worker; what an earlier one's processes noted is over."""
        whereabouts.clear(self._directory)
        self._worker.start()

    def restart_worker(self) -> None:
        """Stop the worker warmly and start it again: it restores, at its start, what is overdue."""
        self._worker.stop(grace_s=10)
        self.start_worker()

    def strike(self, target: Target) -> Strike | None:
        """Kill somewhere in the middle of things, or not at all if that cannot be for some seconds."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            self._worker.check()
            time.sleep(self._chance.uniform(0, _CHANCE_S))
            strike = self._strike_now(target)
            if strike is not None:
                self.strikes.append(strike)
                if target is Target.WORKER:
                    self.start_worker()
                return strike
        return None

    def busy(self) -> bool:
        """Is a pool process in one of the two tasks?"""
        return any(where.at_work for where in self._alive())

    def _alive(self) -> list[Where]:
        """Tell where the pool processes are; a killed one is there until its parent has noticed."""
        return [each for each in whereabouts.find(self._directory) if each.pid not in self._killed]

    def _strike_now(self, target: Target) -> Strike | None:
        with self._stopped() as stopped:
            everybody = self._alive()
            if target is Target.WORKER and not self._nothing_in_the_gap(everybody):
                return None
            everybody = self._alive()
            if not stopped.issuperset(each.pid for each in everybody):
                return None  # one was started meanwhile, and goes on while we look
            victims = [each for each in everybody if each.at_work]
            if target is Target.PROCESS:
                victims = self._one_of(victims)
            if not any(map(self._is_held, victims)) or not all(map(self._may_die, victims)):
                return None
            if target is Target.WORKER:
                self._worker.kill()
            else:
                os.kill(victims[0].pid, signal.SIGKILL)
                self._killed.add(victims[0].pid)
        self._crashes.update(each.delivery_id for each in victims if self._is_held(each))
        return Strike(target=target, victims=tuple(victims))

    def _one_of(self, victims: list[Where]) -> list[Where]:
        """Choose one that holds its key; in the gap that a transaction closes, where there is one."""
        steps = _UNSETTLED if self._anywhere else _CLAIMED
        held = [each for each in victims if self._is_held(each) and each.step in steps]
        good = [each for each in held if self._may_die(each)]
        return [self._chance.choice(good)] if good else []

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[set[int]]:
        """Stop the pool processes where they are; in the end, continue those that are still there."""
        pids = {each.pid for each in self._alive()}
        try:
            _signal(pids, signal.SIGSTOP)
            time.sleep(_LOOK_S)  # in the kernel's own time
            yield pids
        finally:
            _signal(pids, signal.SIGCONT)

    def _nothing_in_the_gap(self, everybody: Collection[Where]) -> bool:
        """Wait until the worker, whose processes take nothing, fetches nothing more; False if it does.

        What it fetched last may be on its way from the socket to "unacked", and it may wait for a processor to take it
        there: so it has to be asleep, each time that we look. And nothing may wait in a socket: where a message arrives
        while the worker has as many as it may, kombu reads it only when another is done.
        """
        parents = {each.parent for each in everybody}
        deadline = time.monotonic() + _PATIENCE_S / 5
        looks = 0
        while looks < _LOOKS and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            still = all(map(is_asleep, parents)) and not any(map(has_unread, parents))
            still = still and not self._broker.fetching()
            looks = looks + 1 if still else 0
        return looks == _LOOKS

    def _is_held(self, where: Where) -> bool:
        return where.kind == Kind.IDEMPOTENT and where.step in _CLAIMED

    def _may_die(self, where: Where) -> bool:
        if where.kind != Kind.IDEMPOTENT:
            return True
        if where.step in _UNSETTLED and not self._anywhere:
            return False
        return self._crashes[where.delivery_id] < _CRASHES


def _place(where: Where) -> str:
    if where.kind == Kind.PLAIN and where.step is Step.WRITTEN:
        return AFTER  # its own transaction is over
    return _PLACE_OF.get(where.step, BEFORE)


def _signal(pids: Collection[int], which: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, which)
