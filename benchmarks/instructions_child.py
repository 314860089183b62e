"""Does some things so many times, to be counted: ``instructions_child (verb|publish|http) PORT FEW MORE NAMES…``.

A process is forked for each count when all is imported, so that valgrind goes through the imports once. Prints name,
times and process id of each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

Prepare = Callable[[str, int], list[Callable[[], object]]]


def main(kind: str, port: int, few: int, more: int, names: Sequence[str]) -> None:
    """Prepare as much in every process, so that the two of a name differ by ``more`` alone."""
    prepare = {"verb": _verbs, "publish": _publications, "http": _requests}[kind](port)
    for name in names:
        for times in (few, few + more):
            pid = os.fork()
            if not pid:
                for call in prepare(name, few + more)[:times]:
                    call()
                os._exit(0)
            if os.waitpid(pid, 0)[1]:
                sys.exit(f"{name} failed")
            print(json.dumps([name, times, pid]), flush=True)


def _verbs(port: int) -> Prepare:
    from benchmarks.operations import redis_operations

    def prepare(name: str, count: int) -> list[Callable[[], object]]:
        operation = redis_operations(f"redis://127.0.0.1:{port}/0")[name]
        return [operation() for _ in range(count)]

    return prepare


def _publications(port: int) -> Prepare:
    from benchmarks.tasks import PAYLOAD, make_app

    app = make_app(broker=f"redis://127.0.0.1:{port}/0", backend=f"redis://127.0.0.1:{port}/1")

    def prepare(name: str, count: int) -> list[Callable[[], object]]:
        args = (17, PAYLOAD) if name.endswith("webhook") else (17,)
        return [lambda: app.tasks[name].apply_async(args)] * count

    return prepare


def _requests(port: int) -> Prepare:
    from benchmarks.doors import prepare_requests

    kinds = prepare_requests(f"redis://127.0.0.1:{port}/0")
    return lambda name, count: [kinds[name]() for _ in range(count)]


if __name__ == "__main__":
    kind, port, few, more, *names = sys.argv[1:]
    main(kind, int(port), int(few), int(more), names)
