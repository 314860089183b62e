"""Does one thing so many times, to be counted: ``instructions_child (verb|publish) NAME PORT TIMES PREPARED``."""

from __future__ import annotations

import sys
from collections.abc import Callable


def main(kind: str, name: str, port: int, times: int, prepared: int) -> None:
    """Prepare as much in every run, so that two runs differ by ``times`` alone."""
    calls = (_verbs if kind == "verb" else _publications)(name, port, prepared)
    for call in calls[:times]:
        call()


def _verbs(name: str, port: int, prepared: int) -> list[Callable[[], object]]:
    from benchmarks.operations import Operations

    return Operations(f"redis://127.0.0.1:{port}/0").prepare(name, prepared)


def _publications(name: str, port: int, prepared: int) -> list[Callable[[], object]]:
    from benchmarks.tasks import PAYLOAD, make_app

    app = make_app(broker=f"redis://127.0.0.1:{port}/0", backend=f"redis://127.0.0.1:{port}/1")
    args = (17, PAYLOAD) if name.endswith("webhook") else (17,)
    return [lambda: app.tasks[name].apply_async(args)] * prepared


if __name__ == "__main__":
    what, which, *numbers = sys.argv[1:]
    main(what, which, *map(int, numbers))
