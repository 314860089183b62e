"""The benchmarks, from the command line: ``python -m benchmarks --help``."""

from __future__ import annotations

import random
import secrets
import signal
import sys

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import (
    databases,
    http,
    instructions,
    peers,
    publish,
    report,
    saturation,
    server,
    sql,
    worker,
)
from benchmarks.session import BenchmarkError, Session, machine

_BENCHMARKS = {
    "worker": (worker.run, "Worker time of an empty task, from one start to the next"),
    "publish": (publish.run, "Time of apply_async"),
    "peers": (peers.run, "Other libraries, and ours"),
    "sql": (sql.run, "Time of a verb on a database, p50"),
    "http": (http.run, "User-space instructions that a door adds to a request"),
    "instructions": (instructions.run, "User-space instructions"),
    "server": (server.run, "Instructions of the server for a task"),
}


@click.command(
    epilog="A figure never fails the run: exit code 0, or 2 if it could not be measured."
)
@click.argument("names", nargs=-1, type=click.Choice(list(_BENCHMARKS)))
@click.option("--quick", is_flag=True, help="A look, in three minutes or so.")
@click.option("--saturated", is_flag=True, help="With server: verbs of many clients at once.")
@click.option("--seed", type=int, help="For the same order of blocks again.")
def main(names: tuple[str, ...], quick: bool, saturated: bool, seed: int | None) -> None:
    """Measure what IdempotentTask costs, against celery.Task in the same run, on a Redis of its own. Each figure is a
    median, beside it the quartiles.

    Without names: all; http, instructions, server only with valgrind and without --quick, sql only with a database.
    """
    chosen = names or [name for name in _BENCHMARKS if _possible(name, quick=quick)]
    seed = secrets.randbelow(10_000) if seed is None else seed
    console = Console()
    if not console.is_terminal:
        console.width = 130
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("starting")
            session = Session(quick, random.Random(seed), progress, bar)
            about = machine(session)
            console.print(
                " · ".join(f"{name} {value}" for name, value in about.items()), style="dim"
            )
            for name in chosen:
                run, title = _BENCHMARKS[name]
                if saturated and name == "server":
                    run, title = saturation.run, "Verbs in a second of the server's processor"
                report.show(console, f"{name}: {title}", list(run(session)))
    except BenchmarkError as trouble:
        print(f"The benchmark could not be run: {trouble}", file=sys.stderr)
        sys.exit(2)
    console.print(f"\nSeed {seed}. How it is measured: docs/comparison.md", style="dim")


def _possible(name: str, *, quick: bool) -> bool:
    if name in ("http", "instructions", "server"):
        return instructions.available() and not quick
    return name != "sql" or bool(databases.available())


if __name__ == "__main__":
    main()
