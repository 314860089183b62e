"""Every pair of verbs by two clients: the second at every position of the first, an answer lost at every position.

A verb sends a few commands, or statements. At one of these the second client's verb is done from beginning to end::

    first     look ─┬─ swap                before     the second comes before this command
    second          └─ settle              lost       after it, whose answer is lost: the first asks again
                                           resent     after it, and the client sends it once more by itself

Both answers and the record must be those of one order of the verbs by the table, a repeated one counted twice.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from redis import exceptions

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.records import Record, SweepReport
from tests.proof import Options, Row
from tests.proof.model import KEY, Call, Graph, perform
from tests.proof.replay import SMALL, Disagreement, Replay, Stand, graph_for, shape
from tests.proof.traces import on_each, opened, rows_of
from tests.stores.shifted import LinkProxy

MODES = ("before", "lost", "resent")
ORDERS, ORDERS_IF_LOST = ("12", "21"), ("12", "21", "121", "112", "211")


class Position:
    """The command of the first client that the second comes at."""

    def __init__(self) -> None:
        self.left, self.mode = -1, ""
        self.second: Callable[[], object] = lambda: None

    def at(self, mode: str, number: int, second: Callable[[], object]) -> None:
        self.left, self.mode, self.second = number, mode, second

    def pass_(self, command: Callable[[], Any], lost: Exception) -> Any:
        """Execute a command of the first client, and of the second, which comes once."""
        self.left -= 1
        if self.left != -1:
            return command()
        if self.mode == "before":
            self.second()
            return command()
        command()
        self.second()
        if self.mode == "resent":
            return command()
        raise lost


class PositionedLink(LinkProxy):
    def __init__(self, link: Any, position: Position) -> None:
        super().__init__(link)
        self._position = position

    def exchange(self, commands: Sequence[Any], node: Any = None) -> list[Any]:
        lost = exceptions.TimeoutError("Timeout reading from socket")
        answers: list[Any] = self._position.pass_(lambda: self._link.exchange(commands, node), lost)
        return answers


@contextlib.contextmanager
def positioned(stand: Stand) -> Iterator[Position]:
    """Count the commands of a store."""
    position = Position()
    if hasattr(stand.store, "_link"):
        link = stand.store._link
        stand.store._link = PositionedLink(link, position)
        yield position
        stand.store._link = link
        return
    from django.db import InterfaceError

    from celery_idempotent.django.sql.connections import Session

    execute = Session._execute

    def counted(session: Session, *args: Any) -> Any:
        return position.pass_(
            lambda: execute(session, *args), InterfaceError("connection already closed")
        )

    Session._execute = counted  # type: ignore[assignment, method-assign]
    yield position
    Session._execute = execute  # type: ignore[method-assign]


@dataclass
class Raced:
    """How many pairs were tried, each at every position, in how many runs."""

    pairs: int = 0
    of: int = 0
    runs: int = 0
    seconds: float = 0.0
    broken: str = ""


def race(graph: Graph, stand: Stand, *, seed: int = 1, seconds: float = 1e9) -> Raced:
    """Try every pair of verbs at a record of every shape, in an order that chance chooses, for so many seconds."""
    began, replay, raced = time.monotonic(), Replay(stand), Raced()
    ways = shapes(graph)
    pairs = [(way, a, b) for way, calls in ways for a in calls for b in calls]
    random.Random(seed).shuffle(pairs)
    raced.of = len(pairs)
    modes = MODES if hasattr(stand.store, "_link") else MODES[: 1 if stand.name == "sqlite" else 2]
    with positioned(stand) as position:
        try:
            for way, first, second in pairs:
                if time.monotonic() > began + seconds:
                    break
                for mode in modes:
                    number = 0
                    while _run(replay, way, first, second, mode, number, position):
                        number += 1
                        raced.runs += 1
                raced.pairs += 1
        except Disagreement as disagreement:
            raced.broken = str(disagreement)
    raced.seconds = time.monotonic() - began
    return raced


def shapes(graph: Graph) -> list[tuple[list[Call], list[Call]]]:
    """Return the shortest way to a record of every shape, with one call of each kind that came to it."""
    ways: dict[int, list[Call]] = {0: []}
    found: dict[object, tuple[list[Call], list[Call]]] = {}
    for node in (queue := [0]):
        way, kinds = ways[node], dict[object, Call]()
        for call, after in graph.get(node, {}).items():
            if after not in ways:
                ways[after] = [*way, call]
                queue.append(after)
            if call.verb != "tick" and call.token in (None, 0):
                kinds.setdefault((call.verb, call.task, call.how, call.same), call)
        found.setdefault(shape(node), (way, list(kinds.values())))
    return list(found.values())


def _run(
    replay: Replay,
    way: list[Call],
    first: Call,
    second: Call,
    mode: str,
    number: int,
    position: Position,
) -> bool:
    """Bring the key to a state and let the two meet there; ``False``: the first has no such position."""
    stand, table = replay.stand, replay.table
    replay.begin()
    for call in way:
        replay.ask(call)
    ours, theirs, answers = replay.question(first), replay.question(second), list[Any]()
    position.at(mode, number, lambda: answers.append(perform(stand.store, *theirs)))
    try:
        mine = perform(stand.store, *ours)
    except StoreUnavailable:
        mine = perform(stand.store, *ours)
    if not answers:
        position.left = -1
        return False
    start, table.now_us = (table.stored, table.highest), stand.clock()

    def by_table(order: str) -> tuple[Any, ...]:
        table.stored, table.highest = start
        known: dict[str, Any] = {"1": SweepReport(), "2": None}
        for which in order:
            known[which] = perform(table, *(ours if which == "1" else theirs))
        return known["1"], known["2"], table.get(KEY)

    outcome = (mine, answers[0], stand.store.get(KEY))
    # A client that sends a write once more by itself finds its own, unless the second wrote, or it was a release.
    by_table("1")
    written = table.stored
    perform(table, *theirs)
    quiet = table.stored is written
    twice = mode == "lost" or (mode == "resent" and not (quiet and first.verb != "release"))
    possible = [by_table(each) for each in (ORDERS_IF_LOST if twice else ORDERS)]
    if isinstance(mine, SweepReport):
        # What another client wrote meanwhile is left to the next sweep.
        possible.append(by_table("2"))
    alone = by_table("1"), by_table("2")
    if hasattr(stand.store, "_link") and start[0] and alone[0][2] is alone[1][2] is None:
        # A deletion by another client is taken for one's own whose answer was lost.
        possible.append((alone[0][0], alone[1][1], None))
    if outcome not in possible:
        pair = " × ".join(f"{call.verb} {call.task}{call.how}" for call in (first, second))
        line = " · ".join([*(call.verb for call in way), pair, mode, f"{number}"])
        wanted = [*map(brief, possible)]
        raise Disagreement(f"{stand.name}: {line}: {brief(outcome)}, but by the table {wanted}")
    return True


def brief(outcome: tuple[Any, ...]) -> str:
    """Return an outcome without its records' text."""
    record = outcome[-1]
    after = "none"
    if isinstance(record, Record):
        after = f"{record.state.name} {record.token} crashes {record.crashes}"
    answers = [str(x) if isinstance(x, bool) else type(x).__name__ for x in outcome[:2]]
    return " / ".join([*answers, after])


def run(options: Options) -> list[Row]:
    graph, seconds = graph_for("redis", SMALL), 3600.0 if options.full else 45.0

    def do(name: str) -> Raced:
        with opened(name) as stand:
            return race(graph, stand, seed=options.seed, seconds=seconds)

    stores = ("redis", "sqlite", "postgresql", "mariadb")
    much = "{0.pairs:,} of {0.of:,} pairs, {0.runs:,} runs".format
    return rows_of("races", on_each(do, stores), much)
