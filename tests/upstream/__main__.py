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
from pathlib import Path

import pytest

from tests.upstream.servers import servers
from tests.upstream.suite import INTEGRATION, QUICK, NotPossible, compare, known_differences


def main() -> int:
    # As an exception, so that servers, virtual hosts and processes are cleared away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    parser = argparse.ArgumentParser(
        prog="python -m tests.upstream",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--integration", action="store_true", help="tests with a real worker")
    parser.add_argument("--broker", choices=("redis", "rabbitmq"), default="redis")
    parser.add_argument("--apart", action="store_true", help="leave results to Celery's own writes")
    parser.add_argument("--logs", type=Path, help="a directory for what the two runs print")
    parser.add_argument("tests", nargs="*", help="files or tests instead of all of them")
    given = parser.parse_args()
    if given.logs is not None:
        given.logs.mkdir(parents=True, exist_ok=True)
    try:
        if given.integration:
            with servers(given.broker, apart=given.apart) as environments:
                known = known_differences(broker=given.broker)
                tests = given.tests or INTEGRATION
                result = compare(tests, known, servers=environments, keep=given.logs)
        else:
            result = compare(given.tests or QUICK, known_differences(), keep=given.logs)
    except (NotPossible, pytest.skip.Exception, pytest.fail.Exception) as error:
        sys.stdout.write(f"The comparison cannot be made here: {error}\n")
        return 2
    sys.stdout.write(f"{result}\n")
    return 0 if result.agrees else 1


if __name__ == "__main__":
    sys.exit(main())
