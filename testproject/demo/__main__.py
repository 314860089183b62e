"""The demo, from the command line: ``python -m testproject.demo --help``."""

from __future__ import annotations

import importlib.util
import secrets
import signal
import sys
from pathlib import Path

import click

from testproject.embedded import ServerUnavailable
from testproject.processes import ProcessError, Stopped, stoppable

__all__ = ["main"]

_SAMPLE = Path(__file__).resolve().parent.parent / "sample_events.jsonl"


@click.command(
    epilog="Exit code: 0 each delivery is in the idempotent ledger exactly once, 1 it is not, "
    "2 the demo could not be performed."
)
@click.option(
    "--events",
    type=click.Path(path_type=Path),
    envvar="EVENTS",
    default=_SAMPLE,
    metavar="PATH",
    help="A .jsonl or .jsonl.gz file with event, delivery and payload on each line; default: $EVENTS, else a sample.",
)
@click.option(
    "--store",
    type=click.Choice(["redis", "django", "hybrid"]),
    envvar="STORE",
    default="redis",
    help="Where the records are: in Redis, in the ledger's own database (then kills fall anywhere), or there with a"
    " cache in Redis; default: $STORE, else redis.",
)
@click.option("--seed", type=int, help="For the same deliveries, work and targets again.")
@click.option("--concurrency", type=click.IntRange(2, 4), default=4, help="Pool processes: 4.")
@click.option("--timeout", type=float, default=240.0, help="When to give up, in seconds: 240.")
@click.option("--json", is_flag=True, help="Print the report as JSON.")
@click.option("--keep", is_flag=True, help="Keep the logs and the database.")
def main(
    events: Path,
    store: str,
    seed: int | None,
    concurrency: int,
    timeout: float,
    json: bool,
    keep: bool,
) -> None:
    """Deliver webhooks as the internet does to a Celery worker that is killed at work, and count what became of them,
    with and without IdempotentTask.
    """
    missing = [name for name in ("rich", "django") if importlib.util.find_spec(name) is None]
    if missing:
        _fail(f"The demo needs {' and '.join(missing)}: make demo", 2)
    from testproject.demo.play import perform
    from testproject.demo.traffic import load

    try:
        with stoppable():
            code = perform(
                load(events),
                seed=secrets.randbelow(10_000) if seed is None else seed,
                processes=concurrency,
                store=store,
                timeout_s=timeout,
                as_json=json,
                keep=keep,
            )
    except (ProcessError, ServerUnavailable) as trouble:
        _fail(f"The demo could not be performed: {trouble}", 2)
    except Stopped as stopped:
        _fail(f"Stopped by {signal.Signals(stopped.signum).name}.", 128 + stopped.signum)
    sys.exit(code)


def _fail(text: str, code: int) -> None:
    print(text, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
