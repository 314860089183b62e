"""Run Celery's own suites with ``celery.Task`` and with ``IdempotentTask``, and compare test by test.

::

    python -m tests.upstream                           # t/unit: about five minutes
    python -m tests.upstream t/unit/tasks              # a part of it
    python -m tests.upstream --integration             # with a real worker; needs a Redis server: about 15 minutes
    python -m tests.upstream --integration --broker rabbitmq
    python -m tests.upstream --integration --apart     # results and records in two databases

Ends with 1 if a test differs that ``known_differences.txt`` does not list (or lists, and it does not differ), with 2 if
the comparison cannot be made here. More tests run where ``requirements.txt`` is installed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.upstream.servers import BROKERS, servers
from tests.upstream.suite import (
    INTEGRATION,
    QUICK,
    Comparison,
    NotPossible,
    compare,
    known_differences,
    table,
)


def main(arguments: list[str] | None = None) -> int:
    started = time.monotonic()
    # As an exception, so that servers, virtual hosts and processes are cleared away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    parser = argparse.ArgumentParser(
        prog="python -m tests.upstream",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="the unit tests (the default)")
    which.add_argument("--integration", action="store_true", help="tests with a real worker")
    parser.add_argument("--broker", choices=BROKERS, default="redis", help="for --integration")
    parser.add_argument("--apart", action="store_true", help="leave results to Celery's own writes")
    parser.add_argument("--logs", type=Path, help="a directory for what the two runs print")
    parser.add_argument("tests", nargs="*", help="files or tests instead of all of them")
    options = parser.parse_args(arguments)
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    try:
        result = _compare(options)
    except (NotPossible, pytest.skip.Exception, pytest.fail.Exception) as error:
        _say(f"The comparison cannot be made here: {error}")
        return 2
    for line in table(result):
        _say(line)
    _say(f"{time.monotonic() - started:.0f} s")
    return 0 if result.agrees else 1


def _compare(options: argparse.Namespace) -> Comparison:
    if not options.integration:
        return compare(options.tests or QUICK, known_differences(), keep=options.logs)
    with servers(options.broker, apart=options.apart) as environments:
        tests = options.tests or INTEGRATION
        known = known_differences(broker=options.broker)
        return compare(tests, known, servers=environments, keep=options.logs)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
