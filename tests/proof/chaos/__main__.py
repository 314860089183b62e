"""Chaos with a seed: ``python -m tests.proof.chaos --seed 7 --minutes 2 --store redis --broker rabbitmq``.

Real workers, calls of every kind, and faults of every kind under them; a seed makes the same plan each time. With
``--library celery,once,singleton`` the same calls and faults meet other libraries.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

from tests.proof import Options, Row, show
from tests.proof.chaos import plan as planning
from tests.proof.chaos.arena import Arena
from tests.proof.chaos.checker import Checker, missing
from tests.proof.chaos.servers import BROKERS, STORES, Servers
from tests.proof.chaos.tasks import CANVASES, LIBRARIES

QUIET_S, LONGEST_S = 30, 200
COLUMNS = ("calls", "operations", "faults", "effects", "lost", "doubled", "wrong")


def run(
    seed: int, seconds: float, store: str, broker: str, library: str = "ours", rate: float = 25
) -> Checker:
    """Play the plan of a seed, say what was found, and return it."""
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    fused = store == "redis" and seed % 2 == 1
    # Celery counts a chord's parts where the results are.
    plan = planning.make(seed, seconds, rate, store, broker, chords=not fused)
    begun = time.monotonic()
    servers = Servers(store, broker, directory)
    try:
        with Arena(servers, directory, library, fused=fused) as arena:
            arena.play(plan)
            arena.rest(lambda: not missing(arena.notes()), quiet_s=QUIET_S, longest_s=LONGEST_S)
            found = Checker(arena.notes(), store=store, broker=broker, library=library)
            gone = {unit for unit in missing(arena.notes()) if unit.split()[0] not in CANVASES}
            # A lost call is repeated under its key, as the documentation advises: it has to run then.
            again = [each for each in plan.calls if f"{each.kind} {each.key}" in gone]
            again = again if library == "ours" else []
            for call in again:
                arena.submit(call)
            left = lambda: missing(arena.notes()) & {f"{x.kind} {x.key}" for x in again}  # noqa: E731
            arena.rest(lambda: not left(), quiet_s=QUIET_S, longest_s=LONGEST_S)
            found.wrong += [f"{unit} does not run when it is called again" for unit in left()]
    finally:
        servers.close()
    for line in (*found.doubled, *found.lost, *(f"missed: {each}" for each in found.missed)):
        say(line)
    say(*(f"WRONG: {each}" for each in found.wrong))
    counts = ", ".join(f"{n} {name}" for name, n in zip(COLUMNS, figures(found), strict=True))
    took = time.monotonic() - begun
    say(f"seed {seed}, plan {plan.digest}, {store}, {broker}, {library}, {took:.0f} s: {counts}")
    if found.wrong:
        say(f"the notes and the logs of the workers: {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return found


def rows(options: Options) -> list[Row]:
    """Return the rows of ``make proof``."""
    pairs = [(store, broker) for store in STORES for broker in BROKERS]
    chosen = pairs if options.full else [pairs[options.seed % len(pairs)]]
    # Each in a process of its own, for Django and Celery are set up once in a process.
    with get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        return processes.starmap(_row, [(options.seed, *pair) for pair in chosen], 1)


def _row(seed: int, store: str, broker: str) -> Row:
    did = run(seed, 60, store, broker)
    calls, operations, faults, _, lost, doubled, wrong = figures(did)
    return Row(
        name="chaos",
        what=f"{store}, {broker}: {len(did.faults)} kinds of fault",
        how_many=f"{calls} calls, {operations} operations, {faults} faults",
        found=f"{wrong} wrong; by a named fault {doubled} doubled, {lost} lost",
        command=f"python -m tests.proof.chaos --seed {seed} --store {store} --broker {broker}",
        held=not wrong,
    )


def figures(found: Checker) -> tuple[int, ...]:
    """Return the numbers of a run, in the order of the columns."""
    operations = found.calls + found.verbs.total()
    ends = (len(found.lost), len(found.doubled), len(found.wrong))
    return found.calls, operations, found.faults.total(), found.effects, *ends


def say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=25, help="calls a second")
    parser.add_argument("--store", default="redis", help=f"{', '.join(STORES)}, or all")
    parser.add_argument("--broker", default="redis", help=f"{', '.join(BROKERS)}, or all")
    parser.add_argument("--library", default="ours", help=f"some of {', '.join(LIBRARIES)}")
    args = parser.parse_args()
    rows: list[Sequence[object]] = [("store", "broker", "library", *COLUMNS)]
    kinds: Counter[str] = Counter()
    for store in STORES if args.store == "all" else args.store.split(","):
        for broker in BROKERS if args.broker == "all" else args.broker.split(","):
            for library in args.library.split(","):
                found = run(args.seed, args.minutes * 60, store, broker, library, args.rate)
                rows.append((store, broker, library, *figures(found)))
                kinds += found.faults
    show(rows)
    say(f"\n{len(kinds)} kinds of fault: " + ", ".join(f"{x} {n}" for x, n in kinds.most_common()))
    return any(row[-1] for row in rows[1:])


if __name__ == "__main__":
    sys.exit(main())
