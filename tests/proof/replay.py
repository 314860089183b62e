"""Asks a store, and the table alone, the calls of the model, at one stopped clock, and compares."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.testing import FakeClock
from tests.proof.model import (
    KEY,
    MOST,
    SCOPES,
    TICK,
    Call,
    Graph,
    Scope,
    TableStore,
    explored,
    number_of,
    perform,
    stored_of,
)  # fmt: skip


@dataclass
class Stand:
    """A store whose clock the test sets; ``flush`` empties it, ``fault`` breaks its cache before the next question."""

    name: str
    store: Any
    clock: FakeClock = field(default_factory=FakeClock)

    def pass_time(self, ms: int) -> None:
        self.clock.advance(ms)

    def flush(self) -> None:
        self.store.records.clear()
        self.store.highest_token = 0

    def fault(self, chance: random.Random) -> None:
        pass

    def same(self, ours: Any, theirs: Any) -> bool:
        return bool(ours == theirs)


class Disagreement(Exception):
    """A store answered otherwise than the table, or wrote another record."""


class Replay:
    """Asks the table and a store the same, with the tokens and the attempts that there are."""

    def __init__(self, stand: Stand, seed: int = 1) -> None:
        self.stand, self.table, self.asked = stand, TableStore(), 0
        self.chance, self._next = random.Random(seed), 0
        self.trail: deque[str] = deque(maxlen=12)

    @property
    def node(self) -> int:
        return life_aside(number_of(self.table.stored, self.now_ms))

    @property
    def now_ms(self) -> int:
        return self.stand.clock() // 1000

    def begin(self) -> None:
        self.stand.flush()
        self.table.stored, self.table.highest = None, 0
        self.trail.clear()

    def ask(self, call: Call, *, look: bool = True) -> None:
        """Do one of the model's calls, or let time pass; then look at the record."""
        stand = self.stand
        if call.verb == "tick":
            stand.pass_time(int(call.how))
            self.trail.append("a tick")
        else:
            stand.fault(self.chance)
            # A hybrid does not change a record whose copy may be in a cache that does not answer.
            with contextlib.suppress(StoreUnavailable):
                theirs = perform(stand.store, *self.question(call))
                self._compare(self.ask_table(call), theirs)
        if look:
            self.look()

    def ask_table(self, call: Call) -> Any:
        """Do it by the table alone."""
        self.trail.append(f"{call.verb} {call.task} {call.how} {call.token or ''}".strip())
        self.table.now_us = self.stand.clock()
        if call.verb == "tick":
            self.stand.clock.advance(int(call.how))
            return None
        question, self._next = self.question(call), self._next + 1
        return perform(self.table, *question)

    def look(self) -> None:
        """Compare the records."""
        self.table.now_us = self.stand.clock()
        self._compare(self.table.get(KEY), self.stand.store.get(KEY))

    def _compare(self, ours: Any, theirs: Any) -> None:
        self.asked += 1
        if not self.stand.same(ours, theirs):
            way = " · ".join(self.trail)
            raise Disagreement(f"{self.stand.name}, after {way}: {theirs}, but by the table {ours}")

    def question(self, call: Call) -> tuple[Any, ...]:
        stored = self.table.stored
        again = call.same and stored is not None
        attempt = stored.attempt if again and stored else b"%08d" % self._next
        token, claim = call.token, None
        if token is not None:
            # No token is below zero, also where there has been none.
            token = max(token + (stored.record.token if stored else self.table.highest or 1), 0)
        if call.claim:
            claim = replace(stored_of(call.claim, 0).record, token=token or 0)
            if stored is not None:  # the model counts to two
                claim.attempts = stored.record.attempts
        return call, attempt, token, claim


@cache
def life_aside(node: int) -> int:
    """Return a record but for how long it lives, which no rule looks at."""
    return number_of(stored_of(node, 0)._replace(expires_ms=TICK)) if node else 0


@cache
def shape(node: int) -> object:
    """Return what most rules look at."""
    if not node:
        return None
    record = stored_of(node, 0).record
    over = record.deadline_ms is not None and record.deadline_ms <= 0
    kept = bool(record.steps), record.message is None
    return record.state, over, record.swept, kept, record.reserved


def graph_of(most: int = MOST, scopes: Sequence[Scope] = SCOPES) -> Graph:
    """Return the transitions of scopes together."""
    together: Graph = {}
    for scope in scopes:
        for node, edges in (explored(scope, most).graph or {}).items():
            if node and number_of(stored_of(node, 0)) != node:
                continue  # a deadline that is over by as much as a clock is set back
            known = together.setdefault(life_aside(node), {})
            for call, after in edges.items():
                # One that dies with this tick lives on elsewhere.
                known[call] = life_aside(after) or known.get(call, 0)
    return together


#: So many worlds of each scope make a small graph.
SMALL = 2_500


def graph_for(name: str, most: int = MOST) -> Graph:
    """Return the graph for a store. A task's calls have its options in common: so a cache may go by those of each."""
    return graph_of(most, [scope for scope in SCOPES if name != "hybrid" or not scope.each_runs])
