"""The demo, from the command line: ``python -m testproject.demo --help``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

__all__ = ["main"]

STORES = ("redis", "django", "hybrid")
DATABASES = ("postgresql", "sqlite")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stopped(BaseException):
    """The demo was asked to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the ledger is right, 1 if it is not, 2 if the demo could not be performed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.store not in STORES:  # the default is $STORE
        parser.error(f"STORE is {', '.join(STORES[:-1])} or {STORES[-1]}, not {options.store!r}")
    missing = [name for name in ("rich", "django") if importlib.util.find_spec(name) is None]
    if missing:
        need = " and ".join(missing)
        return _fail(f"The demo needs {need}: make demo", 2)
    from testproject.demo.events import load
    from testproject.demo.performance import perform
    from testproject.demo.processes import DemoError

    try:
        with _stoppable():
            return perform(
                load(options.events),
                seed=options.seed,
                processes=options.concurrency,
                store=options.store,
                database=options.database,
                timeout_s=options.timeout,
                as_json=options.json,
                keep=options.keep,
            )
    except DemoError as trouble:
        return _fail(f"The demo could not be performed: {trouble}", 2)
    except _Stopped as stopped:
        return _fail(f"Stopped by {signal.Signals(stopped.signum).name}.", 128 + stopped.signum)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m testproject.demo",
        description=(
            "Deliver webhooks as the internet does to a Celery worker that is killed at work, and"
            " count what became of them, with and without IdempotentTask."
        ),
        epilog="Exit code: 0 each delivery is in the idempotent ledger exactly once, 1 it is not, "
        "2 the demo could not be performed.",
    )
    sample = Path(__file__).resolve().parent.parent / "sample_events.jsonl"
    parser.add_argument(
        "--events",
        type=Path,
        default=os.environ.get("EVENTS") or sample,
        metavar="PATH",
        help="a .jsonl or .jsonl.gz file with event, delivery and payload on each line; default:"
        " $EVENTS, else a small sample",
    )
    parser.add_argument(
        "--store",
        choices=STORES,
        default=os.environ.get("STORE") or STORES[0],
        help="where the records are: in Redis, in the ledger's own database (then kills fall anywhere), or there with"
        " a cache in Redis; default: $STORE, else redis",
    )
    parser.add_argument(
        "--database",
        choices=DATABASES,
        help="where the ledger is; default: SQLite with --store redis, else PostgreSQL if one can be started, else"
        " SQLite",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=secrets.randbelow(10_000),
        help="for the same deliveries, work and targets again; default: a new one",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        choices=(2, 3, 4),
        default=4,
        help="pool processes of the worker; default: 4",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=240.0,
        metavar="SECONDS",
        help="when to give up; default: 240",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--keep", action="store_true", help="keep the logs, and the database if SQLite"
    )
    return parser


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Turn the first signal into an exception, so that everything is stopped on the way out."""

    def stop(signum: int, _: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(signum)

    before = {each: signal.signal(each, stop) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _fail(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
