"""What a seed decides: the calls and the faults of a run, each with its time."""

from __future__ import annotations

import hashlib
import random
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.proof.chaos.faults import FAULTS, Fault
from tests.proof.chaos.tasks import CANVASES, KINDS

#: By lane, whose faults follow each other: the shortest and the longest pause, in seconds.
PAUSES = {"worker": (1.5, 5.0), "store": (1.5, 4.5), "broker": (5.0, 10.0)}


class Call(NamedTuple):
    """A call, and when a caller makes it."""

    at: float
    kind: str
    key: str
    before: float
    after: float
    task_id: str
    hangs: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012  nobody writes to it


class Strike(NamedTuple):
    """A fault, when it begins, how long it lasts, and the number that chooses its target."""

    at: float
    fault: Fault
    seconds: float
    chance: float


class Plan(NamedTuple):
    calls: Sequence[Call]
    strikes: Sequence[Strike]

    @property
    def digest(self) -> str:
        """The same for the same seed."""
        strikes = [(each.at, each.fault.name, each.seconds, each.chance) for each in self.strikes]
        return hashlib.sha256(repr((self.calls, strikes)).encode()).hexdigest()[:12]


def make(
    seed: int, seconds: float, rate: float, store: str, broker: str, *, chords: bool = True
) -> Plan:
    """Return the plan of a seed, with so many calls a second."""
    chance = random.Random(f"{seed} {store} {broker}")
    is_sql = store in ("postgresql", "mariadb", "hybrid")
    left_out = {*([] if is_sql else ["atomic"]), *([] if chords else ["chord"])}
    kinds = [each for each in KINDS if each not in left_out]
    calls: list[Call] = []
    keys: dict[str, list[str]] = {each: [] for each in kinds}
    at = 0.0
    while (at := at + chance.expovariate(rate)) < seconds:
        (kind,) = chance.choices(kinds, [KINDS[each][0] for each in kinds])
        known, key = keys[kind], f"{seed}-{len(calls)}"
        if kind == "until":
            key = f"{seed}-{chance.randrange(5)}"
        elif kind not in CANVASES and len(known) > 3 and chance.random() < 0.35:
            key = chance.choice(known[-30:])
        known.append(key)
        naps = random.Random(key)  # the same for the same key
        long = 20 if naps.random() < 0.04 else 1  # for a fault to come between
        before, after = (round(long * naps.expovariate(40), 3) for _ in range(2))
        task_id = str(uuid.UUID(int=chance.getrandbits(128), version=4))
        calls.append(Call(round(at, 3), kind, key, before, after, task_id))
    strikes = []
    for lane, pauses in PAUSES.items():
        target = broker if lane == "broker" else store
        possible = [x for x in FAULTS if x.lane == lane and (not x.only or target in x.only)]
        at, bag = 1.0, list[Fault]()
        while at < seconds:
            bag = bag or chance.sample(possible, len(possible))  # each once, then each again
            at += chance.uniform(*pauses)
            strike = Strike(at, bag.pop(), 0.0, chance.random())
            strike = strike._replace(seconds=chance.uniform(*strike.fault.seconds))
            if (at := at + strike.seconds) < seconds:
                strikes.append(strike)
    return Plan(calls, strikes)
