"""The demo, from the command line: ``python -m testproject.demo --help``."""

from __future__ import annotations

import secrets
import signal
import sys
from pathlib import Path

import click

from testproject.embedded import ServerUnavailable
from testproject.serve import ProcessError, Stopped, be_stoppable

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
    help="A .jsonl file with event, delivery and payload on each line; default: $EVENTS, else a sample.",
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
@click.option("--json", is_flag=True, help="Print the report as JSON.")
def main(events: Path, store: str, seed: int | None, json: bool) -> None:
    """Deliver webhooks as the internet does to a Celery worker that is killed at work, and count what became of them,
    with and without IdempotentTask.
    """
    from testproject.demo.play import perform
    from testproject.demo.traffic import load

    try:
        be_stoppable()
        chosen = secrets.randbelow(10_000) if seed is None else seed
        code = perform(load(events), seed=chosen, store=store, as_json=json)
    except (ProcessError, ServerUnavailable) as trouble:
        _fail(f"The demo could not be performed: {trouble}", 2)
    except Stopped as stopped:
        _fail(f"Stopped by {signal.Signals(stopped.args[0]).name}.", 128 + stopped.args[0])
    sys.exit(code)


def _fail(text: str, code: int) -> None:
    print(text, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
