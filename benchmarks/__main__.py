"""The benchmarks, from the command line: ``python -m benchmarks --help``."""

from __future__ import annotations

import argparse
import json
import random
import secrets
import signal
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import (
    http,
    instructions,
    peers,
    postgresql,
    publish,
    report,
    sql,
    verbs,
    worker,
)
from benchmarks.figures import Figure
from benchmarks.session import BenchmarkError, Session, machine

__all__ = ["main"]

_BENCHMARKS = {
    "worker": (worker.run, "Worker time of an empty task, from one start to the next"),
    "publish": (publish.run, "Time of apply_async"),
    "peers": (peers.run, "Other libraries, and ours"),
    "verbs": (verbs.run, "Time of a verb, p50"),
    "sql": (sql.run, "Time of a verb on PostgreSQL, p50"),
    "http": (http.run, "Time that @idempotent_view adds to a request"),
    "instructions": (instructions.run, "User-space instructions"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 whatever the figures are, 2 if they could not be measured."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in _BENCHMARKS]:
        parser.error(f"there is no benchmark {', '.join(unknown)}: see --help")
    names = options.names or [name for name in _BENCHMARKS if _possible(name, options)]
    # What a program reads goes to stdout alone.
    console = Console(stderr=options.json)
    if not console.is_terminal:
        console.width = 130
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    figures: list[Figure] = []
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("starting")
            session = Session(options.quick, random.Random(options.seed), progress, bar)
            about = machine(session)
            console.print(
                " · ".join(f"{name} {value}" for name, value in about.items()), style="dim"
            )
            for name in names:
                run, title = _BENCHMARKS[name]
                measured = list(run(session))
                report.show(console, f"{name}: {title}", measured)
                figures += measured
    except BenchmarkError as trouble:
        print(f"The benchmark could not be run: {trouble}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if options.json:
        json.dump(report.as_json(about, figures), sys.stdout, indent=2)
        print()
    else:
        console.print(f"\nSeed {options.seed}. How it is measured: docs/benchmarks.md", style="dim")
    return 0


def _possible(name: str, options: argparse.Namespace) -> bool:
    if name == "instructions":
        return instructions.available() and not options.quick
    return name != "sql" or postgresql.available()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure what IdempotentTask costs, against celery.Task in the same run, on a"
        " Redis of its own. Each figure is a median, beside it the quartiles.",
        epilog="A figure never fails the run: exit code 0, or 2 if it could not be measured.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"which: {', '.join(_BENCHMARKS)}; default: all, instructions only with valgrind and"
        " without --quick, sql only with a PostgreSQL",
    )
    parser.add_argument("--quick", action="store_true", help="a look, in three minutes or so")
    parser.add_argument("--json", action="store_true", help="print JSON; tables go to stderr")
    parser.add_argument(
        "--seed",
        type=int,
        default=secrets.randbelow(10_000),
        help="for the same order of blocks again; default: a new one",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
